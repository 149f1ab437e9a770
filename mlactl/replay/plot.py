"""Pictures of an error: by head and row, of output and LSE, and against the magnitude of what was expected. matplotlib is an extra.

What fails is drawn by the rules and tolerances of the comparison itself, and is never averaged or sampled away.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlactl.errors import CannotRun, UsageError
from mlactl.printable import plain
from mlactl.replay import capture as captures
from mlactl.replay import tolerances
from mlactl.replay.gates import lse_factors, output_factors
from mlactl.replay.results import output_tolerance

if TYPE_CHECKING:
    import torch

    from mlactl.replay.runner import ReplayOptions, Results

SUFFIX = ".png"
MAX_POINTS = 20_000
MAX_CELLS = 128
"""Rows and heads drawn each way: about four pixels a cell, so that one wrong row of thousands can be seen."""

MAX_MARKS = 24
ROWS_AT_ONCE = 64
DECADES = 3
"""Colours reach from a thousandth of the limit to a thousand times it."""

_BEYOND = "black: NaN, infinity, or zero was expected"


@dataclass(frozen=True, slots=True)
class Picture:
    """What is drawn: the `judged` result (kernel or captured) that is furthest off, restricted to the rows and heads asked for.

    `output` and `lse` are fp64 factors [rows, heads] over what is allowed, over 1 fails; None where there is none to judge.
    """

    judged: str
    values: torch.Tensor | None
    output: torch.Tensor | None
    lse: torch.Tensor | None

    def worst(self) -> float:
        """The largest factor of either."""
        return max(float(part.max()) for part in (self.output, self.lse) if part is not None)


def require(target: Path) -> None:
    """Refuses before any work what could not be drawn in the end; raises UsageError, CannotRun."""
    if target.suffix.lower() != SUFFIX:
        raise UsageError(f"--plot {target}: expected a name that ends in {SUFFIX}", hint=f"--plot {target.with_suffix(SUFFIX)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise CannotRun("--plot needs matplotlib, which is not installed", hint="pip install 'mlactl[plot]'")


def draw(target: Path, path: Path, options: ReplayOptions) -> None:
    """Draws one capture: of the kernel's and the captured result, the one that is further from the reference. Raises CannotRun."""
    from mlactl.replay.runner import compute

    results = compute(captures.read(path), options)
    picture = judge(results, options)
    figure = _figure(results, picture, options)
    try:
        figure.savefig(target)
    except OSError as error:
        raise CannotRun(f"{target} cannot be written: {error.strerror or error}", hint=f"ls -ld {target.parent}") from error


def judge(results: Results, options: ReplayOptions) -> Picture:
    """The factors of the result that is furthest off; raises CannotRun where there is none."""
    call, strict = results.capture.call, options.strictness
    tolerance = output_tolerance(call.record, call.mode, strict)
    found = []
    for name, (output, lse) in (("kernel", results.kernel.result), ("captured", results.captured)):
        if output is None and lse is None:
            continue
        far = None if output is None else _factors(output, results.reference[0], tolerance, allow_nan=strict.allow_nan)
        lse_far = None if lse is None else lse_factors(lse, results.reference[1], tolerances.for_lse(), allow_nan=strict.allow_nan)
        found.append(Picture(name, output, far, lse_far))
    if not found:
        raise CannotRun(f"{results.capture.name}: there is no output to draw", hint="replay on a card of the kernel's arch")
    return max(found, key=Picture.worst)


def _factors(output: torch.Tensor, reference: torch.Tensor, tolerance: tolerances.Tolerance, *, allow_nan: bool) -> torch.Tensor:
    """Some rows at a time: the factors of all at once take several times the output in fp64."""
    import torch

    starts = range(0, len(output), ROWS_AT_ONCE)
    parts = ((output[start : start + ROWS_AT_ONCE], reference[start : start + ROWS_AT_ONCE]) for start in starts)
    return torch.cat([output_factors(ours, theirs, tolerance, allow_nan=allow_nan) for ours, theirs in parts])


