"""MLA attention kernels for SM120 GPUs and the command line around them. `mlactl.capture(folder)` records calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlactl.replay.recorder import capture

__all__ = ["capture"]


def __getattr__(name: str) -> Any:
    # On demand: `import mlactl` alone must stay as cheap as an empty package.
    if name == "capture":
        from mlactl.replay.recorder import capture

        return capture
    raise AttributeError(f"module 'mlactl' has no attribute {name!r}")
