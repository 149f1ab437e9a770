"""How a staged record feeds the tensor cores. Traced code; every method unrolls at trace time.

A decoder turns staged bytes into QK scores and PV sums for one consumer group. `Bf16Decoder` reads both operands with
ldmatrix: the group's four warps split the QK depth, so that each key byte is read once a group, and each owns a quarter of
the value columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float32, Int32

from mlactl.kernels.mla import ptx
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
            address = base + row * config.pitch + self.query_lane
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
