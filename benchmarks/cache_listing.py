"""`cache ls --json` of 20,000 entries beside a bare script that opens, reads and json.loads the same manifest files.

    python benchmarks/cache_listing.py [--entries 20000] [--rounds 7]

Exits 1 when the ratio of medians is over 1.6.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from cache_arms import measure, mlactl, report
from cache_roots import fill, template

BARE = """
import json, os, sys
root = sys.argv[1] + "/v1"
found = []
for bucket in os.listdir(root):
    for name in os.listdir(f"{root}/{bucket}"):
        if name.endswith(".json"):
            with open(f"{root}/{bucket}/{name}", "rb") as file:
                found.append(json.loads(file.read()))
"""


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--entries", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=7)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "cache"
        fill(root, wanted.entries, data=template(), link=True)
        arms = {"bare": [sys.executable, "-c", BARE, str(root)], "ls": mlactl("cache", "ls", "--json", "--cache-dir", str(root))}
        seconds = measure(arms, wanted.rounds, {})
    medians = {name: statistics.median(samples) for name, samples in seconds.items()}
    return report(f"cache ls --json, {wanted.entries} entries", seconds, {"ls / bare": (medians["ls"] / medians["bare"], "at most", 1.6)})


if __name__ == "__main__":
    sys.exit(main())
