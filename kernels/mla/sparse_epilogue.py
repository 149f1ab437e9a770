"""From a sparse block's accumulators to memory: adding up its two groups, normalising, and the rows written. Traced code.

The only split of a row writes bf16 output and LSE; one of several writes fp32 partials for the merge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from mlactl.kernels.mla import ptx, ptx_narrow
from mlactl.kernels.mla.nvfp4 import LatentDecoder
from mlactl.kernels.mla.sparse_config import LANE_LATENT, LANE_PAIRS, SLICE_LATENT
from mlactl.kernels.mla.sparse_records import LATENT
from mlactl.kernels.mla.sparse_softmax import SparseExchange

LN2 = math.log(2.0)
OCTET_SUMS = 16
"""fp32 accumulators of a lane's eight neighbouring columns, for the two rows it holds."""
BLOCK_BARRIER = 1
"""Named barrier of all groups of a block."""


@dataclass(frozen=True)
class Target:
    """Where a tile's rows go: addresses, byte strides (Int64), heads left of the tile's first, and its place among packed rows.

    row_base: the tile's first packed row (query row * heads + head); slot_base: its first row in the scratch; splits: those of
    the row, None where rows are never split.
    """

    output: Int64
    head_stride: Int64
    lse: Int64
    partial: Int64
    partial_lse: Int64
    rows: Int32
    row_base: Int32
    slot_base: Int32
    splits: Int32 | None


@dataclass(frozen=True)
class RowStatistics:
    """A row's maximum (log2 units) and sum over the block, and what this group's sums of it are to be multiplied by (None: one group)."""

    maximum: Float32
    total: Float32
    factor: Float32 | None


def row_statistics(exchange, group, row):
    """The statistics of a row of the tile, of both groups brought to one maximum where there are two."""
    config = exchange.config
    areas = [exchange.statistics]
    if config.groups > 1:
        step = ptx_narrow.where_equal(group, Int32(0), Int32(config.group_bytes), Int32(-config.group_bytes))
        areas.append(exchange.statistics + step)
    found = [[ptx.load_shared_f32(area + row * 4, 1, config.rows * 4 * i)[0] for i in range(2)] for area in areas]
    own, own_total = found[0]
    if config.groups == 1:
        return RowStatistics(own, own_total, None)
    other, other_total = found[1]
    maximum = ptx.maximum(own, other)
    factor, other_factor = ptx.exp2(own - maximum), ptx.exp2(other - maximum)
    return RowStatistics(maximum, own_total * factor + other_total * other_factor, factor)


