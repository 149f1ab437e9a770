"""Which part of which request a block works on, derived on the device from the live lengths. Traced code.

Every block of the grid finds its own unit: (request, tile of packed rows, split). The number of splits of a request
follows from its live length, so that blocks get about equal work whatever the lengths are, and no block is left over
for the short ones. All warps of all blocks compute the same numbers from the same lengths: nothing is communicated.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from mlactl.kernels.mla import ptx
from mlactl.kernels.mla.config import CHUNK_SHIFT, CHUNK_TOKENS, MIN_SPLIT_CHUNKS
from mlactl.kernels.mla.visibility import Numbers, Visibility

_SEARCH_STEPS = 4
_UNSPLIT = 1 << 30


@dataclass(frozen=True)
class Batch:
    """The launch's requests as the device sees them; `rows` query rows each, or `boundaries` where `rows` is 0."""

    lengths: Int64
    boundaries: Int64
    requests: Int32
    rows: Int32
    heads: Int32
    numbers: Numbers

    def length(self, request):
        """Cache length; a negative one counts as 0."""
        return cutlass.max(ptx.load_i32(self.lengths + Int64(request) * 4), Int32(0))


class Schedule:
    """Maps blocks to units for tiles of `tile_rows` packed rows; `visibility` says how much of a cache is worked on."""

    def __init__(self, tile_rows: int, visibility: Visibility):
        self.tile_rows, self.visibility = tile_rows, visibility

    @cute.jit
    def first_row(self, batch: cutlass.Constexpr, request: Int32):
        """First query row of a request."""
        first = request * batch.rows
        if batch.rows == 0:
            first = ptx.load_i32(batch.boundaries + Int64(request) * 4)
        return first

    @cute.jit
    def extent(self, batch: cutlass.Constexpr, request: Int32):
        """(chunks to work on, tiles of its packed rows) of a request; an empty one has no tiles, so that padding requests
        leave the others' splits, and with them every bit, as they are."""
        count = batch.rows
        if batch.rows == 0:
            address = batch.boundaries + Int64(request) * 4
            count = ptx.load_i32(address + 4) - ptx.load_i32(address)
        chunks = (batch.length(request) + (CHUNK_TOKENS - 1)) >> CHUNK_SHIFT
        if chunks == 0:
            count = Int32(0)
        tiles = (cutlass.max(count, Int32(0)) * batch.heads + (self.tile_rows - 1)) >> (self.tile_rows.bit_length() - 1)
        return self.visibility.work(batch.numbers, chunks), tiles

    def splits(self, chunks, limit):
        """Splits of a request at `limit` chunks a split."""
        return cutlass.max(ptx.divide(chunks + (limit - 1), limit), Int32(1))

    @cute.jit
    def blocks_needed(self, batch: cutlass.Constexpr, limit: Int32, lane: Int32):
        """Blocks the whole batch takes at `limit` chunks a split."""
        count = Int32(0)
        for request in cutlass.range(lane, batch.requests, 32, unroll=1):
            chunks, tiles = self.extent(batch, request)
            count = count + tiles * self.splits(chunks, limit)
        return ptx.warp_sum(count)

    @cute.jit
    def chunk_limit(self, batch: cutlass.Constexpr, budget: Int32, lane: Int32):
        """The fewest chunks a split may have so that the batch fits `budget` blocks; budget 0 asks for no splits at all.

        Two bounds always fit: equal splits of the longest request, and the total spread over the blocks that are left
        when every unit has given one for its remainder. A short search narrows what an uneven batch leaves between the
        better of them and the perfect share.
        """
        limit = Int32(_UNSPLIT)
        if budget > 0:
            units = Int32(0)
            total = Int32(0)
            longest = Int32(1)
            for request in cutlass.range(lane, batch.requests, 32, unroll=1):
                chunks, tiles = self.extent(batch, request)
                units = units + tiles
                total = total + tiles * chunks
                longest = cutlass.max(longest, chunks)
            units = cutlass.max(ptx.warp_sum(units), Int32(1))
            total = ptx.warp_sum(total)
            longest = ptx.warp_max(longest)
            equal = self._ceiling(longest, cutlass.max(ptx.divide(budget, units), Int32(1)))
            spread = self._ceiling(total, cutlass.max(budget - units, Int32(1)))
            limit = equal
            if budget > units:
                limit = cutlass.min(equal, spread)
            below = self._ceiling(total, budget)
            if limit > below + (below >> 4):
                for _ in cutlass.range(_SEARCH_STEPS, unroll=1):
                    middle = (below + limit) >> 1
                    if self.blocks_needed(batch, cutlass.max(middle, Int32(1)), lane) <= budget:
                        limit = cutlass.max(middle, Int32(1))
                    else:
                        below = middle
            limit = cutlass.max(limit, Int32(MIN_SPLIT_CHUNKS))
        return limit

    def _ceiling(self, a, b):
        return ptx.divide(a + (b - 1), b)

    @cute.jit
    def locate(self, batch: cutlass.Constexpr, budget: Int32, block: Int32, lane: Int32):
        """(request, its first block, its tiles, its splits) of a block; request -1 for a block that has no work."""
        limit = self.chunk_limit(batch, budget, lane)
        base = Int32(0)
        request = Int32(-1)
        first = Int32(0)
        tiles = Int32(0)
        splits = Int32(0)
        for group in cutlass.range(0, batch.requests, 32, unroll=1):
            candidate = group + lane
            wanted = Int32(0)
            its_tiles = Int32(0)
            its_splits = Int32(0)
            if candidate < batch.requests:
                chunks, its_tiles = self.extent(batch, candidate)
                its_splits = self.splits(chunks, limit)
                wanted = its_tiles * its_splits
            inclusive = wanted
            for delta in cutlass.range_constexpr(5):
                inclusive = inclusive + ptx.shuffle_up_or_zero(inclusive, 1 << delta)
            its_first = base + inclusive - wanted
            if (block >= its_first) & (block < its_first + wanted):
                request = candidate
                first = its_first
                tiles = its_tiles
                splits = its_splits
            base = base + ptx.warp_sum(wanted)
        return ptx.warp_max(request), ptx.warp_max(first), ptx.warp_max(tiles), ptx.warp_max(splits)
