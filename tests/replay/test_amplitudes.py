"""Amplitudes measured from captures: a scale is never made of what is left after the bad latents."""

import math
from dataclasses import replace

import msgspec
import pytest
import torch
from calls import dense

from mlactl.replay import capture as captures
from mlactl.replay.amplitudes import measure
from mlactl.replay.errors import BadCapture


def saved(folder, name="l0", layer=0, changes=(), **options):
    """A capture whose latents at (page, offset, element) are set to a value."""
    made = dense(seed=layer, layer=layer, **options)
    kv = made.tensors["kv_cache"].clone()
    for page, offset, element, value in changes:
        kv[page, offset, element] = value
    made = replace(made, tensors={**made.tensors, "kv_cache": kv})
    captures.save(made, folder, name)
    return made


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((math.nan,), "1 latents of 1 tokens are not finite, the first nan at element 3 of offset 2 of page"),
        ((math.inf, math.nan), "2 latents of 2 tokens are not finite, the first inf at element 3 of offset 2 of page"),
        ((-math.inf,), "1 latents of 1 tokens are not finite, the first -inf at element 3 of offset 2 of page"),
    ],
    ids=["nan", "both", "infinity"],
)
def test_latents_that_are_not_finite_are_refused(tmp_path, values, said):
    """max(previous, nan) is previous: NaN was passed over, and where all were NaN a layer's amplitude was 0."""
    made = dense(layer=0)
    page = int(made.tensors["page_table"][1, 0])
    saved(tmp_path, changes=[(page, 2 + place, 3, value) for place, value in enumerate(values)])
    with pytest.raises(BadCapture) as refused:
        measure(tmp_path)
    assert f"l0.in.safetensors: {said} {page * 10 + 7}" in refused.value.message
    assert refused.value.hint.startswith(f"mlactl replay {tmp_path / 'l0'} ")


def test_latents_that_no_row_sees_do_not_count(tmp_path):
    """RoPE elements, and tokens past a request's length, are no latents of the call."""
    made = dense(lengths=(20, 45), layer=0)
    last = int(made.tensors["page_table"][0, 1])
    saved(tmp_path, changes=[(last, 5, 0, math.nan), (last, 0, 560, math.nan), (last, 0, 7, -9.5)])
    found = measure(tmp_path)
    assert (found.max_abs, found.captures, found.tokens) == ((9.5,), 1, 65)


def test_a_layer_whose_latents_are_all_zero_is_refused(tmp_path):
    made = dense(layer=0)
    captures.save(replace(made, tensors={**made.tensors, "kv_cache": torch.zeros_like(made.tensors["kv_cache"])}), tmp_path, "l0")
    with pytest.raises(BadCapture, match="every latent of layer 0 is 0"):
        measure(tmp_path)


def test_calls_that_see_nothing_belong_to_no_layer(tmp_path):
    saved(tmp_path, lengths=(0, 0))
    with pytest.raises(BadCapture, match="no capture with tokens of layer 0"):
        measure(tmp_path)


def test_a_layer_before_the_first_is_refused(tmp_path):
    saved(tmp_path, layer=1)
    made = dense()
    captures.save(replace(made, call=msgspec.structs.replace(made.call, layer=-1)), tmp_path, "before")
    with pytest.raises(BadCapture, match="layer -1, expected at least 0"):
        measure(tmp_path)


def test_it_tells_of_every_capture(tmp_path):
    heard = []
    for layer in range(3):
        saved(tmp_path, f"l{layer}", layer)
    assert len(measure(tmp_path, on_capture=lambda: heard.append(1)).max_abs) == len(heard) == 3
