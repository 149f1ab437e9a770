"""The header of a safetensors file, believed only as far as the file's own size bears it out.

Layout (the format's documentation): 8 bytes little-endian header length, that many bytes of JSON
`{name: {"dtype", "shape", "data_offsets": [begin, end]}}`, then the data, which the tensors fill without gap or overlap.
Nothing is allocated from a number in the file before that number has been compared with the file's size.
"""

from __future__ import annotations

import json
import os
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from mlactl.scales.findings import plain

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

MAX_NON_ASCII_BYTES = 16 * 2**20
"""Text that is not ASCII takes up to four bytes a character in memory."""

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

_DECODER = json.JSONDecoder(object_pairs_hook=lambda pairs: pairs)
_SPACE = " \t\r\n"


class BadHeader(ValueError):
    """A file that is no intact safetensors file: `tensor`, `found` and `expected` say where and why."""

    def __init__(self, found: str, expected: str, tensor: str | None = None) -> None:
        super().__init__(f"{tensor + ': ' if tensor else ''}{found}, expected {expected}")
        self.found, self.expected, self.tensor = found, expected, tensor


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor: `begin` is its offset in the file, `size_bytes` its length there."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    size_bytes: int


def tensors(descriptor: int, file_bytes: int) -> Iterator[Tensor]:
    """Every tensor of an open file, as the header is read; raises BadHeader at the first thing that cannot be true.

    That the data has neither gaps nor trailing bytes is known only at the end, so a caller that stops early has not
    checked the file.
    """
    text, data_begin = _header_text(descriptor, file_bytes)
    data_bytes = file_bytes - data_begin
    begins, ends = array("Q"), array("Q")
    seen: set[str] = set()
    for name, entry in _entries(text):
        if name in seen:
            raise BadHeader("the name comes more than once", "one tensor a name", name)
        seen.add(name)
        if name == "__metadata__":
            continue
        tensor, begin, end = _tensor(name, entry, data_begin, data_bytes)
        begins.append(begin)
        ends.append(end)
        yield tensor
    _check_cover(begins, ends, data_bytes)


def looks_like_header(first: bytes) -> bool:
    """Whether a file's first 9 bytes can be a safetensors header's start."""
    return len(first) >= 9 and first[8:9] == b"{" and 2 <= struct.unpack("<Q", first[:8])[0] <= MAX_HEADER_BYTES


def _header_text(descriptor: int, file_bytes: int) -> tuple[str, int]:
    if file_bytes < 8:
        raise BadHeader("the file is empty" if not file_bytes else f"{file_bytes} bytes", "8 bytes of header length")
    prefix = _read(descriptor, 8, 0)
    (length,) = struct.unpack("<Q", prefix)
    if length > file_bytes - 8:
        raise BadHeader(f"a header of {length} bytes in a file of {file_bytes}", "a header inside the file: it is cut short or no safetensors file")
    if length > MAX_HEADER_BYTES:
        raise BadHeader(f"a header of {length} bytes", f"at most {MAX_HEADER_BYTES}")
    if length < 2 or _read(descriptor, 1, 8) != b"{":
        raise BadHeader("a header that is no JSON object", "'{' as byte 8")
    raw = _read(descriptor, length, 8)
    if len(raw) > MAX_NON_ASCII_BYTES and not raw.isascii():
        raise BadHeader(f"{len(raw)} bytes of header that are not all ASCII", f"at most {MAX_NON_ASCII_BYTES}")
    try:
        return raw.decode("utf-8"), 8 + length
    except UnicodeDecodeError as error:
        raise BadHeader(f"header byte {error.start} is not UTF-8", "UTF-8") from None


def _read(descriptor: int, count: int, offset: int) -> bytes:
    data = os.pread(descriptor, count, offset)
    while len(data) < count:
        more = os.pread(descriptor, count - len(data), offset + len(data))
        if not more:
            raise BadHeader(f"the file ended at byte {offset + len(data)}", f"{count} bytes from byte {offset}")
        data += more
    return data


def _entries(text: str) -> Iterator[tuple[str, Any]]:
    """(key, value) pairs of the header's object one by one, so that a big header never becomes one big tree."""
    at = _skip(text, 1)
    if text[at : at + 1] != "}":
        while True:
            name, at = _value(text, at)
            at = _skip(text, at)
            if not isinstance(name, str) or text[at : at + 1] != ":":
                raise BadHeader(f"malformed JSON at header byte {at}", "a name, a colon and a tensor")
            entry, at = _value(text, _skip(text, at + 1))
            yield name, entry
            at = _skip(text, at)
            if text[at : at + 1] != ",":
                break
            at = _skip(text, at + 1)
    if text[at : at + 1] != "}":
        raise BadHeader(f"malformed JSON at header byte {at}", "',' or '}'")
    if text[at + 1 :].strip(_SPACE + "\0"):
        raise BadHeader(f"text after the object at header byte {at + 1}", "spaces only")


def _value(text: str, at: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply or a number too long"
        raise BadHeader(f"malformed JSON at header byte {at}: {reason[:1].lower()}{reason[1:]}", "a JSON value") from None


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _tensor(name: str, entry: Any, data_begin: int, data_bytes: int) -> tuple[Tensor, int, int]:
    fields = dict(entry) if isinstance(entry, list) and all(isinstance(pair, tuple) for pair in entry) else {}
    if set(fields) != {"dtype", "shape", "data_offsets"} or len(entry) != 3:
        raise BadHeader(f"fields {', '.join(map(plain, fields)) or 'none'}", "dtype, shape and data_offsets", name)
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise BadHeader(f"dtype {plain(dtype)}", "a dtype of the format", name)
    if not _sizes(shape) or len(shape) > 64:
        raise BadHeader(f"shape {plain(shape)}", "a list of sizes", name)
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise BadHeader(f"data_offsets {plain(offsets)}", "[begin, end]", name)
    begin, end = offsets
    if end > data_bytes:
        raise BadHeader(f"data up to byte {end} of {data_bytes}", "data inside the file: it is cut short or its header lies", name)
    # Not the product of just any sizes: more elements than the file has bits is a lie, whatever the number.
    elements = prod(shape) if 0 in shape or all(size <= 8 * data_bytes for size in shape) else 8 * data_bytes + 1
    if elements * bits != (end - begin) * 8:
        raise BadHeader(f"{end - begin} bytes of {dtype} for shape {list(shape)}", f"{-(-elements * bits // 8)} bytes", name)
    return Tensor(name, dtype, tuple(shape), data_begin + begin, end - begin), begin, end


def _sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_cover(begins: array[int], ends: array[int], data_bytes: int) -> None:
    at = 0
    for index in sorted(range(len(begins)), key=lambda i: (begins[i], ends[i])):
        if begins[index] != at:
            raise BadHeader(
                f"data bytes {min(at, begins[index])} to {max(at, begins[index])} belong to {'no tensor' if begins[index] > at else 'two tensors'}",
                "each to one",
            )
        at = ends[index]
    if at != data_bytes:
        raise BadHeader(f"{data_bytes - at} trailing bytes", f"the file to end with its last tensor, at data byte {at}")
