"""Plans a sparse MLA launch from capacities alone: tile, splits, scratch and compile specs. Imports neither torch nor the compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlactl.kernels.errors import PlanError
from mlactl.kernels.mla import sparse_policy
from mlactl.kernels.mla.latent_scale import DYNAMIC, IDENTITY, STATIC_RECORDS, LatentScale
from mlactl.kernels.mla.planner import require_count
from mlactl.kernels.mla.sparse_records import LATENT, SPARSE_RECORDS, SparseRecord
from mlactl.kernels.spec import ARCHES, CompileSpec

if TYPE_CHECKING:
    from mlactl.kernels.mla.sparse import SparseBinding, SparseTensors

_MAX_ROWS = 65_535
"""Query rows of one launch: the second dimension of a CUDA grid."""

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SparseCaps:
    """Capacities of a sparse MLA launch; a plan serves every batch inside them.

    mode: `decode` or `verify` (few rows, split) or `prefill` (many rows, not split); heads: query heads the kernel sees, after
    any gather; max_rows: query rows of a launch; top_k: index columns a row; record: a sparse record's name; multiprocessors
    and arch: of the device the plan is for.
    """

    mode: str
    heads: int
    max_rows: int
    top_k: int
    record: str
    multiprocessors: int
    arch: str
    q_dtype: str = "bf16"


@dataclass(frozen=True, slots=True)
class SparsePlan:
    """What `plan` decided. `merge` is None when no row is ever split.

    forwards: the forward specs by `latent_scale_identity`; records without an outer scale have the identity variant only.
    scratch_bytes: size of the uint8 scratch that `bind` needs: fp32 partials [slots, 512], their LSE [slots] and the merge's
    directory, int32 [rows * heads, 4].
    """

    caps: SparseCaps
    tile: str
    splits: int
    forwards: tuple[tuple[int, CompileSpec], ...]
    merge: CompileSpec | None
    slots: int
    partial_bytes: int
    partial_lse_bytes: int
    directory_bytes: int

    @property
    def record(self) -> SparseRecord:
        """The cache's record."""
        return SPARSE_RECORDS[self.caps.record]

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch a binding needs; 0 when nothing is split."""
        return self.partial_bytes + self.partial_lse_bytes + self.directory_bytes

    @property
    def specs(self) -> tuple[CompileSpec, ...]:
        """Every spec that a launch of this plan can need, both variants included."""
        forwards = tuple(spec for _, spec in self.forwards)
        return forwards if self.merge is None else (*forwards, self.merge)

    def forward(self, scale: LatentScale) -> CompileSpec:
        """The forward spec that serves a resolved scale."""
        spec = dict(self.forwards)[scale.identity]
        scale.require(spec)
        return spec

    def bind(self, tensors: SparseTensors) -> SparseBinding:
        """Validates `tensors` against the plan and makes views; allocates nothing. Raises BindError."""
        from mlactl.kernels.mla.sparse import bind

        return bind(self, tensors)


def _check(caps: SparseCaps) -> None:
    if caps.mode not in sparse_policy.MODES:
        raise PlanError(f"mode {caps.mode!r} is not one of {', '.join(sparse_policy.MODES)}")
    if caps.arch not in ARCHES:
        raise PlanError(f"arch {caps.arch!r} is not supported; objects are made for {', '.join(ARCHES)}")
    if caps.record not in SPARSE_RECORDS:
        raise PlanError(f"record {caps.record!r} is not one of {', '.join(SPARSE_RECORDS)}")
    for name in ("heads", "max_rows", "top_k", "multiprocessors"):
        require_count(name, getattr(caps, name))
    if caps.max_rows > _MAX_ROWS:
        raise PlanError(f"max_rows {caps.max_rows}: a launch takes at most {_MAX_ROWS} query rows; launch the batch in parts")


def plan(caps: SparseCaps) -> SparsePlan:
    """Decides tile, splits and scratch on the host; touches no device and allocates nothing. Raises PlanError."""
    _check(caps)
    tile = sparse_policy.tile_for(caps.mode, caps.heads, caps.max_rows, caps.record, caps.top_k, caps.multiprocessors)
    splits = sparse_policy.splits_for(caps.mode, tile, caps.max_rows, caps.heads, caps.top_k, caps.multiprocessors)
    rows = caps.max_rows * caps.heads
    slots = splits * rows if splits > 1 else 0
    # The kernel multiplies a row's chunks by its splits, and doubles the columns of its groups.
    if caps.top_k * (splits + 1) > _INT32_MAX or max(slots, rows) > _INT32_MAX:
        raise PlanError(f"top_k {caps.top_k} or {rows} rows of heads in {splits} splits pass the kernel's 32-bit counts")
    identities = (DYNAMIC, IDENTITY) if caps.record in STATIC_RECORDS else (IDENTITY,)
    forwards = tuple((identity, sparse_policy.forward_spec(caps.mode, tile, caps.q_dtype, caps.record, identity)) for identity in identities)
    return SparsePlan(
        caps=caps,
        tile=tile,
        splits=splits,
        forwards=forwards,
        merge=sparse_policy.merge_spec(sparse_policy.merge_groups(splits)) if splits > 1 else None,
        slots=slots,
        partial_bytes=slots * LATENT * 4,
        partial_lse_bytes=-(-slots * 4 // 16) * 16,
        directory_bytes=rows * 16 if splits > 1 else 0,
    )
