"""What loading an object needs besides the object: two libraries that fit it, and a private folder whose files may be executed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec

from mlactl.cache.bundle import packages
from mlactl.cache.manifest import BadManifest
from mlactl.cache.toolchain import Toolchain
from mlactl.cache.tools import temporary_folder
from mlactl.cache.trust import describe
from mlactl.doctor.findings import Finding, Severity
from mlactl.doctor.situation import Situation
from mlactl.errors import MlactlError
from mlactl.kernels.runtime import runtime_library

Needs = dict[str, Counter[packages.Need]]
"""By package, what is needed of it and is installed, and how many of the objects that a launch here loads need that."""


def check(situation: Situation) -> Iterator[Finding]:
    """The libraries for the objects that a launch here loads, and the temporary folder."""
    made_by = _toolchains(situation)
    needed = _needs(made_by)
    yield from _tvm_ffi(situation, needed.get(packages.TVM_FFI, Counter()))
    yield from _runtime(sorted({tools.flavour for tools in made_by}) or ["cu13"], needed)
    yield from _temporary(situation)


def _toolchains(situation: Situation) -> Counter[Toolchain]:
    """What made the objects that a launch here loads, and how many each; where there is a compiler, itself alone."""
    if situation.toolchain is not None:
        return Counter({situation.toolchain: len(situation.loadable)})
    # Where no lookup finds anything, what is there for these targets says what this node was meant to load.
    entries = situation.loadable or [entry for entry in situation.good if entry.manifest is not None and entry.manifest.arch in situation.arches]
    return Counter(entry.manifest.toolchain for entry in entries if entry.manifest is not None)


def _needs(made_by: Counter[Toolchain]) -> Needs:
    """What `cache import` says is needed for these objects; a toolchain that names no version of a package says nothing."""
    found: Needs = {}
    for tools, number in made_by.items():
        with suppress(BadManifest):
            for need in packages.needs(packages.required((tools,))):
                found.setdefault(need.name, Counter())[need] += number
    return found


def _tvm_ffi(situation: Situation, needs: Counter[packages.Need]) -> Iterator[Finding]:
    """tvm-ffi is there, and of the ABI that the objects call it by."""
    if find_spec("tvm_ffi") is None:
        what = "apache-tvm-ffi is not installed: no object can be loaded, and none compiled"
        fix = _install(needs) or "pip install apache-tvm-ffi"
        yield Finding("loading", Severity.FATAL, "tvm-ffi", what, "the library that objects are called through", fix)
        return
    for need, number in needs.items():
        if need.installed is None or need.fits:
            continue
        installed, abi = f"{need.name} {need.installed} is installed", _abi(need.version.removeprefix(">=").partition(",")[0])
        severity, check = Severity.WARNING, "tvm-ffi-old"
        what = f"{installed}, older than any that objects of ABI {abi} were tried with"
        if _abi(need.installed) != abi:
            # With objects of several, a launch may load another.
            severity = Severity.ERROR if situation.build_node or len(needs) > 1 else Severity.FATAL
            check, what = "tvm-ffi-abi", f"{installed}, and objects for this node ({number}) call it by ABI {abi}: they cannot be loaded"
        yield Finding("loading", severity, check, what, f"{need.name}{need.version}", _install([need]))


def _abi(version: str) -> str:
    """`0.1` of 0.1.15.post2, as `Toolchain.tvm_ffi_abi`."""
    return ".".join(version.split(".")[:2])


def _install(needs: Iterable[packages.Need]) -> str:
    return "; ".join(packages.install_commands(need for need in needs if not need.fits))


def _runtime(flavours: Sequence[str], needed: Needs) -> Iterator[Finding]:
    """The DSL's runtime library of each flavour: there, and of the version that the objects were made with."""
    lacking: list[tuple[str, str, str]] = []
    for flavour in flavours:
        needs = needed.get(f"{packages.LIBRARIES}{flavour}", Counter())
        try:
            path = runtime_library(flavour)
        except MlactlError as error:
            lacking.append((flavour, error.message, _install(needs) or error.hint or f"pip install --no-deps nvidia-cutlass-dsl-libs-{flavour}"))
            continue
        yield Finding("loading", Severity.OK, "runtime-library", f"runtime library of {flavour}: {path}")
        for need, number in needs.items():
            if need.installed is not None and not need.fits:
                made_with = need.version.removeprefix("==")
                what = f"{need.name} {need.installed} is installed, and objects for this node ({number}) were made with {made_with}"
                yield Finding("loading", Severity.ERROR, "runtime-version", what, f"{need.name}{need.version}", _install([need]))
    severity = Severity.FATAL if len(lacking) == len(flavours) else Severity.ERROR
    for flavour, fault, fix in lacking:
        yield Finding("loading", severity, "runtime-library", f"{fault}: objects of {flavour} cannot be loaded", "the wheel that holds it", fix)


def _temporary(situation: Situation) -> Iterator[Finding]:
    """Checked bytes are loaded through a private folder made in TMPDIR; the dynamic loader maps them executable."""
    folder = temporary_folder(situation.environ)
    fix = "TMPDIR=DIR, a folder that this user may write, on a filesystem mounted without noexec"
    if not os.access(folder, os.W_OK | os.X_OK):
        what = f"{describe(folder)} cannot be written: objects are loaded through a private folder there"
        yield Finding("loading", Severity.FATAL, "temporary-folder", what, "a temporary folder", fix)
    elif mount_flags(str(folder)) & os.ST_NOEXEC:
        what = f"{folder} is mounted noexec: an object is loaded through a private folder there, and would not load"
        yield Finding("loading", Severity.FATAL, "temporary-noexec", what, "a temporary folder whose files may be executed", fix)
    else:
        yield Finding("loading", Severity.OK, "temporary-folder", f"objects load through {folder}")


def mount_flags(path: str) -> int:
    """Mount flags of the filesystem that a path is on."""
    return os.statvfs(path).f_flag
