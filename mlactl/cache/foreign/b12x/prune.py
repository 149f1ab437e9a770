"""Removing and setting aside entries of a b12x root, beside whatever b12x is doing there.

Everything happens under b12x's own lock of the key, taken without waiting: a busy key is skipped. The lock file stays, as
b12x leaves it: a waiter may hold its inode open, and a new file would let two writers in. The object goes first, then the
manifest, the reverse of our own order: older releases load an object that has no manifest, so that a manifest removed first
would leave, if anything stopped us there, an object that nobody can check any more and that they still run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from mlactl.cache import listing, locks
from mlactl.cache.adapter import CacheEntry, RootKind
from mlactl.cache.entry import Status
from mlactl.cache.foreign.b12x import entry as entries
from mlactl.cache.foreign.b12x import manifest as manifests
from mlactl.cache.foreign.b12x import prepared
from mlactl.cache.foreign.b12x.entry import ASIDE, Entry
from mlactl.cache.manifest import MAX_OBJECT_BYTES, is_sha256
from mlactl.cache.reading import read_whole
from mlactl.cache.removal import (
    Chosen,
    Kept,
    PlannedEntry,
    PrunePlan,
    build,
    exists_in,
    folder_inside,
    least_recent,
    without_quarantined,
    without_unreadable,
)
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
    chosen, spared = without_quarantined(chosen, selectors)
    picked = _guarded(root, chosen, include_prepared=include_prepared, now=now, on_problem=on_problem)
    if selectors.max_bytes is not None:
        picked = Chosen(least_recent(picked.entries, listing.total_bytes(everything) - selectors.max_bytes, _last_use), picked.kept)
    picked.kept.extend(spared)
    return build(root, RootKind.B12X, selectors.words(), picked, list(everything), now, _paths)


def plan_entries(
    root: Path, everything: list[Entry], wanted: Iterable[Entry], *, include_prepared: bool, now: float, on_problem: Callable[[str], None]
) -> PrunePlan:
    """The plan that removes these entries."""
    named = list(wanted)
    # What a move that was cut short left of the same entry goes too.
    copies = [entry for entry in everything if entries.object_went_back(entry) and any(other.key == entry.key for other in named)]
    chosen = [(entry, "named") for entry in [*named, *(copy for copy in copies if copy not in named)]]
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
                hint="select by --spec, --kernel, --arch, --status, --advisory, --older-than, --unused-for or --max-size",
            )
    if not selectors.narrowed and selectors.max_bytes is None:
        present = ", ".join(listing.kernels_present(everything)) or "no readable manifest"
        raise UsageError(
            f"nothing says what to remove from the b12x cache {root}, and a foreign root has no default selection; it has {present}",
            hint="mlactl cache prune --spec 'KERNEL<N' --dry-run, or --advisory, --kernel, --arch, --status, --older-than, --unused-for, --max-size",
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
    """The chosen less what cannot be read, young temporaries and, unless they were asked for, what preparation files name or may name."""
    picked: list[tuple[CacheEntry, str]] = []
    chosen, kept = without_unreadable(chosen)
    named = prepared.named(root) if chosen else prepared.Named({}, ())
    for text in named.unknown:
        on_problem(text)
    going = 0
    for entry, reason in chosen:
        loadable = not entry.residue and entry.status is not Status.QUARANTINED
        by = named.by.get(entry.key) if loadable else None
        if entry.residue and (entry.written is None or now - entry.written < TEMP_AGE_S):
            kept.append(Kept(entry.key, f"a temporary younger than {age_words(TEMP_AGE_S)}: its writer may still be at work"))
        elif by is not None and not include_prepared:
            kept.append(Kept(entry.key, f"named by {by}; --include-prepared removes it too"))
        elif loadable and named.unknown and not include_prepared:
            kept.append(Kept(entry.key, f"{named.unknown[0]}: it may name this one; --include-prepared removes it all the same"))
        else:
            picked.append((entry, f"{reason}, named by {by}" if by is not None else reason))
            going += by is not None
    if going:
        on_problem(f"named by tuning selections in {root}/preparation: {going} of {len(picked)} to remove; b12x compiles what it needs of them again")
    return Chosen(picked, kept)


def _paths(entry: CacheEntry) -> Iterable[Path]:
    """An entry's files, object first."""
    assert isinstance(entry, Entry)
    copy = entry.bucket / f"{entry.key}.json{entry.aside}" if entry.half else None
    return [path for path in (entry.object_path, entry.manifest_path, copy) if path is not None]


