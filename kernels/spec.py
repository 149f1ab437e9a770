"""Compile specs: which kernel, which version of it, and the facts that change its code.

A spec is pure data. Building, hashing and parsing one imports neither torch nor the compiler, so that the command line
can plan, list and explain without either.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

FactValue = bool | int | str

ARCHES = ("sm_120a", "sm_121a", "sm_90a")
"""Targets objects are made for. sm_90a is the stand-in card's; a lookup never falls back from one to another."""


@dataclass(frozen=True, slots=True)
class CompileSpec:
    """One kernel variant: `facts` are (name, value) pairs sorted by name, values JSON scalars.

    Two specs are equal exactly when they would be compiled to the same code for one arch and toolchain. Whether the
    facts are the declared ones is `registry.validate`'s to say.
    """

    kernel_id: str
    version: int
    facts: tuple[tuple[str, FactValue], ...]

    @classmethod
    def of(cls, kernel_id: str, version: int, facts: Mapping[str, FactValue] | Iterable[tuple[str, FactValue]]) -> CompileSpec:
        """A spec of facts in any order."""
        pairs = facts.items() if isinstance(facts, Mapping) else facts
        return cls(kernel_id, version, tuple(sorted(pairs)))

    def fact(self, name: str) -> FactValue:
        """The value of one fact; raises KeyError when the spec has no such fact."""
        for key, value in self.facts:
            if key == name:
                return value
        raise KeyError(name)

    def as_json(self) -> dict[str, object]:
        """`{"kernel_id": …, "version": …, "facts": {…}}`, the shape used in manifests and in `--json` output."""
        return {"kernel_id": self.kernel_id, "version": self.version, "facts": dict(self.facts)}

    def label(self) -> str:
        """One line for people: `attention.dense_mla.merge 5 groups=4 value_width=512`."""
        return " ".join([self.kernel_id, str(self.version), *(f"{name}={_plain(value)}" for name, value in self.facts)])


def _plain(value: FactValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def canonical_json(value: object) -> str:
    """The one spelling of a JSON value: sorted keys, no spaces, ASCII, NaN refused (it raises ValueError)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
