"""How launches are timed: CUDA-graph replay over a dirty, cold L2, in rotated order. The one place where that is done.

Between replays 256 MiB are written, so that every replay finds the cache full of lines that are not its own and must be
written back. The correctness gate comes first; what it refuses never gets here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from mlactl.bench.method import FLUSH_BYTES, WARM_ROUNDS
from mlactl.kernels import runtime
from mlactl.kernels.runtime import Launch
from mlactl.kernels.spec import CompileSpec

_COPY_BYTES, _COPY_ROUNDS = 2 << 30, 5
_FLOP_PER_MMA = 2 * 16 * 8 * 16
_BLOCKS_PER_PROCESSOR = 2


@dataclass(slots=True)
class Timed:
    """A captured launch and its samples in microseconds.

    `run` is what was captured: it keeps the tensors alive that the graph holds only by address.
    """

    name: str
    graph: torch.cuda.CUDAGraph
    run: Callable[[], object]
    samples_us: list[float] = field(default_factory=list)


def capture(name: str, run: Callable[[], object]) -> Timed:
    """Runs once to load everything, then captures `run` in a graph."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return Timed(name, graph, run)


def sample(timed: Sequence[Timed], samples: int, on_round: Callable[[], None] = lambda: None) -> None:
    """Adds `samples` samples to each, after a few rounds that are thrown away; each round starts with another one."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for turn in range(WARM_ROUNDS + samples):
        first = turn % len(timed)
        for one in (*timed[first:], *timed[:first]):
            flush.fill_(turn % 250)
            elapsed_us = _replay_us(one.graph)
            if turn >= WARM_ROUNDS:
                one.samples_us.append(elapsed_us)
        on_round()


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    return _elapsed_s(graph.replay) * 1e6


def _elapsed_s(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def copy_bytes_per_s() -> float:
    """Bytes a second of a large copy on the device, read plus written."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)

    def copies() -> None:
        for _ in range(_COPY_ROUNDS):
            target.copy_(source)

    return _COPY_ROUNDS * 2 * _COPY_BYTES / _elapsed_s(copies)


def mma_flop_per_s(spec: CompileSpec, arch: str) -> float:
    """FLOP a second of the microbenchmark `spec` (registry.MMA_PEAK), loaded like any kernel; raises what `runtime.launch` does."""
    return mma_rate(runtime.launch(spec, arch), spec)


def mma_rate(launch: Launch, spec: CompileSpec, rounds: int = 4096) -> float:
    """FLOP a second of a loaded microbenchmark on the current device: the best of five launches."""
    chains, warps = int(spec.fact("chains")), int(spec.fact("warps"))
    blocks = _BLOCKS_PER_PROCESSOR * torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    sink = torch.zeros(32 * warps, device="cuda")
    best_s = min(_elapsed_s(lambda: launch(sink, rounds, blocks)) for _ in range(5))
    return blocks * warps * rounds * chains * _FLOP_PER_MMA / best_s


def host_cost_us(run: Callable[[], object], calls: int = 40, batches: int = 30) -> list[float]:
    """Host microseconds of one eager call, as the mean of each batch of calls that begins with an idle device."""
    run()
    times = []
    for _ in range(batches):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        times.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return times
