"""Finds a run of keys that is missing from an output, from how much of the softmax's sum is gone.

With every key present the LSE is log(sum); with a run of keys missing it is lower by log(1 - their weight). The missing
weight of each row and head is thus known exactly, and only one run of chunks has that weight in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from mlactl.replay.attention import Select, views
from mlactl.replay.visible import Seen

if TYPE_CHECKING:
    import torch

    from mlactl.replay.bisect import Evidence

GRAIN_TOKENS = 16
"""Splits begin and end on chunks of this many tokens."""

MAX_SPLITS = 128
TRIED = 3


def candidates(evidence: Evidence) -> Iterator[Mapping[int, range]]:
    """Runs of positions by request, the best fit of each request first; one request at least."""
    found = {request: _runs(evidence, request) for request in dict.fromkeys(evidence.capture.requests[row] for row in evidence.rows)}
    for attempt in range(TRIED):
        picked = {request: runs[min(attempt, len(runs) - 1)] for request, runs in found.items() if runs}
        if len(picked) < len(found):
            return
        yield picked


def _runs(evidence: Evidence, request: int) -> list[range]:
    import torch

    places = [place for place, row in enumerate(evidence.rows) if evidence.capture.requests[row] == request]
    made = [item for item in views(evidence.capture, [evidence.rows[place] for place in places], torch.float64) if item is not None]
    length = max((int(item.seen.positions[-1]) + 1 for item in made if len(item.seen.positions)), default=0)
    grains = -(-length // GRAIN_TOKENS)
    if grains < 2:
        return []
    heads = list(evidence.heads)
    mass = torch.zeros(len(made) * len(heads), grains, dtype=torch.float64)
    for index, item in enumerate(made):
        block = mass[index * len(heads) : (index + 1) * len(heads)]
        block.index_add_(1, item.seen.positions // GRAIN_TOKENS, item.weights[heads])
    if evidence.lse is None:
        return _even(length)
    missing = (1 - torch.exp(evidence.lse[places] - evidence.reference_lse[places])).flatten()
    return _best(mass, missing, length)


def _best(mass: torch.Tensor, missing: torch.Tensor, length: int) -> list[range]:
    """The runs whose weight is closest to what is missing, in least squares over rows and heads."""
    import torch

    below = torch.cat([torch.zeros_like(mass[:, :1]), mass.cumsum(1)], dim=1)
    grains = mass.shape[1]
    scores: list[tuple[float, int, int]] = []
    for start in range(grains):
        residual = ((below[:, start + 1 :] - below[:, start : start + 1] - missing[:, None]) ** 2).sum(0)
        value, end = residual.min(0)
        scores.append((float(value), start, start + 1 + int(end)))
    scores.sort()
    whole = [range(start * GRAIN_TOKENS, min(end * GRAIN_TOKENS, length)) for _, start, end in scores[: TRIED + 1]]
    return [run for run in whole if len(run) < length][:TRIED]


def _even(length: int) -> list[range]:
    """Without an LSE: the splits of a few even cuts."""
    return [
        range(split * size, min(length, (split + 1) * size)) for splits in (2, 4, 8) for size in [-(-length // splits)] for split in range(splits)
    ]


def by_request(found: Mapping[int, range], evidence: Evidence) -> Select:
    """Leaves out each request's run."""

    def select(item: Seen) -> Seen:
        run = found.get(evidence.capture.requests[item.row])
        if run is None:
            return item
        keep = (item.positions < run.start) | (item.positions >= run.stop)
        return replace(item, pages=item.pages[keep], offsets=item.offsets[keep], positions=item.positions[keep])

    return select


def split_name(evidence: Evidence, request: int, run: range) -> tuple[int, int] | None:
    """(split, splits) whose bounds the run has: the number the call declares, else the smallest even cut with these bounds."""
    from mlactl.replay.visible import visible_lengths

    capture = evidence.capture
    rows = [row for row in evidence.rows if capture.requests[row] == request]
    length = max(visible_lengths(capture)[row] for row in rows) if capture.dense else max(int(capture.tensors["lengths"][row]) for row in rows)
    declared = capture.call.splits
    for splits in [declared] if declared is not None and declared > 0 else range(2, MAX_SPLITS + 1):
        for grain in (1, GRAIN_TOKENS, 64):
            size = math.ceil(math.ceil(length / grain) / splits) * grain
            if run.start % size == 0 and run.stop in (run.start + size, length) and len(run) <= size:
                return run.start // size, splits
    return None
