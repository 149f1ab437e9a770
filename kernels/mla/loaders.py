"""How queries and KV records reach shared memory. Traced code.

`DensePages` is where KV comes from: a page table over a paged pool. Another source (selected slots) needs the same
three methods: `seek`, `advance` and `address`.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from mlactl.kernels.mla import ptx
from mlactl.kernels.mla.config import CHUNK_TOKENS, CONSUMER_THREADS, PRODUCER_WARPS, TileConfig
from mlactl.kernels.mla.visibility import Numbers, Visibility

_WARP_TOKENS = CHUNK_TOKENS // PRODUCER_WARPS
_COPY_BYTES = 16
_QUERY_LANES = 8


@dataclass(frozen=True)
class DensePages:
    """Records of one request in a paged pool, walked chunk by chunk by one producer lane.

    A chunk never crosses a page, since page sizes are 1 or a multiple of the chunk; with pages of one token every lane
    has its own table entry. Tokens past `last` repeat it: neither the table nor the pool is read beyond the visible
    length. All pool offsets are Int64. `pool` and `table_row` are addresses, strides are bytes, `token` is the lane's
    place in a chunk and `last` the last token to read.
    """

    pool: Int64
    page_stride: Int64
    record_stride: Int64
    page_size: Int32
    table_row: Int64
    last: Int32
    token: Int32

    @cute.jit
    def seek(self, first_token: Int32):
        """(table index, token within the page) of a chunk's first token, then what a lane adds to each, the step in
        table entries, and the last table index that may be read."""
        entry = ptx.divide(first_token, self.page_size)
        offset = first_token - entry * self.page_size
        lane_entry = Int32(0)
        lane_offset = self.token
        step = Int32(1)
        if self.page_size == 1:
            lane_entry = self.token
            lane_offset = Int32(0)
            step = Int32(CHUNK_TOKENS)
        return entry + lane_entry, offset, lane_offset, step, ptx.divide(self.last, self.page_size)

    def page(self, entry, last_entry):
        """Page id of a table entry."""
        return ptx.load_i32(self.table_row + Int64(cutlass.min(entry, last_entry)) * 4)

    def address(self, page, offset, lane_offset, first_token):
        """Address of the lane's record of the chunk at `first_token`."""
        row = offset + cutlass.min(lane_offset, self.last - first_token)
        return self.pool + Int64(page) * self.page_stride + Int64(row) * self.record_stride


@dataclass(frozen=True)
class ChunkWalk:
    """First tokens of the positions that a tile walks; `words` is the shared address of its walk's words."""

    visibility: Visibility
    numbers: Numbers
    words: Int32

    def token(self, position):
        """First token of the chunk at a position."""
        return self.visibility.chunk(self.numbers, position, self.words) * CHUNK_TOKENS


@cute.jit
def prefetch_tables(table: Int64, entries: Int64, block: Int32, blocks: Int32, lane: Int32):
    """Before any length is known, one warp of each block asks the L2 for its share of the page tables, up to 32 lines of 128 bytes.

    A block then waits for its lengths and its first table entry at the same time instead of one after the other.
    """
    line = Int64(lane * blocks + block)
    if line * 32 < entries:
        ptx.prefetch_l2(table + line * 128)


@cute.jit
def produce(
    config: cutlass.Constexpr[TileConfig],
    source: cutlass.Constexpr[DensePages],
    walk: cutlass.Constexpr[ChunkWalk],
    shared: Int32,
    full: Int32,
    empty: Int32,
    query_read: Int32,
    begin: Int32,
    end: Int32,
    warp: Int32,
    lane: Int32,
):
    """One producer warp: keeps the ring full with the chunks at positions [begin, end), one bulk copy of a record a lane.

    `walk.token` gives a position's first token; without a selection, positions are chunks and follow one another.
    """
    first_token = walk.token(begin)
    entry, offset, lane_offset, step, last_entry = source.seek(first_token)
    page = source.page(entry, last_entry)
    stage = Int32(0)
    phase = Int32(1)
    destination = shared + source.token * config.pitch
    for position in cutlass.range(begin, end, unroll=1):
        if position == begin + config.free_stages:
            ptx.mbarrier_wait(query_read, Int32(0))
        address = source.address(page, offset, lane_offset, first_token)
        if cutlass.const_expr(walk.visibility.sparse):
            first_token = walk.token(position + 1)
            entry, offset, _, _, _ = source.seek(first_token)
        else:
            first_token = first_token + CHUNK_TOKENS
            offset = offset + CHUNK_TOKENS
            if offset >= source.page_size:
                offset = Int32(0)
                entry = entry + step
        page = source.page(entry, last_entry)
        ptx.mbarrier_wait(empty + 8 * stage, phase)
        if lane == 0:
            ptx.mbarrier_expect(full + 8 * stage, _WARP_TOKENS * config.record.record_bytes)
        cute.arch.sync_warp()
        if lane < _WARP_TOKENS:
            ptx.bulk_copy(destination + stage * config.stage_bytes, address, config.record.record_bytes, full + 8 * stage)
        stage = stage + 1
        if stage == config.stages:
            stage = Int32(0)
            phase = phase ^ 1


def producer_token(warp, lane):
    """A producer lane's token within a chunk; lanes past the warp's share repeat its last one and copy nothing."""
    return warp * _WARP_TOKENS + cutlass.min(lane, Int32(_WARP_TOKENS - 1))


@cute.jit
def stage_query(
    config: cutlass.Constexpr[TileConfig],
    query: Int64,
    token_stride: Int64,
    head_stride: Int64,
    heads: Int32,
    first: Int32,
    rows: Int32,
    destination: Int32,
    warp: Int32,
    lane: Int32,
):
    """Consumer threads copy the tile's packed rows, 8 lanes a row; rows past the last one repeat it.

    `query` is the request's first row; strides in bytes; `first` the tile's first packed row, row = token * heads + head.
    """
    rows_at_once = CONSUMER_THREADS // _QUERY_LANES
    part = (lane % _QUERY_LANES) * _COPY_BYTES
    for step in cutlass.range_constexpr(-(-config.rows // rows_at_once)):
        row = warp * (32 // _QUERY_LANES) + lane // _QUERY_LANES + rows_at_once * step
        if row < config.rows:
            packed = first + cutlass.min(row, rows - 1)
            token = ptx.divide(packed, heads)
            head = packed - token * heads
            source = query + Int64(token) * token_stride + Int64(head) * head_stride + Int64(part)
            target = destination + row * config.query_pitch + part
            line_bytes = _QUERY_LANES * _COPY_BYTES
            lines, rest = divmod(config.record.width * config.query_bytes, line_bytes)
            for line in cutlass.range_constexpr(lines):
                ptx.copy16_async(target, source, line * line_bytes, line * line_bytes)
            if cutlass.const_expr(rest):  # noqa: SIM102  this one is decided at trace time
                if part < rest:
                    ptx.copy16_async(target, source, lines * line_bytes, lines * line_bytes)
    ptx.commit_copies()
