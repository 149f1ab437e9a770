"""Dense MLA over paged caches: validates tensors against a plan, and launches.

plan = planner.plan(DenseCaps(mode="decode", heads=8, max_requests=16, ...))
binding = plan.bind(DenseTensors(q=..., kv_cache=..., ...))
binding.preload()                # ahead of a graph capture
output, lse = binding.run()
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import torch

from mlactl.kernels import runtime
from mlactl.kernels.errors import BindError
from mlactl.kernels.mla import checks
from mlactl.kernels.mla.planner import ALIGNMENT_BYTES, DEFAULT_SM_SCALE, DensePlan

_DTYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "fp8": torch.float8_e4m3fn}
"""Element types by q_dtype and record."""

_SMALLEST_SCALE = 1e-20
"""Least product of the scales: below it the kernel's score of an unseen key, -1e30, would not vanish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseTensors:
    """Tensors of one dense MLA launch, all on one CUDA device.

    q: [total_q, H, width] bf16, or E4M3 over an E4M3 cache, last dim contiguous. Over an E4M3 cache the products are
    f16: elements of q past +-65,504 overflow.
    kv_cache: [pages, page_size, >= width] bf16 or E4M3, last dim contiguous: latent 512 (1,024), then RoPE 64.
    page_table: [requests, width] int32, last dim contiguous; entries past a request's length are never read.
    cache_seqlens: [requests] int32; the cache already holds the new rows; 0 marks a padding request.
    output: [total_q, H, latent] bf16, last dim contiguous. lse: [total_q, H] fp32 contiguous, natural logarithm.
    scratch: [plan.scratch_bytes] uint8, contents irrelevant; None when the plan needs none.
    cu_seqlens_q: [requests + 1] int32, needed for extend; optional for verify, where a request may have fewer rows. Rows
    of q past the last boundary are padding: output 0, LSE -inf.
    query_cache_seqlens: [total_q] int32, each row's own visible length, clamped by the request's cache length; for
    plans with per-query lengths, whose requests all have the plan's rows, and for no others.
    sm_scale: softmax scale; kv_scale, q_scale: scalar scales of E4M3 elements (1.0 over bf16); window: keys a row sees
    at most, for plans with windows.
    host_cache_seqlens, host_cu_seqlens_q: the same numbers on the host, checked by `bind` where given; without them
    `validate` reads the device's.
    """

    q: torch.Tensor
    kv_cache: torch.Tensor
    page_table: torch.Tensor
    cache_seqlens: torch.Tensor
    output: torch.Tensor
    lse: torch.Tensor
    scratch: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    query_cache_seqlens: torch.Tensor | None = None
    host_cache_seqlens: Sequence[int] | None = None
    host_cu_seqlens_q: Sequence[int] | None = None
    sm_scale: float = DEFAULT_SM_SCALE
    kv_scale: float = 1.0
    q_scale: float = 1.0
    window: int | None = None


@dataclass(slots=True)
class DenseBinding:
    """Validated tensors of a plan. `run` launches and nothing else: it may be captured in a CUDA graph."""

    plan: DensePlan
    tensors: DenseTensors
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
        """Loads the plan's objects ahead of a graph capture, compiling what is missing unless the process is frozen."""
        self._load()

    def validate(self) -> None:
        """Checks what only the device's values can tell: lengths, row boundaries, page ids. Synchronises. Raises BindError."""
        tensors = self.tensors
        lengths = tensors.cache_seqlens.tolist()
        boundaries = None if tensors.cu_seqlens_q is None else tensors.cu_seqlens_q.tolist()
        _check_lengths(self.plan, tensors, lengths)
        if boundaries is not None:
            _check_boundaries(self.plan, tensors, boundaries)
        _check_pages(self.plan, tensors, lengths)

    def _load(self) -> runtime.Launch:
        may_compile = not torch.cuda.is_current_stream_capturing()
        arch = self.plan.caps.arch
        if self.plan.merge is not None:
            self._merge = runtime.launch(self.plan.merge, arch, may_compile=may_compile)
        self._forward = runtime.launch(self.plan.forward, arch, may_compile=may_compile)
        return self._forward


