"""The correctness gate: what every kernel result must pass, row by row, before it is timed or believed.

Cosine alone cannot see a dropped scale: at 0.9 it is still 0.9999955 while the output is 11% too large. Hence the norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bounds of the gate. cosine: least; norm: largest |norm ratio - 1|; peak: largest |error| as a share of the row's
    largest |reference|; lse: largest |LSE error| as a share of max(1, |reference|)."""

    cosine: float
    norm: float = 0.005
    peak: float = 0.01
    lse: float = 2e-5


TOLERANCES = {"bf16": Tolerance(cosine=0.9999), "fp8": Tolerance(cosine=0.9995), "nvfp4": Tolerance(cosine=0.9995)}
"""By kind of KV record; every quantised sparse record counts as nvfp4."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Worst values over all rows; `failures` names each bound that was broken, with the first row and both values."""

    rows: int
    cosine: float
    norm: float
    peak: float
    lse: float
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every row is inside every bound."""
        return not self.failures


def judge(output: torch.Tensor, lse: torch.Tensor, reference: torch.Tensor, reference_lse: torch.Tensor, tolerance: Tolerance) -> Verdict:
    """Compares [rows, H, latent] and [rows, H] with the reference; raises ValueError when there is nothing to compare.

    Rows that see nothing must be exactly 0 and -inf. NaN anywhere fails.
    """
    if output.shape != reference.shape or lse.shape != reference_lse.shape or not output.numel():
        raise ValueError(f"nothing to compare: output {tuple(output.shape)}, reference {tuple(reference.shape)}, LSE {tuple(lse.shape)}")
    rows = reference_lse.numel()
    found, expected = output.reshape(rows, -1).double(), reference.reshape(rows, -1).double()
    found_lse, expected_lse = lse.reshape(rows).double(), reference_lse.reshape(rows).double()
    blind = torch.isneginf(expected_lse)
    norm, expected_norm = found.norm(dim=1), expected.norm(dim=1)
    cosine = (found * expected).sum(1) / (norm * expected_norm)
    ratio = (norm / expected_norm - 1).abs()
    peak = (found - expected).abs().amax(1) / expected.abs().amax(1)
    lse_error = (found_lse - expected_lse).abs() / expected_lse.abs().clamp(min=1)
    zero = (found == 0).all(1) & torch.isneginf(found_lse)
    failures = []
    # Written so that NaN fails: a comparison with NaN is False.
    for name, good, value, bound in (
        ("cosine", cosine >= tolerance.cosine, cosine, tolerance.cosine),
        ("norm", ratio <= tolerance.norm, ratio, tolerance.norm),
        ("peak", peak <= tolerance.peak, peak, tolerance.peak),
        ("lse", lse_error <= tolerance.lse, lse_error, tolerance.lse),
    ):
        bad = ~good & ~blind
        if bad.any():
            row = int(bad.nonzero()[0, 0])
            failures.append(f"{name}: {int(bad.sum())} of {rows} rows, first {row}: {float(value[row]):.3g} against {bound:g}")
    bad = blind & ~zero
    if bad.any():
        failures.append(f"blind: {int(bad.sum())} rows that see nothing are not exactly 0 and -inf, first {int(bad.nonzero()[0, 0])}")
    sees = ~blind
    worst = [
        float(getattr(values[sees], kind)()) if sees.any() else 0.0
        for values, kind in ((cosine, "min"), (ratio, "max"), (peak, "max"), (lse_error, "max"))
    ]
    return Verdict(rows, worst[0], worst[1], worst[2], worst[3], tuple(failures))
