"""Plans to remove entries, of every kind of root, and applying them: a plan says what goes and why, applying removes that and nothing else.

A plan is plain data and its JSON is what `--dry-run` prints. Applying believes none of it blindly: each file must have a
name of its root's format, still be the planned one (inode, size and modification time), lie in a real folder of the root,
and be locked by nobody. What a format calls its files, in which order they go and which lock guards them is its `Format`.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from mlactl.cache import listing, locks, trust
from mlactl.cache.adapter import CacheEntry, RootKind
from mlactl.cache.interrupts import held_back
from mlactl.errors import CannotRun, Interrupted

if TYPE_CHECKING:
    from mlactl.cache.selectors import Selectors

SCHEMA_VERSION = 1

QUARANTINED = "quarantined: mlactl cache rm KEY forgets it"
"""Why an entry that was set aside is kept."""

UNREADABLE = "unreadable"

E = TypeVar("E", bound=CacheEntry)


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file as it was when the plan was made; `path` is relative to the root."""

    path: str
    inode: int
    size_bytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class PlannedEntry:
    """An entry to remove: the fields of its listing row, why, and its files in the order they go."""

    key: str
    spec: dict[str, Any] | None
    status: str
    arch: str | None
    object_bytes: int | None
    created: str | None
    last_used: str | None
    reason: str
    files: tuple[PlannedFile, ...]


@dataclass(frozen=True, slots=True)
class Kept:
    """An entry that was selected and stays all the same."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What applying removes from one root.

    `selection` is how the entries were chosen, `locks` lock files relative to the root, `root_kernels` the ids and
    versions there are, `root_kind` whose format it is: that decides the locks that are taken and the names that are believed.
    `root_unreadable` is how many entries of the root cannot be read, which no selector knows anything of."""

    schema_version: int
    root: str
    planned: str
    selection: tuple[str, ...]
    entries: tuple[PlannedEntry, ...]
    kept: tuple[Kept, ...]
    locks: tuple[str, ...]
    freed_bytes: int
    root_entries: int
    root_bytes: int
    root_kernels: tuple[str, ...]
    root_kind: RootKind = RootKind.MLACTL
    root_unreadable: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one planned entry or lock file that was not removed."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class PruneResult:
    """What was removed, what was left because it was in use or had changed, and what could not be removed."""

    removed: tuple[str, ...]
    freed_bytes: int
    skipped: tuple[Outcome, ...]
    failed: tuple[Outcome, ...]
    locks_removed: int


class Format(Protocol):
    """How entries of one kind of root are removed."""

    def folder_of(self, planned: PlannedEntry) -> str | None:
        """Folder of an entry's files, relative to the root; None unless every file has a name of the format, in the order they go."""

    def locked(self, root: Path, folder: int, planned: PlannedEntry) -> AbstractContextManager[object]:
        """Holds what keeps the format's own writers away, without waiting; `folder` is open. Raises LockBusy, NotALockFile, OSError."""

    def remove_locks(self, root: Path, paths: tuple[str, ...]) -> int:
        """Removes lock files and counts them; raises LockBusy, NotALockFile, OSError, CannotRun."""


# ---- plan


@dataclass(frozen=True, slots=True)
class Chosen:
    """Entries that selectors chose, each with why, and those that were chosen and stay."""

    entries: list[tuple[CacheEntry, str]]
    kept: list[Kept]


def build(
    root: Path,
    kind: RootKind,
    selection: tuple[str, ...],
    chosen: Chosen,
    everything: list[CacheEntry],
    now: float,
    paths: Callable[[CacheEntry], Iterable[Path]],
    lock_files: tuple[str, ...] = (),
) -> PrunePlan:
    """The plan that removes what was chosen of `everything` in a root; `paths` gives an entry's files in the order they go."""
    entries, kept = [], list(chosen.kept)
    for entry, reason in sorted(chosen.entries, key=lambda item: listing.order_key(item[0])):
        files, stranger = _files(root, paths(entry))
        if stranger:
            kept.append(Kept(entry.key, f"not a regular file, left alone: ls -ld {shlex.quote(stranger)}"))
        elif files:
            entries.append(PlannedEntry(**listing.as_json(entry), reason=reason, files=files))
    return PrunePlan(
        schema_version=SCHEMA_VERSION,
        root=str(root),
        planned=listing.iso_time(now) or "",
        selection=selection,
        entries=tuple(entries),
        kept=tuple(kept),
        locks=lock_files,
        freed_bytes=sum(entry.object_bytes or 0 for entry in entries),
        root_entries=len(everything),
        root_bytes=listing.total_bytes(everything),
        root_kernels=listing.kernels_present(everything),
        root_kind=kind,
        root_unreadable=sum(entry.status == UNREADABLE for entry in everything),
    )


