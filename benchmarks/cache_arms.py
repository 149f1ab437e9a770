"""Times whole commands against each other: rotated order, medians, ratios of one run."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence


def measure(arms: Mapping[str, Sequence[str]], rounds: int, env: Mapping[str, str]) -> dict[str, list[float]]:
    """Seconds of each command, `rounds` of each after one that warms the page cache; every round starts with another arm."""
    names = list(arms)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            started = time.perf_counter()
            subprocess.run(arms[name], env={**os.environ, **env}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
            if number >= 0:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def report(title: str, seconds: Mapping[str, Sequence[float]], ratios: Mapping[str, tuple[float, str, float]]) -> int:
    """Prints medians, raw samples and ratios as JSON; 1 when a ratio misses its bound.

    `ratios` maps a name to (value, "at most" or "at least", bound).
    """
    missed = [name for name, (value, sense, bound) in ratios.items() if (value > bound if sense == "at most" else value < bound)]
    document = {
        "benchmark": title,
        "command": " ".join(sys.argv),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "median_s": {name: round(statistics.median(samples), 4) for name, samples in seconds.items()},
        "samples_s": {name: [round(sample, 4) for sample in samples] for name, samples in seconds.items()},
        "ratios": {name: {"value": round(value, 3), sense.replace(" ", "_"): bound} for name, (value, sense, bound) in ratios.items()},
        "missed": missed,
    }
    sys.stdout.write(json.dumps(document, indent=1) + "\n")
    return 1 if missed else 0


def mlactl(*words: str) -> list[str]:
    """Command line of the installed program, started as its console script starts it."""
    return [sys.executable, "-c", "import sys; from mlactl.cli.app import main; sys.exit(main())", *words]
