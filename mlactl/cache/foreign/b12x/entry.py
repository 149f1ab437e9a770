"""Entries of a b12x root: its files by name, their state by names, sizes and manifests, and the full check of an object.

`<root>/<key[:2]>/<key>.{o,json,lock}`. Nothing of another name is looked at, counted or touched. What this tool sets aside is
`<key>.o.quarantined` and `<key>.json.quarantined`, for the next object of the same key `<key>.o.quarantined.1` and so on: no release
opens a file of such a name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from mlactl.cache import elf, trust
from mlactl.cache.entry import Status, check_bytes, status_of_part
from mlactl.cache.foreign.b12x import manifest as manifests
from mlactl.cache.foreign.b12x.manifest import Document, Manifest, Rejected
from mlactl.cache.manifest import MAX_OBJECT_BYTES, is_sha256
from mlactl.cache.reading import READ_FLAGS, lock_holder, not_regular, out_of_reach, read_whole, refusal, withheld
from mlactl.errors import CannotRun

ASIDE = ".quarantined"
SYMBOL_PREFIXES = ("b12x_cute_", "sparkinfer_cute_")

_HEX = "0123456789abcdef"
_FILE = re.compile(r"([0-9a-f]{64})\.(lock|(?:o|json)(?:\.quarantined(?:\.[1-9][0-9]{0,3})?)?)")
RESIDUE = re.compile(r"[0-9a-f]{64}\.tmp|\.[0-9a-f]{64}\.(?:o|json)\.[A-Za-z0-9_]{1,32}\.tmp|\.peer-.{1,200}|\._stage_[0-9a-f]{1,64}")
"""What unfinished writers of one release or another leave: older ones `<key>.tmp`, newer ones the others."""
_KEY_INSIDE = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One entry of a root, or what a writer left (`residue` is its file name, `key` that name too where no key stands in it).

    `written` is when the object was written, or the manifest where there is no object; `last_used` when the object was last
    read, None where the filesystem does not say. Both are seconds since 1970. `aside` is the ending of the files of an entry that
    was set aside; `half` says that its manifest still, or again, has the name of a live one, because the move was cut short.
    """

    key: str
    root: Path
    manifest: Manifest | None
    status: Status
    detail: str = ""
    object_bytes: int | None = None
    last_used: float | None = None
    residue: str = ""
    written: float | None = None
    place: str = ""
    aside: str = ""
    half: bool = False

    @property
    def bucket(self) -> Path:
        """The folder of its files."""
        return Path(self.root, self.place)

    @property
    def object_path(self) -> Path:
        """The compiled object, where it was set aside if it was, or the temporary."""
        return Path(self.bucket, self.residue or f"{self.key}.o{self.aside}")

    @property
    def manifest_path(self) -> Path | None:
        """The manifest, or where one would be; None for a temporary."""
        return None if self.residue else Path(self.bucket, f"{self.key}.json{'' if self.half else self.aside}")

    @property
    def lock_path(self) -> Path | None:
        """The lock of b12x's own writers; None where the name of a temporary says no key."""
        return Path(self.bucket, f"{self.key}.lock") if is_sha256(self.key) else None


def is_bucket(name: str) -> bool:
    """Whether a folder's name is two lower-case hex digits."""
    return len(name) == 2 and not name.strip(_HEX)


def recognised(bucket: str, name: str) -> bool:
    """Whether a file in a bucket has a name of this format."""
    return RESIDUE.fullmatch(name) is not None or (_FILE.fullmatch(name) is not None and name.startswith(bucket))


# ---- listing


def buckets(root: Path, on_problem: Callable[[str], None] = lambda _: None) -> list[str]:
    """Names of the bucket folders; a link in the place of one is not followed but told to `on_problem`. Raises CannotRun."""
    names = []
    try:
        with os.scandir(root) as found:
            for item in found:
                if not is_bucket(item.name):
                    continue
                if item.is_dir(follow_symlinks=False):
                    names.append(item.name)
                elif item.is_symlink():
                    on_problem(f"{item.path} is a symbolic link, which is never followed below the root")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CannotRun(f"{trust.describe(root)} cannot be read: {error.strerror}", hint="name another root: --cache-dir DIR") from None
    return sorted(names)


