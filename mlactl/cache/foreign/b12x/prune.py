"""Removing and setting aside entries of a b12x root, beside whatever b12x is doing there.

Everything happens under b12x's own lock of the key, taken without waiting: a busy key is skipped. The lock file stays, as
b12x leaves it: a waiter may hold its inode open, and a new file would let two writers in. The object goes first, then the
manifest, the reverse of our own order: older releases load an object that has no manifest, so that a manifest removed first
would leave, if anything stopped us there, an object that nobody can check any more and that they still run.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from mlactl.cache import listing, locks
from mlactl.cache.adapter import CacheEntry, RootKind
from mlactl.cache.entry import Status
from mlactl.cache.foreign.b12x import entry as entries
from mlactl.cache.foreign.b12x import prepared
from mlactl.cache.foreign.b12x.entry import ASIDE, Entry
from mlactl.cache.removal import Chosen, Kept, PlannedEntry, PrunePlan, build, exists_in, folder_inside, least_recent
from mlactl.cache.selectors import Judge, Selectors, age_words
from mlactl.errors import CannotRun, UsageError

TEMP_AGE_S = 3600
"""A younger temporary may still have a writer: the longest compiles take minutes, and some temporaries have no lock to ask."""

ACCESS_TIME_STEP_S = 86_400
"""A read within a day of the last one does not move the access time (relatime), so that a use may be this much later than it says."""


# ---- plan


def plan(
    root: Path,
    everything: list[Entry],
    selectors: Selectors,
    *,
    kept_profiles: bool,
    include_prepared: bool,
    now: float,
    on_problem: Callable[[str], None],
) -> PrunePlan:
    """What the selectors choose in a root; raises UsageError for a selection that cannot be made on a foreign root."""
    _refuse(root, everything, selectors, kept_profiles)
    selectors = _in_foreign_terms(selectors, now)
    judge = selectors.judge(now, lambda _entry: None)
    chosen = [(entry, reason) for entry in everything if (reason := judge(entry)) is not None]
    picked = _guarded(root, chosen, include_prepared=include_prepared, now=now, on_problem=on_problem)
    if selectors.max_bytes is not None:
        picked = Chosen(least_recent(picked.entries, listing.total_bytes(everything) - selectors.max_bytes, _last_use), picked.kept)
    return build(root, RootKind.B12X, selectors.words(), picked, list(everything), now, _paths)


def plan_entries(
    root: Path, everything: list[Entry], wanted: Iterable[Entry], *, include_prepared: bool, now: float, on_problem: Callable[[str], None]
) -> PrunePlan:
    """The plan that removes these entries."""
    chosen = [(entry, "named") for entry in wanted]
    picked = _guarded(root, chosen, include_prepared=include_prepared, now=now, on_problem=on_problem)
    return build(root, RootKind.B12X, ("named",), picked, list(everything), now, _paths)


def _refuse(root: Path, everything: list[Entry], selectors: Selectors, kept_profiles: bool) -> None:
    if selectors.locks:
        raise UsageError(
            f"--locks on the b12x cache {root}: its lock files are never removed, because b12x itself never does, and a process that "
            "waits for one would then share the key with whoever makes a new one",
            hint="they have no bytes; mlactl cache prune --status no-manifest --dry-run shows leftovers that have",
        )
    for asked, option, why in (
        (selectors.stale, "--stale", "what b12x builds now is not known here"),
        (kept_profiles, "--keep-profile", "profiles name kernels by this project's numbering, which is not b12x's"),
    ):
        if asked:
            raise UsageError(
                f"{option} is for this project's own cache, and {root} is b12x's: {why}",
                hint="select by --spec, --kernel, --arch, --status, --older-than, --unused-for or --max-size",
            )
    if not selectors.narrowed and selectors.max_bytes is None:
        present = ", ".join(listing.kernels_present(everything)) or "no readable manifest"
        raise UsageError(
            f"nothing says what to remove from the b12x cache {root}, and a foreign root has no default selection; it has {present}",
            hint="mlactl cache prune --spec 'KERNEL<N' --dry-run, or --kernel, --arch, --status, --older-than, --unused-for, --max-size",
        )


def _in_foreign_terms(selectors: Selectors, now: float) -> Selectors:
    """The same selection, with what this format knows of times."""
    judges: list[tuple[str, Judge]] = list(selectors.judges)
    if selectors.older_than_s is not None:
        judges.append((f"--older-than {selectors.older_than_s}s", _written_before(now - selectors.older_than_s)))
    if selectors.unused_for_s is not None:
        judges.append((f"--unused-for {selectors.unused_for_s}s", _unused(now, selectors.unused_for_s)))
    return replace(selectors, older_than_s=None, unused_for_s=None, judges=tuple(judges))


def _written_before(limit: float) -> Judge:
    def test(entry: CacheEntry) -> str | None:
        written = entry.written if isinstance(entry, Entry) else None
        return f"written {listing.iso_time(written)}" if written is not None and written < limit else None

    return test


def _unused(now: float, seconds: int) -> Judge:
    """Not read for so long, by the access time; one that is not known is never selected."""

    def test(entry: CacheEntry) -> str | None:
        if entry.last_used is None or now - entry.last_used - ACCESS_TIME_STEP_S <= seconds:
            return None
        return f"not read for {age_words(now - entry.last_used - ACCESS_TIME_STEP_S)}"

    return test


def _guarded(root: Path, chosen: list[tuple[Entry, str]], *, include_prepared: bool, now: float, on_problem: Callable[[str], None]) -> Chosen:
    """The chosen less young temporaries and, unless they were asked for, what preparation files name."""
    picked: list[tuple[CacheEntry, str]] = []
    kept: list[Kept] = []
    named = prepared.named(root, on_problem) if chosen else {}
    for entry, reason in chosen:
        by = named.get(entry.key) if not entry.residue and entry.status is not Status.QUARANTINED else None
        if entry.residue and (entry.written is None or now - entry.written < TEMP_AGE_S):
            kept.append(Kept(entry.key, f"a temporary younger than {age_words(TEMP_AGE_S)}: its writer may still be at work"))
        elif by is not None and not include_prepared:
            kept.append(Kept(entry.key, f"named by {by}; --include-prepared removes it too"))
        else:
            picked.append((entry, f"{reason}, named by {by}" if by is not None else reason))
    going = sum("named by preparation/" in reason for _, reason in picked)
    if going:
        on_problem(f"named by tuning selections in {root}/preparation: {going} of {len(picked)} to remove; b12x compiles what it needs of them again")
    return Chosen(picked, kept)


def _paths(entry: CacheEntry) -> Iterable[Path]:
    """An entry's files, object first."""
    assert isinstance(entry, Entry)
    return [path for path in (entry.object_path, entry.manifest_path) if path is not None]


