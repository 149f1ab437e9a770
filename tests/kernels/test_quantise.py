"""The quantiser against exhaustive code tables, rounding cases and layouts, all to the bit; none of it through the kernels."""

from __future__ import annotations

import itertools
import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlactl.kernels.errors import BindError
from mlactl.kernels.mla import quantise as q
from mlactl.kernels.mla.sparse_records import SPARSE_RECORDS

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
STATIC = ("nvfp4_ds_mla_432", "nvfp4_ds_mla_368")


def e2m1_of_bits(code: int) -> float:
    """From the format's definition: sign, two exponent bits (bias 1), one mantissa bit."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    return sign * (mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def f32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def nearest_even(value: float, ladder: list[float]) -> int:
    """Index into an ascending ladder of non-negative codes: nearest, ties to the even code."""
    value = min(value, ladder[-1])
    best = min(range(len(ladder)), key=lambda i: (abs(ladder[i] - value), i % 2))
    return best


# ---------------------------------------------------------------------- codes


def test_all_16_e2m1_codes():
    codes = torch.arange(16, dtype=torch.uint8)
    values = q.e2m1_decode(codes).tolist()
    assert values == [e2m1_of_bits(code) for code in range(16)]
    assert [math.copysign(1, value) for value in values] == [1.0] * 8 + [-1.0] * 8
    assert q.e2m1_encode(q.e2m1_decode(codes)).tolist() == list(range(16))


def test_all_256_e4m3_codes():
    codes = torch.arange(256, dtype=torch.uint8)
    ours, theirs = q.e4m3_decode(codes), codes.view(torch.float8_e4m3fn).float()
    nan = [code for code in range(256) if math.isnan(ours[code])]
    assert nan == [0x7F, 0xFF]
    kept = [code for code in range(256) if code not in nan]
    assert torch.equal(ours[kept], theirs[kept])
    assert (ours[1], ours[8], ours[0x7E]) == (2.0**-9, 2.0**-6, 448.0)
    assert q.e4m3_encode(ours[kept]).tolist() == kept
    assert q.e4m3_decode(codes, torch.float64)[kept].tolist() == ours[kept].double().tolist()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.25, 0),
        (0.75, 1),
        (1.25, 1),
        (1.75, 2),
        (2.5, 2),
        (3.5, 4),
        (5.0, 4),
        (6.0, 6),
        (7.0, 6),
        (1e30, 6),
        (math.inf, 6),
        (0.2500001, 0.5),
        (5.000001, 6),
    ],
)
def test_e2m1_ties_go_to_even_and_saturate(value, expected):
    codes = q.e2m1_encode(torch.tensor([value, -value]))
    assert q.e2m1_decode(codes).tolist() == [expected, -expected]
    assert (codes >> 3).tolist() == [0, 1]


def test_e2m1_rounds_every_midpoint_neighbourhood():
    for low, high in itertools.pairwise(MAGNITUDES):
        middle = torch.tensor((low + high) / 2)
        around = torch.stack((torch.nextafter(middle, torch.tensor(0.0)), torch.nextafter(middle, torch.tensor(9.0))))
        assert q.e2m1_decode(q.e2m1_encode(around)).tolist() == [low, high]


def test_e4m3_rounds_to_nearest_even_and_clamps():
    ladder = [q.e4m3_value(code) for code in range(0x7F)]
    for code, (low, high) in enumerate(itertools.pairwise(ladder)):
        middle = (low + high) / 2
        tie = code if code % 2 == 0 else code + 1
        values = torch.tensor([middle, math.nextafter(middle, 0.0), math.nextafter(middle, 1e9)], dtype=torch.float64).float()
        below, above = torch.nextafter(values[0], torch.tensor(0.0)), torch.nextafter(values[0], torch.tensor(1e9))
        assert q.e4m3_encode(torch.stack((values[0], below, above))).tolist() == [tie, code, code + 1]
    assert q.e4m3_encode(torch.tensor([449.0, 1e20, math.inf, -1e20])).tolist() == [0x7E, 0x7E, 0x7E, 0xFE]


# ---------------------------------------------------------------------- groups


def by_hand(group: list[float]) -> tuple[int, list[int]]:
    """One NVFP4 group by the definition, in fp32 steps of Python floats: (scale byte, 16 codes)."""
    ladder = [q.e4m3_value(code) for code in range(0x7F)]
    byte = nearest_even(f32(max(abs(x) for x in group) / 6.0), ladder)
    scale = ladder[byte]
    if scale == 0.0:
        return 0, [0] * 16
    return byte, [nearest_even(f32(abs(x) / scale), list(MAGNITUDES)) | (8 if math.copysign(1, x) < 0 else 0) for x in group]


@given(st.lists(st.floats(-4000, 4000, width=32), min_size=16, max_size=16), st.integers(-24, 3))
def test_groups_equal_the_definition_by_hand(group, exponent):
    group = [f32(x * 2.0**exponent) for x in group]
    record = q.quantise("nvfp4_ds_mla_432", torch.tensor(group * 32), torch.zeros(64))
    byte, codes = by_hand(group)
    assert record[256:288].tolist() == [byte] * 32
    assert record[:8].tolist() == [codes[2 * i] | codes[2 * i + 1] << 4 for i in range(8)]


def test_a_group_whose_scale_rounds_to_zero_is_all_zero_bytes():
    """amax / 6 at half the smallest subnormal ties to 0; just above it is 2^-9."""
    tie = 6 * 2.0**-10
    for value, byte in ((tie, 0), (-tie, 0), (torch.nextafter(torch.tensor(tie), torch.tensor(1.0)).item(), 1)):
        latent = torch.zeros(512)
        latent[:16] = value
        record = q.quantise("nvfp4_ds_mla_432", latent, torch.zeros(64))
        assert record[256] == byte
        assert bool(record[:8].any()) is (byte != 0)


def test_low_nibble_is_the_even_index():
    latent = torch.zeros(512)
    latent[0], latent[1] = 6.0, -3.0
    record = q.quantise("nvfp4_ds_mla_432", latent, torch.zeros(64))
    assert record[0] == 0x7 | 0xD << 4
    assert record[256] == 0x38  # 6 / 6 = 1.0


# ---------------------------------------------------------------------- layouts


def sample(rows=64, seed=3):
    generator = torch.Generator().manual_seed(seed)
    latent = torch.randn(rows, 512, generator=generator) * torch.logspace(-4, 2, rows).unsqueeze(1)
    return latent, torch.randn(rows, 64, generator=generator)


def test_record_sizes():
    assert {name: q.record_bytes(name) for name in (*q.DENSE_RECORDS, *SPARSE_RECORDS)} == {
        "bf16": 1152,
        "fp8": 576,
        "nvfp4_ds_mla_432": 432,
        "nvfp4_ds_mla_368": 368,
        "nvfp4_ds_mla_368_per_token": 368,
        "fp8_ds_mla": 656,
    }


def test_layout_of_432():
    latent, rope = sample()
    record = q.quantise("nvfp4_ds_mla_432", latent, rope)
    assert not record[:, 288:304].any()
    assert torch.equal(record[:, 304:].contiguous().view(torch.bfloat16), rope.bfloat16())


def test_layout_of_368():
    latent, rope = sample()
    record = q.quantise("nvfp4_ds_mla_368", latent, rope)
    scale = record[:, 288:292].contiguous().view(torch.float32)
    assert torch.equal(scale, rope.abs().amax(1, keepdim=True) / 448)
    assert not record[:, 292:304].any()
    assert torch.equal(record[:, 304:], (rope / scale).to(torch.float8_e4m3fn).view(torch.uint8))
    assert torch.equal(record[:, :288], q.quantise("nvfp4_ds_mla_432", latent, rope)[:, :288])


def test_layout_of_368_per_token():
    latent, rope = sample()
    record = q.quantise("nvfp4_ds_mla_368_per_token", latent, rope)
    token = record[:, 292:296].contiguous().view(torch.float32)
    assert torch.equal(token, latent.abs().amax(1, keepdim=True) / 2688)
    assert not record[:, 296:304].any()
    assert torch.equal(record[:, :288], q.quantise("nvfp4_ds_mla_432", latent / token, rope)[:, :288])
    assert (record[:, 256:288].amax(1) == 0x7E).all(), "the largest group's scale sits at the top of E4M3"


def test_layout_of_fp8_ds_mla():
    latent, rope = sample()
    record = q.quantise("fp8_ds_mla", latent, rope)
    scales = record[:, 512:528].contiguous().view(torch.float32)
    assert torch.equal(scales, latent.reshape(-1, 4, 128).abs().amax(2) / 448)
    codes = (latent.reshape(-1, 4, 128) / scales.unsqueeze(2)).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(record[:, :512], codes.flatten(1))
    assert torch.equal(record[:, 528:].contiguous().view(torch.bfloat16), rope.bfloat16())


def test_dense_records():
    latent, rope = sample()
    both = torch.cat((latent, rope), 1)
    assert torch.equal(q.quantise("bf16", latent, rope).view(torch.bfloat16), both.bfloat16())
    assert torch.equal(q.dequantise("bf16", q.quantise("bf16", latent, rope)), both.bfloat16().float())
    record = q.quantise("fp8", latent, rope, kv_scale=0.25)
    assert torch.equal(record, (both / 0.25).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
    assert torch.equal(q.dequantise("fp8", record, kv_scale=0.25), record.view(torch.float8_e4m3fn).float() * 0.25)


@pytest.mark.parametrize(
    ("record", "at"), [("nvfp4_ds_mla_368", 288), ("nvfp4_ds_mla_368_per_token", 288), ("nvfp4_ds_mla_368_per_token", 292), ("fp8_ds_mla", 512)]
)
def test_zero_maxima_take_a_scale_of_one(record, at):
    data = q.quantise(record, torch.zeros(512), torch.zeros(64))
    assert data[at : at + 4].view(torch.float32) == 1.0
    assert torch.equal(q.dequantise(record, data), torch.zeros(576))


# ---------------------------------------------------------------------- the outer scale


@pytest.mark.parametrize("record", STATIC)
def test_outer_scale_divides_at_write_and_multiplies_at_read(record):
    latent, rope = sample()
    scale = f32(0.37)
    data = q.quantise(record, latent, rope, latent_scale=0.37)
    assert torch.equal(data, q.quantise(record, latent / scale, rope))
    plain, restored = q.dequantise(record, data), q.dequantise(record, data, latent_scale=0.37)
    assert torch.equal(restored[:, :512], plain[:, :512] * scale)
    assert torch.equal(restored[:, 512:], plain[:, 512:]), "RoPE is never scaled"


def test_identity_scale_leaves_shallow_layers_at_the_subnormal_floor():
    """A layer whose latents reach 0.02 loses its values with scale 1.0 and keeps them with max_abs / 2688."""
    latent, rope = torch.randn(256, 512, generator=torch.Generator().manual_seed(1)) * 0.005, torch.zeros(256, 64)
    scale = float(latent.abs().max()) / 2688

    def error(s: float) -> float:
        data = q.quantise("nvfp4_ds_mla_432", latent, rope, latent_scale=s)
        return float((q.dequantise("nvfp4_ds_mla_432", data, latent_scale=s)[:, :512] - latent).norm() / latent.norm())

    assert error(scale) < 0.11
    assert error(1.0) > 1.2 * error(scale)


@pytest.mark.parametrize("record", SPARSE_RECORDS)
def test_read_values_are_products_of_decoded_codes(record):
    """fp32 and fp64 agree exactly for NVFP4 at scale 1: the product of codes is exact."""
    data = q.quantise(record, *sample())
    low, high = q.dequantise(record, data), q.dequantise(record, data, dtype=torch.float64)
    if record in STATIC:
        assert torch.equal(low[:, :512].double(), high[:, :512])
    torch.testing.assert_close(low.double(), high, rtol=2**-23, atol=0)


# ---------------------------------------------------------------------- refusals and the cache


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("record", ["bf16", "fp8", *SPARSE_RECORDS])
def test_what_is_not_finite_is_refused_by_place(record, bad):
    latent, rope = torch.zeros(3, 512), torch.zeros(3, 64)
    latent[1, 7] = bad
    with pytest.raises(BindError, match=rf"latent\[1, 7\] is {bad}"):
        q.quantise(record, latent, rope)
    rope[2, 5] = bad
    with pytest.raises(BindError, match=rf"rope\[2, 5\] is {bad}"):
        q.quantise(record, torch.zeros(3, 512), rope)


@pytest.mark.parametrize("record", ["bf16", "fp8", "fp8_ds_mla", "nvfp4_ds_mla_368_per_token"])
def test_records_without_an_outer_scale_take_one_only(record):
    with pytest.raises(BindError, match=f"{record} records take 1.0 only"):
        q.quantise(record, torch.zeros(512), torch.zeros(64), latent_scale=0.5)


def test_shapes_and_names_are_refused():
    with pytest.raises(BindError, match=r"latent \[2, 512\] and rope \[3, 64\]"):
        q.quantise("bf16", torch.zeros(2, 512), torch.zeros(3, 64))
    with pytest.raises(BindError, match="'nvfp4' is no cache record; there are bf16, fp8, nvfp4_ds_mla_432"):
        q.record_bytes("nvfp4")
    with pytest.raises(BindError, match=r"torch\.uint8 of 368, nvfp4_ds_mla_432 takes 432 uint8 bytes"):
        q.dequantise("nvfp4_ds_mla_432", torch.zeros(368, dtype=torch.uint8))


def test_cache_writer_puts_tokens_in_their_slots_and_skips_holes():
    latent, rope = sample(4)
    cache = torch.full((3, 4, 432), 0xAB, dtype=torch.uint8)
    q.write_cache("nvfp4_ds_mla_432", cache, torch.tensor([9, -1, 0, 11]), latent, rope, latent_scale=0.5)
    records = q.quantise("nvfp4_ds_mla_432", latent, rope, latent_scale=0.5)
    assert torch.equal(cache[2, 1], records[0])
    assert torch.equal(cache[0, 0], records[2])
    assert torch.equal(cache[2, 3], records[3])
    untouched = torch.ones(12, dtype=torch.bool)
    untouched[[9, 0, 11]] = False
    assert (cache.view(12, 432)[untouched] == 0xAB).all()


@pytest.mark.parametrize(("slot", "text"), [(12, "slots\\[1\\] is 12"), (-2, "slots\\[1\\] is -2")])
def test_cache_writer_refuses_slots_outside_the_pool(slot, text):
    with pytest.raises(BindError, match=text):
        q.write_cache("nvfp4_ds_mla_432", torch.zeros(3, 4, 432, dtype=torch.uint8), torch.tensor([0, slot]), *sample(2))


def test_cache_writer_refuses_the_other_layout_by_name():
    with pytest.raises(BindError, match="records of 368 bytes, nvfp4_ds_mla_432 takes 432"):
        q.write_cache("nvfp4_ds_mla_432", torch.zeros(3, 4, 368, dtype=torch.uint8), torch.tensor([0]), *sample(1))
