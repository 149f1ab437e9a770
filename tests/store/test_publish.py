"""Publishing: one compile per key, nothing invalid, nothing half done."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny

from mlactl.cache import elf
from mlactl.cache import publish as publishing
from mlactl.cache.entry import examine
from mlactl.cache.key import inputs_for
from mlactl.cache.publish import compile_and_publish, find_linker
from mlactl.cache.store import Entry, Hit, Status, Store
from mlactl.errors import CannotRun, EnvironmentUnfit, UsageError
from mlactl.kernels import registry
from mlactl.kernels.errors import CompileFailed, NotBuiltYet, SpecError

KEY = inputs_for(tiny.spec(), "sm_120a").key()


def files(store: Store) -> list[str]:
    """Names of the entry files in the root, without locks."""
    return sorted(path.name for path in store.roots.layers[0].path.glob("v1/*/*") if path.suffix != ".lock")


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where compiling and linking happen."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


# ---- what is published


def test_an_entry_is_an_object_and_a_manifest_under_its_key(store: Store, prebuilt: tiny.Prebuilt, scratch: Path) -> None:
    result = compile_and_publish(store, tiny.spec(), "sm_120a", compiler=prebuilt.compiler())
    root = store.roots.layers[0].path
    assert result.compiled
    assert result.entry.status is Status.OK
    assert result.entry.object_path == root / "v1" / KEY[:2] / f"{KEY}.so"
    assert result.entry.manifest_path == root / "v1" / KEY[:2] / f"{KEY}.json"
    assert files(store) == [f"{KEY}.json", f"{KEY}.so"]
    assert list(scratch.iterdir()) == []
    data = result.entry.object_path.read_bytes()
    manifest = json.loads(result.entry.manifest_path.read_bytes())
    facts = elf.inspect(data)
    assert manifest["key"] == KEY
    assert manifest["spec"] == tiny.spec().as_json()
    assert manifest["object_sha256"] == hashlib.sha256(data).hexdigest()
    assert manifest["object_bytes"] == len(data)
    assert manifest["code_sha256"] == hashlib.sha256(prebuilt.path(f"mlactl_{KEY}").read_bytes()).hexdigest()
    assert manifest["symbol"] == f"mlactl_{KEY}" == facts.symbols[0]
    assert manifest["signature"] == "__call__(x: Tensor([n0], float32), y: Tensor([n1], float32))" == facts.signature
    assert manifest["options"] == ["--gpu-arch sm_120a", "--enable-tvm-ffi"]
    assert manifest["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert manifest["linker"] == find_linker()[1]
    assert manifest["linker"].startswith("GNU ld")
    (kernel,) = manifest["resources"]
    assert (kernel["name"], kernel["registers"]) == (facts.kernels[0].name, facts.kernels[0].registers)
    assert kernel["registers"] > 0
    assert isinstance(store.lookup(tiny.spec(), "sm_120a"), Hit)


def test_the_launchs_shared_memory_comes_from_the_compiler(store: Store, prebuilt: tiny.Prebuilt) -> None:
    """It is in no ELF: only the kernel's builder knows what its launch asks for."""

    def compiler(spec: Any, arch: str, symbol: str, flavour: str, out: Path) -> int:
        prebuilt.compiler()(spec, arch, symbol, flavour, out)
        return 98_304

    entry = compile_and_publish(store, tiny.spec(), "sm_120a", compiler=compiler).entry
    assert entry.manifest is not None
    assert [kernel.dynamic_smem_bytes for kernel in entry.manifest.resources] == [98_304]
    entry = compile_and_publish(store, tiny.spec(3), "sm_120a", compiler=prebuilt.compiler()).entry
    assert entry.manifest is not None
    assert [kernel.dynamic_smem_bytes for kernel in entry.manifest.resources] == [None]


