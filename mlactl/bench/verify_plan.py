"""Runs the verify plan's arms on the current device: gate first, then the clock. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mlactl.bench import batch, measure
from mlactl.bench.arms import Planned, Target
from mlactl.bench.batch import Pool
from mlactl.bench.floors import Rates, floors
from mlactl.bench.record import gate_json
from mlactl.bench.results import GATE, TIMED, ArmResult, Bench, ShapeResult
from mlactl.bench.shapes import Layout, Shape
from mlactl.kernels.mla.policy import SparsePolicy
from mlactl.kernels.spec import CompileSpec

Progress = Callable[[str], None]


def device_here() -> tuple[Target, str]:
    """Target and name of the current CUDA device."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Target(f"sm_{properties.major}{properties.minor}a", properties.multi_processor_count), properties.name


def measured_rates(peak: CompileSpec, arch: str) -> Rates:
    """Copy bandwidth and mma.sync peak of the current device, measured now."""
    return Rates(measure.copy_bytes_per_s(), measure.mma_flop_per_s(peak, arch))


def measure_shape(
    shape: Shape, layout: Layout, arms: Sequence[Planned], rates: Rates, samples: int, seed: int = 0, progress: Progress = lambda _: None
) -> ShapeResult:
    """Every arm of one shape over the same pool. An arm that the gate refuses is not timed; the others are.

    `progress` is told what is being done. Raises MissingObject, BindError and what a compile raises.
    """
    pool = batch.make_pool(shape, layout, seed=seed)
    right: dict[SparsePolicy | None, tuple[torch.Tensor, torch.Tensor]] = {}
    results: dict[str, ArmResult] = {}
    timed = []
    for planned in arms:
        sparse = None if planned.plan is None else planned.plan.caps.sparse
        if planned.runs and sparse not in right:
            progress(f"{shape.name}: reference")
            right[sparse] = batch.expected(pool, layout, sparse)
        progress(f"{shape.name} {planned.arm}: gate")
        results[planned.arm], ready = _gate(pool, layout, planned, rates, right.get(sparse))
        timed += ready
    if timed:
        progress(f"{shape.name}: timing")
        measure.sample(timed, samples)
    for one in timed:
        gated = results[one.name]
        results[one.name] = ArmResult(gated.planned, gated.floors, TIMED, None, gated.gate, tuple(one.samples_us))
    return ShapeResult(shape, floors(layout.work(shape), rates), tuple(results[planned.arm] for planned in arms))


def _gate(
    pool: Pool, layout: Layout, planned: Planned, rates: Rates, right: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[ArmResult, list[measure.Timed]]:
    """The arm's verdict, and its captured launch when it passed."""
    limits = floors(planned.work, rates)
    if not planned.runs or right is None:
        return ArmResult(planned, limits, planned.state, planned.reason), []
    bound = batch.bind(pool, planned)
    verdict = batch.judge(bound, right, layout.record)
    if not verdict.passed:
        return ArmResult(planned, limits, GATE, "; ".join(verdict.failures), gate_json(verdict)), []
    return ArmResult(planned, limits, TIMED, None, gate_json(verdict)), [measure.capture(planned.arm, bound.binding.run)]


def bench(
    shapes: Sequence[tuple[Shape, Sequence[Planned]]],
    layout: Layout,
    peak: CompileSpec,
    *,
    samples: int,
    on_shape: Callable[[], None] = lambda: None,
    progress: Progress = lambda _: None,
) -> Bench:
    """Measures the card's rates and then every shape; the memory of one shape is gone before the next."""
    target, card = device_here()
    progress("copy bandwidth and mma.sync peak")
    rates = measured_rates(peak, target.arch)
    results = []
    for seed, (shape, arms) in enumerate(shapes):
        results.append(measure_shape(shape, layout, arms, rates, samples, seed, progress))
        torch.cuda.empty_cache()
        on_shape()
    return Bench(False, card, target.arch, target.multiprocessors, rates, "measured in this run", layout, tuple(results))
