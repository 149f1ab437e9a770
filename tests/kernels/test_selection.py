"""The sparse selection: its definition, its refusals, when it applies, and that a tile's walk stages all that its rows selected."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlactl.kernels.errors import PlanError
from mlactl.kernels.mla.policy import SparsePolicy
from mlactl.kernels.mla.selection import dynamic_sparse_chunk_indices


def written_out(n, stride, sink, recent):
    """The definition, chunk by chunk."""
    chosen = []
    for chunk in range(n):
        strided = chunk >= sink and (chunk - sink) % stride == 0 and chunk < n - recent
        if chunk < sink or strided or chunk >= n - recent:
            chosen.append(chunk)
    return tuple(chosen)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((10, 3, 2, 2), (0, 1, 2, 5, 8, 9)),
        ((3, 3, 1, 1), (0, 1, 2)),
        ((4, 3, 1, 1), (0, 1, 3)),
        ((0, 3, 1, 1), ()),
        ((1, 9, 0, 1), (0,)),
        ((5, 1, 0, 1), (0, 1, 2, 3, 4)),
        ((3, 2, 9, 9), (0, 1, 2)),
        ((6, 2, 0, 1), (0, 2, 4, 5)),
    ],
)
def test_examples(arguments, expected):
    assert dynamic_sparse_chunk_indices(*arguments) == expected


@given(st.integers(0, 300), st.integers(1, 20), st.integers(0, 20), st.integers(1, 20))
def test_definition(n, stride, sink, recent):
    found = dynamic_sparse_chunk_indices(n, stride, sink, recent)
    assert found == written_out(n, stride, sink, recent)
    assert not n or found[-1] == n - 1
    if stride == 1:
        assert found == tuple(range(n))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 0, 2, 2), "stride must be at least 1, got 0"),
        ((10, 3, -1, 2), "sink_chunks must be at least 0, got -1"),
        ((10, 3, 2, 0), "recent_chunks must be at least 1, got 0"),
        ((-1, 3, 2, 1), "chunks must be at least 0, got -1"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(PlanError, match=message):
        dynamic_sparse_chunk_indices(*arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stride": 0}, "stride must be at least 1"),
        ({"recent_chunks": 0}, "recent_chunks must be at least 1"),
        ({"min_tokens": -1}, "min_tokens must be at least 0, got -1"),
        ({"refresh_interval": -5}, "refresh_interval must be at least 0, got -5"),
        ({"min_tokens": 2**31}, "min_tokens must be at most 1073741824, got 2147483648"),
    ],
)
def test_policies_refuse_bad_numbers(changes, message):
    with pytest.raises(PlanError, match=message):
        SparsePolicy(**{"stride": 3, "sink_chunks": 1, "recent_chunks": 1, **changes})


def test_a8_the_visible_length_selects():
    """Cache 240, visible 175: from 240 the selection would be 0, 1, 3 and lose the recent chunk 2."""
    policy = SparsePolicy(3, 1, 1)
    assert policy.chunks(175, 1) == (0, 1, 2)
    assert policy.chunks(240, 1) == (0, 1, 3)


def test_when_a_row_selects():
    policy = SparsePolicy(3, 1, 1, min_tokens=400, refresh_interval=100)
    assert [policy.active(visible, 4) for visible in (400, 404, 405, 499, 500, 503, 504)] == [False, True, True, True, False, False, True]
    assert not SparsePolicy(1, 1, 1).active(10_000, 1)
    assert policy.chunks(400, 4) == tuple(range(7))


@pytest.mark.parametrize("boundary", range(64, 64 * 12, 64))
def test_chunks_around_every_boundary(boundary):
    policy = SparsePolicy(3, 1, 1)
    for visible, count in ((boundary - 1, boundary // 64), (boundary, boundary // 64), (boundary + 1, boundary // 64 + 1)):
        assert policy.chunks(visible, 1) == written_out(count, 3, 1, 1)


def walk(visible, policy, rows):
    """The arithmetic of `visibility.Visibility.walk` and `.chunk`, in Python: staged 16-token chunks of a tile's rows."""

    def recent_from(seen):
        return max(-(-seen // 64) - policy.recent_chunks, 0) if policy.active(seen, rows) else -1

    most = max(visible)
    dense = max((-(-seen // 64) for seen in visible if recent_from(seen) < 0), default=0)
    earliest = min((recent_from(seen) for seen in visible if recent_from(seen) >= 0), default=1 << 30)
    total = -(-most // 64)
    prefix = min(max(dense, policy.sink_chunks), total)
    recent = max(min(earliest, total), prefix)
    first = policy.sink_chunks + -(-max(prefix - policy.sink_chunks, 0) // policy.stride) * policy.stride
    strided_end = prefix + max(recent - first + policy.stride - 1, 0) // policy.stride
    chunks = []
    for position in range(-(-most // 16) - 4 * (recent - strided_end)):
        at = position // 4
        if at >= prefix:
            at = first + (at - prefix) * policy.stride if at < strided_end else at + recent - strided_end
        chunks.append(at * 4 + position % 4)
    return chunks


@given(
    st.builds(SparsePolicy, st.integers(1, 6), st.integers(0, 4), st.integers(1, 4), st.sampled_from([0, 100, 400]), st.sampled_from([0, 50, 64])),
    st.lists(st.integers(0, 1500), min_size=1, max_size=8),
)
def test_a_tile_stages_what_its_rows_selected(policy, visible):
    """Each staged chunk once, in order, none past the longest row; together they hold every row's selection."""
    staged = walk(visible, policy, len(visible))
    assert staged == sorted(set(staged))
    assert all(chunk * 16 < max(visible) for chunk in staged)
    for seen in visible:
        for chunk in policy.chunks(seen, len(visible)):
            assert {4 * chunk + part for part in range(4) if (4 * chunk + part) * 16 < seen} <= set(staged)


@given(st.integers(1, 3000), st.integers(1, 8), st.integers(2, 6), st.integers(0, 4), st.integers(1, 4))
def test_a_tile_of_one_row_stages_nothing_more(visible, rows, stride, sink, recent):
    policy = SparsePolicy(stride, sink, recent)
    expected = [4 * chunk + part for chunk in policy.chunks(visible, rows) for part in range(4) if (4 * chunk + part) * 16 < visible]
    assert walk([visible], policy, rows) == expected
