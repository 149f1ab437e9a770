"""What came out of a benchmark, as plain data: measured, or computed where there is no GPU."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from mlactl.bench.arms import DEPLOYED, Planned
from mlactl.bench.floors import Floors, Rates
from mlactl.bench.shapes import Layout, Shape

TIMED, GATE = "timed", "gate"


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One arm of one shape. `state` is timed, gate (refused by the correctness gate, so not timed), or the plan's own.

    `gate` holds the worst cosine, norm, peak and LSE errors over all rows; `samples_us` is empty unless timed.
    """

    planned: Planned
    floors: Floors
    state: str
    reason: str | None = None
    gate: Mapping[str, float] | None = None
    samples_us: tuple[float, ...] = ()

    @property
    def median_us(self) -> float | None:
        """Median of the samples."""
        return statistics.median(self.samples_us) if self.samples_us else None

    @property
    def share_of_floor(self) -> float | None:
        """Larger floor / median: higher is better, 1 is the floor."""
        return None if self.median_us is None else self.floors.larger_us / self.median_us


@dataclass(frozen=True, slots=True)
class ShapeResult:
    """One shape: the floors of an exact launch, and its arms in the order they were asked for."""

    shape: Shape
    floors: Floors
    arms: tuple[ArmResult, ...]

    def ratio_to_deployed(self, arm: ArmResult) -> float | None:
        """Median / the deployed arm's median: lower is better; None where either was not timed."""
        deployed = next((one.median_us for one in self.arms if one.planned.arm == DEPLOYED), None)
        return None if arm.median_us is None or deployed is None else arm.median_us / deployed


@dataclass(frozen=True, slots=True)
class Bench:
    """All of one run. `computed` says that the rates are a data sheet's and that nothing was run."""

    computed: bool
    card: str
    arch: str
    multiprocessors: int
    rates: Rates
    rates_source: str
    layout: Layout
    shapes: tuple[ShapeResult, ...]

    def of(self, state: str) -> list[tuple[Shape, ArmResult]]:
        """Every arm in that state, with its shape."""
        return [(result.shape, arm) for result in self.shapes for arm in result.arms if arm.state == state]
