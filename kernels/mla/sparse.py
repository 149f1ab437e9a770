"""Sparse MLA over selected slots of quantised records: validates tensors against a plan, and launches.

plan = sparse_planner.plan(SparseCaps(mode="decode", heads=16, max_rows=32, top_k=2048, record="nvfp4_ds_mla_432", ...))
binding = plan.bind(SparseTensors(q=..., kv_cache=..., ..., latent_scale=scales.for_layer(layer)))
binding.preload()                # ahead of a graph capture
output, lse = binding.run()
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mlactl.kernels import runtime
from mlactl.kernels.errors import BindError
from mlactl.kernels.mla import checks
from mlactl.kernels.mla.latent_scale import LatentScale, resolve
from mlactl.kernels.mla.planner import DEFAULT_SM_SCALE
from mlactl.kernels.mla.sparse_planner import SparsePlan
from mlactl.kernels.mla.sparse_records import LATENT, QUERY_WIDTH, SPARSE_RECORDS
from mlactl.kernels.spec import CompileSpec

_VECTOR_ELEMENTS = 8
_COPY_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseTensors:
    """Tensors of one sparse MLA launch, all on one CUDA device.

    q: [T, H, 576] bf16, last dim contiguous.
    kv_cache: [pages, page_size, bytes] uint8 of the plan's record, last dim contiguous; records evenly spaced over all pages.
    indices: [T, top_k] int32, last dim contiguous; slot = page * page_size + offset; -1 is skipped wherever it stands, a
    repeated slot counts each time.
    lengths: [T] int32, how many leading index columns of each row count; 0 marks a padding row.
    output: [T, H, 512] bf16, last dim contiguous. lse: [T, H] fp32 contiguous, natural logarithm.
    scratch: [plan.scratch_bytes] uint8, contents irrelevant; None when the plan needs none.
    latent_scale: the layer's outer scale; see `latent_scale.OuterScales`.
    host_lengths: the lengths on the host, checked by `bind` where given; without them `validate` reads the device's.
    """

    q: torch.Tensor
    kv_cache: torch.Tensor
    indices: torch.Tensor
    lengths: torch.Tensor
    output: torch.Tensor
    lse: torch.Tensor
    scratch: torch.Tensor | None = None
    latent_scale: float = 1.0
    sm_scale: float = DEFAULT_SM_SCALE
    host_lengths: Sequence[int] | None = None


@dataclass(slots=True)
class SparseBinding:
    """Validated tensors of a plan. `run` launches and nothing else: it may be captured in a CUDA graph.

    scale: the resolved outer scale; spec: the forward variant that serves it.
    """

    plan: SparsePlan
    tensors: SparseTensors
    scale: LatentScale
    spec: CompileSpec
    _forward_arguments: tuple[Any, ...]
    _merge_arguments: tuple[Any, ...]
    _forward: runtime.Launch | None = field(default=None)
    _merge: runtime.Launch | None = field(default=None)

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Launches on the current stream and returns (output, lse); no host synchronisation.

        Loads the objects on its first call: raises MissingObject where one is missing and may not be compiled now.
        """
        recorder = runtime.recorder()
        token = recorder.before(self) if recorder is not None else None
        forward = self._forward
        if forward is None:
            forward = self._load()
        forward(*self._forward_arguments)
        if self._merge is not None:
            self._merge(*self._merge_arguments)
        output, lse = self.tensors.output, self.tensors.lse
        if recorder is not None:
            recorder.after(token, output, lse)
        return output, lse

    def preload(self) -> None:
        """Loads this binding's objects ahead of a graph capture, compiling what is missing unless the process is frozen."""
        self._load()

    def validate(self) -> None:
        """Checks what only the device's values can tell: lengths and slots. Synchronises. Raises BindError."""
        tensors = self.tensors
        lengths = tensors.lengths.tolist()
        _check_lengths(self.plan, tensors, lengths)
        _check_slots(tensors)

    def _load(self) -> runtime.Launch:
        # The variant was chosen from the scale; whatever changed since must not reach the other one.
        self.scale.require(self.spec)
        may_compile = not torch.cuda.is_current_stream_capturing()
        arch = self.plan.caps.arch
        if self.plan.merge is not None:
            self._merge = runtime.launch(self.plan.merge, arch, may_compile=may_compile)
        self._forward = runtime.launch(self.spec, arch, may_compile=may_compile)
        return self._forward


