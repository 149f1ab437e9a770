"""What a check found: one frozen row a fault, and the collector that checks append to.

Nothing is defaulted or clamped by a check. A finding names the place (layer, tensor, index), the value as it was
written, what was expected there, and what the fault would do to the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypedDict, Unpack

from mlactl.errors import MlactlError

MAX_FINDINGS = 1000
"""Rows kept of one file; more are counted only, so that a hostile file cannot fill the memory."""

MAX_SHOWN_CHARS = 80


class Severity(StrEnum):
    """`error` makes a file invalid, `warning` fails it with --strict only, `note` says something worth knowing."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault. `check` is a stable kebab-case name for scripts; the rest is for people, None where it does not apply.

    `layer` is the zero-based decoder layer, `tensor` a tensor's or a JSON field's name, `index` the position in it.
    """

    severity: Severity
    check: str
    layer: int | None
    tensor: str | None
    index: tuple[int, ...] | None
    value: str
    expected: str
    effect: str

    def as_json(self) -> dict[str, object]:
        """The row of `--output json`."""
        return {
            "severity": self.severity.value,
            "check": self.check,
            "layer": self.layer,
            "tensor": self.tensor,
            "index": None if self.index is None else list(self.index),
            "value": self.value,
            "expected": self.expected,
            "effect": self.effect,
        }

    def sentence(self) -> str:
        """One line for an error message: where, what was found, what was expected."""
        where = [f"layer {self.layer}"] * (self.layer is not None) + [self.tensor] * bool(self.tensor)
        at = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        return f"{' '.join(filter(None, where))}{at}{': ' if where else ''}{self.value}, expected {self.expected}"


class Place(TypedDict, total=False):
    """Where a finding is; what does not apply is left out."""

    layer: int | None
    tensor: str | None
    index: tuple[int, ...] | None


def _finding(severity: Severity, check: str, value: str, expected: str, effect: str, **place: Unpack[Place]) -> Finding:
    tensor = place.get("tensor")
    return Finding(
        severity, check, place.get("layer"), None if tensor is None else plain(tensor), place.get("index"), safe(value), safe(expected), effect
    )


class Findings:
    """An append-only list of findings that counts past its limit."""

    def __init__(self) -> None:
        self._rows: list[Finding] = []
        self._counts = dict.fromkeys(Severity, 0)

    def error(self, check: str, value: str, expected: str, effect: str, **place: Unpack[Place]) -> None:
        """Adds a fault that makes the file invalid."""
        self._add(_finding(Severity.ERROR, check, value, expected, effect, **place))

    def warning(self, check: str, value: str, expected: str, effect: str, **place: Unpack[Place]) -> None:
        """Adds a doubt: the file can be used, and somebody should look."""
        self._add(_finding(Severity.WARNING, check, value, expected, effect, **place))

    def note(self, check: str, value: str, expected: str, effect: str, **place: Unpack[Place]) -> None:
        """Adds something worth knowing that is not wrong."""
        self._add(_finding(Severity.NOTE, check, value, expected, effect, **place))

    def extend(self, findings: Iterable[Finding]) -> None:
        """Adds rows made elsewhere."""
        for finding in findings:
            self._add(finding)

    def _add(self, finding: Finding) -> None:
        self._counts[finding.severity] += 1
        if len(self._rows) < MAX_FINDINGS:
            self._rows.append(finding)
        elif finding.severity is Severity.ERROR and self._counts[Severity.ERROR] == 1:
            # A first error after a flood of warnings must not be the one that is left out.
            self._rows[-1] = finding

    def rows(self) -> tuple[Finding, ...]:
        """What was found, errors first, in the order found."""
        return tuple(sorted(self._rows, key=lambda row: list(Severity).index(row.severity)))

    def count(self, severity: Severity) -> int:
        """How many there were, those past the limit included."""
        return self._counts[severity]


class InvalidScales(MlactlError):
    """A scale file that must not be used; `findings` says why. Exit 1."""

    exit_code = 1

    def __init__(self, message: str, findings: tuple[Finding, ...], *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.findings = findings


def safe(text: object) -> str:
    """Text made safe to print: control characters and lone surrogates of an untrusted file or path are spelled out."""
    made = str(text)
    if made.isprintable():
        return made
    return "".join(char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode("ascii") for char in made)


def plain(text: object) -> str:
    """`safe` text that is not endless either: the middle of a very long name is left out."""
    made = safe(str(text)[: 100 * MAX_SHOWN_CHARS])
    return made if len(made) <= 2 * MAX_SHOWN_CHARS else f"{made[:MAX_SHOWN_CHARS]}…{made[-MAX_SHOWN_CHARS // 2 :]}"
