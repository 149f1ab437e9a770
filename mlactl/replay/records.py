"""KV record layouts as data, and one decoder for all of them.

The table restates docs/nvfp4.md: byte ranges, element types and scales of one token's record. A capture names its
layout; whatever reads a capture looks the layout up here, so a new record is a new row and no new code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlactl.errors import UsageError

if TYPE_CHECKING:
    import torch

ROPE_ELEMENTS = 64

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Value of each 4-bit code; the sign is the top bit."""


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """One token's record. Offsets and sizes are bytes; `latent` counts elements.

    `dense` records are tensors of their element type, `[pages, page_size, width]`; packed ones are uint8
    `[pages, page_size, record_bytes]`. `scale_mode` says where the scale of the latent comes from: `none`, `tensor` (one
    kv_scale), `group` (in the record), `static` (in the record, times the layer's outer latent_scale), `per_token` (both
    in the record).
    """

    name: str
    dtype: str
    scale_mode: str
    latent_type: str
    latent: int = 512
    latent_offset: int = 0
    group: int | None = None
    group_type: str = ""
    group_offset: int = 0
    rope_type: str = "bf16"
    rope_offset: int = 0
    rope_scale_offset: int | None = None
    token_scale_offset: int | None = None
    record_bytes: int | None = None

    @property
    def dense(self) -> bool:
        """Whether a record is a plain vector of one element type."""
        return self.record_bytes is None

    @property
    def takes_latent_scale(self) -> bool:
        """Whether the layer's outer scale restores the latent at read."""
        return self.scale_mode == "static"


RECORDS: Mapping[str, RecordLayout] = {
    layout.name: layout
    for layout in (
        RecordLayout("bf16", "bfloat16", "none", "bf16"),
        RecordLayout("fp8", "float8_e4m3fn", "tensor", "e4m3"),
        RecordLayout("fp8_ds_mla", "uint8", "group", "e4m3", group=128, group_type="fp32", group_offset=512, rope_offset=528, record_bytes=656),
        RecordLayout("nvfp4_ds_mla_432", "uint8", "static", "e2m1", group=16, group_type="e4m3", group_offset=256, rope_offset=304, record_bytes=432),
        RecordLayout(
            "nvfp4_ds_mla_368", "uint8", "static", "e2m1",
            group=16, group_type="e4m3", group_offset=256, rope_type="e4m3", rope_offset=304, rope_scale_offset=288, record_bytes=368,
        ),
        RecordLayout(
            "nvfp4_ds_mla_368_per_token", "uint8", "per_token", "e2m1",
            group=16, group_type="e4m3", group_offset=256, rope_type="e4m3", rope_offset=304, rope_scale_offset=288,
            token_scale_offset=292, record_bytes=368,
        ),
    )
}  # fmt: skip


def record_layout(name: str) -> RecordLayout:
    """The layout of that name; raises UsageError naming those there are."""
    found = RECORDS.get(name)
    if found is None:
        raise UsageError(f"unknown record layout {name!r}, known are {', '.join(RECORDS)}")
    return found


def latent_elements(layout: RecordLayout, width: int) -> int:
    """Latent elements (key and value) of a record: of dense ones, `width` elements less the RoPE key."""
    return width - ROPE_ELEMENTS if layout.dense else layout.latent


def decode(records: torch.Tensor, layout: RecordLayout, *, latent_scale: float = 1.0, kv_scale: float = 1.0, dtype: torch.dtype) -> torch.Tensor:
    """Decodes records `[..., width or record_bytes]` into keys `[..., latent + 64]` of `dtype`; values are the keys' latent part.

    Products of e2m1 and e4m3 are exact; each scale multiplies once, in `dtype`.
    """
    import torch

    if layout.dense:
        return records.to(dtype) * (
            torch.tensor(kv_scale, dtype=torch.float32, device=records.device).to(dtype) if layout.scale_mode == "tensor" else 1
        )
    latent = _latent(records, layout, dtype)
    scale = torch.tensor(latent_scale, dtype=torch.float32, device=records.device).to(dtype)
    if layout.takes_latent_scale:
        latent = latent * scale
    if layout.token_scale_offset is not None:
        latent = latent * _fp32(records, layout.token_scale_offset, 1).to(dtype)
    return torch.cat([latent, _rope(records, layout, dtype)], dim=-1)


def _latent(records: torch.Tensor, layout: RecordLayout, dtype: torch.dtype) -> torch.Tensor:
    import torch

    if layout.latent_type == "e2m1":
        packed = records[..., layout.latent_offset : layout.latent_offset + layout.latent // 2].long()
        values = torch.tensor(E2M1_VALUES, dtype=dtype, device=records.device)
        latent = values[torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)]  # the low nibble is the even index
    else:
        latent = _e4m3(records, layout.latent_offset, layout.latent).to(dtype)
    assert layout.group is not None
    groups = layout.latent // layout.group
    read = _fp32 if layout.group_type == "fp32" else _e4m3
    scales = read(records, layout.group_offset, groups).to(dtype)
    return latent * scales.repeat_interleave(layout.group, dim=-1)


def _rope(records: torch.Tensor, layout: RecordLayout, dtype: torch.dtype) -> torch.Tensor:
    import torch

    if layout.rope_type == "bf16":
        return records[..., layout.rope_offset : layout.rope_offset + 2 * ROPE_ELEMENTS].contiguous().view(torch.bfloat16).to(dtype)
    rope = _e4m3(records, layout.rope_offset, ROPE_ELEMENTS).to(dtype)
    assert layout.rope_scale_offset is not None
    return rope * _fp32(records, layout.rope_scale_offset, 1).to(dtype)


def _e4m3(records: torch.Tensor, offset: int, count: int) -> torch.Tensor:
    import torch

    return records[..., offset : offset + count].contiguous().view(torch.float8_e4m3fn).float()


def _fp32(records: torch.Tensor, offset: int, count: int) -> torch.Tensor:
    import torch

    return records[..., offset : offset + 4 * count].contiguous().view(torch.float32)
