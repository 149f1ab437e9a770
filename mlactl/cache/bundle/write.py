"""Writing a bundle: entries checked in full, the very bytes that were checked, in one order and one spelling."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

import zstandard

from mlactl.cache import locks
from mlactl.cache.bundle import layout
from mlactl.cache.bundle.packages import Requirement, required
from mlactl.cache.bundle.select import LeftOut, set_aside_in
from mlactl.cache.bundle.waiting import held
from mlactl.cache.entry import REMOVED, Entry, RejectedObject, Status, read_checked
from mlactl.cache.manifest import BadManifest, Manifest, dump
from mlactl.cache.store import Store, convicting
from mlactl.cache.trust import Untrusted
from mlactl.errors import CannotRun

LEVEL = 1
"""Half the time of level 3 for objects a twenty-fifth larger."""
_READ_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Packed:
    """A finished bundle that is nowhere yet: `head` and then the whole of `body`, an open temporary.

    `sha256` and `size` (bytes) are of the two together, `listing_sha256` of the list inside, which stays the same when
    another zstd release compresses the same entries to other bytes.
    """

    head: bytes
    body: BinaryIO
    sha256: str
    size: int
    listing_sha256: str
    entries: tuple[Manifest, ...]
    requires: tuple[Requirement, ...]
    left_out: tuple[LeftOut, ...]

    def copy_to(self, file: BinaryIO) -> None:
        """Writes the bundle."""
        file.write(self.head)
        self.body.seek(0)
        shutil.copyfileobj(self.body, file, 1 << 20)


@contextmanager
def pack(
    store: Store, keys: Iterable[str], folder: str | None = None, on_entry: Callable[[], None] = lambda: None,
    on_wait: Callable[[str], None] = lambda _: None,
) -> Iterator[Packed]:  # fmt: skip
    """Packs the entries of these keys, of each the first layer's that passes a full check; what has none is in `left_out`.

    The temporary has no name and is in `folder`, else where temporaries go. `on_wait` is told who holds an entry that is waited
    for. Raises OSError when it cannot be written.
    """
    with tempfile.TemporaryFile(dir=folder) as body:
        rows, packed, left_out = [], [], []
        trusted_folders: set[str] = set()
        # How many workers there are does not change the bytes, only whether there are any.
        with _compressor(min(4, max(1, len(os.sched_getaffinity(0)) - 1))).stream_writer(body, closefd=False) as stream:
            for key in sorted(set(keys)):
                found = _read(store, key, trusted_folders, on_wait)
                if isinstance(found, LeftOut):
                    left_out.append(found)
                else:
                    manifest, text, data = found
                    row = layout.row(manifest, hashlib.sha256(text).hexdigest(), len(text))
                    heads = [layout.header(file.name, file.size) for file in row.files]
                    stream.write(b"".join((heads[0], text, layout.padding(len(text)), heads[1])))
                    stream.write(data)
                    stream.write(layout.padding(len(data)))
                    rows.append(row)
                    packed.append(manifest)
                on_entry()
            stream.write(layout.END)
        requires = required(manifest.toolchain for manifest in packed)
        listing = layout.dump(layout.Listing(tuple(rows), requires, layout.SCHEMA_VERSION))
        _refuse_size(len(listing), sum(file.size for row in rows for file in row.files))
        # A frame of its own: the list is known last and stands first, and `zstd -d` takes frames one after the other.
        first = layout.header(layout.LISTING_NAME, len(listing)) + listing + layout.padding(len(listing))
        head = _compressor(0).compress(first)
        body.flush()
        sha256, size = _digest(head, body)
        yield Packed(head, body, sha256, size, hashlib.sha256(listing).hexdigest(), tuple(packed), requires, tuple(left_out))


def _compressor(threads: int) -> zstandard.ZstdCompressor:
    """Everything that decides the bytes is set here, so that no default of a release or a machine does."""
    parameters = zstandard.ZstdCompressionParameters.from_level(
        LEVEL, window_log=layout.WINDOW_LOG, threads=threads, write_checksum=True, write_content_size=False, write_dict_id=False,
        **({"job_size": 8 << 20, "overlap_log": 6} if threads else {}),
    )  # fmt: skip
    return zstandard.ZstdCompressor(compression_params=parameters)


def _read(store: Store, key: str, trusted_folders: set[str], on_wait: Callable[[str], None]) -> tuple[Manifest, bytes, bytes] | LeftOut:
    """Manifest, its bytes and object of a key from the first layer whose entry is good, or what is wrong with the first that has one.

    An object that one layer has set aside is not taken from another either, and nothing is where nobody can tell which it was.
    """
    problems: list[LeftOut] = []
    layers = store.roots.layers
    others = [store.entry_in(layer, key) for layer in layers] if len(layers) > 1 else []
    aside = [entry for entry in others if entry is not None and entry.status is Status.QUARANTINED]
    for layer in layers:
        try:
            manifest, data = _read_settled(Entry(key, layer, None, Status.OK), trusted_folders, on_wait)
            required((manifest.toolchain,))
        except RejectedObject as refused:
            entry = refused.entry
            if entry.detail != REMOVED:
                hint = f"mlactl cache show {key[:12]}" if entry.status is Status.QUARANTINED else f"mlactl cache verify {key[:12]} --repair"
                problems.append(LeftOut(key, entry.manifest, f"{entry.object_path}: {entry.status}: {entry.detail}", hint))
        except Untrusted as refused:
            problems.append(LeftOut(key, None, refused.message, refused.hint))
        except BadManifest as error:
            problems.append(LeftOut(key, None, error.reason, None))
        else:
            convicted = convicting(aside, manifest)
            if convicted is None:
                return manifest, dump(manifest), data
            problems.append(LeftOut(key, manifest, set_aside_in(convicted), f"mlactl cache show {key[:12]}"))
    return problems[0] if problems else LeftOut(key, None, REMOVED, None)


def _read_settled(entry: Entry, trusted_folders: set[str], on_wait: Callable[[str], None]) -> tuple[Manifest, bytes]:
    """`read_checked`; once more under the reader's lock when it fails, since a publisher may be replacing the entry."""
    try:
        return read_checked(entry, trusted_folders=trusted_folders)
    except RejectedObject as refused:
        if refused.entry.detail == REMOVED:
            raise
        with ExitStack() as stack:
            try:
                stack.enter_context(held(partial(_reader_lock, entry), _READ_WAIT_S, on_wait))
            except (OSError, CannotRun):
                raise refused from None  # a read-only layer, where nobody publishes
            return read_checked(entry, trusted_folders=trusted_folders)


def _reader_lock(entry: Entry, wait_s: float) -> AbstractContextManager[locks.Lease]:
    return locks.entry_lock(entry.layer, entry.key, exclusive=False, wait_s=wait_s)


def _refuse_size(listing_bytes: int, total_bytes: int) -> None:
    if listing_bytes > layout.MAX_LISTING_BYTES or total_bytes > layout.MAX_TOTAL_BYTES:
        raise CannotRun(
            f"{total_bytes} bytes of entries and a list of {listing_bytes} bytes are too much for one bundle, "
            f"which holds {layout.MAX_TOTAL_BYTES} and {layout.MAX_LISTING_BYTES}",
            hint="mlactl cache export --arch ARCH or --kernel ID makes several smaller ones",
        )


def _digest(head: bytes, body: BinaryIO) -> tuple[str, int]:
    digest, size = hashlib.sha256(head), len(head)
    body.seek(0)
    while block := body.read(1 << 20):
        digest.update(block)
        size += len(block)
    return digest.hexdigest(), size
