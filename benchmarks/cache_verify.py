"""Throughput of `cache verify` over 2,000 entries beside `sha256sum` over the same objects.

    python benchmarks/cache_verify.py [--entries 2000] [--rounds 7]

Exits 1 when verify with its ELF checks is below 0.1 of sha256sum's throughput, or `--digests-only` below 0.5.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from cache_arms import measure, mlactl, report
from cache_roots import fill, template


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--entries", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=7)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "cache"
        fill(root, wanted.entries, data=template(), link=False)
        arms = {
            "sha256sum": ["sh", "-c", f"sha256sum {root}/v1/*/*.so"],
            "verify": mlactl("cache", "verify", "--cache-dir", str(root)),
            "verify --digests-only": mlactl("cache", "verify", "--digests-only", "--cache-dir", str(root)),
        }
        seconds = measure(arms, wanted.rounds, {})
    medians = {name: statistics.median(samples) for name, samples in seconds.items()}
    ratios = {
        "verify throughput / sha256sum": (medians["sha256sum"] / medians["verify"], "at least", 0.1),
        "digests-only throughput / sha256sum": (medians["sha256sum"] / medians["verify --digests-only"], "at least", 0.5),
    }
    return report(f"cache verify, {wanted.entries} entries", seconds, ratios)


if __name__ == "__main__":
    sys.exit(main())
