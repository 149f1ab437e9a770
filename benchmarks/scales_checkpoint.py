"""Scan of a sharded checkpoint's block scales beside `cat` of the same bytes, both on one core and from the page cache.

    python benchmarks/scales_checkpoint.py [--gib 4] [--shards 8] [--rounds 5] [--folder DIR]

Block scales lie in shards of their own, so `cat` of those files reads the bytes that the scan reads; the weights beside
them are holes of eight times that size. Exits 1 when the scan is under 0.3 of cat's rate, or when a process that has
done it has grown by more than 256 MiB over what it was after its imports.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cache_arms import mlactl, report

ROWS, COLUMNS = 8192, 1024
"""One module's block scales: 8 MiB, for a weight of [8192, 16384]."""

CHILD = """
import json, sys, time
from pathlib import Path
from mlactl.scales import checkpoint, compare

def peak_kib():
    # ru_maxrss of this program alone: getrusage keeps the peak of whoever forked it, across exec.
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])

before = peak_kib()
started = time.perf_counter()
found, findings = checkpoint.examine(Path(sys.argv[1]))
seconds = time.perf_counter() - started
grown_kib = peak_kib() - before
assert not findings.rows(), findings.rows()[:3]
print(json.dumps({"seconds": seconds, "grown_mib": grown_kib / 1024, "bytes": found.block_bytes}))
"""


def write_file(path: Path, tensors: list[tuple[str, str, list[int], int]], data: bytes | None, scalar: bytes = b"") -> None:
    """A safetensors file of `tensors` (name, dtype, shape, size); `data` repeats for each large one, None leaves a hole."""
    header, at = {}, 0
    for name, dtype, shape, size in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        if data is None:
            file.truncate(8 + len(text) + at)
            return
        for _, _, _, size in tensors:
            file.write(scalar if size == 4 else data[:size])


def build(folder: Path, gib: float, shards: int) -> tuple[list[Path], int]:
    """Writes the checkpoint; returns the shards that hold scales, and how many modules it has."""
    # What a calibrated weight has: mantissas as they come, exponents near the top of E4M3.
    data = bytes(random.Random(0).choices(range(0x50, 0x7F), k=ROWS * COLUMNS))
    modules = int(gib * 2**30 / (ROWS * COLUMNS))
    weight_map: dict[str, str] = {}
    scale_files = []
    for shard in range(shards):
        names = [f"model.layers.{number}.mlp.down_proj" for number in range(shard, modules, shards)]
        scales, weights = f"scales-{shard}.safetensors", f"weights-{shard}.safetensors"
        tensors = [(f"{name}.weight_scale", "F8_E4M3", [ROWS, COLUMNS], ROWS * COLUMNS) for name in names]
        tensors += [(f"{name}.weight_scale_2", "F32", [], 4) for name in names]
        write_file(folder / scales, tensors, data, struct.pack("<f", 1 / 3584))
        weight_map.update((name, scales) for name, *_ in tensors)
        tensors = [(f"{name}.weight", "U8", [ROWS, COLUMNS * 8], ROWS * COLUMNS * 8) for name in names]
        write_file(folder / weights, tensors, None)
        weight_map.update((name, weights) for name, *_ in tensors)
        scale_files.append(folder / scales)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return scale_files, modules


def timed(command: list[str]) -> tuple[float, str]:
    """Wall seconds of a command pinned to one core, and what it printed."""
    core = max(os.sched_getaffinity(0))
    started = time.perf_counter()
    done = subprocess.run(["taskset", "-c", str(core), *command], stdout=subprocess.PIPE, check=True, text=True)
    return time.perf_counter() - started, done.stdout


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="where to write the checkpoint; default: the temporary folder")
    wanted = parser.parse_args()
    seconds: dict[str, list[float]] = {"cat": [], "scan": [], "verify-scales": []}
    grown: list[float] = []
    with tempfile.TemporaryDirectory(dir=wanted.folder) as made:
        folder = Path(made)
        files, modules = build(folder, wanted.gib, wanted.shards)
        for number in range(-1, wanted.rounds):
            for arm in sorted(seconds, key=lambda name: (list(seconds).index(name) + number) % len(seconds)):
                if arm == "cat":
                    took, _ = timed(["sh", "-c", f"cat {' '.join(map(str, files))} > /dev/null"])
                elif arm == "scan":
                    _, said = timed([sys.executable, "-c", CHILD, str(folder)])
                    child = json.loads(said)
                    took = child["seconds"]
                    grown.append(child["grown_mib"])
                    assert child["bytes"] == modules * ROWS * COLUMNS
                else:
                    took, _ = timed(mlactl("verify-scales", str(folder), "--json"))
                if number >= 0:
                    seconds[arm].append(took)
    medians = {name: statistics.median(samples) for name, samples in seconds.items()}
    ratios = {
        "scan rate / cat rate": (medians["cat"] / medians["scan"], "at least", 0.3),
        "whole command's rate / cat rate": (medians["cat"] / medians["verify-scales"], "at least", 0.0),
        "growth over imports in MiB": (max(grown), "at most", 256.0),
    }
    return report(f"scan of {wanted.gib:g} GiB of block scales in {wanted.shards} shards", seconds, ratios)


if __name__ == "__main__":
    sys.exit(main())
