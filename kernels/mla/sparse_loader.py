"""How selected records reach shared memory: the gather. Traced code.

Warps that do nothing else copy each chunk's records into their group's ring, one bulk copy a record: 16-byte copies of records
that begin on any 16 bytes keep the load-store unit busy for over a third of the loop. A token that is absent (a negative or impossible
slot, or one past the row's length) copies nothing and its bytes become zeros: no stale byte can decode to a NaN that would
survive a probability of 0. Pool offsets are Int64.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from mlactl.kernels.mla import ptx, ptx_narrow
from mlactl.kernels.mla.sparse_config import SparseTile


def next_stage(config, stage, ring):
    """The stage behind `stage` in a ring."""
    return ptx_narrow.where_equal(stage, ring + (config.stages - 1) * config.stage_bytes, ring, stage + config.stage_bytes)


def next_parity(config, stage, ring, parity):
    """Parity of the mbarriers of that stage: it changes where the ring begins anew."""
    return parity ^ ptx_narrow.where_equal(stage, ring + (config.stages - 1) * config.stage_bytes, Int32(1), Int32(0))


@dataclass(frozen=True)
class SelectedSlots:
    """Records of one query row, picked by its index row.

    pool: address; record_stride: bytes; index_row: address; slots: records in the pool; end: where the tokens of the row
    that the group may read end; first: the warp's first record of a chunk; token: the one of them that this lane looks after.
    """

    config: SparseTile
    pool: Int64
    record_stride: Int32
    index_row: Int64
    slots: Int32
    end: Int32
    first: Int32
    token: Int32
    lane: Int32

    @classmethod
    def of(cls, config, pool, record_stride, index_row, slots, end, warp, lane):
        """The loader of one lane of warp number `warp` of those that copy for a group."""
        first = warp * config.copy_records
        return cls(config, pool, record_stride, index_row, slots, end, first, first + lane % config.copy_records, lane)

    @cute.jit
    def entry(self, first: Int32):
        """Index entry of this lane's token of the chunk at token `first`; -1 where the group has no such token."""
        found = Int32(-1)
        if first + self.token < self.end:
            found = ptx.load_i32(self.index_row + Int64(first + self.token) * 4)
        return found

    @cute.jit
    def produce(self, ring: Int32, begin: Int32, end: Int32):
        """Copies chunks [begin, end) into the ring, each as soon as its stage has been read."""
        config = self.config
        stage, parity = ring, Int32(1)
        entry = self.entry(begin * config.chunk)
        for chunk in cutlass.range(begin, end, unroll=1):
            slot = ptx_narrow.inside_or_none(entry, self.slots)
            entry = self.entry((chunk + 1) * config.chunk)
            ptx.mbarrier_wait(stage + config.empty_offset, parity)
            self.fill(stage, slot)
            parity = next_parity(config, stage, ring, parity)
            stage = next_stage(config, stage, ring)

    @cute.jit
    def fill(self, stage: Int32, slot: Int32):
        """Notes the warp's slots in a stage and starts the copies of their records."""
        config = self.config
        ptx.store_shared_b32(stage + self.token * 4, slot, config.slots_offset)
        place = stage + self.first * config.pitch
        full = stage + config.full_offset
        absent = ptx_narrow.count_negative(slot) // (32 // config.copy_records)
        if absent == 0:
            cute.arch.sync_warp()
            source = self.pool + Int64(slot) * Int64(self.record_stride)
            ptx_narrow.gather(place, config.pitch, config.copy_records, config.record.record_bytes, source, full)
        else:
            self.fill_some(place, full, slot, config.copy_records - absent)

    @cute.jit
    def fill_some(self, place: Int32, full: Int32, slot: Int32, present: Int32):
        """The same where tokens are absent: zeros for them, then the copies of the others one by one."""
        config = self.config
        for record in cutlass.range(config.copy_records, unroll=1):
            if ptx_narrow.from_lane(slot, record) < 0:
                piece = self.lane * 16
                while piece < config.record.record_bytes:
                    ptx_narrow.clear16(place + record * config.pitch + piece)
                    piece += 512
        # The next copy to these bytes is another proxy's.
        ptx_narrow.async_proxy_fence()
        cute.arch.sync_warp()
        if self.lane == 0:
            ptx_narrow.mbarrier_expect_bytes(full, present * config.record.record_bytes)
        if (self.lane < config.copy_records) & (slot >= 0):
            source = self.pool + Int64(slot) * Int64(self.record_stride)
            ptx.bulk_copy(place + self.lane * config.pitch, source, config.record.record_bytes, full)
        cute.arch.sync_warp()
