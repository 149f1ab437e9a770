"""From accumulators to memory: merging the two groups of a `tok` tile, normalising, and the three kinds of rows written. Traced code.

A unit that is its rows' only split writes bf16 output and LSE; one of several writes fp32 partials into its block's slots of
the scratch, and the first of them a directory entry a row, which is all that the merge knows of the schedule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from mlactl.kernels.mla import ptx, ptx_narrow
from mlactl.kernels.mla.config import CONSUMER_THREADS, TileConfig

LN2 = math.log(2.0)
GROUPS_BARRIER = 3
"""Named barrier of both consumer groups."""


@dataclass(frozen=True)
class Destination:
    """Where a tile's rows go. Addresses, byte strides (Int64) and the tile's place among its request's packed rows.

    first: first packed row; rows: how many are real; row_base: the tile's first packed row in the whole batch;
    slot_base: its first row among the scratch's slots; alone: whether it is its rows' only split; value_scale: scale of
    E4M3 values, None over bf16.
    """

    config: TileConfig
    output: Int64
    token_stride: Int64
    head_stride: Int64
    lse: Int64
    partial: Int64
    partial_lse: Int64
    heads: Int32
    first: Int32
    rows: Int32
    row_base: Int32
    slot_base: Int32
    alone: Int32
    value_scale: Float32 | None

    def normaliser(self, total):
        """What a row's sums are multiplied by: 1 / total, times the values' scale; 0 for a row that saw nothing."""
        inverse = ptx.reciprocal_or_zero(total)
        return inverse if self.value_scale is None else inverse * self.value_scale

    def direct_address(self, row, column):
        """Address of an output element, bf16."""
        packed = self.first + row
        token = ptx.divide(packed, self.heads)
        head = packed - token * self.heads
        return self.output + Int64(token) * self.token_stride + Int64(head) * self.head_stride + Int64(column) * 2

    def partial_address(self, row, column):
        """Address of a partial sum, fp32."""
        return self.partial + (Int64(self.slot_base + row) * self.config.record.latent + Int64(column)) * 4


@dataclass(frozen=True)
class Pair:
    """The two groups' statistics of the same row, brought to one maximum (log2 units)."""

    maximum: Float32
    factor: Float32
    total: Float32


def pair_of(config, own, other, row):
    """The pair of a row; `factor` is what the sums of the group whose statistics are at `own` are scaled by."""
    first = [ptx.load_shared_f32(area + row * 4, 1, config.group_rows * 4 * i)[0] for area in (own, other) for i in range(2)]
    maximum = ptx.maximum(first[0], first[2])
    factor = ptx.exp2(first[0] - maximum)
    return Pair(maximum, factor, first[1] * factor + first[3] * ptx.exp2(first[2] - maximum))


@cute.jit
def store_lse(to: cutlass.Constexpr[Destination], row: Int32, maximum: Float32, total: Float32, may_split: cutlass.Constexpr[bool]):
    """Natural-log LSE of one row; -inf for one that saw nothing. `maximum` in log2 units."""
    value = (maximum + ptx.log2(total)) * Float32(LN2)
    if total <= Float32(0.0):
        value = Float32(-math.inf)
    address = to.lse + Int64(to.row_base + row) * 4
    if cutlass.const_expr(may_split):  # noqa: SIM102  this one is decided at trace time
        if to.alone == 0:
            address = to.partial_lse + Int64(to.slot_base + row) * 4
    ptx.store_f32(address, value)


@cute.jit
def store_columns(
    to: cutlass.Constexpr[Destination],
    sums: cute.Tensor,
    inverse: cutlass.Constexpr,
    begin: cutlass.Constexpr[int],
    end: cutlass.Constexpr[int],
    first_row: Int32,
    warp: Int32,
    lane: Int32,
    may_split: cutlass.Constexpr[bool],
):
    """Column tiles [begin, end) of the group's rows, which start at tile row `first_row`, times the rows' normalisers.

    A lane holds 2 neighbouring columns of each tile; with f16 products two tiles interleave and it holds 4 of each pair.
    """
    config = to.config
    interleaved = config.record.f16_products
    column = warp * config.value_columns + (lane % 4) * (4 if interleaved else 2)
    for half in cutlass.range_constexpr(2 * config.row_tiles):
        row = first_row + half * 8 + lane // 4
        scale = inverse[half]
        at = half // 2 * config.column_tiles * 4 + half % 2 * 2
        if row < to.rows:
            direct = to.alone != 0 if cutlass.const_expr(may_split) else True
            if direct:
                address = to.direct_address(row, column)
                for n in cutlass.range_constexpr(begin, end, 2 if interleaved else 1):
                    values = _neighbours(sums, at + n * 4, scale, interleaved)
                    ptx.store_b32(address, [ptx.pack_bf16(*values[i : i + 2]) for i in range(0, len(values), 2)], n * 16)
            else:
                address = to.partial_address(row, column)
                for n in cutlass.range_constexpr(begin, end, 2 if interleaved else 1):
                    values = _neighbours(sums, at + n * 4, scale, interleaved)
                    if cutlass.const_expr(interleaved):
                        ptx_narrow.store_f32x4(address, values, n * 32)
                    else:
                        ptx.store_f32x2(address, *values, n * 32)


