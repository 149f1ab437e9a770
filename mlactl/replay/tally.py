"""One streaming pass over a pair of tensors: what compare reports, gathered block by block.

Works on blocks of rows that stay in cache: about thirty bytes of scratch an element of one block, nothing the size of
the inputs. Rows that pass cost a dozen vectorised operations; only rows that fail are looked at element by element.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlactl.replay.tolerances import Tolerance

if TYPE_CHECKING:
    import torch

BLOCK_ELEMENTS = 1 << 19
"""Elements compared at once: small enough for the caches, large enough to make the cost of an operation's call vanish."""

PIECE_ELEMENTS = 1 << 16
"""Longer rows are judged in pieces of at most this length, whose lengths differ by one at most."""

_TINY = 1e-38
_SMALL = 1e-12
"""Squares of smaller values, or of their errors, vanish in fp32: such rows are judged in fp64."""


@dataclass(frozen=True, slots=True)
class RowShape:
    """How far a whole row is off: `norm_ratio` is norm(actual) / norm(expected), the errors are of its worst element.

    All are NaN where `not_finite` of its elements are NaN or infinite on one side only.
    """

    start: int
    cosine: float
    norm_ratio: float
    error: float
    error_share: float
    not_finite: int = 0


@dataclass(slots=True)
class Tally:
    """What the pass accumulates. Rows and elements are known by their flat position; statistics leave out rows that are not finite."""

    mismatches: int = 0
    rows: int = 0
    bad_rows: int = 0
    element_rows: int = 0
    cosine_rows: int = 0
    norm_rows: int = 0
    not_finite: int = 0
    not_finite_rows: int = 0
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
    equal: bool = True
    first: int | None = None
    worst: int | None = None
    worst_rank: tuple[float, float] = (-1.0, -1.0)
    worst_row: RowShape | None = None
    worst_row_rank: tuple[float, float] = (-1.0, -1.0)
    by_row: dict[int, int] = field(default_factory=dict)
    by_column: Any = None


def tally(actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance, *, allow_nan: bool) -> Tally:
    """Judges every row (the last dimension) of two tensors of one shape that hold at least one element."""
    found = Tally()
    for start, left, right in _blocks(actual, expected):
        found.rows += len(left)
        _block(found, left, right, start, tolerance, allow_nan)
    found.equal = found.equal and actual.dtype == expected.dtype and all(_same_bits(left, right) for _, left, right in _blocks(actual, expected))
    return found


def columns_of(tensor: torch.Tensor) -> int | None:
    """Elements of a row; None where rows are judged in pieces."""
    length = tensor.shape[-1] if tensor.ndim else 1
    return length if length <= PIECE_ELEMENTS else None


