"""`cache export` and `import` beside `tar | zstd -3` and `zstd -d | tar -x` of the same files.

    python benchmarks/cache_bundle.py [--entries 3000] [--rounds 5]

Every object is a real one with one instruction in eight replaced by bytes of its own, so that no two are alike. Extraction
is timed twice: as it is, and followed by `sync -f`, since an import ends with its files on the disk. Each round extracts or imports into a folder that is not there yet; removing the last one is
not timed. Exits 1 when export or import is below 0.5 of the plain arm's speed.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from cache_arms import mlactl, report
from cache_roots import fill, template
from elftools.elf.elffile import ELFFile

from mlactl.cache.manifest import dump, parse

BOUND = 0.5


def code_range(data: bytes) -> tuple[int, int]:
    """Where the machine code of the largest device kernel stands in an object."""
    start = data.index(b"\x7fELF", 4)
    cubin = ELFFile(io.BytesIO(data[start:]))
    text = max((section for section in cubin.iter_sections() if section.name.startswith(".text.")), key=lambda section: section["sh_size"])
    return start + text["sh_offset"], start + text["sh_offset"] + text["sh_size"]


def distinct(data: bytes, root: Path) -> None:
    """Gives every object of a root machine code of its own, one instruction in eight, and makes the manifests fit."""
    begin, end = code_range(data)
    for path in sorted(root.glob("v1/*/*.json")):
        manifest = parse(path.read_bytes())
        code = bytearray(path.with_suffix(".so").read_bytes())
        fresh = random.Random(manifest.key).randbytes(end - begin)
        for at in range(0, end - begin - 16, 8 * 16):
            code[begin + at : begin + at + 16] = fresh[at : at + 16]
        path.with_suffix(".so").write_bytes(code)
        path.write_bytes(dump(msgspec.structs.replace(manifest, object_sha256=hashlib.sha256(code).hexdigest())))


def timed(command: list[str], before: Callable[[], None]) -> float:
    before()
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--entries", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=5)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        root, target = folder / "cache", folder / "target"
        data = template()
        fill(root, wanted.entries, data=data, link=False)
        (root / "object").unlink()
        distinct(data, root)
        bundle, archive = folder / "bundle.tar.zst", folder / "archive.tar.zst"

        def fresh() -> None:
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(mode=0o700)
            bundle.with_suffix(".new").unlink(missing_ok=True)
            os.sync()

        arms = {
            "tar | zstd": ["sh", "-c", f"tar -C {root}/v1 -cf - . | zstd -q -3 -f -o {archive}"],
            "export": mlactl("cache", "export", "-o", str(bundle), "--force", "--cache-dir", str(root), "-q"),
            "zstd -d | tar -x": ["sh", "-c", f"zstd -q -d -c {archive} | tar -C {target} -xf -"],
            "zstd -d | tar -x; sync": ["sh", "-c", f"zstd -q -d -c {archive} | tar -C {target} -xf - && sync -f {target}"],
            "import": mlactl("cache", "import", str(bundle), "--cache-dir", str(target), "-q"),
            "import --dry-run": mlactl("cache", "import", str(bundle), "--dry-run", "--cache-dir", str(target), "-q"),
        }
        seconds: dict[str, list[float]] = {arm: [] for arm in arms}
        for number in range(-1, wanted.rounds):
            names = list(arms) if number < 0 else list(arms)[number % len(arms) :] + list(arms)[: number % len(arms)]
            for arm in names:
                taken = timed(arms[arm], fresh)
                if number >= 0:
                    seconds[arm].append(taken)
        found = len(list(target.glob("v1/*/*.so"))) if (target / "v1").is_dir() else wanted.entries
        assert found == wanted.entries, found
        sizes = {path.name: path.stat().st_size for path in (bundle, archive)}
    medians = {arm: statistics.median(samples) for arm, samples in seconds.items()}
    ratios = {
        "export speed / tar | zstd": (medians["tar | zstd"] / medians["export"], "at least", BOUND),
        "import speed / zstd -d | tar -x": (medians["zstd -d | tar -x"] / medians["import"], "at least", BOUND),
        "import speed / zstd -d | tar -x; sync": (medians["zstd -d | tar -x; sync"] / medians["import"], "at least", BOUND),
    }
    title = f"cache export and import, {wanted.entries} entries of {len(data)} bytes; compressed {sizes}"
    return report(title, seconds, ratios)


if __name__ == "__main__":
    sys.exit(main())
