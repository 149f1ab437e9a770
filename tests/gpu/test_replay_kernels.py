"""Capture and replay on a card: calls recorded from real launches, replayed on the kernel, and the smallest failing input."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dense_cases import make_case

import mlactl
from mlactl.replay import capture as captures
from mlactl.replay import runner
from mlactl.replay.kernel import run_kernel
from mlactl.replay.runner import ReplayOptions, replay_capture

pytestmark = pytest.mark.gpu
sys.path.insert(0, str(Path(__file__).parents[1] / "replay"))


def recorded(folder, arch, multiprocessors, **case):
    """One real launch, recorded."""
    made = make_case(arch, multiprocessors, case.pop("lengths", (300, 1025, 0, 64)), **case)
    binding = made.bind()
    binding.preload()
    with mlactl.capture(folder):
        binding.run()
    (path,) = captures.find([folder])
    return captures.read(path), binding


@pytest.mark.parametrize(
    "case", [{"heads": 8}, {"heads": 12, "mode": "verify", "rows": 4, "page_size": 64}, {"heads": 16, "mode": "extend", "row_counts": (40, 3, 0, 9)}]
)
def test_a_recorded_launch_replays_bit_for_bit(tmp_path, arch, multiprocessors, case):
    made, _ = recorded(tmp_path, arch, multiprocessors, **case)
    report = replay_capture(made, ReplayOptions(repeats=5))
    assert report.status == "match", report
    found = [(pair.left, pair.right.split()[0]) for pair in report.pairs]
    assert found == [("captured", "reference"), ("kernel", "reference"), ("kernel", "captured")]
    assert report.determinism == "bitwise equal over 5 runs"


def test_graph_capture_goes_on_unrecorded_and_a_replay_is_recorded(tmp_path, arch, multiprocessors):
    binding = make_case(arch, multiprocessors, (300, 64), heads=8).bind()
    binding.preload()
    binding.run()
    graph = torch.cuda.CUDAGraph()
    with mlactl.capture(tmp_path) as recorder:
        with pytest.warns(RuntimeWarning, match="CUDA graph is being captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            binding.run()
        assert not list(tmp_path.iterdir())
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        binding.run()
    graph.replay()
    recorder.snapshot(binding)
    (path,) = captures.find([tmp_path])
    assert replay_capture(captures.read(path), ReplayOptions()).status == "match"


def test_the_smallest_failing_input_is_found_with_a_kernel(tmp_path, arch, multiprocessors, monkeypatch):
    """A kernel that negates one record wherever it sees it: one row, head and page are left, and still fail."""
    made, _ = recorded(tmp_path / "captures", arch, multiprocessors, heads=8, lengths=(300, 1025))
    kv = made.tensors["kv_cache"].clone()
    mark = kv[5, 3].clone()
    made = replace(made, facts={})

    def faulty(capture, **options):
        cache = capture.tensors["kv_cache"]
        wrong = torch.where((cache == mark).all(-1, keepdim=True), -cache, cache)
        return run_kernel(replace(capture, tensors={**capture.tensors, "kv_cache": wrong}), repeats=1)

    monkeypatch.setattr(runner, "run_kernel", faulty)
    report = replay_capture(made.with_result(None, None), ReplayOptions(bisect=True, smallest=tmp_path / "smallest"))
    assert report.status == "mismatch"
    (path,) = captures.find([tmp_path / "smallest"])
    smallest = captures.read(path)
    assert (smallest.rows, smallest.heads, len(smallest.tensors["kv_cache"])) == (1, 1, 1)
    assert bool((smallest.tensors["kv_cache"] == mark).all(-1).any())
    assert smallest.output is not None


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "examples" / "captures").glob("*.in.safetensors")), ids=lambda path: path.name)
def test_the_kernel_is_right_on_every_example(arch, path):
    """Dense and NVFP4 examples: whatever was planted in the captured output, the kernel itself matches the reference."""
    report = replay_capture(captures.read(path), ReplayOptions())
    pair = next((pair for pair in report.pairs if pair.left == "kernel" and pair.right.startswith("reference")), None)
    assert pair is not None, report.provenance
    assert pair.matches
    assert report.determinism == "bitwise equal over 3 runs"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs for NCCL")
def test_real_ranks_over_nccl(tmp_path):
    from test_dcp import saved, shards

    world = 2
    made, _ = shards((1, 333), world, rows=1, heads=8)
    saved(tmp_path / "captures", made)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), "-m", "mlactl.replay.dcp"]
    done = subprocess.run([*command, str(tmp_path / "captures")], capture_output=True, text=True, env=dict(os.environ), timeout=300)
    assert done.returncode == 0, done.stderr
    assert "2 ranks, nccl" in done.stdout
