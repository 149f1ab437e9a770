"""Sparse MLA in plain torch: what the kernels are measured against. Independent of their code, it shares only the record tables."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mlactl.kernels.mla.quantise import dequantise


def sparse_mla_reference(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    lengths: Tensor,
    *,
    record: str,
    sm_scale: float,
    latent_scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Output [T, H, 512] and natural-log LSE [T, H] of attention over selected slots, both in `dtype` (fp32 or fp64).

    q: [T, H, 576]; kv_cache: uint8 [pages, page_size, bytes] of `record` (bf16 records as bytes too); indices: [T, top_k]
    integers, slot = page * page_size + offset, of which the first lengths[i] count in row i; a negative one is skipped, a
    repeated one counts each time. A row that sees nothing has output 0 and LSE -inf.
    """
    pool = kv_cache.flatten(0, 1)
    output = torch.zeros((*q.shape[:2], 512), dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, dtype=dtype, device=q.device)
    for row in range(q.shape[0]):
        count = min(max(int(lengths[row]), 0), indices.shape[1])
        slots = indices[row, :count]
        slots = slots[slots >= 0].long()
        if slots.numel() == 0:
            continue
        keys = dequantise(record, pool[slots], latent_scale=latent_scale, dtype=dtype)
        logits = q[row].to(dtype) @ keys.T * sm_scale
        lse[row] = torch.logsumexp(logits, dim=-1)
        output[row] = torch.softmax(logits, dim=-1) @ keys[:, :512]
    return output, lse
