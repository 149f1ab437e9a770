"""Every refusal of a dense binding names the argument, the index and both values; none needs a device."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from mlactl.kernels.errors import BindError
from mlactl.kernels.mla import dense
from mlactl.kernels.mla.dense import DenseTensors
from mlactl.kernels.mla.planner import DenseCaps, plan


def build(mode="decode", rows=1, requests=3, heads=8, page_size=64, planned=None, **changes):
    """A plan (`planned`: more of its capacities) and tensors on the CPU that fit it."""
    caps = DenseCaps(mode, heads, max_requests=4, max_tokens=600, page_size=page_size, multiprocessors=188, arch="sm_120a", rows=rows)
    built = plan(replace(caps, **(planned or {})))
    total = requests * rows
    tensors = DenseTensors(
        q=torch.zeros(total, heads, 576, dtype=torch.bfloat16),
        kv_cache=torch.zeros(40, page_size, 576, dtype=torch.bfloat16),
        page_table=torch.zeros(requests, 8, dtype=torch.int32),
        cache_seqlens=torch.full((requests,), 100, dtype=torch.int32),
        output=torch.zeros(total, heads, 512, dtype=torch.bfloat16),
        lse=torch.zeros(total, heads),
        scratch=torch.zeros(built.scratch_bytes, dtype=torch.uint8),
        host_cache_seqlens=(100,) * requests,
    )
    return built, replace(tensors, **changes)


def bf16(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16)


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_fitting_tensors_pass_and_only_the_device_is_refused():
    built, tensors = build()
    dense.check(built, tensors)
    with pytest.raises(BindError, match="q is on cpu; the kernels run on CUDA devices"):
        built.bind(tensors)


def test_strided_views_pass():
    q, output, kv = bf16(3, 20, 640)[:, 3:11, 8:584], bf16(8, 3, 512).transpose(0, 1), bf16(40, 64, 640)
    built, tensors = build(q=q, output=output, kv_cache=kv)
    dense.check(built, tensors)


SHAPES = [
    ({"q": torch.zeros(3, 8, 576)}, r"q has dtype torch.float32, expected torch.bfloat16"),
    ({"q": bf16(3, 8 * 576)}, "q has rank 2, expected 3"),
    ({"q": bf16(3, 9, 576)}, r"q.shape\[1\] is 9, expected 8"),
    ({"q": bf16(3, 8, 512)}, r"q.shape\[2\] is 512, expected 576"),
    ({"q": bf16(4, 8, 576), "output": bf16(4, 8, 512), "lse": torch.zeros(4, 8)}, "q has 4 rows, 3 requests of 1 rows need 3"),
    ({"q": bf16(0, 8, 576), "output": bf16(0, 8, 512), "lse": torch.zeros(0, 8)}, "q has 0 rows, expected at least 1"),
    ({"kv_cache": bf16(40, 32, 576)}, r"kv_cache.shape\[1\] is 32, expected 64"),
    ({"kv_cache": bf16(40, 64, 560)}, r"kv_cache.shape\[2\] is 560, a record has 576 elements"),
    ({"kv_cache": torch.zeros(40, 64, 576, dtype=torch.uint8)}, "kv_cache has dtype torch.uint8"),
    ({"page_table": torch.zeros(3, 8, dtype=torch.int64)}, "page_table has dtype torch.int64, expected torch.int32"),
    ({"page_table": torch.zeros(2, 8, dtype=torch.int32)}, r"page_table.shape\[0\] is 2, expected 3"),
    ({"cache_seqlens": torch.zeros(5, dtype=torch.int32), "host_cache_seqlens": None}, "cache_seqlens has 5 requests, the plan holds 1 to 4"),
    ({"cache_seqlens": torch.zeros(3)}, "cache_seqlens has dtype torch.float32"),
    ({"output": bf16(3, 8, 576)}, r"output.shape\[2\] is 576, expected 512"),
    ({"lse": torch.zeros(3, 8, dtype=torch.float64)}, "lse has dtype torch.float64"),
    ({"scratch": None}, r"scratch is needed: uint8 of \d+ bytes"),
    ({"scratch": torch.zeros(100, dtype=torch.uint8)}, r"scratch has 100 bytes, the plan needs \d+"),
    ({"q": bf16(3, 8, 576).to("meta")}, "cache_seqlens is on cpu, q is on meta"),
    ({"page_table": torch.zeros(3, 8, dtype=torch.int32, device="meta")}, "page_table is on meta, q is on cpu"),
]


def test_the_device_is_looked_at_before_addresses():
    """Tensors on the meta device all start at 0, so that `output shares memory with q` was said of them."""
    built, tensors = build()
    moved = {name: value.to("meta") for name in tensors.__slots__ if isinstance(value := getattr(tensors, name), torch.Tensor)}
    with pytest.raises(BindError, match=r"^q is on meta; the kernels run on CUDA devices$"):
        built.bind(replace(tensors, **moved))


@pytest.mark.parametrize(("changes", "message"), SHAPES)
def test_shapes_dtypes_and_devices(changes, message):
    with pytest.raises(BindError, match=message):
        dense.check(*build(**changes))


LAYOUTS = [
    ({"q": bf16(3, 8, 1152)[:, :, ::2]}, r"q.stride\(2\) is 2, the last dimension must be contiguous"),
    ({"q": bf16(3, 8, 580)[:, :, :576]}, r"q.stride\(0\) is 4640|q.stride\(1\) is 580 elements, expected a multiple of 8"),
    ({"q": bf16(3 * 8 * 576 + 4)[4:].view(3, 8, 576)}, "q starts at 0x[0-9a-f]+, expected a multiple of 16 bytes"),
    ({"q": bf16(1, 8, 576).expand(3, 8, 576)}, r"q.stride\(0\) is 0: elements overlap"),
    ({"kv_cache": bf16(40 * 64 * 576).as_strided((39, 64, 576), (32 * 576, 576, 1))}, r"kv_cache.stride\(0\) is 18432: elements overlap"),
    ({"output": bf16(1, 8, 512).expand(3, 8, 512)}, r"output.stride\(0\) is 0: elements overlap"),
    ({"output": bf16(3, 8, 516)[:, :, :512]}, r"output.stride\(0\) is 4128|output.stride\(1\) is 516 elements"),
    ({"lse": torch.zeros(3, 16)[:, :8]}, r"lse has strides \(16, 1\), it must be contiguous"),
    ({"page_table": torch.zeros(3, 16, dtype=torch.int32)[:, ::2]}, r"page_table.stride\(1\) is 2, the last dimension"),
    ({"sm_scale": math.nan}, "sm_scale must be finite and above 0, got nan"),
    ({"sm_scale": 0.0}, "sm_scale must be finite and above 0, got 0.0"),
    ({"sm_scale": 1e-30}, r"sm_scale \* kv_scale \* q_scale is 1e-30, expected 1e-20 to 1e\+20"),
    ({"kv_scale": 0.5}, "kv_scale is 0.5, bf16 elements have no scale: expected 1.0"),
    ({"q_scale": 2.0}, "q_scale is 2.0, bf16 elements have no scale: expected 1.0"),
    ({"window": 7}, "window is 7, the plan has window=false"),
    ({"query_cache_seqlens": i32(1, 2, 3)}, "query_cache_seqlens was given, the plan has lengths=causal"),
    ({"cu_seqlens_q": i32(0, 1, 2, 3)}, "cu_seqlens_q was given, a decode plan takes one row a request"),
    ({"host_cu_seqlens_q": (0, 1, 2, 3)}, "host_cu_seqlens_q was given without cu_seqlens_q"),
]


@pytest.mark.parametrize(("changes", "message"), LAYOUTS)
def test_layouts(changes, message):
    with pytest.raises(BindError, match=message):
        dense.check(*build(**changes))


def test_shared_memory_of_written_tensors_is_refused():
    both = bf16(3, 8, 1152)
    with pytest.raises(BindError, match="output shares memory with q"):
        dense.check(*build(q=both[:, :, :576], output=both[:, :, 576:1088]))


@pytest.mark.parametrize("page_size", [1, 16, 64, 128, 1536])
def test_a6_lengths_against_the_table(page_size):
    """Length = width * page + 1 is refused by name; exactly the table, and a wider table, are allowed."""
    caps = DenseCaps("decode", 8, 2, max_tokens=1 << 20, page_size=page_size, multiprocessors=188, arch="sm_120a")
    built, (_, tensors) = plan(caps), build(requests=2, page_size=page_size)
    tensors = replace(tensors, scratch=torch.zeros(built.scratch_bytes, dtype=torch.uint8))
    dense.check(built, replace(tensors, host_cache_seqlens=(8 * page_size, 1)))
    expected = rf"cache_seqlens\[1\] is {8 * page_size + 1}, page_table has 8 pages of {page_size} tokens, which hold {8 * page_size}"
    with pytest.raises(BindError, match=expected):
        dense.check(built, replace(tensors, host_cache_seqlens=(0, 8 * page_size + 1)))


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((100, 601, 5), r"cache_seqlens\[1\] is 601, the plan holds 600 tokens"),
        ((100, 5, -1), r"cache_seqlens\[2\] is -1, expected at least 0"),
        ((100, 100), "host_cache_seqlens has 2 lengths, cache_seqlens has 3"),
    ],
)
def test_host_lengths(lengths, message):
    with pytest.raises(BindError, match=message):
        dense.check(*build(host_cache_seqlens=lengths))


def bounded(boundaries, total=8):
    count = len(boundaries) - 1
    return build(
        "verify",
        rows=4,
        requests=count,
        q=bf16(total, 8, 576),
        output=bf16(total, 8, 512),
        lse=torch.zeros(total, 8),
        cu_seqlens_q=i32(*boundaries),
        host_cu_seqlens_q=tuple(boundaries),
    )


def test_a7_a_causal_verify_plan_keeps_its_partial_tile():
    dense.check(*bounded((0, 4, 7)))
    dense.check(*bounded((0, 3, 7)))


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ((0, 3, 8), r"cu_seqlens_q\[2\] is 8: request 1 has 5 rows, the plan holds 4"),
        ((1, 4, 8), r"cu_seqlens_q\[0\] is 1, expected 0"),
        ((0, 4, 3), r"cu_seqlens_q\[2\] is 3, below cu_seqlens_q\[1\] = 4"),
    ],
)
def test_row_boundaries(boundaries, message):
    with pytest.raises(BindError, match=message):
        dense.check(*bounded(boundaries))


def test_boundaries_past_the_query_are_refused():
    with pytest.raises(BindError, match=r"cu_seqlens_q\[2\] is 8, q has 7 rows"):
        dense.check(*bounded((0, 4, 8), total=7))


def test_extend_needs_boundaries():
    with pytest.raises(BindError, match="cu_seqlens_q is needed by an extend plan"):
        dense.check(*build("extend", rows=4))


@pytest.mark.parametrize("value", [-1, 40])
def test_pages_outside_the_pool_are_refused_where_they_are_visible(value):
    built, tensors = build()
    tensors.page_table[2, 1] = value
    with pytest.raises(BindError, match=rf"page_table\[2, 1\] is {value}, inside the visible 100 tokens; kv_cache has pages 0 to 39"):
        dense._check_pages(built, tensors, (100, 100, 100))
    dense._check_pages(built, tensors, (100, 100, 64))


# ---------------------------------------------------------------------- per-query lengths


def per_query(boundaries=None, total=8, own=None, **changes):
    """Two requests of 4 verify rows whose plan has per-query lengths."""
    given = {} if boundaries is None else {"cu_seqlens_q": i32(*boundaries), "host_cu_seqlens_q": tuple(boundaries)}
    return build(
        "verify",
        rows=4,
        requests=2,
        planned={"per_query": True},
        q=bf16(total, 8, 576),
        output=bf16(total, 8, 512),
        lse=torch.zeros(total, 8),
        query_cache_seqlens=i32(*range(total)) if own is None else own,
        **given,
        **changes,
    )


def test_per_query_lengths_fit_with_and_without_boundaries():
    dense.check(*per_query())
    dense.check(*per_query((0, 4, 8)))


PER_QUERY = [
    (per_query, {"boundaries": (0, 3, 8)}, r"cu_seqlens_q\[1\] is 3, expected 4: with per-query lengths every request has exactly 4 rows"),
    (per_query, {"boundaries": (0, 4, 7)}, r"cu_seqlens_q\[2\] is 7, expected 8"),
    (per_query, {"boundaries": (0, 4, 7), "total": 7}, "q has 7 rows, 2 requests of 4 rows need 8"),
    (per_query, {"total": 7}, "q has 7 rows, 2 requests of 4 rows need 8"),
    (per_query, {"own": i32(1, 2, 3)}, r"query_cache_seqlens.shape\[0\] is 3, expected 8"),
    (per_query, {"own": torch.zeros(8, dtype=torch.int64)}, "query_cache_seqlens has dtype torch.int64, expected torch.int32"),
    (per_query, {"own": torch.zeros(8, 1, dtype=torch.int32)}, "query_cache_seqlens has rank 2, expected 1"),
    (per_query, {"own": torch.zeros(16, dtype=torch.int32)[::2]}, r"query_cache_seqlens.stride\(0\) is 2, the last dimension must be contiguous"),
    (per_query, {"own": torch.zeros(8, dtype=torch.int32, device="meta")}, "query_cache_seqlens is on meta, q is on cpu"),
]


@pytest.mark.parametrize(("made", "changes", "message"), PER_QUERY)
def test_a7_per_query_refusals(made, changes, message):
    """[0, 3, 8] with 4 rows is refused at index 1 even though 8 is whole; incomplete tiles are refused for these plans only."""
    with pytest.raises(BindError, match=message):
        dense.check(*made(**changes))


def test_per_query_lengths_are_required_when_planned():
    built, tensors = per_query()
    with pytest.raises(BindError, match="query_cache_seqlens is needed: the plan has lengths=per_query"):
        dense.check(built, replace(tensors, query_cache_seqlens=None))


def test_written_tensors_may_not_share_memory_with_own_lengths():
    built, tensors = per_query()
    shared = tensors.lse.view(torch.int32).view(-1)[:8]
    with pytest.raises(BindError, match="lse shares memory with query_cache_seqlens"):
        dense.check(built, replace(tensors, query_cache_seqlens=shared))


# ---------------------------------------------------------------------- E4M3, windows, wide records


def e4m3(*shape):
    return torch.zeros(*shape, dtype=torch.uint8).view(torch.float8_e4m3fn)


def test_e4m3_tensors_pass_and_travel_as_bytes():
    fp8 = {"record": "fp8"}
    dense.check(*build(planned=fp8, kv_cache=e4m3(40, 64, 576), kv_scale=0.3))
    built, tensors = build(planned={**fp8, "q_dtype": "e4m3"}, kv_cache=e4m3(40, 64, 640), q=e4m3(3, 8, 576), kv_scale=0.3, q_scale=2.0)
    dense.check(built, tensors)
    as_bytes = dense._as_bytes(tensors.kv_cache)
    assert (as_bytes.dtype, as_bytes.stride(), as_bytes.data_ptr()) == (torch.uint8, tensors.kv_cache.stride(), tensors.kv_cache.data_ptr())
    assert dense._as_bytes(tensors.output) is tensors.output


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "kv_cache has dtype torch.bfloat16, expected torch.float8_e4m3fn"),
        ({"kv_cache": e4m3(40, 64, 576), "q": e4m3(3, 8, 576)}, "q has dtype torch.float8_e4m3fn, expected torch.bfloat16"),
        ({"kv_cache": e4m3(40, 64, 584)}, r"kv_cache.stride\(0\) is 37376|kv_cache.stride\(1\) is 584 elements, expected a multiple of 16"),
        ({"kv_cache": e4m3(40, 64, 576), "kv_scale": math.inf}, "kv_scale must be finite and above 0, got inf"),
        ({"kv_cache": e4m3(40, 64, 576), "kv_scale": -1.0}, "kv_scale must be finite and above 0, got -1.0"),
        ({"kv_cache": e4m3(40, 64, 576), "kv_scale": 1e-46}, "kv_scale must be finite and above 0, got 1e-46"),
        ({"kv_cache": e4m3(40, 64, 576), "q_scale": 3.0}, "q_scale is 3.0, bf16 elements have no scale"),
    ],
)
def test_e4m3_refusals(changes, message):
    with pytest.raises(BindError, match=message):
        dense.check(*build(planned={"record": "fp8"}, **changes))


def test_window_refusals():
    windowed = {"window": True}
    dense.check(*build(planned=windowed, window=1))
    with pytest.raises(BindError, match="window is needed: the plan has window=true"):
        dense.check(*build(planned=windowed))
    with pytest.raises(BindError, match="window must be at least 1, got 0"):
        dense.check(*build(planned=windowed, window=0))


def test_wide_records():
    wide = {"q": bf16(3, 8, 1088), "kv_cache": bf16(40, 64, 1088), "output": bf16(3, 8, 1024)}
    dense.check(*build(planned={"width": 1088}, **wide))
    with pytest.raises(BindError, match=r"output.shape\[2\] is 512, expected 1024"):
        dense.check(*build(planned={"width": 1088}, **{**wide, "output": bf16(3, 8, 512)}))
