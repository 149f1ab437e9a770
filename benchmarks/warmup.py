"""Warmup of 16 missing objects with two workers beside one, and a second warmup beside `--check`.

    python benchmarks/warmup.py [--rounds 3] [--check-rounds 9]

The 16 objects are built variants of the registry's kernels, on as many arches as it takes; the compile runs go through
the pool that `mlactl warmup` uses, each in a process of its own with a cache of its own, pinned to two cores. Exits 1
when two workers take more than 0.7 of the time of one, or a second warmup twice the time of `--check` or more.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile

from cache_arms import measure, mlactl, report

OBJECTS = 16
PROFILE = "kimi-k3-tp8-dcp8-bf16"


def compile_all(jobs: int, root: str) -> int:
    """One arm: compiles the 16 objects into `root`; a process that does only this."""
    from mlactl.kernels.registry import KERNELS
    from mlactl.kernels.spec import ARCHES
    from mlactl.warmup.plan import MISSING, Item
    from mlactl.warmup.pool import compile_missing

    specs = [spec for kernel in KERNELS.values() for spec in kernel.built_specs()]
    items = [Item(spec, arch, None, MISSING, None) for arch in ARCHES for spec in specs][:OBJECTS]
    assert len(items) == OBJECTS, f"{len(specs)} built specs on {len(ARCHES)} arches are fewer than {OBJECTS} objects"
    result = compile_missing(items, jobs=jobs, cache_dir=root, shared=False)
    assert len(result.of("compiled")) == OBJECTS, [outcome.message for outcome in result.of("failed")]
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check-rounds", type=int, default=9)
    parser.add_argument("--compile", nargs=2, metavar=("JOBS", "ROOT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        return compile_all(int(options.compile[0]), options.compile[1])

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    with tempfile.TemporaryDirectory() as base:
        fresh = f"{base}/fresh"
        arms = {
            f"jobs {jobs}": ["sh", "-c", f'rm -rf "$1"; exec "$2" "$3" --compile {jobs} "$1"', "sh", fresh, sys.executable, __file__]
            for jobs in (1, 2)
        }
        seconds = measure(arms, options.rounds, {})
        shutil.rmtree(fresh)

        warm = {"MLACTL_CACHE_DIR": f"{base}/warm"}
        words = ("warmup", "--profile", PROFILE, "--arch", "sm_120a", "--arch", "sm_121a")
        subprocess.run(mlactl(*words), env={**os.environ, **warm}, stdout=subprocess.DEVNULL, check=True)
        seconds |= measure({"check": mlactl(*words, "--check"), "second warmup": mlactl(*words)}, options.check_rounds, warm)

    median = {name: statistics.median(samples) for name, samples in seconds.items()}
    return report(
        "warmup",
        seconds,
        {
            "two workers over one": (median["jobs 2"] / median["jobs 1"], "at most", 0.7),
            "second warmup over check": (median["second warmup"] / median["check"], "at most", 2.0),
        },
    )


if __name__ == "__main__":
    sys.exit(main())