def in_root(root: Path, *, uses: bool, on_problem: Callable[[str], None] = lambda _: None) -> Iterator[Entry]:
    """Every entry and temporary of a root, by bucket and key; `uses` says whether access times tell the last use."""
    for bucket in buckets(root, on_problem):
        try:
            yield from in_bucket(root, bucket, uses=uses)
        except OSError as error:
            on_problem(f"{trust.describe(f'{root}/{bucket}')} cannot be read: {error.strerror}")
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(root)):
            # Staged copies were seen beside the buckets as well as in them.
            if name.startswith((".peer-", "._stage_")) and RESIDUE.fullmatch(name):
                yield _residue(root, "", name)


def in_bucket(root: Path, bucket: str, *, uses: bool) -> Iterator[Entry]:
    """Every entry and temporary of one bucket; raises OSError."""
    files: dict[str, set[str]] = {}
    temporaries = []
    for name in os.listdir(f"{root}/{bucket}"):
        match = _FILE.fullmatch(name)
        if match is not None:
            if name.startswith(bucket):
                files.setdefault(match[1], set()).add(match[2])
        elif RESIDUE.fullmatch(name):
            temporaries.append(name)
    for key in sorted(files):
        yield from of_key(root, key, files[key], uses=uses)
    for name in sorted(temporaries):
        yield _residue(root, bucket, name)


def of_key(root: Path, key: str, suffixes: set[str], *, uses: bool) -> Iterator[Entry]:
    """The entry of a key, given which of its files there are, and those that were set aside, the first one first."""
    aside = sorted({f"{ASIDE}{end}" for suffix in suffixes for _, mark, end in [suffix.partition(ASIDE)] if mark}, key=lambda end: (len(end), end))
    half = next((end for end in aside if _is_half(root, key, suffixes, end)), None) if "json" in suffixes and "o" not in suffixes else None
    if ("o" in suffixes or "json" in suffixes) and half is None:
        entry = _live(root, key, suffixes, uses=uses)
        if entry is not None:
            yield entry
    elif "lock" in suffixes and not aside:
        # A lock alone is what a miss or a removal leaves, and no entry; a held one is a compile at work.
        holder = lock_holder(f"{root}/{key[:2]}/{key}.lock")
        if holder is not None:
            yield Entry(key, root, None, Status.LOCKED, f"being compiled: {holder}", place=key[:2])
    for end in aside:
        yield _set_aside(root, key, end, half=end == half)


def again(entry: Entry, *, uses: bool) -> Entry | None:
    """The same entry as it is now; None when it is gone."""
    if entry.residue:
        return entry if os.path.lexists(entry.object_path) else None
    names = ("lock", "o", "json", f"o{entry.aside}", f"json{entry.aside}")
    there = {name for name in names if os.path.lexists(entry.bucket / f"{entry.key}.{name}")}
    now = next((other for other in of_key(entry.root, entry.key, there, uses=uses) if other.aside == entry.aside), None)
    # In a folder that this user may list and not enter nothing is known to be gone.
    return entry if now is None and out_of_reach(entry.object_path) else now


def _is_half(root: Path, key: str, suffixes: set[str], end: str) -> bool:
    """Whether a manifest without an object is of the object that is set aside under this ending: a move was cut short between the two.

    Its copy is beside that object, or none is and the sizes fit; the full check of the object is made before it goes back.
    """
    if f"o{end}" not in suffixes:
        return False
    base = f"{root}/{key[:2]}/{key}"
    try:
        text = read_whole(f"{base}.json", manifests.MAX_BYTES)[0]
        if f"json{end}" in suffixes:
            return read_whole(f"{base}.json{end}", manifests.MAX_BYTES)[0] == text
        return manifests.parse(text, key).object_bytes == os.lstat(f"{base}.o{end}").st_size
    except (OSError, Rejected):
        return False


def _live(root: Path, key: str, suffixes: set[str], *, uses: bool) -> Entry | None:
    base = f"{root}/{key[:2]}/{key}"
    size, problem, written, last_used = _object(f"{base}.o", uses=uses)
    found: Manifest | None = None
    status, detail = Status.OK, ""
    if "json" in suffixes:
        try:
            data, info = read_whole(f"{base}.json", manifests.MAX_BYTES)
            written = written or info.st_mtime
            found = manifests.parse(data, key)
        except Rejected as rejected:
            status, detail = rejected.status, rejected.reason
        except FileNotFoundError:
            suffixes = suffixes - {"json"}
        except OSError as error:
            status, detail = (Status.UNREADABLE, refusal(f"{base}.json", error)) if withheld(error) else (Status.BAD_MANIFEST, _why(error))
    refused = out_of_reach(f"{base}.o") if size is None else None
    if refused is not None:
        status, detail = Status.UNREADABLE, refusal(f"{base}.o", refused)
    elif "json" not in suffixes:
        if size is None and not os.path.lexists(f"{base}.o"):
            return None
        status, detail = (
            Status.NO_MANIFEST,
            problem or "no manifest: older releases load it as it is, 1.5.1 treats it as a miss",
        )
    elif found is not None and size is None:
        status, detail = Status.NO_OBJECT, problem or "a manifest without its object: a miss to every release"
    elif found is not None and size != found.object_bytes:
        status, detail = Status.SIZE, f"{size} bytes, expected {found.object_bytes}"
    if status is not Status.OK:
        holder = lock_holder(f"{base}.lock") if "lock" in suffixes else None
        if holder is not None:
            status, detail = Status.LOCKED, f"being compiled: {holder}"
    return Entry(key, root, found, status, detail, size, last_used, "", written, key[:2])


