"""One rank of a real merge: all-gather of queries, attention over the rank's own shard, LSE merge, as serving does it.

    torchrun --nproc-per-node 4 -m mlactl.replay.dcp FOLDER

gloo on CPUs, NCCL where every rank has a GPU. A rank's partial result is the kernel's where it can run, else the captured one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mlactl.errors import MlactlError, UsageError
from mlactl.printable import counted, shell_word
from mlactl.replay import oracle
from mlactl.replay.capture import Capture, find
from mlactl.replay.dcp.groups import Group, compare_merged, find_groups, parts_of
from mlactl.replay.errors import BadCapture
from mlactl.replay.kernel import run_kernel
from mlactl.replay.report import ERROR, CallReport, Report
from mlactl.replay.results import natural_lse

if TYPE_CHECKING:
    import torch

    from mlactl.replay.runner import ReplayOptions

KERNEL, CAPTURED, REFERENCE = "kernel", "captured output", "reference"
"""Where a rank's partial result comes from."""


def run_ranks(paths: Sequence[str], options: ReplayOptions) -> Report | None:
    """Runs every group of the captures over the process group; the report on rank 0, None on the others.

    Raises UsageError where the number of ranks is not the groups' DCP world, or there is no group.
    """
    import os

    import torch
    import torch.distributed as dist

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    oracle.device_for(options.device)
    found = find_groups(find(paths), with_results=False)
    groups = found.complete
    if not groups:
        why = f": {found.incomplete[0].name}: {found.incomplete[0].message}" if found.incomplete else ""
        raise UsageError(f"the captures hold no complete DCP group{why}", hint="name a folder with the captures of every rank of a call")
    worlds = {group.shards[0].call.parallel.dcp_world for group in groups}
    if worlds != {ranks}:
        started = f"{counted(ranks, 'rank')} {'was' if ranks == 1 else 'were'} started"
        raise UsageError(
            f"{started}, the captures hold groups of {' and '.join(map(str, sorted(worlds)))}",
            hint=f"torchrun --nproc-per-node {min(worlds)} -m mlactl.replay.dcp {shell_word(paths[0])}",
        )
    local = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = options.device != "cpu" and torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if on_gpu:
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        device = f"cuda:{local}" if on_gpu else "cpu"
        reports = [_run_group(group, options, device) for group in groups]
    finally:
        dist.destroy_process_group()
    made = tuple(report for report in reports if report is not None)
    return Report((*made, *found.incomplete), command="dcp") if made else None


def _run_group(group: Group, options: ReplayOptions, device: str) -> CallReport | None:
    import torch
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    shard = group.shards[rank]
    options.step(group.name)
    query = _gather_queries(shard, rank, world, device)
    if not torch.equal(query.cpu(), shard.tensors["q"]):
        raise BadCapture(f"rank {rank}: the gathered queries are not the ones its capture holds")
    output, lse, source = _attend(shard, options, device)
    sources: list[str] = [""] * world
    dist.all_gather_object(sources, source)
    merged, total = _merge(output.to(device), lse.to(device), world)
    if rank:
        return None
    parts = parts_of(group) if all(one == CAPTURED for one in sources) else None
    how = f"{world} ranks, {dist.get_backend()}"
    try:
        report = compare_merged(group, merged.cpu(), total.cpu(), options, how=how, parts=parts, partials=sources)
    except MlactlError as error:
        return CallReport(group.name, ERROR, (), message=error.message, hint=error.hint, group=True)
    blind = [str(place) for place, one in enumerate(sources) if one == REFERENCE]
    if not blind:
        return report
    if len(blind) == world:
        note = "no rank captured a result with its LSE or could run the kernel: the reference was merged, and nothing but the merge was judged"
    else:
        note = (
            f"rank {', '.join(blind)} captured no result with its LSE and could not run the kernel: the reference stood in, nothing of it was judged"
        )
    return replace(report, notes=(*report.notes, note))


def _gather_queries(shard: Capture, rank: int, world: int, device: str) -> torch.Tensor:
    """All heads from each rank's own: heads that the world does not divide are gathered in uneven parts by padding."""
    import torch
    import torch.distributed as dist

    query = shard.tensors["q"]
    share = -(-query.shape[1] // world)
    own = query[:, rank * share : (rank + 1) * share].contiguous()
    padded = query.new_zeros((query.shape[0], share, query.shape[2]))
    padded[:, : own.shape[1]] = own
    # As bytes: not every backend moves every element type.
    sent = padded.contiguous().view(torch.uint8).to(device)
    parts = [torch.empty_like(sent) for _ in range(world)]
    dist.all_gather(parts, sent)
    return torch.cat([part.view(query.dtype) for part in parts], dim=1)[:, : query.shape[1]]


def _attend(shard: Capture, options: ReplayOptions, device: str) -> tuple[torch.Tensor, torch.Tensor, str]:
    """The rank's partial result with natural LSE, and where it comes from.

    The kernel where it can run, else what was captured, else the reference, rounded to bf16 as a kernel's output is.
    """
    import torch

    if options.kernel and device != "cpu":
        found = run_kernel(shard, cache_dir=options.cache_dir, opener=options.opener, repeats=1)
        if found.output is not None and found.lse is not None:
            return found.output, found.lse, KERNEL
    if shard.output is not None and shard.lse is not None:
        return shard.output, natural_lse(shard.lse, shard.call.lse_base).float(), CAPTURED
    output, lse = oracle.reference(shard, options.reference, device="cpu" if device == "cpu" else "cuda")
    return output.to(torch.bfloat16), lse.float(), REFERENCE


def _merge(output: torch.Tensor, lse: torch.Tensor, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All-gather of LSEs, each rank's output scaled by its share of the sum, then a sum over ranks. LSEs natural."""
    import torch
    import torch.distributed as dist

    lses = [torch.empty_like(lse) for _ in range(world)]
    dist.all_gather(lses, lse.contiguous())
    total = torch.logsumexp(torch.stack(lses), dim=0)
    weight = torch.exp(lse - torch.where(total == -math.inf, 0.0, total))
    scaled = torch.where((weight > 0)[..., None], output.float(), 0.0) * weight[..., None]
    dist.all_reduce(scaled)
    return scaled, total
