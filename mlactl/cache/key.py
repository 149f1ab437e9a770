"""The cache key: SHA-256 over everything that decides an object's machine code, and over nothing else."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

import msgspec

from mlactl.cache import toolchain as toolchains
from mlactl.cache.toolchain import Toolchain
from mlactl.errors import EnvironmentUnfit
from mlactl.kernels import registry
from mlactl.kernels.compiler import compile_options
from mlactl.kernels.spec import CompileSpec, canonical_json

KEY_FORMAT = 1
"""Version of the key's own format; bump it when a field is added or its meaning changes."""


@dataclass(frozen=True, slots=True)
class KeyInputs:
    """Every field of the key (docs/cache-format.md says what each invalidates)."""

    format: int
    spec: CompileSpec
    arch: str
    host_arch: str
    sources_digest: str
    toolchain: Toolchain
    options: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        """The object whose canonical JSON is hashed."""
        return {
            "format": self.format,
            "spec": self.spec.as_json(),
            "arch": self.arch,
            "host_arch": self.host_arch,
            "sources_digest": self.sources_digest,
            "toolchain": self.toolchain.as_json(),
            "options": list(self.options),
        }

    def key(self) -> str:
        """64 lower-case hex digits."""
        return hashlib.sha256(canonical_bytes(self.as_json())).hexdigest()


def host_arch() -> str:
    """Architecture of the host code inside an object (x86_64, aarch64): objects are for the host kind they were made on."""
    return os.uname().machine


def inputs_for(spec: CompileSpec, arch: str, toolchain: Toolchain | None = None) -> KeyInputs:
    """What this install would compile (spec, arch) from, with its own toolchain unless one is given.

    Raises SpecError for an unknown kernel id and EnvironmentUnfit for an unsupported arch, or when no toolchain is given
    and none is installed.
    """
    options = compile_options(arch)
    found = toolchain or toolchains.current()
    if found is None:
        raise EnvironmentUnfit(
            f"no compiler here: {toolchains.absence()}", hint="pip install 'nvidia-cutlass-dsl[cu13]==4.8.1', or bring a warmed cache"
        )
    return KeyInputs(KEY_FORMAT, spec, arch, host_arch(), registry.sources_digest(spec.kernel_id), found, options)


def symbol_for(key: str) -> str:
    """Name of the function that an entry's object exports."""
    return f"mlactl_{key}"


def differences(ours: KeyInputs, theirs: KeyInputs) -> tuple[tuple[str, object, object], ...]:
    """(field, our value, their value) of every key field that differs, nested ones as `spec.facts.tile`, in a fixed order."""
    return tuple(_differences("", ours.as_json(), theirs.as_json()))


def _differences(prefix: str, ours: dict[str, object], theirs: dict[str, object]) -> list[tuple[str, object, object]]:
    found: list[tuple[str, object, object]] = []
    for name in dict.fromkeys([*ours, *theirs]):
        mine, other = ours.get(name), theirs.get(name)
        if isinstance(mine, dict) and isinstance(other, dict):
            found += _differences(f"{prefix}{name}.", mine, other)
        elif type(mine) is not type(other) or mine != other:
            found.append((prefix + name, mine, other))
    return found


def canonical_bytes(value: object) -> bytes:
    """`canonical_json` as bytes, an order of magnitude faster: a listing recomputes the key of every entry."""
    data = msgspec.json.encode(value, order="sorted")
    # The two encoders spell printable ASCII alike (a test holds them to it); anything else goes the slow way.
    return data if data.isascii() and b"\x7f" not in data else canonical_json(msgspec.json.decode(data)).encode()
