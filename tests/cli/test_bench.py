"""`mlactl bench verify-plan`: the computed plan as a process of its own, the measured one over a stand-in for the device."""

from __future__ import annotations

import json
import struct
import subprocess
import sys

import bench_stand_in
import pytest

from mlactl.bench import objects, record
from mlactl.bench.arms import ARMS
from mlactl.cache.publish import compile_and_publish
from mlactl.cache.store import Store
from mlactl.cache.toolchain import current
from mlactl.cli import app, bench

ONE = ("bench", "verify-plan", "--shapes", "16x4xH8x8192")
COMPUTED = (*ONE, "--card", "rtx-pro-6000")


# ------------------------------------------------------------------ computed


def test_help_lists_the_arms_and_stays_light():
    heavy = "{'torch', 'cutlass', 'numpy'} & sys.modules.keys()"
    code = f"import sys; from mlactl.cli.app import main; main(['bench', 'verify-plan', '--help']); print(*{heavy}, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(arm in done.stdout for arm in ARMS)
    assert done.stderr.split() == []


def test_the_computed_plan_imports_no_torch(tmp_path):
    code = f"import sys; from mlactl.cli.app import main; main({[*COMPUTED, '-q', '--cache-dir', str(tmp_path)]!r}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_without_a_gpu_it_computes_for_an_sm120_card_and_exits_0(cli):
    """A machine of the card's makers is not needed to see what would be launched and what it cannot be faster than."""
    done = cli(*ONE, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.code == 0, done.stderr
    assert done.lines[0].startswith("RTX PRO 6000 Blackwell, sm_120a, 188 SMs: computed, nothing was run; floors from 1,790 GB/s, 503.8 TFLOP/s")
    (tiled,) = [line.split() for line in done.lines if line.split()[1:2] == ["tiled"]]
    # 16 tiles of 32 rows over 188 processors; 151 MB at 1.79 TB/s; 16 * 8192 * 4 * 8 * 2 * 1088 FLOP at 503.8 TFLOP/s.
    assert tiled == ["16x4xH8x8192", "tiled", "tok32", "16", "11", "188", "85.0", "18.1", "memory", "11.8", "MiB", "planned"]
    assert "hint: mlactl bench verify-plan --shapes 16x4xH8x8192 --warm compiles what is missing" in done.stderr


def test_every_output_mode(cli):
    """One document as JSON and as JSONL, but for the command line and the time in it."""
    arguments = (*COMPUTED, "--sparse", "4,1,2,4096")
    done = {mode: cli(*arguments, "--output", mode) for mode in ("human", "json", "jsonl", "quiet")}
    assert {mode: result.code for mode, result in done.items()} == dict.fromkeys(done, 0)
    document = done["json"].json
    ran = {"command", "created"}
    others = (cli(*arguments, "--json").json, *(json.loads(line) for line in done["jsonl"].lines))
    for other in others:
        assert {name: value for name, value in other.items() if name not in ran} == {
            name: value for name, value in document.items() if name not in ran
        }
    assert len(others) == 2
    assert cli(*arguments, "-q").stdout == done["quiet"].stdout
    assert document["schema_version"] == 1
    assert all("\x1b" not in result.stdout + result.stderr for result in done.values())
    assert (document["computed"], document["card"], document["multiprocessors"]) == (True, "RTX PRO 6000 Blackwell", 188)
    (shape,) = document["shapes"]
    names = [arm["arm"] for arm in shape["arms"]]
    assert names == ["deployed", "row_specialized", "tiled", "tiled_s5", "tiled_s22", "tiled_sparse"]
    assert shape["memory_floor_us"] == pytest.approx((16 * 8192 * 1152 + 64 * 8 * 2176) / 1.79e6)
    assert shape["mma_floor_us"] == pytest.approx(16 * 8192 * 4 * 8 * 2 * 1088 / 503.8e6)
    assert shape["arms"][-1]["memory_floor_us"] < shape["memory_floor_us"] / 3
    assert all(arm["median_us"] is None and arm["samples_us"] == [] for arm in shape["arms"])
    assert [line.split()[:2] for line in done["quiet"].lines] == [["16x4xH8x8192", name] for name in names]
    assert {row["status"] for row in document["objects"]} <= {"missing", "not-built"}


@pytest.mark.parametrize(("card", "memory_us"), [("rtx-5090", 84.98), ("dgx-spark", 557.2), ("h200", 35.79)])
def test_floors_follow_the_card(cli, card, memory_us):
    (line,) = cli(*ONE, "--card", card, "--arms", "tiled", "-q").lines
    assert float(line.split()[-1]) == pytest.approx(memory_us, abs=0.1)


def test_a_profile_gives_shapes_and_layout(cli):
    done = cli("bench", "verify-plan", "--profile", "kimi-k3-tp8-dcp8", "--card", "rtx-pro-6000", "--json").json
    assert done["layout"] == {"record": "fp8", "q_dtype": "bf16", "width": 576, "page_size": 1536, "per_query": True}
    assert [shape["shape"] for shape in done["shapes"]] == [f"1x{rows}xH96x131072" for rows in range(2, 9)]
    assert [arm["arm"] for arm in done["shapes"][0]["arms"]][-1] == "tiled_sparse"
    overridden = cli("bench", "verify-plan", "--profile", "kimi-k3-tp8-dcp8", "--shapes", "2x4xH96x64", "--card", "h200", "--json").json
    assert [shape["shape"] for shape in overridden["shapes"]] == ["2x4xH96x64"]
    assert overridden["layout"] == done["layout"]


def test_the_record_and_the_picture_are_written(cli, tmp_path):
    record_file, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    done = cli(*COMPUTED, "-o", record_file, "--plot", picture, "--commit", "0123abc")
    assert done.code == 0, done.stderr
    document = json.loads(record_file.read_text())
    assert (document["schema_version"], document["benchmark"], document["commit"]) == (1, "verify-plan", "0123abc")
    assert document["directions"]["ratio_to_deployed"].endswith("lower is better")
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width >= 600
    assert height >= 250


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--arms", "fused"), "--arms 'fused' is not one of deployed, row_specialized, tiled, tiled_s<N>, tiled_sparse"),
        (("--arms", "tiled_sparse"), "--arms tiled_sparse needs a chunk selection with a stride over 1"),
        (("--shapes", "4xH8x64"), "--shapes '4xH8x64' is not REQUESTSxROWSxHHEADSxTOKENS"),
        (("--card", "rtx-9090"), "--card rtx-9090 is not in the table"),
        (("--kv", "int8"), "--kv int8 is not one of bf16, fp8"),
        (("--profile", "glm-5.2-tp8"), "profile glm-5.2-tp8 reads selected slots"),
        (("--sparse", "0,1,2,64"), "stride must be at least 1, got 0"),
        (("--plot", "plan.pdf"), "--plot plan.pdf: expected a name that ends in .png"),
        (("-o", "/nonexistent/plan.json"), "-o /nonexistent/plan.json: there is no folder /nonexistent"),
        (("--samples", "20"), "20 is not in the range x>=21"),
    ],
)
def test_usage_errors_name_what_was_found_and_expected(cli, arguments, message):
    done = cli("bench", "verify-plan", "--card", "h200", *arguments) if arguments[0] != "--card" else cli("bench", "verify-plan", *arguments)
    assert (done.code, done.stdout) == (2, "")
    assert message in done.stderr
    assert "hint: " in done.stderr


