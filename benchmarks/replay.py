"""Replay of the example folder against the bare reference calls, and what a recorder costs when it is off; ratios in one run.

    python benchmarks/replay.py

Both arms of the first run in this process after everything is imported; the bare arm only computes the reference of each
capture, already read. The second times the one test that a launch makes for a recorder against an empty function call.
"""

from __future__ import annotations

import json
import statistics
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


def main() -> None:
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
        "seconds": found,
        "replay of the folder over its bare references (2 allowed)": found["replay"] / found["bare"],
        "a launch with recording off": {"ns": cost["off"], "ns of an empty call": cost["empty call"]},
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
