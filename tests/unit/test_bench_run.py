"""The measured benchmark with a stand-in for the device: every arm's tensors are right, and the gate comes before the clock."""

from __future__ import annotations

import bench_stand_in
import pytest

from mlactl.bench import arms, batch, objects, verify_plan
from mlactl.bench.shapes import Layout, Shape
from mlactl.kernels.mla import gate
from mlactl.kernels.mla.policy import SparsePolicy

SMALL = Shape("verify", 3, 4, 8, 700)
RAGGED = Shape("verify", 3, 4, 8, 100, ragged=True)
SPARSE = SparsePolicy(3, 1, 1)
BF16 = Layout()
ALL = ("deployed", "row_specialized", "tiled", "tiled_s3", "tiled_sparse")


def run(shape=SMALL, layout=BF16, names=ALL, sparse=SPARSE):
    planned = arms.plan_arms(names, shape, layout, bench_stand_in.TARGET, sparse)
    return verify_plan.bench([(shape, planned)], layout, objects.peak_spec(), samples=21)


@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(per_query=True), Layout(page_size=16), Layout(record="fp8"), Layout(record="fp8", q_dtype="e4m3", per_query=True)],
    ids=["bf16", "per-query", "page16", "fp8", "fp8-e4m3"],
)
@pytest.mark.parametrize("shape", [SMALL, RAGGED], ids=["even", "ragged"])
def test_every_arm_computes_the_same_attention(monkeypatch, shape, layout):
    """Each arm's own tables, lengths and boundaries give what the fused reference over the pool gives."""
    rounds = bench_stand_in.install(monkeypatch)
    (result,) = run(shape, layout).shapes
    assert [(arm.planned.arm, arm.state, arm.reason) for arm in result.arms] == [(name, "timed", None) for name in ALL]
    assert rounds == [list(ALL)]
    assert all(arm.gate["cosine"] > 0.9999 and len(arm.samples_us) == 21 for arm in result.arms)


def test_a_selection_is_not_exact_attention():
    """What tiled_sparse is held against differs from the exact result: a gate that mixed them up would let either through."""
    pool = batch.make_pool(SMALL, Layout(), device="cpu")
    exact, sparse = batch.expected(pool, Layout()), batch.expected(pool, Layout(), SPARSE)
    assert not gate.judge(sparse[0], sparse[1], *exact, gate.TOLERANCES["bf16"]).passed


@pytest.mark.parametrize("factor", [1.02, 0.37])
def test_the_gate_refuses_one_arm_and_the_others_are_timed(monkeypatch, factor):
    rounds = bench_stand_in.install(monkeypatch, wrong=lambda plan: factor if plan.caps.splits == 3 else 1.0)
    (result,) = run().shapes
    states = {arm.planned.arm: arm.state for arm in result.arms}
    assert states == {"deployed": "timed", "row_specialized": "timed", "tiled": "timed", "tiled_s3": "gate", "tiled_sparse": "timed"}
    refused = result.arms[3]
    assert "norm" in refused.reason
    assert (refused.samples_us, refused.median_us) == ((), None)
    assert refused.gate["norm"] == pytest.approx(abs(factor - 1), abs=0.01)
    assert rounds == [["deployed", "row_specialized", "tiled", "tiled_sparse"]]


def test_when_every_arm_is_refused_nothing_is_timed(monkeypatch):
    rounds = bench_stand_in.install(monkeypatch, wrong=lambda _: 0.9)
    (result,) = run(names=("deployed", "tiled")).shapes
    assert [arm.state for arm in result.arms] == ["gate", "gate"]
    assert rounds == []


def test_output_that_is_not_written_is_seen(monkeypatch):
    """The output holds NaN before the run: a launch that skips a row cannot pass with what an earlier arm left there."""
    bench_stand_in.install(monkeypatch)
    original = bench_stand_in.Launch.run

    def skips_a_row(self):
        output, lse = original(self)
        output[5] = float("nan")  # what run_poisoned put there
        return output, lse

    monkeypatch.setattr(bench_stand_in.Launch, "run", skips_a_row)
    (result,) = run(names=("tiled",)).shapes
    assert result.arms[0].state == "gate"


def test_rates_and_ratios_of_a_run(monkeypatch):
    bench_stand_in.install(monkeypatch, time_us=lambda name: {"deployed": 90.0, "tiled": 40.0}[name])
    result = run(names=("deployed", "tiled"))
    assert (result.rates.bytes_per_s, result.rates.flop_per_s, result.card) == (4e12, 6e14, "Stand-in")
    (shape,) = result.shapes
    deployed, tiled = shape.arms
    assert (deployed.median_us, tiled.median_us) == (100.0, 50.0)
    assert shape.ratio_to_deployed(tiled) == 0.5
    assert shape.floors.memory_us == pytest.approx((2100 * 1152 + 12 * 8 * 2176) / 4e6)
    assert shape.floors.mma_us == pytest.approx(2100 * 4 * 8 * 2 * 1088 / 6e8)


def test_pages_are_scattered_and_unused_entries_are_minus_one():
    pool = batch.make_pool(RAGGED, Layout(page_size=16), device="cpu")
    used = [-(-length // 16) for length in pool.lengths]
    live = [row[:count].tolist() for row, count in zip(pool.table, used, strict=True)]
    flat = [page for pages in live for page in pages]
    assert len(set(flat)) == len(flat) == sum(used)
    assert flat != sorted(flat)
    assert all((row[count:] == -1).all() for row, count in zip(pool.table, used, strict=True))
