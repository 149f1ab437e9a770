"""Small attention calls for tests: seeded, and shaped so that every row, head and page matters."""

import math

import torch

from mlactl.kernels import registry
from mlactl.replay.capture import Capture
from mlactl.replay.header import CallHeader, Parallel

SM_SCALE = 1 / math.sqrt(192)


def dense(
    lengths=(20, 45),
    rows=4,
    heads=2,
    page=16,
    seed=0,
    parallel=None,
    own=None,
    window=None,
    mode="verify",
    record="bf16",
    lse_base="natural",
    **changes,
) -> Capture:
    """Dense call; `own` gives per-query lengths."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // page) for length in lengths]
    pages = max(1, sum(counts))
    order = torch.randperm(pages, generator=generator)
    table = torch.full((len(lengths), max([1, *counts])), -1, dtype=torch.int32)
    for request, count in enumerate(counts):
        table[request, :count] = order[sum(counts[:request]) : sum(counts[: request + 1])].to(torch.int32)
    kv = torch.randn(pages, page, 576, generator=generator) * 0.5
    tensors = {
        "q": torch.randn(len(lengths) * rows, heads, 576, generator=generator).to(torch.bfloat16),
        "kv_cache": kv.to(torch.bfloat16) if record == "bf16" else kv.to(torch.float8_e4m3fn),
        "page_ids": torch.arange(pages) * 10 + 7,
        "page_table": table,
        "cache_seqlens": torch.tensor(lengths, dtype=torch.int32),
        "cu_seqlens_q": torch.arange(len(lengths) + 1, dtype=torch.int32) * rows,
    }
    if own is not None:
        tensors["query_cache_seqlens"] = torch.tensor(own, dtype=torch.int32)
    facts = dict(
        registry.DENSE_FORWARD.spec(
            tile="tok16",
            output="split",
            q_dtype="bf16",
            record=record,
            width=576,
            lengths="causal" if own is None else "per_query",
            selection="exact" if changes.get("sparse") is None else "sparse",
            window=window is not None,
        ).facts
    )
    header = CallHeader(
        kernel_id=registry.DENSE_FORWARD.kernel_id,
        kernel_version=5,
        facts=facts,
        mode=mode,
        record=record,
        scale_mode="none" if record == "bf16" else "tensor",
        page_size=page,
        sm_scale=SM_SCALE,
        lse_base=lse_base,
        window=window,
        parallel=parallel or Parallel(),
        **changes,
    )
    return Capture("call", header, tensors, versions={"mlactl": "test"})


def brute(capture: Capture, keys_of_row) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 attention, one row and key list at a time, without any code of the project: `keys_of_row(row)` gives [n, width] keys."""
    outputs, totals = [], []
    for row in range(capture.rows):
        keys = keys_of_row(row).double()
        logits = capture.tensors["q"][row].double() @ keys.T * capture.call.sm_scale
        top = logits.amax(1, keepdim=True) if len(keys) else logits.sum(1, keepdim=True)
        weights = torch.exp(logits - top)
        outputs.append(
            weights @ keys[:, :-64] / weights.sum(1, keepdim=True) if len(keys) else torch.zeros(capture.heads, keys.shape[1] - 64).double()
        )
        totals.append(weights.sum(1).log() + top[:, 0] if len(keys) else torch.full((capture.heads,), -math.inf).double())
    return torch.stack(outputs), torch.stack(totals)


def dense_keys(capture: Capture, visible):
    """Keys of each row of a dense bf16 call by walking its page table token by token."""

    def keys(row):
        request = capture.requests[row]
        page = capture.call.page_size
        table = capture.tensors["page_table"][request].tolist()
        rows = [capture.tensors["kv_cache"][table[token // page], token % page] for token in range(visible(row))]
        return torch.stack(rows) if rows else capture.tensors["kv_cache"][0, :0]

    return keys


def finished(capture: Capture) -> Capture:
    """The call with the right result, as a kernel would round it."""
    from mlactl.replay import oracle

    output, lse = oracle.reference(capture, "fp64", device="cpu")
    return capture.with_result(output.to(torch.bfloat16), lse.float())
