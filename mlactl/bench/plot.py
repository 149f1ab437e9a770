"""A PNG of a benchmark: one panel a shape, one bar an arm, the floors as lines. matplotlib is an extra of the package, imported here only."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from mlactl.bench.results import Bench, ShapeResult
from mlactl.errors import CannotRun, UsageError

SUFFIX = ".png"
_COLUMNS = 2
_ROW_INCHES, _PANEL_INCHES = 0.32, 1.15


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
    what = "floors computed, nothing was run" if bench.computed else "median, line from fastest to slowest sample"
    figure.suptitle(f"Verify plan on {bench.card}: {what}")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles), frameon=False)
    try:
        figure.savefig(target)
    except OSError as error:
        raise CannotRun(f"{target}: {error.strerror}", hint="--plot FILE.png in a folder that can be written") from error


def _panel(panel: Any, result: ShapeResult) -> None:
    names = [arm.planned.arm for arm in result.arms]
    places = list(range(len(names)))
    reach = max([result.floors.larger_us, *(max(arm.samples_us) for arm in result.arms if arm.samples_us)])
    for place, arm in zip(places, result.arms, strict=True):
        if arm.median_us is None:
            text = arm.state if arm.reason is None else f"{arm.state}: {arm.reason}"
            panel.text(reach * 0.02, place, text[:48], va="center", fontsize=8, color="0.35")
            continue
        panel.barh(place, arm.median_us, height=0.62, color="C0")
        panel.hlines(place, min(arm.samples_us), max(arm.samples_us), color="black", linewidth=1.5)
        panel.text(arm.median_us + reach * 0.02, place + 0.33, f"{arm.median_us:.1f}", va="center", fontsize=8)
    panel.axvline(result.floors.memory_us, color="C1", linestyle="--", label="memory floor")
    panel.axvline(result.floors.mma_us, color="C3", linestyle=":", label="mma.sync floor")
    panel.set_yticks(places, names)
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.set_xlim(0, reach * 1.18)
    panel.set_xlabel("microseconds, lower is better", fontsize=8)
    panel.set_title(result.shape.label(), fontsize=10)
    panel.grid(axis="x", alpha=0.3)