def bind(plan: DensePlan, tensors: DenseTensors) -> DenseBinding:
    """Validates and makes views; allocates nothing. Raises BindError naming the argument, the index and both values."""
    if tensors.q.device.type != "cuda":
        raise BindError(f"q is on {tensors.q.device}; the kernels run on CUDA devices")
    check(plan, tensors)
    rows = 0 if tensors.cu_seqlens_q is not None else plan.caps.rows
    boundaries = tensors.cache_seqlens if tensors.cu_seqlens_q is None else tensors.cu_seqlens_q
    partial, partial_lse, directory = _scratch_views(plan, tensors)
    policy = plan.caps.sparse
    # Kernels without a selection or a window do not read these numbers.
    numbers = (1, 0, 1, 0, 0) if policy is None else astuple(policy)
    forward = (
        _as_bytes(tensors.q),
        _as_bytes(tensors.kv_cache),
        tensors.page_table,
        tensors.cache_seqlens,
        boundaries,
        tensors.cache_seqlens if tensors.query_cache_seqlens is None else tensors.query_cache_seqlens,
        tensors.output,
        tensors.lse,
        partial,
        partial_lse,
        directory,
        rows,
        plan.budget,
        plan.blocks,
        min(tensors.window or 1, plan.caps.max_tokens),
        *numbers,
        plan.caps.rows,
        tensors.sm_scale,
        tensors.kv_scale,
        tensors.q_scale,
    )
    merge = (tensors.output, tensors.lse, partial, partial_lse, directory)
    return DenseBinding(plan, tensors, forward, merge)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """E4M3 elements travel to the kernel as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def _scratch_views(plan: DensePlan, tensors: DenseTensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(partials, their LSE, directory); of no rows when the plan never splits, over memory that is bound anyway."""
    if tensors.scratch is None or not plan.budget:
        empty = tensors.output.as_strided((0,), (1,)).view(torch.float32)
        return empty.view(0, plan.latent), empty, empty.view(torch.int32).view(0, 4)
    scratch = tensors.scratch
    partial = scratch[: plan.partial_bytes].view(torch.float32).view(plan.slots, plan.latent)
    after = plan.partial_bytes + plan.partial_lse_bytes
    partial_lse = scratch[plan.partial_bytes : plan.partial_bytes + plan.slots * 4].view(torch.float32)
    directory = scratch[after : after + plan.directory_bytes].view(torch.int32).view(-1, 4)
    return partial, partial_lse, directory


# ---------------------------------------------------------------------- checks


def check(plan: DensePlan, tensors: DenseTensors) -> None:
    """Everything that `bind` checks but the kind of device; touches no device value. Raises BindError."""
    caps = plan.caps
    _check_query_lengths(plan, tensors)
    _check_shapes(plan, tensors)
    _check_layouts(tensors)
    _check_overlaps(tensors)
    _check_numbers(plan, tensors)
    requests = tensors.cache_seqlens.shape[0]
    if not tensors.q.shape[0]:
        raise BindError("q has 0 rows, expected at least 1")
    if (tensors.cu_seqlens_q is None or caps.per_query) and tensors.q.shape[0] != requests * caps.rows:
        raise BindError(f"q has {tensors.q.shape[0]} rows, {requests} requests of {caps.rows} rows need {requests * caps.rows}")
    if tensors.q.shape[0] > plan.query_rows:
        raise BindError(f"q has {tensors.q.shape[0]} rows, the plan holds {plan.query_rows}")
    if tensors.host_cache_seqlens is not None:
        _check_lengths(plan, tensors, tensors.host_cache_seqlens)
    if tensors.host_cu_seqlens_q is not None:
        _check_boundaries(plan, tensors, tensors.host_cu_seqlens_q)


def _check_numbers(plan: DensePlan, tensors: DenseTensors) -> None:
    caps = plan.caps
    product = 1.0
    for name, unscaled in (("sm_scale", False), ("kv_scale", caps.record == "bf16"), ("q_scale", caps.q_dtype == "bf16")):
        value = getattr(tensors, name)
        if unscaled and value != 1.0:
            raise BindError(f"{name} is {value}, bf16 elements have no scale: expected 1.0")
        if not (math.isfinite(value) and 0 < ctypes.c_float(value).value < math.inf):
            raise BindError(f"{name} must be finite and above 0, got {value}")
        product *= value
    if not _SMALLEST_SCALE <= product < 1 / _SMALLEST_SCALE:
        raise BindError(
            f"sm_scale * kv_scale * q_scale is {product:.3g}, expected {_SMALLEST_SCALE:g} to {1 / _SMALLEST_SCALE:g}: the kernel computes in fp32"
        )
    if caps.window and tensors.window is None:
        raise BindError("window is needed: the plan has window=true")
    if tensors.window is not None and not caps.window:
        raise BindError(f"window is {tensors.window}, the plan has window=false")
    if tensors.window is not None and tensors.window < 1:
        raise BindError(f"window must be at least 1, got {tensors.window}")


