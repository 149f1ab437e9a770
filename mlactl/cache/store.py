"""The store: what entries there are, by name, size and manifest, and which of them answers a lookup."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from mlactl.cache.key import KeyInputs
from mlactl.cache.manifest import Manifest
from mlactl.cache.roots import Layer, Roots, resolve
from mlactl.kernels.spec import CompileSpec


class Status(StrEnum):
    """State of an entry, in the words every listing uses; anything but `ok` is a miss at load."""

    OK = "ok"
    NO_MANIFEST = "no-manifest"
    NO_OBJECT = "no-object"
    BAD_MANIFEST = "bad-manifest"
    SIZE = "size"
    DIGEST = "digest"
    ARCH = "arch"
    SYMBOL = "symbol"
    SIGNATURE = "signature"
    TEMP = "temp"
    LOCKED = "locked"
    QUARANTINED = "quarantined"


class Entry(msgspec.Struct, frozen=True):
    """One entry of one layer, or a temporary that a writer left (`residue` is its name in the bucket).

    `detail` says what is wrong when `status` is not ok. `object_bytes` is the size on disk; `last_used` the manifest's
    modification time in seconds since 1970, None when there is none to go by.
    """

    key: str
    layer: Layer
    manifest: Manifest | None
    status: Status
    detail: str = ""
    object_bytes: int | None = None
    last_used: float | None = None
    residue: str = ""

    @property
    def object_path(self) -> Path:
        """The linked object, or the temporary."""
        return Path(self.layer.bucket(self.key), self.residue or f"{self.key}.so")

    @property
    def manifest_path(self) -> Path:
        """The manifest (also where there is none yet)."""
        return Path(self.layer.bucket(self.key), f"{self.key}{'.quarantined' if self.status is Status.QUARANTINED else '.json'}")


@dataclass(frozen=True, slots=True)
class Hit:
    """A lookup's answer: an entry whose names, size and manifest are right."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Miss:
    """Nothing usable: `key` that was looked for (None when it cannot be known here), why, and the bad entries that were passed over."""

    key: str | None
    reason: str
    inputs: KeyInputs | None = None
    rejected: tuple[Entry, ...] = ()


class Store:
    """Entries of the layers of `roots`; the first layer that has a usable entry answers."""

    def __init__(self, roots: Roots) -> None:
        self.roots = roots

    @classmethod
    def open(cls, cache_dir: str | None = None) -> Store:
        """The store that `cache_dir` or the environment names; makes and reads nothing yet."""
        return cls(resolve(cache_dir))

    def entries(self, layers: Iterable[Layer] | None = None, *, on_problem: Callable[[str], None] | None = None) -> Iterator[Entry]:
        """Every entry and temporary, by layer and key; looks at names, sizes and manifests only.

        Raises CannotRun for a root that cannot be read; a bucket that cannot is passed over and told to `on_problem`.
        """
        raise NotImplementedError

    def entry(self, key: str, layers: Iterable[Layer] | None = None) -> Entry:
        """The entry of a key or unique prefix, from the first layer that has it.

        Raises NotFound when there is none and UsageError naming the keys when the prefix fits several.
        """
        raise NotImplementedError

    def entry_in(self, layer: Layer, key: str) -> Entry | None:
        """The entry of a full key in one layer; None when the layer has no file of it."""
        raise NotImplementedError

    def lookup(self, spec: CompileSpec, arch: str) -> Hit | Miss:
        """The entry that a launch of (spec, arch) would load here, judged by name, size and manifest.

        Without a compiler the toolchain is the one the root was warmed with; raises SeveralToolchains when it was
        warmed with several that differ.
        """
        raise NotImplementedError

    def touch(self, entry: Entry) -> None:
        """Sets an entry's last use to now unless that was within the last minute; on a read-only layer it does nothing."""
        raise NotImplementedError
