"""Finds the captures that are shards of one call, and reports on each group as one merged call."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlactl.errors import MlactlError
from mlactl.printable import counted, safe
from mlactl.replay import capture as captures
from mlactl.replay import oracle, storage
from mlactl.replay.capture import Capture
from mlactl.replay.compare import Cluster
from mlactl.replay.dcp.merge import merge_results
from mlactl.replay.dcp.unsharded import length_faults, unsharded
from mlactl.replay.gates import output_factors
from mlactl.replay.report import ERROR, MATCH, MISMATCH, NOTHING, Bisection, CallReport, Hypothesis, Pair
from mlactl.replay.results import call_axes, call_text, result_comparisons
from mlactl.replay.slices import only_heads, selected
from mlactl.replay.tolerances import for_merged_output

if TYPE_CHECKING:
    import torch

    from mlactl.replay.runner import ReplayOptions

NAMED = 8
"""Ranks that a message names one by one."""

NAMED_FAULTS = 4
"""Rows of a wrong visible length that a report names one by one."""

Parts = tuple[list["torch.Tensor"], list["torch.Tensor"], list[str]]
"""Outputs, LSEs and LSE bases by rank."""


@dataclass(frozen=True, slots=True)
class Group:
    """Shards of one call in rank order."""

    name: str
    shards: tuple[Capture, ...]


@dataclass(frozen=True, slots=True)
class Groups:
    """Complete groups, and a report on each that cannot be merged because something of it is missing."""

    complete: tuple[Group, ...]
    incomplete: tuple[CallReport, ...]


def find_groups(paths: Sequence[Path], *, with_results: bool = True) -> Groups:
    """The DCP groups among the captures, in the order of their first capture.

    After the all-gather every rank of a call holds the same queries, so shards are those of equal q, boundaries, layer and
    DCP coordinates. A call that was recorded more than once is as many groups: the n-th capture of each rank, in the
    order of the paths. `with_results`: shards without output or LSE are missing, as nothing of them can be merged.
    """
    found: dict[tuple[object, ...], dict[int, list[Capture]]] = {}
    for path, name in zip(paths, captures.display_names(paths), strict=True):
        try:
            call = storage.read_header(path).call
            if call is None or call.parallel.dcp_world == 1:
                continue
            capture = replace(captures.read(path), name=name)
        except MlactlError:
            continue  # it has a report of its own
        found.setdefault(_call_of(capture), {}).setdefault(capture.call.parallel.dcp_rank, []).append(capture)
    complete, incomplete = [], []
    for ranks in found.values():
        for turn in range(max(len(recorded) for recorded in ranks.values())):
            shards = {rank: ranks[rank][turn] for rank in sorted(ranks) if turn < len(ranks[rank])}
            group = Group(f"DCP group of {next(iter(shards.values())).name}", tuple(shards.values()))
            lacking = _lacking(shards, with_results)
            if lacking is None:
                complete.append(group)
            else:
                incomplete.append(_unjudged(group.name, *lacking, shards=group.shards))
    return Groups(tuple(complete), tuple(incomplete))


def _call_of(capture: Capture) -> tuple[object, ...]:
    call, parallel = capture.call, capture.call.parallel
    starts = capture.facts["cu_seqlens_q"].sha256 if capture.dense else ""
    key = (capture.facts["q"].sha256, starts, parallel.tp_rank, parallel.dcp_world, parallel.interleave)
    return (*key, call.kernel_id, call.record, call.sm_scale, call.layer)


def _lacking(shards: Mapping[int, Capture], with_results: bool) -> tuple[str, str] | None:
    """What a group lacks to be merged, and what to do about it."""
    world = next(iter(shards.values())).call.parallel.dcp_world
    if len(shards) < world:
        some = list(itertools.islice((rank for rank in range(world) if rank not in shards), NAMED))
        count = world - len(shards)
        named = f"rank{'s' if count > 1 else ''} {', '.join(map(str, some))}{f' and {count - len(some)} more' if count > len(some) else ''}"
        return (
            f"{named} of {world} {'are' if count > 1 else 'is'} missing",
            "name the folders of all ranks in one command: mlactl replay RANK0 RANK1 …",
        )
    empty = [rank for rank, shard in shards.items() if shard.output is None or shard.lse is None] if with_results else []
    if empty:
        named = f"rank{'s' if len(empty) > 1 else ''} {', '.join(map(str, empty[:NAMED]))}"
        ranks = f"torchrun --nproc-per-node {world} -m mlactl.replay.dcp FOLDER attends with the kernel or the reference instead"
        return f"{named} of {world} captured no output with its LSE", ranks
    return None


def _unjudged(name: str, why: str, hint: str, *, shards: Sequence[Capture] = ()) -> CallReport:
    here = (("shards", f"{', '.join(shard.name for shard in shards)}"),) if shards else ()
    return CallReport(name, NOTHING, here, message=f"the merge was not judged: {why}", hint=hint, group=True)


def group_reports(paths: Sequence[Path], options: ReplayOptions, calls: Sequence[CallReport] = ()) -> tuple[CallReport, ...]:
    """A report for every group, those that cannot be merged too; none where the captures hold no group.

    `calls` are the reports on the captures themselves: a rank whose own result is wrong is named for a wrong merge.
    """
    groups = find_groups(paths)
    wrong = {call.name for call in calls if any(pair.left == "captured" and not pair.matches for pair in call.pairs)}
    return (*(_report(group, options, wrong) for group in groups.complete), *groups.incomplete)


def unmerged(paths: Sequence[Path]) -> tuple[CallReport, ...]:
    """After a run that stopped early: one report that says so, where the captures hold a DCP group."""
    for path in paths:
        try:
            call = storage.read_header(path).call
        except MlactlError:
            continue
        if call is not None and call.parallel.dcp_world > 1:
            return (_unjudged("DCP groups", "--fail-fast stopped the run before", "run it without --fail-fast"),)
    return ()


def _report(group: Group, options: ReplayOptions, wrong: Set[str]) -> CallReport:
    started = time.perf_counter()
    options.step(group.name)
    try:
        parts = parts_of(group)
        found = compare_merged(group, *merge_results(*parts), options, parts=parts, wrong=wrong)
    except MlactlError as error:
        found = CallReport(group.name, ERROR, (), message=safe(error.message), hint=error.hint, group=True)
    return replace(found, seconds=time.perf_counter() - started)


def parts_of(group: Group) -> Parts:
    """What was captured by rank."""
    outputs = [shard.output for shard in group.shards if shard.output is not None]
    lses = [shard.lse for shard in group.shards if shard.lse is not None]
    return outputs, lses, [shard.call.lse_base for shard in group.shards]


def compare_merged(
    group: Group,
    output: torch.Tensor,
    lse: torch.Tensor,
    options: ReplayOptions,
    *,
    how: str = "merged",
    parts: Parts | None = None,
    partials: Sequence[str] = (),
    wrong: Set[str] = frozenset(),
) -> CallReport:
    """The report on a merged result (natural LSE) of a group against the unsharded reference.

    `parts` are the ranks' own results where they are known here: what an error is traced to. `partials` says by rank
    where each came from, for merges of something else than what was captured. `wrong` are the captures whose own result
    does not match.
    """
    whole = unsharded(group.shards)
    rows = selected("row", options.rows, whole.rows)
    heads = selected("head", options.heads, whole.heads) if options.heads is not None else None
    reference = oracle.reference(whole, options.reference, device=options.device, rows=rows if options.rows is not None else None)
    right = only_heads(reference[0], heads), only_heads(reference[1], heads)
    merged = _cut(output, rows, heads), _cut(lse, rows, heads)
    call, parallel = whole.call, group.shards[0].call.parallel
    axes = call_axes(whole, rows if options.rows is not None else None, heads)
    comparisons = result_comparisons(call.record, call.mode, (merged[0], right[0]), (merged[1], right[1]), axes, options.strictness, merged=True)
    pair = Pair(how, f"unsharded reference {options.reference}", comparisons)
    faults = [fault for fault in length_faults(group.shards) if fault[1] in rows]
    known = None if parts is None else ([_cut(one, rows, heads) for one in parts[0]], [_cut(one, rows, heads) for one in parts[1]], parts[2])
    saved = (
        () if options.save is None else storage.save_results(options.save, group.name.replace(" ", "-"), (("merged", merged), ("reference", right)))
    )
    explained = options.bisect and not pair.matches and known is not None
    return CallReport(
        group.name,
        MATCH if pair.matches else MISMATCH,
        (
            ("kernel", call.spec.label()),
            ("call", call_text(whole)),
            ("shards", f"{parallel.dcp_world} DCP ranks, interleave {parallel.interleave}: {', '.join(shard.name for shard in group.shards)}"),
            *((("partials", "; ".join(f"rank {rank}: {source}" for rank, source in enumerate(partials))),) if partials else ()),
        ),
        (pair,),
        inferred=() if pair.matches or known is None else _own_verdicts(group, wrong) or _by_rank(known, merged[0], right[0]),
        command=None if pair.matches else options.command([shard.path or shard.name for shard in group.shards], pair),
        notes=(*_length_notes(faults), *saved),
        bisection=_explain(group, known, merged[0], right[0], faults, rows, heads, options) if explained and known is not None else None,
        group=True,
    )


def _length_notes(faults: Sequence[tuple[int, int, int, int]]) -> list[str]:
    notes = [f"rank {rank}, row {row}: sees {sees} of its keys, {count} of them are visible" for rank, row, sees, count in faults[:NAMED_FAULTS]]
    return notes + ([f"and {len(faults) - NAMED_FAULTS} more of such rows"] if len(faults) > NAMED_FAULTS else [])


def _cut(tensor: torch.Tensor, rows: Sequence[int], heads: Sequence[int] | None) -> torch.Tensor:
    return only_heads(tensor if len(rows) == len(tensor) else tensor[list(rows)], heads)


def _own_verdicts(group: Group, wrong: Set[str]) -> tuple[Cluster, ...]:
    """The ranks whose own result is wrong."""
    ranks = [rank for rank, shard in enumerate(group.shards) if shard.name in wrong]
    if not ranks:
        return ()
    more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:NAMED]))}{more}"
    note = f"{named}: {'their own results are' if len(ranks) > 1 else 'its own result is'} wrong"
    top = tuple((rank, 0, 0) for rank in ranks[:NAMED])
    return (Cluster("rank", len(ranks), len(group.shards), top, inferred=True, note=note),)


def _by_rank(parts: Parts, output: torch.Tensor, reference: torch.Tensor) -> tuple[Cluster, ...]:
    """The rank whose contribution lines up best with the merged error: taking it out moves the output along weight * (its output - merged).

    None of two: what one of them adds the other takes away, so both line up alike.
    """
    import torch

    outputs, lses, bases = parts
    if len(outputs) < 3:
        return ()
    total = merge_results(outputs, lses, bases)[1]
    error = (output - reference).double().nan_to_num()
    scores = []
    for rank in range(len(outputs)):
        lse = merge_results([outputs[rank]], [lses[rank]], [bases[rank]])[1]
        weight = torch.exp(lse - total).nan_to_num(0.0).double()[..., None]
        movement = weight * (torch.where(weight > 0, outputs[rank].double(), 0.0) - reference.double())
        scores.append(abs(float((movement * error).sum())) / max(float(movement.norm() * error.norm()), 1e-300))
    best = max(range(len(scores)), key=scores.__getitem__)
    return (Cluster("rank", 1, len(scores), ((best, 0, 0),), inferred=True, note=f"rank {best}: correlation {scores[best]:.2f}"),)


def _explain(
    group: Group,
    parts: Parts,
    merged: torch.Tensor,
    reference: torch.Tensor,
    faults: Sequence[tuple[int, int, int, int]],
    rows: Sequence[int],
    heads: Sequence[int] | None,
    options: ReplayOptions,
) -> Bisection:
    """Explanations of a merge that is wrong, each computed: rank-local lengths as they were captured, an LSE in the other base."""
    outputs, lses, bases = parts
    tolerance = for_merged_output()
    tried = []
    options.step(f"{group.name}: trying explanations")
    if faults:
        # What right kernels would merge to with these very lengths.
        shards = [oracle.reference(shard, options.reference, device=options.device, rows=rows) for shard in group.shards]
        shares = [only_heads(share[0], heads) for share in shards], [only_heads(share[1], heads) for share in shards]
        factor = float(output_factors(merged, merge_results(*shares, ["natural"] * len(shards))[0], tolerance).max())
        for rank, row, sees, right in faults[:NAMED_FAULTS]:
            text = f"rank {rank}, row {row} sees {counted(sees, 'key')}, {right} of those it holds are visible"
            tried.append(Hypothesis("visible length", text, (("rank", rank), ("row", row), ("shift", sees - right)), factor <= 1, factor))
    for rank, base in enumerate(bases):
        other = [*bases[:rank], "2" if base == "natural" else "natural", *bases[rank + 1 :]]
        factor = float(output_factors(merge_results(outputs, lses, other)[0], reference, tolerance).max())
        text = (
            f"rank {rank} wrote its LSE as base {other[rank]}, {base} is declared"
            if other[rank] == "2"
            else f"rank {rank} wrote a natural LSE, base 2 is declared"
        )
        tried.append(Hypothesis("LSE base", text, (("rank", rank),), factor <= 1, factor))
    factor = float(output_factors(merge_results(outputs, lses, ["natural" if base == "2" else "2" for base in bases])[0], reference, tolerance).max())
    tried.append(Hypothesis("LSE base", "every rank wrote its LSE in the other base than it declares", (), factor <= 1, factor))
    ranked = sorted(tried, key=lambda item: (not item.reproduces, item.factor))
    if ranked[0].reproduces:
        like_it = len(faults) - 1 if ranked[0].name == "visible length" else 0
        more = f"; {counted(like_it, 'more row')} like it" if like_it else ""
        return Bisection(f"{ranked[0].name}: {ranked[0].text}{more}", tuple(ranked))
    return Bisection(f"none of {len(ranked)} explanations makes the merge right", tuple(ranked))
