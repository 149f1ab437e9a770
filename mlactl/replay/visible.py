"""Which keys each row of a call sees, and where they are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlactl.kernels.mla.selection import SELECTION_TOKENS

if TYPE_CHECKING:
    import torch

    from mlactl.replay.capture import Capture
    from mlactl.replay.header import SparsePolicy


def visible_lengths(capture: Capture) -> list[int]:
    """Keys each row of a call over pages sees, before a window: its own length where the call gave one, else right-aligned in its request."""
    lengths = [int(value) for value in capture.tensors["cache_seqlens"].tolist()]
    own = capture.tensors.get("query_cache_seqlens")
    ends = capture.boundaries
    visible = []
    for request, length in enumerate(lengths):
        count = ends[request + 1] - ends[request]
        for position in range(count):
            asked = int(own[ends[request] + position]) if own is not None else length - count + position + 1
            visible.append(max(0, min(asked, length)))
    return visible


def first_visible(visible: int, window: int | None) -> int:
    """The first key a row with `visible` keys sees."""
    return max(0, visible - window) if window is not None else 0


@dataclass(frozen=True, slots=True)
class Seen:
    """The keys one row sees, in order: `pages` and `offsets` (int64 [n]) say where each is stored, `positions` its place in the
    request's order (its column of the indices where slots were selected)."""

    row: int
    request: int
    pages: torch.Tensor
    offsets: torch.Tensor
    positions: torch.Tensor


def seen(capture: Capture, row: int, *, shift: int = 0, window_shift: int = 0) -> Seen | None:
    """The keys of one row; `shift` asks what it would see with a visible length that much longer, `window_shift` with such a window.

    None where a shifted length reaches past what is stored.
    """
    return _seen_dense(capture, row, shift, window_shift) if capture.dense else _seen_selected(capture, row, shift)


def _seen_dense(capture: Capture, row: int, shift: int, window_shift: int) -> Seen | None:
    import torch

    request, size, window = capture.requests[row], capture.call.page_size, capture.call.window
    visible = visible_lengths(capture)[row] + shift
    table = capture.tensors["page_table"][request]
    if visible < 0 or visible > len(table) * size:
        return None
    positions = torch.arange(first_visible(visible, None if window is None else max(1, window + window_shift)), visible)
    if capture.call.sparse is not None:
        positions = positions[_selected_chunks(capture.call.sparse, positions, visible)]
    pages = table[positions // size].long()
    if bool((pages < 0).any()):
        return None
    return Seen(row, request, pages, positions % size, positions)


def _selected_chunks(sparse: SparsePolicy, positions: torch.Tensor, visible: int) -> torch.Tensor:
    """Which positions lie in the chunks that a row attends."""
    import torch

    return torch.isin(positions // SELECTION_TOKENS, torch.tensor(sparse.policy().chunks(visible, sparse.rows), dtype=torch.long))


def _seen_selected(capture: Capture, row: int, shift: int) -> Seen | None:
    size = capture.call.page_size
    count = int(capture.tensors["lengths"][row]) + shift
    slots = capture.tensors["indices"][row]
    if not 0 <= count <= len(slots):
        return None
    live = slots[:count].long()
    columns = (live >= 0).nonzero()[:, 0]
    return Seen(row, row, live[columns] // size, live[columns] % size, columns)