def _neighbours(sums, at, scale, interleaved):
    """A lane's values of neighbouring columns, from the column tile whose accumulators start at `at`."""
    places = (at, at + 4, at + 1, at + 5) if interleaved else (at, at + 1)
    return [sums[place] * scale for place in places]


def _send_half(config, sums, address, begin):
    count = config.column_tiles // 2
    for tile in range(config.row_tiles):
        for n in range(count):
            at = (tile * config.column_tiles + begin + n) * 4
            ptx.store_shared_f32(address, [sums[at + e] for e in range(4)], (tile * count + n) * 512)


def _add_half(config, sums, address, begin):
    count = config.column_tiles // 2
    for tile in range(config.row_tiles):
        for n in range(count):
            at = (tile * config.column_tiles + begin + n) * 4
            other = ptx.load_shared_f32(address, 4, (tile * count + n) * 512)
            for e in range(4):
                sums[at + e] = sums[at + e] + other[e]


@cute.jit
def finish_alternate(
    config: cutlass.Constexpr[TileConfig],
    to: cutlass.Constexpr[Destination],
    sums: cute.Tensor,
    own: Int32,
    other: Int32,
    ring: Int32,
    group: Int32,
    warp: Int32,
    lane: Int32,
    may_split: cutlass.Constexpr[bool],
):
    """`tok` tiles: both groups hold the same rows; each ends up with half of the columns, through the idle ring.

    Every chunk has been consumed when the statistics barrier is passed, so nothing is in flight into the ring.
    """
    half = config.column_tiles // 2
    pairs = [pair_of(config, own, other, row * 8 + lane // 4) for row in range(2 * config.row_tiles)]
    inverse = [to.normaliser(pair.total) for pair in pairs]
    for tile in cutlass.range_constexpr(config.row_tiles):
        for i in cutlass.range_constexpr(config.column_tiles * 4):
            at = tile * config.column_tiles * 4 + i
            sums[at] = sums[at] * pairs[2 * tile + i % 4 // 2].factor
    lane_area = ring + warp * (config.exchange_columns_bytes // 4) + lane * 16
    if group == 0:
        _send_half(config, sums, lane_area, half)
    else:
        _send_half(config, sums, lane_area + config.exchange_columns_bytes, 0)
    ptx.barrier(GROUPS_BARRIER, CONSUMER_THREADS)
    if group == 0:
        _add_half(config, sums, lane_area + config.exchange_columns_bytes, 0)
        store_columns(to, sums, inverse, 0, half, Int32(0), warp, lane, may_split)
        row = warp * 32 + lane
        if (row < config.group_rows) & (row < to.rows):
            pair = pair_of(config, own, other, row)
            store_lse(to, row, pair.maximum, pair.total, may_split)
    else:
        _add_half(config, sums, lane_area, half)
        store_columns(to, sums, inverse, half, config.column_tiles, Int32(0), warp, lane, may_split)


@cute.jit
def finish_shared(
    config: cutlass.Constexpr[TileConfig],
    to: cutlass.Constexpr[Destination],
    sums: cute.Tensor,
    own: Int32,
    group: Int32,
    warp: Int32,
    lane: Int32,
    may_split: cutlass.Constexpr[bool],
):
    """`row` tiles: each group stores its own rows."""
    first = group * config.group_rows
    totals = [ptx.load_shared_f32(own + (row * 8 + lane // 4) * 4, 1, config.group_rows * 4)[0] for row in range(2 * config.row_tiles)]
    inverse = [to.normaliser(total) for total in totals]
    store_columns(to, sums, inverse, 0, config.column_tiles, first, warp, lane, may_split)
    row = warp * 32 + lane
    if (row < config.group_rows) & (first + row < to.rows):
        statistics = [ptx.load_shared_f32(own + row * 4, 1, config.group_rows * 4 * i)[0] for i in range(2)]
        store_lse(to, first + row, statistics[0], statistics[1], may_split)


@cute.jit
def write_directory(directory: Int64, to: cutlass.Constexpr[Destination], thread: Int32, step: Int32, splits: Int32):
    """One entry a packed row for the merge: first slot, slots from split to split, number of splits (1: nothing to merge)."""
    if thread < to.rows:
        ptx.store_b32(directory + Int64(to.row_base + thread) * 16, [to.slot_base + thread, step, splits, Int32(0)])


@cute.jit
def clear_rows(
    output: Int64,
    token_stride: Int64,
    head_stride: Int64,
    lse: Int64,
    directory: Int64,
    first_query: Int32,
    packed_rows: Int32,
    heads: Int32,
    row_bytes: cutlass.Constexpr[int],
    lane: Int32,
):
    """One warp writes rows that see nothing: output 0, LSE -inf and, unless `directory` is 0, entries of no splits."""
    for row in cutlass.range(packed_rows, unroll=1):
        token = ptx.divide(row, heads)
        address = output + Int64(first_query + token) * token_stride + Int64(row - token * heads) * head_stride + Int64(lane) * 16
        for part in cutlass.range_constexpr(row_bytes // 512):
            ptx.store_b32(address, [Int32(0)] * 4, part * 512)
    for row in cutlass.range(lane, packed_rows, 32, unroll=1):
        at = Int64(first_query * heads + row)
        ptx.store_f32(lse + at * 4, Float32(-math.inf))
        if directory != 0:
            ptx.store_b32(directory + at * 16, [Int32(0)] * 4)
