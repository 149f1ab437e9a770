"""How a staged record feeds the tensor cores. Traced code; every method unrolls at trace time.

A decoder turns staged bytes into QK scores and PV sums for one consumer group. `Bf16Decoder` reads both operands with
ldmatrix: the group's four warps split the QK depth, so that each key byte is read once a group, and each owns a quarter of
the value columns. `Fp8Decoder` splits the work the same way and widens E4M3 to f16 in registers, on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float32, Int32

from mlactl.kernels.mla import ptx, ptx_narrow
from mlactl.kernels.mla.config import TileConfig


@dataclass(frozen=True)
class Bf16Decoder:
    """bf16 records, for one lane: the byte offsets it adds to the staged query, keys, values and P."""

    config: TileConfig
    warp: Int32
    lane: Int32
    query_lane: Int32
    key_lane: Int32
    value_lane: Int32
    probability_lane: Int32

    @classmethod
    def of(cls, config, warp, lane):
        """`warp` is the warp within its group."""
        slice_bytes = config.depth_steps * 32
        return cls(
            config,
            warp,
            lane,
            query_lane=(lane // 16) * 16 + warp * slice_bytes,
            key_lane=((lane // 16) * 8 + lane % 8) * config.pitch + ((lane // 8) % 2) * 16 + warp * slice_bytes,
            value_lane=(((lane // 8) % 2) * 8 + lane % 8) * config.pitch + (lane // 16) * 16 + warp * (config.value_columns * 2),
            probability_lane=(lane % 16) * config.probability_pitch + (lane // 16) * 16,
        )

    def load_query(self, base):
        """Query fragments [row tile][depth step] of the group's rows staged at `base`.

        A 32-row group's rows are rotated by 8 a warp, so that the first 8 accumulator rows of every warp are the ones it
        finalises itself.
        """
        config = self.config
        fragments = []
        for tile in range(config.row_tiles):
            row = tile * 16 + self.lane % 16
            if config.group_rows == 32:
                row = (row + 8 * self.warp) & 31
            address = base + row * config.query_pitch + self.query_lane
            fragments.append([ptx.ldmatrix4(address, step * 32) for step in range(config.depth_steps)])
        return fragments

    def scores(self, query, stage):
        """Partial scores [row tile][8-token tile] of the staged chunk over this warp's part of the depth."""
        config, address = self.config, stage + self.key_lane
        sums = [[[Float32(0.0)] * 4 for _ in range(2)] for _ in range(config.row_tiles)]
        following = ptx.ldmatrix4(address)
        for step in range(config.depth_steps):
            key = following
            if config.pipelined and step + 1 < config.depth_steps:
                following = ptx.ldmatrix4(address, (step + 1) * 32)
            for tile in range(config.row_tiles):
                for half in range(2):
                    sums[tile][half] = ptx.mma_bf16(sums[tile][half], query[tile][step], key[2 * half], key[2 * half + 1])
            if not config.pipelined and step + 1 < config.depth_steps:
                following = ptx.ldmatrix4(address, (step + 1) * 32)
        return sums

    def accumulate(self, output, probabilities, stage):
        """Adds P times the staged chunk's values to the output accumulators [row tile][column tile][4]."""
        config = self.config
        weights = [ptx.ldmatrix4(probabilities + self.probability_lane, tile * 16 * config.probability_pitch) for tile in range(config.row_tiles)]
        for pair in range(config.column_tiles // 2):
            value = ptx.ldmatrix4(stage + self.value_lane, pair * 32, transpose=True)
            for tile in range(config.row_tiles):
                for half in range(2):
                    at = (tile * config.column_tiles + pair * 2 + half) * 4
                    sums = ptx.mma_bf16([output[at + e] for e in range(4)], weights[tile], value[2 * half], value[2 * half + 1])
                    for e in range(4):
                        output[at + e] = sums[e]


@dataclass(frozen=True)
class Fp8Decoder:
    """E4M3 records, for one lane: byte offsets as in `Bf16Decoder`. Products are f16, exact for every E4M3 value.

    A 16-element step of the depth is multiplied in another order than it lies: lane t of a row holds bytes 4t to 4t + 3, which
    feed k = 2t, 2t + 1, 2t + 8, 2t + 9; the query is loaded in the same order. Values come out of a transposing ldmatrix as
    pairs of neighbouring columns, so of two column tiles the first has the even columns of 16, the second the odd ones.
    """

    config: TileConfig
    warp: Int32
    lane: Int32
    query_lane: Int32
    key_lane: Int32
    value_lane: Int32
    probability_lane: Int32

    @classmethod
    def of(cls, config, warp, lane):
        """`warp` is the warp within its group."""
        slice_elements = config.depth_steps * 16
        token = ((lane // 8) % 2 * 8 + lane % 8) * config.pitch + (lane // 16) * 16
        return cls(
            config,
            warp,
            lane,
            query_lane=(warp * slice_elements + lane % 4 * 4) * config.query_bytes,
            key_lane=token + warp * slice_elements,
            value_lane=token + warp * config.value_columns,
            probability_lane=(lane % 16) * config.probability_pitch + (lane // 16) * 16,
        )

    def load_query(self, base):
        """Query fragments [row tile][depth step] of the group's rows staged at `base`, as f16; rotated as in `Bf16Decoder`."""
        config = self.config
        fragments = [[[None] * 4 for _ in range(config.depth_steps)] for _ in range(config.row_tiles)]
        for tile in range(config.row_tiles):
            for half in range(2):
                row = tile * 16 + half * 8 + self.lane // 4
                if config.group_rows == 32:
                    row = (row + 8 * self.warp) & 31
                address = base + row * config.query_pitch + self.query_lane
                for step in range(config.depth_steps):
                    words = ptx_narrow.load_shared_words(address, config.query_bytes, step * 16 * config.query_bytes)
                    pairs = ptx_narrow.e4m3_quad(words[0]) if config.query_bytes == 1 else [ptx_narrow.bf16_pair_to_f16(x) for x in words]
                    fragments[tile][step][half], fragments[tile][step][half + 2] = pairs
        return fragments

    def scores(self, query, stage):
        """Partial scores [row tile][8-token tile] of the staged chunk over this warp's part of the depth."""
        config, address = self.config, stage + self.key_lane
        sums = [[[Float32(0.0)] * 4 for _ in range(2)] for _ in range(config.row_tiles)]
        wide = 1 if config.group_rows == 32 else 2  # 32 rows leave no register for a second step
        for step in range(0, config.depth_steps, wide):
            load = ptx.ldmatrix4 if step + 1 < config.depth_steps and wide == 2 else ptx.ldmatrix2
            for at, word in enumerate(load(address, step * 16)):
                key = ptx_narrow.e4m3_quad(word)
                for tile in range(config.row_tiles):
                    sums[tile][at % 2] = ptx_narrow.mma_f16(sums[tile][at % 2], query[tile][step + at // 2], *key)
        return sums

    def accumulate(self, output, probabilities, stage):
        """Adds P times the staged chunk's values to the output accumulators [row tile][column tile][4]."""
        config = self.config
        weights = [ptx.ldmatrix4(probabilities + self.probability_lane, tile * 16 * config.probability_pitch) for tile in range(config.row_tiles)]
        wide = 1 if config.group_rows == 32 else 2  # 32 rows leave no register for a second step
        load = ptx.ldmatrix2 if wide == 1 else ptx.ldmatrix4
        for first_pair in range(0, config.column_tiles // 2, wide):
            words = load(stage + self.value_lane, first_pair * 16, transpose=True)
            for pair in range(wide):
                first, second = (ptx_narrow.e4m3_quad(ptx_narrow.permute(word, word, 0x3120)) for word in words[2 * pair : 2 * pair + 2])
                for tile in range(config.row_tiles):
                    for odd in range(2):
                        at = (tile * config.column_tiles + (first_pair + pair) * 2 + odd) * 4
                        sums = ptx_narrow.mma_f16([output[at + e] for e in range(4)], weights[tile], first[odd], second[odd])
                        for e in range(4):
                            output[at + e] = sums[e]


def decoder_of(config):
    """The decoder class of the configuration's record."""
    return Fp8Decoder if config.record.f16_products else Bf16Decoder
