"""How a staged quantised record feeds the tensor cores. Traced code; every method unrolls at trace time.

Lane (g, t) = (lane / 4, lane mod 4) holds, of token 8j + g of a chunk and of each slice s of its warp, the 16 latent elements
from 64s + 16t on: one NVFP4 group. They are widened in registers to f16 pairs that are exact, serve as the B operand of QK, and, transposed in
the register file, as the B operand of PV: no decoded value touches shared memory. Which two elements form a pair is free as
long as query, key and output agree on it; `pairs` says it.

Scales that differ from token to token, or that are no small number of significant bits, never enter a 16-bit operand of QK:
they multiply fp32 accumulators, whose columns are tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float32, Int32, Int64

from mlactl.kernels.mla import ptx, ptx_narrow
from mlactl.kernels.mla.sparse_config import LANE_LATENT, LANE_PAIRS, SLICE_LATENT, SLICE_ROPE, SparseTile
from mlactl.kernels.mla.sparse_records import LATENT

_E2M1_SHIFT = 6
"""E2M1 leaves the decoder as its value times 2^-6."""


@dataclass(frozen=True)
class Chunk:
    """What a warp keeps of a staged chunk for PV: `values` [slice][token tile][pair] f16 pairs, and fp32 `weights` [slice][token tile]
    of this lane's tokens where the values still lack a scale."""

    values: list[list[list[Int32]]]
    weights: list[list[Float32]] | None = None


