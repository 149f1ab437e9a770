"""`mlactl diff`: compare two outputs or captures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlactl.cli import options
from mlactl.cli.replay import render
from mlactl.errors import UsageError
from mlactl.regular_files import require_writable
from mlactl.ui.output import Output

if TYPE_CHECKING:
    from mlactl.replay.diff import Work

_MIB = 2**20
_SILENT_BYTES = 256 * _MIB
"""Less is compared before a bar could be read."""


def diff(
    a: Annotated[
        str,
        typer.Argument(metavar="A", help="The file that is judged: a capture, .safetensors or .pt tensors, or a folder of captures or saved results"),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="The file taken as right")],
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

    Folders are compared capture by capture. Quiet output is the names that do not match. Exit codes: 0 match; 1 mismatch,
    or something only one side has; 2 nothing compared, a malformed file, or a pair that could not be compared, whatever the
    others say.
    """
    from mlactl.replay.diff import diff as compare
    from mlactl.replay.diff import plan
    from mlactl.replay.results import Strictness

    out = options.make_output(output, json, quiet)
    strictness = Strictness(atol, rtol, row_tolerance, allow_nan)
    strictness.require()
    left, right = _named("A", a), _named("B", b)
    work = plan(left, right)
    if junit is not None:
        require_writable(junit, work.files())
    with _progress(out, work) as advance:
        report = compare(work, strictness, on_pair=advance)
    render(out, report, junit)
    return report.exit_code


def _named(what: str, text: str) -> Path:
    if not text:
        raise UsageError(f"{what} is an empty name, expected a file or a folder", hint="mlactl diff A B")
    return Path(text)


@contextmanager
def _progress(out: Output, work: Work) -> Iterator[Callable[[int], None]]:
    """A bar over the bytes of all pairs; none for what is over before it could be read."""
    total = sum(work.pair_bytes(place) for place in range(len(work.pairs)))
    if total < _SILENT_BYTES:
        yield lambda _: None
        return
    with out.progress("comparing", total // _MIB, "MiB") as task:
        done = 0

        def advance(size: int) -> None:
            nonlocal done
            task.advance((done + size) // _MIB - done // _MIB)
            done += size

        yield advance