def _check_query_lengths(plan: DensePlan, tensors: DenseTensors) -> None:
    if tensors.query_cache_seqlens is None and plan.caps.per_query:
        raise BindError("query_cache_seqlens is needed: the plan has lengths=per_query")
    if tensors.query_cache_seqlens is not None and not plan.caps.per_query:
        raise BindError("query_cache_seqlens was given, the plan has lengths=causal")
    if tensors.cu_seqlens_q is None and plan.caps.mode == "extend":
        raise BindError("cu_seqlens_q is needed by an extend plan")
    if tensors.cu_seqlens_q is not None and plan.caps.mode == "decode":
        raise BindError("cu_seqlens_q was given, a decode plan takes one row a request")
    if tensors.host_cu_seqlens_q is not None and tensors.cu_seqlens_q is None:
        raise BindError("host_cu_seqlens_q was given without cu_seqlens_q")


def _check_shapes(plan: DensePlan, tensors: DenseTensors) -> None:
    caps, device = plan.caps, tensors.q.device
    checks.expect("q", tensors.q, _DTYPES[caps.q_dtype], (None, caps.heads, caps.width), device)
    total = tensors.q.shape[0]
    checks.expect("cache_seqlens", tensors.cache_seqlens, torch.int32, (None,), device)
    requests = tensors.cache_seqlens.shape[0]
    if not 1 <= requests <= caps.max_requests:
        raise BindError(f"cache_seqlens has {requests} requests, the plan holds 1 to {caps.max_requests}")
    checks.expect("kv_cache", tensors.kv_cache, _DTYPES[caps.record], (None, caps.page_size, None), device)
    if tensors.kv_cache.shape[2] < caps.width:
        raise BindError(f"kv_cache.shape[2] is {tensors.kv_cache.shape[2]}, a record has {caps.width} elements")
    checks.expect("page_table", tensors.page_table, torch.int32, (requests, None), device)
    checks.expect("output", tensors.output, torch.bfloat16, (total, caps.heads, plan.latent), device)
    checks.expect("lse", tensors.lse, torch.float32, (total, caps.heads), device)
    if tensors.query_cache_seqlens is not None:
        checks.expect("query_cache_seqlens", tensors.query_cache_seqlens, torch.int32, (total,), device)
    if tensors.cu_seqlens_q is not None:
        checks.expect("cu_seqlens_q", tensors.cu_seqlens_q, torch.int32, (requests + 1,), device)
    if plan.scratch_bytes:
        if tensors.scratch is None:
            raise BindError(f"scratch is needed: uint8 of {plan.scratch_bytes} bytes")
        checks.expect("scratch", tensors.scratch, torch.uint8, (None,), device)
        if tensors.scratch.shape[0] < plan.scratch_bytes:
            raise BindError(f"scratch has {tensors.scratch.shape[0]} bytes, the plan needs {plan.scratch_bytes}")


def _check_layouts(tensors: DenseTensors) -> None:
    named = _named(tensors)
    for name, tensor in named.items():
        if tensor.numel() and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise BindError(f"{name}.stride({tensor.dim() - 1}) is {tensor.stride(-1)}, the last dimension must be contiguous")
    for name in ("q", "kv_cache", "output"):
        tensor = named[name]
        multiple = ALIGNMENT_BYTES // tensor.element_size()
        for index in range(2):
            if tensor.stride(index) % multiple:
                raise BindError(f"{name}.stride({index}) is {tensor.stride(index)} elements, expected a multiple of {multiple}")
        _check_alignment(name, tensor)
    if not tensors.lse.is_contiguous():
        raise BindError(f"lse has strides {tuple(tensors.lse.stride())}, it must be contiguous")
    if tensors.scratch is not None:
        _check_alignment("scratch", tensors.scratch)
    for name in ("q", "kv_cache", "page_table", "output"):
        _check_distinct(name, named[name])


def _named(tensors: DenseTensors) -> dict[str, torch.Tensor]:
    names = ("q", "kv_cache", "page_table", "cache_seqlens", "output", "lse", "scratch", "cu_seqlens_q", "query_cache_seqlens")
    return {name: tensor for name in names if (tensor := getattr(tensors, name)) is not None}


