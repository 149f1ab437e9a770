"""Opens a cache root as the tool whose format it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import cast

from mlactl.cache import details, listing, quarantine
from mlactl.cache import entry as entries_of
from mlactl.cache.adapter import CacheAdapter, CacheEntry, RootKind
from mlactl.cache.entry import Entry
from mlactl.cache.store import Store
from mlactl.errors import UsageError


class OwnCache:
    """Our own store behind the questions every kind of root answers."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.kind = RootKind.MLACTL

    @property
    def paths(self) -> tuple[Path, ...]:
        """Layers in the order they are searched."""
        return tuple(layer.path for layer in self.store.roots.layers)

    def entries(self, *, on_problem: Callable[[str], None] | None = None) -> Sequence[CacheEntry]:
        """Every entry and temporary of every layer."""
        return listing.order(listing.collect(self.store, on_problem=on_problem))

    def entry(self, prefix: str) -> CacheEntry:
        """The entry of a key or unique start of one."""
        return self.store.entry(prefix)

    def examine(self, entry: CacheEntry, *, digests_only: bool = False) -> CacheEntry:
        """The entry with the status of a full check."""
        return entries_of.examine(cast(Entry, entry), digests_only=digests_only)

    def read_object(self, entry: CacheEntry) -> bytes:
        """The object's bytes."""
        return details._read(cast(Entry, entry))

    def set_aside(self, entries: Iterable[CacheEntry]) -> Sequence[str]:
        """Quarantines entries."""
        return [self._moved(quarantine.set_aside, entry) for entry in entries]

    def put_back(self, entries: Iterable[CacheEntry]) -> Sequence[str]:
        """Undoes it."""
        return [self._moved(quarantine.put_back, entry) for entry in entries]

    def _moved(self, move: Callable[[Entry], None], entry: CacheEntry) -> str:
        move(cast(Entry, entry))
        return entry.key


def open_cache(cache_dir: str | None, kind: str = "auto") -> CacheAdapter:
    """The cache that `cache_dir` or the environment names."""
    if kind not in ("auto", RootKind.MLACTL):
        raise UsageError(f"--root-kind {kind} is not read here, expected auto or {RootKind.MLACTL}", hint="mlactl cache ls --help")
    return OwnCache(Store.open(cache_dir))
