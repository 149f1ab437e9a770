"""`mlactl doctor`: what this node has, what is wrong with it, and what mends it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlactl.cli import hints, options
from mlactl.doctor.findings import Severity
from mlactl.printable import safe
from mlactl.ui.output import Mode, Output

if TYPE_CHECKING:
    from mlactl.doctor.examination import Report
    from mlactl.doctor.findings import Finding

ProfilesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--profile", metavar="NAME|PATH", help="Deployment that must be warm, repeatable; else those begun", autocompletion=options.complete_profile
    ),
]


@hints.keeps_root
def doctor(
    profile: ProfilesOption = None,
    scales: Annotated[Path | None, typer.Option("--scales", metavar="FILE", help="Outer-scale file that will be served")] = None,
    arch: options.ArchOption = None,
    build_node: Annotated[bool, typer.Option("--no-gpu", "--build-node", help="This node only compiles: no GPU is expected")] = False,
    cache_dir: options.CacheDirOption = None,
    output: options.OutputOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> int:
    """Check GPUs, toolchain, cache roots, environment, scale files and profiles.

    Looks only; each finding comes with its fix. Exit codes: 0 fine, notices allowed; 1 warnings or errors; 3 a launch
    could not work here.
    """
    from mlactl.doctor.examination import Request, diagnose

    out = hints.make_output(output, json, quiet, cache_dir)
    request = Request(tuple(profile or ()), scales, cache_dir, options.checked_arches(arch), build_node)
    with out.progress("checking", None, "entries") as task:
        report = diagnose(request, on_entry=task.advance, on_check=task.describe)
    if out.mode is Mode.HUMAN:
        _human(out, report, cache_dir)
    else:
        rows = report.findings if out.mode is not Mode.QUIET else [finding for finding in report.findings if finding.counts]
        out.listing("findings", rows, (), key=_name, as_json=lambda finding: _row(finding, cache_dir), extra=_head(report))
    return report.exit_code


def _name(finding: Finding) -> str:
    """What quiet mode prints of everything that is wrong."""
    return f"{finding.severity} {finding.area} {finding.check}"


def _row(finding: Finding, cache_dir: str | None) -> dict[str, Any]:
    row: dict[str, Any] = finding.as_json()
    return {**row, "fix": None if not finding.fix else hints.on_root(finding.fix, cache_dir)}


def _head(report: Report) -> dict[str, Any]:
    node = report.node
    gpus = [
        {"index": gpu.index, "name": gpu.name, "capability": None if gpu.capability is None else ".".join(map(str, gpu.capability)), "arch": gpu.arch}
        for gpu in node.gpus
    ]
    return {
        "verdict": _VERDICTS[report.exit_code],
        "exit_code": report.exit_code,
        "build_node": report.build_node,
        "arches": list(report.arches),
        "driver": node.driver,
        "driver_cuda": node.cuda,
        "gpus": gpus,
    }


_VERDICTS = {0: "fine", 1: "findings", 3: "unfit"}


def _human(out: Output, report: Report, cache_dir: str | None) -> None:
    """Areas with their findings, what is wrong spelled out below each, and a last line that says how it stands."""
    area = ""
    for finding in report.findings:
        if finding.area != area:
            area = finding.area
            out.line(area)
        # A line each: a path or a variable with a line break in it must not look like a finding of its own.
        out.line(f"  {finding.severity:<8} {safe(finding.what)}")
        if finding.expected:
            out.line(f"  {'':<8} expected: {safe(finding.expected)}")
        if finding.fix:
            out.line(f"  {'':<8} fix: {safe(hints.on_root(finding.fix, cache_dir))}")
    out.line(_summary(report))


def _counted(report: Report, severity: Severity) -> str:
    number = report.count(severity)
    countable = severity in (Severity.NOTICE, Severity.WARNING, Severity.ERROR)
    return f"{number} {severity}{'s' if countable and number != 1 else ''}"


def _summary(report: Report) -> str:
    counts = ", ".join(_counted(report, severity) for severity in reversed(Severity) if report.count(severity))
    if report.exit_code == 3:
        verdict = "objects cannot be compiled here" if report.build_node else "a launch could not work here"
    elif report.exit_code:
        verdict = "there is something to mend"
    else:
        verdict = "this node is fine"
    return f"{verdict}: {counts}"
