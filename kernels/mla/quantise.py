"""Writing and reading KV-cache records in plain torch, exact to the bit: the quantiser, the dequantiser and the cache writer.

Layouts and rounding are those of docs/nvfp4.md; the record tables are shared with the kernels, the arithmetic is not. Runs
on CPU and GPU. Reads and writes keep the last dimension for one record: latents [..., 512], RoPE keys [..., 64], records
uint8 [..., bytes].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mlactl.kernels.errors import BindError
from mlactl.kernels.mla.latent_scale import float32_scale
from mlactl.kernels.mla.sparse_records import E4M3_MAX, LATENT, NVFP4_MAX, ROPE, SPARSE_RECORDS, SparseRecord

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The value of each of the 16 E2M1 codes; the sign is the top bit."""

DENSE_RECORDS = {"bf16": 2 * (LATENT + ROPE), "fp8": LATENT + ROPE}
"""Bytes of the records of dense caches that this module also writes and reads."""

# Where rounding passes from one magnitude to the next, and whether a tie at that place goes up, to an even code.
_E2M1_STEPS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def e4m3_value(code: int) -> float:
    """The value of one E4M3 "fn" code: bias 7, subnormals, no infinities, 0x7F and 0xFF are NaN."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


E4M3_VALUES = tuple(e4m3_value(code) for code in range(256))
"""The value of each of the 256 E4M3 codes."""


def record_bytes(record: str) -> int:
    """Bytes of one token in the named record, dense ones included; raises BindError for an unknown name."""
    if record in DENSE_RECORDS:
        return DENSE_RECORDS[record]
    return _sparse(record).record_bytes


# ------------------------------------------------------------------ codes


def e2m1_encode(values: Tensor) -> Tensor:
    """E2M1 codes (uint8, 0 to 15) of fp32 values: nearest, ties to even, saturating at 6; the sign of zero is kept."""
    magnitude = values.abs()
    codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for place, tie_up in _E2M1_STEPS:
        codes += ((magnitude >= place) if tie_up else (magnitude > place)).to(torch.uint8)
    return codes | (torch.signbit(values).to(torch.uint8) << 3)


def e4m3_encode(values: Tensor) -> Tensor:
    """E4M3 codes (uint8) of fp32 values: clamped to +-448, nearest, ties to even."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def _table(values: tuple[float, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device)


def e2m1_decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of E2M1 codes (uint8, 0 to 15)."""
    return _table(E2M1_VALUES, codes, dtype)[codes.long()]


def e4m3_decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of E4M3 codes (uint8)."""
    return _table(E4M3_VALUES, codes, dtype)[codes.long()]


