"""Replays captures: reference, kernel and captured output, compared pairwise, whichever exist."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mlactl.errors import MlactlError, UsageError
from mlactl.replay import capture as captures
from mlactl.replay import oracle, storage
from mlactl.replay.capture import Capture
from mlactl.replay.dcp import groups
from mlactl.replay.inferred import inferred_clusters
from mlactl.replay.kernel import KernelResult, run_kernel
from mlactl.replay.report import ERROR, MATCH, MISMATCH, NOTHING, Bisection, CallReport, Pair, Report
from mlactl.replay.results import Strictness, call_axes, natural_lse, result_comparisons

if TYPE_CHECKING:
    import torch

    Result = tuple[torch.Tensor | None, torch.Tensor | None]

REFERENCES = ("fp32", "fp64")


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What a person asked for. `rows` and `heads` restrict the comparison; `save` is the folder results are written to.

    `opener` gives the kernels' runtime its objects (`mlactl.opening.open_runtime`); None where the caller did.
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


@dataclass(frozen=True, slots=True)
class Results:
    """The results of one call, restricted to what was asked for; LSEs natural."""

    capture: Capture
    rows: tuple[int, ...]
    reference: tuple[torch.Tensor, torch.Tensor]
    captured: tuple[torch.Tensor | None, torch.Tensor | None]
    kernel: KernelResult


def replay_one(path: Path, options: ReplayOptions) -> CallReport:
    """Replays one capture; a capture that cannot be used becomes a report that says so."""
    started = time.perf_counter()
    name = captures.stem(path).name
    try:
        if options.threads is not None:
            import torch

            torch.set_num_threads(options.threads)
        report = replay_capture(captures.read(path), options)
    except MlactlError as error:
        report = CallReport(name, ERROR, (("capture", str(path)),), message=error.message, hint=error.hint)
    return replace(report, seconds=time.perf_counter() - started)


def replay_capture(capture: Capture, options: ReplayOptions) -> CallReport:
    """Replays a capture that was read and checked; raises what its reference raises."""
    results = compute(capture, options)
    pairs = _pairs(results, options)
    if options.save is not None:
        save_results(results, options.save)
    provenance = _provenance(results, options)
    if not pairs:
        return CallReport(
            capture.name, NOTHING, provenance, message=f"nothing to compare with the reference: no output was captured and {results.kernel.reason}",
            hint="capture with the process kept alive through the launch, or replay on a card of the kernel's arch",
        )  # fmt: skip
    wrong = next((pair for pair in pairs if not pair.matches), None)
    if wrong is None:
        return CallReport(capture.name, MATCH, provenance, pairs, determinism=results.kernel.determinism, notes=_notes(results))
    judged = results.kernel.result if wrong.left == "kernel" else results.captured
    inferred = inferred_clusters(capture, results.rows, options.heads, judged[0], results.reference[0], wrong) if judged[0] is not None else ()
    return CallReport(
        capture.name,
        MISMATCH,
        provenance,
        pairs,
        inferred=inferred,
        determinism=results.kernel.determinism,
        command=_command(capture, wrong),
        notes=_notes(results),
        bisection=_bisect(results, options, wrong) if options.bisect else None,
    )


def compute(capture: Capture, options: ReplayOptions) -> Results:
    """The reference, what was captured and, where it can run, the kernel; only the rows and heads asked for."""
    rows = _selected("row", options.rows, capture.rows)
    heads = _selected("head", options.heads, capture.heads) if options.heads is not None else None
    reference = oracle.reference(capture, options.reference, device=options.device, rows=rows if options.rows is not None else None)
    kernel = (
        run_kernel(capture, cache_dir=options.cache_dir, opener=options.opener, repeats=options.repeats)
        if options.kernel
        else KernelResult(reason="the kernel was not asked for")
    )
    lse = None if capture.lse is None else natural_lse(capture.lse, capture.call.lse_base)
    captured = (_cut(capture.output, rows, heads), _cut(lse, rows, heads))
    if kernel.output is not None:
        kernel = replace(kernel, output=_cut(kernel.output, rows, heads), lse=_cut(kernel.lse, rows, heads))
    return Results(capture, rows, (_heads(reference[0], heads), _heads(reference[1], heads)), captured, kernel)


def _selected(what: str, asked: tuple[int, ...] | None, extent: int) -> tuple[int, ...]:
    if asked is None:
        return tuple(range(extent))
    for index in asked:
        if not 0 <= index < extent:
            raise UsageError(f"{what} {index} was asked for, the capture has {what}s 0 to {extent - 1}")
    return asked


def _cut(tensor: torch.Tensor | None, rows: Sequence[int], heads: Sequence[int] | None) -> torch.Tensor | None:
    return None if tensor is None else _heads(tensor if len(rows) == len(tensor) else tensor[list(rows)], heads)


def _heads(tensor: torch.Tensor, heads: Sequence[int] | None) -> torch.Tensor:
    return tensor if heads is None else tensor[:, list(heads)]


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
        ("call", f"{call.mode}, {len(capture.boundaries) - 1} requests, {capture.rows} rows, {capture.heads} heads, {call.record} records"),
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
    return tuple(lines)


def _notes(results: Results) -> tuple[str, ...]:
    notes = []
    if results.captured[0] is None:
        notes.append("no output was captured: the launch did not come back")
    return tuple(notes)


def _command(capture: Capture, wrong: Pair) -> str:
    """The command that shows the smallest failing slice: the worst row and head, or the whole capture where none stands out."""
    target = capture.path if capture.path is not None else capture.name
    worst = next((item.worst for item in wrong.comparisons if item.worst is not None), None)
    if worst is None:
        return f"mlactl replay {target}"
    place = dict(worst.coordinates)
    return f"mlactl replay {target} --rows {place['row']} --heads {place['head']}"


def _bisect(results: Results, options: ReplayOptions, wrong: Pair) -> Bisection:
    from mlactl.replay import bisect

    if wrong.left == "kernel":
        return _shrink(results.capture, options)
    return bisect.explain(results.capture, results.rows, options.heads, results.captured, results.reference)


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

    smallest, steps = shrink(capture, fails)
    result = run(smallest)
    folder = options.smallest or Path("smallest-captures")
    path = captures.save(smallest.with_result(result.output, result.lse), folder, f"{capture.name}-smallest")
    what = f"{len(smallest.boundaries) - 1} requests, {smallest.rows} rows, {smallest.heads} heads, {len(smallest.tensors['kv_cache'])} pages"
    return Bisection(f"the smallest input that still fails has {what}", smallest=str(path), steps=steps)


def save_results(results: Results, folder: Path) -> Path:
    """Writes what replay computed as plain safetensors, for `mlactl diff` and for whoever looks further."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    sources = (("reference", results.reference), ("captured", results.captured), ("kernel", results.kernel.result))
    found = {f"{name}.{what}": tensor for name, pair in sources for what, tensor in zip(("output", "lse"), pair, strict=True) if tensor is not None}
    path = folder / f"{results.capture.name}.results.safetensors"
    save_file(storage.unshared(found), path)
    return path


