"""The attention core: one block works on one (request, tile of packed rows, split). Traced code.

Three choices are made elsewhere and only composed here: where KV comes from (`loaders`), how a record decodes (`mma`), and
how query rows and heads pack into the MMA tile (`config`, `softmax`). Packed row of a request = query row * heads + head.
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
from mlactl.kernels.mla import epilogue, ptx
from mlactl.kernels.mla.arguments import fake_tensor
from mlactl.kernels.mla.config import (
    BLOCK_THREADS,
    CHUNK_TOKENS,
    CONSUMER_THREADS,
    GROUP_THREADS,
    GROUP_WARPS,
    GROUPS,
    PRODUCER_WARPS,
    TileConfig,
    tile_config,
)
from mlactl.kernels.mla.epilogue import Destination
from mlactl.kernels.mla.loaders import ChunkWalk, DensePages, prefetch_tables, produce, producer_token, stage_query
from mlactl.kernels.mla.mma import Bf16Decoder, Fp8Decoder, decoder_of
from mlactl.kernels.mla.schedule import Batch, Schedule
from mlactl.kernels.mla.softmax import ScoreExchange, row_reduce, soften
from mlactl.kernels.mla.visibility import Numbers, Request, RowKeys, Visibility

LOG2E = 1.0 / math.log(2.0)


@dataclass(frozen=True)
class Group:
    """What a consumer thread needs in its loop, gathered so that the loops read like the algorithm.

    query: fragments of the group's rows; keys: what the thread's row sees; ring, full, empty: addresses; scale: log2(e)
    times the softmax scale.
    """

    config: TileConfig
    decoder: Bf16Decoder | Fp8Decoder
    query: list[list[list[Int32]]]
    exchange: ScoreExchange
    keys: RowKeys
    ring: Int32
    full: Int32
    empty: Int32
    index: Int32
    lane: Int32
    scale: Float32
    threshold: Float32

    @property
    def barrier(self):
        """The group's named barrier."""
        return self.index + 1

    def stage(self, stage):
        """Address of a stage of the ring."""
        return self.ring + stage * self.config.stage_bytes

    def wait(self, stage, phase):
        """Waits until a stage is filled."""
        ptx.mbarrier_wait(self.full + 8 * stage, phase)

    def soften(self, own, position, left, maximum, total, buffer):
        """`softmax.soften` of the chunk at a position, with the group's scale."""
        visible = self.keys.left(position, left)
        return soften(self.exchange, own, visible, self.keys.window, maximum, total, self.scale, self.threshold, buffer)

    def accumulate(self, sums, stage, buffer):
        """Adds P times the values of a stage to the sums."""
        self.decoder.accumulate(sums, self.exchange.probabilities + buffer * self.config.probability_bytes, self.stage(stage))


