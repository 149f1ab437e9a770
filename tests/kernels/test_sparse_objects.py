"""What the compiler makes of the sparse kernels: the scale's word is read by dynamic code only; C1 through a store on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from machine_code import embedded_cubin, kernels_of

from mlactl.cache.load import StoreSource
from mlactl.cache.machine_code import Reading, reads_of
from mlactl.cache.parameters import kernel_parameters
from mlactl.cache.publish import compile_and_publish
from mlactl.cache.store import Hit, Miss, Store
from mlactl.kernels import compiler, registry, runtime
from mlactl.kernels.errors import BadObject, MissingObject
from mlactl.kernels.mla import sparse_policy
from mlactl.kernels.mla.latent_scale import resolve
from mlactl.kernels.mla.sparse_config import sparse_tile

# The compiler warns of long unrolled loops; it is run in this process here, not in a worker.
pytestmark = pytest.mark.filterwarnings("ignore:This static loop has")

ARCHES = ("sm_120a", "sm_121a", "sm_90a")
STATIC = ("nvfp4_ds_mla_432", "nvfp4_ds_mla_368")
ORDINAL = next(scalar.ordinal for scalar in registry.SPARSE_DECODE.scalars if scalar.name == "latent_scale")


def spec_of(mode, record, scale):
    return sparse_policy.forward_spec(mode, sparse_policy.tiles_for(mode, 64)[0], "bf16", record, resolve(record, scale).identity)


@pytest.fixture(scope="module")
def compile_one(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("sparse"), {}
    flavour = compiler.load_export_libraries()

    def compile_one(spec, arch) -> Path:
        path = made.get((spec, arch))
        if path is None:
            path = made[spec, arch] = folder / f"{len(made)}.o"
            compiler.compile_object(spec, arch, "mlactl_0123abcd", flavour, path)
        return path

    return compile_one


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("record", STATIC)
@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_identity_code_never_reads_the_scale_and_dynamic_code_does(compile_one, mode, record, arch):
    """Told from the machine code alone, by the parameter's bytes in the constant bank: what an audit relies on."""
    reads = {}
    for scale in (1.0, 0.37):
        path = compile_one(spec_of(mode, record, scale), arch)
        (code,) = kernels_of(path)
        (kernel,) = kernel_parameters(embedded_cubin(path))
        scale_word = kernel.parameter(ORDINAL)
        assert scale_word.size_bytes == 4
        assert scale_word.first % 16 == 0, "alone at the start of 16 bytes: no vector load of a neighbour can touch it"
        assert kernel.parameter(ORDINAL + 1) is None, "the last parameter: nothing behind it can be loaded together with it"
        reads[scale] = reads_of([code.function], kernel.base, scale_word.first, scale_word.size_bytes)
    assert reads[1.0].reading is Reading.NOT_READ
    assert reads[1.0].operands >= 20, "it read other words of the bank"
    assert reads[0.37].reading is Reading.READ


@pytest.mark.parametrize("record", STATIC)
def test_identity_code_has_fewer_multiplies(compile_one, record):
    """No restoring multiply: one for each QK accumulator is missing from the loop over chunks, and those of the epilogue."""
    counts = {}
    for scale in (1.0, 0.37):
        (code,) = kernels_of(compile_one(spec_of("decode", record, scale), "sm_120a"))
        counts[scale] = sum(each.opcode.startswith("FMUL") for each in code.instructions)
    tile = sparse_tile("heads16", record)
    assert counts[0.37] - counts[1.0] >= 4 * tile.token_tiles * tile.row_tiles


@pytest.mark.parametrize("arch", ["sm_120a", "sm_121a"])
@pytest.mark.parametrize("mode", ["decode", "prefill"])
@pytest.mark.parametrize("record", ["nvfp4_ds_mla_432", "nvfp4_ds_mla_368_per_token", "fp8_ds_mla"])
def test_resources(compile_one, record, mode, arch):
    spec = spec_of(mode, record, 1.0)
    (code,) = kernels_of(compile_one(spec, arch))
    assert code.frame_bytes == 0
    loops = code.loops_over_keys()
    assert loops
    for body in loops:
        assert code.local_accesses(body) == []


# ---------------------------------------------------------------------- C1


@pytest.mark.parametrize(("first", "then"), [(1.0, 0.37), (0.37, 1.0)])
def test_c1_a_store_warmed_with_one_scale_has_nothing_for_the_other(tmp_path, first, then):
    """Case C1: warmed with 1.0 and asked for 0.37, and the other way round. Two keys; the other is a miss, never a stand-in."""
    store = Store.open(str(tmp_path / "cache"))
    warm, wanted = spec_of("decode", STATIC[0], first), spec_of("decode", STATIC[0], then)
    published = compile_and_publish(store, warm, "sm_120a").entry
    again = Store.open(str(tmp_path / "cache"))
    found, missed = again.lookup(warm, "sm_120a"), again.lookup(wanted, "sm_120a")
    assert isinstance(found, Hit)
    assert found.entry.key == published.key
    assert isinstance(missed, Miss)
    assert missed.key not in (None, published.key)
    assert StoreSource(again).fetch(wanted, "sm_120a") is None
    other = compile_and_publish(again, wanted, "sm_120a").entry
    assert other.key == missed.key
    assert other.object_path.read_bytes() != published.object_path.read_bytes()
    for spec, key in ((warm, published.key), (wanted, other.key)):
        fetched = StoreSource(again).fetch(spec, "sm_120a")
        assert fetched is not None
        assert (fetched.key, fetched.spec) == (key, spec)


class Stale:
    """An object source with the fault of the incident: its look-up leaves the variant out."""

    def __init__(self, source, served):
        self.source, self.served = source, served

    def fetch(self, spec, arch):
        return self.source.fetch(self.served, arch)

    def compile(self, spec, arch):
        raise AssertionError("a stale hit is no miss")

    def describe_miss(self, spec, arch):
        raise AssertionError("a stale hit is no miss")


@pytest.mark.parametrize(("served", "asked"), [(1.0, 0.37), (0.37, 1.0)])
def test_an_object_of_the_other_variant_is_refused_at_load(tmp_path, served, asked):
    """b12x looked kernels up by a key without the scale: identity code ran for real scales, in silence."""
    store = Store.open(str(tmp_path / "cache"))
    stale, wanted = spec_of("decode", STATIC[0], served), spec_of("decode", STATIC[0], asked)
    compile_and_publish(store, stale, "sm_120a")
    runtime.configure(Stale(StoreSource(store), stale))
    try:
        with pytest.raises(BadObject) as refused:
            runtime.launch(wanted, "sm_120a")
    finally:
        runtime.configure(None)
    assert f"latent_scale_identity={resolve(STATIC[0], served).identity}" in refused.value.message.split(";")[0]
    assert f"asked for {wanted.label()}" in refused.value.message
    assert refused.value.hint.startswith("mlactl cache verify")


def test_a_frozen_process_names_the_variant_that_is_missing(tmp_path):
    store = Store.open(str(tmp_path / "cache"))
    compile_and_publish(store, spec_of("decode", STATIC[0], 1.0), "sm_120a")
    runtime.configure(StoreSource(store), frozen=True)
    try:
        with pytest.raises(MissingObject, match="latent_scale_identity=0") as missing:
            runtime.launch(spec_of("decode", STATIC[0], 0.37), "sm_120a")
    finally:
        runtime.configure(None)
    assert missing.value.hint == "mlactl warmup --profile PROFILE --arch sm_120a"