def _last_use(entry: CacheEntry) -> float:
    """What is not known to have been used counts from its writing."""
    assert isinstance(entry, Entry)
    return entry.last_used or entry.written or 0.0


# ---- apply

_LIVE = re.compile(r"[0-9a-f]{64}\.(o|json)")
_ASIDE = re.compile(rf"[0-9a-f]{{64}}\.(o|json){re.escape(ASIDE)}")


class B12xFormat:
    """How entries of a b12x root are removed (`removal.Format`)."""

    def folder_of(self, planned: PlannedEntry) -> str | None:
        """The bucket of an entry's files or of a temporary; empty for a temporary of the root itself."""
        places = {file.path.rpartition("/")[0] for file in planned.files}
        names = [file.path.rpartition("/")[2] for file in planned.files]
        if len(places) != 1:
            return None
        (place,) = places
        if len(names) == 1 and entries.RESIDUE.fullmatch(names[0]):
            return place if not place or entries.is_bucket(place) else None
        if not entries.is_key(planned.key) or place != planned.key[:2] or not all(name.startswith(f"{planned.key}.") for name in names):
            return None
        for form in (_LIVE, _ASIDE):
            found = [match[1] for name in names if (match := form.fullmatch(name))]
            if len(found) == len(names) and found in (["o", "json"], ["o"], ["json"]):
                return place
        return None

    @contextmanager
    def locked(self, root: Path, folder: int, planned: PlannedEntry) -> Iterator[None]:
        """b12x's lock of the key; a temporary whose name says no key has none, and its age was asked instead."""
        if not entries.is_key(planned.key) or not planned.files[0].path.startswith(f"{planned.key[:2]}/"):
            yield
            return
        with key_lock(root, folder, planned.key):
            yield

    def remove_locks(self, root: Path, paths: tuple[str, ...]) -> int:
        """Always refused."""
        raise CannotRun(f"lock files of the b12x cache {root} are never removed", hint="mlactl cache prune --dry-run makes a plan without them")


