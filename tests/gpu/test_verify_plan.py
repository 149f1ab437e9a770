"""The benchmark on a card: every arm is right, timed and recorded, and the gate stands before the clock."""

from __future__ import annotations

import json
import math

import pytest
import torch

from mlactl.bench import arms, batch, measure, objects, verify_plan
from mlactl.bench.shapes import Layout, Shape
from mlactl.cli import app
from mlactl.kernels.mla.dense import DenseBinding
from mlactl.kernels.mla.policy import SparsePolicy

pytestmark = pytest.mark.gpu

SMALL = Shape("verify", 4, 4, 8, 2000)
SPARSE = SparsePolicy(4, 1, 2, 512)
NAMES = ("deployed", "row_specialized", "tiled", "tiled_s2", "tiled_sparse")


def run(names=NAMES, shape=SMALL, record="bf16"):
    layout = Layout(record=record)
    target, _ = verify_plan.device_here()
    planned = arms.plan_arms(names, shape, layout, target, SPARSE)
    return verify_plan.bench([(shape, planned)], layout, objects.peak_spec(), samples=21)


@pytest.mark.parametrize("record", ["bf16", "fp8"])
def test_every_arm_passes_the_gate_and_is_timed(arch, record):
    result = run(record=record)
    (shape,) = result.shapes
    assert [(arm.planned.arm, arm.state, arm.reason) for arm in shape.arms] == [(name, "timed", None) for name in NAMES]
    for arm in shape.arms:
        assert len(arm.samples_us) == 21
        assert 1 < arm.median_us < 10_000
        assert 0 < arm.share_of_floor < 1
    assert 1e11 < result.rates.bytes_per_s < 1e14
    assert 1e13 < result.rates.flop_per_s < 1e16


@pytest.mark.parametrize("factor", [1.02, 0.37])
def test_the_gate_catches_a_planted_wrong_output(arch, monkeypatch, factor):
    """A right output times a factor has cosine 1: only the norm shows it, and such an arm must not get a time."""
    right = DenseBinding.run

    def wrong(self):
        output, lse = right(self)
        if self.plan.caps.mode == "verify":
            output.mul_(factor)
        return output, lse

    monkeypatch.setattr(DenseBinding, "run", wrong)
    (shape,) = run(("deployed", "tiled")).shapes
    deployed, tiled = shape.arms
    assert (deployed.state, tiled.state) == ("timed", "gate")
    assert "norm" in tiled.reason
    assert tiled.samples_us == ()


def test_an_output_row_that_is_never_written_is_caught(arch, monkeypatch):
    right = DenseBinding.run

    def leaves_a_row(self):
        output, lse = right(self)
        output[3].fill_(math.nan)
        return output, lse

    monkeypatch.setattr(DenseBinding, "run", leaves_a_row)
    (shape,) = run(("tiled",)).shapes
    assert shape.arms[0].state == "gate"


def test_replays_write_what_the_eager_run_wrote(arch):
    """What is timed is what was judged."""
    layout = Layout()
    target, _ = verify_plan.device_here()
    pool = batch.make_pool(SMALL, layout)
    (planned,) = arms.plan_arms(("tiled",), SMALL, layout, target, None)
    bound = batch.bind(pool, planned)
    output = bound.run_poisoned()[0].clone()
    timed = measure.capture("tiled", bound.binding.run)
    bound.tensors.output.fill_(math.nan)
    measure.sample([timed], 2)
    assert torch.equal(bound.tensors.output, output)
    assert len(timed.samples_us) == 2


def test_the_command_measures_and_writes_its_record(arch, tmp_path, capsys):
    target = tmp_path / "bench.json"
    assert app.main(["bench", "verify-plan", "--shapes", SMALL.name, "--arms", "deployed,tiled", "-o", str(target)]) == 0
    document = json.loads(target.read_text())
    assert document["computed"] is False
    assert document["arch"] == arch
    assert document["card"] == torch.cuda.get_device_name()
    assert document["driver"] != "unknown"
    assert [arm["status"] for arm in document["shapes"][0]["arms"]] == ["timed", "timed"]
    assert "measured" in capsys.readouterr().out
