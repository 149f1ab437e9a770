"""The reference of a capture: attention in plain torch over the decoded records, in fp32 or fp64, on CPU or GPU.

Where the kernels' own reference covers the call's contract it is the one that runs; the contracts it does not have yet
(per-query lengths, windows, scaled dense records, some rows only) are computed here. A test holds
the two together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlactl.errors import EnvironmentUnfit, UsageError
from mlactl.kernels.mla.records import LATENT_ELEMENTS
from mlactl.replay.records import decode
from mlactl.replay.visible import seen

if TYPE_CHECKING:
    import torch

    from mlactl.replay.capture import Capture

DEVICES = ("auto", "cpu", "cuda")
_LOGITS = 1 << 24
"""Logits held at once."""


def device_for(asked: str) -> str:
    """`cpu` or `cuda`; `auto` takes the GPU where there is one. Raises UsageError, and EnvironmentUnfit for a GPU that is not there."""
    if asked not in DEVICES:
        raise UsageError(f"--device {asked} is not one of {', '.join(DEVICES)}", hint="--device auto takes the GPU where there is one")
    if asked == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if asked == "auto":
        return "cpu"
    raise EnvironmentUnfit("no CUDA device was found for --device cuda", hint="--device cpu runs the reference on the CPU")


def reference(capture: Capture, kind: str, *, device: str = "auto", rows: Sequence[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [rows, H, latent] and natural LSE [rows, H], in fp32 or fp64 as `kind` says, on the CPU."""
    import torch

    if kind not in ("fp32", "fp64"):
        raise UsageError(f"--reference {kind} is not one of fp32, fp64")
    dtype = torch.float32 if kind == "fp32" else torch.float64
    target = device_for(device)
    if rows is None and not capture.dense:
        return _sparse_reference(capture, dtype, target)
    if rows is None and _covered(capture):
        return _kernels_reference(capture, dtype, target)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # TF32 would cost the reference three digits
    try:
        return _own_reference(capture, dtype, target, list(range(capture.rows)) if rows is None else list(rows))
    finally:
        torch.set_float32_matmul_precision(precision)


def _own_reference(capture: Capture, dtype: torch.dtype, target: str, kept: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    output = torch.zeros(len(kept), capture.heads, capture.values, dtype=dtype)
    lse = torch.full((len(kept), capture.heads), float("-inf"), dtype=dtype)
    requests = capture.requests
    place = 0
    while place < len(kept):
        end = place
        while end < len(kept) and requests[kept[end]] == requests[kept[place]]:
            end += 1
        _request(capture, kept[place:end], dtype, target, output[place:end], lse[place:end])
        place = end
    return output, lse


def _covered(capture: Capture) -> bool:
    """Whether the kernels' reference has this contract: causal rows over unscaled dense pages, no window, one query type."""
    call = capture.call
    plain = call.window is None and call.record == "bf16" and call.q_scale == 1.0 and call.sparse is None
    return capture.dense and plain and "query_cache_seqlens" not in capture.tensors and int(capture.tensors["q"].shape[2]) in LATENT_ELEMENTS


def _sparse_reference(capture: Capture, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    from mlactl.kernels.mla.sparse_reference import sparse_mla_reference

    tensors, call = {name: tensor.to(device) for name, tensor in capture.tensors.items()}, capture.call
    output, lse = sparse_mla_reference(
        tensors["q"],
        tensors["kv_cache"],
        tensors["indices"],
        tensors["lengths"],
        record=call.record,
        sm_scale=call.sm_scale,
        latent_scale=call.latent_scale,
        dtype=dtype,
    )
    return output.cpu(), lse.cpu()


def _kernels_reference(capture: Capture, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    from mlactl.kernels.mla.reference import dense_mla

    output, lse = dense_mla(
        capture.tensors["q"].to(device),
        capture.tensors["kv_cache"].to(device),
        # Entries past a request's length are -1 here and never read.
        capture.tensors["page_table"].to(device),
        capture.tensors["cache_seqlens"].tolist(),
        capture.boundaries,
        capture.call.sm_scale,
        width=int(capture.tensors["q"].shape[2]),
        dtype=dtype,
    )
    return output.cpu(), lse.cpu()


def _request(capture: Capture, rows: Sequence[int], dtype: torch.dtype, device: str, output: torch.Tensor, lse: torch.Tensor) -> None:
    """Rows of one request: its records are decoded once, each row is masked to what it sees."""
    import torch

    call = capture.call
    if call.sparse is not None and len(rows) > 1:  # rows attend chunks of their own: nothing to share
        for place, row in enumerate(rows):
            _request(capture, [row], dtype, device, output[place : place + 1], lse[place : place + 1])
        return
    views = [view for row in rows if (view := seen(capture, row)) is not None]
    widest = max(views, key=lambda view: int(view.positions[-1]) + 1 if len(view.positions) else 0)
    first = min((int(view.positions[0]) for view in views if len(view.positions)), default=0)
    if not len(widest.positions):
        return
    if capture.dense and first < int(widest.positions[0]):
        narrow = min((view for view in views if len(view.positions)), key=lambda view: int(view.positions[0]))
        pages, offsets = (
            torch.cat([getattr(narrow, name)[: int(widest.positions[0]) - first], getattr(widest, name)]) for name in ("pages", "offsets")
        )
    else:
        pages, offsets = widest.pages, widest.offsets
    records = capture.tensors["kv_cache"][pages, offsets].to(device)
    keys = decode(records, capture.layout, latent_scale=call.latent_scale, kv_scale=call.kv_scale, dtype=dtype)
    values = keys[:, : capture.values]
    step = max(1, _LOGITS // (capture.heads * len(keys)))
    for start in range(0, len(rows), step):
        block = list(rows[start : start + step])
        query = capture.tensors["q"][block].to(device).to(dtype) * call.q_scale
        logits = query @ keys.T * call.sm_scale
        if capture.dense:
            # A selecting row is alone: all of its keys, and none between them, are at hand.
            spans = [(int(view.positions[0]) - first, len(view.positions)) if len(view.positions) else (0, 0) for view in views[start : start + step]]
            columns = torch.arange(len(keys), device=device)
            begin = torch.tensor([[span[0]] for span in spans], device=device)
            stop = torch.tensor([[sum(span)] for span in spans], device=device)
            hidden = (columns < begin) | (columns >= stop)
            logits.masked_fill_(hidden[:, None, :], float("-inf"))
        total = torch.logsumexp(logits, dim=-1)
        weights = torch.exp(logits - total[..., None]).nan_to_num_(0.0)  # a row that sees nothing: -inf less -inf
        output[start : start + step] = (weights @ values).cpu()
        lse[start : start + step] = total.cpu()
