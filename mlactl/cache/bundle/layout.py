"""The bundle format: a zstd-compressed tar that starts with a list of what is in it (docs/bundles.md).

Nothing in a bundle says when, where or by whom it was made: equal entries give equal bytes. A reader accepts exactly
what a writer makes, header by header, so links, devices, foreign paths and repeats need no rules of their own.
"""

from __future__ import annotations

import tarfile

import msgspec

from mlactl.cache import elf
from mlactl.cache.bundle.packages import Requirement
from mlactl.cache.key import canonical_bytes
from mlactl.cache.manifest import MAX_BYTES, Manifest, is_sha256
from mlactl.errors import MendedElsewhere
from mlactl.printable import plain

SCHEMA_VERSION = 1
LISTING_NAME = "bundle.json"
MAX_LISTING_BYTES = 16 << 20
"""About 15,000 entries; more than that is split with `--arch` or `--kernel`. Decoded it takes up to ten times as much memory."""

MAX_OBJECT_BYTES = elf.MAX_OBJECT_BYTES
"""What a load accepts: a member that is announced larger is refused before it is unpacked."""

MAX_TOTAL_BYTES = 64 << 30
"""Objects and manifests of one bundle together; what lists more is refused before anything is unpacked."""

BLOCK_BYTES = 512
END = bytes(2 * BLOCK_BYTES)
"""What ends a tar archive; no padding to a record follows."""

WINDOW_LOG = 21
"""2 MiB: what `zstd -3` takes, and all that a reader grants a bundle."""


class BadBundle(MendedElsewhere):
    """Bytes that are not a bundle of this release, or whose content is not what it says; nothing of it is imported."""

    exit_code = 1

    def __init__(self, reason: str) -> None:
        super().__init__(reason, hint="make it again where it came from: mlactl cache export -o FILE")
        self.reason = reason