def _check_alignment(name: str, tensor: torch.Tensor) -> None:
    if tensor.data_ptr() % ALIGNMENT_BYTES:
        raise BindError(f"{name} starts at {tensor.data_ptr():#x}, expected a multiple of {ALIGNMENT_BYTES} bytes")


def _check_distinct(name: str, tensor: torch.Tensor) -> None:
    """Elements of a view must not share memory: each stride passes the extent of all smaller ones."""
    reach = 1
    for index in sorted(range(tensor.dim()), key=tensor.stride):
        if tensor.shape[index] > 1:
            if tensor.stride(index) < reach:
                raise BindError(f"{name}.stride({index}) is {tensor.stride(index)}: elements overlap, expected at least {reach}")
            reach = tensor.stride(index) * (tensor.shape[index] - 1) + reach


def _check_overlaps(tensors: DenseTensors) -> None:
    """Nothing that is written may share memory with anything else."""
    spans = {name: _span(tensor) for name, tensor in _named(tensors).items() if tensor.numel()}
    for written in ("output", "lse", "scratch"):
        for other, span in spans.items():
            if written in spans and other != written and spans[written][0] < span[1] and span[0] < spans[written][1]:
                raise BindError(f"{written} shares memory with {other}: {written} is written while {other} is in use")


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    reach = sum(stride * (extent - 1) for stride, extent in zip(tensor.stride(), tensor.shape, strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()


def _check_lengths(plan: DensePlan, tensors: DenseTensors, lengths: Sequence[int]) -> None:
    if len(lengths) != tensors.cache_seqlens.shape[0]:
        raise BindError(f"host_cache_seqlens has {len(lengths)} lengths, cache_seqlens has {tensors.cache_seqlens.shape[0]}")
    width, page = tensors.page_table.shape[1], plan.caps.page_size
    for index, length in enumerate(lengths):
        if length < 0:
            raise BindError(f"cache_seqlens[{index}] is {length}, expected at least 0")
        if length > plan.caps.max_tokens:
            raise BindError(f"cache_seqlens[{index}] is {length}, the plan holds {plan.caps.max_tokens} tokens")
        if length > width * page:
            raise BindError(f"cache_seqlens[{index}] is {length}, page_table has {width} pages of {page} tokens, which hold {width * page}")


def _check_boundaries(plan: DensePlan, tensors: DenseTensors, boundaries: Sequence[int]) -> None:
    requests = tensors.cache_seqlens.shape[0]
    if len(boundaries) != requests + 1:
        raise BindError(f"cu_seqlens_q has {len(boundaries)} boundaries, {requests} requests need {requests + 1}")
    if boundaries[0] != 0:
        raise BindError(f"cu_seqlens_q[0] is {boundaries[0]}, expected 0")
    rows = plan.caps.rows
    for index, boundary in enumerate(boundaries):
        if plan.caps.per_query and boundary != index * rows:
            raise BindError(
                f"cu_seqlens_q[{index}] is {boundary}, expected {index * rows}: with per-query lengths every request has exactly {rows} rows"
            )
    for index in range(requests):
        count = boundaries[index + 1] - boundaries[index]
        if count < 0:
            raise BindError(f"cu_seqlens_q[{index + 1}] is {boundaries[index + 1]}, below cu_seqlens_q[{index}] = {boundaries[index]}")
        if count > plan.caps.rows:
            raise BindError(
                f"cu_seqlens_q[{index + 1}] is {boundaries[index + 1]}: request {index} has {count} rows, the plan holds {plan.caps.rows}"
            )
    if boundaries[-1] > tensors.q.shape[0]:
        raise BindError(f"cu_seqlens_q[{requests}] is {boundaries[-1]}, q has {tensors.q.shape[0]} rows")


def _check_pages(plan: DensePlan, tensors: DenseTensors, lengths: Sequence[int]) -> None:
    pages, page = tensors.kv_cache.shape[0], plan.caps.page_size
    for index, row in enumerate(tensors.page_table.tolist()):
        for entry, number in enumerate(row[: -(-lengths[index] // page)]):
            if not 0 <= number < pages:
                raise BindError(
                    f"page_table[{index}, {entry}] is {number}, inside the visible {lengths[index]} tokens; kv_cache has pages 0 to {pages - 1}"
                )