def test_publishing_again_compiles_nothing(store: Store, prebuilt: tiny.Prebuilt) -> None:
    compiled: list[str] = []
    first = compile_and_publish(store, tiny.spec(), "sm_120a", compiler=prebuilt.compiler(compiled.append))
    before = first.entry.object_path.stat()
    second = compile_and_publish(store, tiny.spec(), "sm_120a", compiler=prebuilt.compiler(compiled.append))
    assert compiled == [f"mlactl_{KEY}"]
    assert (second.compiled, second.entry.key) == (False, KEY)
    assert first.entry.object_path.stat().st_mtime_ns == before.st_mtime_ns


def test_the_same_object_gives_the_same_bytes_in_any_root(
    store: Store, publish: Callable[..., Entry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cc` wrote its version into objects, and a run path in the environment its machine's folders."""
    first = publish()
    monkeypatch.setenv("LD_RUN_PATH", "/opt/somewhere/lib")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    second = publish(into=Store.open(str(tmp_path / "other")))
    assert first.object_path.read_bytes() == second.object_path.read_bytes()
    assert b"/opt/somewhere" not in second.object_path.read_bytes()
    assert b"GCC" not in second.object_path.read_bytes()
    assert str(tmp_path).encode() not in second.object_path.read_bytes()


# ---- what is not


def fails(store: Store, compiler: Any, error: type[Exception] = CompileFailed, *, match: str) -> Exception:
    with pytest.raises(error, match=match) as raised:
        compile_and_publish(store, tiny.spec(), "sm_120a", compiler=compiler)
    assert files(store) == []
    return raised.value


def _raise(*_: object) -> None:
    raise RuntimeError("ptxas died")


def test_a_failing_compiler_publishes_nothing(store: Store, scratch: Path) -> None:
    error = fails(store, _raise, match=r"test\.tiny 1 dtype=f32 factor=2 for sm_120a: RuntimeError: ptxas died")
    assert error.exit_code == 1  # type: ignore[attr-defined]
    assert list(scratch.iterdir()) == []


def test_an_export_that_writes_nothing_fails(store: Store) -> None:
    """C9: warmup counted it as compiled, and the first request of the morning compiled it."""
    fails(store, lambda *_: None, match="reported success and wrote nothing")
    fails(store, lambda *arguments: arguments[4].touch(), match="reported success and wrote nothing")


def test_an_export_that_is_no_object_fails(store: Store) -> None:
    fails(store, lambda *arguments: arguments[4].write_bytes(b"not an object"), match="ld failed with exit code")


def test_an_object_of_another_arch_is_not_published(store: Store, prebuilt: tiny.Prebuilt) -> None:
    """C8, C10: the compiler took its target from the environment and the object was stored under the arch that was asked for."""
    fails(store, tiny.copying(prebuilt.sm_100a), match="not published: it is for sm_100a on .*, asked for was sm_120a on")


def test_an_object_of_another_key_is_not_published(store: Store, prebuilt: tiny.Prebuilt) -> None:
    other = f"mlactl_{inputs_for(tiny.spec(3), 'sm_120a').key()}"
    fails(store, tiny.copying(prebuilt.path(other)), match=f"not published: it exports {other}, expected mlactl_{KEY}")


def test_sources_that_change_while_compiling_fail(store: Store, prebuilt: tiny.Prebuilt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upgrade in the middle of a warmup stored the old code under the new sources' key."""
    source = tmp_path / "kernel.py"
    source.write_text("old")
    monkeypatch.setattr(registry, "SOURCE_ROOT", tmp_path)
    monkeypatch.setattr(registry, "KERNELS", {**registry.KERNELS, "test.tiny": replace(tiny.TINY, sources=("kernel.py",))})

    def compiler(spec: object, arch: str, symbol: str, flavour: str, out: Path) -> None:
        out.write_bytes(prebuilt.path(f"mlactl_{KEY}").read_bytes())
        source.write_text("new")

    fails(store, compiler, match="sources changed while it was being compiled")


def test_a_process_that_loaded_other_sources_does_not_compile(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long-lived process compiled with the modules it had imported before an upgrade, under the key of the new files."""
    monkeypatch.setitem(publishing._loaded_sources, "test.tiny", "00" * 32)
    with pytest.raises(CompileFailed, match="sources changed after this process loaded them"):
        compile_and_publish(store, tiny.spec(), "sm_120a")
    assert files(store) == []


def test_without_a_linker_the_environment_is_unfit(store: Store, prebuilt: tiny.Prebuilt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    compiled: list[str] = []
    error = fails(store, prebuilt.compiler(compiled.append), EnvironmentUnfit, match="no linker: ld is not in PATH")
    assert error.exit_code == 3  # type: ignore[attr-defined]
    assert compiled == []
    assert not store.roots.layers[0].path.exists()


def test_a_kernel_without_code_is_refused_before_anything_is_made(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    declared_only = replace(registry.SPARSE_DECODE, builder=None)
    monkeypatch.setitem(registry.KERNELS, declared_only.kernel_id, declared_only)
    spec = registry.SPARSE_DECODE.spec(tile="heads16", output="split", q_dtype="bf16", record="nvfp4_ds_mla_432", latent_scale_identity=1)
    with pytest.raises(NotBuiltYet, match="not built yet"):
        compile_and_publish(store, spec, "sm_120a")
    with pytest.raises(SpecError):
        compile_and_publish(store, replace(tiny.spec(), version=2), "sm_120a")
    assert not store.roots.layers[0].path.exists()


# ---- a full disk


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["open", "write", "fsync", "rename"])
@pytest.mark.parametrize("number", [1, 2])
def test_an_error_while_writing_leaves_a_valid_cache(
    store: Store, publish: Callable[..., Entry], prebuilt: tiny.Prebuilt, monkeypatch: pytest.MonkeyPatch, call: str, number: int, code: int
) -> None:
    """C13: the first or second temporary (object or manifest) meets a full disk, half way through its write."""
    neighbour = publish(tiny.spec(3))
    real, calls = getattr(os, call), []

    def failing(first: Any, *arguments: Any, **options: Any) -> Any:
        path = first if isinstance(first, str) else str(Path(f"/proc/self/fd/{first}").readlink())
        if ".tmp" not in path:
            return real(first, *arguments, **options)
        calls.append(path)
        if len(calls) == number:
            if call == "write":
                real(first, arguments[0][:100])
            raise OSError(code, os.strerror(code), path)
        return real(first, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing)
        with pytest.raises(CannotRun) as raised:
            compile_and_publish(store, tiny.spec(), "sm_120a", compiler=prebuilt.compiler())
    assert len(calls) == number
    assert f"cannot write {store.roots.layers[0].path}/v1/{KEY[:2]}/{KEY}." in raised.value.message
    assert raised.value.message.endswith(os.strerror(code))
    assert ("free some space" in (raised.value.hint or "")) == (code != errno.EIO)
    assert [name for name in files(store) if name.endswith(".tmp")] == []
    expected = [] if number == 1 else [(KEY, "no-manifest")]
    assert sorted((entry.key, str(entry.status)) for entry in store.entries()) == sorted([*expected, (neighbour.key, "ok")])
    assert publish().status is Status.OK
    assert isinstance(store.lookup(tiny.spec(), "sm_120a"), Hit)


# ---- rebuilding


def test_temporaries_of_the_key_are_cleared_and_others_kept(store: Store, publish: Callable[..., Entry], prebuilt: tiny.Prebuilt) -> None:
    other = publish(tiny.spec(3))
    old = other.object_path.with_name(f"{other.key}.1-00000000.tmp")
    old.write_bytes(b"of another key")
    bucket = store.roots.layers[0].path / "v1" / KEY[:2]
    bucket.mkdir(exist_ok=True)
    (bucket / f"{KEY}.1-00000000.tmp").write_bytes(b"left")
    (bucket / "notes.tmp").write_bytes(b"somebody's")
    assert [entry.status for entry in store.entries() if entry.key == KEY] == [Status.TEMP]
    publish()
    assert not (bucket / f"{KEY}.1-00000000.tmp").exists()
    assert (bucket / "notes.tmp").exists()
    assert old.exists()


def test_scratch_folders_of_killed_compiles_are_swept(publish: Callable[..., Entry], scratch: Path, tmp_path: Path) -> None:
    old, young = scratch / "mlactl-compile-old", scratch / "mlactl-compile-young"
    for folder in (old, young, tmp_path / "target", scratch / "something-else"):
        folder.mkdir()
        (folder / "object.o").write_bytes(b"x")
    (scratch / "mlactl-compile-link").symlink_to(tmp_path / "target")
    for folder in (old, tmp_path / "target", scratch / "something-else"):
        os.utime(folder, (1_700_000_000, 1_700_000_000))
    publish()
    assert sorted(path.name for path in scratch.iterdir()) == ["mlactl-compile-link", "mlactl-compile-young", "something-else"]
    assert (tmp_path / "target" / "object.o").exists()


REAL = """
import os, sys, tiny
from mlactl.cache.publish import compile_and_publish
from mlactl.cache.store import Store
store, arches, how = Store.open(sys.argv[1]), sys.argv[2].split(","), sys.argv[3]

def work():
    for arch in arches:
        assert compile_and_publish(store, tiny.spec(), arch).compiled

if how == "spawned":
    work()
else:
    import cutlass.cute
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.parametrize("how", ["spawned", "forked"])
def test_the_real_compiler_makes_what_was_asked_for_whatever_the_environment_says(
    store: Store, prebuilt: tiny.Prebuilt, how: str, tmp_path: Path
) -> None:
    """C10: CUTE_DSL_ARCH won over the option and 120a objects were labelled 121a. Also: objects are reproducible to the byte."""
    root = store.roots.layers[0].path
    environment = {**os.environ, "CUTE_DSL_ARCH": "sm_90a", "PYTHONHASHSEED": "7", "HOME": str(tmp_path)}
    tiny.run_python(REAL, str(root), "sm_120a,sm_121a", how, env=environment, cwd=tmp_path)
    found = {entry.manifest.arch: entry for entry in store.entries() if entry.manifest}
    assert sorted(found) == ["sm_120a", "sm_121a"]
    for arch, entry in found.items():
        assert examine(entry).status is Status.OK
        assert elf.identify(entry.object_path.read_bytes()).arch == arch
        assert entry.manifest is not None
        original = prebuilt.path(entry.manifest.symbol).read_bytes()
        assert entry.manifest.code_sha256 == hashlib.sha256(original).hexdigest()


VARIABLES = """
import os, sys, tiny
from mlactl.cache.publish import compile_and_publish
from mlactl.cache.store import Store
from mlactl.errors import EnvironmentUnfit
tiny.register()
store = Store.open(sys.argv[1])
for name, value in (("LINEINFO", "1"), ("COMPILER_OPT", "opt-level=0"), ("DEBUG", "1"), ("ENABLE_ASSERTIONS", "1")):
    os.environ["CUTE_DSL_" + name] = value
    try:
        compile_and_publish(store, tiny.spec(), "sm_120a")
    except EnvironmentUnfit as error:
        assert error.message == f"CUTE_DSL_{name}={value} would change the machine code without changing its key", error.message
        assert error.hint == f"unset CUTE_DSL_{name}"
    else:
        raise SystemExit(f"compiled with {name}")
    del os.environ["CUTE_DSL_" + name]
assert list(store.entries()) == []
assert "cutlass" not in sys.modules
"""


def test_variables_that_change_the_code_behind_the_keys_back_are_refused(tmp_path: Path) -> None:
    """One warmup with CUTE_DSL_COMPILER_OPT=opt-level=0 in its shell left unoptimised objects under the keys of good ones."""
    tiny.run_python(VARIABLES, str(tmp_path / "cache"))


def test_a_wrong_flavour_is_refused_by_the_real_compiler(tmp_path: Path) -> None:
    script = """
import sys, tiny
from dataclasses import replace
from mlactl.cache import toolchain
from mlactl.cache.publish import compile_and_publish
from mlactl.cache.store import Store
from mlactl.errors import EnvironmentUnfit
actual = toolchain.current()
toolchain._probe = lambda: replace(actual, flavour={"cu12": "cu13", "cu13": "cu12"}[actual.flavour])
store = Store.open(sys.argv[1])
try:
    compile_and_publish(store, tiny.spec(), "sm_120a")
except EnvironmentUnfit as error:
    assert actual.flavour in error.message, error.message
    assert list(store.entries()) == []
else:
    raise SystemExit("published under the wrong flavour")
"""
    tiny.run_python(script, str(tmp_path / "cache"))


# ---- many at once

RACER = """
import json, sys, tiny
from mlactl.cache.publish import compile_and_publish
from mlactl.cache.store import Store
from mlactl.kernels.errors import CompileFailed
root, objects, log, broken = sys.argv[1:]
prebuilt = tiny.Prebuilt(__import__("pathlib").Path(objects))

def note(symbol):
    with open(log, "ab", buffering=0) as file:
        file.write(symbol.encode() + b"\\n")

def failing(spec, arch, symbol, flavour, out):
    out.write_bytes(b"half an obj")
    raise RuntimeError("ptxas died")

compiler = failing if broken == "broken" else prebuilt.compiler(note)
store = Store.open(root)
print("ready", flush=True)
sys.stdin.readline()
outcomes = {}
for factor, dtype in tiny.ALL[:3] + ([tiny.ALL[5]] if broken == "broken" else []):
    try:
        result = compile_and_publish(store, tiny.spec(factor, dtype), "sm_120a", compiler=compiler)
        outcomes[result.entry.key] = "compiled" if result.compiled else "present"
    except CompileFailed as error:
        outcomes[f"{factor} {dtype}"] = error.message
print(json.dumps(outcomes))
"""


def test_sixteen_processes_compile_each_key_once(store: Store, prebuilt: tiny.Prebuilt, tmp_path: Path) -> None:
    """C4: on an empty root, at a barrier, one of them with a failing compiler, over a temporary from an earlier run."""
    root, log = store.roots.layers[0].path, tmp_path / "compiled"
    stale = root / "v1" / KEY[:2] / f"{KEY}.1-00000000.tmp"
    stale.parent.mkdir(parents=True, mode=0o700)
    stale.write_bytes(b"from an earlier run")
    code = f"import sys; sys.path.insert(0, {str(tiny.HERE)!r})\n{RACER}"
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(root), str(prebuilt.folder), str(log), "broken" if number == 7 else "whole"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number in range(16)
    ]  # fmt: skip
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    outcomes = []
    for racer in racers:
        stdout, stderr = racer.communicate(timeout=120)
        assert (racer.returncode, stderr) == (0, "")
        outcomes.append(json.loads(stdout))
    expected = {inputs_for(tiny.spec(factor, dtype), "sm_120a").key() for factor, dtype in tiny.ALL[:3]}
    assert sorted(log.read_text().split()) == sorted(f"mlactl_{key}" for key in expected), "one compile per key"
    whole = outcomes[:7] + outcomes[8:]
    assert all(set(outcome) == expected for outcome in whole)
    assert sum(value == "compiled" for outcome in whole for value in outcome.values()) == 3
    assert "RuntimeError: ptxas died" in outcomes[7]["5 i32"]
    assert all(value == "present" or "ptxas died" in value for value in outcomes[7].values())
    assert sorted(entry.key for entry in store.entries()) == sorted(expected)
    assert {examine(entry).status for entry in store.entries()} == {Status.OK}
    assert sorted(files(store)) == sorted(f"{key}.{suffix}" for key in expected for suffix in ("json", "so"))


def test_a_root_of_b12x_is_not_published_into(store: Store, prebuilt: tiny.Prebuilt) -> None:
    """A server that compiled on a miss left a folder that was a cache of both tools, which neither listed any more."""
    root, key = store.roots.layers[0].path, "ab" * 32
    (root / key[:2]).mkdir(parents=True)
    (root / key[:2] / f"{key}.o").write_bytes(b"x")
    fails(store, prebuilt.compiler(), UsageError, match="is a b12x cache, expected one of mlactl's own")
    assert [path.name for path in root.iterdir()] == [key[:2]]
