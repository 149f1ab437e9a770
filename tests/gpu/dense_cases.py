"""Random paged batches for the dense kernels: tensors, plan and reference of one launch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mlactl.kernels.mla import gate, reference
from mlactl.kernels.mla.config import QUERY_BYTES
from mlactl.kernels.mla.dense import DenseBinding, DenseTensors
from mlactl.kernels.mla.planner import DenseCaps, DensePlan, plan
from mlactl.kernels.mla.policy import SparsePolicy
from mlactl.kernels.mla.records import ELEMENT_BYTES, LATENT_ELEMENTS


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
        t, caps = self.tensors, self.plan.caps
        return reference.dense_mla(
            t.q,
            t.kv_cache,
            t.page_table,
            self.lengths,
            self.boundaries,
            t.sm_scale,
            width=caps.width,
            dtype=dtype,
            query_cache_seqlens=None if t.query_cache_seqlens is None else t.query_cache_seqlens.tolist(),
            window=t.window,
            sparse=caps.sparse,
            sparse_rows=caps.rows,
            kv_scale=t.kv_scale,
            q_scale=t.q_scale,
        )

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A poisoned run, cloned."""
        self.poison()
        output, lse = self.bind().run()
        return output.clone(), lse.clone()

    def judge(self) -> gate.Verdict:
        output, lse = self.run()
        return gate.judge(output, lse, *self.reference(), gate.TOLERANCES[self.plan.caps.record])


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
    kv_width: int | None = None,
    device: str = "cuda",
    width: int = 576,
    record: str = "bf16",
    q_dtype: str = "bf16",
    kv_scale: float | None = None,
    q_scale: float | None = None,
    query_lengths: Sequence[int] | None = None,
    window: int | None = None,
    sparse: SparsePolicy | None = None,
    splits: int | None = None,
) -> Case:
    """Builds a batch whose pages are scattered over the pool from `first_page` on; unused table entries are -1.

    `query_lengths`: each row's own visible length. E4M3 scales default to ones that use a good part of the range.
    """
    kv_width = kv_width or width
    kv_scale = kv_scale or (0.02 if record == "fp8" else 1.0)
    q_scale = q_scale or (0.05 if q_dtype == "e4m3" else 1.0)
    generator = torch.Generator(device=device).manual_seed(seed)
    counts = list(row_counts) if row_counts is not None else [rows] * len(lengths)
    boundaries = (0, *itertools.accumulate(counts))
    entries = [-(-length // page_size) for length in lengths]
    used = sum(entries)
    table_entries = max(max(entries), 1) + spare_entries
    pages = torch.randperm(used + 2, generator=generator, device=device)[:used].int() + first_page
    table = torch.full((len(lengths), table_entries), -1, dtype=torch.int32, device=device)
    for request, count in enumerate(entries):
        start = sum(entries[:request])
        table[request, :count] = pages[start : start + count]
    kv_dtype = torch.bfloat16 if ELEMENT_BYTES[record] == 2 else torch.float8_e4m3fn
    live = _elements(torch.randn(used + 2, page_size, kv_width, generator=generator, device=device) * 0.5, ELEMENT_BYTES[record], kv_scale)
    kv = live
    if first_page:
        kv = torch.empty(first_page + used + 2, page_size, kv_width, dtype=kv_dtype, device=device)
        kv[first_page:] = live
    q = _elements(torch.randn(boundaries[-1], heads, width, generator=generator, device=device) * 2, QUERY_BYTES[q_dtype], q_scale)
    caps = DenseCaps(
        mode=mode,
        heads=heads,
        max_requests=max_requests or len(lengths),
        max_tokens=max(max(lengths), 1),
        page_size=page_size,
        multiprocessors=multiprocessors,
        arch=arch,
        rows=max(rows, *counts) if len(counts) > 1 else max(rows, counts[0]),
        q_dtype=q_dtype,
        record=record,
        width=width,
        per_query=query_lengths is not None,
        window=window is not None,
        sparse=sparse,
        splits=splits,
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
        output=torch.empty(boundaries[-1], heads, LATENT_ELEMENTS[width], dtype=torch.bfloat16, device=device),
        lse=torch.empty(boundaries[-1], heads, dtype=torch.float32, device=device),
        scratch=torch.empty(built.scratch_bytes, dtype=torch.uint8, device=device) if built.scratch_bytes else None,
        cu_seqlens_q=boundaries_tensor,
        query_cache_seqlens=None if query_lengths is None else torch.tensor(query_lengths, dtype=torch.int32, device=device),
        kv_scale=kv_scale,
        q_scale=q_scale,
        window=window,
        **host,
    )
    return Case(built, tensors, tuple(lengths), boundaries)


def _elements(values: torch.Tensor, element_bytes: int, scale: float) -> torch.Tensor:
    if element_bytes == 2:
        return values.bfloat16()
    return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def with_tensors(case: Case, **changes) -> Case:
    """The same case with some tensors replaced."""
    return replace(case, tensors=replace(case.tensors, **changes))
