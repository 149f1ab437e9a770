"""Replays captures: reference, kernel and captured output, compared pairwise, whichever exist."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mlactl.errors import MlactlError, UsageError
from mlactl.printable import counted, safe, shell_word
from mlactl.replay import capture as captures
from mlactl.replay import oracle, storage
from mlactl.replay.capture import Capture
from mlactl.replay.dcp import groups
from mlactl.replay.inferred import inferred_clusters
from mlactl.replay.kernel import KernelResult, run_kernel
from mlactl.replay.report import ERROR, MATCH, MISMATCH, NOTHING, Bisection, CallReport, Pair, Report
from mlactl.replay.results import Strictness, call_axes, call_text, natural_lse, result_comparisons, sizes
from mlactl.replay.slices import cut, only_heads, selected
from mlactl.replay.workers import in_order

if TYPE_CHECKING:
    import torch

    Result = tuple[torch.Tensor | None, torch.Tensor | None]

REFERENCES = ("fp32", "fp64")


def _listed(indices: Iterable[int] | None) -> str | None:
    """Indices as a person types them."""
    return None if indices is None else ",".join(map(str, indices))


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What a person asked for. `rows` and `heads` restrict the comparison; `save` is the folder results are written to.

    `opener` gives the kernels' runtime its objects (`mlactl.opening.open_runtime`); None where the caller did. `on_step`
    hears what is being done, in this process; `kept` holds on to results for a picture.
    """

    reference: str = "fp32"
    device: str = "auto"
    kernel: bool = True
    repeats: int = 3
    strictness: Strictness = field(default_factory=Strictness)
    rows: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    bisect: bool = False
    smallest: Path | None = None
    save: Path | None = None
    cache_dir: str | None = None
    opener: Callable[..., object] | None = None
    threads: int | None = None
    on_step: Callable[[str], None] | None = None
    kept: Kept | None = None

    def command(self, targets: Iterable[Path | str], wrong: Pair) -> str:
        """The command that shows the smallest failing slice, judged alike: the worst row and head, or all that was asked where none stands out."""
        worst = next((item.worst for item in wrong.comparisons if item.worst is not None), None)
        place = dict(worst.coordinates) if worst is not None else {}
        given: list[tuple[str, object]] = [
            ("--rows", place.get("row", _listed(self.rows))),
            ("--heads", place.get("head", _listed(self.heads))),
            ("--reference", self.reference if self.reference != "fp32" else None),
            ("--device", self.device if self.device != "auto" else None),
            ("--repeats", self.repeats if self.repeats != 3 else None),
            ("--cache-dir", shell_word(self.cache_dir) if self.cache_dir is not None else None),
        ]
        options = [f"{name} {value}" for name, value in given if value is not None] + ["--no-kernel"] * (not self.kernel)
        return " ".join(["mlactl replay", *map(shell_word, targets), *options, *self.strictness.arguments()])

    def step(self, text: str) -> None:
        """Says what is being done now."""
        if self.on_step is not None:
            self.on_step(text)


@dataclass(frozen=True, slots=True)
class Results:
    """The results of one call, restricted to what was asked for; LSEs natural."""

    capture: Capture
    rows: tuple[int, ...]
    reference: tuple[torch.Tensor, torch.Tensor]
    captured: tuple[torch.Tensor | None, torch.Tensor | None]
    kernel: KernelResult
    heads: tuple[int, ...] | None = None


class Kept:
    """The results of the first capture that was compared, and of the first that does not match: what a picture is drawn of."""

    def __init__(self) -> None:
        self._first: Results | None = None
        self._wrong: Results | None = None

    def offer(self, results: Results, *, matches: bool) -> None:
        """Keeps results that may be drawn later."""
        self._first = self._first or results
        if not matches:
            self._wrong = self._wrong or results

    def find(self, capture: Capture, rows: tuple[int, ...], heads: tuple[int, ...] | None) -> Results | None:
        """The results of that very capture, rows and heads, where they were kept."""
        for held in (self._wrong, self._first):
            if held is not None and capture.path is not None and (held.capture.path, held.rows, held.heads) == (capture.path, rows, heads):
                return held
        return None


def replay_one(path: Path, options: ReplayOptions, name: str | None = None) -> CallReport:
    """Replays one capture; one that cannot be used, or that breaks something, becomes a report that says so.

    `name` is what reports call it, where its file's name alone would not tell it from another.
    """
    started = time.perf_counter()
    name = name or captures.display_names([path])[0]
    options.step(name)
    try:
        if options.threads is not None:
            import torch

            torch.set_num_threads(options.threads)
        report = replay_capture(replace(captures.read(path), name=name), options)
    except MlactlError as error:
        report = _error(path, name, error.message, error.hint)
    except Exception as error:
        if os.environ.get("MLACTL_DEBUG") == "1":
            raise
        # One capture must not take the reports of the others with it.
        reason = " ".join(str(error).split()) or "no message"
        report = _error(path, name, f"internal error: {type(error).__name__}: {reason}", f"MLACTL_DEBUG=1 mlactl replay {shell_word(path)}")
    return replace(report, seconds=time.perf_counter() - started)


