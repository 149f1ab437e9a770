"""Writes examples/captures: one right capture, one with each planted fault. The same bytes every time.

    python scripts/make_example_captures.py [FOLDER]

Inputs come from a counter-based hash and not from a library's random numbers, which may change between releases; outputs
are the reference's with the fault planted in what the "kernel" read or did, rounded to bf16 as a kernel's output is.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from mlactl.kernels import registry
from mlactl.replay import capture as captures
from mlactl.replay.attention import attend, views, without
from mlactl.replay.capture import Capture
from mlactl.replay.header import CallHeader

PAGE = 16
VERSIONS = {"mlactl": "example"}
LATENT_SCALE = 0.0131


def uniform(name: str, *shape: int) -> torch.Tensor:
    """Numbers in [-1, 1) that depend on `name` and nothing else."""
    count = math.prod(shape)
    data = hashlib.shake_128(name.encode()).digest(4 * count)
    whole = torch.frombuffer(bytearray(data), dtype=torch.int32).double() / 2**31
    return whole.reshape(shape)


def normal(name: str, *shape: int) -> torch.Tensor:
    """Nearly normal numbers: twelve uniform ones added up."""
    return uniform(name, 12, *shape).sum(0) * math.sqrt(3 / 12)


def nvfp4_records(latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Packs latents [n, 512] (already divided by the outer scale) and RoPE keys [n, 64] as 432-byte records."""
    groups = latent.float().reshape(len(latent), 32, 16)
    scales = (groups.abs().amax(-1) / 6).clamp(max=448).to(torch.float8_e4m3fn)
    decoded = scales.float()[..., None]
    scaled = torch.where(decoded > 0, groups / decoded.clamp_min(1e-30), 0.0)
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = (scaled.abs()[..., None] - magnitudes).abs().argmin(-1)
    codes = (codes | torch.where(scaled < 0, 8, 0)).reshape(len(latent), 256, 2)
    packed = (codes[..., 0] | codes[..., 1] << 4).to(torch.uint8)
    padding = torch.zeros(len(latent), 16, dtype=torch.uint8)
    return torch.cat([packed, scales.view(torch.uint8), padding, rope.to(torch.bfloat16).contiguous().view(torch.uint8)], dim=1)


