"""Merges partial attention results by their log-sum-exp, as serving does across ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlactl.replay.errors import BadCapture

if TYPE_CHECKING:
    import torch

BASES = {"natural": 1.0, "2": math.log(2)}


def merge_results(outputs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], bases: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, H, V] and natural LSE [T, H] of shards, in fp32 (fp64 where they are): sum of exp(lse_r - lse) * output_r.

    A shard that saw nothing (LSE -inf) weighs nothing even where its output memory holds NaN; all empty gives 0 and -inf.
    Raises BadCapture for a base that is neither natural nor 2: normalisers 2 and 8 weigh .200/.800, read as base 2 .277/.723.
    """
    import torch

    for rank, base in enumerate(bases):
        if base not in BASES:
            raise BadCapture(f"shard {rank} declares LSE base {base!r}, it must say natural or 2 before it can be merged")
    dtype = torch.promote_types(torch.float32, outputs[0].dtype)
    stacked = torch.stack([lse.to(dtype) * BASES[base] for lse, base in zip(lses, bases, strict=True)])
    total = torch.logsumexp(stacked, dim=0)
    weights = torch.exp(stacked - torch.where(total == -math.inf, 0.0, total))
    merged = torch.zeros_like(outputs[0], dtype=dtype)
    for weight, output in zip(weights, outputs, strict=True):
        # Not 0 * output: the memory of an empty shard's output may hold NaN.
        merged += torch.where((weight > 0)[..., None], output.to(dtype), 0.0) * weight[..., None]
    return merged, total
