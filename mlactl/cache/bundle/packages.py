"""The packages that a node without the compiler needs to load objects, and which of them it has.

Loading takes apache-tvm-ffi and `libcute_dsl_runtime.so`. That library ships in the compiler's wheel of its flavour,
`nvidia-cutlass-dsl-libs-cu12` or `-cu13` (`kernels/runtime.py` finds it there); its licence keeps it out of bundles.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from mlactl.cache.manifest import BadManifest
from mlactl.cache.toolchain import Toolchain

TVM_FFI = "apache-tvm-ffi"
LIBRARIES = "nvidia-cutlass-dsl-libs-"
TVM_FFI_FLOORS = {"0.1": "0.1.15.post2"}
"""The oldest release of each ABI that this project is tested with, as in pyproject.toml."""

_VERSION = re.compile(r"[0-9][0-9A-Za-z.+!]{0,63}")
_ABI = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})")


class Requirement(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One package; `version` is what follows the name in a requirement: `==4.8.1`, `>=0.1.15.post2,<0.2`."""

    name: str
    version: str


@dataclass(frozen=True, slots=True)
class Need:
    """A requirement beside what is installed here: a version, or None."""

    name: str
    version: str
    installed: str | None
    fits: bool


def required(toolchains: Iterable[Toolchain]) -> tuple[Requirement, ...]:
    """What loads objects of these toolchains, by name; raises BadManifest for a version that no package can have."""
    found = {pair for tools in toolchains for pair in _required(tools)}
    return tuple(Requirement(name, wanted) for name, wanted in sorted(found))


@lru_cache(maxsize=256)
def _required(tools: Toolchain) -> tuple[tuple[str, str], tuple[str, str]]:
    versions = dict(tools.distributions)
    name = f"{LIBRARIES}{tools.flavour}"
    exact = versions.get(name) or versions.get("nvidia-cutlass-dsl") or ""
    abi = _ABI.fullmatch(tools.tvm_ffi_abi)
    # What is printed as a command must not be able to say anything but a version.
    if not _VERSION.fullmatch(exact) or abi is None:
        raise BadManifest(f"toolchain names no version of {name} or of tvm-ffi that a package can have: {tools.label()[:120]}")
    floor = TVM_FFI_FLOORS.get(tools.tvm_ffi_abi, tools.tvm_ffi_abi)
    return (TVM_FFI, f">={floor},<{abi[1]}.{int(abi[2]) + 1}"), (name, f"=={exact}")


def needs(requirements: Iterable[Requirement]) -> tuple[Need, ...]:
    """Each requirement with what this interpreter has installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for wanted in requirements:
        try:
            installed: str | None = version(wanted.name)
        except PackageNotFoundError:
            installed = None
        found.append(Need(wanted.name, wanted.version, installed, installed is not None and _fits(installed, wanted.version)))
    return tuple(found)


def install_commands(missing: Iterable[Need]) -> tuple[str, ...]:
    """The pip command of each package that does not fit; of the libraries the wheel alone, whose dependencies are the compiler."""
    commands = []
    for need in missing:
        options = "--no-deps " if need.name.startswith(LIBRARIES) else ""
        commands.append(f"pip install {options}{shlex.quote(need.name + need.version)}")
    return tuple(commands)


def _fits(installed: str, wanted: str) -> bool:
    if wanted.startswith("=="):
        return installed == wanted[2:]
    floor, _, ceiling = wanted.removeprefix(">=").partition(",<")
    return _release(floor) <= _release(installed) < _release(ceiling)


def _release(text: str) -> tuple[tuple[int, ...], int]:
    """Release numbers and post-release number of a version; pre-releases count as the release."""
    match = re.match(r"([0-9]+(?:\.[0-9]+)*)(?:\.post([0-9]+))?", text)
    if match is None:
        return (), 0
    return tuple(int(part) for part in match[1].split(".")), int(match[2] or 0)
