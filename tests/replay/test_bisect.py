"""The five planted faults: each is named, with its coordinates, from a captured output on a CPU."""

import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from calls import dense, finished

from mlactl.replay import capture as captures
from mlactl.replay import oracle
from mlactl.replay.attention import views, without
from mlactl.replay.report import call_json
from mlactl.replay.runner import ReplayOptions, replay_capture
from mlactl.replay.wording import bisection_lines

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "captures"
BISECT = ReplayOptions(device="cpu", kernel=False, bisect=True)


def explained(made):
    report = replay_capture(made, BISECT)
    assert report.status == "mismatch"
    first = report.bisection.hypotheses[0]
    assert first.reproduces
    assert report.bisection.verdict.startswith(f"{first.name}: ")
    return first, report


@pytest.mark.parametrize(
    ("name", "explanation", "coordinates"),
    [
        ("dense-split-dropped", "dropped split", {"request": 1, "split": 1, "splits": 3, "first_token": 16, "end_token": 32}),
        ("dense-visible-length", "visible length", {"request": 1, "row": 6, "shift": -1}),
        ("sparse-identity-scale", "identity scale", {"latent_scale": 0.0131, "read_as": 1.0}),
        ("sparse-lse-base", "LSE base", {"factor": 1.442695}),
        ("sparse-record-flipped", "altered record", {"page": 91181 + 2 * 104729, "stored_page": 2, "offset": 9}),
    ],
)
def test_each_planted_fault_is_named(name, explanation, coordinates):
    first, _ = explained(captures.read(EXAMPLES / name))
    assert first.name == explanation
    assert dict(first.coordinates) == coordinates


def test_the_right_capture_is_right():
    report = replay_capture(captures.read(EXAMPLES / "dense-right"), BISECT)
    assert report.status == "match"
    assert report.bisection is None


def test_the_examples_are_what_the_script_makes(tmp_path):
    subprocess.run([sys.executable, str(ROOT / "scripts" / "make_example_captures.py"), str(tmp_path / "made")], check=True)
    digests = [{path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()} for folder in (EXAMPLES, tmp_path / "made")]
    assert digests[0] == digests[1]
    assert sum(path.stat().st_size for path in EXAMPLES.iterdir()) < 700_000


# ---- the same kinds of fault elsewhere


def rows_replaced(made, rows, **how):
    output, lse = made.output.clone(), made.lse.clone()
    for row, view in zip(rows, views(made, rows, torch.float64, **how), strict=True):
        output[row], lse[row] = view.output.to(torch.bfloat16), view.lse.float()
    return made.with_result(output, lse)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("page", "offset"), [(1, 3), (4, 0), (0, 15)])
def test_a_negated_bf16_record_is_found_wherever_it_is(seed, page, offset):
    made = dense(lengths=(32, 48), rows=1, seed=seed, heads=8)  # whole pages, so that every record is seen
    kv = made.tensors["kv_cache"].clone()
    kv[page, offset] = -kv[page, offset]
    wrong = finished(replace(made, tensors={**made.tensors, "kv_cache": kv}))
    first, _ = explained(made.with_result(wrong.output, wrong.lse))
    assert first.name == "altered record"
    assert dict(first.coordinates) == {"page": page * 10 + 7, "stored_page": page, "offset": offset}


def test_a_record_shared_by_two_requests_explains_both():
    made = dense(lengths=(40, 48), seed=9, heads=4)
    table = made.tensors["page_table"].clone()
    table[1, 0] = table[0, 0]
    made = replace(made, tensors={**made.tensors, "page_table": table})
    kv = made.tensors["kv_cache"].clone()
    kv[table[0, 0], 5, :512] *= -2
    wrong = finished(replace(made, tensors={**made.tensors, "kv_cache": kv}))
    first, report = explained(made.with_result(wrong.output, wrong.lse))
    requests = next(cluster for cluster in report.pairs[0].comparisons[1].clusters if cluster.axis == "request")
    assert requests.indices == 2
    assert dict(first.coordinates) == {"page": int(table[0, 0]) * 10 + 7, "stored_page": int(table[0, 0]), "offset": 5}