@dataclass(frozen=True)
class LatentDecoder:
    """Both decoders' common part: query fragments, rope, and PV. `warp` and `lane` of the thread.

    scale: the outer scale (fp32) of the dynamic variant, None in the identity variant, which then has no multiply at all.
    """

    config: SparseTile
    warp: Int32
    lane: Int32
    scale: Float32 | None

    # -------------------------------------------------------------- what differs

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The two elements of each of a lane's pairs, in the order of the decoded registers."""
        raise NotImplementedError

    @property
    def shift(self) -> int:
        """Decoded latents are the values times 2^-shift; scores then are too, and outputs."""
        raise NotImplementedError

    def latent(self, stage, part):
        """(staged words of every token tile, f16 pair scale or None of every token tile) of a slice."""
        raise NotImplementedError

    def decode(self, words, scale, index):
        """The f16 pairs of word `index` of a lane's words."""
        raise NotImplementedError

    def values(self, chunk):
        """Operands of PV before their transpose, [slice][token tile][pair]."""
        return chunk.values

    # -------------------------------------------------------------- queries

    @property
    def unit(self) -> float:
        """2^shift: what scores and outputs are still to be multiplied by."""
        return float(1 << self.shift)

    @property
    def parts(self):
        """The slices of this warp."""
        return [self.warp * self.config.warp_slices + i for i in range(self.config.warp_slices)]

    def load_query(self, rows):
        """Fragments [row tile][slice] of (latent [k16 step][4 words], rope [2 words]); `rows`: addresses [row tile][half] of this lane's rows."""
        return [[self._load_query_slice(tile, part) for part in self.parts] for tile in rows]

    def _load_query_slice(self, tile, part):
        latent = [[None] * 4 for _ in range(LANE_PAIRS // 2)]
        rope = []
        for half, address in enumerate(tile):
            at = address + Int64(part * (SLICE_LATENT * 2) + self.lane % 4 * (LANE_LATENT * 2))
            words = ptx_narrow.load_words(at, 4) + ptx_narrow.load_words(at, 4, 16)
            for index, (low, high) in enumerate(self.pairs):
                step, column = index // 2, index % 2
                latent[step][half + 2 * column] = ptx_narrow.bf16_pair_to_f16(_element_pair(words, low, high))
            word = ptx_narrow.load_words(address + Int64(LATENT * 2 + part * (SLICE_ROPE * 2) + self.lane % 4 * 4), 1)[0]
            rope.append(self._rope_query(word))
        return latent, rope

    def _rope_query(self, word):
        if self.config.record.rope == "e4m3":
            return ptx_narrow.bf16_pair_to_f16(word)
        return ptx_narrow.scale_bf16_pair(word, -self.shift) if self.shift else word

    # -------------------------------------------------------------- scores

    def scores(self, query, stage):
        """(partial scores [row tile][token tile][4] over this warp's slices of the depth, the chunk kept for PV)."""
        config = self.config
        loaded = [(self.latent(stage, part), self._load_rope(stage, part), self._group_scales(stage, part)) for part in self.parts]
        column = self._token_columns(stage)
        weights = self._value_weights(stage)
        sums = [[[Float32(0.0)] * 4 for _ in range(config.token_tiles)] for _ in range(config.row_tiles)]
        values = []
        for part, ((words, scales), _, group) in enumerate(loaded):
            # Scales of a whole slice apply to its own sums alone.
            fresh = [[[Float32(0.0)] * 4 for _ in range(config.token_tiles)] for _ in range(config.row_tiles)] if group is not None else sums
            values.append(self._add_latent(fresh, query, part, words, scales))
            if group is not None:
                for tile in range(config.row_tiles):
                    for token in range(config.token_tiles):
                        pairs = zip(fresh[tile][token], sums[tile][token], strict=True)
                        sums[tile][token] = [ptx.multiply_add(x, group[token][e % 2], y) for e, (x, y) in enumerate(pairs)]
        for tile in range(config.row_tiles):
            for token in range(config.token_tiles):
                latent = sums[tile][token]
                if self.scale is not None:
                    latent = [x * self.scale for x in latent]
                if column is not None:
                    latent = [x * column[token][e % 2] for e, x in enumerate(latent)]
                for part, (_, rope, _) in enumerate(loaded):
                    latent = self._add_rope(latent, query[tile][part][1], rope[token])
                sums[tile][token] = latent
        return sums, Chunk(values, weights)

    def _add_latent(self, sums, query, part, words, scales):
        """Adds one slice's products to `sums`; returns its decoded pairs [token tile][pair]."""
        config = self.config
        values = [[] for _ in range(config.token_tiles)]
        for index in range(len(words[0])):
            for token in range(config.token_tiles):
                decoded = self.decode(words[token], scales[token], index)
                values[token] += decoded
                first = index * len(decoded) // 2
                for step in range(len(decoded) // 2):
                    for tile in range(config.row_tiles):
                        operand = query[tile][part][0][first + step]
                        sums[tile][token] = ptx_narrow.mma_f16(sums[tile][token], operand, decoded[2 * step], decoded[2 * step + 1])
        return values

    def _load_rope(self, stage, part):
        """Rope operands of every token tile: (pair, fp32 scales of this lane's two columns or None)."""
        record, pitch = self.config.record, self.config.pitch
        row = stage + self.lane // 4 * pitch + record.rope_at
        found = []
        for token in range(self.config.token_tiles):
            if record.rope == "bf16":
                found.append((ptx_narrow.load_shared_words(row + part * (SLICE_ROPE * 2) + self.lane % 4 * 4, 1, token * 8 * pitch)[0], None))
            else:
                pair = ptx_narrow.load_shared_u16(row + part * SLICE_ROPE + self.lane % 4 * 2, token * 8 * pitch)
                found.append((pair, self._columns(stage, token, record.rope_scale_at)))
        return found

    def _columns(self, stage, token, offset):
        """fp32 at `offset` of the two tokens that are this lane's accumulator columns in a token tile."""
        pitch = self.config.pitch
        at = stage + self.lane % 4 * (2 * pitch) + offset
        return [ptx.load_shared_f32(at, 1, (token * 8 + e) * pitch)[0] for e in range(2)]

    def _add_rope(self, latent, query, rope):
        pair, scales = rope
        if scales is None:
            return ptx_narrow.mma_k8(latent, query, pair, kind="bf16")
        product = ptx_narrow.mma_k8([Float32(0.0)] * 4, query, ptx_narrow.e4m3_pair(pair), kind="f16")
        factors = [x * Float32(1.0 / self.unit) for x in scales]
        return [ptx.multiply_add(product[e], factors[e % 2], latent[e]) for e in range(4)]

    def _group_scales(self, stage, part):
        """fp32 scales of a slice's latents by token tile and column, where whole slices have one; else None."""
        return None

    def _token_columns(self, stage):
        """fp32 scales of a token's whole latent by token tile and column, where the record has them; else None."""
        return None

    def _value_weights(self, stage):
        """fp32 scales of this lane's own tokens [slice][token tile] that PV operands still lack."""
        return None

    # -------------------------------------------------------------- values

    def transpose(self, chunk):
        """PV operands [token tile][pair of all slices]: columns of the latent by lane / 4, tokens in pairs."""
        values = self.values(chunk)
        return [[ptx_narrow.transpose_pairs(word) for part in values for word in part[token]] for token in range(self.config.token_tiles)]

    def product(self, sums, weights, b0, b1):
        """One PV product in the type of the value operands."""
        return ptx_narrow.mma_f16(sums, weights, b0, b1)

    def pack(self, low, high):
        """Two probabilities in the type of the value operands."""
        return ptx_narrow.pack_f16(low, high)

    def load_probabilities(self, address):
        """P fragments [k16 step][row tile]; `address`: this lane's row for ldmatrix."""
        config = self.config
        return [
            [ptx.ldmatrix4(address, tile * 16 * config.probability_pitch + step * 32) for tile in range(config.row_tiles)]
            for step in range(config.token_tiles // 2)
        ]

    def accumulate(self, output, weights, values):
        """Adds P times the chunk's values to the accumulators [row tile][pair][4]."""
        config = self.config
        for step in range(config.token_tiles // 2):
            for pair in range(config.warp_pairs):
                for tile in range(config.row_tiles):
                    at = (tile * config.warp_pairs + pair) * 4
                    sums = self.product([output[at + e] for e in range(4)], weights[step][tile], values[2 * step][pair], values[2 * step + 1][pair])
                    for e in range(4):
                        output[at + e] = sums[e]

    def columns(self):
        """(pair, half) of a lane's 16 output elements of a slice, in their order in memory."""
        places = {element: (index, half) for index, pair in enumerate(self.pairs) for half, element in enumerate(pair)}
        return [places[element] for element in range(LANE_LATENT)]

    # -------------------------------------------------------------- per-token weights of the softmax

    def token_scales(self, stage, tokens):
        """Per-token scales (fp32) of the values of `tokens`, addresses in a chunk, where the record has them; else None."""
        return None


class Nvfp4Decoder(LatentDecoder):
    """E2M1 pairs under E4M3 group scales; static records (432 and 368) and the one with its own per-token scale."""

    @property
    def pairs(self):
        """Even nibbles of a word two apart, then odd ones."""
        return tuple((8 * word + low, 8 * word + high) for word in range(2) for low, high in ptx_narrow.E2M1_PAIRS)

    @property
    def shift(self):
        """E2M1 widened to E4M3 bytes reads as its value times 2^-6."""
        return _E2M1_SHIFT

    def latent(self, stage, part):
        """Words of this lane's group of every token, and their scales."""
        pitch, row = self.config.pitch, stage + self.lane // 4 * self.config.pitch
        at = row + part * (SLICE_LATENT // 2) + self.lane % 4 * (LANE_LATENT // 2)
        words = [ptx_narrow.load_shared_words(at, 2, token * 8 * pitch) for token in range(self.config.token_tiles)]
        group = row + self.config.record.scales_at + part * 4 + self.lane % 4
        codes = [ptx_narrow.load_shared_u8(group, token * 8 * pitch) for token in range(self.config.token_tiles)]
        return words, [ptx_narrow.e4m3_twice(code) for code in codes]

    def decode(self, words, scale, index):
        """Exact f16 pairs of one word."""
        return ptx_narrow.e2m1_octet(words[index], scale)

    def _token_columns(self, stage):
        record = self.config.record
        if record.token_scale_at is None:
            return None
        return [self._columns(stage, token, record.token_scale_at) for token in range(self.config.token_tiles)]

    def token_scales(self, stage, tokens):
        """The fp32 `s_t` of each token; None for static records."""
        record = self.config.record
        if record.token_scale_at is None:
            return None
        return [ptx.load_shared_f32(stage + token * self.config.pitch + record.token_scale_at)[0] for token in tokens]


class Fp8Decoder(LatentDecoder):
    """E4M3 latents under an fp32 scale for each group of 128: in QK the scale multiplies accumulators; for PV the value is rounded once, to bf16."""

    @property
    def pairs(self):
        """Neighbours."""
        return tuple((2 * index, 2 * index + 1) for index in range(LANE_PAIRS))

    @property
    def shift(self):
        """E4M3 reads as it is."""
        return 0

    def latent(self, stage, part):
        """Words of this lane's group of every token, and their scales."""
        pitch, tiles = self.config.pitch, self.config.token_tiles
        at = stage + self.lane // 4 * pitch + part * SLICE_LATENT + self.lane % 4 * LANE_LATENT
        return [ptx_narrow.load_shared_words(at, 4, token * 8 * pitch) for token in range(tiles)], [None] * tiles

    def decode(self, words, scale, index):
        """Exact f16 pairs of one word."""
        return ptx_narrow.e4m3_quad(words[index])

    def _group_offset(self, part):
        record = self.config.record
        return record.scales_at + part // (record.group // SLICE_LATENT) * 4

    def _group_scales(self, stage, part):
        return [self._columns(stage, token, self._group_offset(part)) for token in range(self.config.token_tiles)]

    def _value_weights(self, stage):
        row, pitch = stage + self.lane // 4 * self.config.pitch, self.config.pitch
        return [
            [ptx.load_shared_f32(row + self._group_offset(part), 1, token * 8 * pitch)[0] for token in range(self.config.token_tiles)]
            for part in self.parts
        ]

    def values(self, chunk):
        """Values times their group's scale, rounded once to bf16."""
        return [
            [[ptx_narrow.f16_pair_to_bf16(word, weight) for word in tile] for tile, weight in zip(part, weights, strict=True)]
            for part, weights in zip(chunk.values, chunk.weights, strict=True)
        ]

    def product(self, sums, weights, b0, b1):
        """bf16: the values are."""
        return ptx.mma_bf16(sums, weights, b0, b1)

    def pack(self, low, high):
        """bf16: the values are."""
        return ptx.pack_bf16(low, high)


def _element_pair(words, low, high):
    """Elements `low` and `high` of consecutive bf16 words as one pair."""
    if high == low + 1 and low % 2 == 0:
        return words[low // 2]
    return ptx_narrow.permute(words[low // 2], words[high // 2], 0x5410 if low % 2 == 0 else 0x7632)


def decoder_of(config, warp, lane, scale):
    """The decoder of the configuration's record."""
    kind = Nvfp4Decoder if config.record.latent == "e2m1" else Fp8Decoder
    return kind(config, warp, lane, scale)
