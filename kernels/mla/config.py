"""Tile configurations: the numbers that shape the traced code, and every size that follows from them. Pure data.

A block is 384 threads: two consumer groups of four warps and four producer warps. `tok` tiles give both groups the same
packed rows and alternate chunks, merged in the block at the end; `row` tiles give each group its own rows of every chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlactl.kernels.mla.records import DenseRecord, dense_record

SHARED_BYTES_LIMIT = 101_376
"""Shared memory one block may use on SM120."""

CHUNK_TOKENS = 16
"""Tokens staged at once: the depth of one MMA step of PV, and never more than one page of a page size that is a multiple of 16."""

CHUNK_SHIFT = 4
"""log2 of CHUNK_TOKENS."""

MIN_SPLIT_CHUNKS = 4
"""A split is not made shorter than this many chunks: under it the merge costs more than the split saves."""

GROUPS = 2
GROUP_WARPS = 4
GROUP_THREADS = 32 * GROUP_WARPS
CONSUMER_THREADS = GROUPS * GROUP_THREADS
PRODUCER_WARPS = 4
BLOCK_THREADS = CONSUMER_THREADS + 32 * PRODUCER_WARPS

_RESCALE_BITS = 8.0


@dataclass(frozen=True, slots=True)
class TileConfig:
    """One way of packing (query row, head) pairs into the MMA tile.

    group_rows: rows a consumer group holds, 16 or 32; share_chunks: both groups work on every chunk, each on its own
    rows (`row` tiles); pipelined: QK of the next chunk is issued before PV of this one; stages: chunks in the ring;
    query_bytes: bytes of one query element.
    """

    name: str
    group_rows: int
    share_chunks: bool
    pipelined: bool
    stages: int
    record: DenseRecord
    query_bytes: int = 2

    def __post_init__(self) -> None:
        # With alternate chunks and an odd ring a group may wait two fills ahead of a stage, and one-bit parity aliases.
        assert self.share_chunks or self.stages % GROUPS == 0
        assert self.staged_offset + self.rows * self.query_pitch <= self.mbarrier_offset
        assert self.share_chunks or self.exchange_columns_bytes * GROUPS <= self.ring_bytes
        assert self.shared_bytes <= SHARED_BYTES_LIMIT

    @property
    def rows(self) -> int:
        """Packed rows of a tile."""
        return self.group_rows * (GROUPS if self.share_chunks else 1)

    @property
    def row_tiles(self) -> int:
        """16-row MMA tiles a consumer group holds."""
        return self.group_rows // 16

    @property
    def depth_steps(self) -> int:
        """MMA steps of 16 elements that one warp takes of the QK depth."""
        return self.record.width // 16 // GROUP_WARPS

    @property
    def value_columns(self) -> int:
        """Output columns of one warp."""
        return self.record.latent // GROUP_WARPS

    @property
    def column_tiles(self) -> int:
        """8-column MMA tiles of one warp's output."""
        return self.value_columns // 8

    @property
    def accumulators(self) -> int:
        """fp32 output accumulators of one thread."""
        return self.row_tiles * self.column_tiles * 4

    # -------------------------------------------------------------- softmax layout

    @property
    def lanes_per_row(self) -> int:
        """Lanes that hold one row's scores of a chunk."""
        return GROUP_THREADS // self.group_rows

    @property
    def scores(self) -> int:
        """Scores of a chunk that one thread finalises."""
        return CHUNK_TOKENS // self.lanes_per_row

    # -------------------------------------------------------------- shared memory

    @property
    def pitch(self) -> int:
        """Bytes between staged records: 16 more than a record, so that ldmatrix rows fall into different banks."""
        return self.record.record_bytes + 16

    @property
    def query_pitch(self) -> int:
        """Bytes between staged query rows, padded like the records."""
        return self.record.width * self.query_bytes + 16

    @property
    def staged_offset(self) -> int:
        """Offset of the staged query: the last stages of the ring, which are filled last."""
        return self.free_stages * self.stage_bytes

    @property
    def stage_bytes(self) -> int:
        """Bytes of one staged chunk."""
        return CHUNK_TOKENS * self.pitch

    @property
    def ring_bytes(self) -> int:
        """Bytes of the ring of staged chunks, at the start of shared memory."""
        return self.stages * self.stage_bytes

    @property
    def buffers(self) -> int:
        """Copies of the score exchange and of P: two when softmax of one chunk overlaps QK of the next."""
        return 2 if self.pipelined else 1

    @property
    def sources(self) -> int:
        """Warps a warp receives partial scores from; 32-row groups keep their own slice in registers."""
        return GROUP_WARPS - 1 if self.group_rows == 32 else GROUP_WARPS

    @property
    def slice_bytes(self) -> int:
        """Partial scores of one warp for another: its rows times the chunk, fp32."""
        return self.group_rows // GROUP_WARPS * CHUNK_TOKENS * 4

    @property
    def exchange_bytes(self) -> int:
        """Bytes of one score exchange buffer of a group."""
        return GROUP_WARPS * self.sources * self.slice_bytes

    @property
    def probability_pitch(self) -> int:
        """Bytes between rows of P: bf16, padded like the records."""
        return CHUNK_TOKENS * 2 + 16

    @property
    def probability_bytes(self) -> int:
        """Bytes of one P buffer of a group."""
        return self.group_rows * self.probability_pitch

    @property
    def probability_offset(self) -> int:
        """Offset of P inside a group's area; the exchange buffers come first."""
        return self.buffers * self.exchange_bytes

    @property
    def statistics_offset(self) -> int:
        """Offset, inside a group's area, of two fp32 a row: rescale factors in the loop, maximum and sum after it."""
        return self.probability_offset + self.buffers * self.probability_bytes

    @property
    def group_bytes(self) -> int:
        """Bytes of one group's area: exchange, P, statistics."""
        return self.statistics_offset + self.group_rows * 8

    @property
    def mbarrier_offset(self) -> int:
        """Offset of the mbarriers; the ring and the group areas come first."""
        return self.ring_bytes + GROUPS * self.group_bytes

    @property
    def unit_offset(self) -> int:
        """Offset of eight words that keep the block's unit for the epilogue; before it a full and an empty mbarrier a stage and one for the query."""
        return self.mbarrier_offset + 8 * (2 * self.stages + 1)

    @property
    def walk_offset(self) -> int:
        """Offset of the four words that map a selection's positions to chunks."""
        return self.unit_offset + 32

    @property
    def shared_bytes(self) -> int:
        """All of it: ring, group areas, mbarriers, unit, walk."""
        return self.walk_offset + 16

    @property
    def exchange_columns_bytes(self) -> int:
        """Half of one group's accumulators, handed to the other group through the idle ring at the end of a `tok` tile."""
        return GROUP_THREADS * self.accumulators // 2 * 4

    @property
    def free_stages(self) -> int:
        """Stages that can be filled while the query, staged in the last ones, is still being read."""
        return max(0, self.stages - -(-self.rows * self.query_pitch // self.stage_bytes))

    @property
    def query_overflows(self) -> bool:
        """Whether the staged query reaches past the ring into the group areas."""
        return self.rows * self.query_pitch > self.ring_bytes

    # -------------------------------------------------------------- registers

    @property
    def consumer_registers(self) -> int:
        """setmaxnreg of the consumers; with the producers' it must not exceed the 168 x 384 of the launch, else the block hangs."""
        return 240 if self.accumulators == 128 else 208

    @property
    def producer_registers(self) -> int:
        """setmaxnreg of the producers."""
        return 24 if self.accumulators == 128 else 88

    @property
    def rescale_threshold(self) -> float:
        """The running maximum moves only when it grows by more than this, in log2 units: rescales become rare."""
        return _RESCALE_BITS


TILES = {
    "tok16": {"group_rows": 16, "share_chunks": False, "pipelined": False},
    "tok32": {"group_rows": 32, "share_chunks": False, "pipelined": False},
    "row64": {"group_rows": 32, "share_chunks": True, "pipelined": True},
}
"""Tile variants by their name in compile facts."""

TILE_ROWS = {"tok16": 16, "tok32": 32, "row64": 64}
"""Packed rows by tile name."""

STAGES = {
    ("tok16", 576, "bf16"): 4,
    ("tok32", 576, "bf16"): 4,
    ("row64", 576, "bf16"): 3,
    ("tok16", 576, "fp8"): 8,
    ("tok32", 576, "fp8"): 8,
    ("row64", 576, "fp8"): 6,
    ("tok16", 1088, "bf16"): 2,
    ("tok16", 1088, "fp8"): 4,
}
"""Chunks in the ring by tile, width and record; what is missing has no room in an SM120 block or in the registers."""

QUERY_BYTES = {"bf16": 2, "e4m3": 1}
"""Bytes of one query element by q_dtype."""


def tile_config(tile: str, record: str, width: int, q_dtype: str = "bf16") -> TileConfig:
    """The configuration of a tile variant over a dense record; KeyError for a tile without room for that width."""
    shape = TILES[tile]
    return TileConfig(
        name=tile,
        group_rows=int(shape["group_rows"]),
        share_chunks=bool(shape["share_chunks"]),
        pipelined=bool(shape["pipelined"]),
        stages=STAGES[tile, width, record],
        record=dense_record(record, width),
        query_bytes=QUERY_BYTES[q_dtype],
    )
