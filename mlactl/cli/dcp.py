"""`torchrun -m mlactl.replay.dcp`: every rank attends its own shard and the results are merged over the process group."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer

from mlactl.cli import app, options


def dcp(
    captures: Annotated[list[str], typer.Argument(metavar="CAPTURE...", help="Captures of every rank, or folders of them")],
    reference: Annotated[str, typer.Option("--reference", metavar="fp32|fp64", help="Accumulation of the reference")] = "fp32",
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda", help="cpu: gloo even where every rank has a GPU")] = "auto",
    no_kernel: Annotated[bool, typer.Option("--no-kernel", help="Take the captured results, even where the card fits")] = False,
    cache_dir: options.CacheDirOption = None,
    output: options.OutputOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> int:
    """Merge a DCP group over real ranks: all-gather of queries, attention over each rank's shard, LSE merge.

    A rank's partial result is the kernel's where it can run, else the captured one; the reference's where neither is, and the
    report says so. Rank 0 reports. Exit codes: 0 match; 1 mismatch; 2 no group, or ranks that do not fit it. torchrun makes
    1 of every code of a rank that is not 0.
    """
    from mlactl.cli.replay import check_options, render
    from mlactl.opening import open_runtime
    from mlactl.replay.dcp.ranks import run_ranks
    from mlactl.replay.runner import ReplayOptions

    out = options.make_output(output, json, quiet)
    asked = ReplayOptions(reference=reference, device=device, kernel=not no_kernel, cache_dir=cache_dir, opener=open_runtime)
    check_options(asked)
    if os.environ.get("RANK", "0") == "0":
        with out.progress("merging", None, "DCP groups", steady=True) as task:
            report = run_ranks(captures, replace(asked, on_step=task.describe))
            task.advance(0 if report is None else len(report.calls))
    else:
        report = run_ranks(captures, asked)
    if report is None:
        return 0
    render(out, report, None)
    return report.exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """Runs this command with the errors and exit codes of every other."""
    return app.main(["dcp-ranks", *(sys.argv[1:] if argv is None else argv)])
