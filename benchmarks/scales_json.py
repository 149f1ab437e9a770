"""A verdict on a 78-layer outer-scale file beside `mlactl profile ls`: what the checks add to the program's start-up.

    python benchmarks/scales_json.py [--rounds 15]

Exits 1 when the verdict takes more than 1.4 of `profile ls`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from cache_arms import measure, mlactl, report


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    wanted = parser.parse_args()
    max_abs = [0.02 * 260 ** (layer / 77) for layer in range(78)]
    document = {"format": "nvfp4_ds_mla_outer_scale_v1", "num_layers": 78, "latent_dim": 512, "denominator": 2688.0}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scales.json"
        path.write_text(json.dumps({**document, "scales": [value / 2688 for value in max_abs], "max_abs": max_abs}))
        arms = {
            "profile ls --json": mlactl("profile", "ls", "--json"),
            "verify-scales --json": mlactl("verify-scales", str(path), "--json"),
            "profile ls": mlactl("profile", "ls"),
            "verify-scales": mlactl("verify-scales", str(path)),
        }
        seconds = measure(arms, wanted.rounds, {})
    medians = {name: statistics.median(samples) for name, samples in seconds.items()}
    ratios = {
        "verdict / profile ls, as JSON": (medians["verify-scales --json"] / medians["profile ls --json"], "at most", 1.4),
        "verdict / profile ls, for people": (medians["verify-scales"] / medians["profile ls"], "at most", 1.4),
    }
    return report("verdict on a 78-layer outer-scale file", seconds, ratios)


if __name__ == "__main__":
    sys.exit(main())
