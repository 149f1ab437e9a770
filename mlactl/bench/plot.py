"""A PNG of a benchmark: one panel a shape, one bar an arm, the floors as lines. matplotlib is an extra of the package, imported here only."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from mlactl.bench.arms import PLANNED
from mlactl.bench.floors import Floors
from mlactl.bench.results import TIMED, ArmResult, Bench, ShapeResult
from mlactl.errors import CannotRun, UsageError

SUFFIX = ".png"
_COLUMNS = 2
_ROW_INCHES, _PANEL_INCHES = 0.36, 0.9
_MEMORY, _MMA = "C1", "C3"


def require(target: Path) -> None:
    """Refuses before any work what could not be drawn in the end; raises UsageError, CannotRun."""
    if target.suffix.lower() != SUFFIX:
        raise UsageError(f"--plot {target}: expected a name that ends in {SUFFIX}", hint=f"--plot {target.with_suffix(SUFFIX)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise CannotRun("--plot needs matplotlib, which is not installed", hint="pip install 'mlactl[plot]'")


def write_png(target: Path, bench: Bench) -> None:
    """Draws every shape, replacing an older picture of that name; raises CannotRun."""
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, len(bench.shapes))
    lines = -(-len(bench.shapes) // columns)
    bars = max(len(result.arms) for result in bench.shapes)
    height = 1.2 + lines * (_PANEL_INCHES + bars * _ROW_INCHES)
    figure = Figure(figsize=(6.5 * columns, height), dpi=120, layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flat
    for panel, result in zip(panels, bench.shapes, strict=False):
        _panel(panel, result)
    for panel in list(panels)[len(bench.shapes) :]:
        panel.set_axis_off()
    what = "floors computed, nothing was run" if bench.computed else "black line from fastest to slowest sample"
    figure.suptitle(f"Verify plan on {bench.card}: {what}")
    shown = {label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend([*shown.values()], [*shown], loc="outside lower center", ncols=len(shown), frameon=False)
    try:
        figure.savefig(target)
    except OSError as error:
        raise CannotRun(f"{target}: {error.strerror}", hint="--plot FILE.png in a folder that can be written") from error


def _panel(panel: Any, result: ShapeResult) -> None:
    reach = max([*(arm.floors.larger_us for arm in result.arms), *(max(arm.samples_us) for arm in result.arms if arm.samples_us)])
    for place, arm in enumerate(result.arms):
        if arm.median_us is None:
            _floor_bars(panel, place, arm.floors, reach)
        else:
            panel.barh(place, arm.median_us, height=0.62, color="C0", label="median")
            panel.hlines(place, min(arm.samples_us), max(arm.samples_us), color="black", linewidth=1.5)
            panel.vlines(arm.floors.memory_us, place - 0.42, place + 0.42, color=_MEMORY, linewidth=2.5, label="memory floor")
            panel.vlines(arm.floors.mma_us, place - 0.42, place + 0.42, color=_MMA, linewidth=2.5, label="mma.sync floor")
            panel.text(max(arm.samples_us) + reach * 0.015, place, f"{arm.median_us:.1f}", va="center", fontsize=8)
    panel.set_yticks(range(len(result.arms)), [_name(arm) for arm in result.arms])
    panel.set_ylim(len(result.arms) - 0.5, -0.5)
    panel.set_xlim(0, reach * 1.12)
    panel.set_xlabel("microseconds, lower is better", fontsize=8)
    panel.set_title(result.shape.label(), fontsize=10)
    panel.grid(axis="x", alpha=0.3)
    panel.set_axisbelow(True)


def _floor_bars(panel: Any, place: int, limits: Floors, reach: float) -> None:
    """Both floors of an arm that has no time, hollow so that nobody takes them for one."""
    for offset, value, colour, label in ((-0.18, limits.memory_us, _MEMORY, "memory floor"), (0.18, limits.mma_us, _MMA, "mma.sync floor")):
        panel.barh(place + offset, value, height=0.3, facecolor="none", edgecolor=colour, linewidth=1.5, hatch="////", label=label)
        panel.text(value + reach * 0.015, place + offset, f"{value:.1f}", va="center", fontsize=7)


def _name(arm: ArmResult) -> str:
    return arm.planned.arm if arm.state in (PLANNED, TIMED) else f"{arm.planned.arm}\n({arm.state})"
