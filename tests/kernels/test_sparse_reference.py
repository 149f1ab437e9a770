"""The sparse reference against a plain softmax over dequantised records."""

from __future__ import annotations

import math

import pytest
import torch

from mlactl.kernels.mla import gate
from mlactl.kernels.mla.quantise import dequantise, quantise
from mlactl.kernels.mla.sparse_records import SPARSE_RECORDS
from mlactl.kernels.mla.sparse_reference import sparse_mla_reference

SCALE = 1 / math.sqrt(192)
RECORDS = ("bf16", *SPARSE_RECORDS)


def setup(record, latent_scale=1.0, pages=5, page_size=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    slots = pages * page_size
    latent, rope = torch.randn(slots, 512, generator=generator), torch.randn(slots, 64, generator=generator)
    cache = quantise(record, latent, rope, latent_scale=latent_scale).view(pages, page_size, -1)
    return cache, torch.randn(4, 6, 576, generator=generator).bfloat16()


def by_hand(q, keys):
    """fp64 softmax of one head, term by term."""
    logits = [float((q.double() * key.double()).sum()) * SCALE for key in keys]
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    output = sum(w * key[:512].double() for w, key in zip(weights, keys, strict=True)) / sum(weights)
    return output, top + math.log(sum(weights))


@pytest.mark.parametrize("record", RECORDS)
def test_equals_a_softmax_over_the_selected_keys(record):
    """Holes anywhere are skipped, repeats count each time, columns past the length do not."""
    cache, q = setup(record)
    indices = torch.tensor([[3, -1, 79, 3, 17, 60], [-1, 5, 5, 5, 2, 1], [9, 8, 7, 6, 5, 4], [-1, -1, -1, -1, -1, 70]], dtype=torch.int32)
    lengths = torch.tensor([6, 4, 0, 5], dtype=torch.int32)
    output, lse = sparse_mla_reference(q, cache, indices, lengths, record=record, sm_scale=SCALE, dtype=torch.float64)
    keys = dequantise(record, cache.flatten(0, 1), dtype=torch.float64)
    for row, chosen in ((0, [3, 79, 3, 17, 60]), (1, [5, 5, 5])):
        for head in range(6):
            expected, expected_lse = by_hand(q[row, head], keys[chosen])
            torch.testing.assert_close(output[row, head], expected, rtol=1e-12, atol=1e-13)
            assert lse[row, head] == pytest.approx(expected_lse, rel=1e-12)
    assert not output[2:].any()
    assert torch.isneginf(lse[2:]).all()


@pytest.mark.parametrize("record", ["nvfp4_ds_mla_432", "nvfp4_ds_mla_368"])
def test_the_outer_scale_is_restored(record):
    cache, q = setup(record, latent_scale=0.37)
    indices, lengths = torch.arange(80).int().repeat(4, 1), torch.full((4,), 80, dtype=torch.int32)
    output, lse = sparse_mla_reference(q, cache, indices, lengths, record=record, sm_scale=SCALE, latent_scale=0.37)
    keys = dequantise(record, cache.flatten(0, 1), latent_scale=0.37)
    logits = q.float() @ keys.T * SCALE
    torch.testing.assert_close(lse, torch.logsumexp(logits, -1))
    torch.testing.assert_close(output, torch.softmax(logits, -1) @ keys[:, :512])


@pytest.mark.parametrize("scale", [0.9, 0.37])
def test_the_gate_refuses_a_dropped_scale_which_cosine_alone_may_not(scale):
    """The founding fault: identity code served layers with real scales. At 0.9 the cosine of what it gives passes."""
    cache, q = setup("nvfp4_ds_mla_432", latent_scale=scale, pages=40)
    indices, lengths = torch.arange(640).int().repeat(4, 1), torch.full((4,), 640, dtype=torch.int32)
    arguments = {"record": "nvfp4_ds_mla_432", "sm_scale": SCALE}
    right = sparse_mla_reference(q * 0.05, cache, indices, lengths, latent_scale=scale, **arguments)
    stale = sparse_mla_reference(q * 0.05, cache, indices, lengths, **arguments)
    verdict = gate.judge(*stale, *right, gate.TOLERANCES["nvfp4"])
    assert not verdict.passed
    assert any(text.startswith("norm") for text in verdict.failures)
    assert verdict.norm == pytest.approx(1 / scale - 1, rel=0.2)
    assert verdict.cosine > 0.9995 or scale == 0.37
    assert gate.judge(*right, *right, gate.TOLERANCES["nvfp4"]).passed
