"""Random caches and selections for the sparse kernels: tensors, plan and reference of one launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mlactl.kernels.mla import gate
from mlactl.kernels.mla.quantise import quantise
from mlactl.kernels.mla.sparse import SparseBinding, SparseTensors
from mlactl.kernels.mla.sparse_planner import SparseCaps, SparsePlan, plan
from mlactl.kernels.mla.sparse_reference import sparse_mla_reference

TOLERANCE = gate.TOLERANCES["nvfp4"]


@dataclass
class SparseCase:
    """One launch; `written_scale` is what the cache's latents were divided by."""

    plan: SparsePlan
    tensors: SparseTensors
    written_scale: float

    def bind(self) -> SparseBinding:
        return self.plan.bind(self.tensors)

    def poison(self) -> None:
        """NaN into everything the launch writes."""
        self.tensors.output.fill_(math.nan)
        self.tensors.lse.fill_(math.nan)
        if self.tensors.scratch is not None:
            self.tensors.scratch.fill_(0xFF)

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A poisoned run, cloned."""
        self.poison()
        output, lse = self.bind().run()
        return output.clone(), lse.clone()

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """fp64, from the records as they were written."""
        t = self.tensors
        arguments = {"record": self.plan.caps.record, "sm_scale": t.sm_scale, "latent_scale": self.written_scale, "dtype": torch.float64}
        return sparse_mla_reference(t.q, t.kv_cache, t.indices, t.lengths, **arguments)

    def judge(self) -> gate.Verdict:
        return gate.judge(*self.run(), *self.reference(), TOLERANCE)


def make_cache(record: str, slots: int, page_size: int, latent_scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    """uint8 [pages, page_size, bytes] of random tokens whose size varies from token to token."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    size = torch.rand(slots, 1, device="cuda", generator=generator) + 0.25
    latent = torch.randn(slots, 512, device="cuda", generator=generator) * size
    rope = torch.randn(slots, 64, device="cuda", generator=generator) * size
    return quantise(record, latent, rope, latent_scale=latent_scale).view(slots // page_size, page_size, -1)


def make_case(
    arch: str,
    multiprocessors: int,
    *,
    record: str = "nvfp4_ds_mla_432",
    rows: int = 8,
    heads: int = 16,
    top_k: int = 2048,
    mode: str = "decode",
    lengths: Sequence[int] | None = None,
    holes: float = 0.0,
    duplicates: bool = False,
    latent_scale: float = 1.0,
    page_size: int = 64,
    slots: int = 8192,
    seed: int = 0,
    cache: torch.Tensor | None = None,
    query_size: float = 1.0,
) -> SparseCase:
    """Random slots in every row; `holes` is the share of entries that are -1."""
    generator = torch.Generator(device="cuda").manual_seed(seed + 1)
    cache = make_cache(record, slots, page_size, latent_scale, seed) if cache is None else cache
    pool = cache.shape[0] * cache.shape[1]
    q = (torch.randn(rows, heads, 576, device="cuda", generator=generator) * query_size).bfloat16()
    indices = torch.randint(0, pool, (rows, top_k), device="cuda", dtype=torch.int32, generator=generator)
    if duplicates and top_k >= 4:
        indices[:, top_k // 2 :] = indices[:, : top_k - top_k // 2]
    if holes:
        indices[torch.rand(rows, top_k, device="cuda", generator=generator) < holes] = -1
    counts = list(lengths) if lengths is not None else [top_k] * rows
    built = plan(SparseCaps(mode, heads, rows, top_k, record, multiprocessors, arch))
    tensors = SparseTensors(
        q=q,
        kv_cache=cache,
        indices=indices,
        lengths=torch.tensor(counts, dtype=torch.int32, device="cuda"),
        output=torch.empty(rows, heads, 512, dtype=torch.bfloat16, device="cuda"),
        lse=torch.empty(rows, heads, device="cuda"),
        scratch=torch.empty(built.scratch_bytes, dtype=torch.uint8, device="cuda") if built.scratch_bytes else None,
        latent_scale=latent_scale,
    )
    return SparseCase(built, tensors, latent_scale)


def with_tensors(case: SparseCase, **changes) -> SparseCase:
    """The same case with some tensors replaced."""
    return replace(case, tensors=replace(case.tensors, **changes))
