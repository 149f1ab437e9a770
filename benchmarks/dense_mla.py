"""Times the dense MLA kernels against the card's own floors and writes one JSON record.

    MLACTL_CACHE_DIR=… python benchmarks/dense_mla.py --mma-object PEAK.so --out dense_mla.json

CUDA-graph replay, 256 MiB written between replays (a dirty, cold L2), median of at least 21, shapes in rotated order, the
correctness gate before any timing. A share is floor / time: higher is better, 1 is the floor.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))

from dense_cases import Case, make_case
from mma_peak import measure_tflops

from mlactl.kernels import registry
from mlactl.kernels.mla import gate
from mlactl.opening import open_runtime

FLUSH_BYTES = 256 << 20
RECORD_BYTES, QUERY_BYTES, OUTPUT_BYTES = {"bf16": 1152, "fp8": 576}, 1152, 1024
FLOP_PER_KEY = 2 * (576 + 512)


@dataclass(frozen=True)
class Shape:
    """One line of the table; `ragged` draws lengths uniformly from [1, 2 * tokens] with the same total."""

    mode: str
    requests: int
    rows: int
    heads: int
    tokens: int
    ragged: bool = False
    record: str = "bf16"

    def label(self) -> str:
        rows = f" x {self.rows}" if self.rows > 1 else ""
        notes = " ragged" * self.ragged + f" {self.record}" * (self.record != "bf16")
        return f"{self.mode} {self.requests}{rows}, H {self.heads}, {self.tokens:,}{notes}"

    def lengths(self) -> list[int]:
        if not self.ragged:
            return [self.tokens] * self.requests
        generator = torch.Generator().manual_seed(7)
        drawn = torch.randint(1, 2 * self.tokens, (self.requests,), generator=generator).double()
        lengths = (drawn * (self.tokens * self.requests / drawn.sum())).long().clamp(1, 2 * self.tokens).tolist()
        lengths[lengths.index(min(lengths))] += self.tokens * self.requests - sum(lengths)
        return lengths


SHAPES = (
    Shape("decode", 16, 1, 8, 8192),
    Shape("decode", 32, 1, 16, 8192),
    Shape("decode", 8, 1, 64, 8192),
    Shape("decode", 8, 1, 96, 16384),
    Shape("verify", 16, 4, 8, 8192),
    Shape("verify", 8, 4, 16, 8192),
    Shape("verify", 8, 4, 64, 8192),
    Shape("verify", 1, 4, 8, 131072),
    Shape("verify", 1, 4, 96, 131072),
    Shape("verify", 4, 4, 96, 16384),
    Shape("extend", 1, 512, 16, 8192),
    Shape("decode", 16, 1, 8, 8192, ragged=True),
    Shape("decode", 32, 1, 16, 8192, ragged=True),
    Shape("verify", 8, 4, 64, 8192, ragged=True),
)
SHAPES += tuple(replace(shape, record="fp8") for shape in SHAPES)


@dataclass
class Arm:
    """A shape ready to be replayed."""

    shape: Shape
    case: Case
    graph: torch.cuda.CUDAGraph
    verdict: gate.Verdict
    samples_us: list[float]


def floors_us(case: Case, copy_bytes_s: float, tflops: float) -> tuple[float, float]:
    """(memory floor, mma.sync floor): each record once plus q and output; FLOP over the keys each row sees."""
    heads = case.plan.caps.heads
    total = case.boundaries[-1]
    moved = sum(case.lengths) * RECORD_BYTES[case.plan.caps.record] + total * heads * (QUERY_BYTES + OUTPUT_BYTES)
    flop = sum(
        length * (last - first) * heads * FLOP_PER_KEY
        for length, first, last in zip(case.lengths, case.boundaries, case.boundaries[1:], strict=False)
    )
    return moved / copy_bytes_s * 1e6, flop / tflops * 1e-6


def copy_bandwidth() -> float:
    """Bytes a second of a large device-to-device copy, read plus written."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(5):
        target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    return 5 * 2 * source.numel() / (start.elapsed_time(end) * 1e-3)


def prepare(shape: Shape, arch: str, multiprocessors: int, seed: int) -> Arm:
    counts = [shape.rows] * shape.requests if shape.mode == "extend" else None
    case = make_case(
        arch,
        multiprocessors,
        shape.lengths(),
        heads=shape.heads,
        mode=shape.mode,
        rows=shape.rows,
        row_counts=counts,
        seed=seed,
        spare_entries=0,
        record=shape.record,
    )
    verdict = case.judge()
    binding = case.bind()
    binding.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        binding.run()
    return Arm(shape, case, graph, verdict, [])


