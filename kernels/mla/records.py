"""Record tables of dense KV caches: how many bytes one token takes and what they are. Pure data, shared with the reference."""

from __future__ import annotations

from dataclasses import dataclass

ROPE_ELEMENTS = 64
"""Elements of the decoupled RoPE key, at the end of every dense record."""


@dataclass(frozen=True, slots=True)
class DenseRecord:
    """One token of a dense MLA cache: `latent` elements that serve as key and value, then the RoPE key (key only)."""

    name: str
    latent: int
    element_bytes: int

    @property
    def width(self) -> int:
        """Elements of a record."""
        return self.latent + ROPE_ELEMENTS

    @property
    def record_bytes(self) -> int:
        """Bytes of a record."""
        return self.width * self.element_bytes

    @property
    def f16_products(self) -> bool:
        """Whether elements widen to f16, which holds every E4M3 value, and are multiplied as such; else as bf16."""
        return self.element_bytes == 1


ELEMENT_BYTES = {"bf16": 2, "fp8": 1}
"""Bytes of one element by record name."""

LATENT_ELEMENTS = {576: 512, 1088: 1024}
"""Latent elements by record width."""


def dense_record(name: str, width: int) -> DenseRecord:
    """The dense record of that name and width in elements; raises KeyError for one that does not exist."""
    return DenseRecord(name, LATENT_ELEMENTS[width], ELEMENT_BYTES[name])
