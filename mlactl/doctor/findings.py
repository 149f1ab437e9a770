"""What the doctor found: one frozen row for each fact checked, with what was expected instead and what mends it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """`ok` and `notice` leave exit code 0, `warning` and `error` make it 1, `fatal` (a launch could not work) 3."""

    OK = "ok"
    NOTICE = "notice"
    WARNING = "warning"
    ERROR = "error"
    FATAL = "fatal"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact. `check` is a stable kebab-case name for scripts; `expected` and `fix` are empty where nothing is wrong."""

    area: str
    severity: Severity
    check: str
    what: str
    expected: str = ""
    fix: str = ""

    @property
    def counts(self) -> bool:
        """Whether it makes the exit code other than 0."""
        return self.severity in (Severity.WARNING, Severity.ERROR, Severity.FATAL)

    def as_json(self) -> dict[str, str | None]:
        """The row of `--output json`."""
        return {
            "area": self.area,
            "severity": self.severity.value,
            "check": self.check,
            "what": self.what,
            "expected": self.expected or None,
            "fix": self.fix or None,
        }


def exit_code(findings: Iterable[Finding]) -> int:
    """3 when a launch could not work, 1 when something is wrong, 0 otherwise."""
    found = {finding.severity for finding in findings}
    return 3 if Severity.FATAL in found else int(bool(found & {Severity.WARNING, Severity.ERROR}))
