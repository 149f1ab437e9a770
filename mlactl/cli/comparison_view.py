"""How a replay or diff report looks on a terminal: verdict, tables, first and worst mismatch, clusters, LSE, determinism, command."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mlactl.replay import wording
from mlactl.replay.compare import Cluster, Comparison
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
    for finding in call.findings:
        out.line(f"finding: {finding}")
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
    for label, text in wording.detail_lines(item):
        out.line(f"  {prefix}{label:9} {text}" if label else f"  {prefix}{text}")


def _show_bisection(out: Output, call: CallReport) -> None:
    if call.bisection is None:
        return
    out.line()
    out.line(f"bisect: {call.bisection.verdict}")
    for label, text in wording.bisection_lines(call.bisection):
        out.line(f"  {label:15} {text}" if label else f"  {text}")


def _number(value: float | None, digits: int = 3) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}g}" if math.isfinite(value) else str(value)


def _elements_only(item: Comparison) -> bool:
    """Whether a cosine and a norm say nothing about it: a log-sum-exp is no vector, and integers are equal or they are not."""
    return item.name == "lse" or item.tolerance.elements_exact()


_COLUMNS = (
    Column("output", lambda item: item.name),
    Column("status", lambda item: "ok" if item.matches else "MISMATCH"),
    Column("mismatches", lambda item: f"{item.mismatches:,}/{item.elements:,}", right=True),
    Column("bad rows", lambda item: f"{item.bad_rows:,}/{item.rows:,}", right=True),
    Column("max abs", lambda item: _number(item.max_abs), right=True),
    Column("max rel", lambda item: _number(item.max_rel), right=True),
    Column("cosine", lambda item: "-" if item.cosine is None or _elements_only(item) else f"{item.cosine:.7f}", right=True),
    Column("norm off", lambda item: "-" if _elements_only(item) else _number(item.norm_deviation), right=True),
    Column("smallest tolerance", wording.needed_text),
    Column("used", lambda item: item.tolerance.limits()),
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
    return "; ".join([*(f"{item.name}: {wording.why(item)}" for item in wrong), *call.findings])


_LIST = (
    Column("capture", lambda call: call.name),
    Column("status", lambda call: _WORDS[call.status]),
    Column("error/allowed", _largest, right=True),
    Column("what", _why),
)
