"""Sparse MLA: one block works on one query row, one tile of its heads and one split of its selected tokens. Traced code.

The gather is in `sparse_loader`, records in `nvfp4`, the softmax in `sparse_softmax`; this composes them. Four warps copy, the
others compute. A chunk costs these two barriers: A hands out partial scores and says that the stage has been read, B hands out
probabilities. Where a block has two groups, each goes through half of the split's chunks on its own, and they add up their sums
at the end.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from mlactl.kernels.compiler import Traced
from mlactl.kernels.mla import ptx, ptx_narrow
from mlactl.kernels.mla.arguments import fake_tensor
from mlactl.kernels.mla.nvfp4 import decoder_of
from mlactl.kernels.mla.sparse_config import RESCALE_BITS, SparseTile, sparse_tile
from mlactl.kernels.mla.sparse_epilogue import BLOCK_BARRIER, Target, finish
from mlactl.kernels.mla.sparse_loader import SelectedSlots, next_parity, next_stage
from mlactl.kernels.mla.sparse_records import LATENT, QUERY_WIDTH
from mlactl.kernels.mla.sparse_softmax import UNSET, Softmax, SparseExchange

LOG2E = 1.0 / math.log(2.0)
_GROUP_BARRIER = BLOCK_BARRIER + 1
"""Named barrier of the first group; the second group's comes after it."""