@cute.jit
def finish(
    decoder: cutlass.Constexpr[LatentDecoder],
    target: cutlass.Constexpr[Target],
    sums: cute.Tensor,
    exchange: cutlass.Constexpr[SparseExchange],
    group: cutlass.Constexpr,
    warp: Int32,
    lane: Int32,
    thread: Int32,
):
    """Writes the tile's rows; every statistic must be in shared memory and every chunk read.

    thread: of the block; group: 0, or an Int32 where there are two.
    """
    config = exchange.config
    if cutlass.const_expr(config.groups == 1):
        _store_columns(decoder, target, sums, exchange, group, 0, config.lane_octets, lane)
    else:
        factors = [row_statistics(exchange, group, half * 8 + lane // 4).factor for half in range(2)]
        for i in cutlass.range_constexpr(config.accumulators):
            sums[i] = sums[i] * factors[i % 4 // 2]
        # Each group ends up with half of every lane's columns, of both groups' tokens.
        half = config.lane_octets // 2
        place = warp * (config.column_bytes // config.warps) + lane * 16
        if group == 0:
            _send_columns(sums, exchange.shared + place, half, 2 * half)
        else:
            _send_columns(sums, exchange.shared + place, 0, half)
        ptx.barrier(BLOCK_BARRIER, config.consumer_threads)
        if group == 0:
            _add_columns(sums, exchange.shared + config.group_bytes + place, 0, half)
            _store_columns(decoder, target, sums, exchange, group, 0, half, lane)
        else:
            _add_columns(sums, exchange.shared - config.group_bytes + place, half, 2 * half)
            _store_columns(decoder, target, sums, exchange, group, half, 2 * half, lane)
    if thread < target.rows:
        found = row_statistics(exchange, group, thread)
        value = (found.maximum + ptx.log2(found.total)) * Float32(LN2)
        if found.total <= Float32(0.0):
            value = Float32(-math.inf)
        address = target.lse + Int64(target.row_base + thread) * 4
        if cutlass.const_expr(target.splits is not None):  # noqa: SIM102  one is decided when traced, the other on the device
            if target.splits > 1:
                address = target.partial_lse + Int64(target.slot_base + thread) * 4
        ptx.store_f32(address, value)


def _send_columns(sums, address, begin, end):
    for index, at in enumerate(range(begin * OCTET_SUMS, end * OCTET_SUMS, 4)):
        ptx.store_shared_f32(address, [sums[at + e] for e in range(4)], index * 512)


def _add_columns(sums, address, begin, end):
    for index, at in enumerate(range(begin * OCTET_SUMS, end * OCTET_SUMS, 4)):
        for e, value in enumerate(ptx.load_shared_f32(address, 4, index * 512)):
            sums[at + e] = sums[at + e] + value


@cute.jit
def _store_columns(
    decoder: cutlass.Constexpr[LatentDecoder],
    target: cutlass.Constexpr[Target],
    sums: cute.Tensor,
    exchange: cutlass.Constexpr[SparseExchange],
    group: cutlass.Constexpr,
    begin: cutlass.Constexpr[int],
    end: cutlass.Constexpr[int],
    lane: Int32,
):
    """Normalises and stores octets [begin, end) of the lane's columns, two of each of the warp's slices."""
    config = decoder.config
    for tile in cutlass.range_constexpr(config.row_tiles):
        for half in cutlass.range_constexpr(2):
            row = tile * 16 + half * 8 + lane // 4
            factor = ptx.reciprocal_or_zero(row_statistics(exchange, group, row).total)
            if cutlass.const_expr(decoder.shift):
                factor = factor * Float32(decoder.unit)
            if cutlass.const_expr(decoder.scale is not None):
                factor = factor * decoder.scale
            if row < target.rows:
                octets = [_octet(decoder, sums, tile, half, octet, factor) for octet in range(begin, end)]
                direct = target.splits == 1 if cutlass.const_expr(target.splits is not None) else True
                if direct:
                    address = target.output + Int64(row) * target.head_stride + Int64(lane % 4 * (LANE_LATENT * 2))
                    for octet in cutlass.range_constexpr(begin, end):
                        values = octets[octet - begin]
                        words = [ptx.pack_bf16(values[2 * i], values[2 * i + 1]) for i in range(4)]
                        ptx.store_b32(address + Int64(decoder.parts[octet // 2]) * (SLICE_LATENT * 2), words, octet % 2 * 16)
                else:
                    address = target.partial + Int64(target.slot_base + row) * (LATENT * 4) + Int64(lane % 4 * (LANE_LATENT * 4))
                    for octet in cutlass.range_constexpr(begin, end):
                        values = octets[octet - begin]
                        for i in cutlass.range_constexpr(2):
                            place = address + Int64(decoder.parts[octet // 2]) * (SLICE_LATENT * 4)
                            ptx_narrow.store_f32x4(place, values[4 * i : 4 * i + 4], octet % 2 * 32 + 16 * i)


def _octet(decoder, sums, tile, half, octet, factor):
    """Normalised values of one octet of a row, in their order in memory."""
    first = (tile * decoder.config.warp_slices + octet // 2) * LANE_PAIRS
    return [sums[(first + pair) * 4 + half * 2 + side] * factor for pair, side in decoder.columns()[octet % 2 * 8 :][:8]]