def sample(arms: list[Arm], samples: int) -> None:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for turn in range(samples):
        start_at = turn % len(arms)
        for arm in arms[start_at:] + arms[:start_at]:
            flush.fill_(turn % 250)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            arm.graph.replay()
            end.record()
            torch.cuda.synchronize()
            arm.samples_us.append(start.elapsed_time(end) * 1e3)


def host_cost_us(case: Case, calls: int = 40, batches: int = 30) -> list[float]:
    """Host microseconds of one eager `run()`, as the mean of each batch of calls with an idle device before it."""
    binding = case.bind()
    binding.run()
    times = []
    for _ in range(batches):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            binding.run()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return times


def record(arms: list[Arm], copy_bytes_s: float, tflops: float, host: list[float], commit: str, samples: int) -> dict[str, object]:
    rows = []
    for arm in arms:
        memory, mma = floors_us(arm.case, copy_bytes_s, tflops)
        median = statistics.median(arm.samples_us)
        rows.append(
            {
                "shape": arm.shape.label(),
                "median_us": median,
                "memory_floor_us": memory,
                "mma_floor_us": mma,
                "share_of_floor": max(memory, mma) / median,
                "tile": arm.case.plan.tile,
                "blocks": arm.case.plan.blocks,
                "gate": {"cosine": arm.verdict.cosine, "norm": arm.verdict.norm, "peak": arm.verdict.peak, "lse": arm.verdict.lse},
                "specs": [spec.as_json() for spec in arm.case.plan.specs],
                "samples_us": arm.samples_us,
            }
        )
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    versions |= {name: version for name in ("apache-tvm-ffi", "nvidia-cutlass-dsl") if (version := installed(name)) is not None}
    return {
        "schema_version": 1,
        "command": " ".join(["python", *sys.argv]),
        "commit": commit,
        "sources": {kernel: registry.sources_digest(kernel) for kernel in (registry.DENSE_FORWARD.kernel_id, registry.DENSE_MERGE.kernel_id)},
        "card": torch.cuda.get_device_name(0),
        "driver": driver_version(),
        "versions": versions,
        "method": f"graph replay, {FLUSH_BYTES >> 20} MiB written between replays, median of {samples}, shapes rotated",
        "direction": "times: lower is better; share = floor / time: higher is better",
        "copy_bytes_per_s": copy_bytes_s,
        "mma_tflops": tflops,
        "host_run_us": {"median": statistics.median(host), "samples": host, "direction": "lower is better"},
        "shapes": rows,
    }


def installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def driver_version() -> str:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def commit_of(given: str | None) -> str:
    if given:
        return given
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return found.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mma-object", type=Path, required=True, help="made by mma_peak_kernel.py")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--samples", type=int, default=21)
    parser.add_argument("--shapes", help="comma-separated indices into the built-in list")
    parser.add_argument("--commit", help="recorded where the working tree has no git history")
    options = parser.parse_args()
    if options.samples < 21:
        parser.error("medians are of at least 21 samples")
    open_runtime()
    device = torch.cuda.get_device_properties(0)
    arch = f"sm_{device.major}{device.minor}a"
    chosen = SHAPES if options.shapes is None else [SHAPES[int(i)] for i in options.shapes.split(",")]
    copy_bytes_s, tflops = copy_bandwidth(), measure_tflops(options.mma_object)
    print(f"{device.name}: copy {copy_bytes_s * 1e-9:.0f} GB/s, mma.sync {tflops:.0f} TFLOP/s", flush=True)
    arms = []
    for index, shape in enumerate(chosen):
        arm = prepare(shape, arch, device.multi_processor_count, index)
        if not arm.verdict.passed:
            print(f"{shape.label()}: not timed, the gate refused it: {'; '.join(arm.verdict.failures)}", flush=True)
            return 1
        arms.append(arm)
    sample(arms, 3)
    for arm in arms:
        arm.samples_us.clear()
    sample(arms, options.samples)
    host = host_cost_us(arms[0].case)
    result = record(arms, copy_bytes_s, tflops, host, commit_of(options.commit), options.samples)
    for row in result["shapes"]:
        print(
            f"{row['shape']:38s} {row['tile']:6s} {row['median_us']:8.1f} us  floors {row['memory_floor_us']:6.1f} {row['mma_floor_us']:6.1f}"
            f"  share {row['share_of_floor']:.2f}  cosine {row['gate']['cosine']:.7f}"
        )
    print(f"host cost of run(): {statistics.median(host):.1f} us (min {min(host):.1f})")
    if options.out:
        options.out.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
