"""`torchrun -m mlactl.replay.dcp`: every rank attends its own shard and the results are merged over the process group."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from mlactl.cli import app, options


def dcp(
    captures: Annotated[list[str], typer.Argument(metavar="CAPTURE...", help="Captures of every rank, or folders of them")],
    reference: Annotated[str, typer.Option("--reference", metavar="fp32|fp64", help="Accumulation of the reference")] = "fp32",
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda", help="cpu: gloo even where every rank has a GPU")] = "auto",
    no_kernel: Annotated[bool, typer.Option("--no-kernel", help="Attend with the reference, even where the card fits")] = False,
    cache_dir: options.CacheDirOption = None,
    output: options.OutputOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> int:
    """Merge a DCP group over real ranks: all-gather of queries, attention over each rank's shard, LSE merge.

    Rank 0 reports. Exit codes: 0 match; 1 mismatch; 2 no group, or ranks that do not fit it.
    """
    from mlactl.cli.replay import render
    from mlactl.opening import open_runtime
    from mlactl.replay.dcp.ranks import run_ranks
    from mlactl.replay.runner import ReplayOptions

    out = options.make_output(output, json, quiet)
    report = run_ranks(captures, ReplayOptions(reference=reference, device=device, kernel=not no_kernel, cache_dir=cache_dir, opener=open_runtime))
    if report is None:
        return 0
    render(out, report, None)
    return report.exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """Runs this command with the errors and exit codes of every other."""
    return app.main(["dcp-ranks", *(sys.argv[1:] if argv is None else argv)])
