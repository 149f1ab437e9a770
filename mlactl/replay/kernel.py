"""Runs a captured call on the kernel from the cache, where a GPU of a supported arch is present."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from mlactl.replay.capture import Capture


@dataclass(frozen=True, slots=True)
class KernelResult:
    """What the kernel gave (natural LSE), or the reason why it did not run; `determinism` compares repeated runs."""

    output: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    reason: str | None = None
    determinism: str | None = None

    @property
    def result(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Output and LSE."""
        return self.output, self.lse


def run_kernel(capture: Capture, *, cache_dir: str | None = None, repeats: int = 3) -> KernelResult:
    """Runs the call `repeats` times; without a GPU, or where the kernel of it is not built, says why it did not."""
    import torch

    if not torch.cuda.is_available():
        return KernelResult(reason="no GPU is here to run the kernel")
    return KernelResult(reason="not built yet")
