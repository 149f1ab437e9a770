"""Loads cached objects and launches them; says, as two protocols, what it needs from whoever keeps objects and records calls.

The kernels know nothing of the cache or of captures: `configure` injects both. With nothing injected a launch that
needs an object is an error.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from mlactl.kernels.errors import BadObject, EnvironmentUnfit, MissingObject
from mlactl.kernels.spec import CompileSpec

Launch = Callable[..., None]


@dataclass(frozen=True, slots=True)
class VerifiedObject:
    """The bytes of one linked object, read and digest-checked on one descriptor.

    `lease` keeps the entry marked as in use for as long as it is referenced (a shared lock); None on a layer that
    cannot be locked. `origin` is where the bytes came from, for messages only: the path is never opened again. `spec` and
    `arch` are what its manifest says they are: a launch compares them with what it asked for.
    """

    key: str
    spec: CompileSpec
    arch: str
    symbol: str
    flavour: str
    data: bytes
    origin: str
    lease: object | None


class ObjectSource(Protocol):
    """Where objects come from."""

    def fetch(self, spec: CompileSpec, arch: str) -> VerifiedObject | None:
        """The object of (spec, arch), or None when there is none that can be used."""

    def compile(self, spec: CompileSpec, arch: str) -> VerifiedObject:
        """Compiles, publishes and returns the object; raises CompileFailed, NotBuiltYet or EnvironmentUnfit."""

    def describe_miss(self, spec: CompileSpec, arch: str) -> str:
        """One line naming the key that was looked for and why nothing usable was found."""


class CallRecorder(Protocol):
    """Who records a call: `before` sees the inputs and returns a token that `after` gets with the outputs."""

    def before(self, call: object) -> object:
        """Called ahead of the launches with the binding; returns a token."""

    def after(self, token: object, output: Any, lse: Any) -> None:
        """Called after the launches with `before`'s token and the outputs."""


@dataclass(slots=True)
class _State:
    source: ObjectSource | None = None
    recorder: CallRecorder | None = None
    frozen: bool = False


_state = _State()
_lock = threading.Lock()
_loaded: dict[tuple[CompileSpec, str], tuple[Launch, object, object | None]] = {}
_serial = itertools.count()
_runtime_flavour: str | None = None


def configure(source: ObjectSource | None, recorder: CallRecorder | None = None, *, frozen: bool = False) -> None:
    """Injects where objects come from and who records calls; forgets functions loaded from an earlier source."""
    with _lock:
        _state.source, _state.recorder, _state.frozen = source, recorder, frozen
        _loaded.clear()


def freeze() -> None:
    """From now on a missing object is an error that names the key and the warmup command, never a compile."""
    _state.frozen = True


def recorder() -> CallRecorder | None:
    """Who records calls, if anyone: a launch path tests this once and does nothing else when it is None."""
    return _state.recorder


def record_with(recorder: CallRecorder | None) -> CallRecorder | None:
    """Changes who records calls and returns who did; loaded functions stay."""
    previous, _state.recorder = _state.recorder, recorder
    return previous


def launch(spec: CompileSpec, arch: str, *, may_compile: bool = True) -> Launch:
    """The function of (spec, arch), loaded at most once a process.

    `may_compile=False` (inside graph capture), `freeze()` or a frozen configuration turn a miss into MissingObject.
    Raises BadObject for an object of another variant or without its symbol and EnvironmentUnfit when the loader's libraries are not there.
    """
    found = _loaded.get((spec, arch))
    if found is None:
        with _lock:
            found = _loaded.get((spec, arch))
            if found is None:
                found = _load_object(_matching(_obtain(spec, arch, may_compile), spec, arch))
                _loaded[spec, arch] = found
    return found[0]


def _matching(found: VerifiedObject, spec: CompileSpec, arch: str) -> VerifiedObject:
    """The object, if its manifest says that it is the one asked for; raises BadObject otherwise.

    Identity code once served launches with real scales because a look-up left out one fact: whatever an object source
    compares, another variant is refused here.
    """
    if (found.spec, found.arch) != (spec, arch):
        raise BadObject(
            f"{found.origin} is {found.spec.label()} for {found.arch}; asked for {spec.label()} for {arch}",
            hint=f"mlactl cache verify; mlactl cache show {found.key}",
        )
    return found


def _obtain(spec: CompileSpec, arch: str, may_compile: bool) -> VerifiedObject:
    source = _state.source
    if source is None:
        raise MissingObject(f"{spec.label()} for {arch}: no source of compiled objects was opened", hint="call mlactl.opening.open_runtime() first")
    found = source.fetch(spec, arch)
    if found is not None:
        return found
    if _state.frozen or not may_compile:
        why = "this process is frozen" if _state.frozen else "a CUDA graph is being captured"
        raise MissingObject(
            f"{source.describe_miss(spec, arch)}; {why}, so it is not compiled now",
            hint=f"mlactl warmup --profile PROFILE --arch {arch}",
        )
    return source.compile(spec, arch)


def _load_object(found: VerifiedObject) -> tuple[Launch, object, object | None]:
    """Loads the checked bytes themselves, through a private folder and under a name this process never used before.

    The dynamic loader matches libraries by name: two objects loaded through one reused name would both give the first.
    """
    _load_runtime(found.flavour)
    import tvm_ffi

    folder = Path(tempfile.mkdtemp(prefix="mlactl-"))  # mkdtemp makes it 0700
    try:
        path = folder / f"{found.key}-{os.getpid()}-{next(_serial)}.so"
        path.write_bytes(found.data)
        try:
            module = tvm_ffi.load_module(str(path))
            function = module.get_function(found.symbol)
        except Exception as error:
            raise BadObject(
                f"{found.origin} could not be loaded as {found.symbol}: {error}", hint=f"mlactl cache verify; mlactl cache show {found.key}"
            ) from error
        if function is None:
            raise BadObject(f"{found.origin} holds no function {found.symbol}", hint=f"mlactl cache verify; mlactl cache show {found.key}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return function, module, found.lease


def _load_runtime(flavour: str) -> None:
    """Loads the compiler's small runtime library of that flavour, once; the compiler itself is not needed for it."""
    global _runtime_flavour
    if _runtime_flavour is None:
        path = runtime_library(flavour)
        if find_spec("tvm_ffi") is None:
            raise EnvironmentUnfit("apache-tvm-ffi is not installed", hint="pip install apache-tvm-ffi")
        import tvm_ffi  # noqa: F401  its library provides symbols the runtime library and the objects resolve against

        ctypes.CDLL(os.fspath(path), mode=ctypes.RTLD_GLOBAL)
        _runtime_flavour = flavour
    elif _runtime_flavour != flavour:
        raise EnvironmentUnfit(
            f"an object needs the {flavour} runtime library, this process already loaded {_runtime_flavour}",
            hint="mlactl cache stats shows which toolchains warmed this cache",
        )


def runtime_library(flavour: str) -> Path:
    """Path of libcute_dsl_runtime.so of that flavour; raises EnvironmentUnfit naming the wheel that has it."""
    found = find_spec("nvidia_cutlass_dsl")  # finds the folder without importing anything
    for base in (found.submodule_search_locations or []) if found else []:
        path = Path(base) / flavour / "lib" / "libcute_dsl_runtime.so"
        if path.is_file():
            return path
    # The wheel alone: what it depends on is the compiler, which loading does not need.
    wheel = f"nvidia-cutlass-dsl-libs-{flavour}==4.8.1"
    raise EnvironmentUnfit(f"libcute_dsl_runtime.so of flavour {flavour} was not found", hint=f"pip install --no-deps {wheel}")
