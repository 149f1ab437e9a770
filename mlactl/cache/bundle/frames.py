"""Decompressing a bundle a zstd block at a time: bounded memory, whole frames only, nothing after them.

The streaming interfaces of the zstandard package either hand out all that a chunk of input expands to (32 KB can make a
gigabyte) or end silently where a file was cut off. So frames are walked here, by RFC 8878, sections 3.1.1 and 3.1.1.2.
"""

from __future__ import annotations

import hashlib
from typing import BinaryIO

import zstandard

from mlactl.cache.bundle.layout import WINDOW_LOG, BadBundle
from mlactl.printable import plain

_MAGIC = b"\x28\xb5\x2f\xfd"
_DICTIONARY_BYTES = (0, 1, 2, 4)
_CONTENT_SIZE_BYTES = (0, 2, 4, 8)
_RLE, _RESERVED = 1, 3
_MAX_BLOCK_BYTES = 128 << 10
_CHUNK_BYTES = 1 << 20


class Frames:
    """What a sequence of zstd frames decompresses to; `sha256` and `compressed_bytes` are of the file as far as it was read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._input, self._at = b"", 0
        self._ready = bytearray()
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._checksum_bytes = 0
        self._begun = False
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << WINDOW_LOG)
        self._digest = hashlib.sha256()
        self.compressed_bytes = 0

    def sha256(self) -> str:
        """Digest of the compressed bytes read so far; of the whole file after `finish`."""
        return self._digest.hexdigest()

    def read(self, size: int) -> bytes:
        """Exactly `size` decompressed bytes; raises BadBundle when there are fewer."""
        while len(self._ready) < size:
            if not self._advance():
                raise BadBundle("truncated: the archive ends in the middle")
        found = bytes(memoryview(self._ready)[:size])
        del self._ready[:size]
        return found

    def finish(self) -> None:
        """Raises BadBundle unless the last frame is complete and nothing follows what was read, compressed or not."""
        while not self._ready and self._advance():
            pass
        if self._ready:
            raise BadBundle("trailing data after the end of the archive")

    def _advance(self) -> bool:
        """Reads one frame header or block; False at the end of the file."""
        try:
            if self._frame is None:
                return self._begin_frame()
            self._read_block(self._frame)
        except zstandard.ZstdError as error:
            raise BadBundle(f"not a zstd stream of a bundle, or damaged: {plain(error)}") from None
        return True

    def _begin_frame(self) -> bool:
        magic = self._take(4, partly=True)
        if not magic:
            return False
        if magic != _MAGIC:
            raise BadBundle("trailing data after the last frame" if self._begun else "not a bundle: it does not start with a zstd frame")
        self._begun = True
        descriptor = self._take(1)
        flags = descriptor[0]
        single = flags >> 5 & 1
        sized = _CONTENT_SIZE_BYTES[flags >> 6] or single
        rest = self._take((1 - single) + _DICTIONARY_BYTES[flags & 3] + sized)
        self._checksum_bytes = 4 if flags & 4 else 0
        self._frame = self._decompressor.decompressobj()
        self._ready += self._frame.decompress(magic + descriptor + rest)
        return True

    def _read_block(self, frame: zstandard.ZstdDecompressionObj) -> None:
        head = self._take(3)
        number = int.from_bytes(head, "little")
        last, kind, size = number & 1, number >> 1 & 3, number >> 3
        if kind == _RESERVED or size > _MAX_BLOCK_BYTES:
            raise BadBundle("not a zstd stream of a bundle, or damaged: a block that no encoder writes")
        self._ready += frame.decompress(head + self._take(1 if kind == _RLE else size))
        if last:
            self._ready += frame.decompress(self._take(self._checksum_bytes)) if self._checksum_bytes else b""
            if not frame.eof:
                raise BadBundle("not a zstd stream of a bundle, or damaged: a frame that does not end where it says")
            self._frame = None

    def _take(self, size: int, *, partly: bool = False) -> bytes:
        """The next compressed bytes; with `partly` what there is of them."""
        if len(self._input) - self._at < size:
            chunk = self._input[self._at :]
            while len(chunk) < size and (more := self._file.read(_CHUNK_BYTES)):
                self._digest.update(more)
                self.compressed_bytes += len(more)
                chunk += more
            self._input, self._at = chunk, 0
        found = self._input[self._at : self._at + size]
        self._at += len(found)
        if len(found) < size and not partly:
            raise BadBundle("truncated: the file ends in a zstd frame")
        return found