def _figure(results: Results, picture: Picture, options: ReplayOptions) -> Any:
    from matplotlib.figure import Figure

    call = results.capture.call
    maps = [(name, part) for name, part in (("Output", picture.output), ("LSE", picture.lse)) if part is not None]
    panels = len(maps) + (picture.values is not None)
    figure = Figure(figsize=(1 + 5.2 * panels, 6.2), dpi=120, layout="constrained")
    wrong = [name.replace("Output", "output") for name, part in maps if bool((part > 1).any())]
    verdict = f"{' and '.join(wrong)} wrong" if wrong else "right"
    title = f"{plain(results.capture.name)}: {picture.judged} result against the reference: {verdict} ({call.record} records, {call.mode})"
    figure.suptitle(title, fontsize=11, parse_math=False)
    places = figure.subplots(1, panels, squeeze=False)[0]
    heads = list(options.heads) if options.heads is not None else list(range(results.capture.heads))
    for axes, (name, part) in zip(places, maps, strict=False):
        _by_head_and_row(figure, axes, name, part, results, heads)
    if picture.values is not None and picture.output is not None:
        tolerance = output_tolerance(call.record, call.mode, options.strictness)
        _by_magnitude(places[-1], picture.values, results.reference[0], picture.output > 1, tolerance)
    return figure


