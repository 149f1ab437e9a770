"""Compares two tensors in one streaming pass and keeps everything a person needs to find the fault."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mlactl.errors import UsageError
from mlactl.replay.tally import Tally, columns_of, tally
from mlactl.replay.tolerances import Tolerance

if TYPE_CHECKING:
    import torch

TOP_CLUSTERS = 4
NO_TOLERANCE = 1e30
"""A factor beyond which a tolerance is none."""


@dataclass(frozen=True, slots=True)
class Axes:
    """What a tensor's dimensions are called, and which group (request, rank) each index of the first one belongs to.

    `origin` names coordinates of a slice as those of the whole: index i of dimension d is reported as `origin[d][i]`.
    """

    names: tuple[str, ...]
    group_name: str | None = None
    groups: tuple[int, ...] = ()
    origin: tuple[tuple[int, ...] | None, ...] = ()

    def coordinates(self, index: Sequence[int]) -> tuple[tuple[str, int], ...]:
        """Named coordinates of an element, the group first."""
        named = [(name, self.whole(axis, position)) for axis, (name, position) in enumerate(zip(self.names, index, strict=True))]
        if self.group_name is not None and index:
            named.insert(0, (self.group_name, self.groups[index[0]]))
        return tuple(named)

    def whole(self, axis: int, position: int) -> int:
        """The index in the whole of one in a slice."""
        origin = self.origin[axis] if axis < len(self.origin) else None
        return position if origin is None else origin[position]


@dataclass(frozen=True, slots=True)
class Element:
    """One element of both tensors, integers as they are.

    `ulp` counts representable values of the actual tensor's type between the two; None where a NaN or no float is involved,
    and where the two differ by less than that type can tell.
    """

    index: tuple[int, ...]
    coordinates: tuple[tuple[str, int], ...]
    actual: float
    expected: float
    ulp: int | None

    def where(self) -> str:
        """`request 1, row 5, head 3, dim 12`."""
        return ", ".join(f"{name} {position}" for name, position in self.coordinates) or "the only element"


@dataclass(frozen=True, slots=True)
class Cluster:
    """How mismatches spread along one axis: `indices` of `extent` hold any, `top` the fullest with (index, mismatches, of how many).

    `unit` says what is counted: elements, or rows where rows are wrong that hold no wrong element.
    """

    axis: str
    indices: int
    extent: int
    top: tuple[tuple[int, int, int], ...]
    inferred: bool = False
    note: str = ""
    unit: str = "elements"


@dataclass(frozen=True, slots=True)
class WorstRow:
    """The row that is furthest off: one with `not_finite` elements first (its numbers are then NaN), else by cosine, norm and largest error.

    `norm_ratio` and `largest_error_share` (of the expected row's maximum) are infinite where the expected row is all zero.
    """

    coordinates: tuple[tuple[str, int], ...]
    cosine: float
    norm_ratio: float
    largest_error: float
    largest_error_share: float
    not_finite: int = 0


@dataclass(frozen=True, slots=True)
class BadRows:
    """Rows that fail, by the rule they fail by; a row can fail by several. `not_finite` are among those by element."""

    element: int = 0
    cosine: int = 0
    norm: int = 0
    not_finite: int = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """All that one pass over a pair of tensors found. `cosine` is the lowest of any row and `norm_deviation` the largest.

    `not_finite` elements are NaN or infinite where the other side is not, or NaN on both sides without leave. With any,
    max_abs, max_rel, cosine and norm_deviation are NaN: no number of the other elements speaks for them.

    `needed` holds the smallest limits that would pass, those of cosine and norm too; an `atol` where floats must be equal.
    None where none would (NaN or infinity by position, integers that differ, an output that is all zero). `needed_factor`
    is the largest error over its limit, by any rule: over 1 is a mismatch, over a limit of 0 it is infinite.
    """

    name: str
    shape: tuple[int, ...]
    actual_dtype: str
    expected_dtype: str
    tolerance: Tolerance
    status: str
    elements: int
    mismatches: int
    rows: int
    bad_rows: int
    failing: BadRows
    max_abs: float
    max_rel: float
    cosine: float | None
    norm_deviation: float
    needed: Tolerance | None
    needed_factor: float
    bitwise: bool
    nan_actual: int
    nan_expected: int
    infinite: int
    not_finite: int
    notes: tuple[str, ...] = ()
    first: Element | None = None
    worst: Element | None = None
    worst_row: WorstRow | None = None
    clusters: tuple[Cluster, ...] = ()

    @property
    def matches(self) -> bool:
        """Whether the actual tensor is right."""
        return self.status == "match"


def compare(
    actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance, *, name: str, axes: Axes | None = None, allow_nan: bool = False
) -> Comparison:
    """Compares `actual` with `expected` (same shape, any real types); the first is judged, the second is taken as right.

    Raises UsageError for shapes that differ, tensors without elements, and what is no plain tensor of real numbers.
    """
    _check(name, actual, expected)
    names = axes or Axes(tuple(f"dim{position}" for position in range(actual.ndim)))
    found = tally(actual, expected, tolerance, allow_nan=allow_nan)
    return _result(name, actual, expected, tolerance, found, names, allow_nan)


def _check(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    import torch

    for tensor in (actual, expected):
        found, hint = None, ""
        if tensor.layout != torch.strided:
            found, hint = f"{str(tensor.layout).removeprefix('torch.')} tensors", "save tensor.to_dense()"
        elif tensor.is_quantized:
            found, hint = "quantised tensors", "save tensor.dequantize()"
        elif tensor.is_meta:
            found, hint = "meta tensors, which hold no values,", "save the tensor from the device that holds it"
        elif tensor.is_complex():
            found, hint = "complex tensors", "save torch.view_as_real(tensor)"
        elif tensor.dtype in (getattr(torch, packed, None) for packed in ("float4_e2m1fn_x2", "bits8", "bits16")):
            found, hint = f"{str(tensor.dtype).removeprefix('torch.')} tensors", "save tensor.view(torch.uint8): packed bytes are compared exactly"
        if found:
            raise UsageError(f"{name}: {found} are not compared", hint=hint)
    if actual.shape != expected.shape:
        raise UsageError(f"{name}: shapes differ, {list(actual.shape)} against {list(expected.shape)}", hint="compare tensors of one shape")
    if actual.numel() == 0:
        raise UsageError(
            f"{name}: nothing to compare, the tensors have no elements ({list(actual.shape)})", hint="name files whose tensors hold something"
        )


def _result(name: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance, found: Tally, axes: Axes, allow_nan: bool) -> Comparison:
    all_zero = found.nonzero_expected and not found.nonzero_actual
    failed = bool(found.bad_rows or all_zero)
    lowest = None if found.cosine == math.inf else found.cosine
    lost = found.not_finite > 0
    factor = _factor(found, tolerance)
    # Equal or not is asked of integers by what they are, of floats by a person (--atol 0), who may ask less.
    exact = tolerance.elements_exact() and actual.is_floating_point() and expected.is_floating_point()
    possible = not lost and not all_zero and (math.isfinite(found.max_abs) if exact else factor < NO_TOLERANCE)
    return Comparison(
        name=name,
        shape=tuple(actual.shape),
        actual_dtype=str(actual.dtype).removeprefix("torch."),
        expected_dtype=str(expected.dtype).removeprefix("torch."),
        tolerance=tolerance,
        status="mismatch" if failed else "match",
        elements=actual.numel(),
        mismatches=found.mismatches,
        rows=found.rows,
        bad_rows=found.bad_rows,
        failing=BadRows(found.element_rows, found.cosine_rows, found.norm_rows, found.not_finite_rows),
        max_abs=math.nan if lost else found.max_abs,
        max_rel=math.nan if lost else found.max_rel if found.max_rel < NO_TOLERANCE else math.inf,
        cosine=math.nan if lost else lowest,
        norm_deviation=math.nan if lost else found.norm,
        needed=None if not possible else replace(tolerance, atol=found.max_abs) if exact else _needed(found, tolerance),
        needed_factor=factor if possible else math.inf,
        bitwise=found.equal,
        nan_actual=found.nan_actual,
        nan_expected=found.nan_expected,
        infinite=found.infinite,
        not_finite=found.not_finite,
        notes=_notes(found, actual.numel(), allow_nan, all_zero=all_zero),
        first=None if found.first is None else element(actual, expected, found.first, axes),
        worst=None if found.worst is None else element(actual, expected, found.worst, axes),
        worst_row=_worst_row(found, axes, actual),
        clusters=_clusters(found, axes, actual) if failed else (),
    )


def _factor(found: Tally, tolerance: Tolerance) -> float:
    """The largest error over its limit, by any rule."""
    factors = [found.ratio]
    if tolerance.cosine is not None and found.cosine != math.inf:
        factors.append(max(0.0, 1 - found.cosine) / max(1 - tolerance.cosine, 1e-300))
    if tolerance.norm is not None:
        factors.append(found.norm / max(tolerance.norm, 1e-300))
    return max(factors)


def _needed(found: Tally, tolerance: Tolerance) -> Tolerance:
    return replace(
        tolerance.scaled(found.ratio),
        cosine=None if tolerance.cosine is None else min(1.0, found.cosine),
        norm=None if tolerance.norm is None else found.norm,
    )


def _notes(found: Tally, elements: int, allow_nan: bool, *, all_zero: bool) -> tuple[str, ...]:
    notes = []
    if all_zero:
        notes.append("the output is all zero, the reference is not")
    if found.nan_actual or found.nan_expected:
        allowed = ", allowed" if allow_nan and not found.not_finite else ""
        notes.append(f"NaN: {found.nan_actual:,} in the output, {found.nan_expected:,} in the reference{allowed}")
    if found.not_finite:
        others = f"; the other rows are off by at most {found.max_abs:.3g}, lowest cosine {found.cosine:.7f}" if found.cosine != math.inf else ""
        notes.append(f"not finite: {found.not_finite:,} of {elements:,} elements in {found.not_finite_rows:,} of {found.rows:,} rows{others}")
    return tuple(notes)


def _worst_row(found: Tally, axes: Axes, actual: torch.Tensor) -> WorstRow | None:
    row = found.worst_row
    if row is None or actual.ndim < 2:
        return None
    coordinates = axes.coordinates(_unravel(row.start, actual.shape))
    named = tuple(pair for pair in coordinates if pair[0] != axes.names[-1])
    return WorstRow(named, row.cosine, row.norm_ratio, row.error, row.error_share, row.not_finite)


def _unravel(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    index = []
    for extent in reversed(shape):
        index.append(position % extent)
        position //= extent
    return tuple(reversed(index))


def element(actual: torch.Tensor, expected: torch.Tensor, position: int, axes: Axes) -> Element:
    """The element at a flat position of both tensors, with its name and ULP distance."""
    index = _unravel(position, actual.shape)
    left, right = (int(value) if isinstance(value, bool) else value for value in (actual[index].item(), expected[index].item()))
    ulp = ulp_distance(left, right, actual.dtype)
    return Element(index, axes.coordinates(index), left, right, None if ulp == 0 and left != right else ulp)


def ulp_distance(left: float, right: float, dtype: torch.dtype) -> int | None:
    """Values of `dtype` between two numbers, each rounded to it first; None for NaN and for types that are no floats."""
    import torch

    bits = {
        torch.float64: torch.int64,
        torch.float32: torch.int32,
        torch.bfloat16: torch.int16,
        torch.float16: torch.int16,
        torch.float8_e4m3fn: torch.int8,
        torch.float8_e5m2: torch.int8,
    }
    if dtype not in bits or math.isnan(left) or math.isnan(right):
        return None

    def ordinal(value: float) -> int:
        raw = int(torch.tensor(value, dtype=torch.float64).to(dtype).view(bits[dtype]))
        # Sign and magnitude becomes one line: -0 and 0 are the same place.
        sign = 1 << (8 * dtype.itemsize - 1)
        return raw if raw >= 0 else -(raw + sign)

    return abs(ordinal(left) - ordinal(right))


def _clusters(found: Tally, axes: Axes, actual: torch.Tensor) -> tuple[Cluster, ...]:
    """Where mismatches are along every axis of the output itself: in elements, or in rows where any row fails as a whole only."""
    shape = actual.shape
    if not found.by_row or not shape:
        return ()
    unit = "rows" if 0 in found.by_row.values() else "elements"
    row_size = 1 if unit == "rows" else shape[-1]
    pieces = found.rows * shape[-1] // actual.numel() if unit == "rows" else 1
    counts: list[Counter[int]] = [Counter() for _ in shape]
    groups: Counter[int] = Counter()
    for start, mismatches in found.by_row.items():
        index, count = _unravel(start, shape), 1 if unit == "rows" else mismatches
        for axis in range(len(shape) - 1):
            counts[axis][axes.whole(axis, index[axis])] += count
        if axes.group_name is not None:
            groups[axes.groups[index[0]]] += count
    # What one index of the first axis holds, then what one of each other axis holds.
    per_row = actual.numel() // (shape[0] * shape[-1]) * row_size * pieces
    clusters = []
    if axes.group_name is not None:
        sizes = {group: rows * per_row for group, rows in Counter(axes.groups).items()}
        clusters.append(_cluster(axes.group_name, groups, len(sizes), sizes, unit))
    for axis, name in enumerate(axes.names[:-1]):
        size = actual.numel() // (shape[axis] * shape[-1]) * row_size * pieces
        clusters.append(_cluster(name, counts[axis], shape[axis], dict.fromkeys(counts[axis], size), unit))
    if unit == "elements" and columns_of(actual) is not None:
        axis = len(shape) - 1
        last = Counter({axes.whole(axis, place): count for place, count in enumerate(found.by_column.tolist()) if count})
        clusters.append(_cluster(axes.names[-1], last, shape[-1], dict.fromkeys(last, actual.numel() // shape[-1]), unit))
    return tuple(clusters)


def _cluster(axis: str, counts: Counter[int], extent: int, sizes: dict[int, int], unit: str) -> Cluster:
    top = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:TOP_CLUSTERS]
    return Cluster(axis, len(counts), extent, tuple((index, count, sizes[index]) for index, count in top), unit=unit)
