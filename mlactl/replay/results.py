"""Comparing the results of attention calls: which tolerance, what the coordinates are called, which base an LSE is in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mlactl.printable import counted
from mlactl.replay import tolerances
from mlactl.replay.compare import Axes, Comparison, compare

if TYPE_CHECKING:
    import torch

    from mlactl.replay.capture import Capture


LSE_KEEPS = "the tolerance on the command line is the output's, the LSE keeps its own"


@dataclass(frozen=True, slots=True)
class Strictness:
    """Tolerances instead of the table's, and whether NaN against NaN passes."""

    atol: float | None = None
    rtol: float | None = None
    row: float | None = None
    allow_nan: bool = False

    def typed(self) -> bool:
        """Whether any tolerance was typed."""
        return any(value is not None for value in (self.atol, self.rtol, self.row))

    def arguments(self) -> list[str]:
        """What was typed, as it is typed again."""
        typed = (("--atol", self.atol), ("--rtol", self.rtol), ("--row-tol", self.row))
        return [f"{option} {value!r}" for option, value in typed if value is not None] + ["--allow-nan"] * self.allow_nan

    def require(self) -> None:
        """Raises UsageError for a tolerance that is none, before anything was read."""
        tolerances.require(atol=self.atol, rtol=self.rtol, row=self.row)


def natural_lse(lse: torch.Tensor, base: str) -> torch.Tensor:
    """A log-sum-exp as natural logarithm, from the base it was declared in."""
    return lse if base == "natural" else lse.float() * math.log(2)


def sizes(capture: Capture) -> str:
    """`1 request, 4 rows, 2 heads`."""
    return f"{counted(len(capture.boundaries) - 1, 'request')}, {counted(capture.rows, 'row')}, {counted(capture.heads, 'head')}"


def call_text(capture: Capture) -> str:
    """What kind of call it was and how large, as reports say it."""
    return f"{capture.call.mode}, {sizes(capture)}, {capture.call.record} records"


def call_axes(capture: Capture, rows: Sequence[int] | None = None, heads: Sequence[int] | None = None) -> Axes:
    """Names of an output's coordinates: request, row, head, dim; `rows` and `heads` are those a slice kept, in order."""
    requests = capture.requests
    kept = tuple(rows) if rows is not None else tuple(range(capture.rows))
    origin = (kept if rows is not None else None, tuple(heads) if heads is not None else None)
    return Axes(("row", "head", "dim"), "request", tuple(requests[row] for row in kept), origin)


def output_tolerance(record: str, mode: str, options: Strictness, *, merged: bool = False) -> tolerances.Tolerance:
    """What an output is held to: the table's tolerance, or what a person typed."""
    base = tolerances.for_merged_output() if merged else tolerances.for_output(record, mode)
    return tolerances.overridden(base, atol=options.atol, rtol=options.rtol, row=options.row)


def result_comparisons(
    record: str,
    mode: str,
    output: tuple[torch.Tensor, torch.Tensor] | None,
    lse: tuple[torch.Tensor, torch.Tensor] | None,
    axes: Axes,
    options: Strictness,
    *,
    merged: bool = False,
) -> tuple[Comparison, ...]:
    """Output and LSE pairs (judged, right) against the table's tolerances, LSE apart; both LSEs natural."""
    found = []
    if output is not None:
        tolerance = output_tolerance(record, mode, options, merged=merged)
        found.append(compare(output[0], output[1], tolerance, name="output", axes=axes, allow_nan=options.allow_nan))
    if lse is not None:
        # A tolerance typed for the output says nothing about LSE.
        lse_axes = Axes(axes.names[:2], axes.group_name, axes.groups, axes.origin[:2])
        item = compare(lse[0], lse[1], tolerances.for_lse(merged=merged), name="lse", axes=lse_axes, allow_nan=options.allow_nan)
        typed = options.typed() and not item.matches
        found.append(replace(item, notes=(*item.notes, LSE_KEEPS)) if typed else item)
    return tuple(found)
