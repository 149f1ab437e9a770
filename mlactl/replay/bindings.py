"""Binds a captured call to a kernel plan of this device: the other direction of `trim`."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from mlactl.kernels import registry

if TYPE_CHECKING:
    import torch

    from mlactl.replay.capture import Capture
    from mlactl.replay.header import TensorFact


def bind(capture: Capture, arch: str) -> Any:
    """A binding of the capture's kernel over copies of its tensors on the current device; raises NotBuiltYet, PlanError, BindError."""
    return _dense(capture, arch) if capture.dense else _sparse(capture, arch)


def restored(tensor: torch.Tensor, fact: TensorFact | None, device: str) -> torch.Tensor:
    """The tensor on the device with the strides and storage offset the call had, where its shape is still that one."""
    import torch

    if fact is None or tuple(tensor.shape) != fact.shape or not tensor.numel():
        return tensor.to(device)
    reach = fact.storage_offset + 1 + sum(stride * (extent - 1) for stride, extent in zip(fact.strides, fact.shape, strict=True))
    memory = torch.zeros(reach, dtype=tensor.dtype, device=device)
    view = memory.as_strided(fact.shape, fact.strides, fact.storage_offset)
    view.copy_(tensor)
    return view


def _sparse(capture: Capture, arch: str) -> Any:
    import torch

    from mlactl.kernels.mla import sparse_planner
    from mlactl.kernels.mla.sparse import SparseTensors

    call, device = capture.call, "cuda"
    mode = "prefill" if call.kernel_id == registry.SPARSE_PREFILL.kernel_id else call.mode
    plan = sparse_planner.plan(
        sparse_planner.SparseCaps(
            mode=mode,
            heads=capture.heads,
            max_rows=max(1, capture.rows),
            top_k=int(capture.tensors["indices"].shape[1]),
            record=call.record,
            multiprocessors=torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count,
            arch=arch,
        )
    )
    tensors = SparseTensors(
        q=restored(capture.tensors["q"], capture.facts.get("q"), device),
        kv_cache=capture.tensors["kv_cache"].to(device),
        indices=capture.tensors["indices"].to(device),
        lengths=capture.tensors["lengths"].to(device),
        output=torch.empty((capture.rows, capture.heads, capture.values), dtype=torch.bfloat16, device=device),
        lse=torch.empty((capture.rows, capture.heads), dtype=torch.float32, device=device),
        scratch=torch.empty(plan.scratch_bytes, dtype=torch.uint8, device=device) if plan.scratch_bytes else None,
        latent_scale=call.latent_scale,
        sm_scale=call.sm_scale,
        host_lengths=capture.tensors["lengths"].tolist(),
    )
    binding = plan.bind(tensors)
    registry.require_built(binding.spec)
    binding.validate()
    return binding


def _dense(capture: Capture, arch: str) -> Any:
    import torch

    from mlactl.kernels.mla import planner
    from mlactl.kernels.mla.dense import DenseTensors

    call, device = capture.call, "cuda"
    ends = capture.boundaries
    counts = [later - earlier for earlier, later in itertools.pairwise(ends)]
    lengths = [int(value) for value in capture.tensors["cache_seqlens"].tolist()]
    uneven = len(set(counts)) > 1
    mode = "extend" if call.mode == "prefill" else call.mode
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    plan = planner.plan(
        planner.DenseCaps(
            mode=mode,
            heads=capture.heads,
            max_requests=len(lengths),
            max_tokens=max(1, *lengths),
            page_size=call.page_size,
            multiprocessors=properties.multi_processor_count,
            arch=arch,
            rows=call.sparse.rows if call.sparse is not None else max(1, *counts),
            max_query_rows=max(1, capture.rows) if mode == "extend" else None,
            q_dtype="bf16" if capture.tensors["q"].dtype == torch.bfloat16 else "e4m3",
            record=call.record,
            width=int(capture.tensors["q"].shape[2]),
            per_query="query_cache_seqlens" in capture.tensors,
            window=call.window is not None,
            sparse=None if call.sparse is None else call.sparse.policy(),
        )
    )
    registry.require_built(plan.forward)
    q = restored(capture.tensors["q"], capture.facts.get("q"), device)
    starts = capture.tensors["cu_seqlens_q"].to(device) if mode == "extend" or uneven else None
    own = capture.tensors.get("query_cache_seqlens")
    tensors = DenseTensors(
        q=q,
        kv_cache=capture.tensors["kv_cache"].to(device),
        page_table=capture.tensors["page_table"].to(device),
        cache_seqlens=capture.tensors["cache_seqlens"].to(device),
        output=torch.empty((capture.rows, capture.heads, capture.values), dtype=torch.bfloat16, device=device),
        lse=torch.empty((capture.rows, capture.heads), dtype=torch.float32, device=device),
        scratch=torch.empty(plan.scratch_bytes, dtype=torch.uint8, device=device) if plan.scratch_bytes else None,
        cu_seqlens_q=starts,
        query_cache_seqlens=None if own is None else own.to(device),
        host_cache_seqlens=lengths,
        host_cu_seqlens_q=None if starts is None else list(ends),
        sm_scale=call.sm_scale,
        kv_scale=call.kv_scale,
        q_scale=call.q_scale,
        window=call.window,
    )
    binding = plan.bind(tensors)
    binding.validate()
    return binding
