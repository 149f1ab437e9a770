"""The rows and heads of a call that were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlactl.errors import UsageError

if TYPE_CHECKING:
    import torch


def selected(what: str, asked: tuple[int, ...] | None, extent: int) -> tuple[int, ...]:
    """The indices asked for, all of them for None; raises UsageError for one that is not there."""
    if asked is None:
        return tuple(range(extent))
    for index in asked:
        if not 0 <= index < extent:
            raise UsageError(f"{what} {index} was asked for, the capture has {what}s 0 to {extent - 1}", hint=f"--{what}s 0-{extent - 1}")
    return asked


def cut(tensor: torch.Tensor | None, rows: Sequence[int], heads: Sequence[int] | None) -> torch.Tensor | None:
    """Those rows and heads of a result [T, H, ...]; `heads` None keeps them all."""
    if tensor is None:
        return None
    kept = tensor if len(rows) == len(tensor) else tensor[list(rows)]
    return only_heads(kept, heads)


def only_heads(tensor: torch.Tensor, heads: Sequence[int] | None) -> torch.Tensor:
    """Those heads of a result whose rows are cut already."""
    return tensor if heads is None else tensor[:, list(heads)]
