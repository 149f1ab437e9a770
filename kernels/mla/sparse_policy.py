"""The one place that decides tiles, splits and specs of sparse MLA: planner, envelope and benchmarks read it.

Imports neither torch nor the compiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlactl.kernels import registry
from mlactl.kernels.mla import policy
from mlactl.kernels.mla.sparse_config import CHUNK, TILE_ROWS, sparse_tile
from mlactl.kernels.mla.sparse_records import LATENT
from mlactl.kernels.spec import CompileSpec

if TYPE_CHECKING:
    from mlactl.kernels.envelope import SparseEnvelope

MODES = ("decode", "verify", "prefill")
"""Few rows, split; draft rows, which the kernel sees as rows like any other; many rows, never split."""

_MIN_SPLIT_CHUNKS = 3
"""Chunks under which a split costs more in the merge than it saves."""

_FEW_ROWS_SPLITS = 3
"""Splits of a row in blocks of two groups, 16 heads each, from which they beat 32-head ones whatever those can be split."""

_LONE_GROUP_SPLITS = 5
"""The same where a 16-head block has one group only."""


def tiles_for(mode: str, heads: int) -> tuple[str, ...]:
    """Tile variants that launches of a mode choose from: up to 16 heads there is one."""
    if heads <= TILE_ROWS["heads16"]:
        return ("heads16",)
    return ("heads32",) if mode == "prefill" else ("heads16", "heads32")


def tile_for(mode: str, heads: int, rows: int, record: str, top_k: int, multiprocessors: int) -> str:
    """Tile variant. A chunk takes 32 heads, which share what is gathered and decoded, under twice as long as 16. Blocks of 32
    win where unsplit blocks of 16 are too many to run at once, and where a row can be split more than twice as often with them,
    unless blocks of 16 split it often enough to be better anyway (`_FEW_ROWS_SPLITS`). Blocks of 16 with one group must always
    split it often (`_LONE_GROUP_SPLITS`)."""
    choices = tiles_for(mode, heads)
    if len(choices) == 1:
        return choices[0]
    fits = splits_of(choices[0], rows, heads, multiprocessors)
    small, large = (splits_for(mode, tile, rows, heads, top_k, multiprocessors) for tile in choices)
    if sparse_tile(choices[0], record).groups == 1:
        return choices[0] if fits >= _LONE_GROUP_SPLITS else choices[1]
    return choices[0] if fits >= _FEW_ROWS_SPLITS or (fits >= 1 and large <= 2 * small) else choices[1]


def tiles_of(tile: str, heads: int) -> int:
    """Head tiles of one query row."""
    return -(-heads // TILE_ROWS[tile])


def splits_of(tile: str, rows: int, heads: int, multiprocessors: int) -> int:
    """Splits of each row that one wave of blocks, one a multiprocessor, has room for."""
    return multiprocessors // (rows * tiles_of(tile, heads))


def splits_for(mode: str, tile: str, rows: int, heads: int, top_k: int, multiprocessors: int) -> int:
    """Splits of each row: one wave of blocks, no split shorter than it is worth. Prefill never splits."""
    if mode == "prefill":
        return 1
    longest = -(-top_k // CHUNK) // _MIN_SPLIT_CHUNKS
    return max(1, min(splits_of(tile, rows, heads, multiprocessors), longest))


def merge_groups(splits: int) -> int:
    """Merge variant: few splits are walked by one group of threads, many by eight."""
    return policy.MERGE_GROUPS[0] if splits <= 8 else policy.MERGE_GROUPS[-1]


def merge_spec(groups: int) -> CompileSpec:
    """The merge, the same object that dense MLA uses."""
    return registry.DENSE_MERGE.spec(groups=groups, value_width=LATENT)


def forward_spec(mode: str, tile: str, q_dtype: str, record: str, identity: int) -> CompileSpec:
    """The forward spec of one launch. Decode uses one object whether a row is split or not."""
    kernel = registry.SPARSE_PREFILL if mode == "prefill" else registry.SPARSE_DECODE
    output = "direct" if mode == "prefill" else "split"
    return kernel.spec(tile=tile, output=output, q_dtype=q_dtype, record=record, latent_scale_identity=identity)


def sparse_specs(envelope: SparseEnvelope) -> list[CompileSpec]:
    """Every spec that the envelope's modes can launch: forwards of each variant, and the merges."""
    specs = [
        forward_spec(mode, tile, envelope.q_dtype, envelope.record, identity)
        for mode in envelope.modes
        for tile in tiles_for(mode, envelope.heads)
        for identity in envelope.identities
    ]
    if any(mode != "prefill" for mode in envelope.modes):
        specs += [merge_spec(groups) for groups in policy.MERGE_GROUPS]
    return specs
