"""The reference and the gate on the CPU, against an independent dense softmax."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlactl.kernels.mla import gate, reference
from mlactl.kernels.mla.policy import SparsePolicy


def dense_softmax(q, keys, seen, scale):
    """One row, one head, in fp64, written out: scores, maximum, exponentials, weighted sum."""
    scores = [float(q.double() @ key.double()) * scale for key in keys[:seen]]
    if not scores:
        return torch.zeros(512, dtype=torch.float64), -math.inf
    peak = max(scores)
    weights = [math.exp(score - peak) for score in scores]
    total = sum(weights)
    value = sum((weight / total) * key[:512].double() for weight, key in zip(weights, keys, strict=False))
    return value, peak + math.log(total)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    counts=st.lists(st.integers(0, 5), min_size=4, max_size=4),
    page_size=st.sampled_from([1, 16, 48]),
    heads=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_reference_equals_a_dense_softmax_on_ragged_batches(lengths, counts, page_size, heads, seed):
    generator = torch.Generator().manual_seed(seed)
    counts = counts[: len(lengths)]
    boundaries = [sum(counts[:i]) for i in range(len(counts) + 1)]
    entries = [-(-length // page_size) for length in lengths]
    pages = torch.randperm(sum(entries) + 1, generator=generator)
    table = torch.full((len(lengths), max(entries, default=0) + 1), -1)
    for i, count in enumerate(entries):
        table[i, :count] = pages[sum(entries[:i]) : sum(entries[:i]) + count]
    kv = torch.randn(sum(entries) + 1, page_size, 576, generator=generator).bfloat16()
    q = torch.randn(boundaries[-1], heads, 576, generator=generator).bfloat16()
    output, lse = reference.dense_mla(q, kv, table, lengths, boundaries, 0.07, dtype=torch.float64)
    for i, length in enumerate(lengths):
        keys = [kv[table[i, token // page_size], token % page_size] for token in range(length)]
        for row in range(counts[i]):
            seen = max(0, min(length, length - counts[i] + row + 1))
            for head in range(heads):
                at = boundaries[i] + row
                value, expected_lse = dense_softmax(q[at, head], keys, seen, 0.07)
                torch.testing.assert_close(output[at, head], value, rtol=1e-9, atol=1e-12)
                assert lse[at, head] == pytest.approx(expected_lse, rel=1e-9)


def attended(seen, window, policy, rows):
    """Keys of one row, key by key, from the words of the contract."""
    keys = []
    for key in range(seen):
        chunk, chunks = key // 64, -(-seen // 64)
        selecting = policy is not None and policy.stride > 1 and seen > policy.min_tokens
        if selecting and policy.refresh_interval and seen % policy.refresh_interval < rows:
            selecting = False
        kept = not selecting or chunk < policy.sink_chunks or chunk >= chunks - policy.recent_chunks
        if kept or (chunk - policy.sink_chunks) % policy.stride == 0:
            keys.append(key)
    return keys if window is None else keys[-window:]


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 400), min_size=1, max_size=3),
    rows=st.integers(1, 4),
    seed=st.integers(0, 1000),
    variant=st.sampled_from(["causal", "per_query"]),
    kind=st.sampled_from(["exact", "window", "sparse"]),
    record=st.sampled_from(["bf16", "fp8"]),
)
def test_reference_of_every_variant_equals_a_dense_softmax(lengths, rows, seed, variant, kind, record):
    generator = torch.Generator().manual_seed(seed)
    entries = [-(-length // 16) for length in lengths]
    table = torch.full((len(lengths), max(entries) + 1), -1)
    for i, count in enumerate(entries):
        table[i, :count] = torch.arange(count) + sum(entries[:i])
    dtype = torch.bfloat16 if record == "bf16" else torch.float8_e4m3fn
    kv_scale, q_scale = (1.0, 1.0) if record == "bf16" else (0.37, 3.3)
    kv = torch.randn(sum(entries) + 1, 16, 576, generator=generator).to(dtype)
    q = torch.randn(len(lengths) * rows, 1, 576, generator=generator).to(dtype)
    own = torch.randint(-2, max(lengths) + 5, (len(lengths) * rows,), generator=generator).tolist()
    window = 1 + seed % 90 if kind == "window" else None
    policy = SparsePolicy(2 + seed % 3, seed % 2, 1 + seed % 2, seed % 200, seed % 2 * 50) if kind == "sparse" else None
    output, lse = reference.dense_mla(
        q,
        kv,
        table,
        lengths,
        [i * rows for i in range(len(lengths) + 1)],
        0.01,
        dtype=torch.float64,
        query_cache_seqlens=own if variant == "per_query" else None,
        window=window,
        sparse=policy,
        sparse_rows=rows,
        kv_scale=kv_scale,
        q_scale=q_scale,
    )
    for i, length in enumerate(lengths):
        for row in range(rows):
            at = i * rows + row
            seen = own[at] if variant == "per_query" else length - rows + row + 1
            keys = attended(max(0, min(length, seen)), window, policy, rows)
            records = [kv[table[i, key // 16], key % 16].double() * kv_scale for key in keys]
            value, expected_lse = dense_softmax(q[at, 0].double() * q_scale, records, len(records), 0.01)
            torch.testing.assert_close(output[at, 0], value, rtol=1e-9, atol=1e-12)
            assert lse[at, 0] == pytest.approx(expected_lse, rel=1e-9)


def test_a4_rank_local_lengths():
    """World 2, rank 1, interleave 1, global lengths 8, 9, 10: the shard holds 5 keys and rows see 4, 4, 5, not 3, 4, 5."""
    own = [len(range(1, length, 2)) for length in (8, 9, 10)]
    assert own == [4, 4, 5]
    assert [reference.visible_keys(5, 3, row) for row in range(3)] == [3, 4, 5]
    q, kv = torch.randn(3, 1, 576), torch.randn(1, 16, 576)
    output, _ = reference.dense_mla(q, kv, torch.zeros(1, 1, dtype=torch.int32), [5], [0, 3], 0.1, query_cache_seqlens=own)
    for row, seen in enumerate(own):
        alone, _ = reference.dense_mla(q[row : row + 1], kv, torch.zeros(1, 1, dtype=torch.int32), [seen], [0, 1], 0.1)
        torch.testing.assert_close(output[row], alone[0])


def test_rows_past_the_last_boundary_are_empty():
    q = torch.randn(3, 1, 576)
    output, lse = reference.dense_mla(q, torch.randn(2, 16, 576), torch.zeros(1, 1, dtype=torch.int32), [5], [0, 2], 1.0)
    assert (output[2] == 0).all()
    assert torch.isneginf(lse[2]).all()


@pytest.mark.parametrize(("rows", "expected"), [(1, [8]), (3, [6, 7, 8]), (10, [0, 0, 1, 2, 3, 4, 5, 6, 7, 8])])
def test_visibility_is_right_aligned_and_clamped(rows, expected):
    assert [reference.visible_keys(8, rows, row) for row in range(rows)] == expected


class TestGate:
    """The gate sees every kind of wrong result."""

    @pytest.fixture
    def right(self):
        generator = torch.Generator().manual_seed(1)
        return torch.randn(6, 4, 512, generator=generator), torch.randn(6, 4, generator=generator)

    def test_right_output_passes(self, right):
        output, lse = right
        verdict = gate.judge(output.bfloat16(), lse, output, lse, gate.TOLERANCES["bf16"])
        assert verdict.passed, verdict.failures

    @pytest.mark.parametrize("factor", [1.02, 0.37])
    def test_scaled_output_is_refused(self, right, factor):
        output, lse = right
        verdict = gate.judge(output * factor, lse, output, lse, gate.TOLERANCES["bf16"])
        assert verdict.cosine > 0.9999
        assert [failure.split(":")[0] for failure in verdict.failures if "cosine" in failure] == []
        assert any(failure.startswith("norm: 24 of 24 rows") for failure in verdict.failures)

    def test_one_bad_row_is_named(self, right):
        output, lse = right
        wrong = output.clone()
        wrong[2, 1, 7] += 1
        verdict = gate.judge(wrong, lse, output, lse, gate.TOLERANCES["bf16"])
        assert any(failure.startswith("peak: 1 of 24 rows, first 9") for failure in verdict.failures)

    def test_nan_is_refused(self, right):
        output, lse = right
        wrong = output.clone()
        wrong[0, 0, 0] = math.nan
        assert not gate.judge(wrong, lse, output, lse, gate.TOLERANCES["bf16"]).passed

    def test_lse_is_held_to_its_own_bound(self, right):
        output, lse = right
        verdict = gate.judge(output, lse + 1e-4, output, lse, gate.TOLERANCES["bf16"])
        assert [failure.split(":")[0] for failure in verdict.failures] == ["lse"]

    def test_a_blind_row_is_exactly_zero(self, right):
        output, lse = (x.clone() for x in right)
        output[1, 2], lse[1, 2] = 0, -math.inf
        assert gate.judge(output, lse, output, lse, gate.TOLERANCES["bf16"]).passed
        wrong = output.clone()
        wrong[1, 2, 3] = 1e-30
        assert any(failure.startswith("blind: 1 rows") for failure in gate.judge(wrong, lse, output, lse, gate.TOLERANCES["bf16"]).failures)

    def test_nothing_to_compare_is_an_error(self):
        empty = torch.empty(0, 4, 512)
        with pytest.raises(ValueError, match="nothing to compare"):
            gate.judge(empty, torch.empty(0, 4), empty, torch.empty(0, 4), gate.TOLERANCES["bf16"])
