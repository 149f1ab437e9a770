"""Plans of sparse MLA: variants, splits and scratch from capacities alone, the same specs as a profile enumerates."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from mlactl import profiles
from mlactl.kernels.envelope import SparseEnvelope, enumerate_specs
from mlactl.kernels.errors import PlanError
from mlactl.kernels.mla.sparse_config import PRODUCER_WARPS, SHARED_BYTES_LIMIT, TILE_ROWS, sparse_tile
from mlactl.kernels.mla.sparse_planner import SparseCaps, plan
from mlactl.kernels.mla.sparse_records import SPARSE_RECORDS

CAPS = SparseCaps("decode", heads=16, max_rows=32, top_k=2048, record="nvfp4_ds_mla_432", multiprocessors=188, arch="sm_120a")


def test_the_glm_profile_is_at_most_12_objects_with_both_variants_of_everything():
    specs = profiles.load("glm-5.2-tp4-dcp4").specs()
    assert len(specs) <= 12
    forwards = [spec for spec in specs if spec.kernel_id.startswith("attention.mla.sm120.")]
    assert {(spec.kernel_id, spec.version) for spec in forwards} == {("attention.mla.sm120.decode", 18), ("attention.mla.sm120.prefill_mg", 4)}
    for kernel_id in {spec.kernel_id for spec in forwards}:
        for tile in {spec.fact("tile") for spec in forwards if spec.kernel_id == kernel_id}:
            assert sorted(s.fact("latent_scale_identity") for s in forwards if s.kernel_id == kernel_id and s.fact("tile") == tile) == [0, 1]


@pytest.mark.parametrize(("record", "each"), [("nvfp4_ds_mla_432", 2), ("nvfp4_ds_mla_368", 2), ("nvfp4_ds_mla_368_per_token", 1), ("fp8_ds_mla", 1)])
def test_two_objects_a_configuration_for_static_records_and_one_for_the_rest(record, each):
    identities = (0, 1) if each == 2 else (1,)
    specs = enumerate_specs(SparseEnvelope(("decode",), heads=16, record=record, q_dtype="bf16", identities=identities))
    assert sum(spec.kernel_id == "attention.mla.sm120.decode" for spec in specs) == each
    assert len(plan(replace(CAPS, record=record)).forwards) == each


@pytest.mark.parametrize("record", SPARSE_RECORDS)
@pytest.mark.parametrize("heads", [6, 16, 22, 64, 128])
@pytest.mark.parametrize("rows", [1, 8, 32, 512])
@pytest.mark.parametrize("mode", ["decode", "verify", "prefill"])
def test_everything_that_a_plan_can_launch_is_warmed(mode, rows, heads, record):
    built = plan(replace(CAPS, mode=mode, max_rows=rows, heads=heads, record=record))
    identities = tuple(identity for identity, _ in built.forwards)
    warmed = enumerate_specs(SparseEnvelope((mode,), heads=heads, record=record, q_dtype="bf16", identities=identities))
    assert set(built.specs) <= set(warmed)


@pytest.mark.parametrize(
    ("rows", "heads", "top_k", "multiprocessors", "splits"),
    [
        (32, 16, 2048, 132, 4),
        (22, 64, 2048, 132, 3),
        (32, 64, 2048, 132, 1),
        (8, 64, 2048, 132, 4),
        (1, 64, 2048, 132, 21),
        (512, 16, 2048, 132, 1),
        (1, 16, 32, 132, 1),
        (4, 6, 200, 188, 2),
    ],
)
def test_splits_fill_one_wave_and_are_not_too_short(rows, heads, top_k, multiprocessors, splits):
    built = plan(replace(CAPS, max_rows=rows, heads=heads, top_k=top_k, multiprocessors=multiprocessors))
    assert built.splits == splits
    assert (built.merge is None) is (splits == 1)
    assert built.scratch_bytes == (0 if splits == 1 else splits * rows * heads * (512 * 4 + 4) + rows * heads * 16)


@pytest.mark.parametrize(
    ("rows", "heads", "tile"),
    [
        (1, 64, "heads16"),
        (11, 64, "heads16"),
        (12, 64, "heads32"),
        (13, 64, "heads32"),
        (14, 64, "heads16"),
        (16, 64, "heads16"),
        (17, 64, "heads32"),
        (22, 64, "heads32"),
        (23, 64, "heads16"),
        (33, 64, "heads16"),
        (34, 64, "heads32"),
        (512, 64, "heads32"),
        (40, 22, "heads32"),
        (512, 16, "heads16"),
    ],
)
def test_decode_shares_chunks_between_head_groups_where_that_is_sooner_done(rows, heads, tile):
    """At 2, 3, 1 and 0 splits of 16-head blocks against 5, 3 and 2 of 32-head ones: measured on a card of 132 multiprocessors."""
    assert plan(replace(CAPS, max_rows=rows, heads=heads, multiprocessors=132)).tile == tile


@pytest.mark.parametrize("rows", [12, 17, 22])
def test_short_rows_that_cannot_be_split_stay_with_16_heads(rows):
    built = plan(replace(CAPS, max_rows=rows, heads=64, top_k=128, multiprocessors=132))
    assert (built.tile, built.splits) == ("heads16", 1)


@pytest.mark.parametrize(("rows", "tile"), [(6, "heads16"), (7, "heads32"), (32, "heads32")])
def test_records_whose_blocks_have_one_group_share_chunks_sooner(rows, tile):
    assert plan(replace(CAPS, max_rows=rows, heads=64, multiprocessors=132, record="fp8_ds_mla")).tile == tile


def test_two_groups_of_a_block_need_no_merge_and_no_scratch():
    built = plan(replace(CAPS, heads=64, max_rows=32, multiprocessors=132))
    assert (built.tile, built.splits, built.merge, built.scratch_bytes) == ("heads16", 1, None, 0)


def test_prefill_shares_chunks_between_head_groups_and_never_splits():
    built = plan(replace(CAPS, mode="prefill", heads=64, max_rows=1))
    assert (built.tile, built.splits, built.merge, built.scratch_bytes) == ("heads32", 1, None, 0)
    assert plan(replace(CAPS, mode="prefill", heads=16)).tile == "heads16"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mode": "extend"}, "mode 'extend' is not one of decode, verify, prefill"),
        ({"arch": "sm_100a"}, "arch 'sm_100a' is not supported"),
        ({"record": "fp8"}, "record 'fp8' is not one of nvfp4_ds_mla_432"),
        ({"heads": 0}, "heads must be at least 1, got 0"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"max_rows": 65_536}, "max_rows 65536: a launch takes at most 65535 query rows"),
        ({"max_rows": 65_535, "heads": 65_535}, "pass the kernel's 32-bit counts"),
        ({"max_rows": 1, "heads": 1, "top_k": 2**26}, "in 188 splits pass the kernel's 32-bit counts"),
    ],
)
def test_refusals(changes, text):
    with pytest.raises(PlanError, match=text):
        plan(replace(CAPS, **changes))


@pytest.mark.parametrize("name", TILE_ROWS)
@pytest.mark.parametrize("record", SPARSE_RECORDS)
def test_tiles_fit_sm120(name, record):
    """Shared memory of one block; registers of the roles within those of the launch, or it hangs."""
    tile = sparse_tile(name, record)
    assert tile.shared_bytes <= SHARED_BYTES_LIMIT
    assert tile.groups == (2 if name == "heads16" and record != "fp8_ds_mla" else 1)
    compute, copy = tile.role_registers
    assert compute % 8 == copy % 8 == 0
    launch = 65_536 // tile.threads // 8 * 8
    assert compute * tile.consumer_threads + copy * 32 * PRODUCER_WARPS <= min(launch, compute) * tile.threads


def test_planning_imports_neither_torch_nor_the_compiler():
    code = "import sys, mlactl.kernels.mla.sparse_planner, mlactl.kernels.envelope; sys.exit(bool({'torch', 'cutlass', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("name", ["heads", "max_rows", "top_k", "multiprocessors"])
@pytest.mark.parametrize("value", [16.5, 16.0, "16", True, None])
def test_capacities_are_whole_numbers(name, value):
    """16.5 heads were accepted and gave 5.0 splits."""
    with pytest.raises(PlanError) as refused:
        plan(replace(CAPS, **{name: value}))
    assert refused.value.message == f"{name} must be a whole number, got {value!r}"
