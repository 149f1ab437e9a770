"""Text of files and paths made safe to show: no control character of an untrusted name reaches a terminal."""

from __future__ import annotations

import os
import shlex

MAX_SHOWN_CHARS = 80
_LAYOUT = frozenset("\n\t")
_UNQUOTED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789/._- ")


def safe(text: object, keep: frozenset[str] = frozenset()) -> str:
    """Text with control characters and lone surrogates spelled out as `\\x1b`, `\\udcff`; those in `keep` stay."""
    made = str(text)
    if made.isprintable():
        return made
    return "".join(char if char.isprintable() or char in keep else char.encode("unicode_escape", "surrogatepass").decode("ascii") for char in made)


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 row`, `1,200 rows`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def safe_lines(text: str) -> str:
    """`safe` text that may have several lines and tabs."""
    return safe(text, _LAYOUT)


def plain(text: object) -> str:
    """`safe` text that is not endless either: the middle of a very long name is left out."""
    made = safe(str(text)[: 100 * MAX_SHOWN_CHARS])
    return made if len(made) <= 2 * MAX_SHOWN_CHARS else f"{made[:MAX_SHOWN_CHARS]}…{made[-MAX_SHOWN_CHARS // 2 :]}"


def shell_word(path: str | os.PathLike[str]) -> str:
    """A path as one word of a shell command, on one line: quoted where it must be, its control characters and odd bytes escaped."""
    text = os.fspath(path)
    if text.startswith("-"):
        text = f"./{text}"  # not an option
    if text.isprintable():
        return shlex.quote(text)
    # $'...' of bash, zsh and ksh: the only quotes in which a line break or a byte of no text can be spelled on one line.
    made = "".join(chr(byte) if chr(byte) in _UNQUOTED else f"\\x{byte:02x}" for byte in os.fsencode(text))
    return f"$'{made}'"
