"""What loading an object needs besides the object: two libraries, and a private folder whose files may be executed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

from mlactl.cache.tools import temporary_folder
from mlactl.cache.trust import describe
from mlactl.doctor.findings import Finding, Severity
from mlactl.doctor.situation import Situation
from mlactl.errors import MlactlError
from mlactl.kernels.runtime import runtime_library


def check(situation: Situation) -> Iterator[Finding]:
    """The libraries for the flavours there are objects of, and the temporary folder."""
    if find_spec("tvm_ffi") is None:
        what = "apache-tvm-ffi is not installed: no object can be loaded, and none compiled"
        yield Finding("loading", Severity.FATAL, "tvm-ffi", what, "the library that objects are called through", "pip install apache-tvm-ffi")
    yield from _runtime(situation)
    yield from _temporary(situation)


def _runtime(situation: Situation) -> Iterator[Finding]:
    flavours = {
        entry.manifest.toolchain.flavour for entry in situation.good if entry.manifest is not None and entry.manifest.arch in situation.arches
    }
    if situation.toolchain is not None:
        # Where there is a compiler, only objects of its own flavour are ever looked up.
        flavours = {situation.toolchain.flavour}
    wanted = sorted(flavours) or ["cu13"]
    lacking: list[tuple[str, MlactlError]] = []
    for flavour in wanted:
        try:
            path = runtime_library(flavour)
            yield Finding("loading", Severity.OK, "runtime-library", f"runtime library of {flavour}: {path}")
        except MlactlError as error:
            lacking.append((flavour, error))
    severity = Severity.FATAL if len(lacking) == len(wanted) else Severity.ERROR
    for flavour, fault in lacking:
        what = f"{fault.message}: objects of {flavour} cannot be loaded"
        yield Finding("loading", severity, "runtime-library", what, "the wheel that holds it", fault.hint or "")


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
