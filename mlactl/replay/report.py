"""What a replay or diff found, as data: one object that the terminal, JSON and JUnit all render."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlactl.printable import counted
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
    """One explanation of a wrong output, tried against it. `factor` is the largest error left over the tolerance (1 and below passes).

    One that could be made to fit whatever was captured is not `tested`: it does not reproduce, and `text` says why.
    """

    name: str
    text: str
    coordinates: tuple[tuple[str, int | float], ...]
    reproduces: bool
    factor: float
    lse_factor: float | None = None
    tested: bool = True


@dataclass(frozen=True, slots=True)
class Bisection:
    """What `--bisect` found: named explanations, the best first, or the smallest input that still fails."""

    verdict: str
    hypotheses: tuple[Hypothesis, ...] = ()
    smallest: str | None = None
    steps: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CallReport:
    """Everything about one capture (or one merged DCP group, or one pair of files).

    `findings` are mismatches that are no comparison: a tensor or a capture that only one side has. `group`: it is of a merged
    DCP group, which is counted apart from captures.
    """

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
    findings: tuple[str, ...] = ()
    group: bool = False


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
        groups = sum(call.group for call in self.calls)
        single = len(self.calls) - groups
        named = ", ".join(([counted(single, noun)] if single or not groups else []) + ([counted(groups, "group")] if groups else []))
        meaning = {0: "all that was compared agrees", 1: "a result is wrong", 2: "something could not be compared"}[self.exit_code]
        if not self.counts[MATCH] + self.counts[MISMATCH] + self.counts[ERROR]:
            meaning = "nothing was compared"
        parts = ", ".join(f"{count} {status}" for status, count in self.counts.items() if count)
        if self.counts[NOTHING] and self.exit_code != 2:
            meaning += f"; not compared: {_few([call.name for call in self.calls if call.status == NOTHING])}"
        skipped = f", {self.skipped} not run" if self.skipped else ""
        word = ("OK", "FAIL", "ERROR")[self.exit_code]
        return f"{word}: {named}: {parts or 'none'}{skipped} (exit {self.exit_code}: {meaning})"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def number(value: float | None) -> float | str | None:
    """A number JSON can hold: NaN and infinities as words. Integers stay integers."""
    if value is None or math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def statistic(value: float | None) -> float | str | None:
    """A number over many elements; null where some of them are not finite, whose count stands beside it."""
    return None if value is None or math.isnan(value) else number(value)


def report_json(report: Report) -> dict[str, Any]:
    """The whole report as JSON-able data, in the order of the human one."""
    return {
        "verdict": {0: MATCH, 1: MISMATCH, 2: ERROR}[report.exit_code],
        "exit_code": report.exit_code,
        "counts": {key.replace(" ", "_"): value for key, value in report.counts.items()},
        "groups": sum(call.group for call in report.calls),
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
        "findings": list(call.findings),
        "notes": list(call.notes),
        "bisection": _bisection(call.bisection),
    }


def _comparison(item: Comparison) -> dict[str, Any]:
    failing = item.failing
    return {
        "name": item.name,
        "status": item.status,
        "shape": list(item.shape),
        "dtypes": [item.actual_dtype, item.expected_dtype],
        "mismatches": item.mismatches,
        "elements": item.elements,
        "bad_rows": item.bad_rows,
        "rows": item.rows,
        "bad_rows_by": {"element": failing.element, "cosine": failing.cosine, "norm": failing.norm, "not_finite": failing.not_finite},
        "not_finite": item.not_finite,
        "max_abs": statistic(item.max_abs),
        "max_rel": statistic(item.max_rel),
        "cosine": statistic(item.cosine),
        "norm_deviation": statistic(item.norm_deviation),
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
        "cosine": statistic(item.cosine),
        "norm_ratio": statistic(item.norm_ratio),
        "largest_error": statistic(item.largest_error),
        "largest_error_share": statistic(item.largest_error_share),
        "not_finite": item.not_finite,
    }


def _cluster(item: Cluster) -> dict[str, Any]:
    top = [{"index": index, "mismatches": count, item.unit: size} for index, count, size in item.top]
    return {"axis": item.axis, "indices": item.indices, "extent": item.extent, "top": top, "inferred": item.inferred, "note": item.note}


def _bisection(item: Bisection | None) -> dict[str, Any] | None:
    if item is None:
        return None
    tried = [
        {
            "name": one.name,
            "text": one.text,
            "coordinates": dict(one.coordinates),
            "tested": one.tested,
            "reproduces": one.reproduces,
            "factor": number(one.factor) if one.tested else None,
            "lse_factor": number(one.lse_factor) if one.tested else None,
        }
        for one in item.hypotheses
    ]
    return {"verdict": item.verdict, "hypotheses": tried, "smallest": item.smallest, "steps": list(item.steps)}


def junit(report: Report) -> str:
    """The report as JUnit XML: a case for every compared output and every finding, with everything known about those that fail.

    Whatever makes the exit code is a failure or an error here. Names of any bytes are spelled out: XML holds no control
    characters and no lone surrogates.
    """
    from xml.etree import ElementTree as Xml

    from mlactl.printable import safe, safe_lines

    suites = Xml.Element("testsuites")
    suite = Xml.SubElement(suites, "testsuite", name=f"mlactl.{report.command}")
    kinds = []
    for call in _with_skipped(report):
        about = [f"{name}: {text}" for name, text in call.provenance] + [f"note: {note}" for note in call.notes]
        for name, kind, message, lines in _cases(call):
            kinds.append(kind)
            case = Xml.SubElement(suite, "testcase", classname=safe(call.name), name=safe(name), time=f"{call.seconds:.3f}")
            if kind:
                Xml.SubElement(case, kind, message=safe(message)).text = safe_lines("\n".join(lines)) or None
            if about:
                Xml.SubElement(case, "system-out").text = safe_lines("\n".join(about))
    for key, kind in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(key, str(kinds.count(kind)))
    suite.set("tests", str(len(kinds)))
    Xml.indent(suites)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + Xml.tostring(suites, encoding="unicode") + "\n"


def _with_skipped(report: Report) -> tuple[CallReport, ...]:
    if not report.skipped:
        return report.calls
    return (*report.calls, CallReport("not run", NOTHING, (), message=f"{report.skipped} not run after one that failed"))


_Case = tuple[str, str, str, list[str]]
"""Name, kind (failure, error, skipped, or nothing where it passes), message and further lines of one case."""


def _cases(call: CallReport) -> list[_Case]:
    from mlactl.replay.wording import bisection_lines, detail_lines, summary

    after = [f"inferred: {item.note}" for item in call.inferred if item.note]
    if call.bisection is not None:
        after += [f"bisect: {call.bisection.verdict}", *(f"{label} {text}".strip() for label, text in bisection_lines(call.bisection))]
    if call.command:
        after.append(f"reproduce: {call.command}")
    cases: list[_Case] = []
    for pair in call.pairs:
        for item in pair.comparisons:
            name = f"{pair.left} against {pair.right}: {item.name}"
            lines = [f"{label}: {text}" if label else text for label, text in detail_lines(item)]
            cases.append((name, "", "", []) if item.matches else (name, "failure", summary(item), lines + after))
    cases += [(finding, "failure", finding, after) for finding in call.findings]
    # What is not said by a comparison or a finding is said by the call: nothing that sets the exit code may be missing here.
    kind = {ERROR: "error", MISMATCH: "failure", NOTHING: "skipped"}.get(call.status, "")
    if not any(case[1] == kind for case in cases):
        cases.append((call.status, kind, call.message or call.status, [call.hint] if call.hint else []))
    return cases
