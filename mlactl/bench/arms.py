"""The arms of the verify plan: the same rows of the same requests, planned in different ways. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mlactl.bench.floors import Work
from mlactl.bench.shapes import Layout, Shape
from mlactl.errors import UsageError
from mlactl.kernels.errors import PlanError
from mlactl.kernels.mla import planner
from mlactl.kernels.mla.config import MIN_SPLIT_CHUNKS, TILE_ROWS
from mlactl.kernels.mla.planner import DenseCaps, DensePlan
from mlactl.kernels.mla.policy import SparsePolicy, chunks_of
from mlactl.kernels.registry import not_built

DEPLOYED = "deployed"
ARMS: Mapping[str, str] = {
    DEPLOYED: "the decode plan, each verify row a request of its own on the same pages, as serving stacks run it today",
    "row_specialized": "one row a tile, all rows in one launch, each with its own visible length",
    "tiled": "the rows of a request share every staged KV chunk",
    "tiled_s<N>": "tiled, each request's tile split N ways; without --arms half and twice the split that the policy takes",
    "tiled_sparse": "tiled over the strided chunk selection, when --sparse or the profile has a stride over 1",
}
_SPLIT = re.compile(r"tiled_s([1-9]\d*)")

PLANNED, NOT_BUILT, REFUSED = "planned", "not-built", "refused"


@dataclass(frozen=True, slots=True)
class Target:
    """What is planned for: an arch and its multiprocessors."""

    arch: str
    multiprocessors: int


@dataclass(frozen=True, slots=True)
class Planned:
    """One arm of one shape. `plan` is None when the capacities were refused; `reason` says why it cannot run.

    `work` is what its launch cannot avoid: less than the others' where chunks are selected.
    """

    arm: str
    plan: DensePlan | None
    work: Work
    state: str
    reason: str | None = None

    @property
    def rows_are_requests(self) -> bool:
        """Whether each query row is planned as a request of its own."""
        return self.arm in (DEPLOYED, "row_specialized")

    @property
    def runs(self) -> bool:
        """Whether there is code for all of it."""
        return self.state == PLANNED


def chosen_arms(text: str | None, sparse: SparsePolicy | None) -> tuple[str, ...] | None:
    """`--arms` as names; None for the default, whose split candidates depend on the shape.

    Raises UsageError naming an arm that does not exist, or tiled_sparse without a stride over 1.
    """
    if text is None:
        return None
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if _SPLIT.fullmatch(name) is None and (name not in ARMS or "<" in name):
            raise UsageError(f"--arms {name!r} is not one of {', '.join(ARMS)}", hint="--arms deployed,tiled,tiled_s4")
    if "tiled_sparse" in names and (sparse is None or sparse.stride == 1):
        raise UsageError("--arms tiled_sparse needs a chunk selection with a stride over 1", hint="--sparse STRIDE,SINK,RECENT,MIN_TOKENS")
    return names


def plan_arms(names: Sequence[str] | None, shape: Shape, layout: Layout, target: Target, sparse: SparsePolicy | None) -> tuple[Planned, ...]:
    """Every arm asked for, or the default ones, planned for that shape."""
    if names is not None:
        return tuple(plan_arm(name, shape, layout, target, sparse) for name in names)
    found = [plan_arm(name, shape, layout, target, sparse) for name in (DEPLOYED, "row_specialized", "tiled")]
    tiled = found[-1].plan
    candidates = split_candidates(tiled) if tiled is not None else ()
    found += [plan_arm(f"tiled_s{count}", shape, layout, target, sparse) for count in candidates]
    if sparse is not None and sparse.stride > 1:
        found.append(plan_arm("tiled_sparse", shape, layout, target, sparse))
    return tuple(found)


def split_candidates(plan: DensePlan) -> tuple[int, ...]:
    """Split counts worth trying beside the policy's own: half and twice of it, as far as the longest request has chunks for."""
    own, most = splits_of(plan), _most_splits(plan)
    return tuple(count for count in dict.fromkeys((own // 2, min(own * 2, most))) if count >= 1 and count != own)


def tiles_of(plan: DensePlan) -> int:
    """Tiles of a full batch: units that blocks are shared over."""
    return plan.caps.max_requests * -(-plan.caps.rows * plan.caps.heads // TILE_ROWS[plan.tile])


def splits_of(plan: DensePlan) -> int:
    """Splits that each tile of a full, even batch gets, at least 1."""
    return max(1, min(plan.budget // tiles_of(plan), _most_splits(plan)))


def _most_splits(plan: DensePlan) -> int:
    """Splits of the longest request when none is shorter than the device makes them."""
    return max(1, -(-chunks_of(plan.caps.max_tokens) // MIN_SPLIT_CHUNKS))


def plan_arm(name: str, shape: Shape, layout: Layout, target: Target, sparse: SparsePolicy | None) -> Planned:
    """One arm, planned; what cannot be planned or has no code yet says so in its state."""
    return planned(name, _caps(name, shape, layout, target, sparse), shape, layout)


def planned(name: str, caps: DenseCaps, shape: Shape, layout: Layout) -> Planned:
    """The plan of these capacities under a name."""
    work = layout.work(shape) if caps.sparse is None else layout.sparse_work(shape, caps.sparse)
    try:
        plan = planner.plan(caps)
    except PlanError as error:
        return Planned(name, None, work, REFUSED, error.message)
    reasons = [reason for spec in plan.specs if (reason := not_built(spec)) is not None]
    return Planned(name, plan, work, NOT_BUILT if reasons else PLANNED, reasons[0] if reasons else None)


def caps_of(shape: Shape, layout: Layout, target: Target) -> DenseCaps:
    """Capacities of exactly that launch, as the policy plans it."""
    return DenseCaps(
        mode=shape.mode,
        heads=shape.heads,
        max_requests=shape.requests,
        max_tokens=max(shape.lengths()),
        page_size=layout.page_size,
        multiprocessors=target.multiprocessors,
        arch=target.arch,
        rows=shape.rows,
        q_dtype=layout.q_dtype,
        record=layout.record,
        width=layout.width,
        per_query=layout.per_query,
    )


def _caps(name: str, shape: Shape, layout: Layout, target: Target, sparse: SparsePolicy | None) -> DenseCaps:
    tiled = caps_of(shape, layout, target)
    if name == DEPLOYED:
        return replace(tiled, mode="decode", max_requests=shape.requests * shape.rows, rows=1, per_query=False)
    if name == "row_specialized":
        return replace(tiled, max_requests=shape.requests * shape.rows, rows=1, per_query=True)
    if name == "tiled_sparse":
        return replace(tiled, sparse=sparse)
    split = _SPLIT.fullmatch(name)
    return tiled if split is None else replace(tiled, splits=int(split[1]))
