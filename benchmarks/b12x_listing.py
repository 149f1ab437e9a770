"""`cache ls --json` of 20,000 b12x manifests beside a bare script that opens, reads and json.loads the same files.

    python benchmarks/b12x_listing.py [--entries 20000] [--rounds 7]

The manifests are synthetic, of the size and the fields that b12x 1.5.1 writes (7 to 12 KB, eight tensor facts); every entry
has facts and a key of its own, so that nothing is decoded once for many. Exits 1 when the ratio of medians is over 1.8.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from cache_arms import measure, mlactl, report

TAG = "b12x_cute_compile_cache_v7_explicit_spec"
KERNEL = "attention.dense_mla.forward"
DEVICE = ("cuda", (12, 0), 188)
OPTIONS = ("opt-level=3", "enable-pyir=false", "rdc=false", "enable-assertions=false", "preserve-line-info=false")
ENVIRONMENT = tuple((name, "") for name in ("CC", "CUDACXX", "CUDA_HOME", "CUDA_PATH", "CUDA_TOOLKIT_PATH", "CUTE_DSL_ARCH", "CXX"))
TOOLCHAIN = (
    ("python", "cpython", (3, 12, 3)),
    ("torch", "2.9.0"),
    ("torch_cuda", "13.0"),
    *((f"cutlass_dsl{part}", "4.8.1") for part in ("", "_libs_base", "_libs_core", "_libs_cu12", "_libs_cu13")),
    ("b12x_runtime_patches", (("compile_only_warning", True), ("memory_debug", True), ("direct_frameinfo", True))),
)
MODULE = "b12x.attention.dense_mla._forward"
TARGET = ("callable_instance", MODULE, "DenseMlaForwardKernel", (MODULE, "DenseMlaForwardKernel.__call__", f"b12x:{'98' * 32}"))
OBJECT = b"\x7fELF" + bytes(60)

BARE = """
import json, os, sys
root = sys.argv[1]
found = []
for bucket in os.listdir(root):
    for name in os.listdir(f"{root}/{bucket}"):
        if name.endswith(".json"):
            with open(f"{root}/{bucket}/{name}", "rb") as file:
                found.append(json.loads(file.read()))
"""


def tensor(name: str, heads: int) -> list[object]:
    dims = [["dim", "dynamic", None], ["dim", "exact", heads], ["dim", "exact", 576]]
    strides = [["dim", "exact", heads * 576], ["dim", "exact", 576], ["dim", "exact", 1]]
    return [name, ["tensor", name, "torch.bfloat16", 3, dims, strides, ["cuda", 0], None, None]]


def manifest(number: int) -> tuple[str, bytes]:
    """Key and manifest of one entry."""
    scalars = {"dtype": "fp8", "heads": 96, "page_size": 1536, "max_total_q": 1 + number, "num_splits": 5, "head_dim": 576, "window_size": None}
    facts = [*map(list, scalars.items()), *(tensor(f"tensor_{place}", 96) for place in range(8))]
    spec = {"facts": facts, "kernel": KERNEL, "version": 3 + number % 2}
    text = json.dumps(spec, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    payload = (TAG, TARGET, "98" * 32, TOOLCHAIN, DEVICE, digest, text, "", "", OPTIONS, ENVIRONMENT)
    key = hashlib.sha256(repr(payload).encode()).hexdigest()
    document = {
        "schema": "b12x._lib.compile_manifest.v3",
        "cache_key": key,
        "cache_format": TAG,
        "cache_payload_repr": repr(payload),
        "cache_payload": payload,
        "object_sha256": hashlib.sha256(OBJECT).hexdigest(),
        "object_bytes": len(OBJECT),
        "semantic_key": digest,
        "semantic_payload": {"cache_format": TAG, "compile_environment": ENVIRONMENT, "compile_options": OPTIONS, "compile_spec": spec},
        "target": f"{MODULE}.DenseMlaForwardKernel",
        "target_identity": {"kind": "callable_instance", "type": f"{MODULE}.DenseMlaForwardKernel"},
        "package_fingerprint": "98" * 32,
        "toolchain": TOOLCHAIN,
        "compile_options": OPTIONS,
        "compile_environment": ENVIRONMENT,
        "launch_metadata": {"launch_dynamic_smem_bytes": {"kernel_0": [82176]}, "source": "synthetic", "status": "exact"},
        "artifact_evidence_sha256": digest,
        "compile_spec_hash": digest,
        "compile_spec_json": text,
        "compile_kwargs_hash": "",
        "compile_kwargs_json": "",
        "kernel_id": KERNEL,
        "compile_spec_version": spec["version"],
    }
    return key, json.dumps(document, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def fill(root: Path, entries: int) -> int:
    """Writes the entries below `root`, their objects hard links to one file; returns the bytes of all manifests."""
    root.mkdir(parents=True)
    shared = root.with_name("object")
    shared.write_bytes(OBJECT)
    total = 0
    for number in range(entries):
        key, data = manifest(number)
        bucket = root / key[:2]
        bucket.mkdir(exist_ok=True)
        if number % 20_000 == 0:  # a file has so many links and no more
            shared.unlink()
            shared.write_bytes(OBJECT)
        os.link(shared, bucket / f"{key}.o")
        (bucket / f"{key}.json").write_bytes(data)
        (bucket / f"{key}.lock").touch()
        total += len(data)
    return total


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--entries", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=7)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "compile"
        size = fill(root, wanted.entries)
        ls = mlactl("cache", "ls", "--json", "--root-kind", "b12x", "--cache-dir", str(root))
        seconds = measure({"bare": [sys.executable, "-c", BARE, str(root)], "ls": ls}, wanted.rounds, {})
    medians = {name: statistics.median(samples) for name, samples in seconds.items()}
    title = f"cache ls --json of a b12x root, {wanted.entries} manifests of {size / wanted.entries / 1024:.1f} KiB"
    return report(title, seconds, {"ls / bare": (medians["ls"] / medians["bare"], "at most", 1.8)})


if __name__ == "__main__":
    sys.exit(main())
