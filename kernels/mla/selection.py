"""Which 64-token chunks of a cache a query row attends: the opt-in strided selection, in plain integers.

Imports neither torch nor the compiler. The policy object applies it, the reference enumerates it, and the kernel's
arithmetic (`visibility`) is tested against it.
"""

from __future__ import annotations

from mlactl.kernels.errors import PlanError

SELECTION_TOKENS = 64
"""Tokens of one selectable chunk."""


def check_selection(stride: int, sink_chunks: int, recent_chunks: int) -> None:
    """Raises PlanError for numbers that select nothing sensible, naming the first."""
    if stride < 1:
        raise PlanError(f"stride must be at least 1, got {stride}")
    if sink_chunks < 0:
        raise PlanError(f"sink_chunks must be at least 0, got {sink_chunks}")
    if recent_chunks < 1:
        raise PlanError(f"recent_chunks must be at least 1, got {recent_chunks}: without a recent chunk a row would not see its own key")


def dynamic_sparse_chunk_indices(n: int, stride: int, sink_chunks: int, recent_chunks: int) -> tuple[int, ...]:
    """Chunks selected of `n`: the first `sink_chunks`, every `stride`-th from there on, the last `recent_chunks`.

    Sorted and unique; stride 1 selects all. (10, 3, 2, 2) gives 0, 1, 2, 5, 8, 9. Raises PlanError.
    """
    check_selection(stride, sink_chunks, recent_chunks)
    if n < 0:
        raise PlanError(f"chunks must be at least 0, got {n}")
    recent = max(n - recent_chunks, 0)
    chosen = {*range(min(sink_chunks, n)), *range(sink_chunks, recent, stride), *range(recent, n)}
    return tuple(sorted(chosen))