def dense_call() -> Capture:
    """Verify over bf16 pages: two requests of four rows, two heads, pages scattered in a large pool."""
    lengths, rows, heads = (20, 45), 4, 2
    counts = [-(-length // PAGE) for length in lengths]
    pages = sum(counts)
    kv = (normal("kv", pages, PAGE, 576) * 0.5).to(torch.bfloat16)
    order = [(3 * place + 2) % pages for place in range(pages)]  # 3 and the 5 pages share no divisor
    table = torch.full((2, max(counts)), -1, dtype=torch.int32)
    for request, count in enumerate(counts):
        start = sum(counts[:request])
        table[request, :count] = torch.tensor(order[start : start + count], dtype=torch.int32)
    tensors = {
        "q": (normal("q", 2 * rows, heads, 576) * 0.9).to(torch.bfloat16),
        "kv_cache": kv,
        "page_ids": torch.arange(pages) * 7919 + 91181,
        "page_table": table,
        "cache_seqlens": torch.tensor(lengths, dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, rows, 2 * rows], dtype=torch.int32),
    }
    spec = registry.DENSE_FORWARD.spec(
        tile="tok16", output="split", q_dtype="bf16", record="bf16", width=576, lengths="causal", selection="exact", window=False
    )
    header = CallHeader(
        kernel_id=spec.kernel_id,
        kernel_version=spec.version,
        facts=dict(spec.facts),
        mode="verify",
        record="bf16",
        scale_mode="none",
        page_size=PAGE,
        sm_scale=1 / math.sqrt(192),
        lse_base="natural",
        splits=3,
        profile="kimi-k3-tp8-dcp8-bf16",
    )
    return Capture("dense", header, tensors, versions=VERSIONS)


def sparse_call() -> Capture:
    """Sparse decode over 432-byte NVFP4 records: three rows, four heads, selected slots with holes, a real outer scale."""
    pages, rows, heads, top_k = 6, 3, 4, 64
    tokens = pages * PAGE
    latent = normal("latent", tokens, 512) * 0.5
    records = nvfp4_records(latent / LATENT_SCALE * 0.9, normal("rope", tokens, 64) * 0.5)
    order = uniform("selection", rows, tokens).argsort(dim=1)[:, :top_k].to(torch.int32)
    order[:, 5::9] = -1
    spec = registry.SPARSE_DECODE.spec(tile="heads16", output="split", q_dtype="bf16", record="nvfp4_ds_mla_432", latent_scale_identity=0)
    header = CallHeader(
        kernel_id=spec.kernel_id,
        kernel_version=spec.version,
        facts=dict(spec.facts),
        mode="decode",
        record="nvfp4_ds_mla_432",
        scale_mode="static",
        page_size=PAGE,
        sm_scale=1 / math.sqrt(192),
        lse_base="natural",
        latent_scale=LATENT_SCALE,
        splits=2,
        profile="glm-5.2-tp4-dcp4",
    )
    tensors = {
        "q": (normal("sparse q", rows, heads, 576) * 0.9).to(torch.bfloat16),
        "kv_cache": records.reshape(pages, PAGE, 432),
        "page_ids": torch.arange(pages) * 104729 + 91181,
        "indices": order,
        "lengths": torch.tensor([top_k, top_k - 7, top_k], dtype=torch.int32),
    }
    return Capture("sparse", header, tensors, versions=VERSIONS)


def result(capture: Capture) -> tuple[torch.Tensor, torch.Tensor]:
    """What a right kernel gives: bf16 output and natural LSE."""
    output, lse = attend(capture, range(capture.rows), torch.float64)
    return output.to(torch.bfloat16), lse.float()


def patched(capture: Capture, row: int, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A right result but for one row that saw `shift` keys more."""
    output, lse = result(capture)
    view = next(iter(views(capture, [row], torch.float64, shift=shift)))
    assert view is not None
    output[row], lse[row] = view.output.to(torch.bfloat16), view.lse.float()
    return output, lse


def dropped(capture: Capture, request: int, tokens: range) -> tuple[torch.Tensor, torch.Tensor]:
    """A right result but for one request whose merge lost one split of its keys."""
    output, lse = result(capture)
    rows = [row for row in range(capture.rows) if capture.requests[row] == request]
    for row, view in zip(rows, views(capture, rows, torch.float64, keep=without(tokens)), strict=True):
        assert view is not None
        output[row], lse[row] = view.output.to(torch.bfloat16), view.lse.float()
    return output, lse


def flipped(capture: Capture, page: int, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The result over KV in which the sign bits of one record's latents are flipped."""
    kv = capture.tensors["kv_cache"].clone()
    if capture.layout.dense:
        kv[page, offset, :512] = -kv[page, offset, :512]
    else:
        kv[page, offset, :256] ^= 0x88
    return result(replace(capture, tensors={**capture.tensors, "kv_cache": kv}))


def faults() -> dict[str, Capture]:
    """The captures by name."""
    dense, sparse = dense_call(), sparse_call()
    output, lse = result(dense)
    sparse_output, sparse_lse = result(sparse)
    identity = replace(sparse, call=msgspec.structs.replace(sparse.call, latent_scale=1.0))
    return {
        "dense-right": dense.with_result(output, lse),
        "dense-split-dropped": dense.with_result(*dropped(dense, 1, range(16, 32))),
        "dense-visible-length": dense.with_result(*patched(dense, 6, -1)),
        "sparse-lse-base": sparse.with_result(sparse_output, sparse_lse / math.log(2)),
        "sparse-identity-scale": sparse.with_result(*result(identity)),
        "sparse-record-flipped": sparse.with_result(*flipped(sparse, 2, 9)),
    }


def write(folder: Path) -> None:
    """Replaces the folder by the captures. Their index would hold the time of writing, so it is left out."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, made in faults().items():
        captures.save(made, folder, name)
    (folder / "index.jsonl").unlink()


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent / "examples" / "captures")
