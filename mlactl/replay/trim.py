"""Turns a bound call into what a capture stores: only the KV pages it can touch, and tables renumbered to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlactl.kernels.errors import NotBuiltYet
from mlactl.replay.header import CallHeader, Parallel, SparsePolicy, TensorFact
from mlactl.replay.records import latent_elements, record_layout
from mlactl.replay.storage import fact

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Described:
    """A call ready to be written: tensors on the CPU and contiguous, facts of the originals."""

    call: CallHeader
    tensors: Mapping[str, torch.Tensor]
    facts: Mapping[str, TensorFact]

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    @property
    def result_bytes(self) -> int:
        """Bytes of the output and LSE that the call will produce: bf16 and fp32, as every kernel here writes."""
        rows, heads, width = self.tensors["q"].shape
        return int(rows * heads * (2 * latent_elements(record_layout(self.call.record), int(width)) + 4))


def describe(call: Any, profile: str | None, parallel: Parallel, layer: int | None = None) -> Described:
    """Reads a binding of the kernels (its `plan` and `tensors`). Raises NotBuiltYet for a kind of call that captures do not know."""
    tensors = call.tensors
    if hasattr(tensors, "page_table"):
        return _dense(call, tensors, profile, parallel, layer)
    if hasattr(tensors, "indices"):
        return _selected(call, tensors, profile, parallel, layer)
    raise NotBuiltYet(f"calls of {type(call).__name__} are not recorded yet")


def _header(call: Any, tensors: Any, mode: str, page_size: int, profile: str | None, parallel: Parallel, layer: int | None) -> CallHeader:
    # A binding over selected slots picks its variant from the scale; a dense plan has one.
    spec = getattr(call, "spec", None) or call.plan.forward
    record = str(spec.fact("record"))
    return CallHeader(
        kernel_id=spec.kernel_id,
        kernel_version=spec.version,
        facts=dict(spec.facts),
        mode=mode,
        record=record,
        scale_mode=record_layout(record).scale_mode,
        page_size=page_size,
        sm_scale=float(tensors.sm_scale),
        lse_base="natural",
        latent_scale=float(getattr(tensors, "latent_scale", None) or 1.0),
        kv_scale=float(getattr(tensors, "kv_scale", None) or 1.0),
        q_scale=float(getattr(tensors, "q_scale", None) or 1.0),
        window=getattr(tensors, "window", None) or None,
        sparse=_selection(call.plan.caps),
        splits=getattr(call.plan, "splits", None),
        profile=profile,
        parallel=parallel,
        layer=layer,
    )


def _selection(caps: Any) -> SparsePolicy | None:
    chosen = getattr(caps, "sparse", None)
    if chosen is None:
        return None
    return SparsePolicy(chosen.stride, chosen.sink_chunks, chosen.recent_chunks, chosen.min_tokens, chosen.refresh_interval, caps.rows)


def _dense(call: Any, tensors: Any, profile: str | None, parallel: Parallel, layer: int | None) -> Described:
    import torch

    caps = call.plan.caps
    lengths = tensors.cache_seqlens.detach().cpu()
    if tensors.cu_seqlens_q is not None:
        starts = tensors.cu_seqlens_q.detach().cpu()
    else:
        starts = torch.arange(len(lengths) + 1, dtype=torch.int32) * caps.rows
    rows = int(starts[-1])
    width = int(call.plan.forward.fact("width"))
    size = int(tensors.kv_cache.shape[1])
    header = _header(call, tensors, caps.mode, size, profile, parallel, layer)
    own = getattr(tensors, "query_cache_seqlens", None)
    stored = {
        "q": tensors.q[:rows].detach().cpu().contiguous(),
        "cache_seqlens": lengths.to(torch.int32).contiguous(),
        "cu_seqlens_q": starts.to(torch.int32).contiguous(),
    }
    if own is not None:
        stored["query_cache_seqlens"] = own[:rows].detach().cpu().to(torch.int32).contiguous()
    table = tensors.page_table.detach().cpu()
    touched = torch.zeros(table.shape, dtype=torch.bool)
    for request, (first, last) in enumerate(_touched(lengths.tolist(), starts.tolist(), stored.get("query_cache_seqlens"), header.window)):
        touched[request, first // size : -(-last // size)] = True
    stored |= pages_of(tensors.kv_cache, table, touched, width)
    originals = {"q": tensors.q, "kv_cache": tensors.kv_cache, "page_table": tensors.page_table, "cache_seqlens": tensors.cache_seqlens}
    originals |= {name: value for name, value in (("cu_seqlens_q", tensors.cu_seqlens_q), ("query_cache_seqlens", own)) if value is not None}
    return Described(header, stored, {name: fact(tensor, originals.get(name)) for name, tensor in stored.items()})


def _touched(lengths: list[int], starts: list[int], own: torch.Tensor | None, window: int | None) -> list[tuple[int, int]]:
    """First key and end of the keys that the rows of each request can see."""
    spans = []
    for request, length in enumerate(lengths):
        rows = range(starts[request], starts[request + 1])
        visible = [min(length, int(own[row])) if own is not None else length - len(rows) + place + 1 for place, row in enumerate(rows)]
        seen = [count for count in visible if count > 0]
        first = 0 if window is None or not seen else max(0, min(seen) - window)
        spans.append((first, max(seen, default=0)))
    return spans


def pages_of(cache: torch.Tensor, table: torch.Tensor, touched: torch.Tensor, width: int) -> dict[str, torch.Tensor]:
    """The touched pages, their original ids in rising order, and the table in terms of them; -1 where nothing is read."""
    import torch

    ids = torch.unique(table[touched].long())
    renumbered = torch.where(touched, torch.searchsorted(ids, table.long().contiguous()), -1).to(torch.int32)
    pages = cache[ids.to(cache.device)][..., :width].detach().cpu().contiguous()
    return {"kv_cache": pages, "page_ids": ids, "page_table": renumbered}


def _selected(call: Any, tensors: Any, profile: str | None, parallel: Parallel, layer: int | None) -> Described:
    import torch

    size = int(tensors.kv_cache.shape[1])
    mode = str(getattr(call.plan.caps, "mode", "decode"))
    header = _header(call, tensors, mode, size, profile, parallel, layer)
    indices, lengths = tensors.indices.detach().cpu(), tensors.lengths.detach().cpu().to(torch.int32)
    columns = torch.arange(indices.shape[1])
    live = (columns[None, :] < lengths[:, None]) & (indices >= 0)
    ids = torch.unique((indices[live] // size).long())
    slots = torch.searchsorted(ids, (indices.long() // size).contiguous()) * size + indices.long() % size
    stored = {
        "q": tensors.q.detach().cpu().contiguous(),
        "kv_cache": tensors.kv_cache[ids.to(tensors.kv_cache.device)].detach().cpu().contiguous(),
        "page_ids": ids,
        "indices": torch.where(live, slots, -1).to(torch.int32),
        "lengths": lengths.contiguous(),
    }
    originals = {"q": tensors.q, "kv_cache": tensors.kv_cache, "indices": tensors.indices, "lengths": tensors.lengths}
    return Described(header, stored, {name: fact(tensor, originals.get(name)) for name, tensor in stored.items()})
