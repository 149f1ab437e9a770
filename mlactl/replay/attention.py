"""Attention of captured rows, opened up: not only the output, but each key's weight in it.

Finding a fault needs what a reference does not return: how much every key, page or split gave. Same mathematics as the
kernels' reference, row by row and in the dtype asked for; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mlactl.replay.records import decode
from mlactl.replay.visible import Seen, seen

if TYPE_CHECKING:
    import torch

    from mlactl.replay.capture import Capture


@dataclass(frozen=True, slots=True)
class RowView:
    """One query row: `keys` [n, latent + 64] and `values` [n, latent] it sees, `weights` [H, n] (each head's sum to 1), natural `lse` [H]
    and `output` [H, latent]."""

    seen: Seen
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    weights: torch.Tensor
    lse: torch.Tensor
    output: torch.Tensor


Select = Callable[[Seen], "Seen | None"]


def views(
    capture: Capture,
    rows: Iterable[int],
    dtype: torch.dtype,
    *,
    latent_scale: float | None = None,
    kv_scale: float | None = None,
    shift: int = 0,
    window_shift: int = 0,
    keep: Select | None = None,
) -> Iterator[RowView | None]:
    """The views of some rows; None for a row whose shifted length cannot be read.

    The keyword arguments say what to do differently from the capture: another scale, a visible length or window off by
    `shift`, only the keys that `keep` leaves.
    """
    call = capture.call
    scale = call.latent_scale if latent_scale is None else latent_scale
    tensor_scale = call.kv_scale if kv_scale is None else kv_scale
    for row in rows:
        found = seen(capture, row, shift=shift, window_shift=window_shift)
        if found is not None and keep is not None:
            found = keep(found)
        if found is None:
            yield None
            continue
        records = capture.tensors["kv_cache"][found.pages, found.offsets]
        keys = decode(records, capture.layout, latent_scale=scale, kv_scale=tensor_scale, dtype=dtype)
        yield view(found, capture.tensors["q"][row].to(dtype) * call.q_scale, keys, capture.values, call.sm_scale)


def view(found: Seen, query: torch.Tensor, keys: torch.Tensor, values: int, sm_scale: float) -> RowView:
    """Attention of one row over its decoded keys; a row that sees nothing gives 0 and -inf."""
    import torch

    latent = keys[:, :values]
    logits = query @ keys.T * sm_scale
    lse = torch.logsumexp(logits, dim=-1)  # -inf for no keys
    weights = torch.exp(logits - lse[:, None]) if len(keys) else logits
    return RowView(found, query, keys, latent, weights, lse, weights @ latent)


def without(positions: range) -> Select:
    """Leaves out the keys at those positions of the row's order."""

    def select(found: Seen) -> Seen:
        keep = (found.positions < positions.start) | (found.positions >= positions.stop)
        return replace(found, pages=found.pages[keep], offsets=found.offsets[keep], positions=found.positions[keep])

    return select


def attend(capture: Capture, rows: Iterable[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [rows, H, latent] and natural LSE [rows, H] of some rows."""
    import torch

    found = [item for item in views(capture, rows, dtype) if item is not None]
    return torch.stack([item.output for item in found]), torch.stack([item.lse for item in found])
