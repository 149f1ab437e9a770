"""Entries that no compile of today makes (older versions, other sources and toolchains), and damage of every kind.

A stand-in is a real object: the tiny kernel's, its exported function renamed to the new key's, linked again.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlactl.cache import locks
from mlactl.cache.key import inputs_for, symbol_for
from mlactl.cache.manifest import dump
from mlactl.cache.publish import LINK_FLAGS, Build, find_linker, prepare, publish_object
from mlactl.cache.store import Entry, Store
from mlactl.cache.toolchain import Toolchain, current
from mlactl.kernels.spec import CompileSpec


def link(exported: bytes) -> bytes:
    """The linked object of a relocatable one."""
    with tempfile.TemporaryDirectory() as folder:
        source, linked = Path(folder) / "object.o", Path(folder) / "object.so"
        source.write_bytes(exported)
        subprocess.run([find_linker()[0], *LINK_FLAGS, "-o", linked, source], check=True)
        return linked.read_bytes()


def renamed(exported: bytes, old_key: str, new_key: str) -> bytes:
    """A relocatable object whose function is another key's; the names have one length, so nothing moves."""
    found = exported.replace(old_key.encode(), new_key.encode())
    assert found != exported
    return found


def older_toolchain() -> Toolchain:
    """This machine's, one compiler release back."""
    tools = current()
    assert tools is not None
    return replace(tools, distributions=tuple((name, "4.7.0") for name, _ in tools.distributions))


def publish(
    store: Store,
    prebuilt: Any,
    spec: CompileSpec,
    *,
    arch: str = "sm_120a",
    version: int | None = None,
    sources_digest: str | None = None,
    toolchain: Toolchain | None = None,
    created: str | None = None,
    last_used: float | None = None,
) -> Entry:
    """Publishes the object of `spec` as if it had been built from something else."""
    here = inputs_for(spec, arch)
    inputs = replace(here, spec=replace(spec, version=spec.version if version is None else version), toolchain=toolchain or here.toolchain)
    inputs = replace(inputs, sources_digest=sources_digest or here.sources_digest)
    exported = prebuilt.path(symbol_for(here.key())).read_bytes()
    if inputs.key() != here.key():
        exported = renamed(exported, here.key(), inputs.key())
    layer = store.roots.writable
    assert layer is not None
    mode = prepare(layer, inputs.key())
    with locks.entry_lock(layer, inputs.key(), exclusive=True, wait_s=10.0):
        build = Build(hashlib.sha256(exported).hexdigest(), linker="GNU ld 2.44", compile_s=0.5)
        if created is not None:
            build = replace(build, created=created)
        entry = publish_object(layer, inputs, link(exported), build, mode=mode)
    if last_used is not None:
        os.utime(entry.manifest_path, (last_used, last_used))
    return store.entry(entry.key)


def rewrite_manifest(entry: Entry, **changes: Any) -> None:
    """Puts other values into an entry's manifest, spelled as this release spells it."""
    assert entry.manifest is not None
    entry.manifest_path.write_bytes(dump(msgspec.structs.replace(entry.manifest, **changes)))


def put_object(entry: Entry, data: bytes, *, digests: bool) -> None:
    """Puts other bytes in the place of an entry's object; with `digests` the manifest is made to fit them."""
    entry.object_path.write_bytes(data)
    if digests:
        rewrite_manifest(entry, object_sha256=hashlib.sha256(data).hexdigest(), object_bytes=len(data))


def flip_bit(entry: Entry) -> None:
    """One bit of the machine code, as a bad disk would."""
    data = bytearray(entry.object_path.read_bytes())
    data[len(data) // 2] ^= 1
    entry.object_path.write_bytes(data)


def leave_temporary(entry: Entry) -> Path:
    """What a writer of this key leaves when it is killed."""
    path = entry.object_path.with_name(f"{entry.key}.4711-0badcafe.tmp")
    path.write_bytes(b"half an object")
    return path


def quarantine(entry: Entry) -> None:
    """Sets an entry aside as the audit does."""
    entry.manifest_path.rename(entry.manifest_path.with_suffix(".quarantined"))


NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="drops to another user, which only root can do")


def let_others_read(root: Path) -> None:
    """Opens a private test root, and the folders pytest keeps it in, for another user to read."""
    for folder in [root, *root.parents]:
        if folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    for path in root.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
