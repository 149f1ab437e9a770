"""`mlactl replay`: run captured calls again, compare with the reference, and say where the fault is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlactl.cli import options
from mlactl.errors import CannotRun, UsageError
from mlactl.ui.output import Mode, Output

if TYPE_CHECKING:
    from mlactl.replay.report import CallReport, Report
    from mlactl.replay.runner import ReplayOptions


def replay(
    captures: Annotated[list[Path], typer.Argument(metavar="CAPTURE...", readable=False, help="Captures, or folders of them")],
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
        typer.Option("--plot", metavar="FILE.png", readable=False, help="Draw error by head and row, and against magnitude (mlactl[plot])"),
    ] = None,
    junit: options.JunitOption = None,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="DIR", readable=False, help="Write every result as safetensors, for mlactl diff")
    ] = None,
    import_flashinfer: Annotated[
        Path | None,
        typer.Option(
            "--import-flashinfer", metavar="DIR", readable=False, help="CAPTURE... are FlashInfer API dumps: write captures to DIR, replay those"
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
    is the names that do not match, one a line. Exit codes: 0 match; 1 mismatch; 2 nothing compared, or a malformed capture.
    """
    from mlactl.opening import open_runtime
    from mlactl.replay.capture import find
    from mlactl.replay.results import Strictness
    from mlactl.replay.runner import REFERENCES, ReplayOptions
    from mlactl.replay.runner import replay as run

    out = options.make_output(output, json, quiet)
    if reference not in REFERENCES:
        raise UsageError(f"--reference {reference} is not one of {', '.join(REFERENCES)}")
    if plot is not None:
        from mlactl.replay.plot import require

        require(plot)
    if import_flashinfer is not None:
        captures = _import(out, captures, import_flashinfer)
    paths = find(captures)
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
    )
    with out.progress("replaying", len(paths), "captures") as task:

        def count(call: CallReport) -> None:
            task.describe(call.name)
            task.advance()

        report = run(paths, asked, jobs=jobs, fail_fast=fail_fast, on_report=count)
    render(out, report, junit)
    if plot is not None:
        _plot(out, plot, paths, asked, report)
    return report.exit_code


def _import(out: Output, dumps: list[Path], target: Path) -> list[Path]:
    """Captures made of FlashInfer dumps; raises NothingCompared where none could be made."""
    from mlactl.replay.errors import NothingCompared
    from mlactl.replay.importers.flashinfer import import_dumps

    written: list[Path] = []
    refused: list[tuple[str, str]] = []
    for source in dumps:
        found = import_dumps(source, target)
        written += found.written
        refused += found.refused
        out.note(f"{source}: {len(found.written)} captures written to {target}, {len(found.refused)} refused, {found.ignored} other calls")
    for name, why in refused:
        out.warn(f"{name} was not imported: {why}")
    if not written:
        why = refused[0][1] if refused else "they hold no MLA decode call"
        raise NothingCompared(f"no capture could be made of the dumps: {why}", hint="mlactl replay --help names the calls that are imported")
    return written


def render(out: Output, report: Report, junit: Path | None) -> None:
    """The report on stdout in the mode asked for, and as JUnit where a file was named."""
    from mlactl.cli.comparison_view import show
    from mlactl.replay.report import MATCH, call_json, report_json
    from mlactl.replay.report import junit as junit_xml

    if junit is not None:
        try:
            junit.write_text(junit_xml(report), encoding="utf-8")
        except OSError as error:
            raise CannotRun(f"{junit} cannot be written: {error.strerror or error}") from error
    if out.mode is Mode.HUMAN:
        show(out, report)
    elif out.mode is Mode.QUIET:
        for call in report.calls:
            if call.status != MATCH:
                out.line(call.name)
    else:
        extra = {key: value for key, value in report_json(report).items() if key != "calls"}
        out.listing("calls", report.calls, (), key=lambda call: call.name, extra=extra, as_json=call_json)


def _plot(out: Output, target: Path, paths: tuple[Path, ...], asked: ReplayOptions, report: Report) -> None:
    """Draws the first capture that does not match, or the first one where all do."""
    from mlactl.replay.plot import draw

    failing = [place for place, call in enumerate(report.calls[: len(paths)]) if call.pairs and call.status != "match"]
    drawable = failing or [place for place, call in enumerate(report.calls[: len(paths)]) if call.pairs]
    if not drawable:
        out.warn(f"{target} was not drawn: nothing was compared")
        return
    draw(target, paths[drawable[0]], asked)
    out.note(f"drew {report.calls[drawable[0]].name} as {target}")
