"""Replay of the example folder against the bare reference calls, and what a recorder costs when it is off; ratios in one run.

    python benchmarks/replay.py

Two pairs of arms. Whole processes: `mlactl replay examples/captures` against a script that reads the same files and only
calls the reference; processor time of each, so that a busy machine does not decide. Then in one process, already imported
and read: what checks, digests, comparison and the search for clusters add to references that take milliseconds. Last, the
one test that a launch makes for a recorder against an empty function call.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import timeit
from pathlib import Path

from mlactl.kernels import runtime
from mlactl.replay import capture as captures
from mlactl.replay import oracle
from mlactl.replay.runner import ReplayOptions, replay

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "captures"


def medians(samples: int, **arms) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(samples):
        names = list(arms)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times[name].append(timeit.timeit(arms[name], number=1))
    return {name: statistics.median(values) for name, values in times.items()}


def off() -> None:
    recorder = runtime.recorder()
    if recorder is not None:
        raise AssertionError


def nothing() -> None:
    pass


BARE = """
import sys
from pathlib import Path
from safetensors import safe_open
from mlactl.replay import capture, oracle
from mlactl.replay.header import parse
from mlactl.replay.capture import Capture
for path in sorted(Path(sys.argv[1]).glob("*.in.safetensors")):
    with safe_open(path, framework="pt") as file:
        call = parse(file.metadata()["mlactl"], "").call
        made = Capture("", call, {name: file.get_tensor(name) for name in file.keys()})
    oracle.reference(made, "fp32", device="cpu")
"""
CLI = "import sys; from mlactl.cli.app import main; sys.exit(main())"


def processor_s(*command: str) -> float:
    """User and system time of a process of its own."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=False, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def processes(samples: int) -> dict[str, float]:
    """Medians of both arms, taking turns."""
    arms = {"bare": (sys.executable, "-c", BARE, str(EXAMPLES)), "replay": (sys.executable, "-c", CLI, "replay", str(EXAMPLES), "-q")}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(samples):
        for name in sorted(arms, reverse=bool(turn % 2)):
            times[name].append(processor_s(*arms[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    whole = processes(5)
    paths = captures.find([EXAMPLES])
    read = [captures.read(path) for path in paths]
    options = ReplayOptions(device="cpu", kernel=False)
    found = medians(
        11,
        bare=lambda: [oracle.reference(capture, "fp32", device="cpu") for capture in read],
        replay=lambda: replay(paths, options),
    )
    count = 200_000
    cost = {name: min(timeit.repeat(call, number=count, repeat=7)) / count * 1e9 for name, call in (("off", off), ("empty call", nothing))}
    report = {
        "command": " ".join(sys.argv),
        "processor seconds of whole processes": whole,
        "whole process, replay over bare references (2 allowed)": whole["replay"] / whole["bare"],
        "seconds in one process": found,
        "in one process, replay over bare references": found["replay"] / found["bare"],
        "a launch with recording off": {"ns": cost["off"], "ns of an empty call": cost["empty call"]},
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
