"""What compiles here: versions, flavour and calling convention, read from installed files without importing the compiler.

A lookup needs the toolchain for the cache key and must cost milliseconds, while importing the compiler costs a second.
The compile worker asserts that the compiler it really got has the flavour found here.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

_IR_LIBRARY = re.compile(r"^_cutlass_ir\.cu(\d+)\..*\.so$")
_DISTRIBUTION = re.compile(r"^(nvidia_cutlass_dsl[^-]*)-([^-]+)\.dist-info$")
_TVM_FFI_DISTRIBUTION = re.compile(r"^(apache_tvm_ffi)-([^-]+)\.dist-info$")


@dataclass(frozen=True, slots=True)
class Toolchain:
    """The compiler as far as it decides machine code and calling convention.

    `distributions` holds (name, version) of every installed nvidia-cutlass-dsl* distribution, sorted; `flavour` is the
    compiler library that the DSL picks at import (cu12 or cu13: they give different machine code); `tvm_ffi_abi` is the
    major.minor of apache-tvm-ffi, whose 0.1.x releases share one ABI.
    """

    distributions: tuple[tuple[str, str], ...]
    flavour: str
    tvm_ffi_abi: str

    def as_json(self) -> dict[str, object]:
        """The shape used in keys, manifests and `--json` output."""
        return {"distributions": dict(self.distributions), "flavour": self.flavour, "tvm_ffi_abi": self.tvm_ffi_abi}

    def label(self) -> str:
        """One line for people: `nvidia-cutlass-dsl 4.8.1 cu13, tvm-ffi 0.1`."""
        versions = dict(self.distributions)
        name = "nvidia-cutlass-dsl" if "nvidia-cutlass-dsl" in versions else next(iter(versions), "nvidia-cutlass-dsl")
        return f"{name} {versions.get(name, '?')} {self.flavour}, tvm-ffi {self.tvm_ffi_abi}"


def current() -> Toolchain | None:
    """The toolchain that a compile in this process would use; None when nothing here can compile (`absence` says why)."""
    found = _probe()
    return found if isinstance(found, Toolchain) else None


def absence() -> str:
    """Why `current` is None, in a few words; empty when it is not."""
    found = _probe()
    return found if isinstance(found, str) else ""


def python_minor() -> str:
    """`3.11`: recorded in manifests, because tracing runs Python code, but not part of the key."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def pick_flavour(installed: set[int], driver: int | None) -> int | None:
    """The toolkit major the DSL picks: the newest that the driver (cuDriverGetVersion, 13010 is 13.1) supports, or without a driver the newest.

    Source: `cutlass/_mlir/_mlir_libs/__init__.py` of nvidia-cutlass-dsl 4.8.1, which does this at import and refuses to
    be imported when the driver supports none (None here).
    """
    usable = installed if driver is None else {major for major in installed if driver // 1000 >= major}
    return max(usable, default=None)


@lru_cache(maxsize=1)
def _probe() -> Toolchain | str:
    distributions = _distributions(_DISTRIBUTION)
    if not distributions:
        return "nvidia-cutlass-dsl is not installed"
    installed = _installed_flavours()
    if not installed:
        return "nvidia-cutlass-dsl is installed without a compiler library"
    tvm_ffi = _distributions(_TVM_FFI_DISTRIBUTION)
    if not tvm_ffi:
        return "apache-tvm-ffi is not installed"
    driver = _driver_version()
    flavour = pick_flavour(installed, driver)
    if flavour is None:
        names = ", ".join(f"cu{major}" for major in sorted(installed))
        return f"the CUDA driver supports up to CUDA {(driver or 0) // 1000}, the installed compiler libraries are {names}"
    abi = ".".join(tvm_ffi[0][1].split(".")[:2])
    return Toolchain(distributions, f"cu{flavour}", abi)


def _distributions(pattern: re.Pattern[str]) -> tuple[tuple[str, str], ...]:
    """(name, version) of installed distributions, from the names of their metadata folders; the first on sys.path counts.

    importlib.metadata would parse the metadata of everything installed, which costs more than a whole lookup.
    """
    found: dict[str, str] = {}
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for name in names:
            match = pattern.match(name)
            if match:
                found.setdefault(match[1].replace("_", "-"), match[2])
    return tuple(sorted(found.items()))


def _installed_flavours() -> set[int]:
    package = find_spec("cutlass")  # finds the folder, imports nothing
    majors: set[int] = set()
    for base in (package.submodule_search_locations or []) if package else []:
        try:
            names = os.listdir(Path(base) / "_mlir" / "_mlir_libs")
        except OSError:
            continue
        majors.update(int(match[1]) for match in map(_IR_LIBRARY.match, names) if match)
    return majors


def _driver_version() -> int | None:
    """What the CUDA driver supports, 13010 for 13.1; None without a driver. Makes no context."""
    version = ctypes.c_int(0)
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
            return version.value
    except (OSError, AttributeError):
        pass
    return None
