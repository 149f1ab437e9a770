"""Times sparse MLA over quantised records against bf16 records gathered in the same run, and writes one JSON record.

    MLACTL_CACHE_DIR=… python benchmarks/sparse_mla.py --out sparse_mla.json

CUDA-graph replay, 256 MiB written between replays (a dirty, cold L2), median of at least 21, arms in rotated order, the
correctness gate before any timing. The bf16 arm is the dense kernel over pages of one token: the same slots, the same query,
records of 1,152 bytes. speedup = bf16 / arm and share = floor / arm: higher is better; a floor moves each record once, however
many rows select it.

Arms: identity (432-byte records, scale 1.0), dynamic_at_one (the other variant on the same bytes), dynamic (scale 0.37),
record_368, per_token, fp8_ds_mla, bf16.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))

from mma_peak import load_file
from sparse_cases import TOLERANCE, SparseCase, make_cache, make_case

from mlactl.bench import measure
from mlactl.bench.floors import Rates, Work, floors
from mlactl.bench.method import MIN_SAMPLES, method
from mlactl.bench.objects import peak_spec
from mlactl.bench.record import gate_json, provenance
from mlactl.bench.verify_plan import device_here
from mlactl.kernels.mla import gate
from mlactl.kernels.mla.dense import DenseTensors
from mlactl.kernels.mla.latent_scale import LatentScale
from mlactl.kernels.mla.planner import DenseCaps
from mlactl.kernels.mla.planner import plan as plan_dense
from mlactl.kernels.mla.sparse import SparseBinding
from mlactl.kernels.mla.sparse_records import SPARSE_RECORDS
from mlactl.kernels.mla.sparse_reference import sparse_mla_reference
from mlactl.kernels.spec import CompileSpec
from mlactl.opening import open_runtime

POOL_SLOTS, PAGE_SIZE, TOP_K = 204_800, 64, 2048
BF16_BYTES, QUERY_BYTES, OUTPUT_BYTES = 1152, 1152, 1024
FLOP_PER_KEY = 2 * (576 + 512)

SHAPES = (("decode", 32, 16), ("prefill", 512, 16), ("decode", 32, 64), ("decode", 8, 64), ("decode", 1, 64), ("prefill", 512, 64))
"""(mode, query rows, heads)."""


@dataclass
class Arm:
    """One thing to time on a shape, and what the gate said of it; records: how many different ones it reads."""

    name: str
    records: int
    run: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    record_bytes: int
    verdict: gate.Verdict
    specs: tuple[CompileSpec, ...]


def sparse_arm(name: str, case: SparseCase, *, identity: int | None = None) -> Arm:
    """An arm of the sparse kernels; `identity` forces a variant at scale 1.0."""
    binding = case.bind()
    if identity is not None:
        spec = dict(case.plan.forwards)[identity]
        binding = SparseBinding(case.plan, case.tensors, LatentScale(1.0, identity), spec, binding._forward_arguments, binding._merge_arguments)
    case.poison()
    output, lse = binding.run()
    verdict = gate.judge(output, lse, *case.reference(), TOLERANCE)
    specs = (binding.spec, *((case.plan.merge,) if case.plan.merge is not None else ()))
    return Arm(name, case.tensors.indices.unique().numel(), binding.run, case.plan.record.record_bytes, verdict, specs)


def bf16_arm(case: SparseCase, cache: torch.Tensor, arch: str, multiprocessors: int) -> Arm:
    """The same selection over bf16 records: dense MLA whose page table is the index table, pages of one token."""
    t = case.tensors
    rows, heads = t.q.shape[:2]
    built = plan_dense(DenseCaps("decode", heads, rows, TOP_K, 1, multiprocessors, arch))
    output, lse = torch.full_like(t.output, float("nan")), torch.full_like(t.lse, float("nan"))
    scratch = torch.empty(built.scratch_bytes, dtype=torch.uint8, device="cuda") if built.scratch_bytes else None
    tensors = DenseTensors(q=t.q, kv_cache=cache, page_table=t.indices, cache_seqlens=t.lengths, output=output, lse=lse, scratch=scratch)
    binding = built.bind(tensors)
    binding.run()
    reference = sparse_mla_reference(t.q, cache.view(torch.uint8), t.indices, t.lengths, record="bf16", sm_scale=t.sm_scale, dtype=torch.float64)
    verdict = gate.judge(output, lse, *reference, gate.TOLERANCES["bf16"])
    return Arm("bf16", t.indices.unique().numel(), binding.run, BF16_BYTES, verdict, tuple(built.specs))


def arms_of(
    mode: str, rows: int, heads: int, arch: str, multiprocessors: int, caches: dict[tuple[str, float], torch.Tensor], bf16: torch.Tensor
) -> list[Arm]:
    def case(record: str, scale: float = 1.0) -> SparseCase:
        if (record, scale) not in caches:
            caches[record, scale] = make_cache(record, POOL_SLOTS, PAGE_SIZE, scale)
        return make_case(
            arch,
            multiprocessors,
            record=record,
            rows=rows,
            heads=heads,
            top_k=TOP_K,
            mode=mode,
            latent_scale=scale,
            cache=caches[record, scale],
            seed=rows,
        )

    plain = case("nvfp4_ds_mla_432")
    return [
        sparse_arm("identity", plain),
        sparse_arm("dynamic_at_one", plain, identity=0),
        sparse_arm("dynamic", case("nvfp4_ds_mla_432", 0.37)),
        sparse_arm("record_368", case("nvfp4_ds_mla_368")),
        sparse_arm("per_token", case("nvfp4_ds_mla_368_per_token")),
        sparse_arm("fp8_ds_mla", case("fp8_ds_mla")),
        bf16_arm(plain, bf16, arch, multiprocessors),
    ]


def row_of(mode: str, rows: int, heads: int, records: int, arms: list[Arm], timed: list[measure.Timed], rates: Rates) -> dict[str, object]:
    """One shape, of `records` different records: medians, speed-ups over bf16 records and shares of each arm's own floor."""
    medians = {one.name: statistics.median(one.samples_us) for one in timed}
    described = []
    for arm, one in zip(arms, timed, strict=True):
        moved = records * arm.record_bytes + rows * heads * (QUERY_BYTES + OUTPUT_BYTES)
        floor = floors(Work(TOP_K * rows * heads * FLOP_PER_KEY, moved), rates)
        described.append(
            {
                "arm": arm.name,
                "median_us": medians[arm.name],
                "speedup_over_bf16": medians["bf16"] / medians[arm.name],
                "memory_floor_us": floor.memory_us,
                "mma_floor_us": floor.mma_us,
                "share_of_floor": floor.larger_us / medians[arm.name],
                "gate": dict(gate_json(arm.verdict)),
                "specs": [spec.as_json() for spec in arm.specs],
                "samples_us": one.samples_us,
            }
        )
    return {"shape": f"{mode} {rows} rows, H {heads}, top-k {TOP_K}", "records": records, "arms": described}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mma-object", type=Path, help="microbenchmark made by mma_peak_kernel.py; without it the cache's")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--samples", type=int, default=MIN_SAMPLES)
    parser.add_argument("--commit", help="recorded where the working tree has no git history")
    options = parser.parse_args()
    if options.samples < MIN_SAMPLES:
        parser.error(f"medians are of at least {MIN_SAMPLES} samples")
    open_runtime()
    target, card = device_here()
    peak = peak_spec()
    mma = measure.mma_flop_per_s(peak, target.arch) if options.mma_object is None else measure.mma_rate(load_file(options.mma_object), peak)
    rates = Rates(measure.copy_bytes_per_s(), mma)
    print(f"{card}: copy {rates.bytes_per_s * 1e-9:.0f} GB/s, mma.sync {rates.flop_per_s * 1e-12:.0f} TFLOP/s", flush=True)
    caches: dict[tuple[str, float], torch.Tensor] = {}
    bf16 = torch.randn(POOL_SLOTS, 1, 576, device="cuda").bfloat16()
    shapes, specs = [], []
    for mode, rows, heads in SHAPES:
        arms = arms_of(mode, rows, heads, target.arch, target.multiprocessors, caches, bf16)
        refused = [arm for arm in arms if not arm.verdict.passed]
        for arm in refused:
            print(f"{mode} {rows} rows, H {heads}, {arm.name}: not timed, the gate refused it: {'; '.join(arm.verdict.failures)}", flush=True)
        if refused:
            return 1
        timed = [measure.capture(arm.name, arm.run) for arm in arms]
        measure.sample(timed, options.samples)
        described = row_of(mode, rows, heads, arms[0].records, arms, timed, rates)
        shapes.append(described)
        specs += [spec for arm in arms for spec in arm.specs]
        print(
            described["shape"],
            "  ".join(f"{arm['arm']} {arm['median_us']:.1f} ({arm['speedup_over_bf16']:.2f}x)" for arm in described["arms"]),
            flush=True,
        )
    if options.out:
        found = provenance(" ".join(["python", *sys.argv]), options.commit, specs)
        result = {
            "schema_version": 1,
            "benchmark": "sparse_mla",
            **found,
            "versions": {**found["versions"], "torch": torch.__version__},
            "card": card,
            "arch": target.arch,
            "multiprocessors": target.multiprocessors,
            "method": method(options.samples),
            "direction": "times: lower is better; speedup = bf16 / arm, share = floor / arm: higher is better",
            "pool": {"slots": POOL_SLOTS, "page_size": PAGE_SIZE, "records": {name: record.record_bytes for name, record in SPARSE_RECORDS.items()}},
            "bytes_per_s": rates.bytes_per_s,
            "mma_flop_per_s": rates.flop_per_s,
            "shapes": shapes,
        }
        options.out.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
