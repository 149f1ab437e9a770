"""What a replay or diff found, as data: one object that the terminal, JSON and JUnit all render."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlactl.replay.compare import Cluster, Comparison, Element, WorstRow

MATCH, MISMATCH, NOTHING, ERROR = "match", "mismatch", "nothing compared", "error"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two results of one call: `left` is judged, `right` taken as right."""

    left: str
    right: str
    comparisons: tuple[Comparison, ...]

    @property
    def matches(self) -> bool:
        """Whether every output of the pair agrees."""
        return all(item.matches for item in self.comparisons)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One explanation of a wrong output, tried against it. `factor` is the largest error left over the tolerance (1 and below passes)."""

    name: str
    text: str
    coordinates: tuple[tuple[str, int | float], ...]
    reproduces: bool
    factor: float
    lse_factor: float | None = None


@dataclass(frozen=True, slots=True)
class Bisection:
    """What `--bisect` found: named explanations, the best first, or the smallest input that still fails."""

    verdict: str
    hypotheses: tuple[Hypothesis, ...] = ()
    smallest: str | None = None
    steps: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CallReport:
    """Everything about one capture (or one merged DCP group, or one pair of files)."""

    name: str
    status: str
    provenance: tuple[tuple[str, str], ...]
    pairs: tuple[Pair, ...] = ()
    inferred: tuple[Cluster, ...] = ()
    determinism: str | None = None
    command: str | None = None
    notes: tuple[str, ...] = ()
    bisection: Bisection | None = None
    message: str | None = None
    hint: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """All calls of one run."""

    calls: tuple[CallReport, ...]
    command: str = "replay"
    skipped: int = 0
    counts: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "counts", {status: sum(call.status == status for call in self.calls) for status in (MATCH, MISMATCH, NOTHING, ERROR)}
        )

    @property
    def exit_code(self) -> int:
        """0 all that was compared matches; 1 a mismatch; 2 a capture that could not be used, or nothing compared at all."""
        if self.counts[ERROR]:
            return 2
        if self.counts[MISMATCH]:
            return 1
        return 0 if self.counts[MATCH] else 2

    def verdict(self) -> str:
        """The first line: what was found and what the exit code says."""
        noun = {"replay": "capture", "diff": "pair"}.get(self.command, "call")
        total = len(self.calls)
        named = f"{total} {noun}{'s' if total != 1 else ''}"
        meaning = {0: "all that was compared agrees", 1: "a result is wrong", 2: "something could not be compared"}[self.exit_code]
        if not self.counts[MATCH] + self.counts[MISMATCH] + self.counts[ERROR]:
            meaning = "nothing was compared"
        parts = ", ".join(f"{count} {status}" for status, count in self.counts.items() if count)
        skipped = f", {self.skipped} not run" if self.skipped else ""
        word = ("OK", "FAIL", "ERROR")[self.exit_code]
        return f"{word}: {named}: {parts or 'none'}{skipped} (exit {self.exit_code}: {meaning})"


def number(value: float | None) -> float | str | None:
    """A float JSON can hold: NaN and infinities as words."""
    if value is None or math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def report_json(report: Report) -> dict[str, Any]:
    """The whole report as JSON-able data, in the order of the human one."""
    return {
        "verdict": {0: MATCH, 1: MISMATCH, 2: ERROR}[report.exit_code],
        "exit_code": report.exit_code,
        "counts": {key.replace(" ", "_"): value for key, value in report.counts.items()},
        "not_run": report.skipped,
        "calls": [call_json(call) for call in report.calls],
    }


def call_json(call: CallReport) -> dict[str, Any]:
    """One call. How long it took is left out: two runs over the same captures print the same."""
    return {
        "name": call.name,
        "status": call.status.replace(" ", "_"),
        "provenance": dict(call.provenance),
        "message": call.message,
        "hint": call.hint,
        "pairs": [
            {
                "left": pair.left,
                "right": pair.right,
                "status": MATCH if pair.matches else MISMATCH,
                "outputs": [_comparison(item) for item in pair.comparisons],
            }
            for pair in call.pairs
        ],
        "inferred_clusters": [_cluster(item) for item in call.inferred],
        "determinism": call.determinism,
        "reproduce": call.command,
        "notes": list(call.notes),
        "bisection": _bisection(call.bisection),
    }


def _comparison(item: Comparison) -> dict[str, Any]:
    return {
        "name": item.name,
        "status": item.status,
        "shape": list(item.shape),
        "dtypes": [item.actual_dtype, item.expected_dtype],
        "mismatches": item.mismatches,
        "elements": item.elements,
        "bad_rows": item.bad_rows,
        "rows": item.rows,
        "max_abs": number(item.max_abs),
        "max_rel": number(item.max_rel),
        "cosine": number(item.cosine),
        "norm_deviation": number(item.norm_deviation),
        "smallest_tolerance": item.needed.as_json() if item.needed is not None else None,
        "smallest_tolerance_factor": number(item.needed_factor),
        "tolerance": item.tolerance.as_json(),
        "bitwise_equal": item.bitwise,
        "nan": {"actual": item.nan_actual, "expected": item.nan_expected},
        "notes": list(item.notes),
        "first": _element(item.first),
        "worst": _element(item.worst),
        "worst_row": _row(item.worst_row),
        "clusters": [_cluster(cluster) for cluster in item.clusters],
    }


def _element(item: Element | None) -> dict[str, Any] | None:
    if item is None:
        return None
    return {
        "index": list(item.index),
        "coordinates": dict(item.coordinates),
        "actual": number(item.actual),
        "expected": number(item.expected),
        "ulp": item.ulp,
    }


def _row(item: WorstRow | None) -> dict[str, Any] | None:
    if item is None:
        return None
    return {
        "coordinates": dict(item.coordinates),
        "cosine": number(item.cosine),
        "norm_ratio": number(item.norm_ratio),
        "largest_error_share": number(item.largest_error_share),
    }


def _cluster(item: Cluster) -> dict[str, Any]:
    top = [{"index": index, "mismatches": count, "elements": elements} for index, count, elements in item.top]
    return {"axis": item.axis, "indices": item.indices, "extent": item.extent, "top": top, "inferred": item.inferred, "note": item.note}


def _bisection(item: Bisection | None) -> dict[str, Any] | None:
    if item is None:
        return None
    tried = [
        {
            "name": one.name,
            "text": one.text,
            "coordinates": dict(one.coordinates),
            "reproduces": one.reproduces,
            "factor": number(one.factor),
            "lse_factor": number(one.lse_factor),
        }
        for one in item.hypotheses
    ]
    return {"verdict": item.verdict, "hypotheses": tried, "smallest": item.smallest, "steps": list(item.steps)}


def junit(report: Report) -> str:
    """The report as JUnit XML: one case per compared output, failures with the worst element, errors for what could not be used."""
    from xml.etree import ElementTree as Xml

    suites = Xml.Element("testsuites")
    suite = Xml.SubElement(suites, "testsuite", name=f"mlactl.{report.command}")
    totals = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for call in report.calls:
        for case_name, comparison in _cases(call):
            totals["tests"] += 1
            case = Xml.SubElement(suite, "testcase", classname=call.name, name=case_name, time=f"{call.seconds:.3f}")
            if comparison is None:
                kind = "skipped" if call.status == NOTHING else "error"
                totals["skipped" if kind == "skipped" else "errors"] += 1
                Xml.SubElement(case, kind, message=call.message or call.status)
            elif not comparison.matches:
                totals["failures"] += 1
                failure = Xml.SubElement(case, "failure", message=summary(comparison))
                failure.text = "\n".join(
                    [*comparison.notes, *(f"inferred: {item.note}" for item in call.inferred if item.note), f"reproduce: {call.command}"]
                )
    for key, value in totals.items():
        suite.set(key, str(value))
    Xml.indent(suites)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + Xml.tostring(suites, encoding="unicode") + "\n"


def _cases(call: CallReport) -> Sequence[tuple[str, Comparison | None]]:
    found: list[tuple[str, Comparison | None]] = [
        (f"{pair.left} against {pair.right}: {item.name}", item) for pair in call.pairs for item in pair.comparisons
    ]
    return found or [(call.status, None)]


def summary(item: Comparison) -> str:
    """One line about a comparison that fails."""
    where = f"; worst at {item.worst.where()}: {item.worst.actual:.6g}, expected {item.worst.expected:.6g}" if item.worst is not None else ""
    return f"{item.name}: {item.mismatches:,} of {item.elements:,} elements and {item.bad_rows:,} of {item.rows:,} rows are wrong{where}"
