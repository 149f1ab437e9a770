"""How selected records reach shared memory: the gather. Traced code.

Every warp copies its share of each chunk's records, eight lanes a record, with 16-byte `cp.async`. A token that is absent (a
negative or impossible slot, or one past the row's length) copies nothing and its bytes become zeros: no stale byte can decode
to a NaN that would survive a probability of 0. Pool offsets are Int64.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from mlactl.kernels.mla import ptx, ptx_narrow
from mlactl.kernels.mla.sparse_config import COPY_BYTES, COPY_LANES, COPY_TOKENS, SparseTile


@dataclass(frozen=True)
class SelectedSlots:
    """Records of one query row, picked by its index row.

    piece_base: address of this lane's first 16-byte piece of the pool's first record; record_stride: bytes; index_row: address;
    slots: records in the pool; end: tokens of the row's split that may be read; token: this lane's first record of a chunk;
    piece: its place among the lanes of a record; place, tail: where its whole rounds and its last piece go in a stage.
    """

    config: SparseTile
    piece_base: Int64
    record_stride: Int32
    index_row: Int64
    slots: Int32
    end: Int32
    token: Int32
    piece: Int32
    place: Int32
    tail: Int32

    @classmethod
    def of(cls, config, pool, record_stride, index_row, slots, end, warp, lane):
        """The loader of one lane."""
        token, piece = warp * COPY_TOKENS + lane // COPY_LANES, lane % COPY_LANES
        at = piece * COPY_BYTES
        # Lanes past the record's end copy nothing in the last round and write their zeros over its padding, or its last piece.
        last = config.pitch - config.whole_rounds * COPY_LANES * COPY_BYTES - COPY_BYTES
        tail = token * config.pitch + cutlass.min(at, Int32(last))
        return cls(config, pool + Int64(at), record_stride, index_row, slots, end, token, piece, token * config.pitch + at, tail)

    def start(self, first):
        """Index entries of this lane's tokens of one of the split's first chunks, straight from memory."""
        return [self._load(first + self.token + offset) for offset in self._offsets()]

    def entries(self, stage):
        """Index entries of this lane's tokens of the chunk that a stage holds next."""
        at = stage + self.config.indices_offset + self.token * 4
        return [ptx_narrow.load_shared_words(at, 1, offset * 4)[0] for offset in self._offsets()]

    def _offsets(self):
        """This lane's tokens in a chunk, less the first."""
        return [index * (self.config.warps * COPY_TOKENS) for index in range(self.config.copy_rounds)]

    @cute.jit
    def _load(self, token: Int32):
        found = Int32(-1)
        if token < self.end:
            found = ptx.load_i32(self.index_row + Int64(token) * 4)
        return found

    @cute.jit
    def _copy(self, stage: Int32, slot: Int32, offset: cutlass.Constexpr[int]):
        """Starts the copy of this lane's pieces of one record and notes its slot in the stage."""
        config = self.config
        source = self.piece_base + Int64(cutlass.max(slot, Int32(0))) * Int64(self.record_stride)
        count = ptx_narrow.where_negative(slot, Int32(0), Int32(COPY_BYTES))
        step = COPY_LANES * COPY_BYTES
        shift = offset * config.pitch
        for index in cutlass.range_constexpr(config.whole_rounds):
            ptx_narrow.copy16_or_zero(stage + self.place, source, count, shift + index * step, index * step)
        pieces = config.record.record_bytes // COPY_BYTES - config.whole_rounds * COPY_LANES
        if cutlass.const_expr(pieces):
            left = ptx_narrow.where_below(self.piece, Int32(pieces), count, Int32(0))
            ptx_narrow.copy16_or_zero(stage + self.tail, source, left, shift + config.whole_rounds * step, config.whole_rounds * step)
        ptx_narrow.store_shared_word_if_zero(self.piece, stage + config.slots_offset + self.token * 4 + offset * 4, slot)

    @cute.jit
    def fill(self, stage: Int32, first: Int32, entries: cutlass.Constexpr):
        """Starts the copies of the chunk at token `first`, where it is still part of the split; always closes one group of copies.

        The index entries of the stage's chunk after that travel by `cp.async` too: a load into registers would be waited for
        wherever the compiler's scoreboards meet.
        """
        config = self.config
        if first < self.end:
            for index, offset in enumerate(self._offsets()):
                token = first + self.token + offset
                slot = ptx_narrow.where_below(token, self.end, entries[index], Int32(-1))
                self._copy(stage, ptx_narrow.inside_or_none(slot, self.slots), offset)
                later = token + config.stages * config.chunk
                if (later < self.end) & (self.piece == 0):
                    ptx_narrow.copy4(stage + config.indices_offset + self.token * 4 + offset * 4, self.index_row + Int64(later) * 4)
        ptx.commit_copies()
