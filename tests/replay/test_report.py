"""The report as data: JUnit that fails where the exit code does, JSON that is JSON, and words that name the rule."""

import json
import math
from xml.etree import ElementTree

import pytest
import torch

from mlactl.replay import tolerances, wording
from mlactl.replay.compare import Axes, compare
from mlactl.replay.report import ERROR, MATCH, MISMATCH, NOTHING, Bisection, CallReport, Hypothesis, Pair, Report, junit, report_json

BF16 = tolerances.for_output("bf16", "decode")
AXES = Axes(("row", "head", "dim"), "request", (0, 1))


def compared(factor=1.0, value=None):
    expected = torch.linspace(0.5, 1.0, 2 * 1 * 64).reshape(2, 1, 64)
    actual = expected * factor
    if value is not None:
        actual[1, 0, 3] = value
    return compare(actual, expected, BF16, name="output", axes=AXES)


def call(name="x", status=MATCH, *, pairs=True, item=None, **fields):
    found = (Pair("A", "B", (item or compared(),)),) if pairs else ()
    return CallReport(name, status, (("A", "a"), ("B", "b")), found, **fields)


def suite(*calls, **fields):
    return ElementTree.fromstring(junit(Report(calls, **fields)))[0]


@pytest.mark.parametrize(
    ("made", "counts"),
    [
        (call(), ("1", "0", "0", "0")),
        (call(status=MISMATCH, item=compared(1.5)), ("1", "1", "0", "0")),
        (call(status=MISMATCH, findings=("only in A: y",)), ("2", "1", "0", "0")),
        (call(status=MISMATCH, pairs=False, findings=("y is only in a",)), ("1", "1", "0", "0")),
        (call(status=MISMATCH, message="why"), ("2", "1", "0", "0")),
        (call(status=ERROR, message="z: shapes differ"), ("2", "0", "1", "0")),
        (call(status=ERROR, pairs=False, message="cut"), ("1", "0", "1", "0")),
        (call(status=ERROR, item=compared(1.5), message="z"), ("2", "1", "1", "0")),
        (call(status=NOTHING, pairs=False, message="no output"), ("1", "0", "0", "1")),
    ],
)
def test_junit_is_red_where_the_exit_code_is(made, counts):
    """`diff --junit` was green where one side alone had a tensor and the exit code was 1."""
    found = suite(made)
    assert tuple(found.attrib[key] for key in ("tests", "failures", "errors", "skipped")) == counts
    assert len(found) == int(counts[0])
    red = sum(case.find(kind) is not None for case in found for kind in ("failure", "error"))
    assert (red > 0) == (Report((made,)).exit_code != 0 and made.status != NOTHING)


def test_junit_holds_what_the_report_holds():
    hypotheses = (
        Hypothesis("window", "off by one", (), reproduces=False, factor=math.inf),
        Hypothesis("split", "split 1 is missing", (), reproduces=True, factor=0.2),
    )
    made = call(
        status=MISMATCH,
        item=compared(1.008),
        notes=("inputs differ: q",),
        bisection=Bisection("dropped split", hypotheses),
        command="mlactl replay x --rows 1",
    )
    case = suite(made)[0]
    failure = case.find("failure")
    assert failure.attrib["message"].startswith("output: 2 of 2 rows are wrong by norm; worst at request ")
    lines = failure.text.splitlines()
    assert lines[0] == "fails by: norm: 2 rows off by more than 0.005, the largest is 0.008"
    assert "bisect: dropped split" in lines
    assert "window further off than any tolerance: off by one" in lines
    assert lines[-1] == "reproduce: mlactl replay x --rows 1"
    assert case.find("system-out").text.splitlines() == ["A: a", "B: b", "note: inputs differ: q"]


def test_what_was_not_run_is_in_junit_too():
    found = suite(call(status=MISMATCH, item=compared(2.0)), skipped=3)
    assert (found.attrib["tests"], found.attrib["skipped"]) == ("2", "1")
    assert found[1].find("skipped").attrib["message"] == "3 not run after one that failed"


@pytest.mark.parametrize("name", ["a\x1b[31mb", "caf\udce9", "a\x00\x08b", "\ufffex\uffff", "two\nlines", "<&\"'>]]>"])
def test_names_of_any_bytes_make_well_formed_xml(name):
    """An escape in a file name made XML no parser takes, a name that is not UTF-8 an internal error."""
    made = call(name, MISMATCH, item=compared(2.0), notes=(name,), findings=(name,), message=name, command=name)
    text = junit(Report((made,)))
    found = ElementTree.fromstring(text.encode("utf-8"))[0]
    shown = found[0].attrib["classname"]
    assert shown.isprintable()
    assert shown == name.encode("unicode_escape").decode() if not name.isprintable() else shown == name


