"""Compares two files, or two folders of captures name by name: captures by their results, other tensors by name."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mlactl.errors import CannotRun, MlactlError, UsageError
from mlactl.printable import plain
from mlactl.regular_files import unreadable
from mlactl.replay import capture as captures
from mlactl.replay import storage, tensors, tolerances
from mlactl.replay.compare import Axes, Comparison, compare
from mlactl.replay.report import ERROR, MATCH, MISMATCH, CallReport, Pair, Report
from mlactl.replay.results import Strictness, call_axes, natural_lse, result_comparisons

if TYPE_CHECKING:
    import torch

_EXPECTED = "name two captures, two .safetensors or .pt files, or two folders of captures or saved results"


@dataclass(frozen=True, slots=True)
class Work:
    """What is compared: (name, A, B) pairs, and (name, folder) of captures that only one folder has."""

    pairs: tuple[tuple[str, Path, Path], ...]
    alone: tuple[tuple[str, Path], ...] = ()

    def pair_bytes(self, place: int) -> int:
        """Bytes on disk of one pair."""
        return sum(_size(file) for side in self.pairs[place][1:] for file in _files_of(side))

    def files(self) -> tuple[Path, ...]:
        """Every file of both sides, those that only one side has too."""
        sides = [side for _, *both in self.pairs for side in both] + [folder / name for name, folder in self.alone]
        return tuple(file for side in sides for file in _files_of(side))


@dataclass(slots=True)
class _Found:
    """What comparing one pair found; `refused` are parts that could not be compared."""

    comparisons: list[Comparison] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refused: list[MlactlError] = field(default_factory=list)


def plan(left: Path, right: Path) -> Work:
    """What there is to compare. Raises UsageError for two things that are not alike or share no name, CannotRun for what is not there."""
    for side in (left, right):
        if not _there(side) and not is_capture(side):
            raise CannotRun(f"{plain(side)} does not exist", hint=_EXPECTED)
    kinds = [_is_folder(side) for side in (left, right)]
    if kinds[0] != kinds[1]:
        raise UsageError(f"{plain(left)} and {plain(right)}: a folder and a file", hint="compare two folders of captures, or two files")
    if not kinds[0]:
        return Work(((f"{left.name} against {right.name}", left, right),))
    ours, theirs = _held_by(left), _held_by(right)
    both = sorted(set(ours) & set(theirs))
    if not both:
        raise UsageError(
            f"{plain(left)} and {plain(right)} share no name: {len(ours)} and {len(theirs)} names, none the same",
            hint=f"mlactl diff {plain(ours[min(ours)])} {plain(theirs[min(theirs)])} compares two of any name",
        )
    alone = tuple((str(name), left if name in ours else right) for name in sorted(set(ours) ^ set(theirs)))
    return Work(tuple((str(name), ours[name], theirs[name]) for name in both), alone)


def _held_by(folder: Path) -> dict[Path, Path]:
    """The captures of a folder by name; where it has none, the results that `mlactl replay --save` wrote there."""
    try:
        return {captures.stem(path).relative_to(folder): path for path in captures.find([folder])}
    except UsageError:
        saved = {path.relative_to(folder): path for path in folder.rglob(f"*{storage.RESULTS_SUFFIX}")}
        if not saved:
            raise
        return saved


def diff(work: Work, options: Strictness, *, on_pair: Callable[[int], None] | None = None) -> Report:
    """Compares A (judged) with B (taken as right); `on_pair` hears the bytes of each pair that is done.

    A pair that cannot be compared has a report that says so, and the others are compared all the same. Raises UsageError
    for tolerances that are none, and what a pair raises where it is the only one.
    """
    options.require()
    calls = []
    for place, (name, left, right) in enumerate(work.pairs):
        about = (("A", str(left)), ("B", str(right)))
        try:
            calls.append(_pair(name, left, right, about, options))
        except MlactlError as error:
            if len(work.pairs) == 1 and not work.alone:
                raise
            calls.append(CallReport(name, ERROR, about, message=error.message, hint=error.hint))
        if on_pair is not None:
            on_pair(work.pair_bytes(place))
    for name, side in work.alone:
        finding = f"{name} is only in {side}"
        calls.append(CallReport(name, MISMATCH, (("only in", str(side)),), findings=(finding,)))
    return Report(tuple(calls), command="diff")


def is_capture(path: Path) -> bool:
    """Whether a name on the command line means a capture."""
    if path.name.endswith((storage.IN_SUFFIX, storage.OUT_SUFFIX)):
        return True
    return not _there(path) and _there(captures.inputs_path(path))


def _pair(name: str, left: Path, right: Path, about: tuple[tuple[str, str], ...], options: Strictness) -> CallReport:
    started = time.perf_counter()
    both = f"{plain(left)} and {plain(right)}"
    kinds = [is_capture(side) for side in (left, right)]
    if kinds[0] != kinds[1]:
        raise UsageError(f"{both}: one is a capture, the other is not", hint="compare two captures, or two files of tensors")
    found = _captures(left, right, options) if kinds[0] else _tensors(left, right, options)
    problem = "; ".join(error.message for error in found.refused)
    hint = found.refused[0].hint if found.refused else None
    if not found.comparisons:
        raise UsageError(
            f"{both}: {problem}" if problem else f"{both}: nothing to compare; {'; '.join(found.findings) or 'no common tensor'}",
            hint=hint or "name files that hold tensors of one name, or one tensor each",
        )
    pair = Pair(left.name, right.name, tuple(found.comparisons))
    return CallReport(
        name=name,
        status=ERROR if found.refused else MISMATCH if found.findings or not pair.matches else MATCH,
        provenance=about,
        pairs=(pair,),
        notes=tuple(found.notes),
        message=problem or None,
        hint=hint,
        seconds=time.perf_counter() - started,
        findings=tuple(found.findings),
    )


def _captures(left: Path, right: Path, options: Strictness) -> _Found:
    ours, theirs = captures.read(left), captures.read(right)
    found = _Found()
    for name in sorted(set(ours.tensors) | set(theirs.tensors)):
        digests = [side.facts[name].sha256 if name in side.facts else None for side in (ours, theirs)]
        if digests[0] != digests[1]:
            found.notes.append(f"inputs differ: {name}")
    if ours.call != theirs.call:
        found.notes.append(
            "calls differ: " + ", ".join(name for name in ours.call.__struct_fields__ if getattr(ours.call, name) != getattr(theirs.call, name))
        )
    for what in ("output", "lse"):
        have = [getattr(side, what) is not None for side in (ours, theirs)]
        if have[0] != have[1]:
            found.findings.append(f"only in {'A' if have[0] else 'B'}: {what}")
    output = None if ours.output is None or theirs.output is None else (ours.output, theirs.output)
    bases = [None if side.lse is None else natural_lse(side.lse, side.call.lse_base) for side in (ours, theirs)]
    lse = None if bases[0] is None or bases[1] is None else (bases[0], bases[1])
    # One at a time: an output that cannot be compared says nothing about the LSE.
    for results in ((output, None), (None, lse)):
        try:
            found.comparisons += result_comparisons(ours.call.record, ours.call.mode, results[0], results[1], call_axes(ours), options)
        except UsageError as error:
            found.refused.append(error)
    return found


def _tensors(left: Path, right: Path, options: Strictness) -> _Found:
    found = _Found()
    ours, theirs = tensors.read(left), tensors.read(right)
    others = dict.fromkeys([*ours.others, *theirs.others])
    if others:
        found.notes.append(f"no tensors, not compared: {', '.join(list(others)[:8])}{', …' if len(others) > 8 else ''}")
    names = [(name, name) for name in sorted(set(ours.tensors) & set(theirs.tensors))]
    if not names and len(ours.tensors) == len(theirs.tensors) == 1:
        names = [(next(iter(ours.tensors)), next(iter(theirs.tensors)))]
    else:
        found.findings += [f"only in {'A' if name in ours.tensors else 'B'}: {name}" for name in sorted(set(ours.tensors) ^ set(theirs.tensors))]
    for name, other in names:
        try:
            label = name if name == other else f"{name} / {other}"
            found.comparisons.append(_compare(label, ours.tensors[name], theirs.tensors[other], options))
        except UsageError as error:
            found.refused.append(error)
    return found


def _compare(name: str, left: torch.Tensor, right: torch.Tensor, options: Strictness) -> Comparison:
    base = tolerances.for_dtype(_coarser(left, right))
    tolerance = tolerances.overridden(base, atol=options.atol, rtol=options.rtol, row=options.row)
    axes = Axes(("row", "head", "dim")) if left.ndim == 3 else None
    return compare(left, right, tolerance, name=name, axes=axes, allow_nan=options.allow_nan)


def _coarser(left: torch.Tensor, right: torch.Tensor) -> str:
    """The element type that rounds more, whichever side has it: it decides how close the two can be."""
    import torch

    kinds = [side.dtype for side in (left, right) if side.is_floating_point()]
    return str(max(kinds, key=lambda kind: torch.finfo(kind).eps, default=left.dtype)).removeprefix("torch.")


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as error:
        raise unreadable(path, error) from error


def _there(path: Path) -> bool:
    """Whether something has that name, a link that leads nowhere too; raises CannotRun where nobody may look."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise unreadable(path, error) from error
    return True


def _files_of(path: Path) -> tuple[Path, ...]:
    if not is_capture(path):
        return (path,)
    return captures.files(path)[:2]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
