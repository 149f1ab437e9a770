"""Dense MLA on a device against the fp32 reference: every mode, head count, page size and layout the contract names."""

from __future__ import annotations

import math

import pytest
import torch
from dense_cases import make_case, with_tensors

from mlactl.kernels import runtime
from mlactl.kernels.errors import BindError, MissingObject
from mlactl.kernels.mla import gate

pytestmark = pytest.mark.gpu

RAGGED = (0, 1, 15, 16, 17, 63, 64, 65, 300, 1025, 4097, 2500)
HEADS = (5, 6, 8, 12, 16, 22, 48, 64, 96)
PAGES = (1, 16, 64, 128, 1536)


def require(verdict: gate.Verdict) -> None:
    assert verdict.passed, verdict


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("heads", HEADS)
def test_decode_over_ragged_lengths(arch, multiprocessors, heads, page_size):
    case = make_case(arch, multiprocessors, RAGGED, heads=heads, page_size=page_size, seed=heads)
    require(case.judge())
    case.bind().validate()


@pytest.mark.parametrize("rows", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("heads", [5, 8, 22, 96])
def test_verify_rows_are_right_aligned(arch, multiprocessors, heads, rows):
    require(make_case(arch, multiprocessors, RAGGED, heads=heads, mode="verify", rows=rows, page_size=64, seed=rows).judge())


def test_a7_causal_verify_keeps_a_partial_last_tile(arch, multiprocessors):
    require(make_case(arch, multiprocessors, (100, 333), heads=8, mode="verify", rows=4, row_counts=(4, 3)).judge())


@pytest.mark.parametrize(
    ("lengths", "counts"),
    [((700,), (512,)), ((40, 0, 513, 64), (40, 3, 200, 1)), ((5, 2000), (9, 0)), ((300,) * 6, (1, 64, 3, 17, 128, 5))],
    ids=["long", "ragged", "more-rows-than-keys", "many"],
)
@pytest.mark.parametrize("heads", [8, 48])
def test_extend_over_ragged_rows(arch, multiprocessors, heads, lengths, counts):
    """Rows further back than the cache see nothing; a request of no rows is skipped."""
    require(make_case(arch, multiprocessors, lengths, heads=heads, mode="extend", row_counts=counts, seed=3).judge())


@pytest.mark.parametrize(("mode", "lengths", "counts"), [("extend", (40, 300), (40, 70)), ("extend", (900,), (400,)), ("verify", (40, 2000), (3, 4))])
def test_rows_past_the_last_boundary_are_padding(arch, multiprocessors, mode, lengths, counts):
    """Split and unsplit: padding rows of a graph's bucket get 0 and -inf and change no other bits."""
    full = make_case(arch, multiprocessors, (*lengths, 0), heads=8, mode=mode, row_counts=(*counts, counts[0]), seed=5)
    last = full.boundaries[-2]
    short = torch.tensor((*full.boundaries[:-1], last), dtype=torch.int32, device="cuda")
    padded = with_tensors(full, cu_seqlens_q=short, host_cu_seqlens_q=(*full.boundaries[:-1], last))
    output, lse = padded.run()
    assert (output[last:] == 0).all()
    assert torch.isneginf(lse[last:]).all()
    require(gate.judge(output, lse, *full.reference(), gate.TOLERANCES["bf16"]))


@pytest.mark.parametrize("heads", [8, 96])
@pytest.mark.parametrize("lengths", [(0, 1, 63, 64, 65), (0, 0, 0, 0, 0)], ids=["short", "empty"])
def test_a1_more_splits_than_chunks(arch, lengths, heads):
    """Lengths 0, 1, 63, 64, 65 with blocks for 32 splits each: zero-length rows give 0 and -inf, the others are right."""
    case = make_case(arch, 32 * len(lengths) * -(-heads // 32), lengths, heads=heads)
    output, lse = case.run()
    assert (output[0] == 0).all()
    assert torch.isneginf(lse[0]).all()
    require(gate.judge(output, lse, *case.reference(), gate.TOLERANCES["bf16"]))


@pytest.mark.parametrize("boundary", [16 * k + d for k in (1, 4, 5, 64) for d in (-1, 0, 1)])
def test_lengths_around_chunk_boundaries(arch, multiprocessors, boundary):
    require(make_case(arch, multiprocessors, (boundary, boundary + 3), heads=12, mode="verify", rows=4).judge())


@pytest.mark.parametrize("page_size", [1, 64, 1536])
def test_a6_a_wider_table_is_allowed_and_pages_outside_the_pool_are_refused(arch, multiprocessors, page_size):
    length = 2 * page_size
    case = make_case(arch, multiprocessors, (length,), page_size=page_size, spare_entries=50)
    require(case.judge())
    plan = make_case(arch, multiprocessors, (99 * page_size,), page_size=page_size).plan
    with pytest.raises(BindError, match=rf"cache_seqlens\[0\] is {52 * page_size + 1}, page_table has 52 pages of {page_size} tokens"):
        plan.bind(with_tensors(case, host_cache_seqlens=(52 * page_size + 1,)).tensors)
    for bad in (-1, case.tensors.kv_cache.shape[0]):
        case.tensors.page_table[0, 1] = bad
        with pytest.raises(BindError, match=rf"page_table\[0, 1\] is {bad}"):
            case.bind().validate()


def test_validate_reads_device_lengths(arch, multiprocessors):
    case = make_case(arch, multiprocessors, (64, 128), spare_entries=0)
    binding = with_tensors(case, host_cache_seqlens=None).bind()
    case.tensors.cache_seqlens[1] = 129
    with pytest.raises(BindError, match=r"cache_seqlens\[1\] is 129"):
        binding.validate()


@pytest.mark.parametrize(("mode", "rows", "heads"), [("decode", 1, 8), ("decode", 1, 96), ("verify", 4, 8), ("verify", 4, 64)])
def test_graph_replay_equals_eager_bit_for_bit(arch, multiprocessors, mode, rows, heads):
    case = make_case(arch, multiprocessors, RAGGED, heads=heads, mode=mode, rows=rows)
    output, lse = case.run()
    binding = case.bind()
    binding.preload()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        binding.run()
    for _ in range(3):
        case.poison()
        graph.replay()
        assert torch.equal(case.tensors.output, output)
        assert torch.equal(case.tensors.lse, lse)


@pytest.mark.parametrize("heads", [8, 96])
def test_a5_padding_requests_change_no_other_bits(arch, multiprocessors, heads):
    """Captured at 8 requests, replayed with 5 real ones and 3 of length 0 whose table entries are -1."""
    lengths = (700, 33, 4097, 64, 1000)
    alone = make_case(arch, multiprocessors, lengths, heads=heads, max_requests=8)
    expected, expected_lse = alone.run()
    padded = make_case(arch, multiprocessors, (*lengths, 0, 0, 0), heads=heads)
    assert padded.plan.blocks == alone.plan.blocks
    q = padded.tensors.q.clone()
    q[:5], q[5:] = alone.tensors.q, math.nan
    padded = with_tensors(padded, q=q, kv_cache=alone.tensors.kv_cache)
    padded.tensors.page_table[:5] = alone.tensors.page_table
    binding = padded.bind()
    binding.preload()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        binding.run()
    padded.poison()
    graph.replay()
    output, lse = padded.tensors.output, padded.tensors.lse
    assert torch.equal(output[:5], expected)
    assert torch.equal(lse[:5], expected_lse)
    assert (output[5:] == 0).all()
    assert torch.isneginf(lse[5:]).all()


def test_a_captured_graph_follows_the_live_lengths(arch, multiprocessors):
    case = make_case(arch, multiprocessors, (4000, 4000, 4000, 4000))
    binding = case.bind()
    binding.preload()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        binding.run()
    for lengths in ((1, 4000, 17, 0), (0, 0, 0, 3999), (64, 128, 256, 512)):
        case.tensors.cache_seqlens.copy_(torch.tensor(lengths))
        case.lengths = lengths
        case.poison()
        graph.replay()
        require(gate.judge(case.tensors.output, case.tensors.lse, *case.reference(), gate.TOLERANCES["bf16"]))


@pytest.mark.parametrize("heads", [8, 64, 96])
def test_sixty_poisoned_runs_are_bitwise_equal(arch, multiprocessors, heads):
    case = make_case(arch, multiprocessors, (3000, 17, 801, 64, 2999, 0), heads=heads, mode="verify", rows=3)
    output, lse = case.run()
    for _ in range(60):
        again, lse_again = case.run()
        assert torch.equal(again, output)
        assert torch.equal(lse_again, lse)


@pytest.mark.parametrize(("page_size", "first_page"), [(64, 29_128), (1, 1_864_136), (1536, 1_214)])
def test_pages_past_two_gigabytes(arch, multiprocessors, page_size, first_page):
    """All live pages lie past byte offset 2^31 of the pool."""
    assert first_page * page_size * 1152 >= 2**31
    require(make_case(arch, multiprocessors, (900, 64, 2000), heads=16, page_size=page_size, first_page=first_page).judge())


@pytest.mark.parametrize("heads", [8, 22, 96])
def test_strided_query_output_and_pool_are_honoured(arch, multiprocessors, heads):
    case = make_case(arch, multiprocessors, RAGGED, heads=heads, kv_width=640)
    expected = case.run()
    total = case.tensors.q.shape[0]
    wide_q = torch.full((total, heads + 2, 640), math.nan, dtype=torch.bfloat16, device="cuda")
    wide_q[:, 1 : heads + 1, 32:608] = case.tensors.q
    wide_out = torch.full((total, heads + 3, 1024), 7.0, dtype=torch.bfloat16, device="cuda")
    strided = with_tensors(case, q=wide_q[:, 1 : heads + 1, 32:608], output=wide_out[:, 2 : heads + 2, 256:768])
    output, lse = strided.run()
    assert torch.equal(output, expected[0])
    assert torch.equal(lse, expected[1])
    wide_out[:, 2 : heads + 2, 256:768] = 7.0
    assert (wide_out == 7.0).all(), "elements outside the output view were written"
    heads_first = torch.empty(heads, total, 512, dtype=torch.bfloat16, device="cuda").transpose(0, 1)
    assert torch.equal(with_tensors(case, output=heads_first).run()[0], expected[0])


@pytest.mark.parametrize("blocks", [1, 7, 64, 400])
def test_split_count_stays_inside_the_tolerances(arch, blocks):
    require(make_case(arch, blocks, (3000, 5, 900), heads=8).judge())


@pytest.mark.parametrize("requests", [40, 300, 700])
def test_more_units_than_processors(arch, multiprocessors, requests):
    """One wave, several short waves, and no splits at all; one request is far longer than the rest."""
    lengths = tuple(20 + 7 * (i % 50) for i in range(requests - 1)) + (9000,)
    require(make_case(arch, multiprocessors, lengths, heads=8).judge())


def test_sm_scale_is_a_runtime_argument(arch, multiprocessors):
    case = make_case(arch, multiprocessors, (500, 77))
    for scale in (0.01, 0.2):
        require(with_tensors(case, sm_scale=scale).judge())


def test_the_gate_refuses_a_scaled_output(arch, multiprocessors):
    """With a dropped scale of 0.9 cosine stays 0.9999955: the norm is what sees it."""
    case = make_case(arch, multiprocessors, (2000, 300))
    output, lse = case.run()
    expected = case.reference()
    require(gate.judge(output, lse, *expected, gate.TOLERANCES["bf16"]))
    for factor in (1.02, 0.37):
        verdict = gate.judge(output * factor, lse, *expected, gate.TOLERANCES["bf16"])
        assert any(failure.startswith("norm") for failure in verdict.failures)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_missing_object_inside_a_capture_is_an_error(arch, multiprocessors):
    class Empty:
        def fetch(self, spec, arch):
            return None

        def compile(self, spec, arch):
            raise AssertionError("compiled inside a capture")

        def describe_miss(self, spec, arch):
            return f"{spec.label()} for {arch}: key 1234 is not in the cache"

    source = runtime._state.source
    runtime.configure(Empty())
    try:
        binding = make_case(arch, multiprocessors, (64,)).bind()
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(MissingObject, match="key 1234"), torch.cuda.graph(graph):
            binding.run()
    finally:
        runtime.configure(source)
