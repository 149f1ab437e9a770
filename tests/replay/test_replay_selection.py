"""Replay of the opt-in strided chunk selection, scaled records and windows over the kernels' own bindings."""

import dataclasses
from types import SimpleNamespace

import msgspec
import pytest
import torch
from calls import brute, dense, dense_keys

from mlactl.kernels.mla import planner, policy
from mlactl.replay import checks, oracle, trim
from mlactl.replay.errors import BadCapture
from mlactl.replay.header import Parallel, SparsePolicy

POLICY = SparsePolicy(stride=3, sink_chunks=2, recent_chunks=2, min_tokens=100, refresh_interval=0, rows=2)


def chunked(capture, chunks_of_row):
    """Keys of each row by its chunks, counted by hand."""
    whole = dense_keys(capture, lambda row: visible(capture, row))
    return lambda row: torch.cat([whole(row)[64 * chunk : 64 * chunk + 64] for chunk in chunks_of_row(row)])


def visible(capture, row):
    length = int(capture.tensors["cache_seqlens"][capture.requests[row]])
    return length - 2 + row % 2 + 1


@pytest.mark.parametrize("kept", [None, [0], [1, 3]])
def test_a_selecting_call_is_held_against_the_chunks_each_row_attends(kept):
    """700 and 699 visible keys are 11 chunks: 0, 1, 2, 5, 8, 9, 10; 80 are under min_tokens and all of theirs count."""
    made = dense(lengths=(700, 80), rows=2, sparse=POLICY)
    checks.check(made, "here")
    expected, lse = brute(made, chunked(made, lambda row: (0, 1, 2, 5, 8, 9, 10) if row < 2 else (0, 1)))
    output, found = oracle.reference(made, "fp64", device="cpu", rows=kept)
    rows = slice(None) if kept is None else kept
    torch.testing.assert_close(output, expected[rows], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found, lse[rows], rtol=1e-9, atol=1e-9)
    exact, _ = oracle.reference(dense(lengths=(700, 80), rows=2), "fp64", device="cpu", rows=kept)
    assert not torch.allclose(output[0], exact[0], rtol=1e-3, atol=1e-3)


def test_selection_follows_each_rows_own_length():
    """Cache 240, visible 175, stride 3, sink 1, recent 1: chunks 0, 1, 2; by the request's length it would be 0, 1, 3."""
    made = dense(lengths=(240,), rows=1, own=[175], sparse=SparsePolicy(3, 1, 1, 0, 0, 1))
    keys = dense_keys(made, lambda row: 175)
    output, lse = oracle.reference(made, "fp64", device="cpu")
    torch.testing.assert_close((output, lse), brute(made, keys), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"stride": 0}, "stride must be at least 1, got 0"), ({"recent_chunks": 0}, "recent_chunks"), ({"rows": 0}, "0 rows a request")],
)
def test_a_policy_that_selects_nothing_is_refused(change, words):
    made = dense(lengths=(300, 80), rows=2, sparse=msgspec.structs.replace(POLICY, **change))
    with pytest.raises(BadCapture, match=words):
        checks.check(made, "here")


def test_a_spec_and_a_policy_that_disagree_are_refused():
    made = dense(lengths=(300, 80), rows=2, sparse=POLICY)
    made = dataclasses.replace(made, call=msgspec.structs.replace(made.call, sparse=None))
    with pytest.raises(BadCapture, match="selection=sparse, the capture has no sparse policy"):
        checks.check(made, "here")


def test_a_recorded_binding_keeps_policy_scales_and_plan_rows():
    """Without the policy an exact reference would call a right selecting kernel wrong."""
    caps = planner.DenseCaps(
        mode="verify", heads=2, max_requests=1, max_tokens=704, page_size=64, multiprocessors=132, arch="sm_90a", rows=2, record="fp8",
        sparse=policy.SparsePolicy(3, 2, 2, 100, 0),
    )  # fmt: skip
    tensors = SimpleNamespace(
        q=torch.zeros(2, 2, 576, dtype=torch.bfloat16),
        kv_cache=torch.zeros(11, 64, 576).to(torch.float8_e4m3fn),
        page_table=torch.arange(11, dtype=torch.int32)[None],
        cache_seqlens=torch.tensor([700], dtype=torch.int32),
        cu_seqlens_q=None,
        query_cache_seqlens=None,
        sm_scale=0.07,
        kv_scale=0.25,
        q_scale=1.0,
        window=None,
    )
    described = trim.describe(SimpleNamespace(plan=planner.plan(caps), tensors=tensors), None, Parallel())
    assert described.call.sparse == POLICY
    assert (described.call.kv_scale, described.call.scale_mode) == (0.25, "tensor")
    assert described.call.facts["selection"] == "sparse"