def _split(values: Tensor, groups: int, size: int) -> Tensor:
    """[..., groups * size] as [..., groups, size]."""
    return values.reshape(*values.shape[:-1], groups, size)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """[..., n] bytes to [..., 2n] codes, the low nibble of each byte first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def pack_nibbles(codes: Tensor) -> Tensor:
    """[..., 2n] codes to [..., n] bytes, even indices in the low nibbles."""
    pairs = _split(codes, codes.shape[-1] // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


# ------------------------------------------------------------------ write


def quantise(record: str, latent: Tensor, rope: Tensor, *, latent_scale: float = 1.0, kv_scale: float = 1.0) -> Tensor:
    """Records uint8 [..., bytes] of latents [..., 512] and RoPE keys [..., 64] of any float type.

    latent_scale: the outer scale s_l that static NVFP4 latents are divided by; kv_scale: what dense E4M3 records are divided
    by. Raises BindError for a shape that does not fit, NaN or infinite input (naming the first), and a scale that the record
    does not take.
    """
    if latent.shape[-1] != LATENT or rope.shape[-1] != ROPE or latent.shape[:-1] != rope.shape[:-1]:
        raise BindError(
            f"latent {list(latent.shape)} and rope {list(rope.shape)}, expected [..., {LATENT}] and [..., {ROPE}] with equal leading dimensions"
        )
    for name, tensor in (("latent", latent), ("rope", rope)):
        bad = ~torch.isfinite(tensor)
        if bool(bad.any()):
            at = [int(i) for i in bad.nonzero()[0]]
            raise BindError(f"{name}{at} is {float(tensor[tuple(at)])}; a cache record holds finite numbers only")
    scale = float32_scale(latent_scale, "latent_scale")
    divisor = float32_scale(kv_scale, "kv_scale")
    if divisor != 1.0 and record != "fp8":
        raise BindError(f"kv_scale {kv_scale}: only fp8 records have one, not {record}")
    if scale != 1.0 and not (record in SPARSE_RECORDS and SPARSE_RECORDS[record].static):
        raise BindError(f"latent_scale {latent_scale}: {record} records take 1.0 only")
    values, keys = latent.float(), rope.float()
    if record == "bf16":
        return torch.cat((latent, rope), dim=-1).to(torch.bfloat16).contiguous().view(torch.uint8)
    if record == "fp8":
        return e4m3_encode(torch.cat((values, keys), dim=-1) / divisor)
    table = _sparse(record)
    out = torch.zeros((*latent.shape[:-1], table.record_bytes), dtype=torch.uint8, device=latent.device)
    if table.static:
        values = values / scale
    if table.token_scale_at is not None:
        token = _amax(values, NVFP4_MAX)
        values = values / token
        _put_f32(out, table.token_scale_at, token)
    (_write_e2m1 if table.latent == "e2m1" else _write_e4m3)(out, table, values)
    if table.rope == "bf16":
        out[..., table.rope_at :] = rope.to(torch.bfloat16).contiguous().view(torch.uint8)
    else:
        assert table.rope_scale_at is not None
        rope_scale = _amax(keys, E4M3_MAX)
        _put_f32(out, table.rope_scale_at, rope_scale)
        out[..., table.rope_at :] = e4m3_encode(keys / rope_scale)
    return out


def _write_e2m1(out: Tensor, table: SparseRecord, values: Tensor) -> None:
    groups = _split(values, table.groups, table.group)
    codes = e4m3_encode(groups.abs().amax(dim=-1) / 6.0)
    decoded = e4m3_decode(codes).unsqueeze(-1)
    # A scale that rounds to 0 leaves nothing to divide by: its group is zeros, signs included.
    packed = torch.where(decoded == 0.0, torch.zeros_like(codes).unsqueeze(-1), e2m1_encode(groups / torch.where(decoded == 0.0, 1.0, decoded)))
    out[..., : LATENT // 2] = pack_nibbles(packed.flatten(-2))
    out[..., table.scales_at : table.scales_at + table.groups] = codes


def _write_e4m3(out: Tensor, table: SparseRecord, values: Tensor) -> None:
    groups = _split(values, table.groups, table.group)
    scales = _amax(groups, E4M3_MAX)
    out[..., :LATENT] = e4m3_encode(groups / scales).flatten(-2)
    _put_f32(out, table.scales_at, scales.squeeze(-1))


def _amax(values: Tensor, top: float) -> Tensor:
    """The largest magnitude over the last dimension (kept), divided by `top`; 1.0 where that is 0."""
    scale = values.abs().amax(dim=-1, keepdim=True) / top
    return torch.where(scale == 0.0, 1.0, scale)


def _put_f32(out: Tensor, offset: int, values: Tensor) -> None:
    out[..., offset : offset + 4 * values.shape[-1]] = values.contiguous().view(torch.uint8)


def write_cache(record: str, cache: Tensor, slots: Tensor, latent: Tensor, rope: Tensor, *, latent_scale: float = 1.0, kv_scale: float = 1.0) -> None:
    """Writes tokens into a paged cache uint8 [pages, page_size, bytes]: token i into slot = page * page_size + offset; -1 is skipped.

    latent [n, 512], rope [n, 64], slots [n] integers. Raises BindError for a cache of another record (by name) or a slot
    outside the pool (naming the first), and whatever `quantise` raises.
    """
    if cache.dtype != torch.uint8 or cache.dim() != 3:
        raise BindError(f"kv_cache: {cache.dtype} with {cache.dim()} dimensions, expected uint8 [pages, page_size, bytes]")
    if cache.shape[-1] != record_bytes(record):
        raise BindError(f"kv_cache: records of {cache.shape[-1]} bytes, {record} takes {record_bytes(record)}")
    pool = cache.shape[0] * cache.shape[1]
    outside = (slots < -1) | (slots >= pool)
    if bool(outside.any()):
        at = int(outside.nonzero()[0])
        raise BindError(f"slots[{at}] is {int(slots[at])}, the cache has slots 0 to {pool - 1} (-1 skips a token)")
    kept = slots >= 0
    place = slots[kept].long()
    records = quantise(record, latent[kept], rope[kept], latent_scale=latent_scale, kv_scale=kv_scale)
    cache[place // cache.shape[1], place % cache.shape[1]] = records


# ------------------------------------------------------------------ read


def dequantise(record: str, data: Tensor, *, latent_scale: float = 1.0, kv_scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Keys [..., 576] of records uint8 [..., bytes]: the latent, times the outer scale where the record takes one, then the RoPE key.

    With fp32 the product of codes is exact and the outer scale rounds once; fp64 rounds nowhere.
    """
    scale = float32_scale(latent_scale, "latent_scale")
    divisor = float32_scale(kv_scale, "kv_scale")
    if data.dtype != torch.uint8 or data.shape[-1] != record_bytes(record):
        raise BindError(f"records: {data.dtype} of {data.shape[-1]}, {record} takes {record_bytes(record)} uint8 bytes")
    if record == "bf16":
        return data.contiguous().view(torch.bfloat16).to(dtype)
    if record == "fp8":
        return e4m3_decode(data, dtype) * divisor
    table = _sparse(record)
    latent = (_read_e2m1 if table.latent == "e2m1" else _read_e4m3)(data, table, dtype)
    if table.static and scale != 1.0:
        latent = latent * scale
    elif scale != 1.0:
        raise BindError(f"latent_scale {latent_scale}: {record} records take 1.0 only")
    if table.token_scale_at is not None:
        latent = latent * _get_f32(data, table.token_scale_at, 1, dtype)
    if table.rope == "bf16":
        rope = data[..., table.rope_at :].contiguous().view(torch.bfloat16).to(dtype)
    else:
        assert table.rope_scale_at is not None
        rope = e4m3_decode(data[..., table.rope_at :], dtype) * _get_f32(data, table.rope_scale_at, 1, dtype)
    return torch.cat((latent, rope), dim=-1)


def _read_e2m1(data: Tensor, table: SparseRecord, dtype: torch.dtype) -> Tensor:
    values = _split(e2m1_decode(unpack_nibbles(data[..., : LATENT // 2]), dtype), table.groups, table.group)
    scales = e4m3_decode(data[..., table.scales_at : table.scales_at + table.groups], dtype)
    return (values * scales.unsqueeze(-1)).flatten(-2)


def _read_e4m3(data: Tensor, table: SparseRecord, dtype: torch.dtype) -> Tensor:
    values = _split(e4m3_decode(data[..., :LATENT], dtype), table.groups, table.group)
    return (values * _get_f32(data, table.scales_at, table.groups, dtype).unsqueeze(-1)).flatten(-2)


def _get_f32(data: Tensor, offset: int, count: int, dtype: torch.dtype) -> Tensor:
    return data[..., offset : offset + 4 * count].contiguous().view(torch.float32).to(dtype)


def _sparse(record: str) -> SparseRecord:
    found = SPARSE_RECORDS.get(record)
    if found is None:
        raise BindError(f"{record!r} is no cache record; there are {', '.join((*DENSE_RECORDS, *SPARSE_RECORDS))}")
    return found