def without_unreadable(chosen: Iterable[tuple[E, str]]) -> tuple[list[tuple[E, str]], list[Kept]]:
    """The chosen less what cannot be read, and those as kept: nobody knows what they are, and another user's may be in use as they are."""
    found = list(chosen)
    kept = [Kept(entry.key, f"cannot be read, so nothing says what would go: {entry.detail}") for entry, _ in found if entry.status == UNREADABLE]
    return [(entry, reason) for entry, reason in found if entry.status != UNREADABLE], kept


def without_quarantined(chosen: list[tuple[E, str]], selectors: Selectors) -> tuple[list[tuple[E, str]], list[Kept]]:
    """The chosen less what is set aside, and those as kept: only `--status quarantined` selects them.

    An object that is gone is an object that nobody knows was convicted: the next warmup would publish it again.
    """
    if "quarantined" in selectors.statuses:
        return chosen, []
    aside = [Kept(entry.key, QUARANTINED) for entry, _ in chosen if entry.status == "quarantined"]
    return [(entry, reason) for entry, reason in chosen if entry.status != "quarantined"], aside


def least_recent(chosen: list[tuple[CacheEntry, str]], excess_bytes: int, last_use: Callable[[CacheEntry], float]) -> list[tuple[CacheEntry, str]]:
    """The least recently used of the chosen whose removal frees the excess."""
    taken = []
    for entry, reason in sorted(chosen, key=lambda item: (last_use(item[0]), item[0].key)):
        if excess_bytes <= 0:
            break
        if entry.object_bytes:
            taken.append((entry, reason))
            excess_bytes -= entry.object_bytes
    return taken


