"""A device that is not there: batches on the CPU, launches that are the reference itself, a clock with known times.

What is left of the benchmark is real: plans, tensors of every arm, bind-time checks, gate, order, record.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch

from mlactl.bench import batch, measure, verify_plan
from mlactl.bench.arms import Target
from mlactl.kernels.mla import dense, reference
from mlactl.kernels.mla.planner import DensePlan

torch.set_num_threads(1)  # products of a few rows: threads that wait for each other on a busy machine cost ten times the work

TARGET = Target("sm_90a", 132)
COPY_BYTES_PER_S, MMA_FLOP_PER_S = 4e12, 6e14


class Launch:
    """What a binding's `run` would have done, computed by the reference from the arm's own tensors."""

    def __init__(self, plan: DensePlan, tensors: dense.DenseTensors, wrong: Callable[[DensePlan], float]) -> None:
        dense.check(plan, tensors)
        self.plan, self.tensors, self.wrong = plan, tensors, wrong
        self.runs = 0

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.runs += 1
        caps, t = self.plan.caps, self.tensors
        boundaries = range(0, t.q.shape[0] + 1, caps.rows) if t.cu_seqlens_q is None else t.cu_seqlens_q.tolist()
        lengths = None if t.query_cache_seqlens is None else t.query_cache_seqlens.tolist()
        output, lse = reference.dense_mla(
            t.q,
            t.kv_cache,
            t.page_table,
            t.cache_seqlens.tolist(),
            list(boundaries),
            t.sm_scale,
            width=caps.width,
            query_cache_seqlens=lengths,
            sparse=caps.sparse,
            sparse_rows=caps.rows,
            kv_scale=t.kv_scale,
            q_scale=t.q_scale,
        )
        t.output.copy_(output * self.wrong(self.plan))
        t.lse.copy_(lse)
        return t.output, t.lse


def install(monkeypatch, *, wrong: Callable[[DensePlan], float] = lambda _: 1.0, time_us: Callable[[str], float] = lambda _: 50.0) -> list[list[str]]:
    """Puts the stand-in in the device's place; `wrong` is a factor on a plan's output. Returns the rounds that get timed."""
    rounds: list[list[str]] = []

    def sample(timed, samples, on_round=lambda: None):
        rounds.append([one.name for one in timed])
        for one in timed:
            one.samples_us += [time_us(one.name) + i for i in range(samples)]

    def capture(name, run):
        run()
        return measure.Timed(name, SimpleNamespace(replay=run), run)

    monkeypatch.setattr(DensePlan, "bind", lambda plan, tensors: Launch(plan, tensors, wrong))
    monkeypatch.setattr(batch, "make_pool", partial(batch.make_pool, device="cpu"))
    monkeypatch.setattr(verify_plan, "device_here", lambda: (TARGET, "Stand-in"))
    monkeypatch.setattr(measure, "copy_bytes_per_s", lambda: COPY_BYTES_PER_S)
    monkeypatch.setattr(measure, "mma_flop_per_s", lambda spec, arch: MMA_FLOP_PER_S)
    monkeypatch.setattr(measure, "capture", capture)
    monkeypatch.setattr(measure, "sample", sample)
    return rounds
