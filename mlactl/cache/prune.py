"""Removing entries of our own store: what the selectors choose, and in which order an entry's files go.

Manifest first, then object: a removal cut short leaves an object without its commit marker, which is a miss.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from mlactl.cache import listing, locks
from mlactl.cache import toolchain as toolchains
from mlactl.cache.adapter import CacheEntry, RootKind
from mlactl.cache.removal import (
    Chosen,
    Kept,
    PlannedEntry,
    PlannedFile,
    PrunePlan,
    PruneResult,
    apply,
    build,
    exists_in,
    folder_inside,
    least_recent,
    without_quarantined,
    without_unreadable,
)
from mlactl.cache.roots import LAYOUT, Layer
from mlactl.cache.selectors import Judge, Selectors
from mlactl.cache.store import Entry, Store
from mlactl.errors import CannotRun, EnvironmentUnfit
from mlactl.kernels import registry
from mlactl.kernels.compiler import compile_options
from mlactl.kernels.spec import ARCHES, CompileSpec

__all__ = ["PlannedFile", "PrunePlan", "PruneResult", "apply", "plan", "plan_keys"]


def plan(
    store: Store,
    selectors: Selectors,
    *,
    keep: Iterable[CompileSpec] = (),
    now: float | None = None,
    on_problem: Callable[[str], None] | None = None,
) -> PrunePlan:
    """What the selectors choose in the writable root, less what `keep` names, with any toolchain and for any arch.

    A folder that is passed over is told to `on_problem`; an entry with a link or a folder in a file's place is kept.
    Raises CannotRun when nothing is writable or the root cannot be read, and EnvironmentUnfit when `--stale` is asked
    for where no compiler is installed to compare with.
    """
    layer = store.roots.require_writable()
    moment = time.time() if now is None else now
    everything = listing.collect(store, layers=[layer], on_problem=on_problem)
    judge = selectors.judge(moment, stale_judge() if selectors.stale else lambda _entry: None)
    protected = frozenset(keep)
    chosen: list[tuple[CacheEntry, str]] = []
    kept: list[Kept] = []
    for entry in everything if selectors.selects_entries else ():
        reason = judge(entry)
        if reason is None:
            continue
        if protected and entry.manifest is not None and entry.manifest.spec in protected:
            kept.append(Kept(entry.key, "named by a kept profile"))
        else:
            chosen.append((entry, reason))
    chosen, spared = without_quarantined(chosen, selectors)
    chosen, unread = without_unreadable(chosen)
    kept += spared + unread
    if selectors.max_bytes is not None:
        chosen = least_recent(chosen, listing.total_bytes(everything) - selectors.max_bytes, _last_use)
    lock_files = tuple(locks.lock_files(layer)) if selectors.locks else ()
    return _build(layer, selectors.words(), Chosen(chosen, kept), everything, moment, lock_files)


def plan_keys(store: Store, entries: Iterable[Entry], *, now: float | None = None) -> PrunePlan:
    """The plan that removes these entries of the writable root; raises CannotRun for one of a read-only layer."""
    layer = store.roots.require_writable()
    chosen: list[tuple[CacheEntry, str]] = []
    for entry in entries:
        if entry.layer != layer:
            raise CannotRun(
                f"{entry.key} is in the read-only layer {entry.layer.path}",
                hint=f"mlactl cache rm {entry.key} --cache-dir {shlex.quote(str(entry.layer.path))}",
            )
        chosen.append((entry, "named"))
    everything = listing.collect(store, layers=[layer])
    return _build(layer, ("named",), Chosen(*without_unreadable(chosen)), everything, time.time() if now is None else now)


def _build(
    layer: Layer, selection: tuple[str, ...], chosen: Chosen, everything: list[Entry], now: float, lock_files: tuple[str, ...] = ()
) -> PrunePlan:
    return build(layer.path, RootKind.MLACTL, selection, chosen, list(everything), now, _paths, lock_files)


def _paths(entry: CacheEntry) -> Iterable[Path]:
    """An entry's files, manifest first."""
    assert isinstance(entry, Entry)
    return [path for path in (entry.manifest_path, entry.object_path) if path is not None]


def _last_use(entry: CacheEntry) -> float:
    """What was never used counts from its making."""
    if entry.last_used is not None:
        return entry.last_used
    return listing.timestamp(entry.manifest.created) if entry.manifest is not None else 0.0


def stale_judge() -> Judge:
    """Tells why this install can no longer produce an entry of a current version; raises EnvironmentUnfit without a compiler."""
    tools = toolchains.current()
    if tools is None:
        raise EnvironmentUnfit(
            f"--stale compares with the compiler installed here, and there is none: {toolchains.absence()}",
            hint="select by version or age: mlactl cache prune --spec 'KERNEL<N', --older-than 30d",
        )
    digests: dict[str, str] = {}
    options = {arch: compile_options(arch) for arch in ARCHES}

    def judge(entry: CacheEntry) -> str | None:
        assert isinstance(entry, Entry)
        manifest = entry.manifest
        if manifest is None:
            return None
        kernel_id = manifest.spec.kernel_id
        declared = registry.KERNELS.get(kernel_id)
        if declared is None or declared.version != manifest.spec.version:
            return None
        if kernel_id not in digests:
            digests[kernel_id] = registry.sources_digest(kernel_id)
        other = []
        if manifest.sources_digest != digests[kernel_id]:
            other.append("other sources")
        if manifest.toolchain != tools:
            other.append("other toolchain")
        if manifest.options != options[manifest.arch]:
            other.append("other compile options")
        return ", ".join(other) or None

    return judge


# ---- apply

_NAME = re.compile(r"[0-9a-f]{64}[.][A-Za-z0-9_.-]{1,100}")


class OwnFormat:
    """How entries of our own store are removed (`removal.Format`)."""

    def folder_of(self, planned: PlannedEntry) -> str | None:
        """The entry's bucket."""
        bucket = f"{LAYOUT}/{planned.key[:2]}"
        names = [file.path.removeprefix(f"{bucket}/") for file in planned.files]
        sound = all(_NAME.fullmatch(name) and name.startswith(f"{planned.key}.") and not locks.LOCK_FILE.fullmatch(name) for name in names)
        return bucket if sound else None

    def locked(self, root: Path, folder: int, planned: PlannedEntry) -> AbstractContextManager[object]:
        """The entry's own lock."""
        return locks.entry_lock(Layer(root, writable=True), planned.key, exclusive=True, wait_s=0.0)

    def remove_locks(self, root: Path, paths: tuple[str, ...]) -> int:
        """Unlinks lock files while nobody in the whole root holds or waits for one."""
        removed = 0
        with locks.root_lock(Layer(root, writable=True), exclusive=True, wait_s=0.0):
            for path in paths:
                _, bucket, name = path.split("/")
                if not (locks.BUCKET.fullmatch(bucket) and locks.LOCK_FILE.fullmatch(name)):
                    continue
                with folder_inside(root, f"{LAYOUT}/{bucket}") as folder:
                    if folder is not None and exists_in(folder, name):
                        os.unlink(name, dir_fd=folder)
                        removed += 1
        return removed
