"""Reading a bundle: every byte accounted for, every entry checked as a load would check it, nothing written anywhere."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from mlactl.cache.bundle import layout
from mlactl.cache.bundle.frames import Frames
from mlactl.cache.bundle.layout import BadBundle, EntryRow, Listing
from mlactl.cache.bundle.packages import required
from mlactl.cache.entry import check_object
from mlactl.cache.manifest import BadManifest, Manifest, parse
from mlactl.cache.toolchain import Toolchain


@dataclass(frozen=True, slots=True)
class Checked:
    """One entry of a bundle, checked in full: its manifest, the manifest's bytes and the object's."""

    manifest: Manifest
    text: bytes
    data: bytes


class Bundle:
    """A bundle that is being read; the list is read and checked at once, the rest by `entries`.

    Raises BadBundle for whatever is not exactly what `cache export` writes, and OSError when the file cannot be read.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._frames = Frames(file)
        self.listing, self.listing_sha256 = self._read_listing()

    @property
    def sha256(self) -> str:
        """Digest of the file; of all of it once `entries` has come to its end."""
        return self._frames.sha256()

    @property
    def compressed_bytes(self) -> int:
        """Size of the file; of all of it once `entries` has come to its end."""
        return self._frames.compressed_bytes

    def entries(self) -> Iterator[Checked]:
        """Every entry in the order of the list, checked; only when this has come to its end is the bundle known to be good."""
        toolchains: dict[Toolchain, None] = {}
        self._frames.begin()
        # One after the other: two threads that check wait for the interpreter more than for the digests, and were slower.
        for row in self.listing.entries:
            text, data = (self._member(file.name, file.size) for file in row.files)
            checked = _check(row, text, data)
            toolchains[checked.manifest.toolchain] = None
            yield checked
        if self._frames.read(len(layout.END)) != layout.END:
            raise BadBundle(f"a member that {layout.LISTING_NAME} does not list follows the last entry")
        self._frames.finish()
        if required(toolchains) != self.listing.requires:
            raise BadBundle(f"{layout.LISTING_NAME} requires other packages than its entries do")

    def _read_listing(self) -> tuple[Listing, str]:
        self._frames.begin()
        block = self._frames.read(layout.BLOCK_BYTES)
        size = _size_of(block)
        if size is None or block != layout.header(layout.LISTING_NAME, size):
            raise BadBundle(f"not a bundle: the first member is {layout.describe_header(block)}, expected file {layout.LISTING_NAME}")
        if size > layout.MAX_LISTING_BYTES:
            raise BadBundle(f"{layout.LISTING_NAME} of {size} bytes, expected at most {layout.MAX_LISTING_BYTES}")
        data = self._padded(layout.LISTING_NAME, size)
        self._frames.end(f"{layout.LISTING_NAME} shares its zstd frame with what follows, expected two frames: the list, the entries")
        return layout.parse(data), hashlib.sha256(data).hexdigest()

    def _member(self, name: str, size: int) -> bytes:
        block = self._frames.read(layout.BLOCK_BYTES)
        if block != layout.header(name, size):
            raise BadBundle(f"{layout.describe_header(block)} is in the place of file {name} of {size} bytes, which {layout.LISTING_NAME} lists")
        return self._padded(name, size)

    def _padded(self, name: str, size: int) -> bytes:
        data = self._frames.read(size)
        fill = layout.padding(size)
        if self._frames.read(len(fill)) != fill:
            raise BadBundle(f"member {name} is larger than the {size} bytes that are listed")
        return data


def _size_of(block: bytes) -> int | None:
    """The size that a ustar header gives, None when the field is no octal number."""
    field = block[124:136].rstrip(b"\0 ")
    return int(field, 8) if field and not field.strip(b"01234567") else None


def _check(row: EntryRow, text: bytes, data: bytes) -> Checked:
    """One entry against its row and its own machine code; raises BadBundle."""
    name = f"entry {row.key[:12]}"
    digest = hashlib.sha256(text).hexdigest()
    if digest != row.files[0].sha256:
        raise BadBundle(f"{name}: digest: member {row.files[0].name} has SHA-256 {digest}, listed is {row.files[0].sha256}")
    try:
        manifest = parse(text)
        required((manifest.toolchain,))
    except BadManifest as error:
        raise BadBundle(f"{name}: bad-manifest: {error.reason}") from None
    if not layout.same_row(row, layout.row(manifest, digest, len(text))):
        raise BadBundle(f"{name}: {layout.LISTING_NAME} says otherwise about it than its own manifest")
    status, detail = check_object(manifest, data)
    if detail:
        raise BadBundle(f"{name}: {status}: {detail}")
    return Checked(manifest, text, data)