def test_json_has_null_and_a_count_where_numbers_are_not_finite():
    report = Report((call(status=MISMATCH, item=compared(value=math.nan)),))
    document = json.loads(json.dumps(report_json(report), allow_nan=False))
    output = document["calls"][0]["pairs"][0]["outputs"][0]
    assert [output[key] for key in ("max_abs", "max_rel", "cosine", "norm_deviation", "not_finite")] == [None, None, None, None, 1]
    assert output["bad_rows_by"] == {"element": 1, "cosine": 0, "norm": 0, "not_finite": 1}
    assert (output["worst_row"]["cosine"], output["worst_row"]["not_finite"]) == (None, 1)
    assert (output["first"]["actual"], output["smallest_tolerance"], output["smallest_tolerance_factor"]) == ("nan", None, "inf")


def test_json_has_the_limits_that_would_pass():
    report = Report((call(status=MISMATCH, item=compared(1.008)),))
    output = report_json(report)["calls"][0]["pairs"][0]["outputs"][0]
    assert output["smallest_tolerance"]["norm"] == pytest.approx(0.008, rel=1e-3)
    assert output["tolerance"]["norm"] == 0.005
    assert output["clusters"][0]["top"] == [{"index": 0, "mismatches": 1, "rows": 1}, {"index": 1, "mismatches": 1, "rows": 1}]


def test_the_verdict_names_what_was_not_compared():
    report = Report((call(), *(call(f"crash{place}", NOTHING, pairs=False) for place in range(6))))
    assert report.exit_code == 0
    assert report.verdict() == (
        "OK: 7 captures: 1 match, 6 nothing compared (exit 0: all that was compared agrees; "
        "not compared: crash0, crash1, crash2, crash3 and 2 more)"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("factor", "value", "needed", "limits"),
    [
        (1.0, None, "exact", "row 0.01 cosine 0.9999 norm 0.005"),
        (1.004, None, "row 0.004", None),
        (1.008, None, "row 0.008 norm 0.008", None),
        (1.0, math.inf, "none", None),
    ],
)
def test_the_smallest_tolerance_in_words(factor, value, needed, limits):
    item = compared(factor, value)
    assert wording.needed_text(item) == needed
    if limits:
        assert item.tolerance.limits() == limits


@pytest.mark.parametrize(
    ("left", "right", "text"),
    [
        (torch.tensor([1.0]), torch.tensor([2.0]), "dim0 0: 1, expected 2, 8,388,608 ulp apart"),
        (torch.tensor([1.0 + 2**-22]), torch.tensor([1.0]), "dim0 0: 1.00000024, expected 1, 2 ulp apart"),
        (torch.tensor([2**53 + 1]), torch.tensor([2**53]), "dim0 0: 9007199254740993, expected 9007199254740992"),
        (torch.tensor([2**53 + 1]), torch.tensor([2.0**53]).double(), "dim0 0: 9007199254740993, expected 9007199254740992.0"),
        (torch.tensor([True]), torch.tensor([False]), "dim0 0: 1, expected 0"),
    ],
)
def test_two_values_that_differ_are_shown_to_differ(left, right, text):
    found = compare(left, right, tolerances.for_dtype("int64"), name="x")
    assert wording.element_text(found.worst) == text


def test_rows_without_a_norm_are_put_in_words():
    expected = torch.zeros(2, 1, 4)
    expected[0] = 1
    actual = expected.clone()
    actual[1, 0, 0] = 0.5
    lost = compare(actual, expected, BF16, name="output", axes=AXES)
    assert wording.row_text(lost.worst_row) == "request 1, row 1, head 0: all zero is expected, the largest value is 0.5"
    far = compare(expected * 1e30, expected, BF16, name="output", axes=AXES)
    assert wording.row_text(far.worst_row) == (
        "request 0, row 0, head 0: cosine 1.0000000, norm 1e+30 times of the expected, largest error 1e+30 times of the row's maximum"
    )
    item = compared(value=math.nan)
    assert wording.row_text(item.worst_row) == "request 1, row 1, head 0: not finite in 1 element, so it has no cosine and no norm"
    assert wording.rule_lines(item) == ["element: 1 in 1 row off by more than row 0.01, 1 of them not finite"]