def _set_aside(root: Path, key: str, aside: str, *, half: bool) -> Entry:
    base = f"{root}/{key[:2]}/{key}"
    size, _, written, _ = _object(f"{base}.o{aside}", uses=False)
    found: Manifest | None = None
    with contextlib.suppress(OSError, Rejected):
        found = manifests.parse(read_whole(f"{base}.json{'' if half else aside}", manifests.MAX_BYTES)[0], key)
    detail = "set aside: no release of b12x loads it under this name"
    if half:
        detail += f"; a move was cut short: mlactl cache audit {key[:12]} --restore completes it, mlactl cache rm {key[:12]} removes both halves"
    return Entry(key, root, found, Status.QUARANTINED, detail, size, None, "", written, key[:2], aside, half)


def _residue(root: Path, place: str, name: str) -> Entry:
    size, problem, written, _ = _object(f"{root}/{place}/{name}", uses=False)
    inside = _KEY_INSIDE.search(name)
    key = inside[0] if inside and (not place or inside[0].startswith(place)) else name
    entry = Entry(key, root, None, Status.TEMP, problem or "left by a writer that did not finish", size, None, name, written, place)
    holder = lock_holder(str(entry.lock_path)) if entry.lock_path is not None and place else None
    return entry if holder is None else msgspec.structs.replace(entry, status=Status.LOCKED, detail=f"being written: {holder}")


def _object(path: str, *, uses: bool) -> tuple[int | None, str, float | None, float | None]:
    """(size, what is wrong, when it was written, when it was last read) of an object."""
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return None, "", None, None
    except OSError as error:
        return None, error.strerror or str(error), None, None
    if not stat.S_ISREG(info.st_mode):
        return None, not_regular(info.st_mode), None, None
    # An access time that is not after the last write says nothing: nobody has read it, or the mount keeps no such times.
    return info.st_size, "", info.st_mtime, info.st_atime if uses and info.st_atime > info.st_mtime else None


# ---- reading


