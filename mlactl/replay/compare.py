"""Compares two tensors in one streaming pass and keeps everything a person needs to find the fault.

Works on blocks of rows that stay in cache: about thirty bytes of scratch an element of one block, nothing the size of
the inputs. Rows that pass cost a dozen vectorised operations; only rows that fail are looked at element by element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlactl.errors import UsageError
from mlactl.replay.tolerances import Tolerance

if TYPE_CHECKING:
    import torch

BLOCK_ELEMENTS = 1 << 19
"""Elements compared at once: small enough for the caches, large enough to make the cost of an operation's call vanish."""

PIECE_ELEMENTS = 1 << 16
"""Longer rows are judged in pieces of this length."""

TOP_CLUSTERS = 4
_TINY = 1e-38


@dataclass(frozen=True, slots=True)
class Axes:
    """What a tensor's dimensions are called, and which group (request, rank) each index of the first one belongs to.

    `offset` names coordinates of a slice as those of the whole: index i of dimension d is reported as `origin[d][i]`.
    """

    names: tuple[str, ...]
    group_name: str | None = None
    groups: tuple[int, ...] = ()
    origin: tuple[tuple[int, ...] | None, ...] = ()

    def coordinates(self, index: Sequence[int]) -> tuple[tuple[str, int], ...]:
        """Named coordinates of an element, the group first."""
        named = [(name, self._whole(axis, position)) for axis, (name, position) in enumerate(zip(self.names, index, strict=True))]
        if self.group_name is not None and index:
            named.insert(0, (self.group_name, self.groups[index[0]]))
        return tuple(named)

    def _whole(self, axis: int, position: int) -> int:
        origin = self.origin[axis] if axis < len(self.origin) else None
        return position if origin is None else origin[position]


