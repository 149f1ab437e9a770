"""Every refusal of a sparse binding names the argument, the index and both values; none needs a device."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from mlactl.kernels.errors import BindError
from mlactl.kernels.mla import sparse
from mlactl.kernels.mla.latent_scale import resolve
from mlactl.kernels.mla.sparse import SparseBinding, SparseTensors
from mlactl.kernels.mla.sparse_planner import SparseCaps, plan


def bf16(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16)


def u8(*shape):
    return torch.zeros(*shape, dtype=torch.uint8)


def build(record="nvfp4_ds_mla_432", mode="decode", rows=3, heads=8, top_k=192, **changes):
    """A plan and tensors on the CPU that fit it."""
    built = plan(SparseCaps(mode, heads, max_rows=4, top_k=top_k, record=record, multiprocessors=188, arch="sm_120a"))
    tensors = SparseTensors(
        q=bf16(rows, heads, 576),
        kv_cache=u8(10, 64, built.record.record_bytes),
        indices=torch.zeros(rows, top_k, dtype=torch.int32),
        lengths=torch.full((rows,), top_k, dtype=torch.int32),
        output=bf16(rows, heads, 512),
        lse=torch.zeros(rows, heads),
        scratch=u8(built.scratch_bytes) if built.scratch_bytes else None,
    )
    return built, replace(tensors, **changes)


def unlaunched(built, tensors):
    """A binding as `bind` would make it, for checks that need no launch."""
    scale = resolve(built.caps.record, tensors.latent_scale)
    return SparseBinding(built, tensors, scale, built.forward(scale), (), ())


def test_fitting_tensors_pass_and_only_the_device_is_refused():
    built, tensors = build()
    sparse.check(built, tensors)
    with pytest.raises(BindError, match="q is on cpu; the kernels run on CUDA devices"):
        built.bind(tensors)


def test_the_device_is_looked_at_before_addresses():
    """Tensors on the meta device all start at 0, so that `output shares memory with q` was said of them."""
    built, tensors = build()
    moved = {name: value.to("meta") for name in tensors.__slots__ if isinstance(value := getattr(tensors, name), torch.Tensor)}
    with pytest.raises(BindError, match=r"^q is on meta; the kernels run on CUDA devices$"):
        built.bind(replace(tensors, **moved))


def test_views_with_room_between_rows_pass():
    """Padded records, a head-major output and index rows inside a wider table."""
    built, tensors = build(
        q=bf16(3, 20, 640)[:, 3:11, 8:584],
        output=bf16(8, 3, 512).transpose(0, 1),
        kv_cache=u8(10, 64, 448)[..., :432],
        indices=torch.zeros(3, 200, dtype=torch.int32)[:, 7:199],
    )
    sparse.check(built, tensors)


REFUSALS = [
    ({"q": torch.zeros(3, 8, 576)}, r"q has dtype torch.float32, expected torch.bfloat16"),
    ({"q": bf16(3, 9, 576)}, r"q.shape\[1\] is 9, expected 8"),
    ({"q": bf16(3, 8, 512)}, r"q.shape\[2\] is 512, expected 576"),
    ({"q": bf16(5, 8, 576)}, r"q has 5 rows, the plan holds 1 to 4"),
    ({"q": bf16(3, 8, 1152)[..., ::2]}, r"q.stride\(2\) is 2, the last dimension must be contiguous"),
    ({"q": bf16(3 * 8 * 577)[: 3 * 8 * 577].view(3, 8, 577)[..., :576]}, r"q.stride\(1\) is 577 elements, expected a multiple of 8"),
    ({"q": bf16(3 * 8 * 576 + 8)[1:-7].view(3, 8, 576)}, r"q starts at 0x[0-9a-f]+, expected a multiple of 16 bytes"),
    ({"q": bf16(1, 8, 576).expand(3, 8, 576)}, r"q.stride\(0\) is 0: elements overlap"),
    ({"kv_cache": bf16(10, 64, 432)}, "kv_cache has dtype torch.bfloat16, expected torch.uint8"),
    ({"kv_cache": u8(640, 432)}, r"kv_cache has rank 2, expected 3: \[pages, page_size, 432\]"),
    ({"kv_cache": u8(10, 64, 433)[..., :432]}, r"kv_cache.stride\(1\) is 433 elements, expected a multiple of 16"),
    ({"kv_cache": u8(10, 80, 432)[:, :64]}, r"kv_cache.stride\(0\) is 34560, expected 27648: records must be evenly spaced"),
    ({"indices": torch.zeros(3, 192, dtype=torch.int64)}, "indices has dtype torch.int64, expected torch.int32"),
    ({"indices": torch.zeros(2, 192, dtype=torch.int32)}, r"indices.shape\[0\] is 2, expected 3"),
    ({"indices": torch.zeros(3, 193, dtype=torch.int32)}, "indices has 193 columns, the plan holds 1 to 192"),
    ({"lengths": torch.zeros(4, dtype=torch.int32)}, r"lengths.shape\[0\] is 4, expected 3"),
    ({"lengths": torch.zeros(6, dtype=torch.int32)[::2]}, r"lengths.stride\(0\) is 2, the last dimension must be contiguous"),
    ({"output": torch.zeros(3, 8, 512)}, "output has dtype torch.float32"),
    ({"output": bf16(3, 8, 576)}, r"output.shape\[2\] is 576, expected 512"),
    ({"lse": torch.zeros(8, 3).T}, r"lse has strides \(1, 3\), it must be contiguous"),
    ({"scratch": None}, r"scratch is needed: uint8 of \d+ bytes"),
    ({"scratch": u8(64)}, r"scratch has 64 bytes, the plan needs \d+"),
    ({"sm_scale": 0.0}, "sm_scale must be finite and above 0, got 0.0"),
    ({"sm_scale": math.nan}, "sm_scale must be finite and above 0, got nan"),
    ({"latent_scale": 1e-46}, "latent_scale is 1e-46, 0.0 as float32"),
    ({"latent_scale": math.inf}, "latent_scale is inf"),
    ({"host_lengths": (192, 193, 0)}, r"lengths\[1\] is 193, indices has 192 columns"),
    ({"host_lengths": (192, 192, -1)}, r"lengths\[2\] is -1"),
    ({"host_lengths": (192,)}, "host_lengths has 1 lengths, q has 3 rows"),
]


@pytest.mark.parametrize(("changes", "text"), REFUSALS, ids=range(len(REFUSALS)))
def test_refusals(changes, text):
    built, tensors = build(**changes)
    with pytest.raises(BindError, match=text):
        sparse.check(built, tensors)


@pytest.mark.parametrize(
    ("record", "other", "held", "read"),
    [
        (
            "nvfp4_ds_mla_432",
            368,
            "nvfp4_ds_mla with FP8 RoPE (368 bytes) or nvfp4_ds_mla with FP8 RoPE and a per-token scale (368 bytes)",
            "with BF16 RoPE (432 bytes)",
        ),
        ("nvfp4_ds_mla_368", 432, "nvfp4_ds_mla with BF16 RoPE (432 bytes)", "nvfp4_ds_mla with FP8 RoPE (368 bytes)"),
        ("fp8_ds_mla", 432, "nvfp4_ds_mla with BF16 RoPE (432 bytes)", "fp8_ds_mla (656 bytes)"),
        ("nvfp4_ds_mla_368", 656, "fp8_ds_mla (656 bytes)", "with FP8 RoPE (368 bytes)"),
    ],
)
def test_layouts_are_refused_for_each_other_by_name(record, other, held, read):
    built, tensors = build(record=record, kv_cache=u8(10, 64, other))
    with pytest.raises(BindError) as refused:
        sparse.check(built, tensors)
    assert f"records of {other} bytes, as {held} has" in refused.value.message
    assert refused.value.message.endswith(read)


@pytest.mark.parametrize("written", ["output", "lse", "scratch"])
def test_what_is_written_may_not_share_memory(written):
    memory = u8(1 << 20)
    built, tensors = build()
    part = {
        "output": lambda m: m[: 3 * 8 * 1024].view(torch.bfloat16).view(3, 8, 512),
        "lse": lambda m: m[: 3 * 8 * 4].view(torch.float32).view(3, 8),
        "scratch": lambda m: m,
    }
    changes = {written: part[written](memory), "kv_cache": memory[: 10 * 64 * 432].view(10, 64, 432)}
    with pytest.raises(BindError, match=f"{written} shares memory with kv_cache"):
        sparse.check(built, replace(tensors, **changes))


@pytest.mark.parametrize(("value", "row", "column"), [(640, 1, 5), (-2, 2, 95), (2**31 - 1, 0, 0)])
def test_validate_refuses_slots_outside_the_pool(value, row, column):
    built, tensors = build()
    tensors.indices[row, column] = value
    with pytest.raises(BindError, match=rf"indices\[{row}, {column}\] is {value}, the cache has slots 0 to 639"):
        unlaunched(built, tensors).validate()


def test_validate_looks_only_at_columns_that_count_and_allows_holes():
    built, tensors = build()
    tensors.lengths[1] = 5
    tensors.indices[1, 5:] = 10_000
    tensors.indices[2, 3:90] = -1
    unlaunched(built, tensors).validate()
    tensors.lengths[0] = 193
    with pytest.raises(BindError, match=r"lengths\[0\] is 193"):
        unlaunched(built, tensors).validate()


@pytest.mark.parametrize(("scale", "identity"), [(1.0, 1), (1.00000001, 1), (0.37, 0)])
def test_the_bound_variant_follows_from_the_scale(scale, identity):
    built, tensors = build(latent_scale=scale)
    assert unlaunched(built, tensors).spec.fact("latent_scale_identity") == identity


def test_a_binding_whose_variant_was_changed_does_not_launch():
    """The choice is checked again where objects are loaded: a stale identity spec must not serve the scale 0.37."""
    built, tensors = build(latent_scale=0.37)
    binding = unlaunched(built, tensors)
    binding.spec = dict(built.forwards)[1]
    with pytest.raises(BindError, match=r"latent_scale 0.37\d* needs latent_scale_identity=0"):
        binding.preload()
