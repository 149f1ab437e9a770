"""`mlactl diff`: compare two outputs or captures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlactl.cli import options
from mlactl.cli.replay import render


def diff(
    a: Annotated[
        Path,
        typer.Argument(metavar="A", readable=False, help="The file that is judged: a capture, .safetensors or .pt tensors, or a folder of captures"),
    ],
    b: Annotated[Path, typer.Argument(metavar="B", readable=False, help="The file taken as right")],
    atol: options.AtolOption = None,
    rtol: options.RtolOption = None,
    row_tolerance: options.RowToleranceOption = None,
    allow_nan: options.AllowNanOption = False,
    junit: options.JunitOption = None,
    output: options.OutputOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> int:
    """Compare two outputs or captures, tensor by tensor; .pt files are read without running what they pickle.

    Quiet output is the names that do not match. Exit codes: 0 match; 1 mismatch; 2 nothing compared, or a malformed file.
    """
    from mlactl.replay.diff import diff as compare
    from mlactl.replay.results import Strictness

    out = options.make_output(output, json, quiet)
    report = compare(a, b, Strictness(atol, rtol, row_tolerance, allow_nan))
    render(out, report, junit)
    return report.exit_code
