"""One entry: its files, its state, and reading it so that what was checked is what gets used.

Two depths. `read_entry` looks at names, sizes and the manifest, which is what a listing of many entries can afford.
`check_object` looks at the object's bytes as well: digest, embedded arch, symbol, signature.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from enum import StrEnum
from pathlib import Path

import msgspec

from mlactl.cache import trust
from mlactl.cache.manifest import MAX_BYTES, MAX_OBJECT_BYTES, BadManifest, Manifest, parse
from mlactl.cache.reading import not_regular, out_of_reach, read_regular, refusal, withheld
from mlactl.cache.roots import Layer
from mlactl.kernels.errors import BadObject

REMOVED = "removed meanwhile"
"""Detail of an entry of which a layer has no file."""


class Status(StrEnum):
    """State of an entry, in the words every listing uses; anything but `ok` is a miss at load. `key` and `schema` are of foreign roots.

    `unreadable` is no damage: reading was refused (another user's files) or failed (a disk), so that nothing is known of the content.
    """

    OK = "ok"
    NO_MANIFEST = "no-manifest"
    NO_OBJECT = "no-object"
    BAD_MANIFEST = "bad-manifest"
    UNREADABLE = "unreadable"
    SIZE = "size"
    DIGEST = "digest"
    ARCH = "arch"
    SYMBOL = "symbol"
    SIGNATURE = "signature"
    TEMP = "temp"
    LOCKED = "locked"
    QUARANTINED = "quarantined"
    UNTRUSTED = "untrusted"
    KEY = "key"
    SCHEMA = "schema"


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One entry of one layer, or a temporary that a writer left or is writing (`residue` is its name in the bucket).

    `detail` says what is wrong when `status` is not ok. `object_bytes` is the size on disk; `last_used` the manifest's
    modification time in seconds since 1970, None when there is none to go by.
    """

    key: str
    layer: Layer
    manifest: Manifest | None
    status: Status
    detail: str = ""
    object_bytes: int | None = None
    last_used: float | None = None
    residue: str = ""

    @property
    def root(self) -> Path:
        """The folder of its layer."""
        return self.layer.path

    @property
    def object_path(self) -> Path:
        """The linked object, or the temporary."""
        return Path(self.layer.bucket(self.key), self.residue or f"{self.key}.so")

    @property
    def manifest_path(self) -> Path | None:
        """The manifest, or where one would be; None for a temporary, which never has one."""
        if self.residue:
            return None
        return Path(self.layer.bucket(self.key), f"{self.key}{'.quarantined' if self.status is Status.QUARANTINED else '.json'}")


class RejectedObject(BadObject):
    """An entry that must not be used; `entry` has the status."""

    def __init__(self, entry: Entry) -> None:
        super().__init__(
            f"{entry.object_path} is not usable: {entry.status}: {entry.detail}",
            hint="mlactl cache verify; mlactl warmup --profile PROFILE builds it again",
        )
        self.entry = entry


def read_entry(layer: Layer, key: str) -> Entry | None:
    """The entry of a full key in one layer; None when the layer has no file of it, or a link stands for its folder."""
    bucket = layer.bucket(key)
    if linked(layer, key) is not None:
        return None
    quarantined = os.path.lexists(f"{bucket}/{key}.quarantined")
    manifest = os.path.lexists(f"{bucket}/{key}.json")
    if not quarantined and not manifest and not os.path.lexists(f"{bucket}/{key}.so"):
        return None
    return shallow(layer, bucket, key, manifest=manifest, quarantined=quarantined)


def linked(layer: Layer, key: str) -> str | None:
    """Path of a symbolic link in the place of `v1` or of a key's bucket, which is never followed; None when there is none.

    The root itself may be a link: whoever runs this tool chose it.
    """
    return next((path for path in (layer.folder(), layer.bucket(key)) if os.path.islink(path)), None)  # noqa: PTH114  once a lookup


def shallow(layer: Layer, bucket: str, key: str, *, manifest: bool, quarantined: bool) -> Entry | None:
    """The entry by name, size and manifest, given which of its files a listing of the bucket showed; None when it is gone by now."""
    object_bytes, problem = _object_size(f"{bucket}/{key}.so")
    try:
        if quarantined:
            found, _, _, last_used = _read_manifest(f"{bucket}/{key}.quarantined", key)
            return Entry(key, layer, found, Status.QUARANTINED, "set aside: mlactl cache show says what speaks against it", object_bytes, last_used)
        if manifest:
            found, status, wrong, last_used = _read_manifest(f"{bucket}/{key}.json", key)
    except FileNotFoundError:  # removed since the listing, the manifest first
        manifest = False
    if not manifest:
        refused = out_of_reach(f"{bucket}/{key}.so")
        if refused is not None:
            return Entry(key, layer, None, Status.UNREADABLE, refusal(f"{bucket}/{key}.so", refused))
        if object_bytes is None and not os.path.lexists(f"{bucket}/{key}.so"):
            return None
        said = problem or "an object that was never committed, or whose manifest was removed"
        return Entry(key, layer, None, Status.NO_MANIFEST, said, object_bytes)
    if found is None:
        return Entry(key, layer, None, status, wrong, object_bytes, last_used)
    if object_bytes is None:
        refused = out_of_reach(f"{bucket}/{key}.so")
        status, problem = (Status.NO_OBJECT, problem) if refused is None else _unread(f"{bucket}/{key}.so", refused)
        return Entry(key, layer, found, status, problem, None, last_used)
    if object_bytes != found.object_bytes:
        return Entry(key, layer, found, Status.SIZE, f"{object_bytes} bytes, expected {found.object_bytes}", object_bytes, last_used)
    return Entry(key, layer, found, Status.OK, "", object_bytes, last_used)


def check_bytes(data: bytes, size_bytes: int, sha256: str) -> tuple[Status, str]:
    """Status of an object's bytes against the size and digest that its manifest records."""
    if len(data) != size_bytes:
        return Status.SIZE, f"{len(data)} bytes, expected {size_bytes}"
    digest = hashlib.sha256(data).hexdigest()
    if digest != sha256:
        return Status.DIGEST, f"SHA-256 {digest}, expected {sha256}"
    return Status.OK, ""


def check_object(manifest: Manifest, data: bytes, *, digests_only: bool = False) -> tuple[Status, str]:
    """Status of an object's bytes against its manifest, and what was found and expected when it is not ok.

    Size and SHA-256, then (unless `digests_only`) what the ELF says: host and device arch, exported symbol, signature.
    """
    status, detail = check_bytes(data, manifest.object_bytes, manifest.object_sha256)
    if status is not Status.OK or digests_only:
        return status, detail
    from mlactl.cache import elf

    try:
        found = elf.identify(data)
    except elf.BadElf as error:
        return status_of_part(error.part), error.reason
    if found.arch != manifest.arch or found.host != manifest.host_arch:
        return Status.ARCH, f"the object is for {found.arch} on {found.host}, expected {manifest.arch} on {manifest.host_arch}"
    if manifest.symbol not in found.symbols:
        return Status.SYMBOL, f"exports {', '.join(found.symbols)}, expected {manifest.symbol}"
    if found.signature != manifest.signature:
        return Status.SIGNATURE, f"signature {found.signature}, expected {manifest.signature}"
    return Status.OK, ""


def status_of_part(part: str) -> Status:
    """Status for the part of an object where reading it failed (`elf.BadElf.part`)."""
    return {"cubin": Status.ARCH, "signature": Status.SIGNATURE}.get(part, Status.SYMBOL)


def examine(entry: Entry, *, digests_only: bool = False) -> Entry:
    """The entry with the status of a full check, owner and mode included; one that is not ok already comes back as it is."""
    if entry.status is not Status.OK or entry.manifest is None:
        return entry
    refused = distrust(entry)
    if refused is not None:
        return _restate(entry, Status.UNTRUSTED, refused.message)
    try:
        data, _ = read_regular(str(entry.object_path), entry.manifest.object_bytes)
    except OSError as error:
        return _restate(entry, *_unread(entry.object_path, error))
    status, detail = check_object(entry.manifest, data, digests_only=digests_only)
    return entry if status is Status.OK else _restate(entry, status, detail)


def distrust(entry: Entry) -> trust.Untrusted | None:
    """Why a load of this entry would refuse its owner or mode, with how to mend that; None when it would not."""
    root = str(entry.layer.path)
    if trust.exempt(root):
        return None
    try:
        trust.check_folders(entry.layer.bucket(entry.key), root)
        for path in (entry.manifest_path, entry.object_path):
            if path is not None and os.path.lexists(path):
                trust.check(path, path.lstat())
    except FileNotFoundError:
        return None  # removed meanwhile
    except trust.Untrusted as refused:
        return refused
    return None


def read_checked(entry: Entry, *, trusted_folders: set[str] | None = None) -> tuple[Manifest, bytes]:
    """Manifest and object of an entry as they are now, each read on one descriptor whose owner, mode and content are checked.

    Whoever reads thousands gives a set: of a root that is in it, the folders above the bucket are not looked at again.
    Raises Untrusted when others could have written any of it, and RejectedObject when the entry is not ok.
    """
    bucket, key, root = entry.layer.bucket(entry.key), entry.key, str(entry.layer.path)
    exempt = trust.exempt(root)
    if not exempt and (trusted_folders is None or root not in trusted_folders):
        trust.check_folders(bucket, root)
        if trusted_folders is not None:
            trusted_folders.add(root)
    try:
        if linked(entry.layer, key) is not None or os.path.lexists(f"{bucket}/{key}.quarantined"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), bucket)
        if not exempt:
            trust.check(bucket, os.lstat(bucket))
        text, info = read_regular(f"{bucket}/{key}.json", MAX_BYTES)
        if not exempt:
            trust.check(f"{bucket}/{key}.json", info)
        manifest = parse(text)
        data, info = read_regular(f"{bucket}/{key}.so", manifest.object_bytes)
        if not exempt:
            trust.check(f"{bucket}/{key}.so", info)
    except BadManifest as error:
        raise _rejected(entry, Status.BAD_MANIFEST, error.reason) from None
    except OSError as error:
        raise _rejected(entry, *_unread(error.filename or bucket, error)) from None
    status, detail = check_object(manifest, data) if manifest.key == key else (Status.BAD_MANIFEST, f"it is the manifest of {manifest.key}")
    if status is not Status.OK:
        raise _rejected(entry, status, detail)
    return manifest, data


