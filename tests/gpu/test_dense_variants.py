"""Per-query lengths, windows, the sparse selection, E4M3 elements and wide records on a device, against the fp32 reference."""

from __future__ import annotations

import math

import pytest
import torch
from dense_cases import make_case, with_tensors

from mlactl.kernels.mla import gate
from mlactl.kernels.mla.config import TILE_ROWS
from mlactl.kernels.mla.policy import SparsePolicy

pytestmark = pytest.mark.gpu

LENGTHS = (0, 1, 15, 17, 63, 64, 65, 129, 300, 1025, 3001)
HEADS = (5, 6, 8, 12, 16, 22, 48, 64, 96)


def require(verdict: gate.Verdict) -> None:
    assert verdict.passed, verdict


def own_lengths(lengths, rows, seed=0, past=0):
    """One visible length a row, anywhere from 0 to its request's (plus `past`)."""
    generator = torch.Generator().manual_seed(seed)
    return [int(torch.randint(0, length + past + 1, (1,), generator=generator)) for length in lengths for _ in range(rows)]


# ---------------------------------------------------------------------- per-query lengths


@pytest.mark.parametrize("record", ["bf16", "fp8"])
@pytest.mark.parametrize("rows", [2, 4, 8])
@pytest.mark.parametrize("heads", [5, 8, 22, 96])
def test_every_row_sees_its_own_length(arch, multiprocessors, heads, rows, record):
    lengths = own_lengths(LENGTHS, rows, seed=rows)
    case = make_case(arch, multiprocessors, LENGTHS, heads=heads, mode="verify", rows=rows, query_lengths=lengths, record=record, seed=rows)
    require(case.judge())
    case.bind().validate()


