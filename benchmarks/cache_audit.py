"""`cache audit` over a warmed profile: seconds an object, beside one bare nvdisasm run an object in the same rounds.

    python benchmarks/cache_audit.py [--profile glm-5.2-tp4-dcp4] [--arch sm_120a] [--rounds 3] [--cache-dir DIR]

Without --cache-dir the profile is warmed into a temporary root first. Only entries whose facts claim something of their
code are disassembled by the audit, so the bare arm runs over the objects of exactly those. Exits 1 over 2 s an object.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from cache_arms import measure, mlactl, report

from mlactl.cache.adapter import RootKind
from mlactl.cache.advisories import bundled
from mlactl.cache.audit import claims_of
from mlactl.cache.elf import device_code
from mlactl.cache.machine_code import find_disassembler
from mlactl.cache.store import Store

LIMIT_S = 2.0


def cubins(root: Path, folder: Path) -> list[Path]:
    """The cubin of each entry that the audit disassembles, as a file."""
    paths = []
    for entry in Store.open(str(root)).entries():
        if entry.manifest is not None and claims_of(entry.manifest.spec, RootKind.MLACTL, bundled()):
            paths.append(folder / f"{entry.key}.cubin")
            paths[-1].write_bytes(device_code(entry.object_path.read_bytes()))
    return paths


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", default="glm-5.2-tp4-dcp4")
    parser.add_argument("--arch", default="sm_120a")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache-dir", type=Path)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = wanted.cache_dir or Path(folder) / "cache"
        if wanted.cache_dir is None:
            subprocess.run(mlactl("warmup", "--profile", wanted.profile, "--arch", wanted.arch, "--cache-dir", str(root)), check=True)
        found = cubins(root, Path(folder))
        entries = len(list(Store.open(str(root)).entries()))
        if not found:
            sys.exit(f"{wanted.profile} has no kernel that claims anything of its code; take a profile of NVFP4 records")
        bare = " && ".join(f"{find_disassembler()} -c {path} > /dev/null" for path in found)
        arms = {
            "bare nvdisasm, one after the other": ["sh", "-c", bare],
            "audit --jobs 1": mlactl("cache", "audit", "--jobs", "1", "--cache-dir", str(root)),
            "audit": mlactl("cache", "audit", "--cache-dir", str(root)),
        }
        seconds = measure(arms, wanted.rounds, {})
    medians = {name: statistics.median(samples) for name, samples in seconds.items()}
    plain = medians["bare nvdisasm, one after the other"]
    ratios = {
        f"audit, seconds an object ({len(found)} disassembled)": (medians["audit"] / len(found), "at most", LIMIT_S),
        "audit --jobs 1, seconds an object": (medians["audit --jobs 1"] / len(found), "at most", LIMIT_S),
        "audit --jobs 1 / bare nvdisasm": (medians["audit --jobs 1"] / plain, "at most", 2.0),
        "audit / bare nvdisasm": (medians["audit"] / plain, "at most", 2.0),
    }
    return report(f"cache audit of {wanted.profile}, {entries} entries", seconds, ratios)


if __name__ == "__main__":
    sys.exit(main())
