"""Partial scores of all warps become probabilities: exchange through shared memory, then the online softmax. Traced code.

Each warp finalises `warp_rows` rows of each 16-row tile. A score that several warps sum arrives in a fixed order, so results
repeat to the bit.

The running maximum is not kept up chunk by chunk: a chunk's probabilities are taken against the maximum as it stands, with no
reduction over the row, unless one of its scores passes it by `RESCALE_BITS`. Then the whole group takes a second pass. That
is the first chunk, and seldom another.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float32, Int32

from mlactl.kernels.mla import ptx, ptx_narrow
from mlactl.kernels.mla.sparse_config import SparseTile

UNSET = -1.0e30
"""Start of the running maximum, and the score of a token that does not count."""

SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True)
class SparseExchange:
    """One thread's places. What a warp sends another is ordered [16 tokens][row][t][token tile][2 tokens]: stores of 16 bytes and
    loads of 8 or 16 both spread over all banks.

    row: row in a 16-row tile that the thread finalises; token: the first of its tokens in a chunk; leader: 0 in one lane of a
    row; shared: address of the group's shared memory.
    """

    config: SparseTile
    shared: Int32
    send_at: Int32
    receive_at: Int32
    row: Int32
    token: Int32
    leader: Int32

    @classmethod
    def of(cls, config, shared, warp, lane):
        """The places of one thread."""
        exchange, rows = shared + config.exchange_offset, config.warp_rows
        g, t = lane // 4, lane % 4
        slot = config.warps * config.slice_bytes
        send = exchange + (g // rows) * slot + warp * config.slice_bytes + (g % rows) * 64 + t * 16
        receive = exchange + warp * slot + lane * (config.scores * 4)
        if config.scores == 4:
            row, token, in_half = lane // 4 % rows, lane // (4 * rows) * 16 + t * 2, t
        else:
            row, token, in_half = lane // 8 % rows, lane // (8 * rows) * 16 + lane % 2 * 8 + lane // 2 % 4 * 2, lane % 8
        return cls(config, shared, send, receive, warp * rows + row, token, in_half + lane // 16)

    @property
    def row_masks(self):
        """Lane bits that differ between the lanes of one row."""
        return (1, 2, 16) if self.config.scores == 4 else (1, 2, 4, 16)

    @property
    def tokens(self):
        """The thread's tokens in a chunk."""
        return [self.token + i // 2 * 8 + i % 2 for i in range(self.config.scores)]

    @property
    def statistics(self):
        """Address of the rows' statistics."""
        return self.shared + self.config.statistics_offset

    def probability_row(self, lane):
        """Address of a lane's row for ldmatrix over P."""
        return self.shared + self.config.probability_offset + lane % 16 * self.config.probability_pitch + lane // 16 * 16

    def slots(self, stage):
        """Slots of the thread's tokens of a staged chunk, negative where absent."""
        at = stage + self.config.slots_offset + self.token * 4
        return [slot for pair in range(self.config.scores // 2) for slot in ptx_narrow.load_shared_words(at, 2, pair * 32)]

    def send(self, sums):
        """Hands each row's partial scores to the warp that finalises it."""
        config = self.config
        slot = config.warps * config.slice_bytes
        for tile in range(config.row_tiles):
            for half in range(2):
                for pair in range(config.token_tiles // 2):
                    first, second = sums[tile][2 * pair], sums[tile][2 * pair + 1]
                    values = [first[2 * half], first[2 * half + 1], second[2 * half], second[2 * half + 1]]
                    offset = tile * config.exchange_bytes + half * (config.warps // 2) * slot + pair * (config.warp_rows * 64)
                    ptx.store_shared_f32(self.send_at, values, offset)

    def receive(self):
        """This thread's partial scores of every row tile, [row tile][warp][score]; `total` adds them up."""
        config = self.config
        return [
            [
                ptx.load_shared_f32(self.receive_at, config.scores, tile * config.exchange_bytes + warp * config.slice_bytes)
                for warp in range(config.warps)
            ]
            for tile in range(config.row_tiles)
        ]

    def store_statistic(self, tile, value, column):
        """Leaders write a number of their row: the rescale factor in column 0, at the end maximum and sum in columns 0 and 1."""
        at = self.statistics + (self.row + 16 * tile) * 4 + column * (self.config.rows * 4)
        ptx.store_shared_f32_if_zero(self.leader, at, value)

    def store_probabilities(self, decoder, tile, weights):
        """Writes the thread's probabilities of a row tile in the type of the value operands."""
        pitch = self.config.probability_pitch
        at = self.shared + self.config.probability_offset + self.row * pitch + self.token * 2
        for pair in range(self.config.scores // 2):
            ptx.store_shared_b32(at, decoder.pack(weights[2 * pair], weights[2 * pair + 1]), tile * 16 * pitch + pair * 16)

    def reduce_row(self, value, combine):
        """Combines a value over the lanes of a row."""
        for mask in self.row_masks:
            value = combine(value, ptx.shuffle_xor(value, mask))
        return value


def add_up(parts):
    """Sum over warps of a thread's partial scores, pairwise."""
    while len(parts) > 1:
        parts = [[x + y for x, y in zip(a, b, strict=True)] for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


@dataclass(frozen=True)
class Softmax:
    """Online softmax of the rows that one thread helps to finalise; state in register arrays, one entry a row tile.

    peaks: running maximum in the units of raw scores; shifts: minus the same in log2 units, 0 while unset; totals: this
    lane's share of the row's sum. scale: from raw to log2 units; threshold: RESCALE_BITS in raw units.

    Where values carry a per-token scale, P takes it: its logarithm joins the score, so that P stays in range whatever the
    scale, and the sum divides it out again.
    """

    exchange: SparseExchange
    decoder: object
    scale: Float32
    threshold: Float32
    peaks: object
    shifts: object
    totals: object

    def scores(self, received, slots, token_scales):
        """Final scores [row tile][score]; tokens that are absent get UNSET."""
        final = []
        for parts in received:
            raw = add_up(parts)
            if token_scales is not None:
                unit = ptx_narrow.reciprocal(self.scale)
                raw = [ptx.multiply_add(ptx.log2(s), unit, x) for x, s in zip(raw, token_scales, strict=True)]
            final.append([ptx_narrow.where_valid(slot, x, Float32(UNSET)) for slot, x in zip(slots, raw, strict=True)])
        return final

    def soften(self, scores, kept):
        """Writes the chunk's probabilities against the running maximum, also to `kept`; returns the flag that it was passed by too much."""
        flag = Int32(0)
        for tile, own in enumerate(scores):
            flag = flag | ptx.is_greater(ptx.largest(own), self.peaks[tile] + self.threshold)
            self._weigh(tile, own, kept)
        return flag

    def _weigh(self, tile, own, kept):
        weights = [ptx.exp2(ptx.multiply_add(x, self.scale, self.shifts[tile])) for x in own]
        self.exchange.store_probabilities(self.decoder, tile, weights)
        for i, weight in enumerate(weights):
            kept[tile * len(own) + i] = weight

    def raise_maximum(self, scores, kept):
        """The second pass: moves the maximum of rows that need it, scales their sums, publishes the factors and new probabilities."""
        for tile, own in enumerate(scores):
            peak = self.exchange.reduce_row(ptx.largest(own), ptx.maximum)
            old = self.peaks[tile]
            new = ptx.where_greater(peak, old + self.threshold, peak, old)
            factor = ptx.exp2((old - new) * self.scale)
            self.exchange.store_statistic(tile, factor, 0)
            self.peaks[tile] = new
            self.shifts[tile] = ptx.unset_to_zero(new) * (Float32(0.0) - self.scale)
            self.totals[tile] = self.totals[tile] * factor
            self._weigh(tile, own, kept)

    def add(self, kept, slots, token_scales):
        """Adds a chunk's final probabilities to the sums."""
        scores = self.exchange.config.scores
        for tile in range(self.exchange.config.row_tiles):
            own = [kept[tile * scores + i] for i in range(scores)]
            if token_scales is not None:
                # A scale under fp32's normal numbers makes P 0; its reciprocal must stay finite.
                inverse = [ptx_narrow.reciprocal(ptx.maximum(s, Float32(SMALLEST_NORMAL))) for s in token_scales]
                own = [ptx_narrow.where_valid(slot, x * y, Float32(0.0)) for slot, x, y in zip(slots, own, inverse, strict=True)]
            self.totals[tile] = self.totals[tile] + ptx.total(own)
