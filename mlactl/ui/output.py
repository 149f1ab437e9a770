"""The only code that writes to a terminal: output modes, tables, progress, prompts and errors.

Data goes to stdout; progress, hints, warnings, prompts and errors to stderr. Commands hand over plain JSON-able rows and
columns; what a mode makes of them is decided here once. rich is imported when something is drawn with it, not before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from mlactl.errors import MlactlError, UsageError
from mlactl.printable import safe, safe_lines

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1
ROW_LIMIT = 200
"""Rows a human listing shows before it asks for --all."""

Row = Mapping[str, Any]


class Mode(StrEnum):
    """What stdout holds."""

    HUMAN = "human"
    JSON = "json"
    JSONL = "jsonl"
    QUIET = "quiet"
    PROMETHEUS = "prometheus"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a human listing: `cell` makes its text from a row."""

    title: str
    cell: Callable[[Any], str]
    right: bool = False


class Task:
    """A running count of long work; every method is safe to call when nothing is drawn."""

    def __init__(self, advance: Callable[[int], None], describe: Callable[[str], None]) -> None:
        self._advance, self._describe = advance, describe

    def advance(self, steps: int = 1) -> None:
        """Counts finished steps."""
        self._advance(steps)

    def describe(self, text: str) -> None:
        """Names what is being worked on now."""
        self._describe(text)


