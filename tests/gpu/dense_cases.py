"""Random paged batches for the dense kernels: tensors, plan and reference of one launch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mlactl.kernels.mla import gate, reference
from mlactl.kernels.mla.dense import DenseBinding, DenseTensors
from mlactl.kernels.mla.planner import DenseCaps, DensePlan, plan


@dataclass
class Case:
    """One launch: `row_counts` query rows a request, `boundaries` their running sum."""

    plan: DensePlan
    tensors: DenseTensors
    lengths: tuple[int, ...]
    boundaries: tuple[int, ...]

    def bind(self) -> DenseBinding:
        return self.plan.bind(self.tensors)

    def poison(self) -> None:
        """NaN into everything the launch writes."""
        self.tensors.output.fill_(math.nan)
        self.tensors.lse.fill_(math.nan)
        if self.tensors.scratch is not None:
            self.tensors.scratch.fill_(0xFF)

    def reference(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        t = self.tensors
        return reference.dense_mla(t.q, t.kv_cache, t.page_table, self.lengths, self.boundaries, t.sm_scale, dtype=dtype)

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A poisoned run, cloned."""
        self.poison()
        output, lse = self.bind().run()
        return output.clone(), lse.clone()

    def judge(self) -> gate.Verdict:
        output, lse = self.run()
        return gate.judge(output, lse, *self.reference(), gate.TOLERANCES["bf16"])


def make_case(
    arch: str,
    multiprocessors: int,
    lengths: Sequence[int],
    *,
    heads: int = 8,
    mode: str = "decode",
    rows: int = 1,
    row_counts: Sequence[int] | None = None,
    page_size: int = 64,
    max_requests: int | None = None,
    seed: int = 0,
    spare_entries: int = 3,
    first_page: int = 0,
    kv_width: int = 576,
    device: str = "cuda",
) -> Case:
    """Builds a batch whose pages are scattered over the pool from `first_page` on; unused table entries are -1."""
    generator = torch.Generator(device=device).manual_seed(seed)
    counts = list(row_counts) if row_counts is not None else [rows] * len(lengths)
    boundaries = (0, *itertools.accumulate(counts))
    entries = [-(-length // page_size) for length in lengths]
    used = sum(entries)
    width = max(max(entries), 1) + spare_entries
    pages = torch.randperm(used + 2, generator=generator, device=device)[:used].int() + first_page
    table = torch.full((len(lengths), width), -1, dtype=torch.int32, device=device)
    for request, count in enumerate(entries):
        start = sum(entries[:request])
        table[request, :count] = pages[start : start + count]
    kv = torch.empty(first_page + used + 2, page_size, kv_width, dtype=torch.bfloat16, device=device)
    kv[first_page:] = (torch.randn(used + 2, page_size, kv_width, generator=generator, device=device) * 0.5).bfloat16()
    q = (torch.randn(boundaries[-1], heads, 576, generator=generator, device=device) * 2).bfloat16()
    caps = DenseCaps(
        mode=mode,
        heads=heads,
        max_requests=max_requests or len(lengths),
        max_tokens=max(max(lengths), 1),
        page_size=page_size,
        multiprocessors=multiprocessors,
        arch=arch,
        rows=max(rows, *counts) if len(counts) > 1 else max(rows, counts[0]),
    )
    built = plan(caps)
    host = {"host_cache_seqlens": tuple(lengths)}
    boundaries_tensor = None
    if row_counts is not None:
        boundaries_tensor = torch.tensor(boundaries, dtype=torch.int32, device=device)
        host["host_cu_seqlens_q"] = boundaries
    tensors = DenseTensors(
        q=q,
        kv_cache=kv,
        page_table=table,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device=device),
        output=torch.empty(boundaries[-1], heads, 512, dtype=torch.bfloat16, device=device),
        lse=torch.empty(boundaries[-1], heads, dtype=torch.float32, device=device),
        scratch=torch.empty(built.scratch_bytes, dtype=torch.uint8, device=device) if built.scratch_bytes else None,
        cu_seqlens_q=boundaries_tensor,
        **host,
    )
    return Case(built, tensors, tuple(lengths), boundaries)


def with_tensors(case: Case, **changes) -> Case:
    """The same case with some tensors replaced."""
    return replace(case, tensors=replace(case.tensors, **changes))
