"""What a compile cache can be asked, whichever tool wrote it: list, show, verify, explain, prune, set aside.

Commands talk to a `CacheAdapter`; our own store and each foreign format implement one. Entries of all of them have the
same fields, so that filters, selectors, listings and the audit are written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol


class RootKind(StrEnum):
    """Which tool wrote a cache root, in the words of `--root-kind`."""

    MLACTL = "mlactl"
    B12X = "b12x"


class SpecView(Protocol):
    """The compile spec that a manifest names. `facts` are in the manifest's order; foreign ones may hold lists (tensor facts)."""

    @property
    def kernel_id(self) -> str:
        """Dotted kernel id; the numbering of `version` is the tool's own."""

    @property
    def version(self) -> int:
        """Spec version."""

    @property
    def facts(self) -> tuple[tuple[str, Any], ...]:
        """(name, value) of every fact."""

    def label(self) -> str:
        """One line for people."""

    def as_json(self) -> dict[str, Any]:
        """`kernel_id`, `version` and `facts` as an object."""


class ManifestView(Protocol):
    """What a listing needs of a manifest; `arch` and `created` are empty where the format does not record them."""

    @property
    def spec(self) -> SpecView:
        """What was compiled."""

    @property
    def arch(self) -> str:
        """`sm_120a`."""

    @property
    def created(self) -> str:
        """ISO 8601 in UTC."""


class CacheEntry(Protocol):
    """One entry of a root, or a temporary that a writer left (`residue` is its file name). `status` is a status word; `detail` says
    what is wrong when it is not ok; `object_bytes` is the size on disk; `last_used` seconds since 1970, None where unknown."""

    @property
    def key(self) -> str:
        """64 hex digits."""

    @property
    def root(self) -> Path:
        """The root folder that the entry is in."""

    @property
    def manifest(self) -> ManifestView | None:
        """None where there is none or it cannot be read."""

    @property
    def status(self) -> str:
        """A status word of docs/cache-format.md."""

    @property
    def detail(self) -> str:
        """What is wrong; empty when nothing is."""

    @property
    def object_bytes(self) -> int | None:
        """Size of the object; None when it is not there."""

    @property
    def last_used(self) -> float | None:
        """Last use, seconds since 1970."""

    @property
    def residue(self) -> str:
        """Name of a temporary file; empty for an entry."""

    @property
    def object_path(self) -> Path:
        """The compiled object."""


class CacheAdapter(Protocol):
    """One or more roots of one kind. Nothing here imports torch or the compiler."""

    @property
    def kind(self) -> RootKind:
        """Whose format it is."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """Roots in the order they are searched."""

    def entries(self, *, on_problem: Callable[[str], None] | None = None) -> Sequence[CacheEntry]:
        """Every entry and temporary, by names, sizes and manifests; what is passed over is told to `on_problem`. Raises CannotRun."""

    def entry(self, prefix: str) -> CacheEntry:
        """The entry of a key or unique start of one; raises NotFound and UsageError."""

    def examine(self, entry: CacheEntry, *, digests_only: bool = False) -> CacheEntry:
        """The entry with the status of a full check of its object."""

    def read_object(self, entry: CacheEntry) -> bytes:
        """The object's bytes, read without following links; raises OSError."""

    def set_aside(self, entries: Iterable[CacheEntry]) -> Sequence[str]:
        """Quarantines entries so that the tool whose cache it is no longer loads them; returns the keys that now are. Raises CannotRun."""

    def put_back(self, entries: Iterable[CacheEntry]) -> Sequence[str]:
        """Undoes `set_aside`; returns the keys that are back. Raises CannotRun."""
