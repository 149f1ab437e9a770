"""How far each attention row is from another, as one number: 1 and below passes every rule of the tolerance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlactl.replay.tally import cosine_and_norm
from mlactl.replay.tolerances import Tolerance

if TYPE_CHECKING:
    import torch


def output_factors(actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance, *, allow_nan: bool = False) -> torch.Tensor:
    """fp64 [rows, H] from [rows, H, latent]: the largest of element error, cosine and norm deviation over what is allowed.

    Infinite where something is not finite on one side only, or NaN on both without `allow_nan`: compare's verdict on each row.
    """
    import torch

    error, expected_values, unfit, values = _finite(actual, expected, allow_nan=allow_nan)
    magnitude = expected_values.abs()
    floor = (magnitude.amax(-1, keepdim=True) * tolerance.row).clamp_min(tolerance.atol)
    factor = _over(error, torch.maximum(magnitude * tolerance.rtol, floor)).amax(-1)
    cosine, norm_ratio = cosine_and_norm(values, expected_values)
    if tolerance.cosine is not None:
        factor = torch.maximum(factor, (1 - cosine) / max(1 - tolerance.cosine, 1e-300))
    if tolerance.norm is not None:
        factor = torch.maximum(factor, (norm_ratio - 1).abs() / max(tolerance.norm, 1e-300))
    return torch.where(unfit.any(-1), float("inf"), factor)


def lse_factors(actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance, *, allow_nan: bool = False) -> torch.Tensor:
    """fp64 [rows, H]: LSE error over what is allowed; 0 where both are the same infinity, infinite where one is or a NaN is."""
    import torch

    error, expected_values, unfit, _ = _finite(actual, expected, allow_nan=allow_nan)
    factor = _over(error, (expected_values.abs() * tolerance.rtol).clamp_min(tolerance.atol))
    return torch.where(unfit, float("inf"), factor)


def _finite(actual: torch.Tensor, expected: torch.Tensor, *, allow_nan: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """|error|, expected values, which elements no value speaks for, and actual values; all fp64, 0 where either side is not finite."""
    ours, theirs = actual.double(), expected.double()
    comparable = ours.isfinite() & theirs.isfinite()
    unfit = ~comparable & ~(ours.isinf() & (ours == theirs))
    if allow_nan:
        unfit &= ~(ours.isnan() & theirs.isnan())
    ours, theirs = ours.where(comparable, 0.0), theirs.where(comparable, 0.0)
    return (ours - theirs).abs(), theirs, unfit, ours


def _over(error: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.where(error == 0, 0.0, error / allowed)
