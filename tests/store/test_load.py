"""Lookups and loading: what was checked is what runs, and everything else is a named miss."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tiny

from mlactl.cache import manifest as manifests
from mlactl.cache import toolchain as toolchains
from mlactl.cache.entry import RejectedObject, examine
from mlactl.cache.key import inputs_for
from mlactl.cache.load import StoreSource, read_verified
from mlactl.cache.locks import LockBusy, entry_lock
from mlactl.cache.publish import compile_and_publish
from mlactl.cache.store import Entry, Hit, Miss, SeveralToolchains, Status, Store
from mlactl.errors import EnvironmentUnfit
from mlactl.kernels import registry, runtime
from mlactl.kernels.errors import MissingObject
from mlactl.opening import open_runtime

SPEC = tiny.spec()
KEY = inputs_for(SPEC, "sm_120a").key()


def manifest_path(entry: Entry) -> Path:
    assert entry.manifest_path is not None
    return entry.manifest_path


def rewrite(entry: Entry, **changes: Any) -> None:
    """Writes the entry's manifest anew, spelled well, with other values."""
    assert entry.manifest is not None
    manifest_path(entry).write_bytes(manifests.dump(msgspec.structs.replace(entry.manifest, **changes)))


# ---- damage of every kind (C3, C8)


def swap(entry: Entry, other: Entry) -> None:
    mine, theirs = entry.object_path.read_bytes(), other.object_path.read_bytes()
    entry.object_path.write_bytes(theirs)
    other.object_path.write_bytes(mine)


def as_if_its_own(entry: Entry, data: bytes) -> None:
    """Puts an object in the entry's place with a manifest that has its digest and size: somebody who covers the tracks."""
    import hashlib

    entry.object_path.write_bytes(data)
    rewrite(entry, object_sha256=hashlib.sha256(data).hexdigest(), object_bytes=len(data))


def linked(objects: Path) -> bytes:
    out = objects.with_suffix(".so")
    subprocess.run(["ld", "-shared", "--build-id=none", "--hash-style=gnu", "-o", out, objects], check=True)
    return out.read_bytes()


def flip(entry: Entry, at: float) -> None:
    data = bytearray(entry.object_path.read_bytes())
    data[int(len(data) * at)] ^= 0x10
    entry.object_path.write_bytes(data)