def read_object(entry: Entry) -> bytes:
    """The object's bytes as they are, nothing checked; raises OSError, also for what is no regular file."""
    return read_regular(str(entry.object_path), MAX_OBJECT_BYTES)[0]


def _rejected(entry: Entry, status: Status, detail: str) -> RejectedObject:
    """The refusal of an entry whose reading failed: what names, sizes and manifest say by now, else what reading found."""
    fresh = read_entry(entry.layer, entry.key)
    if fresh is None:
        return RejectedObject(_restate(entry, Status.NO_OBJECT, REMOVED))
    return RejectedObject(fresh if fresh.status is not Status.OK else _restate(fresh, status, detail))


def _restate(entry: Entry, status: Status, detail: str) -> Entry:
    return msgspec.structs.replace(entry, status=status, detail=detail)


def why_no_manifest(path: str, key: str) -> tuple[Status, str]:
    """Status and what is wrong of a manifest that a listing could not make out; `ok` where it can be by now."""
    try:
        _, status, wrong, _ = _read_manifest(path, key)
    except FileNotFoundError:
        return Status.NO_MANIFEST, REMOVED
    return status, wrong


def _read_manifest(path: str, key: str) -> tuple[Manifest | None, Status, str, float | None]:
    """The manifest, or None with a status and what is wrong with it; and the file's modification time. Raises FileNotFoundError."""
    try:
        data, info = read_regular(path, MAX_BYTES)
    except FileNotFoundError:
        raise
    except OSError as error:
        return (None, Status.UNREADABLE, refusal(path, error), None) if withheld(error) else (None, Status.BAD_MANIFEST, _why(error), None)
    last_used = info.st_mtime if info.st_mtime > 0 else None
    try:
        manifest = parse(data)
    except BadManifest as error:
        return None, Status.BAD_MANIFEST, error.reason, last_used
    if manifest.key != key:
        return None, Status.BAD_MANIFEST, f"it is the manifest of {manifest.key}", last_used
    return manifest, Status.OK, "", last_used


def _unread(path: str | Path, error: OSError) -> tuple[Status, str]:
    """Status and detail of an entry a file of which was not read."""
    return (Status.UNREADABLE, refusal(path, error)) if withheld(error) else (Status.NO_OBJECT, _why(error))


def _object_size(path: str) -> tuple[int | None, str]:
    try:
        info = os.lstat(path)
    except OSError as error:
        return None, _why(error)
    if not stat.S_ISREG(info.st_mode):
        return None, not_regular(info.st_mode)
    return info.st_size, ""


def _why(error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return "the object is not there"
    if error.errno == errno.ELOOP:
        return f"{not_regular(stat.S_IFLNK)}, which is never followed"
    return error.strerror or str(error)
