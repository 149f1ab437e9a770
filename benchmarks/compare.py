"""The compare engine against torch.testing.assert_close on the same 1 GiB pair, and its memory; ratios measured in one run.

    python benchmarks/compare.py [--mib 512]

Each side of the pair has `--mib` MiB. Arms take turns, each `--samples` times; the ratio is of medians. assert_close stops
at the first pair of tensors that differs and then formats a message, so it is timed where the tensors are close; the
engine is also timed where a tenth of the rows is wrong, which is its slowest case and has no peer. Memory is the peak of
the process over what it held before, in a process of its own that maps the pair from a file.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from mlactl.replay.compare import Axes, compare
from mlactl.replay.tolerances import for_output

AXES = Axes(("row", "head", "dim"))


def make(mib: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, 8, 512] of that size, and a copy with an error far inside every tolerance."""
    expected = torch.empty(mib * 2**20 // (8 * 512 * dtype.itemsize), 8, 512, dtype=dtype)
    for block in expected.split(1024):
        block.copy_(torch.randn(block.shape))
    actual = expected.clone()
    for block in actual.split(1024):
        block.mul_(1 + 1e-7)
    return actual, expected


def timed(call) -> tuple[float, float]:
    """Wall and processor seconds; the second hardly depends on what else the machine does."""
    start, used = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - start, time.process_time() - used


def speed(mib: int, samples: int, dtype: torch.dtype) -> dict[str, object]:
    actual, expected = make(mib, dtype)
    wrong = actual.clone()
    wrong[::10] *= 1.5
    tolerance = for_output("bf16", "decode")
    arms = {
        "assert_close": lambda: torch.testing.assert_close(actual, expected),
        "engine, close": lambda: compare(actual, expected, tolerance, name="output", axes=AXES),
        "engine, a tenth of the rows wrong": lambda: compare(wrong, expected, tolerance, name="output", axes=AXES),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for turn in range(samples):
        order = list(arms)[turn % 3 :] + list(arms)[: turn % 3]
        for name in order:
            times[name].append(timed(arms[name]))
    ratios = {}
    for place, clock in enumerate(("wall", "processor")):
        medians = {name: statistics.median(value[place] for value in values) for name, values in times.items()}
        ratios[clock] = {name: medians["assert_close"] / value for name, value in medians.items() if name != "assert_close"}
    return {
        "dtype": str(dtype),
        "pair_bytes": 2 * actual.numel() * actual.element_size(),
        "wall and processor seconds": times,
        "speed of the engine over assert_close (higher is better, 0.5 asked)": ratios,
    }


def memory(mib: int) -> dict[str, float]:
    """Peak memory of `mlactl diff` on a pair of files over the size of both, in a process of its own."""
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as folder:
        actual, expected = make(mib, torch.float32)
        for name, tensor in (("a", actual), ("b", expected)):
            save_file({"x": tensor}, Path(folder) / f"{name}.safetensors")
        del actual, expected
        # VmHWM and not ru_maxrss: the latter starts from what the parent held.
        peak_of = "; print([line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')][0], file=sys.stderr)"
        diff = f"import sys; from mlactl.cli.app import main; main(sys.argv[1:]){peak_of}"
        command = [sys.executable, "-c", diff, "diff", f"{folder}/a.safetensors", f"{folder}/b.safetensors", "-q"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        warm = subprocess.run([sys.executable, "-c", f"import sys, torch{peak_of}"], capture_output=True, text=True, check=True)
    inputs = 2 * mib * 2**20
    peak, base = int(done.stderr.split()[-1]) * 1024, int(warm.stderr.split()[-1]) * 1024
    return {
        "inputs_bytes": inputs,
        "peak_bytes": peak,
        "of which torch itself": base,
        "(peak - torch) / inputs (1.5 allowed)": (peak - base) / inputs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--samples", type=int, default=3)
    arguments = parser.parse_args()
    report = {
        "command": " ".join(sys.argv),
        "machine": {"processor": platform.processor(), "threads": torch.get_num_threads(), "torch": torch.__version__},
        "speed": [speed(arguments.mib, arguments.samples, dtype) for dtype in (torch.float32, torch.bfloat16)],
        "memory": memory(arguments.mib),
        "peak of this process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
