"""Importing a bundle: all of it is checked before any of it is published, then each entry appears whole or not at all.

While it is checked, what will be published lies in a private folder of the root (`v1/import.spool`), on the same
filesystem, so that publishing is two renames. The folder belongs to whoever holds `v1/import.lock`; what a killed import
left in it goes with the next one.
"""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import BinaryIO

from mlactl.cache import flush, key, locks, publish, trust
from mlactl.cache import toolchain as toolchains
from mlactl.cache.bundle import ahead, packages
from mlactl.cache.bundle.layout import BadBundle
from mlactl.cache.bundle.read import Bundle, Checked
from mlactl.cache.bundle.waiting import held
from mlactl.cache.entry import Entry, RejectedObject, Status, read_checked, read_entry
from mlactl.cache.listing import Filters
from mlactl.cache.manifest import Manifest
from mlactl.cache.roots import Layer
from mlactl.cache.store import Store, touch
from mlactl.errors import CannotRun, Interrupted, MlactlError
from mlactl.kernels import registry
from mlactl.kernels.compiler import compile_options

SPOOL = "import.spool"
PUBLISHED, REPLACED, PRESENT = "published", "replaced", "already there"
QUARANTINED, OTHER_HOST, NOT_SELECTED, FAILED = "quarantined", "other host", "not selected", "failed"
_LOCK_WAIT_S = 60.0
_IMPORT_WAIT_S = 600.0
_ALONE_S = 2.0
"""How long others may have to wait for an import that publishes under the root's lock: a few thousand entries."""

_WRITES_AHEAD = 4
"""Entries that are checked and not written yet: making files costs as much as checking them, and needs no interpreter."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one entry of a bundle: one of the words above, and why where that says something."""

    manifest: Manifest
    outcome: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Imported:
    """An import, or with `dry_run` what one would do. `requires` has the packages of every entry that is or would be there."""

    root: str
    dry_run: bool
    sha256: str
    bundle_bytes: int
    listing_sha256: str
    outcomes: tuple[Outcome, ...]
    requires: tuple[packages.Need, ...]

    def of(self, *words: str) -> tuple[Outcome, ...]:
        """The entries with one of these outcomes."""
        return tuple(outcome for outcome in self.outcomes if outcome.outcome in words)