@pytest.mark.parametrize(("splits", "split"), [(2, 0), (2, 1), (3, 2), (5, 1)])
def test_any_split_of_any_cut(splits, split):
    made = finished(dense(lengths=(33, 160), rows=2))
    size = -(-10 // splits) * 16
    run = range(split * size, min(160, (split + 1) * size))
    wrong = rows_replaced(made, [2, 3], keep=without(run))
    first, _ = explained(wrong)
    found = dict(first.coordinates)
    assert first.name == "dropped split"
    assert (found["request"], found["first_token"], found["end_token"]) == (1, run.start, run.stop)
    assert 0 <= found["split"] < found["splits"] <= splits


@pytest.mark.parametrize("shift", [-1, 1])
def test_lengths_one_short_and_one_long(shift):
    made = finished(dense(lengths=(37, 50)))
    rows = [1, 2, 5]
    first, _ = explained(rows_replaced(made, rows, shift=shift))
    assert first.name == "visible length"
    assert dict(first.coordinates)["shift"] == shift
    assert dict(first.coordinates)["row"] in rows
    assert all(f"row {row} {'one short' if shift < 0 else 'one long'}" in first.text for row in rows)


def test_a_window_one_key_too_wide():
    made = finished(dense(lengths=(37, 50), window=9))
    first, _ = explained(rows_replaced(made, [6], window_shift=1))
    assert (first.name, dict(first.coordinates)) == ("window", {"request": 1, "row": 6, "shift": 1})


def test_a_dropped_scale_of_an_fp8_cache():
    made = dense(lengths=(40,), rows=2, record="fp8", kv_scale=0.5)
    output, lse = oracle.reference(dense(lengths=(40,), rows=2, record="fp8", kv_scale=1.0), "fp64", device="cpu")
    first, _ = explained(made.with_result(output.to(torch.bfloat16), lse.float()))
    assert (first.name, dict(first.coordinates)) == ("identity scale", {"kv_scale": 0.5, "read_as": 1.0})


def test_declared_base_2_and_a_natural_lse():
    made = finished(dense(lse_base="2"))
    first, _ = explained(made)
    assert first.text == "the LSE was written as natural logarithm where base 2 is declared"


def test_noise_is_explained_by_nothing():
    """A fault that no explanation covers must not be given a name."""
    made = finished(dense(lengths=(40, 50), seed=5))
    noise = torch.randn(made.output.shape, generator=torch.Generator().manual_seed(0)) * 0.05
    report = replay_capture(made.with_result((made.output.float() + noise).to(torch.bfloat16), made.lse), BISECT)
    assert report.bisection.verdict.startswith("none of")
    assert not any(item.reproduces for item in report.bisection.hypotheses)


@pytest.mark.parametrize("noisy", [False, True])
def test_one_row_and_head_cannot_tell_which_record(noisy):
    """Every key's value could be solved for so that it fitted one row and head, and a wrong page was named as reproducing it."""
    made = captures.read(EXAMPLES / "sparse-record-flipped")
    if noisy:
        made = made.with_result(torch.randn(made.output.shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16), made.lse)
    report = replay_capture(made, replace(BISECT, rows=(2,), heads=(2,)))
    assert report.bisection.verdict == "none of 5 explanations reproduces the captured output; not tested: altered record"
    assert not any(item.reproduces for item in report.bisection.hypotheses)
    last = report.bisection.hypotheses[-1]
    assert (last.name, last.tested, last.coordinates) == ("altered record", False, ())
    command = f"mlactl replay {EXAMPLES / 'sparse-record-flipped'} --bisect"
    assert last.text == f"one row and head cannot tell which record; with all rows and heads: {command}"
    assert bisection_lines(report.bisection)[-1] == ("altered record", f"not tested: {last.text}")
    in_json = call_json(report)["bisection"]["hypotheses"][-1]
    assert (in_json["tested"], in_json["reproduces"], in_json["factor"], in_json["text"]) == (False, False, None, last.text)


def test_a_call_of_one_row_and_head_has_no_more_to_ask_for():
    made = finished(dense(lengths=(40,), rows=1, heads=1))
    report = replay_capture(made.with_result(-made.output, made.lse), BISECT)
    assert [item.text for item in report.bisection.hypotheses if not item.tested] == [
        "one row and head cannot tell which record, and no other row and head shows it"
    ]


@pytest.mark.parametrize("heads", [(0,), (1, 2)])
def test_two_rows_or_heads_tell_which_record(heads):
    report = replay_capture(captures.read(EXAMPLES / "sparse-record-flipped"), replace(BISECT, rows=(1, 2), heads=heads))
    first = report.bisection.hypotheses[0]
    assert (first.name, first.reproduces, first.tested) == ("altered record", True, True)
    assert dict(first.coordinates) == {"page": 300639, "stored_page": 2, "offset": 9}


@pytest.mark.parametrize("name", ["dense-split-dropped", "dense-visible-length", "sparse-identity-scale", "sparse-lse-base"])
def test_a_slice_of_another_fault_has_one_explanation(name):
    """Of one row and head the altered record was a second explanation that reproduced it as well."""
    row = 6 if name.startswith("dense") else 2
    found = replay_capture(captures.read(EXAMPLES / name), replace(BISECT, rows=(row,), heads=(0,))).bisection.hypotheses
    assert [item.reproduces for item in found] == [True] + [False] * (len(found) - 1)
    assert [item.name for item in found if not item.tested] == ["altered record"]


def test_nan_is_explained_by_nothing():
    made = finished(dense())
    output = made.output.clone()
    output[3, 1, 7] = float("nan")
    report = replay_capture(made.with_result(output, made.lse), BISECT)
    assert report.bisection.verdict.startswith("none of")
    assert report.pairs[0].comparisons[0].first.index == (3, 1, 7)


def test_the_chunk_of_an_error_is_inferred_and_said_to_be():
    made = finished(dense(lengths=(250,), rows=2))
    wrong = rows_replaced(made, [0, 1], keep=without(range(64, 128)))
    report = replay_capture(wrong, replace(BISECT, bisect=False))
    assert all(cluster.inferred for cluster in report.inferred)
    assert report.inferred[0].top[0][0] == 1
    assert report.inferred[0].note.startswith("chunk 1 (chunks of 64 tokens): correlation")