@contextmanager
def key_lock(root: Path, folder: int, key: str) -> Iterator[None]:
    """Holds b12x's exclusive lock of a key for a block without waiting for it; `folder` is its open bucket.

    Makes the lock file where there is none, as b12x does, and leaves it. Raises LockBusy, NotALockFile and OSError.
    """
    name = f"{key}.lock"
    path = f"{root}/{key[:2]}/{name}"
    fd = _open_lock(folder, name, path)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pids = locks.lockers(fd)
            who = f"process {pids[0]}" if pids else "another process"
            raise locks.LockBusy(path, None, f"{path} is held by {who}: b12x is compiling it", "run it again when b12x is done") from None
        if not _names(folder, name, fd):
            raise locks.LockBusy(
                path, None, f"{path} was replaced by another file", "b12x removes no lock files: find out who does, then run it again"
            )
        yield
    finally:
        os.close(fd)


def _names(folder: int, name: str, fd: int) -> bool:
    """Whether a name still means the open file: who locks a file that was unlinked meanwhile keeps nobody away."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(fd))


def _open_lock(folder: int, name: str, path: str) -> int:
    flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        bucket = os.fstat(folder)
        fd = os.open(name, flags | os.O_CREAT, 0o666 & bucket.st_mode, dir_fd=folder)
        # b12x opens it for writing: a lock that root made in a user's cache would end that user's compiles of this key.
        if os.geteuid() == 0 and os.fstat(fd).st_uid != bucket.st_uid:
            os.fchown(fd, bucket.st_uid, bucket.st_gid)
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.ELOOP, errno.ENXIO):
            error.filename = path
            raise
        raise locks.NotALockFile(f"{path} is no lock file", hint=f"ls -ld {path}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise locks.NotALockFile(f"{path} is no lock file", hint=f"ls -ld {path}")
    return fd


# ---- setting aside


def set_aside(entry: Entry) -> str | None:
    """Renames an entry's files so that no release loads them, object first; why it was not done, or None.

    After the first rename every release sees a manifest without an object, which is a miss to all of them. What was set
    aside earlier under the same key is replaced.
    """
    return _renamed(entry, "", ASIDE, ("o", "json"))


def put_back(entry: Entry) -> str | None:
    """Undoes `set_aside`, manifest first: an object is never there without what it can be checked by. Why it was not done, or None."""
    return _renamed(entry, ASIDE, "", ("json", "o"))


def _renamed(entry: Entry, old: str, new: str, parts: tuple[str, str]) -> str | None:
    place = f"{entry.root}/{entry.place}"
    with folder_inside(entry.root, entry.place) as folder:
        if folder is None:
            return f"{place} is gone or is a link"
        try:
            with key_lock(entry.root, folder, entry.key):
                there = [part for part in parts if _is_file(folder, f"{entry.key}.{part}{old}")]
                taken = [f"{entry.key}.{part}{new}" for part in parts if exists_in(folder, f"{entry.key}.{part}{new}")]
                if not there:
                    return f"no file of {entry.key} in {place}"
                if taken and not new:
                    return f"{place}/{taken[0]} is there already: b12x compiled it again; mlactl cache rm removes that one"
                for name in taken:
                    os.unlink(name, dir_fd=folder)
                for part in there:
                    os.rename(f"{entry.key}.{part}{old}", f"{entry.key}.{part}{new}", src_dir_fd=folder, dst_dir_fd=folder)
                os.fsync(folder)
        except CannotRun as error:
            return error.message
        except OSError as error:
            return f"{place}: {error.strerror}"
    return None


def _is_file(folder: int, name: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False
