"""Decoding records: exhaustive over the 16 E2M1 and 256 E4M3 codes, and byte by byte against the layouts of docs/nvfp4.md."""

import math
import struct

import pytest
import torch

from mlactl.replay.records import RECORDS, decode


def e4m3(code):
    """Value of an E4M3 "fn" code by its definition."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@pytest.mark.parametrize("code", range(16))
def test_every_e2m1_code_under_every_e4m3_scale(code):
    layout = RECORDS["nvfp4_ds_mla_432"]
    record = torch.zeros(8, 432, dtype=torch.uint8)
    record[:, :256] = code | code << 4
    record[:, 256:288] = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
    keys = decode(record, layout, dtype=torch.float64)
    magnitude = E2M1[code & 7] * (-1 if code & 8 else 1)
    expected = torch.tensor([magnitude * e4m3(scale) for scale in range(256)], dtype=torch.float64)
    found = keys[:, :512].reshape(256, 16)
    finite = ~expected.isnan()
    assert torch.equal(found[finite], expected[finite][:, None].expand(-1, 16))
    assert found[~finite].isnan().all()


def test_the_low_nibble_is_the_even_index():
    record = torch.zeros(1, 432, dtype=torch.uint8)
    record[0, 0] = 0x2 | 0x7 << 4
    record[0, 256] = 0x38  # 1.0
    keys = decode(record, RECORDS["nvfp4_ds_mla_432"], dtype=torch.float32)
    assert keys[0, :3].tolist() == [1.0, 6.0, 0.0]


def test_outer_scale_reaches_the_latent_and_not_the_rope():
    record = torch.zeros(1, 432, dtype=torch.uint8)
    record[0, :256], record[0, 256:288] = 0x22, 0x38
    record[0, 304:432] = torch.full((64,), 3.0, dtype=torch.bfloat16).view(torch.uint8)
    keys = decode(record, RECORDS["nvfp4_ds_mla_432"], latent_scale=0.37, dtype=torch.float32)
    assert torch.equal(keys[0, :512], torch.full((512,), 0.37))
    assert torch.equal(keys[0, 512:], torch.full((64,), 3.0))


@pytest.mark.parametrize("per_token", [False, True])
def test_fp8_rope_and_token_scales_of_368_byte_records(per_token):
    record = torch.zeros(1, 368, dtype=torch.uint8)
    record[0, :256], record[0, 256:288] = 0x22, 0x38
    record[0, 288:292] = torch.tensor(list(struct.pack("<f", 0.25)), dtype=torch.uint8)
    record[0, 292:296] = torch.tensor(list(struct.pack("<f", 5.0)), dtype=torch.uint8)
    record[0, 304:368] = 0x40  # 2.0
    name = "nvfp4_ds_mla_368_per_token" if per_token else "nvfp4_ds_mla_368"
    keys = decode(record, RECORDS[name], dtype=torch.float32)
    assert torch.equal(keys[0, :512], torch.full((512,), 5.0 if per_token else 1.0))
    assert torch.equal(keys[0, 512:], torch.full((64,), 0.5))


def test_fp8_ds_mla_groups_of_128():
    record = torch.zeros(1, 656, dtype=torch.uint8)
    record[0, :512] = 0x38
    record[0, 512:528] = torch.tensor(list(struct.pack("<4f", 1.0, 2.0, 0.5, 4.0)), dtype=torch.uint8)
    record[0, 528:656] = torch.full((64,), -1.5, dtype=torch.bfloat16).view(torch.uint8)
    keys = decode(record, RECORDS["fp8_ds_mla"], dtype=torch.float32)
    assert keys[0, :512].reshape(4, 128).unique(dim=1).flatten().tolist() == [1.0, 2.0, 0.5, 4.0]
    assert torch.equal(keys[0, 512:], torch.full((64,), -1.5))


def test_dense_fp8_has_one_scale_for_latent_and_rope():
    record = torch.full((1, 576), 2.0).to(torch.float8_e4m3fn)
    assert torch.equal(decode(record, RECORDS["fp8"], kv_scale=0.5, dtype=torch.float32), torch.ones(1, 576))