def cells(factors: torch.Tensor, limit: int = MAX_CELLS) -> torch.Tensor:
    """[rows, heads] as at most `limit` x `limit`, each cell the largest factor of the rows and heads it stands for."""
    import torch

    for axis in (0, 1):
        count = factors.shape[axis]
        if count > limit:
            edges = [place * count // limit for place in range(limit + 1)]
            parts = (factors.narrow(axis, first, last - first).amax(axis, keepdim=True) for first, last in pairwise(edges))
            factors = torch.cat(list(parts), axis)
    return factors


def _by_head_and_row(figure: Any, axes: Any, name: str, factors: torch.Tensor, results: Results, heads: Sequence[int]) -> None:
    """The factor of each row and head: blue passes, orange to red fails."""
    import torch
    from matplotlib.ticker import FuncFormatter

    shown = cells(factors)
    # A step at the limit: what just fails must not look like what just passes.
    level = torch.log10(shown.clamp(10.0**-DECADES, 10.0**DECADES))
    level = torch.where(shown > 1, level.clamp_min(1e-3), level.clamp_max(-1e-3)).masked_fill(~torch.isfinite(shown), math.nan)
    drawn = axes.imshow(level.numpy(), aspect="auto", interpolation="nearest", cmap=_colours(), vmin=-DECADES, vmax=DECADES)
    bar = figure.colorbar(drawn, ax=axes, extend="both", ticks=range(-DECADES, DECADES + 1))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{10.0**value:g}"))
    bar.set_label("error / allowed, by every rule: orange and red (over 1) fail" + (f"\n{_BEYOND}" if not bool(torch.isfinite(shown).all()) else ""))
    axes.set_title(f"{name} by head and row\n{_worst(factors, results.rows, heads)}", fontsize=10)
    axes.set_xlabel("head" if shown.shape[1] == len(heads) else f"head (a cell is the worst of up to {-(-len(heads) // shown.shape[1])})")
    per_cell = -(-len(results.rows) // len(shown))
    parted = _part_requests(axes, results, len(shown))
    remark = f" (a cell is the worst of up to {per_cell})" if per_cell > 1 else ""
    axes.set_ylabel(f"query row{remark}{', lines part requests' if parted else ''}")
    _ticks(axes.xaxis, heads, shown.shape[1], 12)
    _ticks(axes.yaxis, results.rows, len(shown), 16)
    failing = (shown > 1).any(1).nonzero()[:, 0].tolist()
    if len(failing) <= MAX_MARKS:
        (marks,) = axes.plot(
            [shown.shape[1] - 0.5] * len(failing), failing, "<", markersize=7, markerfacecolor="red", markeredgecolor="black", clip_on=False
        )
        marks.set_in_layout(False)
    axes.set_xlim(-0.5, shown.shape[1] - 0.5)


def _worst(factors: torch.Tensor, rows: Sequence[int], heads: Sequence[int]) -> str:
    """How many rows and heads fail, and the worst of them in words."""
    wrong = int((factors > 1).sum())
    place = int(factors.flatten().argmax())
    row, head = rows[place // len(heads)], heads[place % len(heads)]
    largest = float(factors.max())
    far = f"{largest:.3g}x the allowed" if math.isfinite(largest) else "beyond any tolerance"
    return f"{wrong:,} of {factors.numel():,} fail, worst: row {row}, head {head}, {far}" if wrong else f"all {factors.numel():,} pass, worst {far}"


def _colours() -> Any:
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    passes = [colormaps["Blues"](0.08 + 0.5 * step / 127) for step in range(128)]
    fails = [colormaps["YlOrRd"](0.45 + 0.55 * step / 127) for step in range(128)]
    return ListedColormap(passes + fails).with_extremes(bad="black")


def _ticks(axis: Any, names: Sequence[int], count: int, most: int) -> None:
    """Whole numbers of the capture at cells' centres: also for one head, for a selection, and where a cell stands for several."""
    step = max(1, -(-count // most))
    places = list(range(0, count, step))
    axis.set_ticks(places, [str(names[place * len(names) // count]) for place in places])


def _part_requests(axes: Any, results: Results, count: int) -> bool:
    """Lines between requests, where there are few enough to be told apart."""
    if not results.capture.dense:
        return False
    requests = results.capture.requests
    owners = [requests[row] for row in results.rows]
    ends = [place for place in range(1, len(owners)) if owners[place] != owners[place - 1]]
    if len(ends) * 3 > count:
        return False
    for end in ends:
        axes.axhline(end * count / len(owners) - 0.5, color="black", linewidth=0.8)
    return bool(ends)


def _by_magnitude(axes: Any, actual: torch.Tensor, expected: torch.Tensor, wrong: torch.Tensor, tolerance: tolerances.Tolerance) -> None:
    """Every element's error over its magnitude, those of failing rows apart; `wrong` is [rows, heads]."""
    import torch

    error, magnitude = (actual.double() - expected.double()).abs(), expected.double().abs()
    axes.set_title("Output error against magnitude", fontsize=10)
    axes.set_xlabel("|expected|")
    axes.set_ylabel("|error|")
    positive = magnitude[(magnitude > 0) & magnitude.isfinite()]
    drawable = error.isfinite() & (error > 0)
    exact = int((error == 0).sum())
    left_out = f"{exact:,} elements are exact" + (f", {lost:,} not finite" if (lost := int((~error.isfinite()).sum())) else "")
    if not len(positive) or not bool(drawable.any()):
        largest = f"the reference is all zero,\nthe largest value is {float(actual.double().abs().max()):.3g}"
        axes.text(0.5, 0.5, left_out if len(positive) else largest, ha="center", va="center", transform=axes.transAxes).set_in_layout(False)
        axes.set_xticks([])
        axes.set_yticks([])
        return
    lowest, highest = float(positive.min()), float(positive.max())
    at = magnitude.clamp_min(lowest)  # where zero is expected: at the left edge
    fails = wrong[..., None].expand_as(error)
    for keep, colour, mark, label in (
        (drawable & ~fails, "tab:blue", ".", "rows that pass"),
        (drawable & fails, "tab:red", "x", "rows that fail"),
    ):
        places = keep.flatten().nonzero()[:, 0]
        if not len(places):
            continue
        worst = places[error.flatten()[places].argmax()][None]
        # Every n-th point and the largest: the same picture each time, and no file of a million dots.
        places = torch.cat([places[:: max(1, len(places) // MAX_POINTS)], worst])
        x, y = at.flatten()[places].numpy(), error.flatten()[places].numpy()
        axes.plot(x, y, mark, markersize=2 if mark == "." else 4, alpha=0.4, color=colour, label=label, rasterized=True)
    _allowed(axes, magnitude, torch.logspace(math.log10(lowest), math.log10(highest), 50, dtype=torch.float64), tolerance)
    if actual.dtype == torch.bfloat16:
        axes.plot(
            [lowest, highest], [lowest * 2**-8, highest * 2**-8], color="black", linewidth=1, linestyle="--", label="half a bf16 ulp at most (2^-8)"
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(visible=True, alpha=0.3)
    rules = [f"{name} {value:g}" for name, value in (("cosine", tolerance.cosine), ("norm", tolerance.norm)) if value is not None]
    title = f"{left_out}" + (f"\nrows are held to {' and '.join(rules)} too" if rules else "")
    legend = axes.legend(loc="lower right", fontsize=8, framealpha=0.9, title=title, title_fontsize=8)
    legend.set_in_layout(False)
    for handle in legend.legend_handles:  # faint dots need full colour in the legend
        if handle.get_label().startswith("rows"):
            handle.set_alpha(1)


def _allowed(axes: Any, magnitude: torch.Tensor, reach: torch.Tensor, tolerance: tolerances.Tolerance) -> None:
    """What an element may be off by, from the row with the lowest maximum to that with the highest."""
    floors = (magnitude.amax(2) * tolerance.row).clamp_min(tolerance.atol)
    floors = floors[floors.isfinite() & (floors > 0)]
    ends = (float(floors.min()), float(floors.max())) if len(floors) else (0.0, 0.0)
    low, high = ((reach * tolerance.rtol).clamp_min(end) for end in ends)
    if float(high.max()) > 0:
        axes.fill_between(
            reach.numpy(), low.numpy(), high.numpy(), color="grey", alpha=0.3, label=f"allowed: {tolerance.text()}, lowest to highest row"
        )
        axes.plot(reach.numpy(), high.numpy(), color="grey", linewidth=1)
