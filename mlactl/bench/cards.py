"""Cards by name, from cards.toml: what floors are computed from where no card can be measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import tomli

from mlactl.bench.floors import Rates
from mlactl.errors import UsageError

FILE = Path(__file__).with_name("cards.toml")
DEFAULT = "rtx-pro-6000"


@dataclass(frozen=True, slots=True)
class Card:
    """One card of the table: its figures are its data sheet's, never measured."""

    card: str
    name: str
    arch: str
    multiprocessors: int
    memory_gb_s: float
    mma_bf16_tflops: float
    source: str

    @property
    def rates(self) -> Rates:
        """Bytes and FLOP a second."""
        return Rates(self.memory_gb_s * 1e9, self.mma_bf16_tflops * 1e12)


@lru_cache(maxsize=1)
def cards() -> dict[str, Card]:
    """Every card of the table by the name that `--card` takes."""
    return {card: Card(card=card, **fields) for card, fields in tomli.loads(FILE.read_text()).items()}


def find(card: str) -> Card:
    """The card of that name; raises UsageError naming those there are."""
    found = cards().get(card)
    if found is None:
        raise UsageError(f"--card {card} is not in the table, which has {', '.join(cards())}", hint=f"--card {DEFAULT}")
    return found
