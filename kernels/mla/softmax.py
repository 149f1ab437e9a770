"""Partial scores of four warps become probabilities: exchange through shared memory, then the online softmax. Traced code.

Each warp of a group finalises a quarter of the group's rows. `lanes_per_row` lanes share a row; a 32-row group's lane holds
tokens 2t, 2t+1, 2t+8, 2t+9 of a chunk (t = lane mod 4), a 16-row group's lane the pair 2t, 2t+1 of one half of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float32, Int32

from mlactl.kernels.mla import ptx, ptx_narrow
from mlactl.kernels.mla.config import GROUP_WARPS, TileConfig


@dataclass(frozen=True)
class ScoreExchange:
    """Where one thread writes and reads in its group's exchange buffer, P and statistics.

    row: the row it finalises; column: its first token in a chunk; leader: 0 in one lane of each row. Addresses of the
    exchange are a lane's offset plus one of its warp, added where they are used: registers are short in the loop. The rest
    are addresses of the group's P and statistics and the thread's own place there.
    """

    config: TileConfig
    row: Int32
    column: Int32
    leader: Int32
    send_lane: Int32
    send_warp: tuple[Int32, ...]
    receive_lane: Int32
    receive_warp: Int32
    probabilities: Int32
    own_probability: Int32
    statistics: Int32
    own_statistic: Int32

    @classmethod
    def of(cls, config, area, warp, lane):
        """`area` is the group's shared memory, `warp` the warp within the group."""
        slot = config.sources * config.slice_bytes
        if config.group_rows == 32:
            row, column = warp * 8 + lane // 4, (lane % 4) * 2
            send_lane = receive_lane = lane * 16
            send_warp = tuple(area + ((warp + b) & 3) * slot + (b - 1) * config.slice_bytes for b in range(1, GROUP_WARPS))
        else:
            row, column = warp * 4 + lane // 8, (lane % 2) * 8 + (lane // 2 % 4) * 2
            send_lane, receive_lane = (lane // 16) * slot + (lane // 4 % 4) * 64 + (lane % 4) * 16, lane * 8
            send_warp = tuple(area + 2 * half * slot + warp * config.slice_bytes for half in range(2))
        probabilities, statistics = area + config.probability_offset, area + config.statistics_offset
        return cls(
            config,
            row,
            column,
            lane % config.lanes_per_row,
            send_lane,
            send_warp,
            receive_lane,
            area + warp * slot,
            probabilities,
            probabilities + row * config.probability_pitch + column * 2,
            statistics,
            statistics + row * 4,
        )

    def send(self, sums, own, buffer):
        """Hands every other warp its rows' partial scores; a 32-row group's own slice goes to the registers `own`."""
        lane = ptx.rematerialise(self.send_lane) + buffer * self.config.exchange_bytes
        if self.config.group_rows == 32:
            for block, target in enumerate(self.send_warp, start=1):
                tile, half = block // 2, block % 2 * 2
                ptx.store_shared_f32(lane + target, [sums[tile][0][half], sums[tile][0][half + 1], sums[tile][1][half], sums[tile][1][half + 1]])
            for i in range(4):
                own[i] = sums[0][i // 2][i % 2]
        else:
            for half, target in enumerate(self.send_warp):
                at = 2 * half
                ptx.store_shared_f32(lane + target, [sums[0][0][at], sums[0][0][at + 1], sums[0][1][at], sums[0][1][at + 1]])

    def receive(self, own, buffer):
        """This thread's scores, summed over the depth, in a fixed order."""
        config = self.config
        origin = ptx.rematerialise(self.receive_lane) + self.receive_warp + buffer * config.exchange_bytes
        parts = [ptx.load_shared_f32(origin, config.scores, source * config.slice_bytes) for source in range(config.sources)]
        if config.group_rows == 32:
            parts.append(own)
        return [(parts[3][i] + parts[0][i]) + (parts[1][i] + parts[2][i]) for i in range(config.scores)]

    def offsets(self):
        """Token of each of this thread's scores, less `column`."""
        return [i // 2 * 8 + i % 2 for i in range(self.config.scores)]

    def publish(self, probabilities, factor, buffer):
        """Writes this thread's probabilities as 16-bit floats and, once a row, the factor its older sums are to be scaled by."""
        config = self.config
        pack = ptx_narrow.pack_f16 if config.record.f16_products else ptx.pack_bf16
        at = self.own_probability + buffer * config.probability_bytes
        for pair in range(config.scores // 2):
            ptx.store_shared_b32(at, pack(probabilities[2 * pair], probabilities[2 * pair + 1]), pair * 16)
        ptx.store_shared_f32_if_zero(self.leader, self.own_statistic + buffer * (config.group_rows * 4), factor)


def row_reduce(config, value, combine):
    """Combines a value over the lanes of a row."""
    mask = config.lanes_per_row // 2
    while mask:
        value = combine(value, ptx.shuffle_xor(value, mask))
        mask //= 2
    return value


def soften(exchange, own, visible, window, maximum, total, scale, threshold, buffer):
    """One chunk's scores to probabilities; returns (new maximum, new sum, flag that sums must be rescaled).

    visible: visible length less the chunk's and the thread's first token; window: of how many keys before that the row
    sees, or None; maximum: the row's, in raw score units; scale: log2(e) times the softmax scale; threshold: growth of the
    maximum, raw, below which it stays as it is.
    """
    config = exchange.config
    raw = exchange.receive(own, buffer)
    scores = [ptx.where_below(Int32(at), visible, x, Float32(ptx.UNSET)) for at, x in zip(exchange.offsets(), raw, strict=True)]
    if window is not None:
        scores = [ptx.where_below(Int32(at), visible - window, Float32(ptx.UNSET), x) for at, x in zip(exchange.offsets(), scores, strict=True)]
    peak = row_reduce(config, ptx.largest(scores), ptx.maximum)
    limit = maximum + threshold
    flag = ptx.is_greater(peak, limit)
    new = ptx.where_greater(peak, limit, peak, maximum)
    factor = ptx.exp2((maximum - new) * scale)
    shift = ptx.unset_to_zero(new) * (Float32(0.0) - scale)
    probabilities = [ptx.exp2(ptx.multiply_add(x, scale, shift)) for x in scores]
    exchange.publish(probabilities, factor, buffer)
    return new, total * factor + ptx.total(probabilities), flag
