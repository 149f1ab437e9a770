"""Publishes a stand-in entry of an older spec version into a cache, for the demo of pruning by version.

    python scripts/superseded_entry.py CACHE_DIR

Its object is compiled for real from today's sources; only its spec says version 4, as an upgrade would have left it.
"""

import hashlib
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from mlactl.cache import locks, publish
from mlactl.cache.key import inputs_for, symbol_for
from mlactl.cache.store import Store
from mlactl.kernels import registry
from mlactl.kernels.compiler import compile_object


def main(cache_dir: str) -> None:
    """Compiles the merge under the key of its previous version and publishes it."""
    layer = Store.open(cache_dir).roots.writable
    assert layer is not None
    spec = registry.DENSE_MERGE.spec(groups=1, value_width=512)
    inputs = inputs_for(spec, "sm_120a")
    older = replace(inputs, spec=replace(spec, version=registry.DENSE_MERGE.version - 1))
    linker_path, linker = publish.find_linker()
    with tempfile.TemporaryDirectory() as scratch:
        exported, linked = Path(scratch) / "object.o", Path(scratch) / "object.so"
        shared = compile_object(spec, older.arch, symbol_for(older.key()), older.toolchain.flavour, exported)
        subprocess.run([linker_path, *publish.LINK_FLAGS, "-o", linked.name, exported.name], cwd=scratch, check=True)
        code_sha256, data = hashlib.sha256(exported.read_bytes()).hexdigest(), linked.read_bytes()
    mode = publish.prepare(layer, older.key())
    with locks.entry_lock(layer, older.key(), exclusive=True, wait_s=10.0):
        publish.publish_object(layer, older, data, publish.Build(code_sha256, linker, compile_s=0.0, dynamic_smem_bytes=shared), mode=mode)


if __name__ == "__main__":
    main(sys.argv[1])
