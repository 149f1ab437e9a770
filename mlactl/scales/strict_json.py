"""JSON read strictly: duplicate keys, NaN literals and the spelling of numbers stay visible to the checks.

Python's parser keeps the last of two equal keys, takes NaN and Infinity, and turns 1e999 into inf; each has hidden a
broken scale file. Here an object remembers its duplicates and a number its text, so that a check can say what was in
the file. Imports neither torch nor numpy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mlactl.scales.findings import MAX_SHOWN_CHARS, plain

MAX_JSON_BYTES = 64 * 2**20
"""Far over any scale file, and over the index of the largest sharded checkpoints."""

_PAIRS = json.JSONDecoder(object_pairs_hook=lambda pairs: pairs)
_SPACES = frozenset(" \t\r\n")

UTF8_BOM = b"\xef\xbb\xbf"


class MalformedJson(ValueError):
    """Bytes that are no JSON document; the text says what was found and where."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number as written. `value` is inf where a double cannot hold it; `literal` marks NaN, Infinity and -Infinity."""

    text: str
    value: float
    integral: bool = False
    literal: bool = False

    def integer(self) -> int | None:
        """The exact value when it was written as an integer of sane length, else None (78.0 is not an integer)."""
        return int(self.text) if self.integral and len(self.text) <= 20 else None


class JsonObject(dict[str, Any]):
    """An object that knows which of its keys came more than once."""

    __slots__ = ("duplicates",)

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.duplicates: tuple[str, ...] = ()
        if len(self) != len(pairs):
            seen: set[str] = set()
            self.duplicates = tuple(dict.fromkeys(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed file: its root, whether it began with a byte order mark, and every duplicate key with its path."""

    root: Any
    byte_order_mark: bool
    duplicates: tuple[str, ...]


def decode(data: bytes) -> tuple[str, bool]:
    """The text of a JSON file and whether a byte order mark stood before it; raises MalformedJson when it has none."""
    marked = data.startswith(UTF8_BOM)
    try:
        text = data.decode("utf-8-sig" if marked else "utf-8")
    except UnicodeDecodeError as error:
        raise MalformedJson(f"byte {error.start} is not UTF-8") from None
    if not text.strip():
        raise MalformedJson("the file is empty" if not data else "there is nothing but white space in the file")
    return text, marked


def parse(data: bytes) -> Document:
    """Parses UTF-8 JSON with an optional byte order mark; raises MalformedJson for anything else."""
    text, marked = decode(data)
    duplicated = False

    def make_object(pairs: list[tuple[str, Any]]) -> JsonObject:
        nonlocal duplicated
        made = JsonObject(pairs)
        duplicated = duplicated or bool(made.duplicates)
        return made

    try:
        root = json.loads(
            text,
            object_pairs_hook=make_object,
            parse_float=lambda digits: Number(digits, float(digits)),
            parse_int=lambda digits: Number(digits, float(digits), integral=True),
            parse_constant=lambda name: Number(name, math.nan if name == "NaN" else float(name), literal=True),
        )
    except json.JSONDecodeError as error:
        raise MalformedJson(f"line {error.lineno} column {error.colno}: {error.msg[:1].lower()}{error.msg[1:]}") from None
    except RecursionError:
        raise MalformedJson("nested too deeply") from None
    return Document(root, marked, tuple(_duplicate_paths(root)) if duplicated else ())


def read_object(text: str, at: int, read_member: Callable[[str, int], int]) -> int:
    """Reads one object without keeping it: `read_member(key, at)` reads a value and returns where it ends.

    For objects of hundreds of thousands of members, whose tree would take several times their text. Returns the
    position behind the object; raises MalformedJson.
    """
    if text[at : at + 1] != "{":
        raise MalformedJson(f"no object at character {at}")
    at = _skip(text, at + 1)
    if text[at : at + 1] == "}":
        return at + 1
    while True:
        key, at = read_value(text, at)
        at = _skip(text, at)
        if not isinstance(key, str) or text[at : at + 1] != ":":
            raise MalformedJson(f"character {at}: no key and colon")
        at = _skip(text, read_member(key, _skip(text, at + 1)))
        if text[at : at + 1] != ",":
            break
        at = _skip(text, at + 1)
    if text[at : at + 1] != "}":
        raise MalformedJson(f"character {at}: neither ',' nor '}}'")
    return at + 1


def read_value(text: str, at: int) -> tuple[Any, int]:
    """One JSON value, objects as lists of pairs, and where it ends; raises MalformedJson."""
    try:
        return _PAIRS.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply, or a number too long"
        raise MalformedJson(f"character {at}: {reason[:1].lower()}{reason[1:]}") from None


def _skip(text: str, at: int) -> int:
    while text[at : at + 1] in _SPACES:
        at += 1
    return at


def _duplicate_paths(root: Any) -> Iterator[str]:
    # A list and not recursion: nesting may be as deep as the parser allows.
    pending: list[tuple[str, Any]] = [("", root)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, JsonObject):
            for key in value.duplicates:
                yield f"{path}.{key}" if path else key
            pending += [(f"{path}.{key}" if path else key, child) for key, child in value.items() if isinstance(child, (dict, list))]
        elif isinstance(value, list):
            pending += [(f"{path}[{index}]", child) for index, child in enumerate(value) if isinstance(child, (dict, list))]


def shown(value: Any) -> str:
    """A value as it was written, short and safe to print: `"0.5"`, `true`, `1e999`, `a list of 3`."""
    if isinstance(value, Number):
        return value.text if len(value.text) <= MAX_SHOWN_CHARS else f"{value.text[:20]}… ({len(value.text)} digits)"
    if isinstance(value, str):
        return f'"{plain(value)}"'
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, dict):
        return f"an object of {len(value)}" if value else "an empty object"
    return f"a list of {len(value)}" if value else "an empty list"
