"""Compares two files: captures by their results, other tensors by name."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from mlactl.errors import UsageError
from mlactl.replay import capture as captures
from mlactl.replay import storage, tensors, tolerances
from mlactl.replay.compare import Axes, Comparison, compare
from mlactl.replay.report import MATCH, MISMATCH, CallReport, Pair, Report
from mlactl.replay.results import Strictness, call_axes, natural_lse, result_comparisons

if TYPE_CHECKING:
    import torch


def diff(left: Path, right: Path, options: Strictness) -> Report:
    """Compares A (judged) with B (taken as right). Raises UsageError where nothing of the two can be compared."""
    if left.is_dir() != right.is_dir():
        raise UsageError(f"{left} and {right}: a folder and a file", hint="compare two folders of captures, or two files")
    if left.is_dir():
        return _folders(left, right, options)
    return Report((_files(left, right, options),), command="diff")


def is_capture(path: Path) -> bool:
    """Whether a name on the command line means a capture."""
    return path.name.endswith((storage.IN_SUFFIX, storage.OUT_SUFFIX)) or (path.suffix != ".pt" and captures.inputs_path(path).exists())


def _folders(left: Path, right: Path, options: Strictness) -> Report:
    ours = {captures.stem(path).relative_to(left): path for path in captures.find([left])}
    theirs = {captures.stem(path).relative_to(right): path for path in captures.find([right])}
    both = sorted(set(ours) & set(theirs))
    if not both:
        raise UsageError(f"{left} and {right} share no capture: {len(ours)} and {len(theirs)} names, none the same")
    calls = [_files(ours[name], theirs[name], options) for name in both]
    for name in sorted(set(ours) ^ set(theirs)):
        side = left if name in ours else right
        calls.append(CallReport(str(name), MISMATCH, (("only in", str(side)),), message=f"{name} is only in {side}"))
    return Report(tuple(calls), command="diff")


def _files(left: Path, right: Path, options: Strictness) -> CallReport:
    started = time.perf_counter()
    if is_capture(left) != is_capture(right):
        raise UsageError(f"{left} and {right}: one is a capture, the other is not", hint="compare two captures, or two files of tensors")
    made = _captures(left, right, options) if is_capture(left) else _tensors(left, right, options)
    comparisons, notes = made
    if not comparisons:
        raise UsageError(f"{left} and {right}: nothing to compare; {'; '.join(notes) or 'no common tensor'}")
    pair = Pair(left.name, right.name, comparisons)
    wrong = not pair.matches or any(note.startswith("only in") for note in notes)
    return CallReport(
        name=f"{left.name} against {right.name}",
        status=MISMATCH if wrong else MATCH,
        provenance=(("A", str(left)), ("B", str(right))),
        pairs=(pair,),
        notes=notes,
        seconds=time.perf_counter() - started,
    )


def _captures(left: Path, right: Path, options: Strictness) -> tuple[tuple[Comparison, ...], tuple[str, ...]]:
    ours, theirs = captures.read(left), captures.read(right)
    notes = []
    for name in sorted(set(ours.tensors) | set(theirs.tensors)):
        digests = [side.facts[name].sha256 if name in side.facts else None for side in (ours, theirs)]
        if digests[0] != digests[1]:
            notes.append(f"inputs differ: {name}")
    if ours.call != theirs.call:
        notes.append(
            "calls differ: " + ", ".join(name for name in ours.call.__struct_fields__ if getattr(ours.call, name) != getattr(theirs.call, name))
        )
    for what in ("output", "lse"):
        have = [getattr(side, what) is not None for side in (ours, theirs)]
        if have[0] != have[1]:
            notes.append(f"only in {'A' if have[0] else 'B'}: {what}")
    output = None if ours.output is None or theirs.output is None else (ours.output, theirs.output)
    bases = [None if side.lse is None else natural_lse(side.lse, side.call.lse_base) for side in (ours, theirs)]
    lse = None if bases[0] is None or bases[1] is None else (bases[0], bases[1])
    found = result_comparisons(ours.call.record, ours.call.mode, output, lse, call_axes(ours), options)
    return found, tuple(notes)


def _tensors(left: Path, right: Path, options: Strictness) -> tuple[tuple[Comparison, ...], tuple[str, ...]]:
    ours, theirs = tensors.load(left), tensors.load(right)
    if len(ours) == len(theirs) == 1 and set(ours) != set(theirs):
        (ours_name,), (theirs_name,) = ours, theirs
        return (_compare(f"{ours_name} / {theirs_name}", ours[ours_name], theirs[theirs_name], options),), ()
    notes = [f"only in {'A' if name in ours else 'B'}: {name}" for name in sorted(set(ours) ^ set(theirs))]
    return tuple(_compare(name, ours[name], theirs[name], options) for name in sorted(set(ours) & set(theirs))), tuple(notes)


def _compare(name: str, left: torch.Tensor, right: torch.Tensor, options: Strictness) -> Comparison:
    # The narrower type rounds more, and decides how close the two can be.
    narrow = min((side for side in (left, right) if side.is_floating_point()), key=lambda side: side.element_size(), default=left)
    base = tolerances.for_dtype(str(narrow.dtype).removeprefix("torch."))
    tolerance = tolerances.overridden(base, atol=options.atol, rtol=options.rtol, row=options.row)
    axes = Axes(("row", "head", "dim")) if left.ndim == 3 else None
    return compare(left, right, tolerance, name=name, axes=axes, allow_nan=options.allow_nan)
