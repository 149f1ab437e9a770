"""The one decision between identity and dynamic code, per-layer scales, and the refusals on either side of it."""

from __future__ import annotations

import math

import pytest

from mlactl.kernels import registry
from mlactl.kernels.errors import BindError, SpecError
from mlactl.kernels.mla.latent_scale import LatentScale, OuterScales, resolve
from mlactl.kernels.mla.sparse_planner import SparseCaps, plan

STATIC = ("nvfp4_ds_mla_432", "nvfp4_ds_mla_368")
OWN = ("nvfp4_ds_mla_368_per_token", "fp8_ds_mla")


@pytest.mark.parametrize("record", STATIC)
@pytest.mark.parametrize(
    ("scale", "value", "identity"),
    [
        (1.0, 1.0, 1),
        (1, 1.0, 1),
        (1.00000001, 1.0, 1),
        (1.0000001, 1.00000011920928955078125, 0),
        (0.37, 0.3700000047683716, 0),
        (1e-45, 1.401298464324817e-45, 0),
        (3.4e38, 3.3999999521443642e38, 0),
    ],
)
def test_the_variant_follows_from_the_float32_value(record, scale, value, identity):
    assert resolve(record, scale) == LatentScale(value, identity)


@pytest.mark.parametrize("record", [*STATIC, *OWN])
@pytest.mark.parametrize("scale", [0.0, -0.0, -0.37, math.nan, math.inf, -math.inf, 1e-46, 1e39])
def test_scales_that_are_no_positive_float32_are_refused(record, scale):
    with pytest.raises(BindError, match=r"latent_scale is .* as float32; expected a finite number above 0"):
        resolve(record, scale)


@pytest.mark.parametrize(("record", "title"), [(OWN[0], r"with FP8 RoPE and a per-token scale \(368 bytes\)"), (OWN[1], r"fp8_ds_mla \(656 bytes\)")])
def test_records_with_scales_of_their_own_refuse_any_other_by_name(record, title):
    assert resolve(record, 1.00000001).identity == 1
    with pytest.raises(BindError, match=f"latent_scale is 0.37: .*{title} carries its own scales and takes 1.0 only"):
        resolve(record, 0.37)


@pytest.mark.parametrize("record", OWN)
@pytest.mark.parametrize("kernel", [registry.SPARSE_DECODE, registry.SPARSE_PREFILL])
def test_the_registry_has_no_dynamic_variant_of_those_records(kernel, record):
    output = "direct" if kernel is registry.SPARSE_PREFILL else "split"
    facts = {"tile": "heads16", "output": output, "q_dtype": "bf16", "record": record}
    assert kernel.spec(**facts, latent_scale_identity=1).fact("record") == record
    with pytest.raises(SpecError, match=f"record={record} and latent_scale_identity=0: records that carry their own scales"):
        kernel.spec(**facts, latent_scale_identity=0)


def make_plan(record=STATIC[0], mode="decode"):
    return plan(SparseCaps(mode, heads=16, max_rows=8, top_k=2048, record=record, multiprocessors=188, arch="sm_120a"))


@pytest.mark.parametrize("mode", ["decode", "verify", "prefill"])
def test_a_plan_never_hands_out_the_other_variant(mode):
    built = make_plan(mode=mode)
    for scale in (1.0, 1.00000001, 0.37, 0.9, 3.3):
        resolved = resolve(STATIC[0], scale)
        assert built.forward(resolved).fact("latent_scale_identity") == (1 if scale in (1.0, 1.00000001) else 0)
    wrong = built.forward(LatentScale(1.0, 1))
    with pytest.raises(BindError, match=r"latent_scale 0.37\d* needs latent_scale_identity=0, the object is attention.*latent_scale_identity=1"):
        resolve(STATIC[0], 0.37).require(wrong)


def test_layers_take_their_scale_and_draft_layers_identity():
    scales = OuterScales(tuple(0.01 * (i + 1) for i in range(78)))
    assert scales.for_layer(0) == 0.01
    assert scales.for_layer(77) == pytest.approx(0.78)
    assert (scales.for_layer(78), scales.for_layer(79)) == (1.0, 1.0)
    assert scales.identities(STATIC[0], draft_layers=1) == (0, 1)
    assert scales.identities(STATIC[0], draft_layers=0) == (0,)
    assert OuterScales((1.0, 1.00000001)).identities(STATIC[0], draft_layers=0) == (1,)
    with pytest.raises(BindError, match="layer -1: layers are counted from 0"):
        scales.for_layer(-1)


@pytest.mark.parametrize("scale", ["1", "0.5", None, True, (1.0,)])
def test_what_is_no_number_is_refused_by_name(scale):
    """A string was a struct.error, and True passed for 1.0."""
    with pytest.raises(BindError) as refused:
        resolve(STATIC[0], scale)
    assert refused.value.message == f"latent_scale is {scale!r}, expected a number"


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_record_that_there_is_none_of_is_refused_whatever_the_scale(scale):
    """At 1.0 it was identity, at any other scale a bare KeyError."""
    with pytest.raises(BindError, match=r"record 'nope' is not one of nvfp4_ds_mla_432, "):
        resolve("nope", scale)


def test_a_bad_layer_is_named():
    with pytest.raises(BindError, match=r"scale of layer 17 is 0\.0"):
        OuterScales((1.0,) * 17 + (0.0,))