def _last_use(entry: CacheEntry) -> float:
    """What is not known to have been used counts from its writing."""
    assert isinstance(entry, Entry)
    return entry.last_used or entry.written or 0.0


# ---- apply

_NAME = re.compile(rf"[0-9a-f]{{64}}\.(o|json)((?:{re.escape(ASIDE)}(?:\.[1-9][0-9]{{0,3}})?)?)")


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
        if not is_sha256(planned.key) or place != planned.key[:2] or not all(name.startswith(f"{planned.key}.") for name in names):
            return None
        found = [match.groups() for name in names if (match := _NAME.fullmatch(name))]
        if len(found) != len(names):
            return None
        if found[0][0] == "o" and found[0][1] and found[1:2] == [("json", "")]:
            del found[1]  # the half of a move that was cut short
        sound = [part for part, _ in found] in (["o", "json"], ["o"], ["json"]) and len({end for _, end in found}) == 1
        return place if sound else None

    @contextmanager
    def locked(self, root: Path, folder: int, planned: PlannedEntry) -> Iterator[None]:
        """b12x's lock of the key; a temporary whose name says no key has none, and its age was asked instead."""
        if not is_sha256(planned.key) or not planned.files[0].path.startswith(f"{planned.key[:2]}/"):
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

_MAX_ASIDE = 1000
"""Objects of one key that can lie set aside: the reader of names knows numbers up to 9999."""


def set_aside(entry: Entry) -> str | None:
    """Takes an entry away so that no release loads it; why it was not done, or None.

    The manifest is copied beside itself, the object renamed, then the manifest removed: every release sees a manifest without
    an object after the one step that counts, and what was set aside has its manifest from then on. Stopped anywhere, nothing
    is lost and the same call finishes it. What was set aside earlier under the same key stays, under a name of its own, unless
    it is the very same object.
    """
    return _under_lock(entry, _set_aside)


def put_back(entry: Entry) -> str | None:
    """Undoes `set_aside` for an entry that passes the full check, manifest first: an object is never there without what it can
    be checked by. Why it was not done, or None."""
    return _under_lock(entry, _put_back)


def _under_lock(entry: Entry, move: Callable[[Entry, int], str | None]) -> str | None:
    place = f"{entry.root}/{entry.place}"
    with folder_inside(entry.root, entry.place) as folder:
        if folder is None:
            return f"{place} is gone or is a link"
        try:
            with key_lock(entry.root, folder, entry.key):
                refused = move(entry, folder)
                os.fsync(folder)
                return refused
        except CannotRun as error:
            return error.message
        except OSError as error:
            return f"{place}: {error.strerror}"


def _set_aside(entry: Entry, folder: int) -> str | None:
    other = _not_the_judged_one(entry)
    if other is not None:
        return other
    obj, manifest = f"{entry.key}.o", f"{entry.key}.json"
    text = _read_in(folder, manifest, manifests.MAX_BYTES)
    end = next((end for end in _endings() if _has_room(entry, folder, end, text)), None)
    if end is None:
        return f"{entry.root}/{entry.place} holds {_MAX_ASIDE} objects of {entry.key} that were set aside; mlactl cache prune --status quarantined"
    if text is not None and not exists_in(folder, manifest + end):
        _copy(folder, entry.key, manifest, manifest + end, text)
    if exists_in(folder, obj):
        os.rename(obj, obj + end, src_dir_fd=folder, dst_dir_fd=folder)
    if text is not None:
        os.unlink(manifest, dir_fd=folder)
    return None


