"""Finds the captures that are shards of one call, and reports on each group as one merged call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlactl.errors import MlactlError
from mlactl.replay import capture as captures
from mlactl.replay import oracle, storage
from mlactl.replay.capture import Capture
from mlactl.replay.compare import Cluster
from mlactl.replay.dcp.merge import merge_results
from mlactl.replay.dcp.unsharded import length_faults, unsharded
from mlactl.replay.errors import BadCapture
from mlactl.replay.gates import output_factors
from mlactl.replay.report import ERROR, MATCH, MISMATCH, Bisection, CallReport, Hypothesis, Pair
from mlactl.replay.results import call_axes, result_comparisons
from mlactl.replay.tolerances import for_merged_output

if TYPE_CHECKING:
    import torch

    from mlactl.replay.runner import ReplayOptions


@dataclass(frozen=True, slots=True)
class Group:
    """Shards of one call in rank order, all with results."""

    name: str
    shards: tuple[Capture, ...]


def find_groups(paths: Sequence[Path]) -> tuple[Group, ...]:
    """Complete groups among the captures, in the order of their first rank.

    After the all-gather every rank of a call holds the same queries, so shards are those of equal q, boundaries and DCP
    coordinates. Raises BadCapture where two captures claim one rank of one call.
    """
    found: dict[tuple[object, ...], dict[int, Capture]] = {}
    for path in paths:
        try:
            call = storage.read_header(path).call
            if call is None or call.parallel.dcp_world == 1:
                continue
            capture = captures.read(path)
        except MlactlError:
            continue  # it has a report of its own
        parallel = capture.call.parallel
        if capture.output is None or capture.lse is None:
            continue
        starts = capture.facts["cu_seqlens_q"].sha256 if capture.dense else ""
        key = (
            capture.facts["q"].sha256,
            starts,
            parallel.tp_rank,
            parallel.dcp_world,
            parallel.interleave,
            capture.call.record,
            capture.call.sm_scale,
        )
        ranks = found.setdefault(key, {})
        if parallel.dcp_rank in ranks:
            raise BadCapture(
                f"{path} and {ranks[parallel.dcp_rank].path} are both DCP rank {parallel.dcp_rank} of one call", hint="replay one folder a run"
            )
        ranks[parallel.dcp_rank] = capture
    complete = (ranks for key, ranks in found.items() if len(ranks) == next(iter(ranks.values())).call.parallel.dcp_world)
    return tuple(Group(f"DCP group of {ranks[0].name}", tuple(ranks[rank] for rank in sorted(ranks))) for ranks in complete)


def group_reports(paths: Sequence[Path], options: ReplayOptions) -> tuple[CallReport, ...]:
    """A report for every complete group; none where the captures hold no group."""
    if options.rows is not None or options.heads is not None:
        return ()
    try:
        groups = find_groups(paths)
    except MlactlError as error:
        return (CallReport("DCP groups", ERROR, (), message=error.message, hint=error.hint),)
    return tuple(_report(group, options) for group in groups)


def _report(group: Group, options: ReplayOptions) -> CallReport:
    started = time.perf_counter()
    try:
        merged = merge_results(*_parts(group))
        found = compare_merged(group, merged[0], merged[1], options)
    except MlactlError as error:
        found = CallReport(group.name, ERROR, (), message=error.message, hint=error.hint)
    return replace(found, seconds=time.perf_counter() - started)


def _parts(group: Group) -> tuple[list[torch.Tensor], list[torch.Tensor], list[str]]:
    outputs = [shard.output for shard in group.shards if shard.output is not None]
    lses = [shard.lse for shard in group.shards if shard.lse is not None]
    return outputs, lses, [shard.call.lse_base for shard in group.shards]


def compare_merged(group: Group, output: torch.Tensor, lse: torch.Tensor, options: ReplayOptions, *, how: str = "merged") -> CallReport:
    """The report on a merged result (natural LSE) of a group against the unsharded reference."""
    whole = unsharded(group.shards)
    reference = oracle.reference(whole, options.reference, device=options.device)
    call, parallel = whole.call, group.shards[0].call.parallel
    results = (output, reference[0]), (lse, reference[1])
    comparisons = result_comparisons(call.record, call.mode, *results, call_axes(whole), options.strictness, merged=True)
    pair = Pair(how, f"unsharded reference {options.reference}", comparisons)
    faults = length_faults(group.shards)
    names = " ".join(str(shard.path or shard.name) for shard in group.shards)
    return CallReport(
        group.name,
        MATCH if pair.matches else MISMATCH,
        (
            ("kernel", call.spec.label()),
            ("call", f"{call.mode}, {len(whole.boundaries) - 1} requests, {whole.rows} rows, {whole.heads} heads, {call.record} records"),
            ("shards", f"{parallel.dcp_world} DCP ranks, interleave {parallel.interleave}: {', '.join(shard.name for shard in group.shards)}"),
        ),
        (pair,),
        inferred=() if pair.matches else _by_rank(group, output, reference[0]),
        command=None if pair.matches else f"mlactl replay {names}",
        notes=tuple(f"rank {rank}, row {row}: sees {sees} of its keys, {right} of them are visible" for rank, row, sees, right in faults[:4]),
        bisection=_explain(group, reference, faults) if options.bisect and not pair.matches else None,
    )


def _by_rank(group: Group, output: torch.Tensor, reference: torch.Tensor) -> tuple[Cluster, ...]:
    """The rank whose contribution lines up best with the merged error: taking it out moves the output along weight * (its output - merged)."""
    import torch

    outputs, lses, bases = _parts(group)
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


def _explain(group: Group, reference: tuple[torch.Tensor, torch.Tensor], faults: Sequence[tuple[int, int, int, int]]) -> Bisection:
    """Explanations of a merge that is wrong: lengths, an LSE base, a shard left out."""
    outputs, lses, bases = _parts(group)
    tolerance = for_merged_output()
    tried = []
    for rank, row, sees, right in faults[:4]:
        text = f"rank {rank}, row {row} sees {sees} keys, {right} of those it holds are visible"
        tried.append(Hypothesis("visible length", text, (("rank", rank), ("row", row), ("shift", sees - right)), True, 0.0))
    for rank, base in enumerate(bases):
        other = [*bases[:rank], "2" if base == "natural" else "natural", *bases[rank + 1 :]]
        factor = float(output_factors(merge_results(outputs, lses, other)[0], reference[0], tolerance).max())
        text = (
            f"rank {rank} wrote its LSE as base {other[rank]}, {base} is declared"
            if other[rank] == "2"
            else f"rank {rank} wrote a natural LSE, base 2 is declared"
        )
        tried.append(Hypothesis("LSE base", text, (("rank", rank),), factor <= 1, factor))
    factor = float(
        output_factors(merge_results(outputs, lses, ["natural" if base == "2" else "2" for base in bases])[0], reference[0], tolerance).max()
    )
    tried.append(Hypothesis("LSE base", "every rank wrote its LSE in the other base than it declares", (), factor <= 1, factor))
    ranked = sorted(tried, key=lambda item: (not item.reproduces, item.factor))
    if ranked[0].reproduces:
        return Bisection(f"{ranked[0].name}: {ranked[0].text}", tuple(ranked))
    return Bisection(f"none of {len(ranked)} explanations makes the merge right", tuple(ranked))
