"""Makes cache roots of any size for the cache benchmarks: real object bytes, valid manifests, distinct keys.

One object of each arch is compiled and linked; every entry gets a copy of it under the symbol of its own key (or, with
`link=True`, a hard link to one copy, which is enough for what never reads objects). Entries differ in the digest of
their sources; every tenth has a superseded version.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from mlactl.cache import elf, key, toolchain
from mlactl.cache.manifest import SCHEMA_VERSION, KernelResources, Manifest, dump
from mlactl.cache.publish import LINK_FLAGS, find_linker
from mlactl.kernels.compiler import compile_object, compile_options
from mlactl.kernels.registry import DENSE_FORWARD
from mlactl.kernels.spec import CompileSpec

PLACEHOLDER = "0" * 64
ARCH = "sm_120a"
KERNEL = DENSE_FORWARD  # most objects of a warmed cache are of this kernel
FACTS = {fact.name: KERNEL.built.get(fact.name, fact.allowed)[0] for fact in KERNEL.facts}


def template() -> bytes:
    """One linked object whose symbol is the placeholder's."""
    tools = toolchain.current()
    assert tools is not None, toolchain.absence()
    with tempfile.TemporaryDirectory() as folder:
        exported, linked = Path(folder) / "object.o", Path(folder) / "object.so"
        spec = KERNEL.spec(**FACTS)
        compile_object(spec, ARCH, key.symbol_for(PLACEHOLDER), tools.flavour, exported)
        subprocess.run([find_linker()[0], *LINK_FLAGS, "-o", linked, exported], check=True)
        return linked.read_bytes()


def fill(root: Path, entries: int, *, data: bytes, link: bool) -> None:
    """Writes the entries below `root`."""
    facts, digest = elf.inspect(data), hashlib.sha256(data).hexdigest()
    tools = toolchain.current()
    assert tools is not None
    shared = root / "object"
    root.mkdir(mode=0o700, parents=True)
    shared.write_bytes(data)
    for number in range(entries):
        version = KERNEL.version - (number % 10 == 0)
        tiles = KERNEL.facts[0].allowed
        spec = CompileSpec.of(KERNEL.kernel_id, version, {**FACTS, "tile": tiles[number % len(tiles)]})
        sources = hashlib.sha256(str(number).encode()).hexdigest()
        inputs = key.KeyInputs(key.KEY_FORMAT, spec, ARCH, key.host_arch(), sources, tools, compile_options(ARCH))
        name = inputs.key()
        own = data if link else data.replace(PLACEHOLDER.encode(), name.encode())
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            key=name,
            spec=spec,
            arch=ARCH,
            host_arch=inputs.host_arch,
            sources_digest=inputs.sources_digest,
            toolchain=tools,
            python=toolchain.python_minor(),
            options=inputs.options,
            linker="GNU ld (GNU Binutils) 2.44",
            object_sha256=digest if link else hashlib.sha256(own).hexdigest(),
            object_bytes=len(own),
            code_sha256=hashlib.sha256(name.encode()).hexdigest(),
            symbol=key.symbol_for(name),
            signature=facts.signature,
            resources=tuple(KernelResources(each.name, each.registers, each.frame_bytes, each.static_smem_bytes) for each in facts.kernels),
            created=f"2026-{1 + number % 11:02}-{1 + number % 28:02}T{number % 24:02}:00:00Z",
            compile_s=0.5,
        )
        bucket = root / "v1" / name[:2]
        bucket.mkdir(mode=0o700, parents=True, exist_ok=True)
        if link:
            os.link(shared, bucket / f"{name}.so")
        else:
            (bucket / f"{name}.so").write_bytes(own)
        (bucket / f"{name}.json").write_bytes(dump(manifest))