def _error(path: Path, name: str, message: str, hint: str | None) -> CallReport:
    return CallReport(name, ERROR, (("capture", safe(path)),), message=safe(message), hint=None if hint is None else safe(hint))


def replay_capture(capture: Capture, options: ReplayOptions) -> CallReport:
    """Replays a capture that was read and checked; raises what its reference raises."""
    results = compute(capture, options)
    pairs = _pairs(results, options)
    provenance = _provenance(results, options)
    notes = (*_notes(results), *_saved(results, options))
    if not pairs:
        return CallReport(
            capture.name,
            NOTHING,
            provenance,
            notes=notes,
            message=f"nothing to compare with the reference: {_no_output(capture)}, and {results.kernel.reason}",
            hint="capture with the process kept alive through the launch, or replay on a card of the kernel's arch",
        )
    wrong = next((pair for pair in pairs if not pair.matches), None)
    if options.kept is not None:
        options.kept.offer(results, matches=wrong is None)
    if wrong is None:
        return CallReport(capture.name, MATCH, provenance, pairs, determinism=results.kernel.determinism, notes=notes)
    options.step(f"{capture.name}: where the errors are")
    judged = results.kernel.result if wrong.left == "kernel" else results.captured
    inferred = inferred_clusters(capture, results.rows, options.heads, judged[0], results.reference[0], wrong) if judged[0] is not None else ()
    return CallReport(
        capture.name,
        MISMATCH,
        provenance,
        pairs,
        inferred=inferred,
        determinism=results.kernel.determinism,
        command=options.command([capture.path or capture.name], wrong),
        notes=notes,
        bisection=_bisect(results, options, wrong) if options.bisect else None,
    )


def compute(capture: Capture, options: ReplayOptions) -> Results:
    """The reference, what was captured and, where it can run, the kernel; only the rows and heads asked for."""
    rows = selected("row", options.rows, capture.rows)
    heads = selected("head", options.heads, capture.heads) if options.heads is not None else None
    held = options.kept.find(capture, rows, heads) if options.kept is not None else None
    if held is not None:
        return held
    options.step(f"{capture.name}: reference {options.reference}")
    reference = oracle.reference(capture, options.reference, device=options.device, rows=rows if options.rows is not None else None)
    options.step(f"{capture.name}: kernel")
    kernel = (
        run_kernel(capture, cache_dir=options.cache_dir, opener=options.opener, repeats=options.repeats)
        if options.kernel
        else KernelResult(reason="the kernel was not asked for")
    )
    lse = None if capture.lse is None else natural_lse(capture.lse, capture.call.lse_base)
    captured = (cut(capture.output, rows, heads), cut(lse, rows, heads))
    if kernel.output is not None:
        kernel = replace(kernel, output=cut(kernel.output, rows, heads), lse=cut(kernel.lse, rows, heads))
    options.step(f"{capture.name}: comparing")
    return Results(capture, rows, (only_heads(reference[0], heads), only_heads(reference[1], heads)), captured, kernel, heads)


def _pairs(results: Results, options: ReplayOptions) -> tuple[Pair, ...]:
    reference = f"reference {options.reference}"
    available = [("captured", results.captured), ("kernel", results.kernel.result)]
    pairs: list[tuple[str, Result, str, Result]] = [(name, result, reference, results.reference) for name, result in available]
    pairs.append(("kernel", results.kernel.result, "captured", results.captured))
    axes = call_axes(results.capture, results.rows if options.rows is not None else None, options.heads)
    call = results.capture.call
    found = []
    for left, ours, right, theirs in pairs:
        output = None if ours[0] is None or theirs[0] is None else (ours[0], theirs[0])
        lse = None if ours[1] is None or theirs[1] is None else (ours[1], theirs[1])
        comparisons = result_comparisons(call.record, call.mode, output, lse, axes, options.strictness)
        if comparisons:
            found.append(Pair(left, right, comparisons))
    return tuple(found)


def _provenance(results: Results, options: ReplayOptions) -> tuple[tuple[str, str], ...]:
    capture, call = results.capture, results.capture.call
    lines = [
        ("kernel", call.spec.label()),
        ("call", call_text(capture)),
        ("reference", f"{options.reference} on {oracle.device_for(options.device)}"),
    ]
    if call.profile:
        lines.append(("profile", call.profile))
    if call.parallel.dcp_world > 1:
        lines.append(("rank", f"DCP {call.parallel.dcp_rank} of {call.parallel.dcp_world}, interleave {call.parallel.interleave}"))
    if capture.layout.takes_latent_scale:
        lines.append(("latent_scale", f"{call.latent_scale:.9g}"))
    lines.append(("captured with", " ".join(f"{name} {version}" for name, version in sorted(capture.versions.items())) or "unknown versions"))
    lines.append(("kernel run", results.kernel.reason or "in this process"))
    # Metadata is what somebody else wrote: a line break in it must not look like a line of the report.
    return tuple((name, safe(text)) for name, text in lines)