def _files(root: Path, paths: Iterable[Path]) -> tuple[tuple[PlannedFile, ...], str | None]:
    """An entry's own regular files, and the path of what is none (a link, a folder): nothing of the format's."""
    found = []
    for path in paths:
        name = str(path)
        try:
            status = os.lstat(name)
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(status.st_mode):
            return (), name
        found.append(PlannedFile(name.removeprefix(f"{root}/"), status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found), None


# ---- apply


def apply(plan: PrunePlan, on_done: Callable[[int], None] = lambda _steps: None) -> PruneResult:
    """Removes what the plan names and reports on each entry; `on_done` counts finished ones.

    What is in use, has changed since the plan or is not recognised stays. Raises Interrupted on Ctrl-C, between two
    entries, saying what was finished, and CannotRun for a plan of another release.
    """
    if plan.schema_version != SCHEMA_VERSION:
        raise CannotRun(
            f"a plan of version {plan.schema_version}, this release applies {SCHEMA_VERSION}", hint="mlactl cache prune --dry-run makes a new one"
        )
    root, form = Path(plan.root), _format(plan.root_kind)
    done = _Done()
    try:
        for entry in plan.entries:
            with held_back():  # what is said of an interrupted removal is then true
                _account(done, entry.key, entry.object_bytes or 0, partial(_remove, form, root, entry))
            on_done(1)
        if plan.locks:
            _remove_locks(form, root, plan.locks, done)
    except KeyboardInterrupt:
        finished = len(done.removed) + len(done.skipped) + len(done.failed)
        raise Interrupted(
            f"interrupted: {finished} of {len(plan.entries)} entries were looked at, {len(done.removed)} removed; the cache is valid",
            hint="run the same command again for the rest",
        ) from None
    return PruneResult(tuple(done.removed), done.freed_bytes, tuple(done.skipped), tuple(done.failed), done.locks)


def _format(kind: RootKind) -> Format:
    if kind is RootKind.B12X:
        from mlactl.cache.foreign.b12x.prune import B12xFormat

        return B12xFormat()
    from mlactl.cache.prune import OwnFormat

    return OwnFormat()


@dataclass(slots=True)
class _Done:
    removed: list[str] = field(default_factory=list)
    freed_bytes: int = 0
    skipped: list[Outcome] = field(default_factory=list)
    failed: list[Outcome] = field(default_factory=list)
    locks: int = 0


def _account(done: _Done, key: str, size_bytes: int, remove: Callable[[], str | None]) -> None:
    """Runs one removal and files what became of it."""
    try:
        reason = remove()
    except locks.LockBusy as busy:
        done.skipped.append(Outcome(key, busy.message))
    except locks.NotALockFile as error:
        done.failed.append(Outcome(key, error.message))
    except OSError as error:
        where = trust.describe(str(error.filename)) if error.filename else key
        done.failed.append(Outcome(key, f"{where}: {error.strerror}"))
    else:
        if reason is None:
            done.removed.append(key)
            done.freed_bytes += size_bytes
        else:
            done.skipped.append(Outcome(key, reason))


def _remove(form: Format, root: Path, entry: PlannedEntry) -> str | None:
    """Removes one entry under its exclusive lock; why it was left, or None."""
    place = form.folder_of(entry)
    if place is None or not entry.files:
        return "not an entry of this cache"
    names = [file.path.rpartition("/")[2] for file in entry.files]
    with folder_inside(root, place) as folder:
        if folder is None:
            return "its folder is gone or is a link"
        with form.locked(root, folder, entry):
            if not all(_unchanged(folder, name, file) for name, file in zip(names, entry.files, strict=True)):
                return "changed or used since the plan was made"
            _unlink(folder, f"{root}/{place}", names)
    return None


@contextmanager
def folder_inside(root: Path, place: str) -> Iterator[int | None]:
    """Descriptor of a folder that is really inside the root: no step below the root may be a link; None when it is not there."""
    fds: list[int] = []
    try:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            fds.append(os.open(root, flags))
            for part in filter(None, place.split("/")):
                fds.append(os.open(part, flags | os.O_NOFOLLOW, dir_fd=fds[-1]))
        except (FileNotFoundError, NotADirectoryError):
            yield None
        except OSError as error:
            if error.errno != errno.ELOOP:
                error.filename = f"{root}/{place}"
                raise
            yield None
        else:
            yield fds[-1]
    finally:
        for fd in fds:
            os.close(fd)


def _unchanged(folder: int, name: str, planned: PlannedFile) -> bool:
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    found = (status.st_ino, status.st_size, status.st_mtime_ns)
    return stat.S_ISREG(status.st_mode) and found == (planned.inode, planned.size_bytes, planned.modified_ns)


def _unlink(folder: int, path: str, names: list[str]) -> None:
    """Removes the files in order; once the first is gone the rest goes too, Ctrl-C or not."""
    first, rest = names[0], names[1:]
    try:
        os.unlink(first, dir_fd=folder)
    except OSError as error:
        error.filename = path  # what forbids it is the folder's mode, not the file's
        raise
    finally:
        for name in rest if not exists_in(folder, first) else ():
            os.unlink(name, dir_fd=folder)


def left(plan: PrunePlan, result: PruneResult) -> tuple[Outcome, ...]:
    """What a plan of named entries was to remove and is there all the same, each with why: kept, in use, changed, or not removable."""
    files = {entry.key: entry.files for entry in plan.entries}
    skipped = [item for item in result.skipped if any(os.path.lexists(f"{plan.root}/{file.path}") for file in files.get(item.key, ()))]
    return (*(Outcome(kept.key, kept.reason) for kept in plan.kept), *skipped, *result.failed)


def exists_in(folder: int, name: str) -> bool:
    """Whether an open folder has anything of this name."""
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _remove_locks(form: Format, root: Path, paths: tuple[str, ...], done: _Done) -> None:
    try:
        done.locks += form.remove_locks(root, paths)
    except locks.LockBusy as busy:
        done.skipped.append(Outcome("locks", busy.message))
    except CannotRun as error:
        done.failed.append(Outcome("locks", error.message))
    except OSError as error:
        done.failed.append(Outcome("locks", f"{trust.describe(str(error.filename or root))}: {error.strerror}"))
