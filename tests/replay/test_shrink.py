"""The smallest failing input, with faults planted in a function that stands for a kernel."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from calls import dense

from mlactl.replay import checks, oracle, shrink
from mlactl.replay.visible import seen


def sparse():
    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
    try:
        from make_example_captures import sparse_call
    finally:
        sys.path.pop(0)
    return sparse_call()


def marked(made, page, offset):
    """The call with one recognisable record."""
    kv = made.tensors["kv_cache"].clone()
    kv[page, offset] = 77
    return replace(made, tensors={**made.tensors, "kv_cache": kv})


def reads_mark(made):
    """A kernel that fails wherever a row sees the marked record; every capture it is given must be a valid one."""
    checks.check(made, "shrunk")
    views = (seen(made, row) for row in range(made.rows))
    return any(bool((made.tensors["kv_cache"][view.pages, view.offsets] == 77).all(-1).any()) for view in views if len(view.pages))


@pytest.mark.parametrize(("page", "offset"), [(0, 0), (3, 7), (4, 12)])
def test_a_bad_record_is_left_alone_with_one_row_and_head(page, offset):
    made = marked(dense(lengths=(32, 48), rows=4, heads=6), page, offset)
    found, steps = shrink.shrink(made, reads_mark)
    assert (len(found.boundaries) - 1, found.rows, found.heads) == (1, 1, 1)
    view = seen(found, 0)
    assert len(view.pages) == 1
    assert (found.tensors["kv_cache"][view.pages, view.offsets] == 77).all()
    assert steps[0] == "requests: 2 to 1"
    assert steps[-2].endswith("to 1")
    oracle.reference(found, "fp32", device="cpu")


def test_a_bad_record_among_selected_slots():
    made = marked(sparse(), 2, 9)
    found, _ = shrink.shrink(made, reads_mark)
    assert (found.rows, found.heads, len(found.tensors["kv_cache"])) == (1, 1, 1)
    assert len(seen(found, 0).pages) == 1


def test_a_head_that_is_wrong_alone():
    q = dense(lengths=(20, 45), heads=6).tensors["q"].clone()
    q[5, 4] = 55.0
    made = replace(dense(lengths=(20, 45), heads=6), tensors={**dense(lengths=(20, 45), heads=6).tensors, "q": q})
    found, _ = shrink.shrink(made, lambda item: bool((item.tensors["q"] == 55.0).all(-1).any()))
    assert found.tensors["q"].shape == (1, 1, 576)
    assert (found.tensors["q"] == 55.0).all()


def test_a_fault_that_needs_two_rows_keeps_two():
    made = dense(lengths=(20, 45), rows=4)
    found, steps = shrink.shrink(made, lambda item: item.rows >= 2)
    assert found.rows == 2
    assert "pages: left as they are, no single row fails" in steps


def test_kept_rows_see_the_same_keys():
    made = dense(lengths=(20, 45), rows=4, own=[17, 18, 5, 20, 42, 43, 44, 45])
    kept = shrink.keep_rows(made, [2, 5])
    checks.check(kept, "kept")
    whole = oracle.reference(made, "fp64", device="cpu")
    found = oracle.reference(kept, "fp64", device="cpu")
    assert torch.allclose(found[0], whole[0][[2, 5]], rtol=1e-12, atol=1e-14)
    assert torch.allclose(found[1], whole[1][[2, 5]], rtol=1e-12, atol=1e-14)


def test_runs_are_limited(monkeypatch):
    monkeypatch.setattr(shrink, "MAX_RUNS", 5)
    runs = []
    shrink.shrink(dense(lengths=(200, 300), rows=4), lambda item: runs.append(item) or True)
    assert len(runs) == 5