Damage = Callable[[Entry, Entry, tiny.Prebuilt], object]
DAMAGE: dict[str, tuple[Damage, str]] = {
    "cut at 4,096 bytes": (lambda entry, other, built: os.truncate(entry.object_path, 4096), "size"),
    "empty": (lambda entry, other, built: os.truncate(entry.object_path, 0), "size"),
    "one byte more": (lambda entry, other, built: entry.object_path.write_bytes(entry.object_path.read_bytes() + b"\0"), "size"),
    "absent": (lambda entry, other, built: entry.object_path.unlink(), "no-object"),
    "a folder": (lambda entry, other, built: (entry.object_path.unlink(), entry.object_path.mkdir()), "no-object"),
    "a flipped bit at the start": (lambda entry, other, built: flip(entry, 0.0), "digest"),
    "a flipped bit in the middle": (lambda entry, other, built: flip(entry, 0.5), "digest"),
    "a flipped bit at the end": (lambda entry, other, built: flip(entry, 0.9999), "digest"),
    "swapped with another of its size": (lambda entry, other, built: swap(entry, other), "digest"),
    "swapped, digests made to fit": (lambda entry, other, built: as_if_its_own(entry, other.object_path.read_bytes()), "symbol"),
    "other code under its symbol": (lambda entry, other, built: as_if_its_own(entry, linked(built.impostor)), "signature"),
    "an ELF of another arch": (lambda entry, other, built: as_if_its_own(entry, linked(built.sm_100a)), "arch"),
    "no ELF": (lambda entry, other, built: as_if_its_own(entry, b"#!/bin/sh\n"), "symbol"),
    "manifest gone": (lambda entry, other, built: manifest_path(entry).unlink(), "no-manifest"),
    "manifest empty": (lambda entry, other, built: os.truncate(manifest_path(entry), 0), "bad-manifest"),
    "manifest cut": (lambda entry, other, built: os.truncate(manifest_path(entry), 300), "bad-manifest"),
    "manifest of another": (lambda entry, other, built: manifest_path(entry).write_bytes(manifest_path(other).read_bytes()), "bad-manifest"),
    "manifest relabelled": (lambda entry, other, built: rewrite(entry, arch="sm_121a"), "bad-manifest"),
    "manifest with another signature": (lambda entry, other, built: rewrite(entry, signature="__call__(x: Tensor([n0], bfloat16))"), "signature"),
    "manifest unreadable": (lambda entry, other, built: (manifest_path(entry).unlink(), manifest_path(entry).mkdir()), "bad-manifest"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_a_named_status_a_miss_and_is_rebuilt(store: Store, publish: Callable[..., Entry], prebuilt: tiny.Prebuilt, kind: str) -> None:
    damage, status = DAMAGE[kind]
    entry, other = publish(), publish(tiny.spec(3))
    assert entry.object_bytes == other.object_bytes
    damage(entry, other, prebuilt)
    found = store.entry(KEY)
    full = examine(found)
    assert full.status == status
    assert full.detail
    with pytest.raises(RejectedObject) as raised:
        read_verified(found)
    assert raised.value.entry.status == status
    assert f"{entry.object_path} is not usable: {status}: " in raised.value.message
    source = StoreSource(store)
    assert source.fetch(SPEC, "sm_120a") is None
    miss = store.lookup(SPEC, "sm_120a")
    assert isinstance(miss, Miss)
    assert (miss.key, [bad.status for bad in miss.rejected]) == (KEY, [status])
    assert f"{entry.object_path}: {status}: " in source.describe_miss(SPEC, "sm_120a")
    if "folder" in kind or "unreadable" in kind:
        (entry.object_path if "folder" in kind else manifest_path(entry)).rmdir()  # not a file of ours: nothing removes it by itself
    result = compile_and_publish(store, SPEC, "sm_120a", compiler=prebuilt.compiler())
    assert result.compiled
    mended = source.fetch(SPEC, "sm_120a")
    assert mended is not None
    assert mended.data == entry.object_path.read_bytes()
    assert examine(result.entry).status is Status.OK


def test_a_good_copy_in_another_layer_is_used_instead(tmp_path: Path, publish: Callable[..., Entry], prebuilt: tiny.Prebuilt) -> None:
    """C8: the entry is labelled sm_120a, its embedded ELF says sm_100a."""
    bad = publish(into=Store.open(str(tmp_path / "first")))
    good = publish(into=Store.open(str(tmp_path / "second")))
    as_if_its_own(bad, linked(prebuilt.sm_100a))
    assert next(Store.open(str(tmp_path / "first")).entries()).status is Status.OK, "names, sizes and manifest say nothing"
    found = StoreSource(Store.open(f"{tmp_path}/first:{tmp_path}/second")).fetch(SPEC, "sm_120a")
    assert found is not None
    assert found.origin == str(good.object_path)
    assert StoreSource(Store.open(str(tmp_path / "first"))).fetch(SPEC, "sm_120a") is None


def test_a_fetched_object_is_the_entrys_bytes_with_its_symbol(store: Store, publish: Callable[..., Entry]) -> None:
    entry = publish()
    found = StoreSource(store).fetch(SPEC, "sm_120a")
    assert found is not None
    assert (found.key, found.symbol, found.origin) == (KEY, f"mlactl_{KEY}", str(entry.object_path))
    assert found.data == entry.object_path.read_bytes()
    tools = toolchains.current()
    assert tools is not None
    assert found.flavour == tools.flavour


# ---- other arches (C11)


def test_an_object_of_another_arch_is_never_used(store: Store, publish: Callable[..., Entry]) -> None:
    """C11: a device 12.1 with a cache for 12.0 alone."""
    publish()
    source = StoreSource(store)
    assert source.fetch(SPEC, "sm_121a") is None
    key = inputs_for(SPEC, "sm_121a").key()
    text = source.describe_miss(SPEC, "sm_121a")
    assert text.startswith(f"no object for sm_121a: test.tiny 1 dtype=f32 factor=2, key {key}, not in {store.roots.layers[0].path}")
    assert "there is one for sm_120a, which is never used instead" in text


def test_a_frozen_process_names_the_key_and_the_command(store: Store, publish: Callable[..., Entry], monkeypatch: pytest.MonkeyPatch) -> None:
    publish()
    monkeypatch.setenv("MLACTL_FROZEN", "1")
    opened = open_runtime(str(store.roots.layers[0].path))
    assert opened.roots == store.roots
    with pytest.raises(MissingObject, match="no object for sm_121a") as raised:
        runtime.launch(SPEC, "sm_121a")
    assert inputs_for(SPEC, "sm_121a").key() in raised.value.message
    assert "frozen" in raised.value.message
    assert raised.value.hint == "mlactl warmup --profile PROFILE --arch sm_121a"


def test_opening_compiles_unless_frozen(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def record(self: StoreSource, spec: object, arch: str) -> None:
        calls.append(arch)
        raise MissingObject("stop here")

    monkeypatch.setattr(StoreSource, "compile", record)
    root = str(store.roots.layers[0].path)
    for environment, frozen, compiles in ((None, None, True), ("1", None, False), ("1", False, True), (None, True, False), ("0", None, True)):
        if environment is None:
            monkeypatch.delenv("MLACTL_FROZEN", raising=False)
        else:
            monkeypatch.setenv("MLACTL_FROZEN", environment)
        calls.clear()
        open_runtime(root, frozen=frozen)
        with pytest.raises(MissingObject):
            runtime.launch(SPEC, "sm_120a")
        assert bool(calls) == compiles, (environment, frozen)


def test_a_miss_compiles_publishes_and_loads(store: Store, prebuilt: tiny.Prebuilt, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlactl.cache.publish as publishing

    monkeypatch.setattr(
        publishing.compile_and_publish, "__kwdefaults__", {**publishing.compile_and_publish.__kwdefaults__, "compiler": prebuilt.compiler()}
    )
    source = StoreSource(store)
    found = source.compile(SPEC, "sm_120a")
    assert found.key == KEY
    assert [entry.status for entry in store.entries()] == [Status.OK]
    assert found.lease is not None


# ---- sources (C6, C7)


def test_other_sources_are_a_miss_and_touched_ones_a_hit(
    store: Store, publish: Callable[..., Entry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prebuilt: tiny.Prebuilt
) -> None:
    """C6."""
    source = tmp_path / "kernel.py"
    source.write_text("x = 1\n")
    monkeypatch.setattr(registry, "SOURCE_ROOT", tmp_path)
    monkeypatch.setattr(registry, "KERNELS", {**registry.KERNELS, "test.tiny": replace(tiny.TINY, sources=("kernel.py",))})
    base = publish_under_current_inputs(store, prebuilt)
    assert isinstance(store.lookup(SPEC, "sm_120a"), Hit)
    os.utime(source, (1, 1))
    assert isinstance(store.lookup(SPEC, "sm_120a"), Hit)
    source.write_text("x = 2\n")
    os.utime(source, (1, 1))
    miss = store.lookup(SPEC, "sm_120a")
    assert isinstance(miss, Miss)
    assert f"{base.key[:12]} differs in sources_digest" in StoreSource(store).describe_miss(SPEC, "sm_120a")
    source.write_text("x = 1\n")
    assert isinstance(store.lookup(SPEC, "sm_120a"), Hit)


def publish_under_current_inputs(store: Store, prebuilt: tiny.Prebuilt) -> Entry:
    """An entry of the kernel's sources as they are declared now, from the machine code of the plain one."""
    inputs = inputs_for(SPEC, "sm_120a")
    original = linked(prebuilt.path(f"mlactl_{KEY}")).replace(KEY.encode(), inputs.key().encode())
    return tiny.published(store, inputs, original)


LOOKUP = """
import sys, tiny
from mlactl.cache.store import Hit, Store
found = Store.open(sys.argv[1]).lookup(tiny.spec(), "sm_120a")
assert isinstance(found, Hit), found
print(found.entry.key)
assert not [name for name in ("cutlass", "tvm_ffi", "torch", "numpy") if name in sys.modules]
"""


def test_every_rank_on_every_host_of_an_arch_hits(store: Store, publish: Callable[..., Entry], tmp_path: Path) -> None:
    """C2, C7: warmed "for rank 0", looked up as rank 3 of another pod, from another home and working directory."""
    publish()
    moved = tmp_path / "mounted elsewhere"
    store.roots.layers[0].path.rename(moved)
    pod = {"RANK": "3", "LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "3", "HOSTNAME": "decode-3", "HOME": str(tmp_path), "PYTHONHASHSEED": "99"}
    assert tiny.run_python(LOOKUP, str(moved), env={**os.environ, **pod}, cwd=tmp_path).stdout == f"{KEY}\n"


# ---- without a compiler


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(toolchains, "_probe", lambda: "nvidia-cutlass-dsl is not installed")


def test_without_a_compiler_the_root_says_what_warmed_it(store: Store, publish: Callable[..., Entry], no_compiler: Callable[[], None]) -> None:
    publish()
    publish(tiny.spec(3))
    missing = inputs_for(tiny.spec(5), "sm_120a").key()
    no_compiler()
    found = StoreSource(store).fetch(SPEC, "sm_120a")
    assert found is not None
    assert found.key == KEY
    miss = store.lookup(tiny.spec(5), "sm_120a")
    assert isinstance(miss, Miss)
    assert miss.key == missing, "one toolchain warmed it, so the key is known"
    assert missing in StoreSource(store).describe_miss(tiny.spec(5), "sm_120a")


def test_without_a_compiler_a_new_entry_is_seen_at_once(store: Store, publish: Callable[..., Entry], monkeypatch: pytest.MonkeyPatch) -> None:
    publish()
    for factor, dtype in tiny.ALL[1:]:
        with monkeypatch.context() as patched:
            patched.setattr(toolchains, "_probe", lambda: "none")
            assert isinstance(store.lookup(tiny.spec(factor, dtype), "sm_120a"), Miss)
        entry = publish(tiny.spec(factor, dtype))
        with monkeypatch.context() as patched:
            patched.setattr(toolchains, "_probe", lambda: "none")
            assert isinstance(store.lookup(tiny.spec(factor, dtype), "sm_120a"), Hit)
            entry.object_path.unlink()
            assert isinstance(store.lookup(tiny.spec(factor, dtype), "sm_120a"), Miss)


def test_without_a_compiler_and_with_two_toolchains_both_are_named(
    store: Store, publish: Callable[..., Entry], no_compiler: Callable[[], None]
) -> None:
    """Silently taking the first ran cu12 code on the nodes that had been measured with cu13."""
    entry = publish()
    assert entry.manifest is not None
    inputs = entry.manifest.key_inputs()
    other = tiny.relabelled(entry, replace(inputs, toolchain=replace(inputs.toolchain, flavour="cu12")))
    assert isinstance(store.lookup(SPEC, "sm_120a"), Hit), "with a compiler there is no doubt"
    no_compiler()
    with pytest.raises(SeveralToolchains) as raised:
        StoreSource(store).fetch(SPEC, "sm_120a")
    assert f"{entry.key[:12]} by nvidia-cutlass-dsl 4.8.1 cu13, tvm-ffi 0.1" in raised.value.message
    assert f"{other.key[:12]} by nvidia-cutlass-dsl 4.8.1 cu12, tvm-ffi 0.1" in raised.value.message
    assert raised.value.exit_code == 2
    flip(other, 0.5)
    found = StoreSource(store).fetch(SPEC, "sm_120a")
    assert found is not None
    assert found.key == entry.key, "a damaged one is no candidate"


@pytest.mark.parametrize(
    "change", [{"sources_digest": "00" * 32}, {"host_arch": "aarch64"}, {"options": ("--gpu-arch sm_120a",)}, {"arch": "sm_121a"}]
)
def test_without_a_compiler_everything_else_must_still_fit(
    store: Store, publish: Callable[..., Entry], no_compiler: Callable[[], None], change: dict[str, Any]
) -> None:
    entry = publish()
    assert entry.manifest is not None
    inputs = replace(entry.manifest.key_inputs(), **change)
    data = entry.object_path.read_bytes().replace(KEY.encode(), inputs.key().encode())
    manifest = msgspec.structs.replace(entry.manifest, key=inputs.key(), symbol=f"mlactl_{inputs.key()}", **change)
    bucket = Path(entry.layer.bucket(inputs.key()))
    bucket.mkdir(exist_ok=True, mode=0o700)
    (bucket / f"{inputs.key()}.so").write_bytes(data)
    (bucket / f"{inputs.key()}.json").write_bytes(manifests.dump(manifest))
    entry.object_path.unlink()
    no_compiler()
    assert isinstance(store.lookup(SPEC, "sm_120a"), Miss)


def test_without_a_compiler_an_empty_root_is_a_plain_miss(store: Store, no_compiler: Callable[[], None]) -> None:
    no_compiler()
    miss = store.lookup(SPEC, "sm_120a")
    assert isinstance(miss, Miss)
    assert miss.key is None
    assert "its key cannot be known without the compiler" in StoreSource(store).describe_miss(SPEC, "sm_120a")
    open_runtime(str(store.roots.layers[0].path))
    with pytest.raises(EnvironmentUnfit, match=r"no object for sm_120a: .*no compiler here: nvidia-cutlass-dsl is not installed") as raised:
        runtime.launch(SPEC, "sm_120a")
    assert raised.value.exit_code == 3
    assert "mlactl warmup --profile PROFILE --arch sm_120a" in (raised.value.hint or "")


# ---- while others remove


def test_what_is_removed_while_it_is_listed_is_no_damage(store: Store, publish: Callable[..., Entry], monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing beside a prune called entries damaged whose manifest had gone between the listing and the look."""
    entry, other = publish(), publish(tiny.spec(3))
    real = os.listdir

    def late(folder: str) -> list[str]:
        names = real(folder)
        if str(folder) == str(entry.object_path.parent):
            manifest_path(entry).unlink(missing_ok=True)
            if gone:
                entry.object_path.unlink()
        return names

    monkeypatch.setattr(os, "listdir", late)
    gone = False
    assert {found.key: str(found.status) for found in store.entries()} == {entry.key: "no-manifest", other.key: "ok"}
    publish()
    gone = True
    assert {found.key: str(found.status) for found in store.entries()} == {other.key: "ok"}


# ---- in use


READER = """
import sys, time, tiny
from mlactl.cache.load import StoreSource
from mlactl.cache.store import Store
tiny.register()
found = StoreSource(Store.open(sys.argv[1])).fetch(tiny.spec(), "sm_120a")
print(found.key, flush=True)
time.sleep(600)
"""


def test_what_a_process_loaded_is_in_use_until_it_ends(store: Store, publish: Callable[..., Entry]) -> None:
    """C12: prune while a reader loads."""
    entry = publish()
    code = f"import sys; sys.path.insert(0, {str(tiny.HERE)!r})\n{READER}"
    reader = subprocess.Popen([sys.executable, "-c", code, str(entry.layer.path)], stdout=subprocess.PIPE, text=True)
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline() == f"{KEY}\n"
        with pytest.raises(LockBusy, match=f"in use by process {reader.pid}$"), entry_lock(entry.layer, KEY, exclusive=True, wait_s=0):
            pass
        assert StoreSource(store).fetch(SPEC, "sm_120a") is not None, "readers do not exclude each other"
    finally:
        reader.kill()
        reader.communicate()
    with entry_lock(entry.layer, KEY, exclusive=True, wait_s=0):
        pass


def test_a_rejected_object_is_not_in_use(store: Store, publish: Callable[..., Entry]) -> None:
    entry = publish()
    flip(entry, 0.5)
    assert StoreSource(store).fetch(SPEC, "sm_120a") is None
    with entry_lock(entry.layer, KEY, exclusive=True, wait_s=0):
        pass


# ---- last use


def test_last_use_is_set_by_loading_at_most_once_a_minute(store: Store, publish: Callable[..., Entry]) -> None:
    entry = publish()
    source = StoreSource(store)

    def last_used() -> float:
        found = next(store.entries()).last_used
        assert found is not None
        return found

    os.utime(manifest_path(entry), (1_700_000_000, 1_700_000_000))
    assert last_used() == 1_700_000_000
    source.fetch(SPEC, "sm_120a")
    assert abs(last_used() - time.time()) < 30
    recent = time.time() - 40
    os.utime(manifest_path(entry), (recent, recent))
    source.fetch(SPEC, "sm_120a")
    assert last_used() == pytest.approx(recent, abs=1e-3), "40 s ago is recent enough"
    os.utime(manifest_path(entry), (time.time() + 1e6, time.time() + 1e6))
    source.fetch(SPEC, "sm_120a")
    assert abs(last_used() - time.time()) < 30, "a time to come is no last use"


def test_looking_is_not_using(store: Store, publish: Callable[..., Entry]) -> None:
    entry = publish()
    os.utime(manifest_path(entry), (1_700_000_000, 1_700_000_000))
    assert isinstance(store.lookup(SPEC, "sm_120a"), Hit)
    examine(entry)
    list(store.entries())
    assert manifest_path(entry).stat().st_mtime == 1_700_000_000


def test_an_unset_time_is_an_unknown_last_use(store: Store, publish: Callable[..., Entry]) -> None:
    entry = publish()
    os.utime(manifest_path(entry), (0, 0))
    assert next(store.entries()).last_used is None


# ---- the functions themselves

TWO_AND_REPAIRED = """
import json, os, shutil, sys, tiny
from pathlib import Path
from mlactl.cache.publish import compile_and_publish
from mlactl.cache.store import Store
from mlactl.kernels import runtime
from mlactl.opening import open_runtime

tiny.register()
root, prebuilt = sys.argv[1], tiny.Prebuilt(Path(sys.argv[2]))

def said_by(function):
    try:
        function()
    except TypeError as error:
        return str(error).partition("when calling: ")[2]

def descriptors():
    return sorted(os.listdir("/proc/self/fd"))

store = open_runtime(root, frozen=True)
compile_and_publish(store, tiny.spec(2, "f32"), "sm_120a", compiler=tiny.copying(prebuilt.impostor))
compile_and_publish(store, tiny.spec(3, "f32"), "sm_120a", compiler=prebuilt.compiler())
compile_and_publish(store, tiny.spec(3, "i32"), "sm_120a", compiler=prebuilt.compiler())
heard = {"impostor": said_by(runtime.launch(tiny.spec(2, "f32"), "sm_120a"))}
open_runtime(root, frozen=True)  # forgets what was loaded, so its descriptors are used again
before = descriptors()
heard["f32"] = said_by(runtime.launch(tiny.spec(3, "f32"), "sm_120a"))
open_runtime(root, frozen=True)
assert descriptors() == before, "the lease was closed: the next one takes the same numbers"
heard["i32"] = said_by(runtime.launch(tiny.spec(3, "i32"), "sm_120a"))
(found,) = [entry for entry in store.entries() if entry.manifest.spec == tiny.spec(2, "f32")]
found.object_path.write_bytes(b"damaged")
compile_and_publish(store, tiny.spec(2, "f32"), "sm_120a", compiler=prebuilt.compiler())
heard["repaired"] = said_by(runtime.launch(tiny.spec(2, "f32"), "sm_120a"))
function = runtime.launch(tiny.spec(2, "f32"), "sm_120a")
assert function is runtime.launch(tiny.spec(2, "f32"), "sm_120a"), "loaded once"
shutil.rmtree(root)
heard["root deleted"] = said_by(function)
print(json.dumps(heard))
"""


def test_each_entry_gives_its_own_function(prebuilt: tiny.Prebuilt, tmp_path: Path) -> None:
    """The dynamic loader matches libraries by name: two objects loaded through one reused /proc/self/fd path were both the first."""
    pytest.importorskip("tvm_ffi")
    (tmp_path / "tmp").mkdir()
    ran = tiny.run_python(TWO_AND_REPAIRED, str(tmp_path / "cache"), str(prebuilt.folder), env={**os.environ, "TMPDIR": str(tmp_path / "tmp")})
    f32, i32 = (f"`__call__(x: Tensor([n0], {dtype}), y: Tensor([n1], {dtype}))`" for dtype in ("float32", "int32"))
    assert json.loads(ran.stdout) == {"impostor": i32, "f32": f32, "i32": i32, "repaired": f32, "root deleted": f32}
    assert list((tmp_path / "tmp").iterdir()) == [], "the private copies are gone"