@dataclass(frozen=True, slots=True)
class Element:
    """One element of both tensors. `ulp` counts representable values of the actual tensor's type between the two; None where a NaN is involved."""

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
    """How mismatches spread along one axis: `indices` of `extent` hold any, `top` the fullest with (index, mismatches, elements)."""

    axis: str
    indices: int
    extent: int
    top: tuple[tuple[int, int, int], ...]
    inferred: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class WorstRow:
    """The row with the lowest cosine, or the norm furthest off where no cosine fails."""

    coordinates: tuple[tuple[str, int], ...]
    cosine: float
    norm_ratio: float
    largest_error_share: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """All that one pass over a pair of tensors found. `cosine` is the lowest of any row and `norm_deviation` the largest.

    `needed` is the smallest tolerance of the used shape whose element rule would pass, None when none would (NaN or
    infinity by position, or an error where the tolerance allows none).
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
    notes: tuple[str, ...] = ()
    first: Element | None = None
    worst: Element | None = None
    worst_row: WorstRow | None = None
    clusters: tuple[Cluster, ...] = ()

    @property
    def matches(self) -> bool:
        """Whether the actual tensor is right."""
        return self.status == "match"


@dataclass(slots=True)
class _Tally:
    """What the pass accumulates."""

    mismatches: int = 0
    bad_rows: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    cosine: float = math.inf
    norm: float = 0.0
    ratio: float = 0.0
    nan_actual: int = 0
    nan_expected: int = 0
    infinite: int = 0
    nonzero_actual: bool = False
    nonzero_expected: bool = False
    position_faults: int = 0
    equal: bool = True
    first: int | None = None
    worst: int | None = None
    worst_ratio: float = -1.0
    worst_row: tuple[int, float, float, float] | None = None
    worst_row_badness: float = -1.0
    by_row: dict[int, int] = field(default_factory=dict)
    by_column: Any = None


def compare(
    actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance, *, name: str, axes: Axes | None = None, allow_nan: bool = False
) -> Comparison:
    """Compares `actual` with `expected` (same shape, any real types); the first is judged, the second is taken as right.

    Raises UsageError for shapes that differ, tensors without elements and complex types.
    """
    _check(name, actual, expected)
    names = axes or Axes(tuple(f"dim{position}" for position in range(actual.ndim)))
    columns = _columns(actual)
    left, right = actual.detach().reshape(-1, columns), expected.detach().reshape(-1, columns)
    tally = _Tally()
    step = max(1, BLOCK_ELEMENTS // columns)
    for start in range(0, left.shape[0], step):
        _block(tally, left[start : start + step], right[start : start + step], start, tolerance, allow_nan)
    return _result(name, actual, expected, tolerance, tally, names, columns, allow_nan)


def _check(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    if actual.shape != expected.shape:
        raise UsageError(f"{name}: shapes differ, {list(actual.shape)} against {list(expected.shape)}", hint="compare tensors of one shape")
    if actual.numel() == 0:
        raise UsageError(f"{name}: nothing to compare, the tensors have no elements ({list(actual.shape)})")
    if actual.is_complex() or expected.is_complex():
        raise UsageError(f"{name}: complex tensors are not compared")


def _columns(tensor: torch.Tensor) -> int:
    """Elements of a row: the last dimension, cut into equal pieces where it is very long."""
    length = tensor.shape[-1] if tensor.ndim else 1
    if length <= PIECE_ELEMENTS:
        return length
    return next(size for size in range(PIECE_ELEMENTS, 0, -1) if length % size == 0)


def _working_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """fp32 where it holds every value exactly, else fp64."""
    import torch

    narrow = {torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8, torch.int16, torch.bool}
    return torch.float32 if all(tensor.dtype in narrow for tensor in tensors) else torch.float64


def _block(tally: _Tally, left: torch.Tensor, right: torch.Tensor, start: int, tolerance: Tolerance, allow_nan: bool) -> None:
    """One block of rows: statistics of every row, then the rows that fail one by one."""
    import torch

    dtype = _working_dtype(left, right)
    actual, expected = left.to(dtype), right.to(dtype)
    error = actual - expected
    energy = torch.linalg.vecdot(expected, expected).double()
    cross = torch.linalg.vecdot(expected, error).double()
    noise = torch.linalg.vecdot(error, error).double()
    magnitude = expected.abs()
    largest = magnitude.amax(1)
    error.abs_()
    errors = error.amax(1)
    finite = torch.isfinite(errors) & torch.isfinite(largest) & torch.isfinite(energy + noise)

    allowed = (largest * tolerance.row).clamp_min_(max(tolerance.atol, _TINY))
    relative = torch.where(finite, (error / magnitude.clamp_min(_TINY)).amax(1), 0.0)
    if tolerance.rtol:
        ratio = (error / torch.maximum(magnitude.mul_(tolerance.rtol), allowed[:, None])).amax(1)
    else:
        ratio = errors / allowed
    energy_actual = (energy + 2 * cross + noise).clamp_min(0.0)
    cosine = torch.where(noise == 0, 1.0, (energy + cross) / (energy * energy_actual).sqrt().clamp_min(1e-300))
    norm = torch.where(noise == 0, 0.0, ((energy_actual / energy.clamp_min(1e-300)).sqrt() - 1).abs())
    norm = torch.where((energy == 0) & (energy_actual > 0), math.inf, norm)

    bad = ~finite | (ratio > 1)
    if tolerance.cosine is not None:
        bad |= cosine < tolerance.cosine
    if tolerance.norm is not None:
        bad |= norm > tolerance.norm
    good = finite & ~bad
    if bool(good.any()):
        _tally_rows(tally, start, good, errors, relative, ratio, cosine, norm, largest)
        tally.nonzero_expected |= bool(largest[good].any())
        tally.nonzero_actual |= bool(energy_actual[good].any())
    tally.equal &= bool((errors[finite] == 0).all()) and torch.equal(left[~finite], right[~finite].to(left.dtype))
    if bool(bad.any()):
        rows = bad.nonzero()[:, 0]
        _bad_rows(tally, left[rows].double(), right[rows].double(), rows + start, tolerance, allow_nan)


def _tally_rows(
    tally: _Tally,
    start: int,
    keep: torch.Tensor,
    errors: torch.Tensor,
    relative: torch.Tensor,
    ratio: torch.Tensor,
    cosine: torch.Tensor,
    norm: torch.Tensor,
    largest: torch.Tensor,
) -> None:
    import torch

    zero = torch.zeros((), dtype=ratio.dtype)
    tally.max_abs = max(tally.max_abs, float(torch.where(keep, errors, zero).max()))
    tally.max_rel = max(tally.max_rel, float(torch.where(keep, relative, zero).max()))
    tally.cosine = min(tally.cosine, float(torch.where(keep, cosine, 1.0).min()))
    tally.norm = max(tally.norm, float(torch.where(keep, norm, 0.0).max()))
    ratios = torch.where(keep, ratio, zero)
    position = int(ratios.argmax())
    tally.ratio = max(tally.ratio, float(ratios[position]))
    badness = float(errors[position] / largest[position].clamp_min(_TINY))
    if tally.worst_row is None or (tally.worst_row_badness < 0 and badness > tally.worst_row[3]):
        tally.worst_row = (start + position, float(cosine[position]), 1.0 + float(norm[position]), badness)


def _bad_rows(tally: _Tally, actual: torch.Tensor, expected: torch.Tensor, rows: torch.Tensor, tolerance: Tolerance, allow_nan: bool) -> None:
    """Rows that fail, or hold something that is not finite: element by element in fp64."""
    import torch

    nan_actual, nan_expected = actual.isnan(), expected.isnan()
    tally.nan_actual += int(nan_actual.sum())
    tally.nan_expected += int(nan_expected.sum())
    both_nan = nan_actual & nan_expected
    same_infinity = actual.isinf() & (actual == expected)
    tally.infinite += int(same_infinity.sum())
    unfit = ~(actual.isfinite() & expected.isfinite()) & ~same_infinity
    if allow_nan:
        unfit &= ~both_nan
    comparable = actual.isfinite() & expected.isfinite()
    tally.position_faults += int(unfit.sum())

    left, right = actual.where(comparable, 0.0), expected.where(comparable, 0.0)
    error, magnitude = (left - right).abs(), right.abs()
    largest = magnitude.amax(1)
    floor = (largest * tolerance.row).clamp_min(tolerance.atol)
    allowed = torch.maximum(magnitude * tolerance.rtol, floor[:, None])
    ratio = torch.where(error == 0, 0.0, error / allowed)
    ratio = torch.where(unfit, math.inf, ratio)
    mismatch = ratio > 1
    energy, energy_actual = (right * right).sum(1), (left * left).sum(1)
    cosine = torch.where((energy == 0) & (energy_actual == 0), 1.0, (left * right).sum(1) / (energy * energy_actual).sqrt().clamp_min(1e-300))
    norm_ratio = torch.where((energy == 0) & (energy_actual == 0), 1.0, (energy_actual / energy.clamp_min(1e-300)).sqrt())
    norm = (norm_ratio - 1).abs()
    bad = mismatch.any(1)
    for limit, off in ((tolerance.cosine, cosine < (tolerance.cosine or 0)), (tolerance.norm, norm > (tolerance.norm or 0))):
        if limit is not None:
            bad |= off

    tally.max_abs = max(tally.max_abs, float(error.max()))
    tally.max_rel = max(tally.max_rel, float(torch.where(error == 0, 0.0, error / magnitude).max()))
    tally.cosine = min(tally.cosine, float(cosine.min()))
    tally.norm = max(tally.norm, float(norm.max()))
    finite_ratio = torch.where(unfit, 0.0, ratio)
    tally.ratio = max(tally.ratio, float(finite_ratio.max()))
    tally.nonzero_actual |= bool(energy_actual.any())
    tally.nonzero_expected |= bool(energy.any())
    if bool(bad.any()):
        _tally_mismatches(tally, mismatch, ratio, bad, rows)
        share = error.amax(1) / largest.clamp_min(_TINY)
        badness = torch.where(bad, torch.where(unfit.any(1), math.inf, (1 - cosine) + norm + share), -1.0)
        position = int(badness.argmax())
        if float(badness[position]) > tally.worst_row_badness:
            tally.worst_row_badness = float(badness[position])
            tally.worst_row = (int(rows[position]), float(cosine[position]), float(norm_ratio[position]), float(share[position]))


def _tally_mismatches(tally: _Tally, mismatch: torch.Tensor, ratio: torch.Tensor, bad: torch.Tensor, rows: torch.Tensor) -> None:
    import torch

    columns = mismatch.shape[1]
    # A row can fail by cosine or norm alone: its largest error then stands for it.
    alone = bad & ~mismatch.any(1)
    counted = mismatch.clone()
    counted[alone, ratio[alone].argmax(1)] = True
    tally.bad_rows += int(bad.sum())
    tally.mismatches += int(mismatch.sum())
    per_row = counted.sum(1)
    for row, count in zip(rows[bad].tolist(), per_row[bad].tolist(), strict=True):
        tally.by_row[row] = tally.by_row.get(row, 0) + count
    per_column = counted.sum(0)
    tally.by_column = per_column if tally.by_column is None else tally.by_column + per_column
    position = int(counted.to(torch.uint8).flatten().argmax())
    if tally.first is None:
        tally.first = int(rows[position // columns]) * columns + position % columns
    flat = torch.where(counted, ratio, -1.0).flatten()
    position = int(flat.argmax())
    if float(flat[position]) > tally.worst_ratio:
        tally.worst_ratio = float(flat[position])
        tally.worst = int(rows[position // columns]) * columns + position % columns


def _result(
    name: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance, tally: _Tally, axes: Axes, columns: int, allow_nan: bool
) -> Comparison:
    notes = []
    all_zero = tally.nonzero_expected and not tally.nonzero_actual
    if all_zero:
        notes.append("the output is all zero, the reference is not")
    if tally.nan_actual or tally.nan_expected:
        allowed = ", allowed" if allow_nan and not tally.position_faults else ""
        notes.append(f"NaN: {tally.nan_actual:,} in the output, {tally.nan_expected:,} in the reference{allowed}")
    failed = bool(tally.bad_rows or all_zero)
    possible = not tally.position_faults and math.isfinite(tally.ratio) and tally.ratio < 1e30
    rows = actual.numel() // columns
    return Comparison(
        name=name,
        shape=tuple(actual.shape),
        actual_dtype=str(actual.dtype).removeprefix("torch."),
        expected_dtype=str(expected.dtype).removeprefix("torch."),
        tolerance=tolerance,
        status="mismatch" if failed else "match",
        elements=actual.numel(),
        mismatches=tally.mismatches,
        rows=rows,
        bad_rows=tally.bad_rows,
        max_abs=tally.max_abs,
        max_rel=tally.max_rel if tally.max_rel < 1e30 else math.inf,
        cosine=None if tally.cosine == math.inf else tally.cosine,
        norm_deviation=tally.norm,
        needed=tolerance.scaled(tally.ratio) if possible else None,
        needed_factor=tally.ratio if possible else math.inf,
        bitwise=tally.equal and actual.dtype == expected.dtype,
        nan_actual=tally.nan_actual,
        nan_expected=tally.nan_expected,
        infinite=tally.infinite,
        notes=tuple(notes),
        first=None if tally.first is None else element(actual, expected, tally.first, axes),
        worst=None if tally.worst is None else element(actual, expected, tally.worst, axes),
        worst_row=_worst_row(tally, axes, columns, actual),
        clusters=_clusters(tally, axes, columns, actual) if failed else (),
    )


def _worst_row(tally: _Tally, axes: Axes, columns: int, actual: torch.Tensor) -> WorstRow | None:
    if tally.worst_row is None or actual.ndim < 2:
        return None
    row, cosine, ratio, share = tally.worst_row
    coordinates = axes.coordinates(_unravel(row * columns, actual.shape))
    return WorstRow(tuple(pair for pair in coordinates if pair[0] != axes.names[-1]), cosine, ratio, share)


def _unravel(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    index = []
    for extent in reversed(shape):
        index.append(position % extent)
        position //= extent
    return tuple(reversed(index))


def element(actual: torch.Tensor, expected: torch.Tensor, position: int, axes: Axes) -> Element:
    """The element at a flat position of both tensors, with its name and ULP distance."""
    index = _unravel(position, actual.shape)
    left, right = float(actual[index]), float(expected[index])
    return Element(index, axes.coordinates(index), left, right, ulp_distance(left, right, actual.dtype))


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


def _clusters(tally: _Tally, axes: Axes, columns: int, actual: torch.Tensor) -> tuple[Cluster, ...]:
    """Where mismatches are along every axis of the output itself."""
    if not tally.by_row:
        return ()
    shape = actual.shape
    counts: list[dict[int, int]] = [{} for _ in shape]
    groups: dict[int, int] = {}
    for row, count in tally.by_row.items():
        index = _unravel(row * columns, shape)
        for axis in range(len(shape) - 1):
            place = axes._whole(axis, index[axis])
            counts[axis][place] = counts[axis].get(place, 0) + count
        if axes.group_name is not None:
            groups[axes.groups[index[0]]] = groups.get(axes.groups[index[0]], 0) + count
    found = []
    if axes.group_name is not None:
        extent = len(set(axes.groups))
        found.append(_cluster(axes.group_name, groups, extent, actual.numel() // extent))
    for axis, name in enumerate(axes.names[:-1]):
        found.append(_cluster(name, counts[axis], shape[axis], actual.numel() // shape[axis]))
    if columns == shape[-1]:
        by_column = {position: count for position, count in enumerate(tally.by_column.tolist()) if count}
        last = {axes._whole(len(shape) - 1, position): count for position, count in by_column.items()}
        found.append(_cluster(axes.names[-1], last, shape[-1], actual.numel() // shape[-1]))
    return tuple(found)


def _cluster(axis: str, counts: dict[int, int], extent: int, elements: int) -> Cluster:
    top = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:TOP_CLUSTERS]
    return Cluster(axis, len(counts), extent, tuple((index, count, elements) for index, count in top))
