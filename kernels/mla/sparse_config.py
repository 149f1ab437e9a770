"""Tile configurations of sparse MLA: the numbers that shape its traced code, and every size that follows from them. Pure data.

A block works on the same 16 or 32 heads of one query row. Its warps share out the latent in slices of 64 elements, for scores
and for values, so that the packed bytes a warp reads once serve both. A block of two groups is two such sets of warps over the
two halves of the tokens, each with shared memory of its own: one block then merges what would be two splits. Four more warps
copy what the groups read.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlactl.kernels.mla.sparse_records import LATENT, ROPE, SparseRecord, sparse_record

SHARED_BYTES_LIMIT = 101_376
"""Shared memory one block may use on SM120."""

CHUNK = 32
"""Selected tokens staged at once: twice the depth of an MMA step of PV."""

SLICES = 8
SLICE_LATENT = LATENT // SLICES
SLICE_ROPE = ROPE // SLICES
"""Latent and RoPE elements of a slice: four and a half MMA steps of the QK depth, and eight MMA columns of values."""

LANE_LATENT = SLICE_LATENT // 4
"""Consecutive latent elements of one lane in a slice, for queries, keys and outputs: one NVFP4 group."""

LANE_PAIRS = LANE_LATENT // 2
"""16-bit pairs of one token and slice that a lane holds."""

RESCALE_BITS = 8.0
"""The running maximum moves only when it is passed by more than this, in log2 units: rescales become rare and P stays far inside f16."""

TILE_ROWS = {"heads16": 16, "heads32": 32}
"""Heads of a tile by tile name."""

PRODUCER_WARPS = 4
"""Warps that copy: a warpgroup, which is what `setmaxnreg` speaks to."""


@dataclass(frozen=True, slots=True)
class SparseTile:
    """One tile variant over one record.

    row_tiles: 16-head groups that share each gathered chunk and its decoded fragments; warps: 4 or 8, of one group; stages: chunks
    in a group's ring; groups: 1, or 2 that halve the tokens between them.
    """

    name: str
    record: SparseRecord
    row_tiles: int
    warps: int
    stages: int
    groups: int

    def __post_init__(self) -> None:
        assert self.shared_bytes <= SHARED_BYTES_LIMIT
        assert self.pitch % 16 == 0
        assert self.pitch >= self.record.record_bytes
        # Groups add up the sums of one row tile, in what was their rings.
        assert self.groups == 1 or (self.row_tiles == 1 and self.column_bytes <= self.exchange_offset)

    @property
    def rows(self) -> int:
        """Heads of a tile."""
        return 16 * self.row_tiles

    @property
    def chunk(self) -> int:
        """Selected tokens staged at once."""
        return CHUNK

    @property
    def group_threads(self) -> int:
        """Threads of a group."""
        return 32 * self.warps

    @property
    def consumer_threads(self) -> int:
        """Threads of all groups."""
        return self.group_threads * self.groups

    @property
    def threads(self) -> int:
        """Threads of a block, those that copy included."""
        return self.consumer_threads + 32 * PRODUCER_WARPS

    @property
    def copy_warps(self) -> int:
        """Warps that copy for one group."""
        return PRODUCER_WARPS // self.groups

    @property
    def copy_records(self) -> int:
        """Records of a chunk that one of them copies."""
        return self.chunk // self.copy_warps

    @property
    def warp_slices(self) -> int:
        """Slices of the latent that one warp owns."""
        return SLICES // self.warps

    @property
    def token_tiles(self) -> int:
        """8-token MMA tiles of a chunk."""
        return self.chunk // 8

    @property
    def chunk_shift(self) -> int:
        """log2 of `chunk`."""
        return self.chunk.bit_length() - 1

    # -------------------------------------------------------------- softmax layout

    @property
    def warp_rows(self) -> int:
        """Rows of each 16-row tile that one warp finalises."""
        return 16 // self.warps

    @property
    def scores(self) -> int:
        """Scores of a row tile and chunk that one thread finalises: neighbouring tokens in pairs."""
        return self.warp_rows * self.chunk // 32

    @property
    def lanes_per_row(self) -> int:
        """Lanes that hold one row's scores of a chunk."""
        return 32 // self.warp_rows

    # -------------------------------------------------------------- shared memory

    @property
    def pitch(self) -> int:
        """Bytes between staged records: the rows that lanes read at once (32 bytes a slice and record, or 64) fall into different banks."""
        width = 96 if self.record.latent == "e2m1" else 64
        return self.record.record_bytes + (width - self.record.record_bytes) % 128

    @property
    def slots_offset(self) -> int:
        """Offset of a stage's slot numbers, one Int32 a token, negative where nothing was loaded."""
        return self.chunk * self.pitch

    @property
    def full_offset(self) -> int:
        """Offset of the mbarrier that says a stage's records have arrived."""
        return self.slots_offset + self.chunk * 4

    @property
    def empty_offset(self) -> int:
        """Offset of the mbarrier that says a stage has been read."""
        return self.full_offset + 8

    @property
    def stage_bytes(self) -> int:
        """Bytes of one stage: records, their slots, its two mbarriers."""
        return self.empty_offset + 8

    @property
    def slice_bytes(self) -> int:
        """Partial scores that one warp sends to one other of a row tile, fp32."""
        return self.warp_rows * self.chunk * 4

    @property
    def exchange_bytes(self) -> int:
        """Partial scores of a row tile: every warp sends to every warp."""
        return self.warps * self.warps * self.slice_bytes

    @property
    def exchange_offset(self) -> int:
        """Offset of the score exchange; the ring comes first."""
        return self.stages * self.stage_bytes

    @property
    def probability_pitch(self) -> int:
        """Bytes between rows of P: eight rows of 16 bytes fall into different banks."""
        return self.chunk * 2 + 16

    @property
    def probability_offset(self) -> int:
        """Offset of P."""
        return self.exchange_offset + self.row_tiles * self.exchange_bytes

    @property
    def statistics_offset(self) -> int:
        """Two fp32 a row: rescale factors in the loop, maximum and sum after it."""
        return self.probability_offset + self.rows * self.probability_pitch

    @property
    def group_bytes(self) -> int:
        """Shared memory of one group."""
        return -(-(self.statistics_offset + self.rows * 8) // 128) * 128

    @property
    def column_bytes(self) -> int:
        """What a group sends the other at the end, through the idle ring: half of its accumulators."""
        return self.group_threads * self.accumulators * 2

    @property
    def shared_bytes(self) -> int:
        """All of it."""
        return self.group_bytes * self.groups

    # -------------------------------------------------------------- registers

    @property
    def role_registers(self) -> tuple[int, int]:
        """setmaxnreg of a thread that computes and of one that copies; a block must not ask for more than its launch has, else it hangs.

        A launch of 384 threads has 168 each, and one of 256 what its threads that compute ask for.
        """
        if self.consumer_threads == 128:
            return 240, 72
        # Scales by token are more values that live through the softmax.
        return (232, 40) if self.record.token_scale_at is not None else (216, 72)

    @property
    def warp_pairs(self) -> int:
        """16-bit pairs of one token that a lane holds over all of its warp's slices."""
        return self.warp_slices * LANE_PAIRS

    @property
    def lane_octets(self) -> int:
        """Runs of eight neighbouring output columns of one lane."""
        return 2 * self.warp_slices

    @property
    def accumulators(self) -> int:
        """fp32 output accumulators of one thread."""
        return self.row_tiles * self.warp_pairs * 4


def sparse_tile(tile: str, record: str) -> SparseTile:
    """The configuration of a tile variant over a sparse record."""
    found = sparse_record(record)
    packed = found.latent == "e2m1"
    if tile == "heads16":
        # Two groups hide each other's barriers; rings of 656-byte records leave room for one.
        return SparseTile(tile, found, row_tiles=1, warps=4, stages=2 if packed else 3, groups=2 if packed else 1)
    return SparseTile(tile, found, row_tiles=2, warps=8, stages=3 if packed else 2, groups=1)
