"""`cache export` and `import` beside `tar | zstd -3` and `zstd -d | tar -x` of the same files.

    python benchmarks/cache_bundle.py [--entries 3000] [--rounds 5]

Every object is a real one with every second instruction replaced by bytes of its own, so that no two are alike.
The figure is the speed of each over that of its counterpart by the wall clock: export over packing, import over extraction
followed by `sync -f`, since an import ends with its files on the disk; exits 1 when one is below 0.5. Import is also set beside
packing, and beside extraction that leaves its files in memory: it reaches half of neither.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from cache_arms import mlactl, report
from cache_roots import fill, template
from elftools.elf.elffile import ELFFile

from mlactl.cache.manifest import dump, parse

BOUND = 0.5
PACKING, EXTRACTION = "tar | zstd -3", "zstd -d | tar -x"


def code_range(data: bytes) -> tuple[int, int]:
    """Where the machine code of the largest device kernel stands in an object."""
    start = data.index(b"\x7fELF", 4)
    cubin = ELFFile(io.BytesIO(data[start:]))
    text = max((section for section in cubin.iter_sections() if section.name.startswith(".text.")), key=lambda section: section["sh_size"])
    return start + text["sh_offset"], start + text["sh_offset"] + text["sh_size"]


def distinct(data: bytes, root: Path) -> None:
    """Gives every object of a root machine code of its own, every second instruction, and makes the manifests fit."""
    begin, end = code_range(data)
    for path in sorted(root.glob("v1/*/*.json")):
        manifest = parse(path.read_bytes())
        code = bytearray(path.with_suffix(".so").read_bytes())
        fresh = random.Random(manifest.key).randbytes(end - begin)
        for at in range(0, end - begin - 16, 2 * 16):
            code[begin + at : begin + at + 16] = fresh[at : at + 16]
        path.with_suffix(".so").write_bytes(code)
        path.write_bytes(dump(msgspec.structs.replace(manifest, object_sha256=hashlib.sha256(code).hexdigest())))


def timed(command: list[str]) -> tuple[float, float]:
    """Wall and processor seconds; the second hardly depends on what else the machine does."""
    os.sync()
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--entries", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=5)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        root = folder / "cache"
        data = template()
        fill(root, wanted.entries, data=data, link=False)
        (root / "object").unlink()
        distinct(data, root)
        bundle, archive = folder / "bundle.tar.zst", folder / "archive.tar.zst"

        def arms(target: Path) -> dict[str, list[str]]:
            return {
                PACKING: ["sh", "-c", f"tar -C {root}/v1 -cf - . | zstd -q -3 -f -o {archive}"],
                "export": mlactl("cache", "export", "-o", str(bundle), "--force", "--cache-dir", str(root), "-q"),
                EXTRACTION: ["sh", "-c", f"zstd -q -d -c {archive} | tar -C {target} -xf -"],
                f"{EXTRACTION}; sync": ["sh", "-c", f"zstd -q -d -c {archive} | tar -C {target} -xf - && sync -f {target}"],
                "import": mlactl("cache", "import", str(bundle), "--cache-dir", str(target), "-q"),
                "import --dry-run": mlactl("cache", "import", str(bundle), "--dry-run", "--cache-dir", str(target), "-q"),
            }

        names = list(arms(folder))
        seconds: dict[str, list[float]] = {arm: [] for arm in names}
        processors: dict[str, list[float]] = {arm: [] for arm in names}
        for number in range(-1, wanted.rounds):
            shift = max(number, 0) % len(names)
            for arm in names[shift:] + names[:shift]:
                # A new folder each time, and none removed meanwhile: ext4 passes over inodes that were freed a moment ago
                # one by one, which would be all that is measured.
                target = folder / f"{number}-{names.index(arm)}"
                target.mkdir(mode=0o700)
                wall, processor = timed(arms(target)[arm])
                if number >= 0:
                    seconds[arm].append(wall)
                    processors[arm].append(processor)
                if arm == "import":
                    assert len(list(target.glob("v1/*/*.so"))) == wanted.entries
        sizes = {path.name: path.stat().st_size for path in (bundle, archive)}
    ratios = {}
    for clock, samples in (("wall", seconds), ("processor", processors)):
        medians = {arm: statistics.median(values) for arm, values in samples.items()}
        for arm, peer in (("export", PACKING), ("import", PACKING), ("import", EXTRACTION), ("import", f"{EXTRACTION}; sync")):
            # Processor seconds say how much of a miss is the rest of the machine.
            figure = clock == "wall" and peer == {"export": PACKING, "import": f"{EXTRACTION}; sync"}[arm]
            name = f"{arm} speed / {peer}, {clock}{' (the figure)' if figure else ''}"
            ratios[name] = (medians[peer] / medians[arm], "at least", BOUND if figure else 0.0)
    title = f"cache export and import, {wanted.entries} entries of {len(data)} bytes; compressed {sizes}"
    return report(title, seconds, ratios)


if __name__ == "__main__":
    sys.exit(main())
