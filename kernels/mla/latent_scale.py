"""The outer (latent) scale of static NVFP4 records: which kernel variant a scale is served by, decided here and nowhere else.

A kernel compiled for the scale 1.0 has no restoring multiply. Served for any other scale it gives outputs of the right
direction and the wrong size, which nothing downstream notices. Imports neither torch nor the compiler.
"""

from __future__ import annotations

import math
import numbers
import struct
from dataclasses import dataclass

from mlactl.kernels.errors import BindError
from mlactl.kernels.mla.sparse_records import SPARSE_RECORDS, sparse_record
from mlactl.kernels.spec import CompileSpec

FACT = "latent_scale_identity"
IDENTITY, DYNAMIC = 1, 0

STATIC_RECORDS = tuple(name for name, record in SPARSE_RECORDS.items() if record.static)
"""Records that take an outer scale, and so have both variants."""


@dataclass(frozen=True, slots=True)
class LatentScale:
    """A checked scale as the kernel gets it: its float32 value and the variant, the fact's 0 or 1, that serves it."""

    value: float
    identity: int

    def require(self, spec: CompileSpec) -> None:
        """Raises BindError when `spec` is of the other variant."""
        found = spec.fact(FACT)
        if found != self.identity:
            raise BindError(f"latent_scale {self.value} needs {FACT}={self.identity}, the object is {spec.label()}")


def float32_scale(scale: float, name: str = "latent_scale") -> float:
    """A scale as float32; raises BindError unless it is a number and that is finite and above 0 (1e-46 is 0 as float32)."""
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise BindError(f"{name} is {scale!r}, expected a number")
    try:
        rounded = float(struct.unpack("<f", struct.pack("<f", scale))[0])
    except OverflowError:
        rounded = math.inf
    if not (math.isfinite(rounded) and rounded > 0.0):
        raise BindError(f"{name} is {scale!r}, {rounded!r} as float32; expected a finite number above 0")
    return rounded


def resolve(record: str, scale: float) -> LatentScale:
    """The one decision: checks `scale` for a record and says which variant serves it.

    Decided on float32(scale): 1.00000001 is identity. Records that carry their own scales take 1.0 only; anything else
    raises BindError naming the record, as does a record that there is none of and a scale that is not finite and above 0.
    """
    if record not in SPARSE_RECORDS:
        raise BindError(f"record {record!r} is not one of {', '.join(SPARSE_RECORDS)}")
    value = float32_scale(scale)
    if value == 1.0:
        return LatentScale(1.0, IDENTITY)
    if not sparse_record(record).static:
        raise BindError(f"latent_scale is {scale!r}: {sparse_record(record).title} carries its own scales and takes 1.0 only")
    return LatentScale(value, DYNAMIC)


@dataclass(frozen=True, slots=True)
class OuterScales:
    """Outer scales of a model's decoder layers, by zero-based index; draft (MTP) layers come after them and run with 1.0."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        for index, value in enumerate(self.values):
            float32_scale(value, f"scale of layer {index}")

    def for_layer(self, index: int) -> float:
        """The scale of one layer; 1.0 past the decoder layers. Raises BindError for a negative index."""
        if index < 0:
            raise BindError(f"layer {index}: layers are counted from 0")
        return self.values[index] if index < len(self.values) else 1.0

    def identities(self, record: str, *, draft_layers: int) -> tuple[int, ...]:
        """Values of the fact that the layers launch, ascending; what a warmup has to cover."""
        scales = (*self.values, *([1.0] * draft_layers))
        return tuple(sorted({resolve(record, scale).identity for scale in scales}))
