"""Puts the shards of one call back together: the call as a single rank would have run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from mlactl.kernels.spec import FactValue
from mlactl.replay.capture import Capture
from mlactl.replay.errors import BadCapture
from mlactl.replay.header import CallHeader, Parallel
from mlactl.replay.visible import visible_lengths

if TYPE_CHECKING:
    import torch


def held(tokens: int, rank: int, world: int, interleave: int) -> int:
    """How many of the first `tokens` tokens of a request rank `rank` holds: those with (t // interleave) % world == rank."""
    cycle = world * interleave
    return tokens // cycle * interleave + min(max(tokens % cycle - rank * interleave, 0), interleave)


def unsharded(shards: Sequence[Capture]) -> Capture:
    """The unsharded call of shards in rank order. Raises BadCapture where their lengths are no interleaved sharding of one request."""
    return _dense(shards) if shards[0].dense else _selected(shards)


def global_lengths(shards: Sequence[Capture]) -> list[int]:
    """Tokens of each request over all ranks, checked against what each rank should hold of them."""
    parallel = shards[0].call.parallel
    per_rank = [[int(value) for value in shard.tensors["cache_seqlens"].tolist()] for shard in shards]
    totals = [sum(lengths) for lengths in zip(*per_rank, strict=True)]
    for request, total in enumerate(totals):
        for rank, lengths in enumerate(per_rank):
            expected = held(total, rank, parallel.dcp_world, parallel.interleave)
            if lengths[request] != expected:
                raise BadCapture(
                    f"request {request}: rank {rank} of {parallel.dcp_world} holds {lengths[request]} of {total} tokens, "
                    f"interleave {parallel.interleave} gives it {expected}"
                )
    return totals


def length_faults(shards: Sequence[Capture]) -> list[tuple[int, int, int, int]]:
    """(rank, row, sees, should see) for every row whose rank-local visible length is not the rank's share of the row's global one.

    Row i of a request of q_len rows and n tokens sees n - q_len + i + 1 of them; a rank sees those it holds. Deriving the
    rows' lengths from the rank-local request length instead gives 3, 4, 5 where 4, 4, 5 is right.
    """
    if not shards[0].dense:
        return []
    parallel = shards[0].call.parallel
    wanted = _global_visible(shards[0], global_lengths(shards))
    faults = []
    for rank, shard in enumerate(shards):
        for row, (sees, tokens) in enumerate(zip(visible_lengths(shard), wanted, strict=True)):
            right = held(tokens, rank, parallel.dcp_world, parallel.interleave)
            if sees != right:
                faults.append((rank, row, sees, right))
    return faults


def _global_visible(shard: Capture, totals: Sequence[int]) -> list[int]:
    ends = shard.boundaries
    return [
        max(0, total - (ends[request + 1] - ends[request]) + position + 1)
        for request, total in enumerate(totals)
        for position in range(ends[request + 1] - ends[request])
    ]


def _dense(shards: Sequence[Capture]) -> Capture:
    import torch

    first, call = shards[0], shards[0].call
    totals = global_lengths(shards)
    size = call.page_size
    counts = [-(-total // size) for total in totals]
    kv = first.tensors["kv_cache"].new_zeros((sum(counts), size, first.tensors["kv_cache"].shape[2]))
    table = torch.full((len(totals), max([1, *counts])), -1, dtype=torch.int32)
    start = 0
    for request, (total, count) in enumerate(zip(totals, counts, strict=True)):
        table[request, :count] = torch.arange(start, start + count, dtype=torch.int32)
        flat = kv[start : start + count].flatten(0, 1)
        tokens = torch.arange(total)
        for rank, shard in enumerate(shards):
            mine = tokens[(tokens // call.parallel.interleave) % call.parallel.dcp_world == rank]
            positions = torch.arange(len(mine))
            pages = shard.tensors["page_table"][request][positions // size].long()
            readable = pages >= 0  # a window leaves the pages before it out of the capture
            flat[mine[readable]] = shard.tensors["kv_cache"][pages[readable], positions[readable] % size]
        start += count
    tensors = {
        "q": first.tensors["q"],
        "kv_cache": kv,
        "page_ids": torch.arange(len(kv)),
        "page_table": table,
        "cache_seqlens": torch.tensor(totals, dtype=torch.int32),
        "cu_seqlens_q": first.tensors["cu_seqlens_q"],
    }
    facts: dict[str, FactValue] = {**call.facts, "lengths": "causal"} if "lengths" in call.facts else call.facts
    whole = replace_call(first, tensors)
    return replace(whole, call=_with(call, facts))


def _selected(shards: Sequence[Capture]) -> Capture:
    """Selected slots: the ranks' selections side by side, over all their pages."""
    import torch

    first = shards[0]
    size = first.call.page_size
    shifted, pages = [], 0
    for shard in shards:
        columns = torch.arange(shard.tensors["indices"].shape[1])
        live = (columns[None, :] < shard.tensors["lengths"][:, None]) & (shard.tensors["indices"] >= 0)
        shifted.append(torch.where(live, shard.tensors["indices"] + pages * size, -1))
        pages += len(shard.tensors["kv_cache"])
    indices = torch.cat(shifted, dim=1).to(torch.int32)
    tensors = {
        "q": first.tensors["q"],
        "kv_cache": torch.cat([shard.tensors["kv_cache"] for shard in shards]),
        "page_ids": torch.arange(pages),
        "indices": indices,
        "lengths": torch.full((first.rows,), indices.shape[1], dtype=torch.int32),
    }
    return replace(replace_call(first, tensors), call=_with(first.call, first.call.facts))


def replace_call(shard: Capture, tensors: dict[str, torch.Tensor]) -> Capture:
    """The shard's call over other tensors, without result, facts or path."""
    return replace(shard, tensors=tensors, facts={}, output=None, lse=None, path=None)


def _with(call: CallHeader, facts: dict[str, FactValue]) -> CallHeader:
    """The call on one rank of no DCP group."""
    parallel = Parallel(tp_rank=call.parallel.tp_rank, tp_world=call.parallel.tp_world)
    return msgspec.structs.replace(call, facts=facts, parallel=parallel, splits=None)
