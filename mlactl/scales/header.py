"""The header of a safetensors file, believed only as far as the file's own size bears it out.

Layout (the format's documentation): 8 bytes little-endian header length, that many bytes of JSON
`{name: {"dtype", "shape", "data_offsets": [begin, end]}}`, then the data, which the tensors fill without gap or overlap.
Nothing is allocated from a number in the file before that number has been compared with the file's size.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import msgspec

from mlactl.scales.findings import plain
from mlactl.scales.strict_json import MalformedJson, read_object, read_value

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

MAX_NON_ASCII_BYTES = 16 * 2**20
"""Text that is not ASCII takes up to four bytes a character in memory."""

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


class BadHeader(ValueError):
    """A file that is no intact safetensors file: `tensor`, `found` and `expected` say where and why."""

    def __init__(self, found: str, expected: str, tensor: str | None = None) -> None:
        super().__init__(f"{tensor + ': ' if tensor else ''}{found}, expected {expected}")
        self.found, self.expected, self.tensor = found, expected, tensor


class Tensor(NamedTuple):
    """One tensor: `begin` is its offset in the file, `size_bytes` its length there, `shard` the number of its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    size_bytes: int
    shard: int = 0


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def tensors(descriptor: int, file_bytes: int, shard: int = 0) -> list[Tensor]:
    """Every tensor of an open file; raises BadHeader naming the first thing that cannot be true of it."""
    raw = _header_bytes(descriptor, file_bytes)
    data_begin = 8 + len(raw)
    found = _fast(raw, data_begin, file_bytes - data_begin, shard)
    return _slow(raw, data_begin, file_bytes - data_begin, shard) if found is None else found


def looks_like_header(first: bytes) -> bool:
    """Whether a file's first 9 bytes can be a safetensors header's start."""
    return len(first) >= 9 and first[8:9] == b"{" and 2 <= struct.unpack("<Q", first[:8])[0] <= MAX_HEADER_BYTES


def _header_bytes(descriptor: int, file_bytes: int) -> bytes:
    if file_bytes < 8:
        raise BadHeader("the file is empty" if not file_bytes else f"{file_bytes} bytes", "8 bytes of header length")
    (length,) = struct.unpack("<Q", _read(descriptor, 8, 0))
    if length > file_bytes - 8:
        raise BadHeader(f"a header of {length} bytes in a file of {file_bytes}", "a header inside the file: it is cut short or no safetensors file")
    if length > MAX_HEADER_BYTES:
        raise BadHeader(f"a header of {length} bytes", f"at most {MAX_HEADER_BYTES}")
    if length < 2 or _read(descriptor, 1, 8) != b"{":
        raise BadHeader("a header that is no JSON object", "'{' as byte 8")
    return _read(descriptor, length, 8)


def _read(descriptor: int, count: int, offset: int) -> bytes:
    data = os.pread(descriptor, count, offset)
    while len(data) < count:
        more = os.pread(descriptor, count - len(data), offset + len(data))
        if not more:
            raise BadHeader(f"the file ended at byte {offset + len(data)}", f"{count} bytes from byte {offset}")
        data += more
    return data


def _fast(raw: bytes, data_begin: int, data_bytes: int, shard: int) -> list[Tensor] | None:
    """The tensors of a header that is right in every way, None for any other: `_slow` then says what is wrong."""
    try:
        entries = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        msgspec.json.decode(entries.pop("__metadata__", b"null"), type=dict[str, str] | None)
        # A parser that keeps the last of two equal keys hides the other, which is still in the text (unless spelled with \\u).
        if b"\\u" in raw or any(raw.count(key) != len(entries) for key in (b'"dtype"', b'"shape"', b'"data_offsets"')):
            return None
        decoder = msgspec.json.Decoder(_Entry)
        # Shapes and dtypes repeat hundreds of thousands of times in a large checkpoint: one object of each will do.
        shapes: dict[tuple[int, ...], tuple[tuple[int, ...], int]] = {}
        dtypes = {name: name for name in DTYPE_BITS}
        made, spans = [], []
        for name, text in entries.items():
            entry = decoder.decode(text)
            begin, end = entry.data_offsets
            shape, elements = shapes.setdefault(entry.shape, (entry.shape, prod(entry.shape)))
            dtype = dtypes[entry.dtype]
            if not 0 <= begin <= end <= data_bytes or min(shape, default=0) < 0 or elements * DTYPE_BITS[dtype] != (end - begin) * 8:
                return None
            spans.append((begin, end))
            made.append(Tensor(name, dtype, shape, data_begin + begin, end - begin, shard))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError):
        return None
    spans.sort()
    at = 0
    for begin, end in spans:
        if begin != at:
            return None
        at = end
    return made if at == data_bytes else None


def _slow(raw: bytes, data_begin: int, data_bytes: int, shard: int) -> list[Tensor]:
    """The same with a reason for each refusal, at several times the cost."""
    if len(raw) > MAX_NON_ASCII_BYTES and not raw.isascii():
        raise BadHeader(f"{len(raw)} bytes of header that are not all ASCII", f"at most {MAX_NON_ASCII_BYTES}")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadHeader(f"header byte {error.start} is not UTF-8", "UTF-8") from None
    made: list[Tensor] = []
    seen: set[str] = set()

    def read_member(name: str, at: int) -> int:
        entry, end = read_value(text, at)
        if name in seen:
            raise BadHeader("the name comes more than once", "one tensor a name", name)
        seen.add(name)
        if name == "__metadata__":
            _check_metadata(entry, is_object=text[at] == "{")
        else:
            made.append(_tensor(name, entry, data_begin, data_bytes, shard))
        return end

    try:
        at = read_object(text, 0, read_member)
    except MalformedJson as error:
        raise BadHeader(f"malformed JSON in the header, {error}", "an object of tensors") from None
    if text[at:].strip(" \t\r\n\0"):
        raise BadHeader(f"text after the object, at header character {at}", "spaces only")
    _check_cover(made, data_begin, data_bytes)
    return made


def _check_metadata(entry: Any, *, is_object: bool) -> None:
    """Free text by name, or null; the format's own library refuses a file with anything else there."""
    expected = "text by name: the safetensors library does not open the file"
    if entry is not None and not is_object:
        raise BadHeader(f"{_value_text(entry)}, no object", expected, "__metadata__")
    for key, value in entry or ():
        if not isinstance(value, str):
            raise BadHeader(f"{_value_text(value)} as value of {plain(key)}", expected, "__metadata__")


def _value_text(value: Any) -> str:
    return "an object or a list" if isinstance(value, list) else plain(json.dumps(value))


def _tensor(name: str, entry: Any, data_begin: int, data_bytes: int, shard: int) -> Tensor:
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
    elements = prod(shape)
    if elements * bits != (end - begin) * 8:
        raise BadHeader(f"{end - begin} bytes of {dtype} for shape {list(shape)}", f"{-(-elements * bits // 8)} bytes", name)
    return Tensor(name, dtype, tuple(shape), data_begin + begin, end - begin, shard)


def _sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_cover(made: Sequence[Tensor], data_begin: int, data_bytes: int) -> None:
    at = 0
    for begin, size in sorted((tensor.begin - data_begin, tensor.size_bytes) for tensor in made):
        if begin != at:
            whose = "no tensor" if begin > at else "two tensors"
            raise BadHeader(f"data bytes {min(at, begin)} to {max(at, begin)} belong to {whose}", "each to one")
        at += size
    if at != data_bytes:
        raise BadHeader(f"{data_bytes - at} trailing bytes", f"the file to end with its last tensor, at data byte {at}")
