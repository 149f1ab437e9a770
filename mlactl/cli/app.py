"""`mlactl`: the command tree, and what an exception becomes on the way out.

Command modules are imported when one of their commands runs or asks for its help; `mlactl --help` lists them from the
table below, so that start-up costs the same however many commands there are.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TextIO, cast

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from mlactl.errors import CannotRun, Interrupted, MlactlError
from mlactl.printable import safe_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlactl.ui.streams import GuardedStdout

COMPLETION_VARIABLE = "_MLACTL_COMPLETE"
"""Set by the shell's completion script, which typer answers."""

BROKEN_PIPE_EXIT = 141
"""What a shell reports for a program that SIGPIPE ended."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """One command or group: where its code is (`module:attribute`) and the line `--help` shows for it."""

    name: str
    target: str
    summary: str
    hidden: bool = False

    def load(self) -> Any:
        """The click command; imports its module."""
        module_name, _, attribute = self.target.partition(":")
        found = getattr(importlib.import_module(module_name), attribute)
        if not isinstance(found, typer.Typer):
            single = typer.Typer(add_completion=False, rich_markup_mode=None)
            single.command(name=self.name)(found)
            found = single
        command = get_command(_without_completion(found))
        command.name = self.name
        return command


def _without_completion(app: typer.Typer) -> typer.Typer:
    # Completion is installed for the whole program; its options on each group would only be noise.
    app._add_completion = False
    return app


ENTRIES = (
    _Entry("warmup", "mlactl.cli.warmup:warmup", "Compile every kernel variant a profile can launch into the cache"),
    _Entry("cache", "mlactl.cli.cache:app", "List, explain, verify, audit, prune and carry compiled kernels"),
    _Entry("profile", "mlactl.cli.profile:app", "List, show and check deployment profiles"),
    _Entry("verify-scales", "mlactl.cli.scales:verify_scales", "Load and validate NVFP4 scale files and checkpoint scales"),
    _Entry("scales", "mlactl.cli.scales:scales_app", "Write outer-scale files"),
    _Entry("replay", "mlactl.cli.replay:replay", "Run captured calls again and compare with the reference"),
    _Entry("diff", "mlactl.cli.diff:diff", "Compare two outputs or captures"),
    _Entry("dcp-ranks", "mlactl.cli.dcp:dcp", "One rank of torchrun -m mlactl.replay.dcp", hidden=True),
    _Entry("bench", "mlactl.cli.bench:app", "Time the arms of the verify plan, correctness first"),
    _Entry("doctor", "mlactl.cli.doctor:doctor", "Check GPUs, toolchain, cache roots, environment, scale files and profiles"),
)


class LazyGroup(TyperGroup):
    """The root group: lists commands from `ENTRIES` and imports one only when it is resolved."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._entries = {entry.name: entry for entry in ENTRIES}
        for entry in ENTRIES:
            self.add_command(TyperCommand(entry.name, help=entry.summary, short_help=entry.summary, hidden=entry.hidden, rich_markup_mode=None))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Swaps the listed stand-in for the command itself."""
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and name in self._entries:
            command = self._entries[name].load()
        return name, command, rest


app = typer.Typer(name="mlactl", cls=LazyGroup, rich_markup_mode=None, no_args_is_help=True, add_completion=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        sys.stdout.write(f"mlactl {version('mlactl')}\n")
        raise typer.Exit


@app.callback(epilog="Exit codes: 0 clean, 1 findings, 2 usage error or could not run, 3 the environment does not suit, 130 on Ctrl-C")
def root(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit")] = False,
) -> None:
    """MLA attention kernels for SM120 GPUs: compile them ahead of time, and keep the compile cache honest."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code; never lets a traceback out without MLACTL_DEBUG=1."""
    from mlactl.ui.streams import GuardedStdout, discard, open_missing

    open_missing()
    stdout = sys.stdout
    guarded = GuardedStdout(stdout)
    sys.stdout = cast("TextIO", guarded)
    try:
        code = _run(argv)
        if not guarded.failed:
            code = _flush(guarded, code)
        if guarded.failed:
            discard(stdout)
        sys.stderr.flush()
    except BrokenPipeError:
        # The reader went away (`mlactl cache ls | head`): nothing to say, and nothing to flush at exit either.
        discard(stdout)
        return BROKEN_PIPE_EXIT
    except OSError:
        # What is left is stderr that cannot be written, of which nobody can be told.
        discard(sys.stderr)
        return CannotRun.exit_code
    finally:
        sys.stdout = stdout
    return code


def _flush(stdout: GuardedStdout, code: int) -> int:
    try:
        stdout.flush()
    except CannotRun as error:
        return _fail(error)
    return code


def _run(argv: Sequence[str] | None) -> int:
    try:
        return _invoke(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return Interrupted.exit_code
    except Interrupted as error:
        sys.stderr.write(safe_lines(f"{error.message}\n" + (f"hint: {error.hint}\n" if error.hint else "")))
        return error.exit_code
    except MlactlError as error:
        return _fail(error)
    except typer.Exit as error:
        return error.exit_code
    except typer.TyperException as error:
        return _usage_error(error)
    except typer.Abort:
        sys.stderr.write("stopped, nothing was changed\n")
        return 1
    except BrokenPipeError:
        raise
    except Exception as error:
        return _fail(
            MlactlError(
                f"internal error: {type(error).__name__}: {' '.join(str(error).split()) or 'no message'}",
                hint="set MLACTL_DEBUG=1 and run it again to see the traceback",
            )
        )


def _invoke(arguments: list[str]) -> int:
    """Parses and runs one command; its return value is the exit code when it is a number."""
    command = get_command(app)
    if COMPLETION_VARIABLE in os.environ:
        command.main(args=arguments, prog_name="mlactl", standalone_mode=False)
    # Not through `main`, which would turn Ctrl-C and a closed pipe into exit codes of its own before they are seen here.
    with command.make_context("mlactl", arguments) as context:
        result = command.invoke(context)
    return result if isinstance(result, int) else 0


def _fail(error: MlactlError) -> int:
    from mlactl.ui.output import Output

    if os.environ.get("MLACTL_DEBUG") == "1":
        traceback.print_exc(file=sys.stderr)
        Output().error(MlactlError(error.message, hint=None if error.message.startswith("internal error") else error.hint))
    else:
        Output().error(error)
    return error.exit_code


def _usage_error(error: typer.TyperException) -> int:
    """A command line that does not parse: what was wrong with it, and where its help is."""
    text = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stderr.write(f"{error.format_message()}\n")
    else:
        sys.stderr.write(f"error: {safe_lines(text[:1].lower() + text[1:])}\n")
        sys.stderr.write(f"hint: {context.command_path if context is not None else 'mlactl'} --help\n")
    return 2
