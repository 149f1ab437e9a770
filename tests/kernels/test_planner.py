"""The planner: what holds for every plan, and what it refuses."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlactl.kernels import registry
from mlactl.kernels.envelope import DenseEnvelope, enumerate_specs
from mlactl.kernels.errors import PlanError, SpecError
from mlactl.kernels.mla import policy
from mlactl.kernels.mla.config import SHARED_BYTES_LIMIT, STAGES, TILE_ROWS, tile_config
from mlactl.kernels.mla.planner import DenseCaps, plan
from mlactl.kernels.mla.policy import SparsePolicy

HEADS = (5, 6, 8, 12, 16, 22, 48, 64, 96)


SPARSE = SparsePolicy(8, 2, 4, min_tokens=4096)
VARIANTS = ({"record": "bf16"}, {"record": "fp8"}, {"record": "fp8", "q_dtype": "e4m3"})


@st.composite
def capacities(draw):
    mode = draw(st.sampled_from(policy.MODES))
    return DenseCaps(
        mode=mode,
        heads=draw(st.one_of(st.sampled_from(HEADS), st.integers(1, 200))),
        max_requests=draw(st.integers(1, 512)),
        max_tokens=draw(st.integers(1, 1 << 21)),
        page_size=draw(st.sampled_from([1, 16, 48, 64, 1536, 12288])),
        multiprocessors=draw(st.sampled_from([48, 132, 170, 188])),
        arch=draw(st.sampled_from(["sm_120a", "sm_121a", "sm_90a"])),
        rows=1 if mode == "decode" else draw(st.integers(1, 8 if mode == "verify" else 600)),
        width=draw(st.sampled_from([576, 576, 1088])),
        splits=draw(st.sampled_from([None, None, 1, 3])),
        **draw(st.sampled_from(VARIANTS)),
        **({"per_query": True} if mode == "verify" and draw(st.booleans()) else draw(st.sampled_from([{}, {"sparse": SPARSE}, {"window": True}]))),
    )


@given(capacities())
def test_every_plan_has_room_for_every_unit_and_split(caps):
    built = plan(caps)
    most = caps.max_requests * -(-caps.rows * caps.heads // TILE_ROWS[built.tile])
    assert built.units >= most
    assert built.blocks >= built.units
    assert built.budget in (0, built.blocks)
    assert (built.merge is None) == (built.budget == 0) == (built.scratch_bytes == 0)
    assert built.slots == (built.blocks * TILE_ROWS[built.tile] if built.budget else 0)
    for spec in built.specs:
        assert registry.not_built(spec) is None


@given(capacities())
def test_every_plan_is_inside_its_envelope(caps):
    envelope = DenseEnvelope(
        modes=(caps.mode,),
        heads=caps.heads,
        verify_rows=(caps.rows,),
        record=caps.record,
        q_dtype=caps.q_dtype,
        width=caps.width,
        per_query=caps.per_query,
        window=caps.window,
        sparse=caps.sparse is not None,
    )
    assert set(plan(caps).specs) <= set(enumerate_specs(envelope))


@pytest.mark.parametrize("heads", HEADS)
def test_envelopes_stay_small(heads):
    """All batch sizes, context lengths and page sizes of decode take at most 5 objects, the whole dense envelope at most 10."""

    def count(modes):
        return len(
            enumerate_specs(
                DenseEnvelope(
                    modes=modes,
                    heads=heads,
                    verify_rows=tuple(range(2, 9)),
                    record="bf16",
                    q_dtype="bf16",
                    width=576,
                    per_query=False,
                    window=False,
                    sparse=False,
                )
            )
        )

    assert count(("decode",)) <= 5
    assert count(policy.MODES) <= 10


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.sampled_from(HEADS))
def test_ragged_units_are_bounded(counts, heads):
    """However a launch's rows fall on its requests, the plan has a block for each tile."""
    for tile, size in TILE_ROWS.items():
        units = sum(-(-count * heads // size) for count in counts)
        assert units <= policy.units_bound(tile, len(counts), sum(counts), heads, ragged=True)


@pytest.mark.parametrize("record", ["bf16", "fp8"])
@pytest.mark.parametrize("modes", [("decode",), policy.MODES])
def test_the_whole_envelope_of_96_gathered_heads_is_at_most_ten_objects(record, modes):
    """Decode, verify of 1 to 7 draft rows, extend; exact and sparse; causal and per-query: kimi-k3-tp8-dcp8 and its bf16 twin."""
    found = enumerate_specs(
        DenseEnvelope(modes, 96, tuple(range(2, 9)), record=record, q_dtype="bf16", width=576, per_query=True, window=False, sparse=True)
    )
    assert len(found) <= 10
    if modes == policy.MODES:
        forwards = [dict(spec.facts) for spec in found if spec.kernel_id == registry.DENSE_FORWARD.kernel_id]
        assert {(facts["lengths"], facts["selection"]) for facts in forwards} == set(itertools.product(("causal", "per_query"), ("exact", "sparse")))


@pytest.mark.parametrize(("tile", "width", "record"), STAGES)
@pytest.mark.parametrize("q_dtype", ["bf16", "e4m3"])
def test_tiles_fit_an_sm120_block(tile, width, record, q_dtype):
    config = tile_config(tile, record, width, q_dtype)
    assert config.shared_bytes <= SHARED_BYTES_LIMIT
    assert TILE_ROWS[tile] == config.rows
    assert 256 * config.consumer_registers + 128 * config.producer_registers <= 168 * 384
    assert config.share_chunks or config.stages % 2 == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "prefill"}, "mode 'prefill' is not one of decode, verify, extend"),
        ({"arch": "sm_100a"}, "arch 'sm_100a' is not supported"),
        ({"width": 512}, r"width 512 is not one of \[576, 1088\]"),
        ({"page_size": 24}, "page_size must be 1 or a multiple of 16, got 24"),
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ({"heads": 0}, "heads must be at least 1, got 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"rows": 2}, "decode takes one row a request, got rows=2"),
        ({"max_query_rows": 9}, "max_query_rows 9 does not fit 4 requests of at most 1 rows"),
        ({"max_tokens": 2**31}, "32-bit counts"),
        ({"record": "nvfp4"}, "record 'nvfp4' is not one of bf16, fp8"),
        ({"q_dtype": "fp16"}, "q_dtype 'fp16' is not one of bf16, e4m3"),
        ({"q_dtype": "e4m3"}, "an e4m3 query is taken over fp8 records, record is bf16"),
        ({"per_query": True}, "per-query lengths are verify's, mode is decode"),
        ({"mode": "verify", "rows": 4, "per_query": True, "window": True}, "window and per-query lengths exclude each other"),
        ({"sparse": SPARSE, "window": True}, "window and sparse exclude each other"),
        ({"splits": 0}, "splits must be at least 1, got 0"),
        ({"splits": 2.0}, "splits must be a whole number, got 2.0"),
        ({"heads": 16.5}, "heads must be a whole number, got 16.5"),
        ({"max_requests": "4"}, "max_requests must be a whole number, got '4'"),
        ({"rows": True}, "rows must be a whole number, got True"),
        ({"max_query_rows": 4.0}, "max_query_rows must be a whole number, got 4.0"),
    ],
)
def test_refusals_name_the_capacity(changes, message):
    caps = {"mode": "decode", "heads": 8, "max_requests": 4, "max_tokens": 100, "page_size": 64, "multiprocessors": 188, "arch": "sm_120a"}
    with pytest.raises(PlanError, match=message):
        plan(DenseCaps(**{**caps, **changes}))


