"""Times the dense MLA kernels, as the policy plans them, against the card's own floors and writes one JSON record.

    MLACTL_CACHE_DIR=… python benchmarks/dense_mla.py --out dense_mla.json

The method is that of `mlactl bench`, over every mode and all shapes in one rotation; the verify plan's other arms are
`mlactl bench verify-plan`'s. A share is floor / time: higher is better, 1 is the floor.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from mma_peak import load_file

from mlactl.bench import batch, measure, verify_plan
from mlactl.bench.arms import Planned, caps_of, planned
from mlactl.bench.floors import Rates, floors
from mlactl.bench.method import MIN_SAMPLES, method
from mlactl.bench.objects import peak_spec
from mlactl.bench.record import document, gate_json
from mlactl.bench.results import TIMED, ArmResult, Bench, ShapeResult
from mlactl.bench.shapes import VERIFY_SHAPES, Layout, Shape
from mlactl.opening import open_runtime

SHAPES = (
    Shape("decode", 16, 1, 8, 8192),
    Shape("decode", 32, 1, 16, 8192),
    Shape("decode", 8, 1, 64, 8192),
    Shape("decode", 8, 1, 96, 16384),
    *VERIFY_SHAPES,
    Shape("extend", 1, 512, 16, 8192),
    Shape("decode", 16, 1, 8, 8192, ragged=True),
    Shape("decode", 32, 1, 16, 8192, ragged=True),
    Shape("verify", 8, 4, 64, 8192, ragged=True),
)
LAYOUTS = {record: Layout(record=record) for record in ("bf16", "fp8")}
CASES = tuple((shape, record) for record in LAYOUTS for shape in SHAPES)


def prepare(shape: Shape, layout: Layout, plan: Planned, seed: int) -> tuple[batch.Bound, dict[str, float], str]:
    """The bound launch of a shape, its worst values, and why the gate refused it (empty when it did not)."""
    pool = batch.make_pool(shape, layout, seed=seed)
    bound = batch.bind(pool, plan)
    verdict = batch.judge(bound, batch.expected(pool, layout), layout.record)
    return bound, dict(gate_json(verdict)), "; ".join(verdict.failures)


def print_result(result: ShapeResult) -> None:
    for arm in result.arms:
        print(
            f"{result.shape.label():38s} {arm.planned.arm:5s} {arm.planned.plan.tile:6s} {arm.median_us:8.1f} us"
            f"  floors {arm.floors.memory_us:6.1f} {arm.floors.mma_us:6.1f}  share {arm.share_of_floor:.2f}  cosine {arm.gate['cosine']:.7f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mma-object", type=Path, help="microbenchmark made by mma_peak_kernel.py; without it the cache's")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--samples", type=int, default=MIN_SAMPLES)
    parser.add_argument("--shapes", help="comma-separated indices into the built-in list: every shape over bf16, then over E4M3 records")
    parser.add_argument("--commit", help="recorded where the working tree has no git history")
    options = parser.parse_args()
    if options.samples < MIN_SAMPLES:
        parser.error(f"medians are of at least {MIN_SAMPLES} samples")
    open_runtime()
    target, card = verify_plan.device_here()
    chosen = CASES if options.shapes is None else [CASES[int(i)] for i in options.shapes.split(",")]
    peak = peak_spec()
    mma = measure.mma_flop_per_s(peak, target.arch) if options.mma_object is None else measure.mma_rate(load_file(options.mma_object), peak)
    rates = Rates(measure.copy_bytes_per_s(), mma)
    print(f"{card}: copy {rates.bytes_per_s * 1e-9:.0f} GB/s, mma.sync {rates.flop_per_s * 1e-12:.0f} TFLOP/s", flush=True)
    ready, refusals = [], 0
    for seed, (shape, record) in enumerate(chosen):
        layout = LAYOUTS[record]
        plan = planned(record, caps_of(shape, layout, target), shape, layout)
        bound, worst, refused = prepare(shape, layout, plan, seed)
        if refused:
            print(f"{shape.label()} {record}: not timed, the gate refused it: {refused}", flush=True)
            refusals += 1
            continue
        ready.append((shape, plan, measure.capture(shape.name, bound.binding.run), worst, bound))
    if not ready:
        return 1
    measure.sample([timed for _, _, timed, _, _ in ready], options.samples)
    host = measure.host_cost_us(ready[0][4].binding.run)
    results = []
    for shape in dict.fromkeys(shape for shape, _ in chosen):
        arms = tuple(
            ArmResult(plan, floors(plan.work, rates), TIMED, None, worst, tuple(timed.samples_us))
            for its_shape, plan, timed, worst, _ in ready
            if its_shape == shape
        )
        if arms:
            results.append(ShapeResult(shape, arms[0].floors, arms))
            print_result(results[-1])
    print(f"host cost of run(): {statistics.median(host):.1f} us (min {min(host):.1f})")
    if options.out:
        bench = Bench(False, card, target.arch, target.multiprocessors, rates, "measured in this run", LAYOUTS["bf16"], tuple(results))
        whole = document(bench, command=" ".join(["python", *sys.argv]), commit=options.commit, method=method(options.samples))
        cost = {"median": statistics.median(host), "samples": host, "direction": "lower is better"}
        record = {"schema_version": 1, **whole, "benchmark": "dense_mla", "versions": {**whole["versions"], "torch": torch.__version__}}
        options.out.write_text(json.dumps({**record, "host_run_us": cost}, indent=1))
    return 1 if refusals else 0


if __name__ == "__main__":
    sys.exit(main())
