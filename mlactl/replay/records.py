"""KV record layouts as a capture names them. Bytes, groups and scales of packed records are in the kernels' record tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlactl.errors import UsageError
from mlactl.kernels.mla.records import ROPE_ELEMENTS
from mlactl.kernels.mla.sparse_records import LATENT, SPARSE_RECORDS, SparseRecord

if TYPE_CHECKING:
    import torch

__all__ = ["RECORDS", "ROPE_ELEMENTS", "RecordLayout", "decode", "latent_elements", "record_layout"]


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """One token's record, as far as reading a capture needs it.

    Dense records (`record_bytes` None) are tensors of `dtype`, `[pages, page_size, width]`; packed ones are uint8
    `[pages, page_size, record_bytes]`. `scale_mode` says where the scale of the latent comes from: `none`, `tensor` (one
    kv_scale), `group` (in the record), `static` (in the record, times the layer's outer latent_scale), `per_token` (both
    in the record).
    """

    name: str
    dtype: str
    scale_mode: str
    latent_type: str
    latent: int = LATENT
    record_bytes: int | None = None

    @property
    def dense(self) -> bool:
        """Whether a record is a plain vector of one element type."""
        return self.record_bytes is None

    @property
    def takes_latent_scale(self) -> bool:
        """Whether the layer's outer scale restores the latent at read."""
        return self.scale_mode == "static"


def _packed(record: SparseRecord) -> RecordLayout:
    mode = "static" if record.static else "per_token" if record.token_scale_at is not None else "group"
    return RecordLayout(record.name, "uint8", mode, record.latent, record_bytes=record.record_bytes)


RECORDS: Mapping[str, RecordLayout] = {
    "bf16": RecordLayout("bf16", "bfloat16", "none", "bf16"),
    "fp8": RecordLayout("fp8", "float8_e4m3fn", "tensor", "e4m3"),
    **{name: _packed(record) for name, record in SPARSE_RECORDS.items()},
}


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
    """Decodes records `[..., width or record_bytes]` into keys `[..., latent + 64]` of `dtype`; values are the keys' latent part."""
    import torch

    from mlactl.kernels.mla.quantise import dequantise

    if not layout.dense:
        return dequantise(layout.name, records, latent_scale=latent_scale, dtype=dtype)
    keys = records.to(dtype)
    return keys * torch.tensor(kv_scale, dtype=torch.float32).to(dtype) if layout.scale_mode == "tensor" else keys
