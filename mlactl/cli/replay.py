"""`mlactl replay`: run captured calls again, compare with the reference, and say where the fault is."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlactl.cli import options
from mlactl.errors import CannotRun, UsageError
from mlactl.printable import plain, safe, shell_word
from mlactl.regular_files import require_writable, require_writable_folder, write_file
from mlactl.ui.output import Mode, Output

if TYPE_CHECKING:
    from mlactl.replay.importers.flashinfer import Refusal
    from mlactl.replay.report import CallReport, Report
    from mlactl.replay.runner import ReplayOptions

NAMED = 8
"""Captures that were not compared, named one by one."""


def replay(
    captures: Annotated[list[str], typer.Argument(metavar="CAPTURE...", help="Captures, or folders of them")],
    reference: Annotated[str, typer.Option("--reference", metavar="fp32|fp64", help="Accumulation of the reference")] = "fp32",
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda", help="Where the reference runs")] = "auto",
    no_kernel: Annotated[bool, typer.Option("--no-kernel", help="Do not run the kernel, even where the card fits")] = False,
    repeats: Annotated[int, typer.Option("--repeats", help="Runs of the kernel, compared bit by bit")] = 3,
    rows: Annotated[str | None, typer.Option("--rows", metavar="LIST", help="Only these query rows: 3 or 0-3,8")] = None,
    heads: Annotated[str | None, typer.Option("--heads", metavar="LIST", help="Only these heads")] = None,
    atol: options.AtolOption = None,
    rtol: options.RtolOption = None,
    row_tolerance: options.RowToleranceOption = None,
    allow_nan: options.AllowNanOption = False,
    bisect: Annotated[bool, typer.Option("--bisect", help="Explain a wrong output, or find the smallest input that still fails")] = False,
    smallest: Annotated[
        Path | None, typer.Option("--smallest", metavar="DIR", readable=False, help="Where --bisect writes the smallest failing capture")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE.png",
            readable=False,
            help="Draw error by head and row, and against magnitude, of the first that fails (mlactl[plot])",
        ),
    ] = None,
    junit: options.JunitOption = None,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="DIR", readable=False, help="Write every result as safetensors, for mlactl diff")
    ] = None,
    import_flashinfer: Annotated[
        Path | None,
        typer.Option(
            "--import-flashinfer",
            metavar="DIR",
            readable=False,
            help="CAPTURE... are FlashInfer API dumps: write captures of BatchMLAPagedAttentionWrapper.run (its plan dumped too) and "
            "trtllm_batch_decode_with_kv_cache_mla to DIR, replay those",
        ),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", help="Captures replayed at once")] = 1,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop after the first capture that does not match")] = False,
    cache_dir: options.CacheDirOption = None,
    output: options.OutputOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> int:
    """Run captured calls again and compare kernel, captured output and FP32 reference pairwise, whichever exist.

    Captures of all ranks of a DCP call are merged by LSE as well and compared with the unsharded reference. Quiet output
    is the names that do not match, one a line. Exit codes: 0 all that was compared matches, what was not is named; 1 mismatch;
    2 nothing compared, a malformed capture, a dump that was refused, or a file that could not be written; 3 no GPU for
    --device cuda.
    """
    from mlactl.opening import open_runtime
    from mlactl.replay.capture import find
    from mlactl.replay.results import Strictness
    from mlactl.replay.runner import Kept, ReplayOptions, unsaved
    from mlactl.replay.runner import replay as run

    out = options.make_output(output, json, quiet)
    asked = ReplayOptions(
        reference=reference,
        device=device,
        kernel=not no_kernel,
        repeats=repeats,
        strictness=Strictness(atol, rtol, row_tolerance, allow_nan),
        rows=options.parse_indices("--rows", rows),
        heads=options.parse_indices("--heads", heads),
        bisect=bisect,
        smallest=smallest,
        save=save,
        cache_dir=cache_dir,
        opener=open_runtime,
        kept=None if plot is None else Kept(),
    )
    check_options(asked, jobs)
    # What is read comes first: a folder to write into is made only for something to put there.
    paths = find(captures) if import_flashinfer is None else _require_dumps(captures)
    _check_targets(asked, junit, plot, import_flashinfer, _dump_files(captures) if import_flashinfer is not None else _files(paths))
    refused: list[CallReport] = []
    if import_flashinfer is not None:
        written, refused = _import(out, captures, import_flashinfer)
        paths = find(written)
        _check_targets(asked, junit, plot, None, _files(paths))
    if save is not None:
        _check_unsaved(save, paths)
    with out.progress("replaying", len(paths), "captures", steady=True) as task:

        def count(call: CallReport) -> None:
            task.describe(call.name)
            task.advance()

        report = run(paths, dataclasses.replace(asked, on_step=task.describe), jobs=jobs, fail_fast=fail_fast, on_report=count)
    report = dataclasses.replace(report, calls=(*report.calls, *refused))
    render(out, report, junit)
    lost = unsaved(report)
    if lost is not None:
        raise CannotRun(lost, hint="name another folder: --save DIR")
    if smallest is not None:
        _say_if_unwritten(out, smallest, report)
    if plot is not None:
        _plot(out, plot, paths, asked, report)
    return report.exit_code


def check_options(asked: ReplayOptions, jobs: int = 1) -> None:
    """Refuses options that make no sense before any capture is read, once and not by capture; raises UsageError, EnvironmentUnfit."""
    from mlactl.replay import oracle, tolerances
    from mlactl.replay.runner import REFERENCES

    if asked.reference not in REFERENCES:
        raise UsageError(f"--reference {asked.reference} is not one of {', '.join(REFERENCES)}", hint="--reference fp64")
    if asked.repeats < 1:
        raise UsageError(f"--repeats {asked.repeats}: at least 1 is needed", hint="--repeats 3, or --no-kernel to run none")
    if jobs < 1:
        raise UsageError(f"--jobs {jobs}: at least 1 is needed", hint="--jobs 1")
    if asked.smallest is not None and not asked.bisect:
        raise UsageError("--smallest is where --bisect writes, which was not asked for", hint=f"add --bisect --smallest {shell_word(asked.smallest)}")
    given = asked.strictness
    tolerances.overridden(tolerances.for_lse(), atol=given.atol, rtol=given.rtol, row=given.row)
    oracle.device_for(asked.device)


def _files(paths: Sequence[Path]) -> list[Path]:
    from mlactl.replay.capture import files

    return [file for path in paths for file in files(path)]


def _dump_files(dumps: Sequence[str]) -> list[Path]:
    return [file for dump in dumps if dump for file in Path(dump).rglob("*")]


def _check_targets(asked: ReplayOptions, junit: Path | None, plot: Path | None, imported: Path | None, sources: Sequence[Path]) -> None:
    """Refuses what could not be written after all the work, or is one of the `sources`; raises UsageError, CannotRun."""
    if plot is not None:
        from mlactl.replay.plot import require

        require(plot)
    for target in (plot, junit):
        if target is not None:
            require_writable(target, sources)
    for folder in (asked.save, imported):
        if folder is not None:
            require_writable_folder(folder)
    if asked.smallest is not None:
        _require_makeable(asked.smallest)


def _require_makeable(folder: Path) -> None:
    """As `require_writable_folder`, without leaving the folder: most runs have nothing to write in it."""
    made = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
    require_writable_folder(folder)
    with contextlib.suppress(OSError):
        for place in made:
            place.rmdir()


def _require_dumps(sources: list[str]) -> tuple[Path, ...]:
    """Raises UsageError, CannotRun unless every source holds FlashInfer dumps; there are no captures of them yet."""
    from mlactl.replay.importers.flashinfer import dump_folders

    for source in sources:
        if not source:
            raise UsageError("an empty name was given, expected a folder of FlashInfer dumps", hint="mlactl replay DUMPS --import-flashinfer DIR")
        dump_folders(Path(source))
    return ()


def _check_unsaved(folder: Path, paths: Sequence[Path]) -> None:
    """Refuses, before any work, results that are there already; raises UsageError."""
    from mlactl.replay.capture import display_names
    from mlactl.replay.storage import results_path

    for name in display_names(paths):
        target = results_path(folder, name)
        if os.path.lexists(target):
            raise UsageError(f"{plain(target)}: is there already, nothing was replayed", hint="name a new folder: --save DIR")


def _import(out: Output, dumps: list[str], target: Path) -> tuple[list[Path], list[CallReport]]:
    """Captures made of FlashInfer dumps, and what is to be said of the others; raises NothingCompared where none could be made."""
    from mlactl.printable import counted
    from mlactl.replay.errors import NothingCompared
    from mlactl.replay.importers.flashinfer import CALLS_HINT, import_dumps
    from mlactl.replay.report import ERROR, CallReport

    written: list[Path] = []
    refused: list[Refusal] = []
    with out.progress("importing", None, "dumps", steady=True) as task:

        def count(name: str) -> None:
            task.describe(name)
            task.advance()

        for source in dumps:
            found = import_dumps(Path(source), target, on_dump=count)
            written += found.written
            refused += found.refused
            again = f" ({found.unchanged} there already)" if found.unchanged else ""
            made, others = counted(len(found.written), "capture"), counted(found.ignored, "other call")
            out.note(f"{source}: {made} written to {target}{again}, {len(found.refused)} refused, {others}")
    if not written:
        for item in refused:
            out.warn(f"{item.name} was not imported: {item.why}")
            if item.hint:
                out.hint(item.hint)
        why = refused[0].why if refused else "they hold no MLA decode call"
        raise NothingCompared(
            f"no capture could be made of the dumps: {why}",
            hint=(refused[0].hint if refused else None) or CALLS_HINT,
        )
    return written, [CallReport(item.name, ERROR, (("dump", safe(item.path)),), message=item.why, hint=item.hint) for item in refused]


def render(out: Output, report: Report, junit: Path | None) -> None:
    """The report on stdout in the mode asked for, then as JUnit where a file was named; what was not compared is said in every mode.

    Raises CannotRun for a JUnit file that cannot be written, after the report.
    """
    from mlactl.cli.comparison_view import show
    from mlactl.replay.report import MATCH, NOTHING, call_json, report_json
    from mlactl.replay.report import junit as junit_xml

    if out.mode is Mode.HUMAN:
        show(out, report)
    elif out.mode is Mode.QUIET:
        for call in report.calls:
            if call.status != MATCH:
                out.line(safe(call.name))
    else:
        extra = {key: value for key, value in report_json(report).items() if key != "calls"}
        out.listing("calls", report.calls, (), key=lambda call: call.name, extra=extra, as_json=call_json)
    blind = [call for call in report.calls if call.status == NOTHING]
    for call in blind[:NAMED]:
        out.warn(f"{safe(call.name)} was not compared: {call.message}")
    if len(blind) > NAMED:
        out.warn(f"{len(blind) - NAMED} more were not compared; --json has all of them")
    if junit is not None:
        write_file(junit_xml(report).encode("utf-8", "backslashreplace"), junit, force=True)


def _say_if_unwritten(out: Output, folder: Path, report: Report) -> None:
    """Says why --smallest wrote nothing; a capture that could not be written is in the verdict of its call."""
    if any(call.bisection is not None and call.bisection.steps for call in report.calls):
        return
    by_kernel = [pair for call in report.calls for pair in call.pairs if pair.left == "kernel" and pair.right != "captured"]
    if not by_kernel:
        runs = (dict(call.provenance).get("kernel run") for call in report.calls)
        why = next((f"no kernel ran ({reason})" for reason in runs if reason), "no kernel ran")
    elif all(pair.matches for pair in by_kernel):
        why = "no result of a kernel is wrong"
    else:
        why = "where the kernel's result is wrong the captured one is too, and was explained instead"
    out.warn(f"nothing was written to {folder}: {why}")


def _plot(out: Output, target: Path, paths: tuple[Path, ...], asked: ReplayOptions, report: Report) -> None:
    """Draws the first capture that does not match, or the first one where all do."""
    from mlactl.replay.plot import draw

    failing = [place for place, call in enumerate(report.calls[: len(paths)]) if call.pairs and call.status != "match"]
    drawable = failing or [place for place, call in enumerate(report.calls[: len(paths)]) if call.pairs]
    if not drawable:
        out.warn(f"{target} was not drawn: nothing was compared")
        return
    name = report.calls[drawable[0]].name
    with out.progress("drawing", 1, "picture", steady=True) as task:
        draw(target, paths[drawable[0]], dataclasses.replace(asked, on_step=task.describe))
        task.advance()
    out.note(f"drew {name} as {target}")
