"""The one place that decides tiles and splits: planner, binding, kernel builder, reference and benchmarks all read it.

Imports neither torch nor the compiler.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlactl.kernels import registry
from mlactl.kernels.errors import PlanError
from mlactl.kernels.mla.config import CHUNK_TOKENS, TILE_ROWS
from mlactl.kernels.mla.records import LATENT_ELEMENTS
from mlactl.kernels.mla.selection import SELECTION_TOKENS, check_selection, dynamic_sparse_chunk_indices
from mlactl.kernels.spec import CompileSpec

if TYPE_CHECKING:
    from mlactl.kernels.envelope import DenseEnvelope

MODES = ("decode", "verify", "extend")
"""One query row a request; a fixed number of rows (draft rows plus one); any number of rows."""

MERGE_GROUPS = (1, 8)
"""Variants of the merge that launches use, by how many groups of splits a block reduces side by side."""

_FINE_SPLITS = 4
"""Splits a processor when there are more units than processors: pieces small enough that the last wave is short."""

_LARGEST_NUMBER = 2**30
"""Largest number of a sparse policy: the device computes with 32 bits."""

_WALKED_SPLITS = 24
"""Splits that one group of the merge walks in three batches of loads; more are faster side by side."""


@dataclass(frozen=True, slots=True)
class SparsePolicy:
    """The opt-in selection of 64-token chunks, row by row. It changes what is computed: off unless asked for.

    A row whose visible length is at most `min_tokens`, and every row while visible % refresh_interval < rows a request
    (refresh_interval 0: never), attends every chunk. Raises PlanError for numbers that select nothing sensible.
    """

    stride: int
    sink_chunks: int
    recent_chunks: int
    min_tokens: int = 0
    refresh_interval: int = 0

    def __post_init__(self) -> None:
        check_selection(self.stride, self.sink_chunks, self.recent_chunks)
        for name in ("min_tokens", "refresh_interval"):
            if getattr(self, name) < 0:
                raise PlanError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("stride", "sink_chunks", "recent_chunks", "min_tokens", "refresh_interval"):
            if getattr(self, name) > _LARGEST_NUMBER:
                raise PlanError(f"{name} must be at most {_LARGEST_NUMBER}, got {getattr(self, name)}")

    def active(self, visible: int, rows: int) -> bool:
        """Whether a row that sees `visible` tokens, of a plan of `rows` rows a request, selects."""
        refreshing = self.refresh_interval > 0 and visible % self.refresh_interval < rows
        return self.stride > 1 and visible > self.min_tokens and not refreshing

    def chunks(self, visible: int, rows: int) -> tuple[int, ...]:
        """The 64-token chunks that a row attends, from its own visible length."""
        count = -(-visible // SELECTION_TOKENS)
        if not self.active(visible, rows):
            return tuple(range(count))
        return dynamic_sparse_chunk_indices(count, self.stride, self.sink_chunks, self.recent_chunks)


def tile_for(mode: str, packed_rows: int, width: int = 576) -> str:
    """Tile variant for requests of `packed_rows` (query rows times heads); extend, whose rows vary, always takes the widest.

    Records of 1,088 elements always take the 16-row tile: the output of more rows does not fit the registers.
    """
    if width != 576:
        return "tok16"
    if mode == "extend":
        return "row64"
    if packed_rows <= 16:
        return "tok16"
    # 96 rows fill three 32-row tiles but only one and a half 64-row ones.
    return "tok32" if packed_rows <= 32 or packed_rows == 96 else "row64"


def units_bound(tile: str, requests: int, query_rows: int, heads: int, *, ragged: bool) -> int:
    """Most (request, tile) pairs a launch can have: `query_rows` rows in all, over `requests` requests.

    `ragged`: requests may divide the rows in any way, so that each may leave one tile partly filled.
    """
    packed = query_rows * heads
    if ragged:
        return packed // TILE_ROWS[tile] + requests
    return requests * -(-(packed // requests) // TILE_ROWS[tile])


def split_budget(units: int, requests: int, multiprocessors: int) -> int:
    """Blocks that a launch of `units` units is spread over, or 0 when units are not split.

    Up to one unit a processor: one wave. A few units a processor: several short waves, so that neither the last wave nor
    one long request dominates. Beyond that, and for one request that fills over half of the processors, splitting gains nothing.
    """
    if units >= _FINE_SPLITS * multiprocessors or (requests == 1 and 2 * units > multiprocessors):
        return 0
    return multiprocessors if units <= multiprocessors else units + _FINE_SPLITS * multiprocessors


def forced_budget(tiles: int, splits: int) -> int:
    """Blocks of a launch whose tiles are each cut into `splits`, or 0 for one: what a measurement asks for."""
    return tiles * splits if splits > 1 else 0


def merge_groups(units: int, budget: int) -> int:
    """Merge variant for an even batch of `units` units: few splits are walked by one group, many by eight side by side."""
    return MERGE_GROUPS[0] if budget <= _WALKED_SPLITS * units else MERGE_GROUPS[1]


def forward_output(mode: str, tile: str, budget: int, *, exact: bool) -> str:
    """`output` fact of the forward kernel. Decode and verify use one object whether they split or not; extend, most often
    unsplit, has its own without the partials where every visible key counts (`exact`)."""
    return "direct" if mode == "extend" and tile == "row64" and exact and budget == 0 else "split"


def chunks_of(tokens: int) -> int:
    """Chunks that a cache length takes."""
    return -(-tokens // CHUNK_TOKENS)


def forward_spec(
    mode: str, tile: str, output: str, q_dtype: str, record: str, width: int, *, per_query: bool, sparse: bool, window: bool
) -> CompileSpec:
    """The forward spec of one launch."""
    return registry.DENSE_FORWARD.spec(
        tile=tile,
        output=output,
        q_dtype=q_dtype,
        record=record,
        width=width,
        lengths="per_query" if mode == "verify" and per_query else "causal",
        selection="sparse" if sparse else "exact",
        window=window,
    )


def dense_specs(envelope: DenseEnvelope) -> list[CompileSpec]:
    """Every dense spec that the envelope's modes can launch: the forwards of each tile, and the merges.

    Where verify rows carry their own lengths, causal verify is there too: a launch whose rows are all on one shard.
    """
    rows = {"decode": (1,), "verify": envelope.verify_rows, "extend": (1,)}
    specs: list[CompileSpec] = []
    selections = (False, True) if envelope.sparse else (False,)
    for mode in envelope.modes:
        lengths = (False, True) if envelope.per_query and mode == "verify" else (False,)
        for count, sparse, per_query in itertools.product(rows[mode], selections, lengths):
            tile = tile_for(mode, count * envelope.heads, envelope.width)
            exact = not sparse and not envelope.window
            facts = {"per_query": per_query, "sparse": sparse, "window": envelope.window and not sparse and not per_query}
            for output in dict.fromkeys(forward_output(mode, tile, budget, exact=exact) for budget in (1, 0)):
                specs.append(forward_spec(mode, tile, output, envelope.q_dtype, envelope.record, envelope.width, **facts))
    return specs + [registry.DENSE_MERGE.spec(groups=groups, value_width=LATENT_ELEMENTS[envelope.width]) for groups in MERGE_GROUPS]