@pytest.mark.skipif(current() is None, reason="needs the compiler")
def test_resources_come_from_the_cache_once_it_is_warm(cli):
    compile_and_publish(Store.open(str(cli.cache_dir)), objects.peak_spec(), "sm_120a")
    rows = cli(*COMPUTED, "--json").json["objects"]
    peak = rows[-1]
    assert (peak["spec"]["kernel_id"], peak["status"]) == ("bench.mma_peak", "present")
    (kernel,) = peak["kernels"]
    assert (kernel["frame_bytes"], kernel["static_smem_bytes"], kernel["dynamic_smem_bytes"]) == (0, 0, 0)
    assert 32 <= kernel["registers"] <= 64  # eight chains of four sums, and the operands
    assert {row["status"] for row in rows[:-1]} <= {"missing", "not-built"}
    human = cli(*COMPUTED)
    assert [line.split()[:4] for line in human.lines if line.startswith("present")] == [["present", peak["key"][:12], str(kernel["registers"]), "0"]]


# ------------------------------------------------------------------ measured, over the stand-in


@pytest.fixture
def device(monkeypatch, tmp_path):
    """The command line in this process with a GPU that is not there; returns how to install it and run."""
    monkeypatch.setenv("MLACTL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(bench, "_gpu_here", lambda out: True)
    monkeypatch.setattr(record, "driver_version", lambda: "580.00")

    def run(*arguments, **stand_in):
        bench_stand_in.install(monkeypatch, **stand_in)
        command = ["bench", "verify-plan", "--shapes", "3x4xH8x300", *arguments]
        monkeypatch.setattr(sys, "argv", ["mlactl", *command])
        return app.main(command)

    return run


def test_measured_exit_0_with_shares_and_ratios(device, capsys):
    times = {"deployed": 90.0, "row_specialized": 80.0, "tiled": 40.0, "tiled_s2": 50.0}
    assert device("--arms", ",".join(times), "--json", time_us=times.__getitem__) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["computed"], document["card"], document["driver"]) == (False, "Stand-in", "580.00")
    assert document["method"].startswith("CUDA-graph replay, 256 MiB written between replays, median of 21")
    assert document["command"] == "mlactl bench verify-plan --shapes 3x4xH8x300 --arms deployed,row_specialized,tiled,tiled_s2 --json"
    (shape,) = document["shapes"]
    medians = {arm["arm"]: arm["median_us"] for arm in shape["arms"]}
    assert medians == {name: start + 10 for name, start in times.items()}
    ratios = {arm["arm"]: arm["ratio_to_deployed"] for arm in shape["arms"]}
    assert ratios == {"deployed": 1.0, "row_specialized": 0.9, "tiled": 0.5, "tiled_s2": 0.6}
    floor_us = max((900 * 1152 + 96 * 2176) / 4e6, 900 * 4 * 8 * 2176 / 6e8)
    assert shape["arms"][2]["share_of_floor"] == pytest.approx(floor_us / 50)
    assert all(len(arm["samples_us"]) == 21 and arm["gate"]["cosine"] > 0.9999 for arm in shape["arms"])


