"""A listing of the cache: collect, filter, sort and the shape of one row, each a plain function.

`ls` believes names, sizes and manifests; what an object really holds is `verify`'s to say.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, TypeVar

from mlactl.cache.adapter import CacheEntry, ManifestView
from mlactl.cache.roots import Layer
from mlactl.cache.store import Entry, Store

E = TypeVar("E", bound=CacheEntry)


@dataclass(frozen=True, slots=True)
class Filters:
    """Which entries to keep: values of one kind OR, kinds AND; an empty kind keeps everything.

    A kernel is a full id, the dotted start of one (`attention.dense_mla`), or a pattern with `*`. Entries whose manifest
    cannot be read have neither kernel nor arch and match neither.
    """

    kernels: tuple[str, ...] = ()
    arches: tuple[str, ...] = ()
    statuses: tuple[str, ...] = ()

    def pass_manifest(self, manifest: ManifestView) -> bool:
        """Whether kernel and arch of a manifest are asked for."""
        if self.arches and manifest.arch not in self.arches:
            return False
        return not self.kernels or any(kernel_matches(manifest.spec.kernel_id, name) for name in self.kernels)


def collect(store: Store, *, layers: Iterable[Layer] | None = None, on_problem: Callable[[str], None] | None = None) -> list[Entry]:
    """Every entry of these layers, or of all, and what is left of unfinished ones; raises CannotRun when a root cannot be read."""
    with uncollected():
        return list(store.entries(layers, on_problem=on_problem))


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection in a block: nothing that a listing makes is garbage until it is done, and all of it would be walked again and again."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def select(entries: Iterable[E], filters: Filters) -> list[E]:
    """The entries that pass every filter."""
    if filters == Filters():
        return list(entries)
    return [entry for entry in entries if _passes(entry, filters)]


def _passes(entry: CacheEntry, filters: Filters) -> bool:
    manifest = entry.manifest
    if filters.statuses and entry.status not in filters.statuses:
        return False
    if manifest is None:
        return not filters.arches and not filters.kernels
    return filters.pass_manifest(manifest)


def kernel_matches(kernel_id: str, name: str) -> bool:
    """Whether a typed kernel names this id: the id, its dotted start, or a pattern."""
    return kernel_id == name or kernel_id.startswith(f"{name}.") or ("*" in name and fnmatchcase(kernel_id, name))


def order(entries: Iterable[E]) -> list[E]:
    """By kernel, newest version first, then arch, facts and key; what has no readable manifest comes last."""
    return sorted(entries, key=order_key)


def order_key(entry: CacheEntry) -> tuple[bool, str, int, str, str, str]:
    """What `order` sorts by."""
    manifest = entry.manifest
    if manifest is None:
        return True, "", 0, "", "", entry.key
    spec = manifest.spec
    return False, spec.kernel_id, -spec.version, manifest.arch, _facts_key(spec.facts), entry.key


def _facts_key(facts: tuple[tuple[str, Any], ...]) -> str:
    """Facts as text, since values of one name may be of several types; a root has few combinations of them."""
    try:
        return _remembered_text(facts)
    except TypeError:  # lists in the tensor facts of foreign caches
        return repr(facts)


@lru_cache(maxsize=1024)
def _remembered_text(facts: tuple[tuple[str, Any], ...]) -> str:
    return repr(facts)


def kernels_present(entries: Iterable[CacheEntry]) -> tuple[str, ...]:
    """`id version` of each kernel and version there is, for messages that say what could have been asked for."""
    found = {(entry.manifest.spec.kernel_id, entry.manifest.spec.version) for entry in entries if entry.manifest is not None}
    return tuple(f"{kernel_id} {version}" for kernel_id, version in sorted(found))


def as_json(entry: CacheEntry) -> dict[str, Any]:
    """One row of `cache ls --json`; fields that cannot be known are null."""
    manifest = entry.manifest
    if manifest is None:
        spec = arch = created = None
    else:
        spec, arch, created = manifest.spec.as_json(), manifest.arch or None, manifest.created or None
    return {
        "key": entry.key,
        "spec": spec,
        "status": entry.status,
        "arch": arch,
        "object_bytes": entry.object_bytes,
        "created": created,
        "last_used": iso_time(entry.last_used),
    }


def iso_time(moment: float | None) -> str | None:
    """ISO 8601 in UTC to the second; None stays None."""
    return None if moment is None else f"{datetime.fromtimestamp(int(moment), UTC).isoformat()[:19]}Z"


def seconds_since(moment: str | float | None, now: float) -> float | None:
    """Age of an ISO 8601 time or a timestamp; None for none, 0 for one in the future (another host's clock)."""
    if moment is None:
        return None
    return max(0.0, now - (moment if isinstance(moment, float) else timestamp(moment)))


def timestamp(moment: str) -> float:
    """Seconds since the epoch of an ISO 8601 time."""
    return datetime.fromisoformat(moment).timestamp()


def total_bytes(entries: Sequence[CacheEntry]) -> int:
    """Bytes of the objects of these entries."""
    return sum(entry.object_bytes or 0 for entry in entries)


def keys_that_start(store: Store, prefix: str) -> list[str]:
    """Keys of entries with a manifest whose key starts with `prefix`, by file names alone; for shell completion."""
    found: set[str] = set()
    for layer in store.roots.layers:
        if os.path.islink(layer.folder()):  # noqa: PTH114
            continue
        try:
            buckets = [name for name in os.listdir(layer.folder()) if len(name) == 2 and (name.startswith(prefix[:2]) or prefix.startswith(name))]
            for bucket in buckets:
                names = os.listdir(f"{layer.folder()}/{bucket}")
                found.update(name[:64] for name in names if len(name) == 69 and name.endswith(".json") and name.startswith(prefix))
        except OSError:
            continue  # a layer that cannot be read completes nothing
    return sorted(found)
