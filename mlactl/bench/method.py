"""The method in numbers and in words, for whoever times, records or explains. Imports nothing."""

from __future__ import annotations

FLUSH_BYTES = 256 << 20
"""Written between replays, so that each finds L2 full of dirty lines that are not its own."""

WARM_ROUNDS = 3
"""Rounds whose samples are thrown away."""

MIN_SAMPLES = 21
"""Fewer samples have no median worth printing."""


def method(samples: int) -> str:
    """One line for records."""
    return f"CUDA-graph replay, {FLUSH_BYTES >> 20} MiB written between replays, median of {samples}, arms in rotated order, gate before timing"
