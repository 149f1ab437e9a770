"""Pictures of an error: by head and row, and against the magnitude of what was expected. matplotlib is an extra."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlactl.errors import CannotRun, UsageError
from mlactl.replay import capture as captures
from mlactl.replay import tolerances

if TYPE_CHECKING:
    import torch

    from mlactl.replay.runner import ReplayOptions, Results

SUFFIX = ".png"
MAX_POINTS = 20_000


def require(target: Path) -> None:
    """Refuses before any work what could not be drawn in the end; raises UsageError, CannotRun."""
    if target.suffix.lower() != SUFFIX:
        raise UsageError(f"--plot {target}: expected a name that ends in {SUFFIX}", hint=f"--plot {target.with_suffix(SUFFIX)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise CannotRun("--plot needs matplotlib, which is not installed", hint="pip install 'mlactl[plot]'")


def draw(target: Path, path: Path, options: ReplayOptions) -> None:
    """Draws one capture: the kernel's output where it ran, else the captured one, against the reference. Raises CannotRun."""
    from dataclasses import replace

    from mlactl.replay.runner import compute

    results = compute(captures.read(path), replace(options, rows=None, heads=None))
    judged = results.kernel.output if results.kernel.output is not None else results.captured[0]
    if judged is None:
        raise CannotRun(f"{path}: there is no output to draw")
    figure = _figure(results, judged.double(), results.reference[0].double(), "kernel" if results.kernel.output is not None else "captured")
    try:
        figure.savefig(target)
    except OSError as error:
        raise CannotRun(f"{target} cannot be written: {error.strerror or error}") from error


def _figure(results: Results, actual: torch.Tensor, expected: torch.Tensor, judged: str) -> Any:
    from matplotlib.figure import Figure

    call = results.capture.call
    tolerance = tolerances.for_output(call.record, call.mode)
    figure = Figure(figsize=(13, 5.6), dpi=120, layout="constrained")
    figure.suptitle(f"{results.capture.name}: {judged} output against the reference, {call.record} records, {call.mode}", fontsize=11)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.05))
    _by_head_and_row(figure, left, results, actual, expected, tolerance)
    _by_magnitude(right, actual, expected, tolerance)
    return figure


def _by_head_and_row(figure: Any, axes: Any, results: Results, actual: torch.Tensor, expected: torch.Tensor, tolerance: tolerances.Tolerance) -> None:
    """Largest error of each row and head over what is allowed there: 1 is the limit."""
    import torch
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    allowed = (expected.abs().amax(2) * tolerance.row).clamp_min(1e-30)
    share = ((actual - expected).abs().amax(2) / allowed).nan_to_num(nan=1e3, posinf=1e3)
    shown = torch.log10(share.clamp(1e-3, 1e3))
    # White is the limit: blue passes, red fails.
    picture = axes.imshow(shown.numpy(), aspect="auto", interpolation="nearest", cmap="RdBu_r", norm=TwoSlopeNorm(0.0, -2.0, 2.0))
    bar = figure.colorbar(picture, ax=axes, extend="both", ticks=[-2, -1, 0, 1, 2])
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{10.0**value:g}"))
    bar.set_label("largest error / allowed (over 1 fails)")
    axes.set_title("Error by head and row")
    axes.set_xlabel("head")
    axes.set_ylabel("query row (lines part requests)" if results.capture.dense else "query row")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    if results.capture.dense:
        for boundary in results.capture.boundaries[1:-1]:
            axes.axhline(boundary - 0.5, color="black", linewidth=0.8)


def _by_magnitude(axes: Any, actual: torch.Tensor, expected: torch.Tensor, tolerance: tolerances.Tolerance) -> None:
    import torch

    error, magnitude = (actual - expected).abs(), expected.abs()
    allowed = (magnitude.amax(2, keepdim=True) * tolerance.row).clamp_min(1e-30).expand_as(error)
    rows_fail = (error > allowed).any(2, keepdim=True).expand_as(error)
    finite = torch.isfinite(error) & (error > 0) & (magnitude > 0)
    for keep, colour, label in (
        (finite & ~rows_fail, "tab:blue", "rows that pass"),
        (finite & rows_fail, "tab:red", "rows with an error over the limit"),
    ):
        places = keep.flatten().nonzero()[:, 0]
        if not len(places):
            continue
        # Every n-th point: the same picture each time, and no file of a million dots.
        places = places[:: max(1, len(places) // MAX_POINTS)]
        axes.plot(
            magnitude.flatten()[places].numpy(),
            error.flatten()[places].numpy(),
            ".",
            markersize=2,
            alpha=0.35,
            color=colour,
            label=label,
            rasterized=True,
        )
    lowest, highest = float(allowed.min()), float(allowed.max())
    axes.axhspan(lowest, highest, color="grey", alpha=0.25, label=f"allowed: {tolerance.row:g} of a row's maximum, lowest to highest row")
    reach = torch.logspace(float(magnitude[magnitude > 0].min().log10()), float(magnitude.max().log10()), 50, dtype=torch.float64)
    axes.plot(reach.numpy(), (reach * 2**-8).numpy(), color="black", linewidth=1, linestyle="--", label="half a bf16 ulp at most (2^-8)")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title("Error against magnitude")
    axes.set_xlabel("|expected|")
    axes.set_ylabel("|error|")
    axes.grid(visible=True, alpha=0.3)
    legend = axes.legend(loc="lower right", fontsize=8, framealpha=0.9)
    for handle in legend.legend_handles[:-2]:  # faint dots need full colour in the legend
        handle.set_alpha(1)