class SparseForward:
    """Traced kernel of one tile configuration; `may_split` is output=split, `identity` is latent_scale_identity=1."""

    def __init__(self, config: SparseTile, *, may_split: bool, identity: bool):
        self.config, self.may_split, self.identity = config, may_split, identity

    def barrier(self, group):
        """Barrier of one group."""
        ptx.barrier(_GROUP_BARRIER + group, self.config.group_threads)

    @cute.jit
    def settle(
        self,
        softmax: cutlass.Constexpr[Softmax],
        sums: cute.Tensor,
        scores: cutlass.Constexpr,
        kept: cute.Tensor,
        flag: Int32,
        group: cutlass.Constexpr,
        lane: Int32,
    ):
        """Barrier B; where any row passed its maximum by too much, the second pass and the rescaling of the sums."""
        config = self.config
        needed = ptx.barrier_any(_GROUP_BARRIER + group, config.group_threads, flag)
        for _ in cutlass.range(needed, unroll=1):
            softmax.raise_maximum(scores, kept)
            self.barrier(group)
            row = softmax.exchange.statistics + lane // 4 * 4
            for tile in cutlass.range_constexpr(config.row_tiles):
                factors = [ptx.load_shared_f32(row, 1, tile * 64 + half * 32)[0] for half in range(2)]
                for i in cutlass.range_constexpr(config.warp_pairs * 4):
                    at = tile * config.warp_pairs * 4 + i
                    sums[at] = sums[at] * factors[i % 4 // 2]

    @cute.jit
    def attend(
        self,
        parts: cutlass.Constexpr,
        query: cutlass.Constexpr,
        sums: cute.Tensor,
        begin: Int32,
        end: Int32,
        group: cutlass.Constexpr,
        group_thread: Int32,
        lane: Int32,
    ):
        """All chunks [begin, end) of the group, one after the other. group: 0, or an Int32 where there are two."""
        config = self.config
        decoder, exchange, softmax = parts
        probabilities = exchange.probability_row(lane)
        kept = cute.make_rmem_tensor((config.row_tiles * config.scores,), Float32)
        stage, parity = exchange.shared, Int32(0)
        for _ in cutlass.range(begin, end, unroll=1):
            ptx.mbarrier_wait(stage + config.full_offset, parity)
            partial, chunk = decoder.scores(query, stage)
            slots = exchange.slots(stage)
            scales = decoder.token_scales(stage, exchange.tokens)
            exchange.send(partial)
            self.barrier(group)
            # What is needed of the stage is in registers, in every thread of the group.
            ptx_narrow.mbarrier_arrive_if_zero(group_thread, stage + config.empty_offset)
            received = exchange.receive()
            values = decoder.transpose(chunk)
            scores = softmax.scores(received, slots, scales)
            flag = softmax.soften(scores, kept)
            self.settle(softmax, sums, scores, kept, flag, group, lane)
            softmax.add(kept, slots, scales)
            weights = decoder.load_probabilities(probabilities)
            decoder.accumulate(sums, weights, values)
            parity = next_parity(config, stage, exchange.shared, parity)
            stage = next_stage(config, stage, exchange.shared)

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
        # Most rows use all their columns: each group's first two lines of indices are on the way while the length, which
        # decides it, still is.
        part, line = thread // 32, thread % 32
        likely = ptx.divide(top_k * (split * config.groups + part), splits * config.groups) + line * 32
        if (part < config.groups) & (line < 2) & (likely < top_k):
            ptx.prefetch_l2(indices + Int64(row) * index_stride + Int64(likely) * 4)
        first = tile * config.rows
        rows = cutlass.min(heads - first, Int32(config.rows))
        listed = ptx.load_i32(lengths + Int64(row) * 4)
        shared = SmemAllocator().allocate(config.shared_bytes, 128).toint()
        if thread == 0:
            for ring in cutlass.range_constexpr(config.groups):
                for stage in cutlass.range_constexpr(config.stages):
                    at = shared + (ring * config.group_bytes + stage * config.stage_bytes)
                    ptx.mbarrier_init(at + config.full_offset, config.copy_warps)
                    ptx.mbarrier_init(at + config.empty_offset, 1)
            ptx.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp >= config.consumer_threads // 32:
            # ------------------------------------------------------------ producers
            cute.arch.setmaxregister_decrease(config.role_registers[1])
            producer = warp - config.consumer_threads // 32
            fed = producer // config.copy_warps
            length, row_splits, begin, end = self.unit(listed, top_k, split, splits)
            ptx.exit_if(split >= row_splits)
            if cutlass.const_expr(self.may_split):
                ptx.launch_dependents()
            first_chunk, last_chunk = self.part(fed, begin, end)
            index_row = indices + Int64(row) * index_stride
            limit = cutlass.min(last_chunk * config.chunk, length)
            source = SelectedSlots.of(config, pool, record_stride, index_row, slots, limit, producer % config.copy_warps, lane)
            source.produce(shared + fed * config.group_bytes, first_chunk, last_chunk)
        else:
            # ------------------------------------------------------------ consumers
            cute.arch.setmaxregister_increase(config.role_registers[0])
            group, member = self.member(warp)
            restore = latent_scale if cutlass.const_expr(not self.identity) else None
            decoder = decoder_of(config, member, lane, restore)
            exchange = SparseExchange.of(config, shared + group * config.group_bytes, member, lane)
            query_row = q + Int64(row) * q_row_stride
            addresses = [
                [query_row + Int64(first + cutlass.min(tile_row * 16 + half * 8 + lane // 4, rows - 1)) * q_head_stride for half in range(2)]
                for tile_row in range(config.row_tiles)
            ]
            # The query needs nothing else: it travels while lengths, indices and records wait for each other.
            query = decoder.load_query(addresses)
            _, row_splits, begin, end = self.unit(listed, top_k, split, splits)
            ptx.exit_if(split >= row_splits)
            if cutlass.const_expr(self.may_split):
                ptx.launch_dependents()
            own_begin, own_end = self.part(group, begin, end)
            sums = cute.make_rmem_tensor((config.accumulators,), Float32)
            for i in cutlass.range_constexpr(config.accumulators):
                sums[i] = Float32(0.0)
            peaks, shifts, totals = (cute.make_rmem_tensor((config.row_tiles,), Float32) for _ in range(3))
            for i in cutlass.range_constexpr(config.row_tiles):
                peaks[i] = Float32(UNSET)
                shifts[i] = Float32(0.0)
                totals[i] = Float32(0.0)
            softmax = Softmax(exchange, decoder, scale, threshold, peaks, shifts, totals)
            self.attend((decoder, exchange, softmax), query, sums, own_begin, own_end, group, thread % config.group_threads, lane)

            # -------------------------------------------------------- epilogue
            self.barrier(group)
            if cutlass.const_expr(config.groups > 1):  # noqa: SIM102  one is decided when traced, the other on the device
                # Columns are exchanged through the rings, whose every copy has been waited for.
                if thread % config.group_threads == 0:
                    for stage in cutlass.range_constexpr(config.stages):
                        at = exchange.shared + stage * config.stage_bytes
                        ptx.mbarrier_invalidate(at + config.full_offset)
                        ptx.mbarrier_invalidate(at + config.empty_offset)
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
                row_splits if self.may_split else None,
            )
            if cutlass.const_expr(self.may_split):  # noqa: SIM102  one is decided when traced, the other on the device
                if (splits > 1) & (split == 0) & (thread < rows):
                    ptx.store_b32(directory + Int64(row_base + thread) * 16, [row_base + thread, slot_step, row_splits, Int32(0)])
            ptx.barrier(BLOCK_BARRIER, config.consumer_threads)
            finish(decoder, target, sums, exchange, group, member, lane, thread)

    def unit(self, listed, top_k, split, splits):
        """(tokens of the row, its splits, chunks [begin, end) of this one) by the row's length as it is in memory."""
        config = self.config
        length = cutlass.max(cutlass.min(listed, top_k), Int32(0))
        chunks = (length + (config.chunk - 1)) >> config.chunk_shift
        row_splits = Int32(1)
        if self.may_split:
            row_splits = cutlass.min(splits, cutlass.max(chunks, Int32(1)))
        return length, row_splits, ptx.divide(chunks * split, row_splits), ptx.divide(chunks * (split + 1), row_splits)

    def member(self, warp):
        """(group, place in it) of a warp that computes."""
        if self.config.groups == 1:
            return 0, warp
        return warp // self.config.warps, warp % self.config.warps

    def part(self, group, begin, end):
        """Chunks [begin, end) of a group: of two, the first takes half, rounded up."""
        if self.config.groups == 1:
            return begin, end
        middle = (begin + end + 1) >> 1
        return ptx_narrow.where_equal(group, Int32(0), begin, middle), ptx_narrow.where_equal(group, Int32(0), middle, end)

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
            min_blocks_per_mp=1,
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
