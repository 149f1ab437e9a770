"""Times sparse MLA over quantised records against bf16 records gathered in the same run, and writes one JSON record.

    MLACTL_CACHE_DIR=… python benchmarks/sparse_mla.py --mma-object PEAK.so --out sparse_mla.json

CUDA-graph replay, 256 MiB written between replays (a dirty, cold L2), median of at least 21, arms in rotated order, the
correctness gate before any timing. The bf16 arm is the dense kernel over pages of one token: the same slots, the same query,
records of 1,152 bytes. speedup = bf16 / arm and share = floor / arm: higher is better.

Arms: identity (432-byte records, scale 1.0), dynamic_at_one (the other variant on the same bytes), dynamic (scale 0.37),
record_368, per_token, fp8_ds_mla, bf16.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))

from dense_mla import FLUSH_BYTES, commit_of, copy_bandwidth, driver_version
from mma_peak import measure_tflops
from sparse_cases import TOLERANCE, SparseCase, make_cache, make_case

from mlactl.kernels import registry
from mlactl.kernels.mla import gate
from mlactl.kernels.mla.dense import DenseTensors
from mlactl.kernels.mla.latent_scale import LatentScale
from mlactl.kernels.mla.planner import DenseCaps
from mlactl.kernels.mla.planner import plan as plan_dense
from mlactl.kernels.mla.sparse import SparseBinding
from mlactl.kernels.mla.sparse_records import SPARSE_RECORDS
from mlactl.kernels.mla.sparse_reference import sparse_mla_reference
from mlactl.opening import open_runtime

POOL_SLOTS, PAGE_SIZE, TOP_K = 204_800, 64, 2048
BF16_BYTES, QUERY_BYTES, OUTPUT_BYTES = 1152, 1152, 1024
FLOP_PER_KEY = 2 * (576 + 512)

SHAPES = (("decode", 32, 16), ("prefill", 512, 16), ("decode", 32, 64), ("decode", 8, 64), ("decode", 1, 64), ("prefill", 512, 64))
"""(mode, query rows, heads)."""


@dataclass
class Arm:
    """One thing to time on a shape."""

    name: str
    run: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    record_bytes: int
    verdict: gate.Verdict
    specs: list[dict[str, object]]
    graph: torch.cuda.CUDAGraph | None = None
    samples_us: list[float] = field(default_factory=list)


def sparse_arm(name: str, case: SparseCase, *, identity: int | None = None) -> Arm:
    """An arm of the sparse kernels; `identity` forces a variant at scale 1.0."""
    binding = case.bind()
    if identity is not None:
        spec = dict(case.plan.forwards)[identity]
        binding = SparseBinding(case.plan, case.tensors, LatentScale(1.0, identity), spec, binding._forward_arguments, binding._merge_arguments)
    case.poison()
    output, lse = binding.run()
    verdict = gate.judge(output, lse, *case.reference(), TOLERANCE)
    specs = [binding.spec.as_json()] + ([case.plan.merge.as_json()] if case.plan.merge is not None else [])
    return Arm(name, binding.run, case.plan.record.record_bytes, verdict, specs)


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
    return Arm(
        "bf16", binding.run, BF16_BYTES, gate.judge(output, lse, *reference, gate.TOLERANCES["bf16"]), [spec.as_json() for spec in built.specs]
    )


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


def sample(arms: list[Arm], samples: int) -> None:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for turn in range(samples):
        start_at = turn % len(arms)
        for arm in arms[start_at:] + arms[:start_at]:
            assert arm.graph is not None
            flush.fill_(turn % 250)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            arm.graph.replay()
            end.record()
            torch.cuda.synchronize()
            arm.samples_us.append(start.elapsed_time(end) * 1e3)


def capture(arm: Arm) -> None:
    arm.run()
    torch.cuda.synchronize()
    arm.graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(arm.graph):
        arm.run()


def row_of(mode: str, rows: int, heads: int, arms: list[Arm], copy_bytes_s: float, tflops: float) -> dict[str, object]:
    """One shape: medians, speed-ups over bf16 records and shares of each arm's own floor."""
    baseline = statistics.median(next(arm.samples_us for arm in arms if arm.name == "bf16"))
    described = []
    for arm in arms:
        median = statistics.median(arm.samples_us)
        memory = rows * (TOP_K * arm.record_bytes + heads * (QUERY_BYTES + OUTPUT_BYTES)) / copy_bytes_s * 1e6
        mma = TOP_K * rows * heads * FLOP_PER_KEY / tflops * 1e-6
        described.append(
            {
                "arm": arm.name,
                "median_us": median,
                "speedup_over_bf16": baseline / median,
                "memory_floor_us": memory,
                "mma_floor_us": mma,
                "share_of_floor": max(memory, mma) / median,
                "gate": {"cosine": arm.verdict.cosine, "norm": arm.verdict.norm, "peak": arm.verdict.peak, "lse": arm.verdict.lse},
                "specs": arm.specs,
                "samples_us": arm.samples_us,
            }
        )
    return {"shape": f"{mode} {rows} rows, H {heads}, top-k {TOP_K}", "arms": described}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mma-object", type=Path, required=True, help="made by mma_peak_kernel.py")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--samples", type=int, default=21)
    parser.add_argument("--commit", help="recorded where the working tree has no git history")
    options = parser.parse_args()
    if options.samples < 21:
        parser.error("medians are of at least 21 samples")
    open_runtime()
    device = torch.cuda.get_device_properties(0)
    arch, multiprocessors = f"sm_{device.major}{device.minor}a", device.multi_processor_count
    copy_bytes_s, tflops = copy_bandwidth(), measure_tflops(options.mma_object)
    print(f"{device.name}: copy {copy_bytes_s * 1e-9:.0f} GB/s, mma.sync {tflops:.0f} TFLOP/s", flush=True)
    caches: dict[tuple[str, float], torch.Tensor] = {}
    bf16 = torch.randn(POOL_SLOTS, 1, 576, device="cuda").bfloat16()
    shapes = []
    for mode, rows, heads in SHAPES:
        arms = arms_of(mode, rows, heads, arch, multiprocessors, caches, bf16)
        refused = [arm for arm in arms if not arm.verdict.passed]
        for arm in refused:
            print(f"{mode} {rows} rows, H {heads}, {arm.name}: not timed, the gate refused it: {'; '.join(arm.verdict.failures)}", flush=True)
        if refused:
            return 1
        for arm in arms:
            capture(arm)
        sample(arms, 3)
        for arm in arms:
            arm.samples_us.clear()
        sample(arms, options.samples)
        described = row_of(mode, rows, heads, arms, copy_bytes_s, tflops)
        shapes.append(described)
        print(
            described["shape"],
            "  ".join(f"{arm['arm']} {arm['median_us']:.1f} ({arm['speedup_over_bf16']:.2f}x)" for arm in described["arms"]),
            flush=True,
        )
    if options.out:
        kernels = (
            registry.SPARSE_DECODE.kernel_id,
            registry.SPARSE_PREFILL.kernel_id,
            registry.DENSE_MERGE.kernel_id,
            registry.DENSE_FORWARD.kernel_id,
        )
        result = {
            "schema_version": 1,
            "command": " ".join(["python", *sys.argv]),
            "commit": commit_of(options.commit),
            "sources": {kernel: registry.sources_digest(kernel) for kernel in kernels},
            "card": device.name,
            "driver": driver_version(),
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "method": f"graph replay, {FLUSH_BYTES >> 20} MiB written between replays, median of {options.samples}, arms rotated",
            "direction": "times: lower is better; speedup = bf16 / arm, share = floor / arm: higher is better",
            "pool": {"slots": POOL_SLOTS, "page_size": PAGE_SIZE, "records": {name: record.record_bytes for name, record in SPARSE_RECORDS.items()}},
            "copy_bytes_per_s": copy_bytes_s,
            "mma_tflops": tflops,
            "shapes": shapes,
        }
        options.out.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
