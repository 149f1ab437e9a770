"""How a replay or diff report looks on a terminal: verdict, tables, first and worst mismatch, clusters, LSE, determinism, command."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mlactl.replay.compare import Cluster, Comparison, Element
from mlactl.replay.report import ERROR, MATCH, MISMATCH, NOTHING, CallReport, Pair, Report
from mlactl.ui.output import Column, Output

DETAILED = 8
"""Failing calls shown in full; the others are in the list, and in JSON."""

_WORDS = {MATCH: "ok", MISMATCH: "MISMATCH", NOTHING: "nothing compared", ERROR: "ERROR"}


def show(out: Output, report: Report) -> None:
    """Writes the report; one call in full, of several the list and the failing ones in full."""
    out.line(report.verdict())
    if len(report.calls) == 1:
        _show_call(out, report.calls[0])
        return
    out.line()
    out.table(_LIST, report.calls)
    failing = [call for call in report.calls if call.status in (MISMATCH, ERROR)]
    for call in failing[:DETAILED]:
        _show_call(out, call)
    if len(failing) > DETAILED:
        out.note(f"{len(failing) - DETAILED} more fail; --json has all of them, or replay one by name")


def _show_call(out: Output, call: CallReport) -> None:
    out.line()
    out.line(f"{call.name}: {_WORDS[call.status]}")
    for name, text in call.provenance:
        out.line(f"  {name + ':':15} {text}")
    if call.message:
        out.line(f"  {call.message}")
    if call.hint:
        out.hint(call.hint)
    for pair in call.pairs:
        _show_pair(out, pair, call.inferred if not pair.matches else ())
    if call.determinism:
        out.line(f"repeated runs: {call.determinism}")
    for note in call.notes:
        out.line(f"note: {note}")
    _show_bisection(out, call)
    if call.command:
        out.line(f"reproduce: {call.command}")


def _show_pair(out: Output, pair: Pair, inferred: Sequence[Cluster]) -> None:
    """A table of the outputs, what is behind it, and LSE apart."""
    outputs = [item for item in pair.comparisons if item.name != "lse"]
    lse = [item for item in pair.comparisons if item.name == "lse"]
    out.line()
    out.line(f"{pair.left} against {pair.right}: {'match' if pair.matches else 'MISMATCH'}")
    if outputs:
        out.table(_COLUMNS, outputs)
    for item in outputs:
        _show_details(out, item)
    for cluster in inferred:
        out.line(f"  {'inferred':9} {cluster.note}")
    if lse:
        out.line("LSE (natural)")
        out.table(_COLUMNS, lse)
        _show_details(out, lse[0])


def _show_details(out: Output, item: Comparison) -> None:
    prefix = f"{item.name}: " if item.name not in ("output", "lse") else ""
    for note in item.notes:
        out.line(f"  {prefix}{note}")
    if item.matches:
        return
    if item.first is not None:
        out.line(f"  {prefix}first     {_element(item.first)}")
    if item.worst is not None:
        out.line(f"  {prefix}worst     {_element(item.worst)}")
    if item.worst_row is not None and item.name != "lse":
        row = item.worst_row
        place = ", ".join(f"{name} {position}" for name, position in row.coordinates)
        out.line(
            f"  {prefix}worst row {place}: cosine {row.cosine:.7f}, norm {row.norm_ratio:.5f} of the expected, "
            f"largest error {row.largest_error_share:.2%} of the row's maximum"
        )
    for cluster in item.clusters:
        out.line(f"  {prefix}{cluster.axis:9} {_cluster(cluster)}")


def _element(item: Element) -> str:
    ulp = f", {item.ulp:,} ulp apart" if item.ulp is not None else ""
    return f"{item.where()}: {item.actual:.6g}, expected {item.expected:.6g}{ulp}"


def _cluster(item: Cluster) -> str:
    spread = f"{item.indices:,} of {item.extent:,} hold mismatches"
    if item.indices == item.extent and item.extent > 1:
        spread = f"all {item.extent:,} hold mismatches"
    fullest = ", ".join(f"{index} ({count:,} of {elements:,})" for index, count, elements in item.top)
    return f"{spread}: {fullest}{', …' if item.indices > len(item.top) else ''}"


def _show_bisection(out: Output, call: CallReport) -> None:
    found = call.bisection
    if found is None:
        return
    out.line()
    out.line(f"bisect: {found.verdict}")
    for step in found.steps:
        out.line(f"  {step}")
    for item in found.hypotheses:
        mark = "reproduces" if item.reproduces else f"off by {_factor(item.factor, item.lse_factor)}x the tolerance"
        out.line(f"  {item.name:15} {mark}: {item.text}")
    if found.smallest:
        out.line(f"  smallest failing capture: {found.smallest}")


def _factor(factor: float, lse_factor: float | None) -> str:
    largest = max(factor, lse_factor or 0.0)
    return "any number" if math.isinf(largest) else f"{largest:.3g}"


def _number(value: float | None, digits: int = 3) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}g}" if math.isfinite(value) else str(value)


_COLUMNS = (
    Column("output", lambda item: item.name),
    Column("status", lambda item: "ok" if item.matches else "MISMATCH"),
    Column("mismatches", lambda item: f"{item.mismatches:,}/{item.elements:,}", right=True),
    Column("bad rows", lambda item: f"{item.bad_rows:,}/{item.rows:,}", right=True),
    Column("max abs", lambda item: _number(item.max_abs), right=True),
    Column("max rel", lambda item: _number(item.max_rel), right=True),
    Column("cosine", lambda item: "-" if item.cosine is None or item.name == "lse" else f"{item.cosine:.7f}", right=True),
    Column("smallest tolerance", lambda item: "none" if item.needed is None else "exact" if item.needed_factor == 0 else item.needed.text()),
    Column("used", lambda item: item.tolerance.text()),
)


def _largest(call: CallReport) -> str:
    """The error of a call over what is allowed, of its worst output."""
    factors = [item.needed_factor for pair in call.pairs for item in pair.comparisons]
    return "-" if not factors else _number(max(factors), 2)


def _why(call: CallReport) -> str:
    if call.bisection is not None:
        return call.bisection.verdict
    if call.message:
        return call.message
    wrong = [item for pair in call.pairs for item in pair.comparisons if not item.matches]
    return "; ".join(f"{item.name}: {item.mismatches:,} of {item.elements:,}" for item in wrong)


_LIST = (
    Column("capture", lambda call: call.name),
    Column("status", lambda call: _WORDS[call.status]),
    Column("error/allowed", _largest, right=True),
    Column("what", _why),
)
