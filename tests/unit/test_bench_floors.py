"""Floors, shapes, arms and records of the benchmark: numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlactl.bench import arms, cards, computed, floors, record, results
from mlactl.bench.shapes import VERIFY_SHAPES, Layout, Shape, layout_of, parse_shapes, parse_sparse, shapes_of
from mlactl.errors import UsageError
from mlactl.kernels import registry
from mlactl.kernels.mla.policy import SparsePolicy
from mlactl.kernels.mla.records import dense_record
from mlactl.profiles import SparsePolicy as ProfilePolicy
from mlactl.profiles import load

H200 = arms.Target("sm_90a", 132)
FIRST = Shape("verify", 16, 4, 8, 8192)


# ------------------------------------------------------------------ floors


def test_flop_and_bytes_of_a_launch_by_hand():
    """Two requests of 10 and 6 tokens, 3 rows each, 2 heads: 48 row-tokens * 2 * 2 * 1088; 16 records, 6 rows of q and output."""
    work = floors.dense_work(16, 48, 6, 2, dense_record("bf16", 576), 2)
    assert work.flop == 48 * 2 * 2 * 1088 == 208_896
    assert work.moved_bytes == 16 * 1152 + 6 * 2 * (1152 + 1024) == 44_544


def test_floors_at_round_rates():
    limits = floors.floors(floors.Work(flop=3_000_000_000, moved_bytes=8_000_000), floors.Rates(bytes_per_s=4e12, flop_per_s=6e14))
    assert limits.memory_us == pytest.approx(2.0)
    assert limits.mma_us == pytest.approx(5.0)
    assert (limits.larger_us, limits.bound) == (limits.mma_us, "mma")


def test_the_published_floors_come_out():
    """At the measured 4,283 GB/s and 600 TFLOP/s: 35 and 15 us, 18 and 61, 35 and 183."""
    rates = floors.Rates(4.283e12, 6e14)
    found = {shape.name: floors.floors(Layout().work(shape), rates) for shape in VERIFY_SHAPES}
    rounded = {name: (round(limits.memory_us), round(limits.mma_us)) for name, limits in found.items()}
    assert rounded["16x4xH8x8192"] == (36, 15)  # 35 with the records alone; q and output are 0.3 more
    assert rounded["8x4xH64x8192"] == (19, 61)
    assert rounded["1x4xH96x131072"] == (35, 183)
    assert rounded["4x4xH96x16384"] == (18, 91)


def test_the_floor_of_the_first_shape_on_an_sm120_card():
    """151 MB of records at 1.79 TB/s."""
    limits = floors.floors(Layout().work(FIRST), cards.find("rtx-pro-6000").rates)
    assert limits.memory_us == pytest.approx(84.35 + 64 * 8 * 2176 / 1.79e12 * 1e6, abs=0.01)


def test_fp8_halves_the_records_and_keeps_the_query():
    work = Layout(record="fp8").work(FIRST)
    assert work.moved_bytes == 16 * 8192 * 576 + 64 * 8 * (1152 + 1024)
    assert Layout(record="fp8", q_dtype="e4m3").work(FIRST).moved_bytes == 16 * 8192 * 576 + 64 * 8 * (576 + 1024)
    assert work.flop == Layout().work(FIRST).flop


def test_wide_records_count_their_own_width():
    assert Layout(width=1088).work(FIRST).flop == 16 * 8192 * 4 * 8 * 2 * (1088 + 1024)


def test_a_selection_counts_the_chunks_that_rows_select():
    """640 tokens, 1 row: of 10 chunks (10, 3, 2, 2) selects 0, 1, 2, 5, 8, 9: 384 tokens, by one head of one row."""
    work = Layout().sparse_work(Shape("verify", 1, 1, 1, 640), SparsePolicy(3, 2, 2))
    assert work.flop == 384 * 2 * 1088
    assert work.moved_bytes == 384 * 1152 + 1152 + 1024


def test_a_selection_reads_the_union_of_its_rows_and_each_row_its_own():
    """130 tokens, 3 rows that see 128, 129 and 130; stride 9 without sinks: chunks 0 and 1, then 0 and 2 twice."""
    work = Layout().sparse_work(Shape("verify", 1, 3, 1, 130), SparsePolicy(9, 0, 1))
    assert work.flop == (128 + 65 + 66) * 2 * 1088
    assert work.moved_bytes == 130 * 1152 + 3 * (1152 + 1024)  # some row reads each of the three chunks


def test_below_min_tokens_a_selection_is_exact():
    shape = Shape("verify", 2, 1, 8, 4096)
    assert Layout().sparse_work(shape, SparsePolicy(4, 1, 1, min_tokens=4096)) == Layout().work(shape)


# ------------------------------------------------------------------ shapes


def test_shape_notation_goes_both_ways():
    found = parse_shapes("16x4xH8x8192, 1x8xH96x131072r,16x4xH8x8192")
    assert found == (FIRST, Shape("verify", 1, 8, 96, 131072, ragged=True))
    assert parse_shapes(",".join(shape.name for shape in VERIFY_SHAPES)) == VERIFY_SHAPES
    assert found[1].label() == "verify 1 x 8, H 96, 131,072 ragged"


@pytest.mark.parametrize(
    ("text", "message"), [("16x4x8x8192", "is not REQ"), ("16x4xH8", "is not REQ"), ("0x4xH8x64", "has a 0"), ("", "is not REQ")]
)
def test_other_notations_are_refused(text, message):
    with pytest.raises(UsageError, match=message) as caught:
        parse_shapes(text)
    assert "--shapes 16x4xH8x8192" in caught.value.hint


@given(st.integers(1, 64), st.integers(1, 5000))
def test_ragged_lengths_have_the_even_total_and_stay_in_range(requests, tokens):
    lengths = Shape("verify", requests, 4, 8, tokens, ragged=True).lengths()
    assert len(lengths) == requests
    assert sum(lengths) == requests * tokens
    assert min(lengths) >= 1
    assert lengths == Shape("verify", requests, 1, 99, tokens, ragged=True).lengths()


def test_sparse_notation():
    assert parse_sparse("4,1,2,4096") == SparsePolicy(4, 1, 2, 4096, 0)
    assert parse_sparse("4,1,2,4096,128") == SparsePolicy(4, 1, 2, 4096, 128)
    with pytest.raises(UsageError, match="STRIDE,SINK"):
        parse_sparse("4,1,2")


def test_shapes_of_a_profile_are_what_its_kernel_sees():
    profile = load("kimi-k3-tp8-dcp8")
    assert shapes_of(profile) == tuple(Shape("verify", 1, rows, 96, 131072) for rows in range(2, 9))
    assert layout_of(profile) == (Layout("fp8", "bf16", 576, 1536, True), SparsePolicy(8, 4, 16, 32768))
    assert layout_of(replace(profile, serving=replace(profile.serving, sparse_policy=None)))[1] is None


def test_profiles_without_a_dense_verify_launch_are_refused():
    with pytest.raises(UsageError, match=r"glm-5\.2-tp8 reads selected slots"):
        layout_of(load("glm-5.2-tp8"))
    dense = load("kimi-k3-tp8-dcp8")
    decode = replace(dense, serving=replace(dense.serving, modes=("decode",), draft_rows=()))
    with pytest.raises(UsageError, match="has modes decode: it has no verify plan"):
        layout_of(decode)
    with pytest.raises(UsageError, match=r"no serving\.max_context"):
        shapes_of(replace(dense, serving=replace(dense.serving, max_context=None)))


def test_a_profile_with_a_chunk_selection_and_many_sequences():
    profile = load("kimi-k3-tp8-dcp8")
    chosen = ProfilePolicy(stride=4, sink_chunks=1, recent_chunks=2, min_tokens=4096, refresh_interval=64)
    profile = replace(profile, serving=replace(profile.serving, draft_rows=(3, 7), max_sequences=8, sparse_policy=chosen))
    assert [shape.name for shape in shapes_of(profile)] == ["1x4xH96x131072", "8x4xH96x131072", "1x8xH96x131072", "8x8xH96x131072"]
    assert layout_of(profile)[1] == SparsePolicy(4, 1, 2, 4096, 64)


# ------------------------------------------------------------------ arms


def test_the_default_arms_of_a_shape():
    found = arms.plan_arms(None, FIRST, Layout(), H200, None)
    # 16 tiles on 132 processors: 8 splits each, so 4 and 16 are tried.
    assert [arm.arm for arm in found] == ["deployed", "row_specialized", "tiled", "tiled_s4", "tiled_s16"]
    with_sparse = arms.plan_arms(None, FIRST, Layout(), H200, SparsePolicy(4, 1, 1))
    assert [arm.arm for arm in with_sparse][-1] == "tiled_sparse"
    assert [arm.arm for arm in arms.plan_arms(None, FIRST, Layout(), H200, SparsePolicy(1, 1, 1))] == [arm.arm for arm in found]


def test_short_requests_have_no_more_splits_than_the_device_makes():
    """300 tokens are 19 chunks, splits have at least 4: 5 at most, whatever the processors could take."""
    found = arms.plan_arms(None, Shape("verify", 3, 4, 8, 300), Layout(), H200, None)
    assert [arm.arm for arm in found] == ["deployed", "row_specialized", "tiled", "tiled_s2"]
    assert [arms.splits_of(arm.plan) for arm in found] == [5, 5, 5, 2]


def test_each_arm_plans_what_it_says():
    planned = {arm.arm: arm for arm in arms.plan_arms(None, FIRST, Layout(), H200, SparsePolicy(4, 1, 1))}
    caps = {name: arm.plan.caps for name, arm in planned.items()}
    assert (caps["deployed"].mode, caps["deployed"].max_requests, caps["deployed"].rows) == ("decode", 64, 1)
    assert (caps["row_specialized"].mode, caps["row_specialized"].max_requests, caps["row_specialized"].per_query) == ("verify", 64, True)
    assert (caps["tiled"].mode, caps["tiled"].max_requests, caps["tiled"].rows, caps["tiled"].splits) == ("verify", 16, 4, None)
    assert caps["tiled_s4"] == replace(caps["tiled"], splits=4)
    assert (planned["tiled_s4"].plan.blocks, arms.tiles_of(planned["tiled_s4"].plan), arms.splits_of(planned["tiled_s4"].plan)) == (64, 16, 4)
    assert caps["tiled_sparse"] == replace(caps["tiled"], sparse=SparsePolicy(4, 1, 1))
    assert planned["tiled"].work == planned["deployed"].work
    assert planned["tiled_sparse"].work.flop < planned["tiled"].work.flop / 3
    assert [name for name, arm in planned.items() if arm.rows_are_requests] == ["deployed", "row_specialized"]


@pytest.mark.parametrize("name", ["tiled_s0", "tiled_s<N>", "tiled_s", "fused", ""])
def test_an_arm_that_does_not_exist_is_refused(name):
    with pytest.raises(UsageError, match="is not one of deployed, row_specialized, tiled"):
        arms.chosen_arms(f"deployed,{name}", None)


def test_a_sparse_arm_needs_a_stride():
    for policy in (None, SparsePolicy(1, 0, 1)):
        with pytest.raises(UsageError, match="stride over 1"):
            arms.chosen_arms("tiled_sparse", policy)
    assert arms.chosen_arms("tiled_sparse,tiled_s12,tiled_sparse", SparsePolicy(2, 0, 1)) == ("tiled_sparse", "tiled_s12")


def test_what_cannot_be_planned_says_so_and_keeps_the_others():
    found = arms.plan_arms(("tiled", "deployed"), FIRST, Layout(page_size=100), H200, None)
    assert [(arm.state, arm.plan) for arm in found] == [("refused", None)] * 2
    assert "page_size" in found[0].reason


# ------------------------------------------------------------------ cards and records


def test_the_table_of_cards_has_the_parts_that_people_deploy():
    table = cards.cards()
    assert {name: (card.arch, card.multiprocessors, card.memory_gb_s) for name, card in table.items()} == {
        "rtx-pro-6000": ("sm_120a", 188, 1790),
        "rtx-5090": ("sm_120a", 170, 1790),
        "dgx-spark": ("sm_121a", 48, 273),
        "h200": ("sm_90a", 132, 4250),
    }
    assert table["rtx-pro-6000"].mma_bf16_tflops == pytest.approx(188 * 1024 * 2.617e9 / 1e12, abs=0.1)
    assert table["rtx-5090"].mma_bf16_tflops == pytest.approx(170 * 512 * 2.407e9 / 1e12, abs=0.1)
    with pytest.raises(UsageError, match="rtx-pro-6000, rtx-5090, dgx-spark, h200"):
        cards.find("rtx-9090")


def measured(*medians: float) -> results.ShapeResult:
    """A shape whose arms have these medians (0: not timed), over floors of 10 and 5 us."""
    limits = floors.Floors(10.0, 5.0)
    planned = arms.plan_arms(None, FIRST, Layout(), H200, None)
    rows = [
        results.ArmResult(plan, limits, "timed" if median else "gate", None, {"cosine": 1.0}, (median - 1, median, median + 5) if median else ())
        for plan, median in zip(planned, medians, strict=False)
    ]
    return results.ShapeResult(FIRST, limits, tuple(rows))


def test_shares_and_ratios_by_hand():
    result = measured(40.0, 0.0, 16.0)
    deployed, refused, tiled = result.arms
    assert (deployed.median_us, deployed.share_of_floor, result.ratio_to_deployed(deployed)) == (40.0, 0.25, 1.0)
    assert (tiled.median_us, tiled.share_of_floor, result.ratio_to_deployed(tiled)) == (16.0, 0.625, 0.4)
    assert (refused.median_us, refused.share_of_floor, result.ratio_to_deployed(refused)) == (None, None, None)
    assert measured(0.0, 0.0, 16.0).ratio_to_deployed(tiled) is None


def test_a_record_says_everything_that_a_reader_needs():
    bench = results.Bench(False, "a card", "sm_90a", 132, floors.Rates(4e12, 6e14), "measured in this run", Layout(), (measured(40.0, 0.0, 16.0),))
    found = record.document(bench, command="mlactl bench verify-plan", commit="abc", method="as it was")
    assert (found["command"], found["commit"], found["card"], found["computed"]) == ("mlactl bench verify-plan", "abc", "a card", False)
    assert found["sources"] == {name: registry.sources_digest(name) for name in ("attention.dense_mla.forward", "attention.dense_mla.merge")}
    assert found["versions"]["torch"]
    (shape,) = found["shapes"]
    assert (shape["shape"], shape["memory_floor_us"], shape["mma_floor_us"], shape["bound"]) == ("16x4xH8x8192", 10.0, 5.0, "memory")
    deployed, refused, tiled = shape["arms"]
    assert deployed["samples_us"] == [39.0, 40.0, 45.0]
    assert (refused["status"], refused["median_us"], refused["samples_us"]) == ("gate", None, [])
    assert (tiled["share_of_floor"], tiled["ratio_to_deployed"], tiled["plan"]["splits"]) == (0.625, 0.4, 8)
    ratios = {name for arm in shape["arms"] for name in arm if name.startswith(("share", "ratio")) or name.endswith(("median_us", "samples_us"))}
    assert ratios == set(found["directions"])


def test_a_computed_bench_is_marked_and_has_no_times():
    card = cards.find("dgx-spark")
    found = computed.compute([(FIRST, arms.plan_arms(None, FIRST, Layout(), computed.target_of(card), None))], Layout(), card)
    assert (found.computed, found.card, found.arch) == (True, "DGX Spark (GB10)", "sm_121a")
    (shape,) = found.shapes
    assert shape.floors.memory_us == pytest.approx(Layout().work(FIRST).moved_bytes / 273e9 * 1e6)
    assert all(arm.median_us is None and arm.state in ("planned", "not-built") for arm in shape.arms)
    assert record.document(found, command="x", commit=None, method=computed.METHOD)["driver"] is None
