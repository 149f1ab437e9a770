"""A key as a person types it: any unique start of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from mlactl.cache.adapter import CacheEntry
from mlactl.errors import NotFound, UsageError

E = TypeVar("E", bound=CacheEntry)

_HEX = "0123456789abcdef"
_KEY_DIGITS = 64
_SHOWN = 5


def entry_of(prefix: str, where: str, matching: Callable[[str], Iterable[E]]) -> E:
    """The one entry whose key starts so, the first of a key that has several; `matching` gives those of a lower-case prefix in order.

    Upper-case digits are taken as lower-case ones. Raises NotFound when there is none in `where`, and UsageError for an empty
    prefix or, naming the keys, for one that fits several.
    """
    if not prefix:
        raise UsageError("an empty KEY names no entry", hint="mlactl cache ls shows the keys there are")
    prefix = prefix.lower()
    found: dict[str, E] = {}
    if not prefix.strip(_HEX) and len(prefix) <= _KEY_DIGITS:
        for entry in matching(prefix):
            found.setdefault(entry.key, entry)
    if not found:
        raise NotFound(f"no entry {prefix} in {where}", hint="mlactl cache ls shows the keys there are")
    if len(found) > 1:
        shown = ", ".join(name[: len(prefix) + 6] for name in sorted(found)[:_SHOWN])
        raise UsageError(f"{prefix} fits {len(found)} keys: {shown}{', …' if len(found) > _SHOWN else ''}", hint="give more digits")
    return next(iter(found.values()))