def _notes(results: Results) -> tuple[str, ...]:
    return (_no_output(results.capture),) if results.captured[0] is None else ()


def _no_output(capture: Capture) -> str:
    return captures.why_no_output(capture.path) if capture.path is not None else "no output was captured"


def _saved(results: Results, options: ReplayOptions) -> tuple[str, ...]:
    """Saves what was computed where that was asked for; a folder that cannot be written costs the file and not the report."""
    if options.save is None:
        return ()
    sources = (("reference", results.reference), ("captured", results.captured), ("kernel", results.kernel.result))
    return storage.save_results(options.save, results.capture.name, sources)


def _bisect(results: Results, options: ReplayOptions, wrong: Pair) -> Bisection:
    from mlactl.replay import bisect

    if wrong.left == "kernel":
        return _shrink(results.capture, options)
    say = partial(_say, options, results.capture.name)
    return bisect.explain(results.capture, results.rows, options.heads, results.captured, results.reference, on_step=say)


def _say(options: ReplayOptions, name: str, text: str) -> None:
    options.step(f"{name}: {text}")


def _shrink(capture: Capture, options: ReplayOptions) -> Bisection:
    """Makes the input smaller while the kernel still fails, and writes what is left with the kernel's result."""
    from mlactl.replay.shrink import shrink

    def run(item: Capture) -> KernelResult:
        return run_kernel(item, cache_dir=options.cache_dir, opener=options.opener, repeats=1)

    def fails(item: Capture) -> bool:
        found = run(item)
        if found.output is None or found.lse is None:
            return False
        reference = oracle.reference(item, options.reference, device=options.device)
        pairs = (found.output, reference[0]), (found.lse, reference[1])
        return not all(one.matches for one in result_comparisons(item.call.record, item.call.mode, *pairs, call_axes(item), options.strictness))

    smallest, steps = shrink(capture, fails, on_step=partial(_say, options, capture.name))
    result = run(smallest)
    folder = options.smallest or Path("smallest-captures")
    what = f"{sizes(smallest)}, {counted(len(smallest.tensors['kv_cache']), 'page')}"
    verdict = f"the smallest input that still fails has {what}"
    try:
        path = captures.save(smallest.with_result(result.output, result.lse), folder, f"{capture.name}-smallest", again=True)
    except MlactlError as error:
        return Bisection(f"{verdict}; it was not written: {safe(error.message)}", steps=steps)
    return Bisection(verdict, smallest=safe(path), steps=steps)


OnReport = Callable[[CallReport], None]


def replay(paths: Sequence[Path], options: ReplayOptions, *, jobs: int = 1, fail_fast: bool = False, on_report: OnReport | None = None) -> Report:
    """Replays captures in the order given, then merges every complete DCP group among them.

    `fail_fast` stops after the first capture that does not match; what was not run is counted. Raises UsageError for
    `jobs` under 1.
    """
    if jobs < 1:
        raise UsageError(f"--jobs {jobs}: at least 1 is needed")
    if options.repeats < 1:
        raise UsageError(f"--repeats {options.repeats}: at least 1 is needed", hint="--repeats 3, or --no-kernel to run none")
    names = captures.display_names(paths)
    done: list[CallReport] = []
    for report in _reports(paths, names, options, jobs):
        done.append(report)
        if on_report is not None:
            on_report(report)
        if fail_fast and report.status in (MISMATCH, ERROR):
            break
    skipped = len(paths) - len(done)
    done += groups.unmerged(paths) if skipped else groups.group_reports(paths, options, done)
    return Report(tuple(done), skipped=skipped)


def _reports(paths: Sequence[Path], names: Sequence[str], options: ReplayOptions, jobs: int) -> Iterator[CallReport]:
    if jobs == 1 or len(paths) == 1:
        yield from (replay_one(path, options, name) for path, name in zip(paths, names, strict=True))
        return
    # Each worker gets its share of the cores; what is said and kept stays in this process.
    share = replace(options, threads=options.threads or max(1, (os.cpu_count() or 1) // jobs), on_step=None, kept=None)
    yield from in_order(partial(_replay_named, options=share), list(zip(paths, names, strict=True)), jobs, _killed)


def _replay_named(item: tuple[Path, str], *, options: ReplayOptions) -> CallReport:
    return replay_one(item[0], options, item[1])


def _killed(item: tuple[Path, str]) -> CallReport:
    path, name = item
    return _error(
        path, name, "the process that replayed it was killed, most often for its memory", f"mlactl replay {shell_word(path)}, and watch free -g"
    )


def unsaved(report: Report) -> str | None:
    """The first result that could not be saved, in words; None where all were, or none was to be."""
    return next((note for call in report.calls for note in call.notes if note.startswith(storage.NOT_SAVED)), None)