def _why(error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return f"{not_regular(stat.S_IFLNK)}, which is never followed"
    return error.strerror or str(error)


def read_object(entry: Entry) -> bytes:
    """The object's bytes, leaving its access time alone where the system lets us: it is what tells the last use. Raises OSError."""
    path = str(entry.object_path)
    try:
        return read_whole(path, MAX_OBJECT_BYTES, flags=READ_FLAGS | os.O_NOATIME)[0]
    except PermissionError:  # another owner's file
        return read_whole(path, MAX_OBJECT_BYTES)[0]


def read_document(entry: Entry) -> Document:
    """The whole manifest of an entry; raises OSError and Rejected."""
    if entry.manifest_path is None:
        raise Rejected(Status.NO_MANIFEST, "a temporary has no manifest")
    return manifests.read_document(read_whole(str(entry.manifest_path), manifests.MAX_BYTES)[0])


def read_maker(entry: Entry) -> manifests.Maker:
    """What a manifest says of the package and the tools that wrote it; raises OSError and Rejected."""
    return manifests.maker(read_whole(str(entry.manifest_path), manifests.MAX_BYTES)[0])


def examine(entry: Entry, *, digests_only: bool = False) -> Entry:
    """The entry with the status of a full check: payload, size, digest and (unless `digests_only`) symbols and arch of the ELF.

    One that is not ok already comes back as it is.
    """
    if entry.status is not Status.OK or entry.manifest is None:
        return entry
    try:
        manifests.check(entry.manifest, read_document(entry))
        data = read_object(entry)
    except Rejected as rejected:
        return _restate(entry, rejected.status, rejected.reason)
    except OSError as error:
        return _unread(entry, error)
    status, detail = check_object(entry.key, entry.manifest, data, digests_only=digests_only)
    return entry if status is Status.OK else _restate(entry, status, detail)


def in_place(entry: Entry) -> Entry:
    """An entry that was set aside with the status that the full check would give it were it put back; its files stay where they are.

    A bare object, which never had a manifest, is held to its key's symbol alone. Where a move was cut short after the object went back,
    that object is the one to check.
    """
    assert entry.manifest_path is not None
    if entry.manifest is None and (os.path.lexists(entry.manifest_path) or out_of_reach(entry.manifest_path)):
        return _why_no_manifest(entry)
    if entry.manifest is not None and object_went_back(entry):
        back = msgspec.structs.replace(entry, aside="")
        size = _object(str(back.object_path), uses=False)[0]
        return examine(msgspec.structs.replace(back, status=Status.OK, detail="", object_bytes=size))
    if entry.manifest is not None:
        return examine(_restate(entry, Status.OK, ""))
    try:
        found = elf.identify_foreign(read_object(entry))
    except elf.BadElf as error:
        return _restate(entry, status_of_part(error.part), error.reason)
    except OSError as error:
        return _unread(entry, error)
    if not exports(found.symbols, entry.key):
        return _restate(entry, Status.SYMBOL, f"exports no function of {entry.key}")
    return _restate(entry, Status.NO_MANIFEST, "it was set aside without a manifest")


def _why_no_manifest(entry: Entry) -> Entry:
    try:
        manifests.parse(read_whole(str(entry.manifest_path), manifests.MAX_BYTES)[0], entry.key)
    except Rejected as rejected:
        return _restate(entry, rejected.status, rejected.reason)
    except OSError as error:
        return _unread(entry, error) if withheld(error) else _restate(entry, Status.BAD_MANIFEST, _why(error))
    return _restate(entry, Status.UNREADABLE, "its manifest was replaced while it was looked at")


def object_went_back(entry: Entry) -> bool:
    """Whether only the manifest of an entry is still set aside, and the live files are those it is the copy of."""
    live = f"{entry.root}/{entry.place}/{entry.key}"
    if not entry.aside or os.path.lexists(f"{live}.o{entry.aside}") or not os.path.lexists(f"{live}.o"):
        return False
    try:
        return read_whole(f"{live}.json", manifests.MAX_BYTES)[0] == read_whole(f"{live}.json{entry.aside}", manifests.MAX_BYTES)[0]
    except OSError:
        return False


def check_object(key: str, manifest: Manifest, data: bytes, *, digests_only: bool = False) -> tuple[Status, str]:
    """Status of an object's bytes against its manifest, and what was found and expected when it is not ok."""
    status, detail = check_bytes(data, manifest.object_bytes, manifest.object_sha256)
    if status is not Status.OK or digests_only:
        return status, detail
    try:
        found = elf.identify_foreign(data)
    except elf.BadElf as error:
        return status_of_part(error.part), error.reason
    if not exports(found.symbols, key):
        named = ", ".join(sorted({prefix for name in found.symbols if (prefix := _entry_point(name))})) or "no such function"
        return Status.SYMBOL, f"exports {named}, expected {' or '.join(f'{prefix}{key}' for prefix in SYMBOL_PREFIXES)}"
    if manifest.arch and found.arch != manifest.arch:
        return Status.ARCH, f"the object is for {found.arch}, expected {manifest.arch}"
    return Status.OK, ""


def exports(symbols: tuple[str, ...], key: str) -> bool:
    """Whether these symbols are of the key's object: the exporter writes several, each the function's name and a suffix."""
    wanted = tuple(f"{prefix}{key}" for prefix in SYMBOL_PREFIXES)
    return any(name.startswith(wanted) for name in symbols)


_ENTRY_POINT = re.compile(r"(?:b12x|sparkinfer)_cute_[0-9a-f]{64}")


def _entry_point(name: str) -> str:
    match = _ENTRY_POINT.match(name)
    return match[0] if match else ""


def entry_points(symbols: tuple[str, ...]) -> tuple[str, ...]:
    """The functions an object exports, without the suffixes of their parts."""
    return tuple(sorted({_entry_point(name) for name in symbols} - {""}))


def _unread(entry: Entry, error: OSError) -> Entry:
    """An entry a file of which was not read."""
    if withheld(error):
        return _restate(entry, Status.UNREADABLE, refusal(error.filename or entry.object_path, error))
    return _restate(entry, Status.NO_OBJECT, _why(error))


def _restate(entry: Entry, status: Status, detail: str) -> Entry:
    return msgspec.structs.replace(entry, status=status, detail=detail)
