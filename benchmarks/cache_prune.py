"""`cache prune --dry-run` of 20,000 entries, a tenth of them superseded, beside `cache ls --json` of the same root.

    python benchmarks/cache_prune.py [--entries 20000] [--rounds 7]

Exits 1 when a ratio of medians is over 1.5: the default selection, and one by every kind of selector.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from cache_arms import measure, mlactl, report
from cache_roots import fill, template

SELECTED = ("--kernel", "attention.dense_mla", "--arch", "sm_120a", "--status", "ok", "--older-than", "1d", "--stale", "--max-size", "1GiB")


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--entries", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=7)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "cache"
        fill(root, wanted.entries, data=template(), link=True)
        where = ("--cache-dir", str(root), "--json")
        arms = {
            "ls": mlactl("cache", "ls", *where),
            "prune": mlactl("cache", "prune", "--dry-run", *where),
            "prune by selectors": mlactl("cache", "prune", "--dry-run", *SELECTED, *where),
        }
        seconds = measure(arms, wanted.rounds, {})
    medians = {name: statistics.median(samples) for name, samples in seconds.items()}
    ratios = {f"{name} / ls": (medians[name] / medians["ls"], "at most", 1.5) for name in arms if name != "ls"}
    return report(f"cache prune --dry-run, {wanted.entries} entries", seconds, ratios)


if __name__ == "__main__":
    sys.exit(main())