@pytest.mark.parametrize("exclusion", registry.DENSE_FORWARD.exclusions, ids=str)
def test_excluded_facts_are_refused_by_name(exclusion):
    """A spec that no code exists for is no spec, whoever makes it."""
    facts = {fact.name: fact.allowed[0] for fact in registry.DENSE_FORWARD.facts} | {"output": "split", "tile": "row64"}
    with pytest.raises(SpecError, match=re.escape(exclusion.reason)):
        registry.DENSE_FORWARD.spec(**{**facts, **exclusion.facts})


def test_a_forced_split_count_is_the_budget():
    caps = DenseCaps("verify", 8, 16, 8192, 64, 188, "sm_120a", rows=4)
    for splits in (1, 2, 7):
        built = plan(replace(caps, splits=splits))
        # 16 requests of one 32-row tile each: the bound on units, which counts twice as many, would double the splits.
        assert built.budget == (splits * 16 if splits > 1 else 0)
        assert built.blocks == max(built.units, splits * 16)
        assert built.forward == plan(caps).forward


def test_split_budget_is_one_wave_until_units_pass_the_processors():
    budgets = [policy.split_budget(units, 64, 188) for units in (1, 188, 189, 751, 752, 5000)]
    assert budgets == [188, 188, 189 + 752, 751 + 752, 0, 0]
    assert [policy.split_budget(units, 1, 188) for units in (1, 94, 95)] == [188, 188, 0]
    pairs = itertools.pairwise(policy.merge_groups(units, 188) for units in (1, 7, 8, 188))
    assert all(a >= b for a, b in pairs)