class ForwardKernel:
    """Traced forward kernel of one tile configuration; `may_split` is the compile fact output=split."""

    def __init__(self, config: TileConfig, visibility: Visibility, *, may_split: bool):
        self.config, self.visibility, self.may_split = config, visibility, may_split
        self.schedule = Schedule(config.rows, visibility)

    @cute.jit
    def rescale(self, sums: cute.Tensor, needed: Int32, statistics: Int32):
        """Scales the sums by each row's factor when any row of the group asked for it.

        A loop of no or one trip: ptxas would turn a plain branch into 128 predicated multiplications.
        """
        config = self.config
        for _ in cutlass.range(needed, unroll=1):
            factors = [ptx.load_shared_f32(statistics, 1, half * 32)[0] for half in range(2 * config.row_tiles)]
            for tile in cutlass.range_constexpr(config.row_tiles):
                for i in cutlass.range_constexpr(config.column_tiles * 4):
                    at = tile * config.column_tiles * 4 + i
                    sums[at] = sums[at] * factors[2 * tile + i % 4 // 2]

    @cute.jit
    def attend_alternate(self, group: cutlass.Constexpr[Group], sums: cute.Tensor, own: cute.Tensor, begin: Int32, end: Int32):
        """`tok` tiles: this group's positions begin, begin + 2, …; returns the rows' (maximum, sum)."""
        config, exchange = self.config, group.exchange
        maximum = Float32(ptx.UNSET)
        total = Float32(0.0)
        stage = begin * 0 + group.index
        phase = Int32(0)
        statistics = exchange.statistics + group.lane // 4 * 4
        left = group.keys.start(begin)
        for position in cutlass.range(begin, end, GROUPS, unroll=1):
            group.wait(stage, phase)
            exchange.send(group.decoder.scores(group.query, group.stage(stage)), own, 0)
            ptx.barrier(group.barrier, GROUP_THREADS)
            maximum, total, flag = group.soften([own[i] for i in range(4)], position, left, maximum, total, 0)
            self.rescale(sums, ptx.barrier_any(group.barrier, GROUP_THREADS, flag), statistics)
            group.accumulate(sums, stage, 0)
            cute.arch.sync_warp()
            if group.lane == 0:
                ptx.mbarrier_arrive(group.empty + 8 * stage)
            left = left - GROUPS * CHUNK_TOKENS
            stage = stage + GROUPS
            if stage >= config.stages:
                stage = stage - config.stages
                phase = phase ^ 1
        return maximum, total

    @cute.jit
    def attend_shared(self, group: cutlass.Constexpr[Group], sums: cute.Tensor, own: cute.Tensor, begin: Int32, end: Int32):
        """`row` tiles: every chunk; QK of the next chunk is issued with the softmax of this one, one barrier a chunk."""
        config, exchange = self.config, group.exchange
        maximum = Float32(ptx.UNSET)
        total = Float32(0.0)
        stage = Int32(0)
        phase = Int32(0)
        statistics = exchange.statistics + group.lane // 4 * 4
        left = group.keys.start(begin)
        if begin < end:
            group.wait(stage, phase)
            exchange.send(group.decoder.scores(group.query, group.stage(stage)), own, begin & 1)
            ptx.barrier(group.barrier, GROUP_THREADS)
        for position in cutlass.range(begin, end - 1, unroll=1):
            # Parity of the position, not a register of its own: the loop has none to spare.
            buffer = position & 1
            following = stage + 1
            if following == config.stages:
                following = Int32(0)
                phase = phase ^ 1
            group.wait(following, phase)
            kept = [own[i] for i in range(4)]
            maximum, total, flag = group.soften(kept, position, left, maximum, total, buffer)
            exchange.send(group.decoder.scores(group.query, group.stage(following)), own, buffer ^ 1)
            self.rescale(sums, ptx.barrier_any(group.barrier, GROUP_THREADS, flag), statistics + buffer * (config.group_rows * 4))
            group.accumulate(sums, stage, buffer)
            cute.arch.sync_warp()
            if group.lane == 0:
                ptx.mbarrier_arrive(group.empty + 8 * stage)
            left = left - CHUNK_TOKENS
            stage = following
        if begin < end:
            buffer = (end - 1) & 1
            kept = [own[i] for i in range(4)]
            maximum, total, flag = group.soften(kept, end - 1, left, maximum, total, buffer)
            self.rescale(sums, ptx.barrier_any(group.barrier, GROUP_THREADS, flag), statistics + buffer * (config.group_rows * 4))
            group.accumulate(sums, stage, buffer)
        return maximum, total

    @cute.jit
    def clear_empty(
        self,
        batch: cutlass.Constexpr[Batch],
        rows_given: Int32,
        output: cute.Tensor,
        lse: cute.Tensor,
        directory: cute.Tensor,
        block: Int32,
        budget: Int32,
        lane: Int32,
    ):
        """Empty requests, and the rows past the last request's, have no unit: blocks share them out, from the last block
        down, since the last ones are idle first."""
        blocks, _, _ = cute.arch.grid_dim()
        for request in cutlass.range(blocks - 1 - block, batch.requests + 1, blocks, unroll=1):
            length = Int32(0)
            end = rows_given
            if request < batch.requests:
                length = batch.length(request)
                end = self.schedule.first_row(batch, request + 1)
            if length == 0:
                first_query = self.schedule.first_row(batch, request)
                entries = Int64(0)
                if cutlass.const_expr(self.may_split):  # noqa: SIM102  this one is decided at trace time
                    if budget > 0:
                        entries = directory.iterator.toint()
                epilogue.clear_rows(
                    output.iterator.toint(),
                    Int64(output.stride[0]) * 2,
                    Int64(output.stride[1]) * 2,
                    lse.iterator.toint(),
                    entries,
                    first_query,
                    (end - first_query) * batch.heads,
                    batch.heads,
                    self.config.record.latent * 2,
                    lane,
                )

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        kv: cute.Tensor,
        table: cute.Tensor,
        lengths: cute.Tensor,
        boundaries: cute.Tensor,
        own_lengths: cute.Tensor,
        output: cute.Tensor,
        lse: cute.Tensor,
        partial: cute.Tensor,
        partial_lse: cute.Tensor,
        directory: cute.Tensor,
        rows: Int32,
        budget: Int32,
        window: Int32,
        stride: Int32,
        sink: Int32,
        recent: Int32,
        min_tokens: Int32,
        refresh: Int32,
        plan_rows: Int32,
        scale: Float32,
        threshold: Float32,
        value_scale: Float32,
    ):
        """Device code; `scale` is log2(e) times the softmax scale (and the scales of E4M3 elements), `threshold` the rescale
        threshold in raw score units, `value_scale` the scale of E4M3 values."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        heads = q.shape[1]

        # ---------------------------------------------------------------- the unit
        numbers = Numbers(window, stride, sink, recent, min_tokens, refresh, plan_rows)
        batch = Batch(lengths.iterator.toint(), boundaries.iterator.toint(), lengths.shape[0], rows, heads, numbers)
        blocks, _, _ = cute.arch.grid_dim()
        if warp == BLOCK_THREADS // 32 - 2:
            entries = Int64(table.shape[0] - 1) * Int64(table.stride[0]) + Int64(table.shape[1])
            prefetch_tables(table.iterator.toint(), entries, block, blocks, lane)
        if warp == BLOCK_THREADS // 32 - 1:
            self.clear_empty(batch, q.shape[0], output, lse, directory, block, budget, lane)
        request, first_block, tiles, splits = self.schedule.locate(batch, budget, block, lane)
        ptx.exit_if(request < 0)
        local = block - first_block
        split = ptx.divide(local, tiles)
        tile = local - split * tiles
        length = batch.length(request)
        first_query = self.schedule.first_row(batch, request)
        query_rows = rows
        if rows == 0:
            query_rows = self.schedule.first_row(batch, request + 1) - first_query
        first = tile * config.rows
        tile_rows = cutlass.min(query_rows * heads - first, Int32(config.rows))
        # Row i sees the keys below length - query_rows + i + 1, or its own length, clamped to [0, length].
        seer = Request(length, length - query_rows + 1, own_lengths.iterator.toint() + Int64(first_query) * 4)
        walk = self.visibility.walk(seer, numbers, ptx.divide(first, heads), ptx.divide(first + tile_rows - 1, heads), lane)
        splits = cutlass.min(splits, cutlass.max(walk.count, Int32(1)))
        ptx.exit_if(split >= splits)
        begin = walk.base + ptx.divide(walk.count * split, splits)
        end = walk.base + ptx.divide(walk.count * (split + 1), splits)

        # ---------------------------------------------------------------- shared memory, query, table
        shared = SmemAllocator().allocate(config.shared_bytes, 128).toint()
        full = shared + config.mbarrier_offset
        empty = full + 8 * config.stages
        query_read = empty + 8 * config.stages
        if thread == 0:
            for stage in cutlass.range_constexpr(config.stages):
                ptx.mbarrier_init(full + 8 * stage, PRODUCER_WARPS)
                ptx.mbarrier_init(empty + 8 * stage, GROUP_WARPS * (GROUPS if config.share_chunks else 1))
            ptx.mbarrier_init(query_read, GROUP_WARPS * GROUPS)
            ptx.mbarrier_init_fence()
            # Kept here for the two roles and for the epilogue: registers are short in the loops.
            for i, value in enumerate((begin, end, first, tile_rows, first_query, splits, split, tiles)):
                ptx.store_shared_b32(shared + config.unit_offset, value, 4 * i)
            for i, value in enumerate(walk.words):
                ptx.store_shared_b32(shared + config.walk_offset, value, 4 * i)
        staged = shared + config.staged_offset
        table_row = table.iterator.toint() + Int64(request) * Int64(table.stride[0]) * 4
        if warp < GROUPS * GROUP_WARPS:
            query_strides = [Int64(q.stride[i]) * config.query_bytes for i in range(2)]
            origin = q.iterator.toint() + Int64(first_query) * query_strides[0]
            stage_query(config, origin, *query_strides, heads, first, tile_rows, staged, warp, lane)
        cute.arch.sync_threads()

        if warp >= GROUPS * GROUP_WARPS:
            # ------------------------------------------------------------ producers
            cute.arch.setmaxregister_decrease(config.producer_registers)
            producer = warp - GROUPS * GROUP_WARPS
            begin, end = self.unit(shared, 0, 2)
            page_stride = Int64(kv.stride[0]) * config.record.element_bytes
            record_stride = Int64(kv.stride[1]) * config.record.element_bytes
            token = producer_token(producer, lane)
            if begin < end:
                source = DensePages(kv.iterator.toint(), page_stride, record_stride, kv.shape[1], table_row, walk.last, token)
                chunks = ChunkWalk(self.visibility, numbers, shared + config.walk_offset)
                produce(config, source, chunks, shared, full, empty, query_read, begin, end, producer, lane)
        else:
            # ------------------------------------------------------------ consumers
            cute.arch.setmaxregister_increase(config.consumer_registers)
            begin, end = self.unit(shared, 0, 2)
            index = warp // GROUP_WARPS
            in_group = warp % GROUP_WARPS
            area = shared + config.ring_bytes + index * config.group_bytes
            first_row = Int32(0)
            if cutlass.const_expr(config.share_chunks):
                first_row = index * config.group_rows
            decoder = decoder_of(config).of(config, in_group, lane)
            exchange = ScoreExchange.of(config, area, in_group, lane)
            ptx.wait_copies()
            ptx.barrier(epilogue.GROUPS_BARRIER, CONSUMER_THREADS)
            query = decoder.load_query(staged + first_row * config.query_pitch)
            cute.arch.sync_warp()
            if lane == 0:
                ptx.mbarrier_arrive(query_read)
            if cutlass.const_expr(config.query_overflows):
                ptx.barrier(epilogue.GROUPS_BARRIER, CONSUMER_THREADS)
            sums = cute.make_rmem_tensor((config.accumulators,), Float32)
            for i in cutlass.range_constexpr(config.accumulators):
                sums[i] = Float32(0.0)
            own = cute.make_rmem_tensor((4,), Float32)
            for i in cutlass.range_constexpr(4):
                own[i] = Float32(0.0)
            packed = cutlass.min(first + first_row + exchange.row, first + tile_rows - 1)
            keys = self.visibility.keys_of(seer, numbers, ptx.divide(packed, heads), exchange.column, shared + config.walk_offset)
            group = Group(config, decoder, query, exchange, keys, shared, full, empty, index, lane, scale, threshold)
            if cutlass.const_expr(config.share_chunks):
                maximum, total = self.attend_shared(group, sums, own, begin, end)
            else:
                maximum, total = self.attend_alternate(group, sums, own, begin + index, end)

            # ------------------------------------------------------------ epilogue
            total = row_reduce(config, total, lambda a, b: a + b)
            ptx.barrier(group.barrier, GROUP_THREADS)
            if exchange.leader == 0:
                ptx.store_shared_f32(exchange.statistics + exchange.row * 4, [maximum * scale])
                ptx.store_shared_f32(exchange.statistics + exchange.row * 4, [total], config.group_rows * 4)
            first, tile_rows, first_query, splits, split, tiles = self.unit(shared, 2, 6)
            to = Destination(
                config,
                output.iterator.toint() + Int64(first_query) * Int64(output.stride[0]) * 2,
                Int64(output.stride[0]) * 2,
                Int64(output.stride[1]) * 2,
                lse.iterator.toint(),
                partial.iterator.toint(),
                partial_lse.iterator.toint(),
                heads,
                first,
                tile_rows,
                first_query * heads + first,
                block * config.rows,
                Int32(splits == 1),
                value_scale if config.record.f16_products else None,
            )
            if cutlass.const_expr(self.may_split):  # noqa: SIM102  this one is decided at trace time
                if (budget > 0) & (split == 0):
                    epilogue.write_directory(directory.iterator.toint(), to, thread, tiles * config.rows, splits)
            if cutlass.const_expr(config.share_chunks):
                ptx.barrier(group.barrier, GROUP_THREADS)
                epilogue.finish_shared(config, to, sums, exchange.statistics, index, in_group, lane, self.may_split)
            else:
                ptx.barrier(epilogue.GROUPS_BARRIER, CONSUMER_THREADS)
                other = exchange.statistics + (1 - 2 * index) * config.group_bytes
                epilogue.finish_alternate(config, to, sums, exchange.statistics, other, shared, index, in_group, lane, self.may_split)
            # Not earlier: merge blocks would crowd onto the first processors that fall idle.
            if cutlass.const_expr(self.may_split):
                ptx.launch_dependents()

    def unit(self, shared, first, count):
        """Words of the block's unit, kept in shared memory, in uniform registers."""
        return [ptx.warp_max(ptx.load_shared_i32(shared + self.config.unit_offset, 4 * (first + i))) for i in range(count)]

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        kv_cache: cute.Tensor,
        page_table: cute.Tensor,
        cache_seqlens: cute.Tensor,
        cu_seqlens_q: cute.Tensor,
        query_cache_seqlens: cute.Tensor,
        output: cute.Tensor,
        lse: cute.Tensor,
        partial: cute.Tensor,
        partial_lse: cute.Tensor,
        directory: cute.Tensor,
        rows: Int32,
        budget: Int32,
        blocks: Int32,
        window: Int32,
        stride: Int32,
        sink_chunks: Int32,
        recent_chunks: Int32,
        min_tokens: Int32,
        refresh_interval: Int32,
        plan_rows: Int32,
        sm_scale: Float32,
        kv_scale: Float32,
        q_scale: Float32,
        stream,
    ):
        """Host code; arguments are dense.DenseTensors', then rows a request (0: from cu_seqlens_q), split budget, grid, window,
        the sparse policy's numbers with the plan's rows, softmax scale and the scales of E4M3 elements."""
        scale = sm_scale * Float32(LOG2E)
        if cutlass.const_expr(self.config.record.f16_products):
            scale = scale * kv_scale * q_scale
        self.kernel(
            q,
            kv_cache,
            page_table,
            cache_seqlens,
            cu_seqlens_q,
            query_cache_seqlens,
            output,
            lse,
            partial,
            partial_lse,
            directory,
            rows,
            budget,
            window,
            stride,
            sink_chunks,
            recent_chunks,
            min_tokens,
            refresh_interval,
            plan_rows,
            scale,
            self.config.rescale_threshold / scale,
            kv_scale,
        ).launch(grid=[blocks, 1, 1], block=[BLOCK_THREADS, 1, 1], smem=self.config.shared_bytes, stream=stream, min_blocks_per_mp=1)


