"""Random paged batches of a shape on a device: one pool of KV and queries, and the tensors of every launch over them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mlactl.bench.arms import Planned
from mlactl.bench.shapes import Layout, Shape
from mlactl.kernels.mla import gate, reference
from mlactl.kernels.mla.dense import DenseBinding, DenseTensors
from mlactl.kernels.mla.planner import DEFAULT_SM_SCALE, DensePlan
from mlactl.kernels.mla.policy import SparsePolicy

_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "e4m3": torch.float8_e4m3fn}
_SCALES = {"bf16": 1.0, "fp8": 0.037, "e4m3": 0.11}
"""Scalar scales by record and query type; no powers of two, so that one that is dropped or doubled is seen."""

_LARGEST_E4M3 = 448.0
_PAGES_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Pool:
    """What all arms of a shape share. q: [requests * rows, H, width]; kv: [pages, page_size, width]; table: [requests, entries]."""

    q: torch.Tensor
    kv: torch.Tensor
    table: torch.Tensor
    lengths: tuple[int, ...]
    row_counts: tuple[int, ...]
    kv_scale: float
    q_scale: float

    @property
    def boundaries(self) -> tuple[int, ...]:
        """First query row of each request, and the end."""
        return (0, *itertools.accumulate(self.row_counts))

    def visible(self) -> list[int]:
        """Keys that each query row sees, causal and right-aligned."""
        return [
            reference.visible_keys(length, count, row) for length, count in zip(self.lengths, self.row_counts, strict=True) for row in range(count)
        ]


@dataclass(frozen=True, slots=True)
class Bound:
    """One launch over a pool, ready to run."""

    binding: DenseBinding
    tensors: DenseTensors

    def run_poisoned(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, lse) of a run whose output and scratch held NaN before it: what it does not write is seen."""
        self.tensors.output.fill_(math.nan)
        self.tensors.lse.fill_(math.nan)
        if self.tensors.scratch is not None:
            self.tensors.scratch.fill_(0xFF)
        return self.binding.run()


def make_pool(shape: Shape, layout: Layout, *, device: str = "cuda", seed: int = 0) -> Pool:
    """Scatters the pages of every request over the pool."""
    generator = torch.Generator(device=device).manual_seed(seed)
    lengths, page = shape.lengths(), layout.page_size
    entries = [-(-length // page) for length in lengths]
    used = sum(entries)
    pages = torch.randperm(used + 2, generator=generator, device=device)[:used].int()
    table = torch.full((len(lengths), max(entries)), -1, dtype=torch.int32, device=device)
    for request, start in enumerate((0, *itertools.accumulate(entries[:-1]))):
        table[request, : entries[request]] = pages[start : start + entries[request]]
    kv_scale, q_scale = _SCALES[layout.record], _SCALES[layout.q_dtype]
    kv = torch.empty(used + 2, page, layout.width, dtype=_DTYPES[layout.record], device=device)
    for first in range(0, used + 2, _PAGES_AT_ONCE):  # fp32 noise of a whole pool would take twice its memory
        part = kv[first : first + _PAGES_AT_ONCE]
        part.copy_((torch.randn(part.shape, generator=generator, device=device) * (0.5 / kv_scale)).clamp(-_LARGEST_E4M3, _LARGEST_E4M3))
    noise = torch.randn(shape.requests * shape.rows, shape.heads, layout.width, generator=generator, device=device)
    q = (noise * (2 / q_scale)).clamp(-_LARGEST_E4M3, _LARGEST_E4M3).to(_DTYPES[layout.q_dtype])
    return Pool(q, kv, table, tuple(lengths), (shape.rows,) * shape.requests, kv_scale, q_scale)


def bind(pool: Pool, planned: Planned) -> Bound:
    """The tensors of an arm, bound to its plan; raises BindError."""
    assert planned.plan is not None
    plan = planned.plan
    visible = pool.visible()
    table, lengths = pool.table, list(pool.lengths)
    if planned.rows_are_requests:
        table = table.repeat_interleave(torch.tensor(pool.row_counts, device=table.device), dim=0)
        lengths = [length for length, count in zip(pool.lengths, pool.row_counts, strict=True) for _ in range(count)]
        if not plan.caps.per_query:
            lengths = visible
    boundaries = pool.boundaries if plan.caps.mode == "extend" else None
    tensors = _tensors(pool, plan, table, lengths, visible if plan.caps.per_query else None, boundaries)
    return Bound(plan.bind(tensors), tensors)


def _tensors(
    pool: Pool, plan: DensePlan, table: torch.Tensor, lengths: Sequence[int], visible: Sequence[int] | None, boundaries: Sequence[int] | None
) -> DenseTensors:
    device, (total, heads, _) = pool.q.device, pool.q.shape

    def on_device(numbers: Sequence[int] | None) -> torch.Tensor | None:
        return None if numbers is None else torch.tensor(numbers, dtype=torch.int32, device=device)

    cache_seqlens = on_device(lengths)
    assert cache_seqlens is not None
    return DenseTensors(
        q=pool.q,
        kv_cache=pool.kv,
        page_table=table,
        cache_seqlens=cache_seqlens,
        output=torch.empty(total, heads, plan.latent, dtype=torch.bfloat16, device=device),
        lse=torch.empty(total, heads, dtype=torch.float32, device=device),
        scratch=torch.empty(plan.scratch_bytes, dtype=torch.uint8, device=device) if plan.scratch_bytes else None,
        cu_seqlens_q=on_device(boundaries),
        query_cache_seqlens=on_device(visible),
        host_cache_seqlens=lengths,
        host_cu_seqlens_q=boundaries,
        kv_scale=pool.kv_scale,
        q_scale=pool.q_scale,
    )


def expected(pool: Pool, layout: Layout, sparse: SparsePolicy | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, lse) of the fp32 reference over the pool, exact or with the strided selection."""
    return reference.dense_mla(
        pool.q,
        pool.kv,
        pool.table,
        pool.lengths,
        pool.boundaries,
        DEFAULT_SM_SCALE,
        width=layout.width,
        sparse=sparse,
        sparse_rows=max(pool.row_counts),
        kv_scale=pool.kv_scale,
        q_scale=pool.q_scale,
    )


def judge(bound: Bound, right: tuple[torch.Tensor, torch.Tensor], record: str) -> gate.Verdict:
    """The gate's verdict over a poisoned run."""
    return gate.judge(*bound.run_poisoned(), *right, gate.TOLERANCES[record])