def test_own_lengths_are_clamped_by_the_cache_and_by_zero(arch, multiprocessors):
    lengths = [500, 101, 100, 0, -7, 3, 40, 41]
    case = make_case(arch, multiprocessors, (100, 40), heads=8, mode="verify", rows=4, query_lengths=lengths)
    require(case.judge())
    clamped = with_tensors(case, query_cache_seqlens=torch.tensor([100, 100, 100, 0, 0, 3, 40, 40], dtype=torch.int32, device="cuda"))
    for found, expected in zip(case.run(), clamped.run(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize("heads", [8, 96])
def test_a4_token_shards_merge_to_the_whole(arch, multiprocessors, world, heads):
    """Rank-local lengths of verify rows, merged by natural-log LSE, equal the unsharded launch; ranks may see nothing."""
    rows, lengths = 4, (10, 5, 700)
    whole = make_case(arch, multiprocessors, lengths, heads=heads, mode="verify", rows=rows, page_size=16, seed=3)
    output, lse = whole.reference()
    keys = [whole.tensors.kv_cache[whole.tensors.page_table[i, : -(-n // 16)].long()].reshape(-1, 576)[:n] for i, n in enumerate(lengths)]
    parts = []
    for rank in range(world):
        local = [len(range(rank, n, world)) for n in lengths]
        own = [len(range(rank, n - rows + row + 1, world)) for n in lengths for row in range(rows)]
        shard = make_case(arch, multiprocessors, local, heads=heads, mode="verify", rows=rows, page_size=16, query_lengths=own, seed=3)
        for request, count in enumerate(local):
            pages = shard.tensors.page_table[request, : -(-count // 16)].long()
            held = torch.zeros(len(pages) * 16, 576, dtype=torch.bfloat16, device="cuda")
            held[:count] = keys[request][rank::world]
            shard.tensors.kv_cache[pages] = held.view(len(pages), 16, 576)
        shard = with_tensors(shard, q=whole.tensors.q)
        parts.append(shard.run())
    all_lse = torch.stack([part[1] for part in parts])
    merged_lse = torch.logsumexp(all_lse, 0)
    weights = torch.exp(all_lse - merged_lse)
    merged = sum(weight[..., None] * part[0].float() for weight, part in zip(weights, parts, strict=True))
    require(gate.judge(merged, merged_lse, output, lse, gate.Tolerance(cosine=0.9999)))


def test_rank_local_lengths_of_a4_are_not_the_right_aligned_ones(arch, multiprocessors):
    """World 2, rank 1, global lengths 8, 9, 10: rows see 4, 4, 5 of a shard of 5; causal arithmetic would give 3, 4, 5."""
    case = make_case(arch, multiprocessors, (5,), heads=8, mode="verify", rows=3, query_lengths=[4, 4, 5])
    require(case.judge())
    causal = make_case(arch, multiprocessors, (5,), heads=8, mode="verify", rows=3)
    assert not torch.equal(case.run()[0][0], causal.run()[0][0])


def test_a5_padding_requests_of_a_captured_per_query_graph(arch, multiprocessors):
    """Captured at 8 requests, replayed with 5: padding rows 0 and -inf, real rows bit-equal to the unpadded run."""
    lengths, rows = (700, 64, 1, 333, 4000, 0, 0, 0), 4
    own = own_lengths(lengths, rows, seed=9)
    padded = make_case(arch, multiprocessors, lengths, heads=8, mode="verify", rows=rows, query_lengths=own, seed=1)
    binding = padded.bind()
    binding.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        binding.run()
    padded.tensors.query_cache_seqlens[20:] = 77
    padded.poison()
    graph.replay()
    output, lse = padded.tensors.output.clone(), padded.tensors.lse.clone()
    assert (output[20:] == 0).all()
    assert torch.isneginf(lse[20:]).all()
    short = {name: getattr(padded.tensors, name)[:20] for name in ("q", "output", "lse", "query_cache_seqlens")}
    short |= {name: getattr(padded.tensors, name)[:5] for name in ("page_table", "cache_seqlens")}
    alone = with_tensors(padded, **short, host_cache_seqlens=lengths[:5])
    for found, expected in zip(alone.run(), (output[:20], lse[:20]), strict=True):
        assert torch.equal(found, expected)


# ---------------------------------------------------------------------- sparse selection

POLICIES = (SparsePolicy(3, 1, 1), SparsePolicy(4, 0, 2, min_tokens=200), SparsePolicy(2, 2, 1, min_tokens=0, refresh_interval=50))


@pytest.mark.parametrize("policy", POLICIES, ids=["plain", "min-tokens", "refresh"])
@pytest.mark.parametrize(("mode", "rows"), [("decode", 1), ("verify", 4)])
@pytest.mark.parametrize("heads", [8, 22, 96])
def test_selection_follows_each_row(arch, multiprocessors, heads, mode, rows, policy):
    require(make_case(arch, multiprocessors, LENGTHS, heads=heads, mode=mode, rows=rows, sparse=policy, seed=heads).judge())


@pytest.mark.parametrize("boundary", range(64, 64 * 9, 64))
def test_selection_at_every_chunk_boundary(arch, multiprocessors, boundary):
    """Rows of one tile on both sides of a multiple of 64, below the cache length and at it."""
    lengths = tuple(boundary + d for d in (-1, 0, 1, 2, 3))
    for heads in (8, 16):
        case = make_case(
            arch, multiprocessors, lengths, heads=heads, mode="verify", rows=4, sparse=SparsePolicy(3, 1, 1), page_size=16, seed=boundary
        )
        require(case.judge())
    own = [boundary + d for _ in lengths for d in (-1, 0, 1, 2)]
    longer = tuple(length + 200 for length in lengths)
    require(
        make_case(
            arch, multiprocessors, longer, heads=8, mode="verify", rows=4, sparse=SparsePolicy(3, 1, 1), query_lengths=own, seed=boundary
        ).judge()
    )


@pytest.mark.parametrize("heads", [8, 16, 96])
def test_rows_on_both_sides_of_min_tokens_in_one_tile(arch, multiprocessors, heads):
    policy = SparsePolicy(3, 1, 1, min_tokens=400)
    own = [399, 400, 401, 900] * 2 + [900, 401, 2, 0]
    case = make_case(arch, multiprocessors, (1000, 901, 900), heads=heads, mode="verify", rows=4, sparse=policy, query_lengths=own)
    require(case.judge())
    require(make_case(arch, multiprocessors, (402, 403, 404), heads=heads, mode="verify", rows=4, sparse=policy).judge())


def test_a8_selects_from_the_visible_length(arch, multiprocessors):
    """Cache 240, visible 175: chunks 0, 1, 2. From 240 it would be 0, 1, 3 and lose the recent one: a spike in chunk 2 tells."""
    case = make_case(arch, multiprocessors, (240,), heads=8, mode="verify", rows=2, sparse=SparsePolicy(3, 1, 1), query_lengths=[175, 175])
    assert case.plan.caps.sparse.chunks(175, 2) == (0, 1, 2)
    require(case.judge())
    entry = int(case.tensors.page_table[0, 2])
    before = case.run()[0]
    case.tensors.kv_cache[entry, 20, :512] += 3
    assert not torch.equal(case.run()[0], before)
    require(case.judge())


@pytest.mark.parametrize("page_size", [1, 16, 64, 1536])
def test_selection_over_pages(arch, multiprocessors, page_size):
    require(make_case(arch, multiprocessors, (3000, 129, 70), heads=8, page_size=page_size, sparse=SparsePolicy(5, 2, 3), seed=page_size).judge())


def test_selection_with_stride_one_is_exact(arch, multiprocessors):
    case = make_case(arch, multiprocessors, LENGTHS, heads=8, mode="verify", rows=4, sparse=SparsePolicy(1, 0, 1))
    exact = make_case(arch, multiprocessors, LENGTHS, heads=8, mode="verify", rows=4)
    require(gate.judge(*case.run(), *exact.reference(), gate.TOLERANCES["bf16"]))


@pytest.mark.parametrize("counts", [(300,), (40, 0, 130)])
def test_selection_of_extend_rows(arch, multiprocessors, counts):
    lengths = tuple(700 + 5 * i for i in range(len(counts)))
    require(make_case(arch, multiprocessors, lengths, heads=16, mode="extend", row_counts=counts, sparse=SparsePolicy(3, 1, 1)).judge())


def test_selection_inside_a_graph_follows_the_live_lengths(arch, multiprocessors):
    case = make_case(arch, multiprocessors, (4000,) * 4, heads=8, mode="verify", rows=4, sparse=SparsePolicy(3, 1, 2, 500, 128))
    binding = case.bind()
    binding.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        binding.run()
    for lengths in ((1, 4000, 500, 0), (503, 640, 641, 3999), (64, 128, 256, 512)):
        case.tensors.cache_seqlens.copy_(torch.tensor(lengths))
        case.lengths = lengths
        case.poison()
        graph.replay()
        require(gate.judge(case.tensors.output, case.tensors.lse, *case.reference(), gate.TOLERANCES["bf16"]))


# ---------------------------------------------------------------------- windows


@pytest.mark.parametrize("window", [1, 16, 63, 100, 10_000])
@pytest.mark.parametrize(("mode", "rows", "heads"), [("decode", 1, 8), ("verify", 4, 8), ("verify", 4, 64)])
def test_windows(arch, multiprocessors, mode, rows, heads, window):
    require(make_case(arch, multiprocessors, LENGTHS, heads=heads, mode=mode, rows=rows, window=window).judge())


def test_window_of_extend_rows(arch, multiprocessors):
    require(make_case(arch, multiprocessors, (900, 40), heads=8, mode="extend", row_counts=(300, 40), window=70).judge())


# ---------------------------------------------------------------------- E4M3


@pytest.mark.parametrize("page_size", [1, 64, 1536])
@pytest.mark.parametrize("heads", HEADS)
def test_e4m3_decode(arch, multiprocessors, heads, page_size):
    require(make_case(arch, multiprocessors, LENGTHS, heads=heads, record="fp8", page_size=page_size, seed=heads).judge())


@pytest.mark.parametrize("q_dtype", ["bf16", "e4m3"])
@pytest.mark.parametrize(("mode", "rows", "heads"), [("decode", 1, 8), ("verify", 4, 8), ("verify", 4, 64), ("verify", 2, 5)])
def test_e4m3_query_and_scales(arch, multiprocessors, mode, rows, heads, q_dtype):
    for scale in (0.02, 0.37, 1.0):
        q_scale = 0.1 if q_dtype == "e4m3" else None
        case = make_case(
            arch, multiprocessors, LENGTHS, heads=heads, mode=mode, rows=rows, record="fp8", q_dtype=q_dtype, kv_scale=scale, q_scale=q_scale
        )
        require(case.judge())
        if scale != 1.0:
            lost = with_tensors(case, kv_scale=1.0)
            assert not gate.judge(*lost.run(), *case.reference(), gate.TOLERANCES["fp8"]).passed, "a dropped scale must show"


@pytest.mark.parametrize("heads", [8, 48])
def test_e4m3_extend(arch, multiprocessors, heads):
    require(make_case(arch, multiprocessors, (700,), heads=heads, mode="extend", row_counts=(512,), record="fp8").judge())
    require(make_case(arch, multiprocessors, (40, 0, 513, 64), heads=heads, mode="extend", row_counts=(40, 3, 200, 1), record="fp8").judge())


@pytest.mark.parametrize("heads", [8, 16, 96])
@pytest.mark.parametrize("policy", POLICIES[:2], ids=["plain", "min-tokens"])
def test_e4m3_selection(arch, multiprocessors, heads, policy):
    require(make_case(arch, multiprocessors, LENGTHS, heads=heads, mode="verify", rows=4, record="fp8", sparse=policy).judge())


def test_e4m3_every_code(arch, multiprocessors):
    """All finite codes, subnormals included, as keys and as values."""
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    case = make_case(arch, multiprocessors, (254,), heads=8, record="fp8", kv_scale=0.01)
    pages = case.tensors.page_table[0, :4].long()
    held = case.tensors.kv_cache.view(torch.uint8)[pages].reshape(-1, 576)
    for column in range(0, 576, 7):
        held[:254, column] = codes.view(torch.uint8).roll(column)
    case.tensors.kv_cache.view(torch.uint8)[pages] = held.view(4, 64, 576)
    require(with_tensors(case, sm_scale=0.002).judge())


@pytest.mark.parametrize(("page_size", "first_page"), [(64, 58_255), (1536, 2_428)])
def test_e4m3_pages_past_two_gigabytes(arch, multiprocessors, page_size, first_page):
    assert first_page * page_size * 576 >= 2**31
    require(make_case(arch, multiprocessors, (900, 64, 2000), heads=16, record="fp8", page_size=page_size, first_page=first_page).judge())


@pytest.mark.parametrize("heads", [8, 96])
@pytest.mark.parametrize("record", ["bf16", "fp8"])
def test_strided_views_of_every_record(arch, multiprocessors, heads, record):
    case = make_case(arch, multiprocessors, LENGTHS, heads=heads, record=record, kv_width=640)
    expected = case.run()
    total = case.tensors.q.shape[0]
    wide = torch.full((total, heads + 3, 1024), 7.0, dtype=torch.bfloat16, device="cuda")
    output, lse = with_tensors(case, output=wide[:, 2 : heads + 2, 256:768]).run()
    assert torch.equal(output, expected[0])
    assert torch.equal(lse, expected[1])
    wide[:, 2 : heads + 2, 256:768] = 7.0
    assert (wide == 7.0).all(), "elements outside the output view were written"


@pytest.mark.parametrize("heads", [8, 96])
def test_e4m3_poisoned_runs_and_replays_are_bitwise_equal(arch, multiprocessors, heads):
    case = make_case(arch, multiprocessors, (3000, 17, 801, 64, 2999, 0), heads=heads, mode="verify", rows=4, record="fp8")
    output, lse = case.run()
    binding = case.bind()
    binding.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        binding.run()
    for turn in range(20):
        if turn % 2:
            case.poison()
            graph.replay()
            again = case.tensors.output, case.tensors.lse
        else:
            again = case.run()
        assert torch.equal(again[0], output)
        assert torch.equal(again[1], lse)


# ---------------------------------------------------------------------- wide records, forced splits


@pytest.mark.parametrize("record", ["bf16", "fp8"])
@pytest.mark.parametrize(("mode", "rows", "heads"), [("decode", 1, 8), ("decode", 1, 22), ("verify", 4, 16)])
def test_records_of_1088_elements(arch, multiprocessors, mode, rows, heads, record):
    require(make_case(arch, multiprocessors, LENGTHS, heads=heads, mode=mode, rows=rows, width=1088, record=record).judge())


def test_extend_of_1088_elements(arch, multiprocessors):
    require(make_case(arch, multiprocessors, (300, 64), heads=8, mode="extend", row_counts=(200, 5), width=1088).judge())


@pytest.mark.parametrize("splits", [1, 2, 3, 8, 40])
@pytest.mark.parametrize("heads", [8, 64])
def test_forced_splits(arch, multiprocessors, heads, splits):
    case = make_case(arch, multiprocessors, (3000, 3000, 5), heads=heads, mode="verify", rows=4, splits=splits)
    tiles = 3 * -(-4 * heads // TILE_ROWS[case.plan.tile])
    assert case.plan.budget == (0 if splits == 1 else splits * tiles)
    require(case.judge())


@pytest.mark.parametrize("record", ["bf16", "fp8"])
def test_the_gate_refuses_scaled_outputs(arch, multiprocessors, record):
    case = make_case(arch, multiprocessors, (2000, 300), record=record)
    output, lse = case.run()
    for factor in (1.02, 0.37, math.nan):
        assert not gate.judge(output * factor, lse, *case.reference(), gate.TOLERANCES[record]).passed