def _silent(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Watch:
    """Who is told how an import gets on: the number of entries, each one checked, how many will be published, each one published, and
    what a lock is waited for that somebody holds."""

    listed: Callable[[int], None] = _silent
    checked: Callable[[], None] = _silent
    publishing: Callable[[int], None] = _silent
    published: Callable[[], None] = _silent
    waiting: Callable[[str], None] = _silent


EVERYTHING = Filters()
UNWATCHED = Watch()


@dataclass(slots=True)
class _Import:
    """One import under way."""

    layer: Layer
    filters: Filters
    watch: Watch
    spool: str | None = None
    mode: int = 0o600
    flush: Callable[[Iterable[str]], None] = _silent
    outcomes: list[Outcome] = field(default_factory=list)
    waiting: list[tuple[Manifest, str]] = field(default_factory=list)
    host: str = field(default_factory=lambda: key.host_arch())  # once: each call lets the other threads take the interpreter
    names: dict[str, frozenset[str]] = field(default_factory=dict)

    def has(self, name: str, *, now: bool = False) -> bool:
        """Whether the bucket of a key had any file of it when it was first looked at, or (with `now`) was when it was last asked so."""
        bucket = self.layer.bucket(name)
        if now or bucket not in self.names:
            try:
                self.names[bucket] = frozenset(file[:64] for file in os.listdir(bucket))
            except FileNotFoundError:
                self.names[bucket] = frozenset()
        return name in self.names[bucket]


def bring_in(
    store: Store, file: BinaryIO, *, filters: Filters = EVERYTHING, sha256: str | None = None, shared: bool = False, dry_run: bool = False,
    watch: Watch = UNWATCHED,
) -> Imported:  # fmt: skip
    """Imports a bundle into the writable layer; with `dry_run` it is checked to the end and nothing is written.

    Entries that are there and intact stay; damaged ones are replaced; quarantined keys are never imported over. Raises
    BadBundle (nothing was published then), CannotRun or Untrusted for a root that cannot be written, LockBusy when another
    import does not end, and Interrupted with what was finished.
    """
    layer = publish.require_writable(store)
    bundle = Bundle(file)
    watch.listed(len(bundle.listing.entries))
    work = _Import(layer, filters, watch)
    try:
        if dry_run:
            _verify(work, bundle, sha256)
            work.outcomes += [_foreseen(layer, manifest, outcome) for manifest, outcome in work.waiting]
        else:
            with publish.writing(layer.path), _spooling(work, shared):
                _verify(work, bundle, sha256)
                _publish(work)
            for outcome in work.outcomes:
                if outcome.outcome == PRESENT:
                    touch(Entry(outcome.manifest.key, layer, outcome.manifest, Status.OK))
    except KeyboardInterrupt:
        done = 0 if dry_run else sum(outcome.outcome in (PUBLISHED, REPLACED) for outcome in work.outcomes)
        raise Interrupted(
            f"interrupted: {done} of {len(work.waiting)} entries were imported, each of them whole" if done else "interrupted: nothing was imported",
            hint="run the same command again: what is there is left as it is",
        ) from None
    outcomes = tuple(sorted(work.outcomes, key=lambda outcome: outcome.manifest.key))
    usable = [outcome.manifest.toolchain for outcome in outcomes if outcome.outcome in (PUBLISHED, REPLACED, PRESENT)]
    requires = packages.needs(packages.required(usable))
    return Imported(str(layer.path), dry_run, bundle.sha256, bundle.compressed_bytes, bundle.listing_sha256, outcomes, requires)


def unanswered(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Why lookups of this install never answer with some of these entries, and how many: it asks for other keys."""
    found: dict[str, int] = {}
    judge = _other_than_here()
    for outcome in outcomes:
        reason = judge(outcome.manifest)
        if reason is not None:
            found[reason] = found.get(reason, 0) + 1
    return found


def _other_than_here() -> Callable[[Manifest], str | None]:
    digests: dict[str, str] = {}
    tools = toolchains.current()

    def judge(manifest: Manifest) -> str | None:
        declared = registry.KERNELS.get(manifest.spec.kernel_id)
        if declared is None or declared.version != manifest.spec.version:
            has = f"version {declared.version}" if declared is not None else "no such kernel"
            return f"{manifest.spec.kernel_id} version {manifest.spec.version}, this install has {has}"
        if declared.kernel_id not in digests:
            digests[declared.kernel_id] = registry.sources_digest(declared.kernel_id)
        if manifest.sources_digest != digests[declared.kernel_id]:
            return f"{declared.kernel_id} compiled from other sources than this install's"
        if manifest.options != compile_options(manifest.arch):
            return f"compiled with {' '.join(manifest.options)}, this install uses {' '.join(compile_options(manifest.arch))}"
        if tools is not None and tools != manifest.toolchain:
            return f"made by {manifest.toolchain.label()}, the compiler of this install is {tools.label()}"
        return None

    return judge


# ---- check


def _verify(work: _Import, bundle: Bundle, sha256: str | None) -> None:
    """Reads the bundle to its end and keeps in the spool what is to be published; raises BadBundle."""

    def kept() -> Iterator[tuple[int, Callable[[], None]]]:
        for checked in bundle.entries():
            if _sort_out(work, checked):
                yield len(checked.data) + len(checked.text), partial(_keep, work, checked)
            work.watch.checked()

    with ThreadPoolExecutor(1) as writer:
        for _ in ahead.in_order(writer, kept(), _WRITES_AHEAD):
            pass
    if sha256 is not None and bundle.sha256 != sha256:
        raise BadBundle(f"the bundle has SHA-256 {bundle.sha256}, --sha256 says {sha256}")


def _sort_out(work: _Import, checked: Checked) -> bool:
    """Whether the entry is to be kept in the spool; notes what becomes of it."""
    manifest = checked.manifest
    if not work.filters.pass_manifest(manifest):
        present: Outcome | None = Outcome(manifest, NOT_SELECTED)
    elif manifest.host_arch != work.host:
        present = Outcome(manifest, OTHER_HOST, f"host code for {manifest.host_arch}, this machine is {work.host}")
    else:
        present = _present(work.layer, manifest) if work.has(manifest.key) else None
    if present is not None and present.outcome != REPLACED:
        work.outcomes.append(present)
        return False
    work.waiting.append((manifest, PUBLISHED if present is None else REPLACED))
    return work.spool is not None


def _keep(work: _Import, checked: Checked) -> None:
    _write(f"{work.spool}/{checked.manifest.key}.so", checked.data, work.mode)
    _write(f"{work.spool}/{checked.manifest.key}.json", checked.text, work.mode)


def _present(layer: Layer, manifest: Manifest) -> Outcome | None:
    """What the layer has of the key: an intact entry, one set aside, one to replace, or None."""
    entry = read_entry(layer, manifest.key)
    if entry is None:
        return None
    if entry.status is Status.QUARANTINED:
        return Outcome(manifest, QUARANTINED, f"this key was set aside here; mlactl cache rm {manifest.key[:12]} forgets that")
    try:
        found, _ = read_checked(entry)
    except (RejectedObject, trust.Untrusted):
        return Outcome(manifest, REPLACED)
    if found.object_sha256 != manifest.object_sha256:
        return Outcome(manifest, PRESENT, f"with another object: SHA-256 {found.object_sha256}, the bundle's is {manifest.object_sha256}")
    return Outcome(manifest, PRESENT)


def _foreseen(layer: Layer, manifest: Manifest, outcome: str) -> Outcome:
    """What would become of an entry that is to be published: one that readers keep is not replaced."""
    busy = locks.readers_of(layer, manifest.key) if outcome == REPLACED else None
    return Outcome(manifest, outcome) if busy is None else Outcome(manifest, FAILED, busy.message)


def _write(path: str, data: bytes, mode: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]
        os.fchmod(fd, mode)  # whatever the umask
    finally:
        os.close(fd)


@contextmanager
def _spooling(work: _Import, shared: bool) -> Iterator[None]:
    """Makes the root if need be and holds its import lock and its spool for a block."""
    work.mode = publish.prepare_root(work.layer, shared=shared)
    trust.check_folders(work.layer.folder(), str(work.layer.path))
    path = f"{work.layer.folder()}/{SPOOL}"
    with locks.import_lock(work.layer, wait_s=_IMPORT_WAIT_S, on_wait=lambda text: work.watch.waiting(f"another import is under way: {text}")):
        if os.path.lexists(path):
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                raise CannotRun(f"{path} is {locks.kind_of(os.lstat(path).st_mode)}, expected a folder", hint=f"ls -ld {shlex.quote(path)}")
            shutil.rmtree(path)
        os.mkdir(path, 0o700)  # noqa: PTH102
        work.spool = path
        try:
            with flush.below(work.layer.folder()) as work.flush:
                yield
        finally:
            shutil.rmtree(path, ignore_errors=True)


# ---- publish


def _publish(work: _Import) -> None:
    """Publishes what is in the spool, by key; an entry that cannot be published stops no other."""
    layer, spool = work.layer, work.spool
    work.watch.publishing(len(work.waiting))
    # Contents before any name, and the names before this returns: two flushes of thousands of files together.
    work.flush(f"{spool}/{manifest.key}{suffix}" for manifest, _ in work.waiting for suffix in (".so", ".json"))
    buckets: dict[str, None] = {}
    waiting = iter(work.waiting)
    try:
        # Readers of a shared root, who cannot make lock files in it, share those that publishing leaves.
        if work.mode == 0o600:
            _publish_alone(work, waiting, buckets)
        with held(lambda wait_s: locks.root_lock(layer, exclusive=False, wait_s=wait_s), _LOCK_WAIT_S, work.watch.waiting) as root:
            for manifest, outcome in waiting:
                _account(work, buckets, manifest, outcome, root)
    finally:
        work.flush([*buckets, layer.folder()])


def _publish_alone(work: _Import, waiting: Iterator[tuple[Manifest, str]], buckets: dict[str, None]) -> None:
    """Publishes for a moment under the lock of the whole root where that is free: nobody holds or takes an entry's lock meanwhile.

    A third of the files of an import would be lock files otherwise.
    """
    try:
        lease = locks.acquire_root(work.layer, exclusive=True, wait_s=0.0)
    except locks.LockBusy:
        return
    try:
        until = time.monotonic() + _ALONE_S
        while time.monotonic() < until and (item := next(waiting, None)) is not None:
            _account(work, buckets, *item, None)
    finally:
        lease.close()


def _account(work: _Import, buckets: dict[str, None], manifest: Manifest, outcome: str, root: locks.Lease | None) -> None:
    """Publishes one entry and notes what became of it."""
    layer = work.layer
    try:
        bucket = layer.bucket(manifest.key)
        if bucket not in buckets:
            publish.refuse_links(layer, manifest.key)
            publish.prepare_bucket(layer, manifest.key)
            buckets[bucket] = None
            work.has(manifest.key, now=True)
        if root is None and not work.has(manifest.key):
            os.rename(f"{work.spool}/{manifest.key}.so", f"{bucket}/{manifest.key}.so")  # noqa: PTH104
            os.rename(f"{work.spool}/{manifest.key}.json", f"{bucket}/{manifest.key}.json")  # noqa: PTH104
            work.outcomes.append(Outcome(manifest, outcome))
        elif root is None:
            work.outcomes.append(_publish_one(work, manifest, outcome))
        else:
            with held(partial(_entry_lock, layer, manifest.key, root), _LOCK_WAIT_S, work.watch.waiting):
                work.outcomes.append(_publish_one(work, manifest, outcome))
    except MlactlError as error:
        work.outcomes.append(Outcome(manifest, FAILED, error.message))
    work.watch.published()


def _entry_lock(layer: Layer, name: str, root: locks.Lease, wait_s: float) -> AbstractContextManager[locks.Lease]:
    return locks.entry_lock(layer, name, exclusive=True, wait_s=wait_s, root=root)


def _publish_one(work: _Import, manifest: Manifest, outcome: str) -> Outcome:
    """Two renames under the entry's lock or the root's; both files are on the disk by now."""
    layer, name = work.layer, manifest.key
    bucket = layer.bucket(name)
    # Since it was checked somebody may have published it, or set it aside.
    present = _present(layer, manifest)
    if present is not None and present.outcome != REPLACED:
        return present
    if present is not None:
        publish.refuse_folders(layer, name)
    publish.remove_temporaries(layer, name)
    publish.replace_object(bucket, name, f"{work.spool}/{name}.so")
    os.rename(f"{work.spool}/{name}.json", f"{bucket}/{name}.json")  # noqa: PTH104
    return Outcome(manifest, outcome)