class FileRow(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One member: its name in the archive, SHA-256 and size in bytes."""

    name: str
    sha256: str
    size: int


class EntryRow(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One entry: what it was compiled for, and its members, the manifest first. `spec` and `toolchain` are as in its manifest."""

    # Alphabetical, as canonical JSON has it.
    arch: str
    files: tuple[FileRow, FileRow]
    host_arch: str
    key: str
    spec: msgspec.Raw
    toolchain: msgspec.Raw


class Listing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`bundle.json`: the entries by key, and the packages that a node without the compiler needs to load them."""

    entries: tuple[EntryRow, ...]
    requires: tuple[Requirement, ...]
    schema_version: int


class _SchemaOnly(msgspec.Struct):
    schema_version: int


_decoder = msgspec.json.Decoder(Listing)
_encoder = msgspec.json.Encoder(order="sorted")


def member_names(key: str) -> tuple[str, str]:
    """Names of an entry's members in the order they stand in the archive: manifest, object."""
    return f"{key[:2]}/{key}.json", f"{key[:2]}/{key}.so"


def row(manifest: Manifest, text_sha256: str, text_bytes: int) -> EntryRow:
    """The row of an entry, given digest and size of its manifest's bytes."""
    names = member_names(manifest.key)
    return EntryRow(
        arch=manifest.arch,
        files=(FileRow(names[0], text_sha256, text_bytes), FileRow(names[1], manifest.object_sha256, manifest.object_bytes)),
        host_arch=manifest.host_arch,
        key=manifest.key,
        spec=msgspec.Raw(canonical_bytes(manifest.spec.as_json())),
        toolchain=msgspec.Raw(canonical_bytes(manifest.toolchain.as_json())),
    )


def same_row(one: EntryRow, other: EntryRow) -> bool:
    """Whether two rows are spelled alike."""
    return _encoder.encode(one) == _encoder.encode(other)


def dump(listing: Listing) -> bytes:
    """The one spelling of a listing: canonical JSON and a newline."""
    return _encoder.encode(listing) + b"\n"


def parse(data: bytes) -> Listing:
    """The listing spelled by `data`, every name, size and digest in it possible; raises BadBundle for everything else."""
    try:
        listing = _decoder.decode(data)
        canonical = dump(listing)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadBundle(_reason(data, error)) from None
    if listing.schema_version != SCHEMA_VERSION:
        raise BadBundle(_other_schema(listing.schema_version))
    if canonical != data:
        raise BadBundle(f"{LISTING_NAME} is not in canonical form: edited, or written by something else")
    if not listing.entries:
        raise BadBundle(f"{LISTING_NAME} lists no entries")
    last, total = "", 0
    for entry in listing.entries:
        if not is_sha256(entry.key) or entry.key <= last:
            raise BadBundle(f"{LISTING_NAME}: key {plain(entry.key)} is no key, listed twice or out of order")
        last = entry.key
        for file, name, limit in zip(entry.files, member_names(entry.key), (MAX_BYTES, MAX_OBJECT_BYTES), strict=True):
            if file.name != name:
                raise BadBundle(f"{LISTING_NAME}: member {plain(file.name)} is not one that entry {entry.key[:12]} has, expected {name}")
            if not 0 < file.size <= limit:
                raise BadBundle(f"{LISTING_NAME}: member {name} of {file.size} bytes, expected 1 to {limit}")
            if not is_sha256(file.sha256):
                raise BadBundle(f"{LISTING_NAME}: member {name} has no SHA-256")
            total += file.size
    if total > MAX_TOTAL_BYTES:
        raise BadBundle(f"{LISTING_NAME} lists {total} bytes, at most {MAX_TOTAL_BYTES} are taken from one bundle")
    return listing


_BEFORE_SIZE = f"{0o644:07o}\0{0:07o}\0{0:07o}\0".encode()
_AFTER_SUM = b"0" + bytes(100) + b"ustar\x0000" + bytes(247)
_FIXED_SUM = sum(_BEFORE_SIZE) + sum(_AFTER_SUM) + 8 * ord(" ")


def header(name: str, size: int) -> bytes:
    """The tar header block of a member: POSIX ustar, a regular file of mode 0644 without owner, group or time."""
    title, numbers = name.encode("ascii"), f"{size:011o}\0{0:011o}\0".encode()
    # The sum counts its own field as spaces.
    total = _FIXED_SUM + sum(title) + sum(numbers)
    return b"".join((title.ljust(100, b"\0"), _BEFORE_SIZE, numbers, f"{total:06o}\0 ".encode(), _AFTER_SUM))


def padding(size: int) -> bytes:
    """What fills a member's last block."""
    return bytes(-size % BLOCK_BYTES)


def describe_header(block: bytes) -> str:
    """What a header block that is not the expected one holds, in a few words."""
    if block == bytes(BLOCK_BYTES):
        return "the end of the archive"
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError, OverflowError):
        return "no tar header"
    kinds = {tarfile.SYMTYPE: "symbolic link", tarfile.LNKTYPE: "hard link", tarfile.DIRTYPE: "folder", tarfile.FIFOTYPE: "FIFO"}
    kinds |= {tarfile.CHRTYPE: "device", tarfile.BLKTYPE: "device", tarfile.XHDTYPE: "pax header", tarfile.XGLTYPE: "pax header"}
    kind = "file" if info.isreg() else kinds.get(info.type, "member of another type")
    return f"{kind} {plain(info.name)} of {info.size} bytes, mode {info.mode:04o}, uid {info.uid}, gid {info.gid}, mtime {int(info.mtime)}"


def _other_schema(version: int) -> str:
    return f"{LISTING_NAME} has schema version {version}, this release reads {SCHEMA_VERSION}"


def _reason(data: bytes, error: Exception) -> str:
    try:
        version = msgspec.json.decode(data, type=_SchemaOnly).schema_version
    except (msgspec.MsgspecError, ValueError, RecursionError):
        version = SCHEMA_VERSION
    return _other_schema(version) if version != SCHEMA_VERSION else f"{LISTING_NAME}: {plain(error)}"
