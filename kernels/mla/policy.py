"""The one place that decides tiles and splits: planner, binding, kernel builder, reference and benchmarks all read it.

Imports neither torch nor the compiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlactl.kernels import registry
from mlactl.kernels.spec import CompileSpec

if TYPE_CHECKING:
    from mlactl.kernels.envelope import DenseEnvelope

MERGE_GROUPS = (1, 4, 8)
"""Variants of the merge by how many groups of splits a block reduces side by side."""


def tile_for(packed_rows: int) -> str:
    """Tile variant for a request of `packed_rows` (query rows times heads)."""
    if packed_rows <= 16:
        return "tok16"
    # 96 rows fill three 32-row tiles but only one and a half 64-row ones.
    return "tok32" if packed_rows <= 32 or packed_rows == 96 else "row64"


def dense_specs(envelope: DenseEnvelope) -> list[CompileSpec]:
    """Every dense spec that the envelope's modes can launch: split and direct forward per tile, and the merges."""
    rows = {"decode": (1,), "verify": envelope.verify_rows, "extend": (64,)}
    specs: list[CompileSpec] = []
    for mode in envelope.modes:
        for count in rows[mode]:
            for output in ("split", "direct"):
                specs.append(
                    registry.DENSE_FORWARD.spec(
                        tile=tile_for(count * envelope.heads), output=output, q_dtype=envelope.q_dtype, record=envelope.record, width=envelope.width,
                        lengths="per_query" if mode == "verify" and envelope.per_query else "causal", selection="exact", window=envelope.window,
                    )
                )
    return specs + [registry.DENSE_MERGE.spec(groups=groups, value_width=512 if envelope.width == 576 else 1024) for groups in MERGE_GROUPS]
