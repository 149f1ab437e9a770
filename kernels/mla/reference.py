"""What the dense MLA kernels compute, in plain torch: one function, readable in one sitting, on any device.

Independent of the kernels' code; shares only the record tables and the definition of the sparse selection. Accumulates in
fp32, or in fp64 on request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mlactl.kernels.mla.policy import SparsePolicy
from mlactl.kernels.mla.records import LATENT_ELEMENTS
from mlactl.kernels.mla.selection import SELECTION_TOKENS


def visible_keys(cache_length: int, query_rows: int, row: int) -> int:
    """Keys that query row `row` of a request with `query_rows` rows sees: right-aligned, clamped to [0, cache_length]."""
    return min(max(cache_length - query_rows + row + 1, 0), cache_length)


def attended_keys(visible: int, window: int | None, sparse: SparsePolicy | None, rows: int) -> list[int]:
    """Keys that a row which sees `visible` keys attends: the last `window` of them, or those of its selected chunks."""
    keys = range(0 if window is None else max(visible - window, 0), visible)
    if sparse is None:
        return list(keys)
    return [key for chunk in sparse.chunks(visible, rows) for key in range(chunk * SELECTION_TOKENS, min((chunk + 1) * SELECTION_TOKENS, visible))]


def dense_mla(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    cache_seqlens: Sequence[int],
    cu_seqlens_q: Sequence[int],
    sm_scale: float,
    *,
    width: int = 576,
    dtype: torch.dtype = torch.float32,
    query_cache_seqlens: Sequence[int] | None = None,
    window: int | None = None,
    sparse: SparsePolicy | None = None,
    sparse_rows: int = 1,
    kv_scale: float = 1.0,
    q_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense MLA, row by row; returns (output, lse) in `dtype`, torch.float32 or torch.float64.

    A row sees keys by right-aligned causal arithmetic or, with `query_cache_seqlens` (one a row), as many as its own length
    says, clamped to its request's; of those it attends the last `window`, or the chunks that `sparse` selects for a plan of
    `sparse_rows` rows a request. `kv_scale` and `q_scale` multiply E4M3 elements.

    q: [total_q, H, width]; kv_cache: [pages, page_size, >= width]; page_table: [requests, entries] ints;
    cache_seqlens: one length a request; cu_seqlens_q: requests + 1 row boundaries.
    output: [total_q, H, latent]; lse: [total_q, H], natural logarithm. A row that sees nothing: output 0, LSE -inf, as
    do rows past the last boundary. TF32 is off inside: it would cost the reference three digits.
    """
    latent, page_size = LATENT_ELEMENTS[width], kv_cache.shape[1]
    output = torch.zeros(*q.shape[:2], latent, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, dtype=dtype, device=q.device)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        for request, length in enumerate(cache_seqlens):
            first, last = cu_seqlens_q[request], cu_seqlens_q[request + 1]
            if length <= 0 or last <= first:
                continue
            pages = page_table[request, : -(-length // page_size)].long()
            keys = kv_cache[pages, :, :width].reshape(-1, width)[:length].to(dtype) * kv_scale
            for row in range(last - first):
                if query_cache_seqlens is None:
                    seen = visible_keys(length, last - first, row)
                else:
                    seen = min(max(int(query_cache_seqlens[first + row]), 0), length)
                if seen == 0:
                    continue
                attended = keys[attended_keys(seen, window, sparse, sparse_rows)] if window is not None or sparse is not None else keys[:seen]
                logits = (q[first + row].to(dtype) * q_scale) @ attended.T * sm_scale
                lse[first + row] = torch.logsumexp(logits, dim=-1)
                output[first + row] = torch.softmax(logits, dim=-1) @ attended[:, :latent]
    finally:
        torch.set_float32_matmul_precision(precision)
    return output, lse