def _not_the_judged_one(entry: Entry) -> str | None:
    """Why the files that are there now are not the entry that was looked at; None when they are. The key is locked."""
    now = entries.again(entry, uses=False)
    if now is None or now.status is Status.QUARANTINED:
        return f"no file of {entry.key} in {entry.root}/{entry.place}"
    same = now.manifest == entry.manifest and now.object_bytes == entry.object_bytes
    if same and entry.status is Status.OK and entry.manifest is not None:
        # b12x may have written the same bytes again: the object is what was judged, not the file.
        same = hashlib.sha256(entries.read_object(now)).hexdigest() == entry.manifest.object_sha256
    elif same:
        same = now.written == entry.written
    return None if same else _another_one(entry)


def _another_one(entry: Entry) -> str:
    return f"{entry.key} is not the entry that was looked at: b12x has written another one since; mlactl cache audit {entry.key}"


def _endings() -> Iterator[str]:
    yield ASIDE
    for number in range(1, _MAX_ASIDE):
        yield f"{ASIDE}.{number}"


def _has_room(entry: Entry, folder: int, end: str, text: bytes | None) -> bool:
    """Whether nothing is set aside under this ending, or only what the entry itself is: left by a call that was cut short, or the same object."""
    obj, manifest = f"{entry.key}.o{end}", f"{entry.key}.json{end}"
    if not exists_in(folder, obj) and not exists_in(folder, manifest):
        return True
    if text is None or entry.manifest is None or _read_in(folder, manifest, manifests.MAX_BYTES) != text:
        return False
    if not exists_in(folder, obj):
        return True
    data = _read_in(folder, obj, MAX_OBJECT_BYTES)
    return data is not None and hashlib.sha256(data).hexdigest() == entry.manifest.object_sha256


def _put_back(entry: Entry, folder: int) -> str | None:
    place, obj, manifest = f"{entry.root}/{entry.place}", f"{entry.key}.o", f"{entry.key}.json"
    now = entries.again(entry, uses=False)
    if not entry.aside or now is None:
        return f"{entry.key} is not set aside in {place}"
    if now.manifest != entry.manifest:
        return _another_one(entry)
    checked = entries.in_place(now)
    if checked.status not in (Status.OK, Status.NO_MANIFEST):
        return f"{entry.key} stays quarantined: it is not intact: {checked.status}: {checked.detail}"
    if not checked.aside:  # cut short after the object: all that is left is the copy of its manifest
        os.unlink(manifest + entry.aside, dir_fd=folder)
        return None
    text, there = (_read_in(folder, name, manifests.MAX_BYTES) for name in (manifest + entry.aside, manifest))
    taken = obj if exists_in(folder, obj) else manifest if exists_in(folder, manifest) and not now.half else None
    if taken is not None:
        return f"{place}/{taken} is there already: b12x compiled it again; mlactl cache rm removes that one"
    if text is not None and there is None:
        _copy(folder, entry.key, manifest + entry.aside, manifest, text)
    os.rename(obj + entry.aside, obj, src_dir_fd=folder, dst_dir_fd=folder)
    if text is not None:
        os.unlink(manifest + entry.aside, dir_fd=folder)
    return None


def _read_in(folder: int, name: str, limit: int) -> bytes | None:
    """A file of an open folder; None where there is none."""
    try:
        return read_whole(name, limit, folder=folder)[0]
    except FileNotFoundError:
        return None


def _copy(folder: int, key: str, name: str, new: str, text: bytes) -> None:
    """Writes a manifest under another name, complete whenever it is there, with its owner, mode and time."""
    info = os.stat(name, dir_fd=folder, follow_symlinks=False)
    temporary = f".{key}.json.{secrets.token_hex(4)}.tmp"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        with open(fd, "wb") as file:
            file.write(text)
            file.flush()
            if os.geteuid() == 0:
                os.fchown(fd, info.st_uid, info.st_gid)
            os.fchmod(fd, stat.S_IMODE(info.st_mode))
            os.utime(fd, ns=(info.st_atime_ns, info.st_mtime_ns))
            os.fsync(fd)
        os.rename(temporary, new, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
        raise