def build(facts: dict[str, bool | int | str]) -> Traced:
    """The forward kernel of a validated, built spec: its entry and fake arguments."""
    config = tile_config(str(facts["tile"]), str(facts["record"]), int(facts["width"]), str(facts["q_dtype"]))
    latent = config.record.latent
    visibility = Visibility(per_query=facts["lengths"] == "per_query", sparse=facts["selection"] == "sparse", window=bool(facts["window"]))
    # E4M3 elements travel as bytes: the code never asks for their values as numbers of the language.
    q_type, kv_type = (BFloat16 if size == 2 else Uint8 for size in (config.query_bytes, config.record.element_bytes))
    arguments = (
        fake_tensor(q_type, (None, None, config.record.width), divisibility=16 // config.query_bytes),
        fake_tensor(kv_type, (None, None, None), divisibility=16 // config.record.element_bytes),
        fake_tensor(Int32, (None, None), align=4),
        fake_tensor(Int32, (None,), align=4),
        fake_tensor(Int32, (None,), align=4),
        fake_tensor(Int32, (None,), align=4),
        fake_tensor(BFloat16, (None, None, latent), divisibility=8),
        fake_tensor(Float32, (None, None), align=4),
        fake_tensor(Float32, (None, latent)),
        fake_tensor(Float32, (None,)),
        fake_tensor(Int32, (None, 4)),
        *(Int32(1) for _ in range(10)),
        *(Float32(1.0) for _ in range(3)),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    return Traced(ForwardKernel(config, visibility, may_split=facts["output"] == "split"), arguments, config.shared_bytes)