def test_a_gate_failure_is_exit_1_and_names_the_arm(device, capsys):
    assert device("--arms", "deployed,tiled", wrong=lambda plan: 0.37 if plan.caps.mode == "verify" else 1.0) == 1
    done = capsys.readouterr()
    assert "error: 3x4xH8x300 tiled: not timed, the gate refused it: norm:" in done.err
    rows = {line.split()[1]: line.split() for line in done.out.splitlines() if line.startswith("3x4")}
    assert rows["deployed"][-1] == "timed"
    assert rows["tiled"][-1] == "gate"
    assert rows["tiled"][-5:-2] == ["-", "-", "-"]


def test_when_no_arm_can_run_it_says_so_and_exits_2(device, capsys):
    assert device("--arms", "tiled", "--page-size", "100") == 2
    done = capsys.readouterr()
    assert "tiled: page_size must be 1 or a multiple of 16, got 100 (3x4xH8x300)" in done.err
    assert "error: no arm of any shape could be run" in done.err


def test_a_frozen_process_names_what_is_missing_and_the_command_that_makes_it(device, capsys, monkeypatch):
    monkeypatch.setenv("MLACTL_FROZEN", "1")
    assert device("--arms", "tiled", "-q") == 2
    done = capsys.readouterr()
    assert done.out == ""
    assert "error: 3 of 3 objects for sm_90a are missing and this process is frozen: attention.dense_mla.forward 5" in done.err
    assert "hint: mlactl bench verify-plan --shapes 3x4xH8x300 --arms tiled --warm" in done.err


def test_a_measured_picture_is_drawn(device, tmp_path):
    picture = tmp_path / "measured.png"
    assert device("--arms", "deployed,tiled", "--plot", str(picture), "-q") == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"
