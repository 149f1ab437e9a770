"""The two times that no kernel of this kind can beat: moving the bytes once, and the products on the tensor pipe.

FLOP = tokens * rows * heads * 2 * (width + latent), every row counted with the whole request; bytes = each KV record once,
plus query and output. A launch is reported as a share of the larger floor.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlactl.kernels.mla.records import DenseRecord

OUTPUT_ELEMENT_BYTES = 2


@dataclass(frozen=True, slots=True)
class Work:
    """What one launch cannot avoid."""

    flop: int
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class Rates:
    """What a card can do: a large copy's bytes (read plus written) and mma.sync's FLOP, both a second."""

    bytes_per_s: float
    flop_per_s: float


@dataclass(frozen=True, slots=True)
class Floors:
    """Both floors in microseconds."""

    memory_us: float
    mma_us: float

    @property
    def larger_us(self) -> float:
        """The one that counts."""
        return max(self.memory_us, self.mma_us)

    @property
    def bound(self) -> str:
        """Which one that is: memory or mma."""
        return "memory" if self.memory_us >= self.mma_us else "mma"


def dense_work(kv_tokens: int, row_tokens: int, rows: int, heads: int, record: DenseRecord, q_element_bytes: int) -> Work:
    """FLOP and bytes of one dense MLA launch.

    kv_tokens: records read, each once; row_tokens: the sum over query rows of the tokens each attends; rows: query rows.
    """
    query_bytes, output_bytes = record.width * q_element_bytes, record.latent * OUTPUT_ELEMENT_BYTES
    return Work(
        flop=row_tokens * heads * 2 * (record.width + record.latent),
        moved_bytes=kv_tokens * record.record_bytes + rows * heads * (query_bytes + output_bytes),
    )


def floors(work: Work, rates: Rates) -> Floors:
    """The floors of that work at those rates."""
    return Floors(work.moved_bytes / rates.bytes_per_s * 1e6, work.flop / rates.flop_per_s * 1e6)
