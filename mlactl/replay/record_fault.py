"""Finds the one KV record that a kernel read as something else than the capture holds.

Write out and lse for the reference of a row and head, out' and lse' for what was captured, z = exp(lse' - lse). If only
the record of one key changed, from value v with weight w to v' with weight w', then

    E = z * out' - out = w' * v' - w * v        and        e = z - 1 = w' - w,

so E + w * v = (e + w) * v' in every row and head that saw the key, and E = 0, e = 0 in those that did not. v' is one
vector for all of them: 512 unknowns against 512 equations a row and head. The key for which the least is left over, far
less than for any other, is the one; what it predicts is then held against the captured output like any explanation.

One row and head alone has as many equations as there are unknowns: every key fits. So the explanation must change the
output of two of them at least by more than the tolerance, or it was not tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mlactl.printable import shell_word
from mlactl.replay import tolerances
from mlactl.replay.attention import RowView, views
from mlactl.replay.gates import output_factors
from mlactl.replay.report import Hypothesis

if TYPE_CHECKING:
    import torch

    from mlactl.replay.bisect import Evidence

DISTINCT = 0.5
"""The best key's remainder must be under this share of the next one's."""

GONE = 1e-3

PAIRS = 2
"""(row, head) pairs that the explanation must change by more than the tolerance: one is fitted by any key."""


def candidates(evidence: Evidence) -> Iterator[Hypothesis]:
    """The best key, as an explanation; nothing without an LSE, or where the captured result is not finite."""
    import torch

    if evidence.lse is None or not bool(torch.isfinite(evidence.output).all() & torch.isfinite(evidence.lse).all()):
        return
    made = [item for item in views(evidence.capture, evidence.rows, torch.float64) if item is not None]
    if len(made) < len(evidence.rows):
        return
    slots, values, weights = _union(evidence, made)
    if len(slots) < 2:
        return
    z = torch.exp(evidence.lse - evidence.reference_lse).flatten()
    reference = evidence.reference.flatten(0, 1)
    moved = z[:, None] * evidence.output.flatten(0, 1) - reference
    changed = (z - 1)[:, None] + weights
    left, solved = _solve(moved, changed, weights, values)
    order = left.argsort()
    best, second = int(order[0]), int(order[1])
    new = solved(best)
    predicted = (reference - weights[:, best : best + 1] * values[best] + changed[:, best : best + 1] * new) / z[:, None]
    predicted = predicted.reshape(evidence.output.shape)
    factor, lse_factor = evidence.factor(predicted, evidence.lse)
    call = evidence.capture.call
    pairs = int((output_factors(predicted, evidence.reference, tolerances.for_output(call.record, call.mode)) > 1).sum())
    if factor <= 1 and pairs < PAIRS:
        yield Hypothesis("altered record", _untested(evidence, pairs), (), reproduces=False, factor=factor, lse_factor=lse_factor, tested=False)
        return
    distinct = float(left[best]) <= DISTINCT * float(left[second])
    yield _hypothesis(evidence, int(slots[best]), values[best], new, changed[:, best], weights[:, best], factor, lse_factor, distinct)


def _untested(evidence: Evidence, pairs: int) -> str:
    why = f"{'one row and head' if pairs else 'an LSE alone'} cannot tell which record"
    if not evidence.restricted:
        return f"{why}, and no other row and head shows it"
    capture = evidence.capture
    return f"{why}; with all rows and heads: mlactl replay {shell_word(capture.path if capture.path is not None else capture.name)} --bisect"


def _union(evidence: Evidence, made: list[RowView]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slots any failing row saw [U], their values [U, latent], and the weight of each by (row, head) [N, U]; a slot seen twice counts twice."""
    import torch

    size, heads = evidence.capture.call.page_size, list(evidence.heads)
    ids = [item.seen.pages * size + item.seen.offsets for item in made]
    slots = torch.unique(torch.cat(ids))
    values = torch.zeros(len(slots), evidence.capture.values, dtype=torch.float64)
    weights = torch.zeros(len(made) * len(heads), len(slots), dtype=torch.float64)
    for index, (item, own) in enumerate(zip(made, ids, strict=True)):
        where = torch.searchsorted(slots, own)
        values[where] = item.values
        weights[index * len(heads) : (index + 1) * len(heads)].index_add_(1, where, item.weights[heads])
    return slots, values, weights


def _solve(moved: torch.Tensor, changed: torch.Tensor, weights: torch.Tensor, values: torch.Tensor):  # type: ignore[no-untyped-def]  # noqa: ANN202
    """What is left over for each slot after its best v', and a function that gives that v'. Least squares in closed form."""
    cross = moved @ values.T
    total = (moved**2).sum() + 2 * (weights * cross).sum(0) + (values**2).sum(1) * (weights**2).sum(0)
    weighted = changed.T @ moved + (changed * weights).sum(0)[:, None] * values
    energy = (changed**2).sum(0).clamp_min(1e-30)
    left = (total - (weighted**2).sum(1) / energy).clamp_min(0.0)
    return left, lambda slot: weighted[slot] / energy[slot]


def _hypothesis(
    evidence: Evidence,
    slot: int,
    old: torch.Tensor,
    new: torch.Tensor,
    changed: torch.Tensor,
    weights: torch.Tensor,
    factor: float,
    lse_factor: float | None,
    distinct: bool,
) -> Hypothesis:
    import torch

    capture, size = evidence.capture, evidence.capture.call.page_size
    page, offset = slot // size, slot % size
    original = int(capture.tensors["page_ids"][page])
    if float(changed.abs().max()) <= GONE * float(weights.max()):
        how = "was left out"
    else:
        alike = float(torch.nn.functional.cosine_similarity(old, new, dim=0))
        off = int(((new - old).abs() > 0.1 * old.abs().max()).sum())
        how = f"was read with {off} of {len(old)} latent elements changed (cosine {alike:.2f} to the record in the capture)"
    coordinates: tuple[tuple[str, int | float], ...] = (("page", original), ("stored_page", page), ("offset", offset))
    text = f"the record at offset {offset} of page {original} {how}"
    return Hypothesis("altered record", text, coordinates, distinct and max(factor, lse_factor or 0.0) <= 1, factor, lse_factor)
