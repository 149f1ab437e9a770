"""Plans a dense MLA launch from capacities alone: tile, splits, scratch and compile specs. Imports neither torch nor the compiler."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlactl.kernels import registry
from mlactl.kernels.errors import PlanError
from mlactl.kernels.mla import policy
from mlactl.kernels.mla.config import CHUNK_TOKENS, QUERY_BYTES, TILE_ROWS
from mlactl.kernels.mla.records import ELEMENT_BYTES, LATENT_ELEMENTS
from mlactl.kernels.spec import ARCHES, CompileSpec

if TYPE_CHECKING:
    from mlactl.kernels.mla.dense import DenseBinding, DenseTensors

ALIGNMENT_BYTES = 16
"""Alignment of every tensor's base, and of the parts of the scratch."""

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class DenseCaps:
    """Capacities of a dense MLA launch; a plan serves every batch inside them.

    mode: `decode` (one row a request), `verify` (`rows` rows a request), `extend` (at most `rows` rows a request);
    heads: query heads the kernel sees, after any gather; max_requests: requests a launch; max_tokens: longest cache length;
    page_size: tokens a page, 1 or a multiple of 16; multiprocessors and arch: of the device the plan is for;
    max_query_rows: query rows of a whole launch (default max_requests * rows); per_query: verify rows carry their own
    visible lengths; window: rows see only the last `DenseTensors.window` of their visible keys; sparse: chunk selection;
    splits: forces that many splits a tile of a full batch instead of the policy's budget (1: none), for measurements.
    """

    mode: str
    heads: int
    max_requests: int
    max_tokens: int
    page_size: int
    multiprocessors: int
    arch: str
    rows: int = 1
    max_query_rows: int | None = None
    q_dtype: str = "bf16"
    record: str = "bf16"
    width: int = 576
    per_query: bool = False
    window: bool = False
    sparse: policy.SparsePolicy | None = None
    splits: int | None = None


@dataclass(frozen=True, slots=True)
class DensePlan:
    """What `plan` decided. `merge` is None when no request is ever split; `budget` is 0 then, else equal to `blocks`.

    scratch_bytes: size of the uint8 scratch that `bind` needs: fp32 partials [slots, latent], their LSE [slots] and the
    merge's directory, int32 [query rows * heads, 4].
    """

    caps: DenseCaps
    tile: str
    units: int
    blocks: int
    budget: int
    forward: CompileSpec
    merge: CompileSpec | None
    slots: int
    query_rows: int
    partial_bytes: int
    partial_lse_bytes: int
    directory_bytes: int

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch a binding needs; 0 when nothing is split."""
        return self.partial_bytes + self.partial_lse_bytes + self.directory_bytes

    @property
    def latent(self) -> int:
        """Elements of one output row."""
        return LATENT_ELEMENTS[self.caps.width]

    @property
    def specs(self) -> tuple[CompileSpec, ...]:
        """Every spec that `run` launches."""
        return (self.forward,) if self.merge is None else (self.forward, self.merge)

    def bind(self, tensors: DenseTensors) -> DenseBinding:
        """Validates `tensors` against the plan and makes views; allocates nothing. Raises BindError."""
        from mlactl.kernels.mla.dense import bind

        return bind(self, tensors)


def require_count(name: str, value: object) -> None:
    """Raises PlanError unless a capacity is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise PlanError(f"{name} must be a whole number, got {value!r}")
    if value < 1:
        raise PlanError(f"{name} must be at least 1, got {value}")