def _blocks(actual: torch.Tensor, expected: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(flat position, rows of both) of one block after the other, in order."""
    length = actual.shape[-1] if actual.ndim else 1
    left, right = actual.detach().reshape(-1, length), expected.detach().reshape(-1, length)
    size, longer = divmod(length, -(-length // PIECE_ELEMENTS))
    if not longer:
        yield from _even(left.reshape(-1, size), right.reshape(-1, size), 0)
        return
    # A row that cannot be cut evenly: its first pieces have one element more than the others.
    cut = longer * (size + 1)
    for row in range(len(left)):
        for begin, end, width in ((0, cut, size + 1), (cut, length, size)):
            yield from _even(left[row, begin:end].reshape(-1, width), right[row, begin:end].reshape(-1, width), row * length + begin)


def _even(left: torch.Tensor, right: torch.Tensor, start: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    columns = left.shape[1]
    step = max(1, BLOCK_ELEMENTS // columns)
    for first in range(0, len(left), step):
        yield start + first * columns, left[first : first + step], right[first : first + step]


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether every bit is the same: 0 and -0 are equal numbers, and NaN is no number."""
    import torch

    # Not flatten(): a single element is contiguous whatever its stride, and keeps it.
    flat = [side.resolve_neg().contiguous().as_strided((side.numel(),), (1,)) for side in (left, right)]
    # As words where they are aligned: eight times fewer than bytes.
    aligned = all(side.nbytes % 8 == 0 and side.storage_offset() * side.element_size() % 8 == 0 for side in flat)
    ours, theirs = (side.view(torch.int64 if aligned else torch.uint8) for side in flat)
    return torch.equal(ours, theirs)


def _working_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """fp32 where it holds every value exactly, else fp64."""
    import torch

    narrow = {torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8, torch.int16, torch.bool}
    return torch.float32 if all(tensor.dtype in narrow for tensor in tensors) else torch.float64


def _wide(*tensors: torch.Tensor) -> bool:
    """Whether fp64 rounds values of one of them."""
    import torch

    return any(tensor.dtype in (torch.int64, torch.uint64) for tensor in tensors)


def _exact_error(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left - right in fp64, 0 only where they are equal: 2^53 + 1 is not 2^53, though both are the same fp64 number."""
    high, low = _halves(left)
    high_right, low_right = _halves(right)
    return (high - high_right) * 2.0**32 + (low - low_right)


def _halves(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 (high, low) with value = high * 2^32 + low and |low| < 2^32, both exact and of the value's sign.

    A low half of the other sign would be rounded: -1e-8 is not 2^32 - 1e-8 less 2^32.
    """
    import torch

    if tensor.is_floating_point():
        value = tensor.double()
        high = (value / 2.0**32).trunc()
        return high, value - high * 2.0**32
    if tensor.dtype == torch.uint64:
        whole = tensor.view(torch.int64)
        high = (whole >> 32).double()
        return torch.where(high < 0, high + 2.0**32, high), (whole & 0xFFFFFFFF).double()
    whole = tensor.to(torch.int64)
    low = torch.fmod(whole, 2**32)
    return ((whole - low) >> 32).double(), low.double()


def _block(found: Tally, left: torch.Tensor, right: torch.Tensor, start: int, tolerance: Tolerance, allow_nan: bool) -> None:
    """One block of rows: statistics of every row, then the rows that fail one by one."""
    import torch

    dtype = _working_dtype(left, right)
    actual, expected = left.to(dtype), right.to(dtype)
    wide = _wide(left, right)
    error = _exact_error(left, right) if wide else actual - expected
    energy = torch.linalg.vecdot(expected, expected).double()
    cross = torch.linalg.vecdot(expected, error).double()
    noise = torch.linalg.vecdot(error, error).double()
    magnitude = expected.abs()
    largest = magnitude.amax(1)
    error.abs_()
    errors = error.amax(1)
    plain = torch.isfinite(errors) & torch.isfinite(largest) & torch.isfinite(energy + noise) & ((largest >= _SMALL) | (largest == 0))

    allowed = (largest * tolerance.row).clamp_min_(max(tolerance.atol, _TINY))
    relative = torch.where(plain, (error / magnitude.clamp_min(_TINY)).amax(1), 0.0)
    if tolerance.rtol:
        ratio = (error / torch.maximum(magnitude.mul_(tolerance.rtol), allowed[:, None])).amax(1)
    else:
        ratio = errors / allowed
    energy_actual = (energy + 2 * cross + noise).clamp_min(0.0)
    cosine = torch.where(noise == 0, 1.0, (energy + cross) / (energy * energy_actual).sqrt().clamp_min(1e-300))
    norm_ratio = torch.where(noise == 0, 1.0, (energy_actual / energy.clamp_min(1e-300)).sqrt())
    norm_ratio = torch.where((energy == 0) & (energy_actual > 0), math.inf, norm_ratio)

    good = plain & (ratio <= 1)
    if tolerance.cosine is not None:
        good &= cosine >= tolerance.cosine
    if tolerance.norm is not None:
        good &= (norm_ratio - 1).abs() <= tolerance.norm
    if bool(good.any()):
        _tally_rows(found, start, left.shape[1], good, errors, relative, ratio, cosine, norm_ratio, largest)
        found.nonzero_expected |= bool(largest[good].any())
        found.nonzero_actual |= bool(energy_actual[good].any())
    found.equal &= not bool((errors > 0).any())
    if not bool(good.all()):
        rows = (~good).nonzero()[:, 0]
        ours, theirs = actual[rows].double(), expected[rows].double()
        _judge_rows(found, ours, theirs, error[rows] if wide else ours - theirs, rows * left.shape[1] + start, tolerance, allow_nan)


def _tally_rows(
    found: Tally,
    start: int,
    columns: int,
    keep: torch.Tensor,
    errors: torch.Tensor,
    relative: torch.Tensor,
    ratio: torch.Tensor,
    cosine: torch.Tensor,
    norm_ratio: torch.Tensor,
    largest: torch.Tensor,
) -> None:
    """The rows in `keep`, which pass."""
    import torch

    zero = torch.zeros((), dtype=ratio.dtype)
    found.max_abs = max(found.max_abs, float(torch.where(keep, errors, zero).max()))
    found.max_rel = max(found.max_rel, float(torch.where(keep, relative, zero).max()))
    found.cosine = min(found.cosine, float(torch.where(keep, cosine, 1.0).min()))
    found.norm = max(found.norm, float(torch.where(keep, (norm_ratio - 1).abs(), 0.0).max()))
    ratios = torch.where(keep, ratio, zero)
    position = int(ratios.argmax())
    found.ratio = max(found.ratio, float(ratios[position]))
    error = float(errors[position])
    share = error / float(largest[position]) if float(largest[position]) else math.inf if error else 0.0
    if found.worst_row is None or (found.worst_row_rank[0] < 0 and share > found.worst_row.error_share):
        found.worst_row = RowShape(start + position * columns, float(cosine[position]), float(norm_ratio[position]), error, share)


def _judge_rows(
    found: Tally, actual: torch.Tensor, expected: torch.Tensor, error: torch.Tensor, starts: torch.Tensor, tolerance: Tolerance, allow_nan: bool
) -> None:
    """Rows that fail, or hold something that is not finite or very small: element by element in fp64."""
    import torch

    nan_actual, nan_expected = actual.isnan(), expected.isnan()
    found.nan_actual += int(nan_actual.sum())
    found.nan_expected += int(nan_expected.sum())
    same_infinity = actual.isinf() & (actual == expected)
    found.infinite += int(same_infinity.sum())
    comparable = actual.isfinite() & expected.isfinite()
    unfit = ~comparable & ~same_infinity
    if allow_nan:
        unfit &= ~(nan_actual & nan_expected)
    unfit_rows = unfit.any(1)
    found.not_finite += int(unfit.sum())
    found.not_finite_rows += int(unfit_rows.sum())

    left, right = actual.where(comparable, 0.0), expected.where(comparable, 0.0)
    error, magnitude = error.abs().where(comparable, 0.0), right.abs()
    largest = magnitude.amax(1)
    floor = (largest * tolerance.row).clamp_min(tolerance.atol)
    ratio = torch.where(error == 0, 0.0, error / torch.maximum(magnitude * tolerance.rtol, floor[:, None]))
    ratio = torch.where(unfit, math.inf, ratio)
    mismatch = ratio > 1
    cosine, norm_ratio = cosine_and_norm(left, right)
    # What is left of such a row may be perfect, the row is not.
    cosine, norm_ratio = torch.where(unfit_rows, math.nan, cosine), torch.where(unfit_rows, math.nan, norm_ratio)
    deviation = (norm_ratio - 1).abs()
    by_element, none = mismatch.any(1), torch.zeros_like(unfit_rows)
    by_cosine = none if tolerance.cosine is None else cosine < tolerance.cosine
    by_norm = none if tolerance.norm is None else deviation > tolerance.norm
    bad = by_element | by_cosine | by_norm

    found.element_rows += int(by_element.sum())
    found.cosine_rows += int(by_cosine.sum())
    found.norm_rows += int(by_norm.sum())
    found.nonzero_actual |= bool((actual != 0).any())
    found.nonzero_expected |= bool((expected != 0).any())
    fit = ~unfit_rows
    if bool(fit.any()):
        found.max_abs = max(found.max_abs, float(error[fit].max()))
        found.max_rel = max(found.max_rel, float(torch.where(error == 0, 0.0, error / magnitude)[fit].max()))
        found.cosine = min(found.cosine, float(cosine[fit].min()))
        found.norm = max(found.norm, float(deviation[fit].max()))
        found.ratio = max(found.ratio, float(ratio[fit].max()))
    if bool(bad.any()):
        _tally_mismatches(found, mismatch, ratio, torch.where(unfit, math.inf, error), bad, starts)
        largest_error = error.amax(1)
        share = torch.where(largest_error == 0, 0.0, largest_error / largest)
        # Where elements must be equal nothing is asked of the row, and its worst element says how far off it is.
        shape = largest_error if tolerance.elements_exact() else (1 - cosine) + deviation + share
        place, rank = _furthest(torch.where(bad, torch.where(unfit_rows, math.inf, shape), -1.0), largest_error)
        if rank > found.worst_row_rank:
            found.worst_row_rank = rank
            lost = int(unfit[place].sum())
            error_there, share_there = (math.nan, math.nan) if lost else (float(largest_error[place]), float(share[place]))
            found.worst_row = RowShape(int(starts[place]), float(cosine[place]), float(norm_ratio[place]), error_there, share_there, lost)


def cosine_and_norm(actual: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and norm(actual) / norm(expected) over the last dimension, of finite fp64 values of any magnitude.

    Where both are zero they are equal (1 and 1); where one is, the cosine is 0 and the ratio 0 or infinite.
    """
    import torch

    # Each side by its own largest value: squares of what is very large or small leave even fp64.
    scales = [side.abs().amax(-1) for side in (actual, expected)]
    ours, theirs = (side / torch.where(scale == 0, 1.0, scale)[..., None] for side, scale in zip((actual, expected), scales, strict=True))
    norms = ours.norm(dim=-1), theirs.norm(dim=-1)
    both_zero = (scales[0] == 0) & (scales[1] == 0)
    cosine = torch.where(both_zero, 1.0, (ours * theirs).sum(-1) / torch.where(norms[0] * norms[1] == 0, 1.0, norms[0] * norms[1]))
    ratio = norms[0] / torch.where(norms[1] == 0, 1.0, norms[1]) * (scales[0] / torch.where(scales[1] == 0, 1.0, scales[1]))
    ratio = torch.where(scales[1] == 0, math.inf, ratio)
    return cosine, torch.where(both_zero, 1.0, ratio)


def _furthest(badness: torch.Tensor, error: torch.Tensor) -> tuple[int, tuple[float, float]]:
    """The place of the largest badness, of several the one with the largest error, and both: over a limit of 0 every error is infinite."""
    import torch

    place = int(torch.where(badness == badness.max(), error, -1.0).argmax())
    return place, (float(badness[place]), float(error[place]))


def _tally_mismatches(
    found: Tally, mismatch: torch.Tensor, ratio: torch.Tensor, error: torch.Tensor, bad: torch.Tensor, starts: torch.Tensor
) -> None:
    import torch

    columns = mismatch.shape[1]
    found.bad_rows += int(bad.sum())
    found.mismatches += int(mismatch.sum())
    for start, count in zip(starts[bad].tolist(), mismatch.sum(1)[bad].tolist(), strict=True):
        found.by_row[start] = count
    if found.by_column is None or len(found.by_column) == columns:
        per_column = mismatch.sum(0)
        found.by_column = per_column if found.by_column is None else found.by_column + per_column
    # A row can fail by cosine or norm alone: its largest error then stands for it.
    alone = bad & ~mismatch.any(1)
    shown = mismatch.clone()
    shown[alone, ratio[alone].argmax(1)] = True
    position = int(shown.to(torch.uint8).flatten().argmax())
    if found.first is None:
        found.first = int(starts[position // columns]) + position % columns
    position, rank = _furthest(torch.where(shown, ratio, -1.0).flatten(), error.flatten())
    if rank > found.worst_rank:
        found.worst_rank = rank
        found.worst = int(starts[position // columns]) + position % columns
