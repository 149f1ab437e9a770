"""The reference of captures against attention written out key by key."""

import msgspec
import pytest
import torch
from calls import brute, dense, dense_keys

from mlactl.replay import attention, oracle
from mlactl.replay.capture import Capture
from mlactl.replay.records import RECORDS, decode


def close(found, expected, tolerance=1e-12):
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found[1], expected[1], rtol=tolerance, atol=tolerance)


def test_causal_rows_are_right_aligned():
    made = dense(lengths=(20, 45), rows=4)
    close(oracle.reference(made, "fp64", device="cpu"), brute(made, dense_keys(made, lambda row: (20, 45)[row // 4] - 4 + row % 4 + 1)))


def test_rows_that_see_nothing_are_0_and_minus_infinity():
    made = dense(lengths=(2, 0, 17), rows=4)
    found = oracle.reference(made, "fp64", device="cpu")
    close(found, brute(made, dense_keys(made, lambda row: max(0, (2, 0, 17)[row // 4] - 4 + row % 4 + 1))))
    assert torch.isneginf(found[1][:2]).all()
    assert torch.equal(found[0][4:8], torch.zeros(4, 2, 512, dtype=torch.float64))


def test_per_query_lengths_are_clamped_by_the_request():
    """World 2, rank 1, interleave 1, global lengths 8, 9, 10: rows see 4, 4, 5 and not 3, 4, 5."""
    made = dense(lengths=(5,), rows=3, own=[4, 4, 9])
    close(oracle.reference(made, "fp64", device="cpu"), brute(made, dense_keys(made, lambda row: (4, 4, 5)[row])))


def test_a_window_keeps_only_the_last_keys():
    made = dense(lengths=(40,), rows=3, window=7)
    keys = dense_keys(made, lambda row: 38 + row)
    close(oracle.reference(made, "fp64", device="cpu"), brute(made, lambda row: keys(row)[-7:]))


def test_fp8_cache_with_its_scale():
    made = dense(lengths=(33,), rows=2, record="fp8", kv_scale=0.25)
    keys = dense_keys(made, lambda row: 32 + row)
    close(oracle.reference(made, "fp64", device="cpu"), brute(made, lambda row: keys(row).double() * 0.25))


def test_selected_slots_skip_holes_and_count_duplicates():
    generator = torch.Generator().manual_seed(0)
    kv = torch.randint(0, 256, (3, 16, 432), generator=generator, dtype=torch.uint8)
    kv[..., 256:288] = torch.randint(0x30, 0x40, (3, 16, 32), generator=generator, dtype=torch.uint8)
    kv[..., 304:432] = torch.randn(3, 16, 64, generator=generator).to(torch.bfloat16).view(torch.uint8)
    base = dense()
    call = msgspec.structs.replace(
        base.call, kernel_id="attention.mla.sm120.decode", facts={}, record="nvfp4_ds_mla_432", scale_mode="static", latent_scale=0.37, mode="decode"
    )
    indices = torch.tensor([[5, -1, 40, 5, 7], [-1, -1, -1, -1, -1], [0, 47, 1, 2, 3]], dtype=torch.int32)
    made = Capture(
        "s",
        call,
        {
            "q": base.tensors["q"][:3],
            "kv_cache": kv,
            "page_ids": torch.arange(3),
            "indices": indices,
            "lengths": torch.tensor([4, 5, 2], dtype=torch.int32),
        },
    )
    chosen = ([5, 40, 5], [], [0, 47])
    flat = decode(kv.flatten(0, 1), RECORDS["nvfp4_ds_mla_432"], latent_scale=0.37, dtype=torch.float64)
    close(oracle.reference(made, "fp64", device="cpu"), brute(made, lambda row: flat[chosen[row]]), 1e-10)


@pytest.mark.parametrize("lengths", [(20, 45), (2, 0, 17), (64,)])
def test_the_kernels_reference_and_ours_agree(lengths, monkeypatch):
    made = dense(lengths=lengths)
    theirs = oracle.reference(made, "fp64", device="cpu")
    monkeypatch.setattr(oracle, "_covered", lambda capture: False)
    close(oracle.reference(made, "fp64", device="cpu"), theirs)


@pytest.mark.parametrize("made", [dense(), dense(lengths=(40, 9), window=5), dense(lengths=(0, 3, 64))])
def test_opened_up_attention_is_the_same(made):
    close(attention.attend(made, range(made.rows), torch.float64), oracle.reference(made, "fp64", device="cpu"))


def test_some_rows_are_those_rows():
    made = dense()
    whole = oracle.reference(made, "fp64", device="cpu")
    close(oracle.reference(made, "fp64", device="cpu", rows=[1, 6, 7]), (whole[0][[1, 6, 7]], whole[1][[1, 6, 7]]))


def test_blocks_of_logits_change_nothing(monkeypatch):
    made = dense(own=[17, 18, 19, 20, 42, 43, 44, 45])
    whole = oracle.reference(made, "fp64", device="cpu")
    monkeypatch.setattr(oracle, "_LOGITS", 50)
    close(oracle.reference(made, "fp64", device="cpu"), whole)


def test_fp32_is_near_fp64():
    made = dense(lengths=(64, 64))
    close([item.double() for item in oracle.reference(made, "fp32", device="cpu")], oracle.reference(made, "fp64", device="cpu"), 1e-5)
