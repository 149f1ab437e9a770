"""How far each attention row is from another, as one number: 1 and below passes every rule of the tolerance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlactl.replay.tolerances import Tolerance

if TYPE_CHECKING:
    import torch


def output_factors(actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance) -> torch.Tensor:
    """[rows, H] from [rows, H, latent]: the largest of element error, cosine and norm deviation over what is allowed; inf where not finite."""
    import torch

    ours, theirs = actual.double(), expected.double()
    error, magnitude = (ours - theirs).abs(), theirs.abs()
    largest = magnitude.amax(-1, keepdim=True)
    allowed = torch.maximum(magnitude * tolerance.rtol, (largest * tolerance.row).clamp_min(max(tolerance.atol, 1e-300)))
    factor = (error / allowed).amax(-1)
    norms = ours.norm(dim=-1), theirs.norm(dim=-1)
    same_zero = (norms[0] == 0) & (norms[1] == 0)
    if tolerance.cosine is not None:
        cosine = torch.where(same_zero, 1.0, (ours * theirs).sum(-1) / (norms[0] * norms[1]).clamp_min(1e-300))
        factor = torch.maximum(factor, (1 - cosine) / (1 - tolerance.cosine))
    if tolerance.norm is not None:
        deviation = torch.where(same_zero, 0.0, (norms[0] / norms[1].clamp_min(1e-300) - 1).abs())
        factor = torch.maximum(factor, deviation / tolerance.norm)
    return factor.nan_to_num(nan=float("inf"), posinf=float("inf"))


def lse_factors(actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance) -> torch.Tensor:
    """[rows, H]: LSE error over what is allowed; 0 where both are -inf, inf where one is or a NaN is."""
    import torch

    ours, theirs = actual.double(), expected.double()
    allowed = (theirs.abs() * tolerance.rtol).clamp_min(tolerance.atol)
    return torch.where(ours == theirs, 0.0, (ours - theirs).abs() / allowed).nan_to_num(nan=float("inf"), posinf=float("inf"))
