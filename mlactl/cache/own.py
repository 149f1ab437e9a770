"""Our own store behind the interface that the cache commands talk to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlactl.cache import listing, roots
from mlactl.cache.adapter import CacheEntry, Description, RootKind
from mlactl.cache.entry import Entry, examine, read_object
from mlactl.cache.store import Status, Store
from mlactl.errors import UsageError
from mlactl.kernels.spec import CompileSpec

if TYPE_CHECKING:
    from mlactl.cache.removal import PrunePlan
    from mlactl.cache.selectors import Selectors


class OwnCache:
    """The layers of a store (`adapter.CacheAdapter`); `store` is for what only our own roots can do."""

    kind = RootKind.MLACTL

    def __init__(self, store: Store) -> None:
        self.store = store

    @property
    def paths(self) -> tuple[Path, ...]:
        """Roots in the order they are searched."""
        return tuple(layer.path for layer in self.store.roots.layers)

    @property
    def writable(self) -> Path | None:
        """The root that is published to and removed from."""
        layer = self.store.roots.writable
        return layer.path if layer is not None else None

    @property
    def remarks(self) -> tuple[str, ...]:
        """Network filesystems, and shared roots that nobody can reach."""
        return tuple(roots.warnings(self.store.roots))

    # ---- what there is

    def entries(self, *, on_problem: Callable[[str], None] | None = None) -> list[Entry]:
        """Every entry and temporary of every layer; raises CannotRun when a root cannot be read."""
        return listing.collect(self.store, on_problem=on_problem)

    def entry(self, prefix: str) -> Entry:
        """The entry of a key or unique start of one, from the first layer that has it; raises NotFound and UsageError."""
        return self.store.entry(prefix)

    def entries_of(self, prefix: str) -> list[Entry]:
        """The entries of the key in every layer that has it; raises NotFound and UsageError."""
        key = self.store.entry(prefix).key
        return [entry for layer in self.store.roots.layers if (entry := self.store.entry_in(layer, key)) is not None]

    def row(self, entry: CacheEntry) -> dict[str, Any]:
        """One row of `cache ls --json`."""
        return listing.as_json(entry)

    def made_by(self, entry: CacheEntry) -> str | None:
        """The toolchain's label."""
        manifest = _ours(entry).manifest
        return manifest.toolchain.label() if manifest is not None else None

    # ---- looking closely

    def examine(self, entry: CacheEntry, *, digests_only: bool = False) -> Entry:
        """The entry with the status of a full check."""
        return examine(_ours(entry), digests_only=digests_only)

    def in_place(self, entry: CacheEntry) -> Entry:
        """`cache.quarantine.in_place`."""
        from mlactl.cache import quarantine

        return quarantine.in_place(_ours(entry))

    def masked(self, entry: CacheEntry) -> bool:
        """Whether another layer has set the very object aside (`Store.everywhere`)."""
        mine = _ours(entry)
        found = next((other for other in self.store.everywhere(mine.key) if other.layer == mine.layer), None)
        return mine.status is not Status.QUARANTINED and found is not None and found.status is Status.QUARANTINED

    def verify(
        self, entries: Iterable[CacheEntry], *, digests_only: bool = False, on_done: Callable[[int], None] = lambda _steps: None
    ) -> Sequence[Entry]:
        """`cache.verify.verify`."""
        from mlactl.cache.verify import verify

        return verify(self.store, map(_ours, entries), digests_only=digests_only, on_done=on_done).entries

    def read_object(self, entry: CacheEntry) -> bytes:
        """The object's bytes, read without following links; raises OSError."""
        return read_object(_ours(entry))

    def describe(self, entry: CacheEntry, *, show_secrets: bool = False) -> Description:
        """An entry in full. Our manifests record no environment, so that nothing is hidden."""
        from mlactl.cache.details import details

        return details(_ours(entry))

    # ---- removing and setting aside

    def plan(
        self,
        selectors: Selectors,
        *,
        keep: Iterable[CompileSpec] = (),
        include_prepared: bool = False,
        on_problem: Callable[[str], None] | None = None,
    ) -> PrunePlan:
        """`cache.prune.plan`; raises UsageError for what only b12x's roots have."""
        from mlactl.cache import prune

        _no_preparation(include_prepared)
        return prune.plan(self.store, selectors, keep=keep, on_problem=on_problem)

    def plan_entries(
        self, entries: Iterable[CacheEntry], *, include_prepared: bool = False, on_problem: Callable[[str], None] | None = None
    ) -> PrunePlan:
        """`cache.prune.plan_keys`; raises UsageError for what only b12x's roots have."""
        from mlactl.cache import prune

        _no_preparation(include_prepared)
        return prune.plan_keys(self.store, map(_ours, entries))

    def set_aside(self, entries: Iterable[CacheEntry]) -> Sequence[str]:
        """Quarantines entries; the keys that now are. Raises CannotRun."""
        from mlactl.cache import quarantine

        return _each(entries, quarantine.set_aside)

    def put_back(self, entries: Iterable[CacheEntry]) -> Sequence[str]:
        """Undoes `set_aside`; the keys that are back. Raises CannotRun."""
        from mlactl.cache import quarantine

        return _each(entries, quarantine.put_back)


def _each(entries: Iterable[CacheEntry], move: Callable[[Entry], None]) -> list[str]:
    moved = []
    for entry in entries:
        move(_ours(entry))
        moved.append(entry.key)
    return moved


def _ours(entry: CacheEntry) -> Entry:
    assert isinstance(entry, Entry)
    return entry


def _no_preparation(include_prepared: bool) -> None:
    if include_prepared:
        raise UsageError("--include-prepared is for a b12x cache: our own has no preparation files", hint="leave it out, or add --root-kind b12x")
