"""Tolerances as data: reads tolerances.toml and picks the one that a comparison is held to."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlactl.errors import UsageError

TABLE = Path(__file__).with_name("tolerances.toml")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What a comparison is held to.

    An element passes when |actual - expected| <= max(atol, rtol * |expected|, row * max|expected of its row|). `cosine`
    (at least) and `norm` (|norm(actual)/norm(expected) - 1| at most) hold for each row; None does not ask for them.
    """

    name: str
    reason: str
    atol: float = 0.0
    rtol: float = 0.0
    row: float = 0.0
    cosine: float | None = None
    norm: float | None = None

    def scaled(self, factor: float) -> Tolerance:
        """The same with its element tolerances times `factor`."""
        return replace(self, atol=self.atol * factor, rtol=self.rtol * factor, row=self.row * factor)

    def text(self) -> str:
        """Its element tolerances in a few words: `row 0.01`, `atol 2e-05 rtol 2e-05`, `exact`."""
        parts = [f"{name} {value:.3g}" for name, value in (("atol", self.atol), ("rtol", self.rtol), ("row", self.row)) if value]
        return " ".join(parts) or "exact"

    def elements_exact(self) -> bool:
        """Whether elements must be equal."""
        return not (self.atol or self.rtol or self.row)

    def limits(self) -> str:
        """All of its limits in a few words: `row 0.01 cosine 0.9999 norm 0.005`."""
        rows = [f"{name} {value:g}" for name, value in (("cosine", self.cosine), ("norm", self.norm)) if value is not None]
        return " ".join([self.text(), *rows])

    def as_json(self) -> dict[str, Any]:
        """All of its fields by name."""
        return {
            "name": self.name,
            "atol": self.atol,
            "rtol": self.rtol,
            "row": self.row,
            "cosine": self.cosine,
            "norm": self.norm,
            "reason": self.reason,
        }


@functools.cache
def _table() -> Mapping[str, Any]:
    import tomli

    return tomli.loads(TABLE.read_text(encoding="utf-8"))


def _build(name: str, fields: Mapping[str, Any]) -> Tolerance:
    return Tolerance(name, **{key: value for key, value in fields.items() if not isinstance(value, Mapping)})


def for_output(record: str, mode: str) -> Tolerance:
    """The tolerance of attention outputs over `record` in `mode`; the record's own where the mode has none, else `any`."""
    outputs = _table()["output"]
    fields = outputs.get(record, outputs["any"])
    own = fields.get(mode)
    name = f"output.{record if record in outputs else 'any'}"
    return _build(f"{name}.{mode}", {**fields, **own}) if isinstance(own, Mapping) else _build(name, fields)


def for_lse(*, merged: bool = False) -> Tolerance:
    """The tolerance of log-sum-exps, natural log; `merged` for those of merged DCP ranks."""
    fields = _table()["lse"]
    return _build("lse.merged", fields["merged"]) if merged else _build("lse", fields)


def for_merged_output() -> Tolerance:
    """The tolerance of outputs merged over DCP ranks."""
    return _build("output.merged", _table()["output"]["merged"])


def for_dtype(dtype: str) -> Tolerance:
    """The tolerance of plain tensors of that element type (torch's name without `torch.`); exact for what is no float."""
    tensors = _table()["tensor"]
    key = dtype if dtype in tensors else "exact"
    return _build(f"tensor.{key}", tensors[key])


def overridden(base: Tolerance, *, atol: float | None = None, rtol: float | None = None, row: float | None = None) -> Tolerance:
    """`base` with the values a person gave instead; raises UsageError for one that is negative or no number."""
    require(atol=atol, rtol=rtol, row=row)
    if atol is None and rtol is None and row is None:
        return base
    # Whoever sets one value wants that one, not the largest of it and the defaults.
    return replace(
        base, name="command line", reason="given on the command line", atol=atol or 0.0, rtol=rtol or 0.0, row=row or 0.0, cosine=None, norm=None
    )


def require(*, atol: float | None = None, rtol: float | None = None, row: float | None = None) -> None:
    """Raises UsageError, in the words of the command line, for a tolerance that is negative, infinite or no number."""
    for option, value, example in (("--atol", atol, "1e-3"), ("--rtol", rtol, "1e-3"), ("--row-tol", row, "0.01")):
        if value is not None and not 0 <= value < float("inf"):
            raise UsageError(f"{option} {value:g} is no tolerance, expected a finite number of at least 0", hint=f"{option} {example}")
