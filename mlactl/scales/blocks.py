"""The scan of scale bytes: E4M3 block scales a quarter MiB at a time, and small float tensors.

Bytes are read into one buffer a worker, never mapped: mapped pages would count as resident for as long as the file is
in use. An E4M3 byte of 0x7F and up is NaN or negative, so the maximum of a buffer says whether anything in it is wrong,
and the minimum whether anything lies under the normal range; only a buffer that has either is looked at again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from mlactl.scales.header import Tensor

BUFFER_BYTES = 256 * 1024
"""Fits a second-level cache, so the passes after the read cost little beside it."""

NAN_BYTE = 0x7F
SIGN_BIT = 0x80
FIRST_NORMAL = 0x08
"""E4M3 2^-6; 0x01 to 0x07 are subnormal."""

FLOAT_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F64": np.dtype("<f8"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


class Truncated(ValueError):
    """The file became shorter than its header said while it was read."""


@dataclass(frozen=True, slots=True)
class Hits:
    """Bytes of one kind of fault: how many, and the first one's flat index and value."""

    count: int
    first_index: int
    first_byte: int


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """What the bytes of one E4M3 tensor are: zeros, subnormals (0x01 to 0x07), NaN bytes and set sign bits."""

    elements: int
    zeros: int
    subnormals: int
    nan: Hits | None
    negative: Hits | None

    @property
    def underflow_share(self) -> float:
        """Share of the blocks that are not all zero whose scale lies under 2^-6."""
        return self.subnormals / max(self.elements - self.zeros, 1)


class BlockScanner:
    """Scans tensors of one open file with one buffer; not for two threads at once."""

    def __init__(self) -> None:
        self._bytes = bytearray(BUFFER_BYTES)
        self._values = np.frombuffer(self._bytes, np.uint8)
        self._mask = np.empty(BUFFER_BYTES, np.bool_)

    def scan(self, descriptor: int, tensor: Tensor, on_bytes: Callable[[int], None]) -> BlockCounts:
        """Counts one tensor's bytes; `on_bytes` is told of each buffer. Raises Truncated, OSError."""
        zeros = subnormals = done = 0
        nan: Hits | None = None
        negative: Hits | None = None
        view = memoryview(self._bytes)
        while done < tensor.size_bytes:
            count = os.preadv(descriptor, [view[: min(BUFFER_BYTES, tensor.size_bytes - done)]], tensor.begin + done)
            if count <= 0:
                raise Truncated(f"the file ended at byte {tensor.begin + done}")
            values = self._values[:count]
            if values.max() >= NAN_BYTE:
                nan = _add(nan, (values & NAN_BYTE) == NAN_BYTE, values, done)
                negative = _add(negative, (values >= SIGN_BIT) & (values != (SIGN_BIT | NAN_BYTE)), values, done)
            lowest = values.min()
            if lowest < FIRST_NORMAL:
                empty = count - int(np.count_nonzero(values)) if lowest == 0 else 0
                subnormals += int(np.count_nonzero(np.less(values, FIRST_NORMAL, out=self._mask[:count]))) - empty
                zeros += empty
            done += count
            on_bytes(count)
        return BlockCounts(tensor.size_bytes, zeros, subnormals, nan, negative)


def _add(hits: Hits | None, where: npt.NDArray[np.bool_], values: npt.NDArray[np.uint8], done: int) -> Hits | None:
    count = int(np.count_nonzero(where))
    if not count:
        return hits
    if hits is not None:
        return Hits(hits.count + count, hits.first_index, hits.first_byte)
    first = int(np.argmax(where))
    return Hits(count, done + first, int(values[first]))


def unflatten(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of a row-major element."""
    index = []
    for size in reversed(shape):
        flat, position = divmod(flat, max(size, 1))
        index.append(position)
    return tuple(reversed(index))


def as_float32(data: bytes | memoryview, dtype: str) -> npt.NDArray[np.float32]:
    """Float values of a tensor's bytes, rounded to float32; `dtype` is a key of FLOAT_DTYPES."""
    raw = np.frombuffer(data, FLOAT_DTYPES[dtype])
    if dtype == "BF16":
        raw = (raw.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):
        return np.asarray(raw, dtype=np.float32)


def read_floats(descriptor: int, tensor: Tensor, first: int, count: int) -> npt.NDArray[np.float32]:
    """At most `count` values of a float tensor from flat index `first`; raises Truncated, OSError."""
    width = FLOAT_DTYPES[tensor.dtype].itemsize
    count = min(count, prod(tensor.shape) - first)
    data = os.pread(descriptor, count * width, tensor.begin + first * width)
    if len(data) != count * width:
        raise Truncated(f"the file ended at byte {tensor.begin + first * width + len(data)}")
    return as_float32(data, tensor.dtype)


def first_bad_float(descriptor: int, tensor: Tensor) -> tuple[int, float] | None:
    """Flat index and value of the first element that is not finite and above 0 as float32; None when all are."""
    step = BUFFER_BYTES // 8
    for first in range(0, prod(tensor.shape), step):
        values = read_floats(descriptor, tensor, first, step)
        with np.errstate(invalid="ignore"):
            good = np.isfinite(values) & (values > 0)
        if not good.all():
            at = int(np.argmin(good))
            return first + at, float(values[at])
    return None