def _check(caps: DenseCaps) -> None:
    if caps.mode not in policy.MODES:
        raise PlanError(f"mode {caps.mode!r} is not one of {', '.join(policy.MODES)}")
    if caps.arch not in ARCHES:
        raise PlanError(f"arch {caps.arch!r} is not supported; objects are made for {', '.join(ARCHES)}")
    if caps.width not in LATENT_ELEMENTS:
        raise PlanError(f"width {caps.width} is not one of {sorted(LATENT_ELEMENTS)}")
    for name in ("heads", "max_requests", "max_tokens", "page_size", "multiprocessors", "rows"):
        require_count(name, getattr(caps, name))
    if caps.page_size != 1 and caps.page_size % CHUNK_TOKENS:
        raise PlanError(f"page_size must be 1 or a multiple of {CHUNK_TOKENS}, got {caps.page_size}")
    if caps.mode == "decode" and caps.rows != 1:
        raise PlanError(f"decode takes one row a request, got rows={caps.rows}; plan verify or extend for more")
    _check_variant(caps)
    query_rows = _query_rows(caps)
    if query_rows < 1 or query_rows > caps.max_requests * caps.rows:
        raise PlanError(f"max_query_rows {query_rows} does not fit {caps.max_requests} requests of at most {caps.rows} rows")
    if caps.max_tokens > _INT32_MAX - CHUNK_TOKENS or query_rows * caps.heads * 2 > _INT32_MAX:
        raise PlanError(f"max_tokens {caps.max_tokens} or {query_rows} query rows of {caps.heads} heads pass the kernel's 32-bit counts")


def _check_variant(caps: DenseCaps) -> None:
    if caps.record not in ELEMENT_BYTES:
        raise PlanError(f"record {caps.record!r} is not one of {', '.join(ELEMENT_BYTES)}")
    if caps.q_dtype not in QUERY_BYTES:
        raise PlanError(f"q_dtype {caps.q_dtype!r} is not one of {', '.join(QUERY_BYTES)}")
    if caps.q_dtype == "e4m3" and caps.record != "fp8":
        raise PlanError(f"an e4m3 query is taken over fp8 records, record is {caps.record}")
    if caps.per_query and caps.mode != "verify":
        raise PlanError(f"per-query lengths are verify's, mode is {caps.mode}")
    if caps.window and caps.per_query:
        raise PlanError("window and per-query lengths exclude each other: the last keys of a shard are not the last keys of the sequence")
    if caps.window and caps.sparse is not None:
        raise PlanError("window and sparse exclude each other: a window already bounds what is read")
    for name in ("max_query_rows", "splits"):
        if getattr(caps, name) is not None:
            require_count(name, getattr(caps, name))


def _query_rows(caps: DenseCaps) -> int:
    return caps.max_requests * caps.rows if caps.max_query_rows is None else caps.max_query_rows


def plan(caps: DenseCaps) -> DensePlan:
    """Decides tile, blocks and scratch on the host; touches no device and allocates nothing. Raises PlanError."""
    _check(caps)
    query_rows = _query_rows(caps)
    tile = policy.tile_for(caps.mode, caps.rows * caps.heads, caps.width)
    units = policy.units_bound(tile, caps.max_requests, query_rows, caps.heads, ragged=caps.mode != "decode")
    budget = policy.split_budget(units, caps.max_requests, caps.multiprocessors)
    if caps.splits is not None:
        # Of the tiles that a full batch has: the device divides the budget by the live ones, and `units` may be twice as many.
        tiles = min(units, caps.max_requests * -(-caps.rows * caps.heads // TILE_ROWS[tile]))
        budget = policy.forced_budget(tiles, caps.splits)
    blocks = max(units, budget)
    sparse = caps.sparse is not None
    output = policy.forward_output(caps.mode, tile, budget, exact=not sparse and not caps.window)
    facts = {"per_query": caps.per_query, "sparse": sparse, "window": caps.window}
    forward = policy.forward_spec(caps.mode, tile, output, caps.q_dtype, caps.record, caps.width, **facts)
    latent = LATENT_ELEMENTS[caps.width]
    merge = registry.DENSE_MERGE.spec(groups=policy.merge_groups(units, budget), value_width=latent) if budget else None
    slots = blocks * TILE_ROWS[tile] if budget else 0
    return DensePlan(
        caps=caps,
        tile=tile,
        units=units,
        blocks=blocks,
        budget=budget,
        forward=forward,
        merge=merge,
        slots=slots,
        query_rows=query_rows,
        partial_bytes=slots * latent * 4,
        partial_lse_bytes=_aligned(slots * 4),
        directory_bytes=query_rows * caps.heads * 16 if budget else 0,
    )


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


DEFAULT_SM_SCALE = 1 / math.sqrt(192)
"""1/sqrt(128 + 64): the models' query-key head dimension before absorption."""