OnReport = Callable[[CallReport], None]


def replay(paths: Sequence[Path], options: ReplayOptions, *, jobs: int = 1, fail_fast: bool = False, on_report: OnReport | None = None) -> Report:
    """Replays captures in the order given, then merges every complete DCP group among them.

    `fail_fast` stops after the first capture that does not match; what was not run is counted. Raises UsageError for
    `jobs` under 1.
    """
    if jobs < 1:
        raise UsageError(f"--jobs {jobs}: at least 1 is needed")
    done: list[CallReport] = []
    for report in _reports(paths, options, jobs):
        done.append(report)
        if on_report is not None:
            on_report(report)
        if fail_fast and report.status in (MISMATCH, ERROR):
            break
    skipped = len(paths) - len(done)
    if not skipped:
        done += groups.group_reports(paths, options)
    return Report(tuple(done), skipped=skipped)


def _reports(paths: Sequence[Path], options: ReplayOptions, jobs: int) -> Iterator[CallReport]:
    if jobs == 1 or len(paths) == 1:
        yield from (replay_one(path, options) for path in paths)
        return
    import multiprocessing
    import os
    from concurrent.futures import ProcessPoolExecutor

    # Spawned, because a forked child of a process that used CUDA or OpenMP threads hangs; each worker gets its share of the cores.
    share = replace(options, threads=options.threads or max(1, (os.cpu_count() or 1) // jobs))
    pool = ProcessPoolExecutor(min(jobs, len(paths)), mp_context=multiprocessing.get_context("spawn"))
    try:
        yield from pool.map(partial(replay_one, options=share), paths)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
