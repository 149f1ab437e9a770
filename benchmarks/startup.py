"""Start-up of the command line beside a bare interpreter that imports what it is drawn with.

    python benchmarks/startup.py [--rounds 15]

Exits 1 when `mlactl --help` takes more than twice `python -c "import typer, rich.console"` (ratio of medians).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile

from cache_arms import measure, mlactl, report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    arms = {
        "bare typer and rich": [sys.executable, "-c", "import typer, rich.console"],
        "mlactl --help": mlactl("--help"),
        "mlactl profile ls": mlactl("profile", "ls"),
        "mlactl warmup --dry-run": mlactl("warmup", "--profile", "ci-small", "--arch", "sm_120a", "--dry-run"),
    }
    with tempfile.TemporaryDirectory() as root:
        seconds = measure(arms, rounds, {"MLACTL_CACHE_DIR": f"{root}/cache", "HOME": root})
    median = {name: statistics.median(samples) for name, samples in seconds.items()}
    help_ratio = median["mlactl --help"] / median["bare typer and rich"]
    return report("start-up", seconds, {"help over bare": (help_ratio, "at most", 2.0)})


if __name__ == "__main__":
    sys.exit(main())
