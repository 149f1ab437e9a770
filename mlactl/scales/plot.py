"""A PNG of log2 scale by layer. matplotlib is an extra of the package, imported here only."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlactl.errors import CannotRun, UsageError
from mlactl.scales.files import unreadable

SUFFIX = ".png"


@dataclass(frozen=True, slots=True)
class Series:
    """One file's points: (layer, lowest log2 scale, highest log2 scale); the two are equal where a layer has one scale."""

    label: str
    points: Sequence[tuple[int, float, float]]


def require(target: Path) -> None:
    """Refuses before any work what could not be drawn in the end; raises UsageError, CannotRun."""
    if target.suffix.lower() != SUFFIX:
        raise UsageError(f"--plot {target}: expected a name that ends in {SUFFIX}", hint=f"--plot {target.with_suffix(SUFFIX)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise CannotRun("--plot needs matplotlib, which is not installed", hint="pip install 'mlactl[plot]'; the plot in the terminal needs nothing")


def write_png(target: Path, series: Sequence[Series]) -> None:
    """Draws one panel with every series, replacing an older picture of that name; raises CannotRun."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for number, one in enumerate(series):
        layers = [layer for layer, _, _ in one.points]
        lows, highs = [low for _, low, _ in one.points], [high for _, _, high in one.points]
        colour = f"C{number}"
        if lows != highs:
            axes.vlines(layers, lows, highs, color=colour, alpha=0.35, linewidth=4)
        axes.plot(layers, highs, color=colour, linewidth=1, marker="o", markersize=4, label=one.label)
    identity = [(layer, high) for one in series for layer, low, high in one.points if low == high == 0]
    if identity:
        axes.plot(
            *zip(*identity, strict=True), linestyle="none", marker="s", markersize=8, markerfacecolor="none", color="black", label="identity, 1.0"
        )
    axes.set_xlabel("layer")
    axes.set_ylabel("log2 of scale")
    axes.set_title("Scale by layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    axes.margins(x=0.02)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="best", frameon=False)
    try:
        figure.savefig(target)
    except OSError as error:
        raise unreadable(target, error) from error
