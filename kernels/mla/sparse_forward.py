"""Sparse MLA: one block works on one query row, one tile of its heads and one split of its selected tokens. Traced code.

The gather is in `sparse_loader`, records in `nvfp4`, the softmax in `sparse_softmax`; this composes them. A chunk costs two
barriers: A hands out partial scores, B probabilities; both also say that a stage has been read or has arrived.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from mlactl.kernels.compiler import Traced
from mlactl.kernels.mla import ptx, ptx_narrow
from mlactl.kernels.mla.arguments import fake_tensor
from mlactl.kernels.mla.nvfp4 import LatentDecoder, decoder_of
from mlactl.kernels.mla.sparse_config import LANE_LATENT, LANE_PAIRS, RESCALE_BITS, SLICE_LATENT, SparseTile, sparse_tile
from mlactl.kernels.mla.sparse_loader import SelectedSlots
from mlactl.kernels.mla.sparse_records import LATENT, QUERY_WIDTH
from mlactl.kernels.mla.sparse_softmax import UNSET, Softmax, SparseExchange

LOG2E = 1.0 / math.log(2.0)
LN2 = math.log(2.0)
_BARRIER = 1


@dataclass(frozen=True)
class Target:
    """Where a tile's rows go: addresses, byte strides (Int64), heads left of the tile's first, and its place among packed rows.

    row_base: the tile's first packed row (query row * heads + head); slot_base: its first row in the scratch.
    """

    output: Int64
    head_stride: Int64
    lse: Int64
    partial: Int64
    partial_lse: Int64
    rows: Int32
    row_base: Int32
    slot_base: Int32


class SparseForward:
    """Traced kernel of one tile configuration; `may_split` is output=split, `identity` is latent_scale_identity=1."""

    def __init__(self, config: SparseTile, *, may_split: bool, identity: bool):
        self.config, self.may_split, self.identity = config, may_split, identity

    def barrier(self):
        """Barrier of the whole block."""
        ptx.barrier(_BARRIER, self.config.threads)

    @cute.jit
    def settle(self, softmax: cutlass.Constexpr[Softmax], sums: cute.Tensor, scores: cutlass.Constexpr, kept: cute.Tensor, flag: Int32, lane: Int32):
        """Barrier B; where any row passed its maximum by too much, the second pass and the rescaling of the sums."""
        config = self.config
        needed = ptx_narrow.opaque(ptx.barrier_any(_BARRIER, config.threads, flag))
        for _ in cutlass.range(needed, unroll=1):
            softmax.raise_maximum(scores, kept)
            self.barrier()
            row = softmax.exchange.statistics + lane // 4 * 4
            for tile in cutlass.range_constexpr(config.row_tiles):
                factors = [ptx.load_shared_f32(row, 1, tile * 64 + half * 32)[0] for half in range(2)]
                for i in cutlass.range_constexpr(config.warp_pairs * 4):
                    at = tile * config.warp_pairs * 4 + i
                    sums[at] = sums[at] * factors[i % 4 // 2]

    @cute.jit
    def attend(self, parts: cutlass.Constexpr, query: cutlass.Constexpr, sums: cute.Tensor, begin: Int32, end: Int32, lane: Int32):
        """All chunks [begin, end) of the split, one after the other; the first `stages` of them are already on their way."""
        config = self.config
        decoder, exchange, source, softmax = parts
        probabilities = exchange.probability_row(lane)
        kept = cute.make_rmem_tensor((config.row_tiles * config.scores,), Float32)
        ahead = (begin + config.stages) * config.chunk
        stage = exchange.shared
        last = exchange.shared + (config.stages - 1) * config.stage_bytes
        for _ in cutlass.range(begin, end, unroll=1):
            entries = source.entries(stage)
            partial, chunk = decoder.scores(query, stage)
            slots = exchange.slots(stage)
            scales = decoder.token_scales(stage, exchange.tokens)
            exchange.send(partial)
            self.barrier()
            received = exchange.receive()
            values = decoder.transpose(chunk)
            scores = softmax.scores(received, slots, scales)
            flag = softmax.soften(scores, kept)
            ptx_narrow.wait_copies_but(config.stages - 2)
            self.settle(softmax, sums, scores, kept, flag, lane)
            softmax.add(kept, slots, scales)
            weights = decoder.load_probabilities(probabilities)
            # Only now: loads of shared memory would queue behind the copies.
            source.fill(stage, ahead, entries)
            ahead = ahead + config.chunk
            decoder.accumulate(sums, weights, values)
            stage = self.after(stage, last, exchange.shared)

    def after(self, stage, last, first):
        """The stage behind `stage` in the ring."""
        return ptx_narrow.where_equal(stage, last, first, stage + self.config.stage_bytes)

    @cute.kernel
    def kernel(
        self,
        q: Int64,
        pool: Int64,
        indices: Int64,
        lengths: Int64,
        output: Int64,
        lse: Int64,
        partial: Int64,
        partial_lse: Int64,
        directory: Int64,
        q_row_stride: Int64,
        q_head_stride: Int64,
        index_stride: Int64,
        output_row_stride: Int64,
        output_head_stride: Int64,
        record_stride: Int32,
        slots: Int32,
        heads: Int32,
        top_k: Int32,
        splits: Int32,
        slot_step: Int32,
        scale: Float32,
        threshold: Float32,
        latent_scale: Float32,
    ):
        """Grid (head tiles, query rows, splits); strides in bytes; `scale` from raw scores to log2 units, `threshold` RESCALE_BITS in raw units."""
        # latent_scale is last, on a 16-byte boundary: no vector load of its neighbours can touch its word, which is how the
        # audit tells a variant that reads it from one that does not. The registry has its ordinal.
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        tile, row, split = cute.arch.block_idx()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)

        # ---------------------------------------------------------------- the unit
        # Most rows use all their columns: their indices are on the way while the length, which decides it, still is.
        likely = ptx.divide(top_k * split, splits) + thread * 32
        if (thread < 2) & (likely < top_k):
            ptx.prefetch_l2(indices + Int64(row) * index_stride + Int64(likely) * 4)
        first = tile * config.rows
        rows = cutlass.min(heads - first, Int32(config.rows))
        length = cutlass.max(cutlass.min(ptx.load_i32(lengths + Int64(row) * 4), top_k), Int32(0))
        chunks = (length + (config.chunk - 1)) >> config.chunk_shift
        row_splits = Int32(1)
        if cutlass.const_expr(self.may_split):
            row_splits = cutlass.min(splits, cutlass.max(chunks, Int32(1)))
            ptx.exit_if(split >= row_splits)
        begin = ptx.divide(chunks * split, row_splits)
        end = ptx.divide(chunks * (split + 1), row_splits)

        # ---------------------------------------------------------------- first records, query
        shared = SmemAllocator().allocate(config.shared_bytes, 128).toint()
        last = cutlass.min(end * config.chunk, length)
        source = SelectedSlots.of(config, pool, record_stride, indices + Int64(row) * index_stride, slots, last, warp, lane)
        early = [source.start((begin + stage) * config.chunk) for stage in range(config.stages)]
        for stage in cutlass.range_constexpr(config.stages):
            source.fill(shared + stage * config.stage_bytes, (begin + stage) * config.chunk, early[stage])
        if cutlass.const_expr(self.may_split):
            ptx.launch_dependents()
        restore = latent_scale if cutlass.const_expr(not self.identity) else None
        decoder = decoder_of(config, warp, lane, restore)
        exchange = SparseExchange.of(config, shared, warp, lane)
        query_row = q + Int64(row) * q_row_stride
        addresses = [
            [query_row + Int64(first + cutlass.min(tile_row * 16 + half * 8 + lane // 4, rows - 1)) * q_head_stride for half in range(2)]
            for tile_row in range(config.row_tiles)
        ]
        query = decoder.load_query(addresses)
        sums = cute.make_rmem_tensor((config.accumulators,), Float32)
        for i in cutlass.range_constexpr(config.accumulators):
            sums[i] = Float32(0.0)
        peaks, shifts, totals = (cute.make_rmem_tensor((config.row_tiles,), Float32) for _ in range(3))
        for i in cutlass.range_constexpr(config.row_tiles):
            peaks[i] = Float32(UNSET)
            shifts[i] = Float32(0.0)
            totals[i] = Float32(0.0)
        softmax = Softmax(exchange, decoder, scale, threshold, peaks, shifts, totals)
        ptx_narrow.wait_copies_but(config.stages - 1)
        self.barrier()
        self.attend((decoder, exchange, source, softmax), query, sums, begin, end, lane)

        # ---------------------------------------------------------------- epilogue
        self.barrier()
        for i in cutlass.range_constexpr(config.row_tiles):
            exchange.store_statistic(i, peaks[i] * scale, 0)
            exchange.store_statistic(i, exchange.reduce_row(totals[i], lambda a, b: a + b), 1)
        row_base = row * heads + first
        target = Target(
            output + Int64(row) * output_row_stride + Int64(first) * output_head_stride,
            output_head_stride,
            lse,
            partial,
            partial_lse,
            rows,
            row_base,
            split * slot_step + row_base,
        )
        if cutlass.const_expr(self.may_split):  # noqa: SIM102  one is decided when traced, the other on the device
            if (splits > 1) & (split == 0) & (thread < rows):
                ptx.store_b32(directory + Int64(row_base + thread) * 16, [row_base + thread, slot_step, row_splits, Int32(0)])
        self.barrier()
        self.finish(target, decoder, sums, exchange.statistics, warp, lane, thread, row_splits)

    @cute.jit
    def finish(
        self,
        target: cutlass.Constexpr[Target],
        decoder: cutlass.Constexpr[LatentDecoder],
        sums: cute.Tensor,
        statistics: Int32,
        warp: Int32,
        lane: Int32,
        thread: Int32,
        row_splits: Int32,
    ):
        """Normalises and stores: bf16 output and LSE of a row's only split, else fp32 partials for the merge."""
        config = self.config
        order = decoder.columns()
        for tile in cutlass.range_constexpr(config.row_tiles):
            for half in cutlass.range_constexpr(2):
                row = tile * 16 + half * 8 + lane // 4
                factor = ptx.reciprocal_or_zero(ptx.load_shared_f32(statistics + row * 4, 1, config.rows * 4)[0])
                if cutlass.const_expr(decoder.shift):
                    factor = factor * Float32(decoder.unit)
                if cutlass.const_expr(not self.identity):
                    factor = factor * decoder.scale
                if row < target.rows:
                    for part in cutlass.range_constexpr(config.warp_slices):
                        first = (tile * config.warp_slices + part) * LANE_PAIRS
                        column = decoder.parts[part] * SLICE_LATENT + lane % 4 * LANE_LATENT
                        values = [sums[(first + pair) * 4 + half * 2 + side] * factor for pair, side in order]
                        if cutlass.const_expr(self.may_split):
                            if row_splits == 1:
                                self.store_output(target, row, column, values)
                            else:
                                address = target.partial + (Int64(target.slot_base + row) * LATENT + Int64(column)) * 4
                                for i in cutlass.range_constexpr(4):
                                    ptx_narrow.store_f32x4(address, values[4 * i : 4 * i + 4], 16 * i)
                        else:
                            self.store_output(target, row, column, values)
        if thread < target.rows:
            maximum, total = (ptx.load_shared_f32(statistics + thread * 4, 1, config.rows * 4 * i)[0] for i in range(2))
            value = (maximum + ptx.log2(total)) * Float32(LN2)
            if total <= Float32(0.0):
                value = Float32(-math.inf)
            address = target.lse + Int64(target.row_base + thread) * 4
            if cutlass.const_expr(self.may_split):  # noqa: SIM102
                if row_splits > 1:
                    address = target.partial_lse + Int64(target.slot_base + thread) * 4
            ptx.store_f32(address, value)

    def store_output(self, target, row, column, values):
        """A lane's 16 consecutive output elements as bf16."""
        address = target.output + Int64(row) * target.head_stride + Int64(column) * 2
        words = [ptx.pack_bf16(values[2 * i], values[2 * i + 1]) for i in range(LANE_PAIRS)]
        ptx.store_b32(address, words[:4])
        ptx.store_b32(address, words[4:], 16)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        kv_cache: cute.Tensor,
        indices: cute.Tensor,
        lengths: cute.Tensor,
        output: cute.Tensor,
        lse: cute.Tensor,
        partial: cute.Tensor,
        partial_lse: cute.Tensor,
        directory: cute.Tensor,
        splits: Int32,
        sm_scale: Float32,
        latent_scale: Float32,
        stream,
    ):
        """Launches on `stream`; shapes as in `sparse.SparseTensors`, `splits` at most as the scratch allows."""
        config = self.config
        unit = decoder_unit(config)
        scale = sm_scale * Float32(LOG2E * unit)
        heads = q.shape[1]
        self.kernel(
            q.iterator.toint(),
            kv_cache.iterator.toint(),
            indices.iterator.toint(),
            lengths.iterator.toint(),
            output.iterator.toint(),
            lse.iterator.toint(),
            partial.iterator.toint(),
            partial_lse.iterator.toint(),
            directory.iterator.toint(),
            Int64(q.stride[0]) * 2,
            Int64(q.stride[1]) * 2,
            Int64(indices.stride[0]) * 4,
            Int64(output.stride[0]) * 2,
            Int64(output.stride[1]) * 2,
            Int32(kv_cache.stride[1]),
            Int32(kv_cache.shape[0] * kv_cache.shape[1]),
            Int32(heads),
            Int32(indices.shape[1]),
            splits,
            Int32(q.shape[0] * heads),
            scale,
            Float32(RESCALE_BITS) / scale,
            latent_scale,
        ).launch(
            grid=[(heads + (config.rows - 1)) // config.rows, q.shape[0], splits],
            block=[config.threads, 1, 1],
            smem=config.shared_bytes,
            stream=stream,
            min_blocks_per_mp=config.blocks,
            # Said here because the compiler would otherwise ask a device for it, and there may be none.
            preferred_smem_carveout=100,
        )


def decoder_unit(config: SparseTile) -> float:
    """What a decoded latent is to be multiplied by to be its value."""
    return decoder_of(config, Int32(0), Int32(0), None).unit


def build(facts: dict[str, bool | int | str]) -> Traced:
    """The kernel of a validated spec, decode or prefill: its entry and fake arguments."""
    config = sparse_tile(str(facts["tile"]), str(facts["record"]))
    arguments = (
        fake_tensor(BFloat16, (None, None, QUERY_WIDTH), divisibility=8),
        fake_tensor(Uint8, (None, None, config.record.record_bytes), divisibility=16),
        fake_tensor(Int32, (None, None), align=4),
        fake_tensor(Int32, (None,), align=4),
        fake_tensor(BFloat16, (None, None, LATENT), divisibility=8),
        fake_tensor(Float32, (None, None), align=4),
        fake_tensor(Float32, (None, LATENT)),
        fake_tensor(Float32, (None,)),
        fake_tensor(Int32, (None, 4)),
        *(Int32(1), Float32(1.0), Float32(1.0)),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    entry = SparseForward(config, may_split=facts["output"] == "split", identity=facts["latent_scale_identity"] == 1)
    return Traced(entry, arguments, config.shared_bytes)