class Output:
    """Renders results in one mode to a pair of streams."""

    def __init__(self, mode: Mode = Mode.HUMAN, *, stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
        self.mode = mode
        self.stdout = stdout or sys.stdout
        self.stderr = stderr or sys.stderr

    # ---- data

    def document(self, document: Row, human: Callable[[], None], quiet: Callable[[], Sequence[str]] | None = None) -> None:
        """One JSON document in json and jsonl modes, `quiet()` lines in quiet mode, else whatever `human` writes."""
        if self.mode in (Mode.JSON, Mode.JSONL):
            self._json({"schema_version": SCHEMA_VERSION, **document})
        elif self.mode is Mode.QUIET:
            for line in quiet() if quiet else ():
                self.line(line)
        else:
            human()

    def listing(
        self,
        name: str,
        rows: Sequence[Any],
        columns: Sequence[Column],
        *,
        key: Callable[[Any], str],
        show_all: bool = False,
        extra: Row | None = None,
        empty: str = "nothing found",
        as_json: Callable[[Any], Any] | None = None,
    ) -> None:
        """A list of rows: `{"schema_version", name: [...]}` as JSON, a row a line as JSONL, `key(row)` a line when quiet, else a table."""
        encode = as_json or (lambda row: row)
        if self.mode is Mode.JSON:
            self._json({"schema_version": SCHEMA_VERSION, **(extra or {}), name: [encode(row) for row in rows]})
        elif self.mode is Mode.JSONL:
            for row in rows:
                self._json(encode(row))
        elif self.mode is Mode.QUIET:
            self.stdout.write("".join(f"{safe(key(row))}\n" for row in rows))
        elif not rows:
            self.note(empty)
        elif show_all:
            for row in rows:
                self.line("  ".join(safe(column.cell(row)) for column in columns))
        else:
            self.table(columns, rows[:ROW_LIMIT])
            more = f", {ROW_LIMIT} shown; --all prints every one" if len(rows) > ROW_LIMIT else ""
            self.note(f"{len(rows)} {name if len(rows) != 1 else _singular(name)}{more}")

    def table(self, columns: Sequence[Column], rows: Sequence[Any], *, title: str | None = None) -> None:
        """Draws a table on stdout; off a terminal it has no rules and is as wide as its cells, so that nothing is cut or folded."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        console = self._console(self.stdout)
        plain = not console.is_terminal
        table = Table(title=title, title_justify="left", box=None if plain else box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for column in columns:
            table.add_column(column.title, justify="right" if column.right else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(safe(column.cell(row))) for column in columns))
        if not plain:
            console.print(table)
            return
        from rich.measure import Measurement

        console.width = max(20, Measurement.get(console, console.options.update(max_width=100_000), table).maximum)
        with console.capture() as capture:
            console.print(table)
        self.stdout.write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))

    def line(self, text: str = "") -> None:
        """One plain line of data on stdout."""
        self.stdout.write(f"{safe_lines(text)}\n")

    def binary(self, what: str) -> BinaryIO:
        """stdout for bytes; raises UsageError when it is a terminal."""
        if self.stdout.isatty():
            raise UsageError(f"{what} is not written to a terminal", hint="name a file, or send stdout to one")
        return self.stdout.buffer

    def binary_input(self, what: str) -> BinaryIO:
        """stdin for bytes; raises UsageError when it is a terminal."""
        if sys.stdin.isatty():
            raise UsageError(f"stdin is a terminal, expected {what}", hint="name a file, or let stdin come from one: - <FILE")
        return sys.stdin.buffer

    def _json(self, value: object) -> None:
        import msgspec  # here: help and human output do without it

        try:
            encoded = msgspec.json.encode(value)
        except UnicodeEncodeError:
            # A file name that is not UTF-8 comes as lone surrogates, which no JSON text can hold.
            encoded = msgspec.json.encode(_without_surrogates(msgspec.to_builtins(value)))
        self.stdout.write(encoded.decode() + "\n")

    # ---- about the data

    def note(self, text: str) -> None:
        """A remark on stderr, shown to people only."""
        if self.mode is Mode.HUMAN:
            self._remark(text)

    def hint(self, text: str) -> None:
        """The next command to type, on its own line on stderr."""
        if self.mode is Mode.HUMAN:
            self._remark(f"hint: {text}")

    def warn(self, text: str) -> None:
        """A warning on stderr, in every mode."""
        self._remark(f"warning: {text}")

    def error(self, error: MlactlError) -> None:
        """An error and its next command on stderr, in every mode."""
        self._remark(f"error: {error.message}")
        if error.hint:
            self._remark(f"hint: {error.hint}")

    def _remark(self, text: str) -> None:
        self.stderr.write(f"{safe_lines(text)}\n")

    # ---- long work and questions

    @contextmanager
    def progress(self, title: str, total: int | None, unit: str, *, steady: bool = False) -> Iterator[Task]:
        """A bar with a count and a rate on a terminal's stderr, whatever stdout holds; plain lines for people without a terminal.

        `steady`: for work whose single steps may take long, lines with what is being done also between two counts, and
        after a second in the other modes too. It takes a thread, so not for work that forks.
        """
        from mlactl.ui.progress import FIRST_LINE_S, bar, lines, steady_lines

        title = safe(title)
        if self.stderr.isatty() and self.mode is not Mode.QUIET:
            with bar(self._console(self.stderr), title, total, unit) as task:
                yield task
        elif steady:
            with steady_lines(self.stderr, title, total, unit, first_after_s=0.0 if self.mode is Mode.HUMAN else FIRST_LINE_S) as task:
                yield task
        elif self.mode is not Mode.HUMAN:
            yield Task(lambda _: None, lambda _: None)
        else:
            with lines(self.stderr, title, total, unit) as task:
                yield task

    @property
    def can_ask(self) -> bool:
        """Whether there is a person at a terminal to answer."""
        return sys.stdin.isatty() and self.stderr.isatty()

    def confirm(self, question: str, *, yes: bool) -> bool:
        """True when `yes` or the person agrees; off a terminal without `yes` it raises UsageError instead of asking."""
        if yes:
            return True
        if not self.can_ask:
            raise UsageError(f"{question} cannot be asked without a terminal", hint="add --yes to go ahead or --dry-run to only look")
        self.stderr.write(f"{safe_lines(question)} [y/N] ")
        self.stderr.flush()
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    def _console(self, stream: TextIO) -> Console:
        from rich.console import Console

        if os.environ.get("NO_COLOR"):
            # No colour system and not only no colours: no bold and no dim either. And FORCE_COLOR makes no terminal of a pipe then.
            return Console(file=stream, highlight=False, color_system=None, force_terminal=stream.isatty())
        return Console(file=stream, highlight=False)


def _without_surrogates(value: Any) -> Any:
    """JSON-able data with lone surrogates spelled out as text, `\\udcff`, in keys too."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    return [_without_surrogates(item) for item in value] if isinstance(value, list | tuple) else value


def _singular(name: str) -> str:
    return name[:-3] + "y" if name.endswith("ies") else name.removesuffix("s")


def bytes_text(size: int | None) -> str:
    """A size for people: 512 B, 85.1 KiB, 1.2 GiB."""
    if size is None:
        return "-"
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{int(value)} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def age_text(seconds: float | None) -> str:
    """An age for people, in its largest whole unit: 12s, 5m, 3h, 41d."""
    if seconds is None:
        return "-"
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "m"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{int(seconds // divisor)}{unit}"
    return f"{int(seconds // 86_400)}d"
