"""Record tables of sparse MLA caches: where one token's latent, scales and RoPE key lie in its bytes. Pure data, shared with the reference.

Offsets in bytes, little endian; docs/nvfp4.md draws them. The latent has 512 elements, the RoPE key 64.
"""

from __future__ import annotations

from dataclasses import dataclass

LATENT = 512
ROPE = 64
QUERY_WIDTH = LATENT + ROPE

E4M3_MAX = 448.0
E2M1_MAX = 6.0
NVFP4_MAX = E4M3_MAX * E2M1_MAX
"""Largest magnitude of an E2M1 value under an E4M3 group scale: 2,688."""


@dataclass(frozen=True, slots=True)
class SparseRecord:
    """One token of a sparse MLA cache.

    latent: "e2m1" (two a byte, low nibble first) or "e4m3"; group: latent elements under one scale; scales_at: offset of
    the group scales, E4M3 bytes for "e2m1" and fp32 for "e4m3"; rope: "bf16" or "e4m3"; rope_scale_at and token_scale_at:
    offsets of fp32 scales, None where the record has none; static: whether latents are divided by the layer's outer scale.
    """

    name: str
    title: str
    record_bytes: int
    latent: str
    group: int
    scales_at: int
    rope: str
    rope_at: int
    rope_scale_at: int | None = None
    token_scale_at: int | None = None
    static: bool = False

    @property
    def groups(self) -> int:
        """Group scales of one record."""
        return LATENT // self.group


SPARSE_RECORDS = {
    record.name: record
    for record in (
        SparseRecord("nvfp4_ds_mla_432", "nvfp4_ds_mla with BF16 RoPE (432 bytes)", 432, "e2m1", 16, 256, "bf16", 304, static=True),
        SparseRecord("nvfp4_ds_mla_368", "nvfp4_ds_mla with FP8 RoPE (368 bytes)", 368, "e2m1", 16, 256, "e4m3", 304, rope_scale_at=288, static=True),
        SparseRecord(
            "nvfp4_ds_mla_368_per_token",
            "nvfp4_ds_mla with FP8 RoPE and a per-token scale (368 bytes)",
            368,
            "e2m1",
            16,
            256,
            "e4m3",
            304,
            rope_scale_at=288,
            token_scale_at=292,
        ),
        SparseRecord("fp8_ds_mla", "fp8_ds_mla (656 bytes)", 656, "e4m3", 128, 512, "bf16", 528),
    )
}
"""Every sparse record by its name in compile facts."""


def sparse_record(name: str) -> SparseRecord:
    """The record of that name; raises KeyError naming the ones there are."""
    found = SPARSE_RECORDS.get(name)
    if found is None:
        raise KeyError(f"{name!r} is no sparse record; there are {', '.join(SPARSE_RECORDS)}")
    return found