def bind(plan: SparsePlan, tensors: SparseTensors) -> SparseBinding:
    """Validates and makes views; allocates nothing. Raises BindError naming the argument, the index and both values."""
    if tensors.q.device.type != "cuda":
        raise BindError(f"q is on {tensors.q.device}; the kernels run on CUDA devices")
    check(plan, tensors)
    scale = resolve(plan.caps.record, tensors.latent_scale)
    partial, partial_lse, directory = _scratch_views(plan, tensors)
    forward = (
        tensors.q,
        _by_slot(tensors.kv_cache),
        tensors.indices,
        tensors.lengths,
        tensors.output,
        tensors.lse,
        partial,
        partial_lse,
        directory,
        plan.splits,
        tensors.sm_scale,
        scale.value,
    )
    merge = (tensors.output, tensors.lse, partial, partial_lse, directory)
    return SparseBinding(plan, tensors, scale, plan.forward(scale), forward, merge)


def _scratch_views(plan: SparsePlan, tensors: SparseTensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(partials, their LSE, directory); of no rows when the plan never splits, over memory that is bound anyway."""
    if tensors.scratch is None or not plan.slots:
        empty = tensors.lse.view(-1)[:0]
        return empty.view(0, LATENT), empty, empty.view(torch.int32).view(0, 4)
    scratch = tensors.scratch
    partial = scratch[: plan.partial_bytes].view(torch.float32).view(plan.slots, LATENT)
    after = plan.partial_bytes + plan.partial_lse_bytes
    partial_lse = scratch[plan.partial_bytes : plan.partial_bytes + plan.slots * 4].view(torch.float32)
    directory = scratch[after : after + plan.directory_bytes].view(torch.int32).view(-1, 4)
    return partial, partial_lse, directory


# ---------------------------------------------------------------------- checks


def check(plan: SparsePlan, tensors: SparseTensors) -> None:
    """Everything that `bind` checks but the kind of device; touches no device value. Raises BindError."""
    resolve(plan.caps.record, tensors.latent_scale)
    if not (math.isfinite(tensors.sm_scale) and tensors.sm_scale > 0):
        raise BindError(f"sm_scale must be finite and above 0, got {tensors.sm_scale}")
    _check_cache(plan, tensors)
    _check_shapes(plan, tensors)
    for name in ("q", "output"):
        checks.expect_rows(name, getattr(tensors, name), _VECTOR_ELEMENTS)
    checks.expect_rows("indices", tensors.indices, 1)
    checks.expect_rows("lengths", tensors.lengths, 1)
    if not tensors.lse.is_contiguous():
        raise BindError(f"lse has strides {tuple(tensors.lse.stride())}, it must be contiguous")
    named = {name: getattr(tensors, name) for name in ("q", "kv_cache", "indices", "lengths", "output", "lse")}
    if plan.scratch_bytes and tensors.scratch is not None:
        checks.expect_aligned("scratch", tensors.scratch)
        named["scratch"] = tensors.scratch
    checks.expect_apart(named, ("output", "lse", "scratch"))
    if tensors.host_lengths is not None:
        _check_lengths(plan, tensors, tensors.host_lengths)


def _check_cache(plan: SparsePlan, tensors: SparseTensors) -> None:
    cache, record = tensors.kv_cache, plan.record
    if cache.dtype != torch.uint8:
        raise BindError(f"kv_cache has dtype {cache.dtype}, expected torch.uint8")
    if cache.dim() != 3:
        raise BindError(f"kv_cache has rank {cache.dim()}, expected 3: [pages, page_size, {record.record_bytes}]")
    if cache.shape[2] != record.record_bytes:
        others = [other.title for other in SPARSE_RECORDS.values() if other.record_bytes == cache.shape[2]]
        held = f"as {' or '.join(others)} has" if others else "which no sparse record has"
        raise BindError(f"kv_cache holds records of {cache.shape[2]} bytes, {held}; the plan reads {record.title}")
    checks.expect_rows("kv_cache", cache, _COPY_BYTES)
    pages, page_size = cache.shape[:2]
    if pages > 1 and page_size > 1 and cache.stride(0) != page_size * cache.stride(1):
        raise BindError(
            f"kv_cache.stride(0) is {cache.stride(0)}, expected {page_size * cache.stride(1)}: records must be evenly spaced over all pages"
        )
    spacing = _by_slot(cache).stride(1)
    if pages * page_size > 2**31 - 1 or spacing > 2**31 - 1:
        raise BindError(f"kv_cache has {pages * page_size} slots, {spacing} bytes apart; both must fit 31 bits")


def _by_slot(cache: torch.Tensor) -> torch.Tensor:
    """The cache as the kernel steps through it, by its second stride: with pages of one slot only the first says how far slots are apart."""
    return cache.transpose(0, 1) if cache.shape[1] == 1 else cache


def _check_shapes(plan: SparsePlan, tensors: SparseTensors) -> None:
    caps, device = plan.caps, tensors.q.device
    checks.expect("q", tensors.q, torch.bfloat16, (None, caps.heads, QUERY_WIDTH), device)
    rows = tensors.q.shape[0]
    if not 1 <= rows <= caps.max_rows:
        raise BindError(f"q has {rows} rows, the plan holds 1 to {caps.max_rows}")
    if tensors.kv_cache.device != device:
        raise BindError(f"kv_cache is on {tensors.kv_cache.device}, q is on {device}")
    checks.expect("indices", tensors.indices, torch.int32, (rows, None), device)
    if not 1 <= tensors.indices.shape[1] <= caps.top_k:
        raise BindError(f"indices has {tensors.indices.shape[1]} columns, the plan holds 1 to {caps.top_k}")
    checks.expect("lengths", tensors.lengths, torch.int32, (rows,), device)
    checks.expect("output", tensors.output, torch.bfloat16, (rows, caps.heads, LATENT), device)
    checks.expect("lse", tensors.lse, torch.float32, (rows, caps.heads), device)
    if plan.scratch_bytes:
        if tensors.scratch is None:
            raise BindError(f"scratch is needed: uint8 of {plan.scratch_bytes} bytes")
        checks.expect("scratch", tensors.scratch, torch.uint8, (None,), device)
        if tensors.scratch.shape[0] < plan.scratch_bytes:
            raise BindError(f"scratch has {tensors.scratch.shape[0]} bytes, the plan needs {plan.scratch_bytes}")


def _check_lengths(plan: SparsePlan, tensors: SparseTensors, lengths: Sequence[int]) -> None:
    rows, columns = tensors.indices.shape
    if len(lengths) != rows:
        raise BindError(f"host_lengths has {len(lengths)} lengths, q has {rows} rows")
    for index, length in enumerate(lengths):
        if not 0 <= length <= columns:
            raise BindError(f"lengths[{index}] is {length}, indices has {columns} columns; expected 0 to {columns}")


def _check_slots(tensors: SparseTensors) -> None:
    """Only columns that count are looked at; -1 is a hole, any other number must be a slot of the pool."""
    slots = tensors.kv_cache.shape[0] * tensors.kv_cache.shape[1]
    columns = torch.arange(tensors.indices.shape[1], device=tensors.indices.device)
    counted = columns < tensors.lengths.unsqueeze(1)
    bad = counted & ((tensors.indices < -1) | (tensors.indices >= slots))
    if bool(bad.any()):
        row, column = (int(i) for i in bad.nonzero()[0])
        raise BindError(f"indices[{row}, {column}] is {int(tensors.indices[row, column])}, the cache has slots 0 to {slots - 1} (-1 marks a hole)")
