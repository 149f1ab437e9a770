"""What a compile cache can be asked, whichever tool wrote it: list, show, verify, explain, prune, set aside.

Commands talk to a `CacheAdapter`; our own store and each foreign format implement one. Entries of all of them have the
same fields, so that filters, selectors, listings and the audit are written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from mlactl.cache.removal import PrunePlan
    from mlactl.cache.selectors import Selectors
    from mlactl.kernels.spec import CompileSpec


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
        """Spec version; -1 where the format numbers none."""

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

    @property
    def object_sha256(self) -> str:
        """Digest of the object that was published."""


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


@dataclass(frozen=True, slots=True)
class KernelRow:
    """Resources of one device kernel: from the cubin, with the dynamic shared memory that the manifest records."""

    name: str
    registers: int
    frame_bytes: int
    local_bytes: int
    static_smem_bytes: int
    dynamic_smem_bytes: int | None


@dataclass(frozen=True, slots=True)
class Description:
    """An entry with the status of a full check: its manifest beside what its object says of itself.

    `lines` are (label, text) of what only this format records; `manifest` is the document to show as JSON. `symbols`,
    `signature` and `object_arch` are None, and `problem` says why, where the object cannot be read or has no such thing.
    """

    entry: CacheEntry
    manifest_path: Path | None
    manifest: dict[str, Any] | None
    lines: tuple[tuple[str, str], ...]
    kernels: tuple[KernelRow, ...]
    symbols: tuple[str, ...] | None
    signature: str | None
    object_arch: str | None
    problem: str


class CacheAdapter(Protocol):
    """One or more roots of one kind. Nothing here imports torch or the compiler."""

    @property
    def kind(self) -> RootKind:
        """Whose format it is."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """Roots in the order they are searched."""

    @property
    def writable(self) -> Path | None:
        """The root that removal works on; None when all are read-only layers."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a person should know about these roots before relying on them; one line each."""

    def entries(self, *, on_problem: Callable[[str], None] | None = None) -> Sequence[CacheEntry]:
        """Every entry and temporary, by names, sizes and manifests; what is passed over is told to `on_problem`. Raises CannotRun."""

    def entry(self, prefix: str) -> CacheEntry:
        """The entry of a key or unique start of one; raises NotFound and UsageError."""

    def entries_of(self, prefix: str) -> Sequence[CacheEntry]:
        """Every entry of the key that `entry` finds: of each layer that has it, and what is set aside. Raises what `entry` does."""

    def examine(self, entry: CacheEntry, *, digests_only: bool = False) -> CacheEntry:
        """The entry with the status of a full check of its object."""

    def in_place(self, entry: CacheEntry) -> CacheEntry:
        """A quarantined entry with the status that a full check would give it were it put back."""

    def masked(self, entry: CacheEntry) -> bool:
        """Whether the very object is set aside elsewhere in these roots, so that no lookup answers with this entry."""

    def verify(
        self, entries: Iterable[CacheEntry], *, digests_only: bool = False, on_done: Callable[[int], None] = lambda _steps: None
    ) -> Sequence[CacheEntry]:
        """`examine` of each, in order; what is being replaced or removed at this moment is not called damaged. Raises Interrupted on Ctrl-C."""

    def read_object(self, entry: CacheEntry) -> bytes:
        """The object's bytes, read without following links; raises OSError."""

    def row(self, entry: CacheEntry) -> dict[str, Any]:
        """One row of `cache ls --json`; what the format does not record is null."""

    def made_by(self, entry: CacheEntry) -> str | None:
        """The toolchain that made an entry, for statistics; None where no manifest tells."""

    def describe(self, entry: CacheEntry, *, show_secrets: bool = False) -> Description:
        """An entry in full; damage ends up in its status and `problem`. Recorded environment values only with `show_secrets`."""

    def plan(
        self,
        selectors: Selectors,
        *,
        keep: Iterable[CompileSpec] = (),
        include_prepared: bool = False,
        on_problem: Callable[[str], None] | None = None,
    ) -> PrunePlan:
        """What `cache prune` removes; `removal.apply` carries it out. Raises CannotRun, EnvironmentUnfit and UsageError."""

    def plan_entries(
        self, entries: Iterable[CacheEntry], *, include_prepared: bool = False, on_problem: Callable[[str], None] | None = None
    ) -> PrunePlan:
        """What `cache rm` removes: these entries of the writable root. Raises CannotRun."""

    def set_aside(self, entries: Iterable[CacheEntry]) -> Sequence[str]:
        """Quarantines entries so that the tool whose cache it is no longer loads them; returns the keys that now are. Raises CannotRun."""

    def put_back(self, entries: Iterable[CacheEntry]) -> Sequence[str]:
        """Undoes `set_aside`; returns the keys that are back. Raises CannotRun."""
