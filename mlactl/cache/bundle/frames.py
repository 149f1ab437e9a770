"""Decompressing a bundle a zstd block at a time: bounded memory, as many frames as are asked for, each whole, nothing after them.

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

_FREE_BLOCKS, _LEAST_BLOCK_BYTES = 64, 256
"""Blocks that an encoder makes are larger on average; a file of empty ones would keep a reader busy for minutes."""


class Frames:
    """What the zstd frames of a file decompress to, one at a time between `begin` and `end`.

    `sha256` and `compressed_bytes` are of the file as far as it was read.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._input, self._at = b"", 0
        self._ready = bytearray()
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._checksum_bytes = 0
        self._number = self._blocks = self._made = 0
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << WINDOW_LOG)
        self._digest = hashlib.sha256()
        self.compressed_bytes = 0

    def sha256(self) -> str:
        """Digest of the compressed bytes read so far; of the whole file after `finish`."""
        return self._digest.hexdigest()

    def read(self, size: int) -> bytes:
        """Exactly `size` decompressed bytes; raises BadBundle when the frame has fewer left."""
        while len(self._ready) < size:
            if self._frame is None:
                raise BadBundle(f"truncated: zstd frame {self._number} of a bundle ends in the middle")
            self._read_block(self._frame)
        found = bytes(memoryview(self._ready)[:size])
        del self._ready[:size]
        return found

    def begin(self) -> None:
        """Opens the next frame; raises BadBundle when there is none."""
        magic = self._take(4, partly=True)
        self._number += 1
        if not magic:
            raise BadBundle(f"truncated: the file ends before zstd frame {self._number} of a bundle")
        if magic != _MAGIC:
            raise BadBundle("not a bundle: it does not start with a zstd frame" if self._number == 1 else "trailing data after the first zstd frame")
        descriptor = self._take(1)
        flags = descriptor[0]
        single = flags >> 5 & 1
        sized = _CONTENT_SIZE_BYTES[flags >> 6] or single
        rest = self._take((1 - single) + _DICTIONARY_BYTES[flags & 3] + sized)
        self._checksum_bytes = 4 if flags & 4 else 0
        self._frame = self._decompressor.decompressobj()
        self._decompress(self._frame, magic + descriptor + rest)

    def end(self, more: str) -> None:
        """Reads the frame's end; raises BadBundle, saying `more`, when it holds more than was read."""
        while self._frame is not None and not self._ready:
            self._read_block(self._frame)
        if self._ready:
            raise BadBundle(more)

    def finish(self) -> None:
        """Raises BadBundle unless the frame is at its end and the file too."""
        self.end("trailing data after the end of the archive")
        if self._take(1, partly=True):
            raise BadBundle("trailing data after the last zstd frame")

    def _read_block(self, frame: zstandard.ZstdDecompressionObj) -> None:
        head = self._take(3)
        number = int.from_bytes(head, "little")
        last, kind, size = number & 1, number >> 1 & 3, number >> 3
        if kind == _RESERVED or size > _MAX_BLOCK_BYTES:
            raise BadBundle("not a zstd stream of a bundle, or damaged: a block that no encoder writes")
        self._decompress(frame, head + self._take(1 if kind == _RLE else size))
        self._blocks += 1
        if self._blocks > _FREE_BLOCKS + self._made // _LEAST_BLOCK_BYTES:
            raise BadBundle(f"not a zstd stream of a bundle: {self._blocks} blocks for {self._made} bytes, which no encoder writes")
        if last:
            if self._checksum_bytes:
                self._decompress(frame, self._take(self._checksum_bytes))
            if not frame.eof:
                raise BadBundle("not a zstd stream of a bundle, or damaged: a frame that does not end where it says")
            self._frame = None

    def _decompress(self, frame: zstandard.ZstdDecompressionObj, data: bytes) -> None:
        try:
            made = frame.decompress(data)
        except zstandard.ZstdError as error:
            raise BadBundle(f"not a zstd stream of a bundle, or damaged: {plain(error)}") from None
        self._made += len(made)
        self._ready += made

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
