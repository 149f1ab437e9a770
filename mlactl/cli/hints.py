"""Hints of commands that were given `--cache-dir` or `--root-kind`: following one must act on that same root."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from mlactl.cli import options
from mlactl.errors import MendedElsewhere, MlactlError
from mlactl.ui.output import Output

Params = ParamSpec("Params")
Result = TypeVar("Result")

_COMMAND = re.compile(r"\bmlactl (?:cache [a-z]+|warmup)\b(?! --help)")


def on_root(text: str, cache_dir: str | None, root_kind: str | None = None) -> str:
    """The text with `--cache-dir` put into every `mlactl cache …` and `mlactl warmup` in it that has none yet, and `--root-kind` into the former."""
    if cache_dir is None and root_kind is None:
        return text
    parts, at = [], 0
    for match in _COMMAND.finditer(text):
        following = _COMMAND.search(text, match.end())
        rest = text[match.end() : following.start() if following else None]
        foreign = root_kind is not None and match[0].startswith("mlactl cache") and "--root-kind" not in rest
        added = f" --root-kind {root_kind}" if foreign else ""
        added += f" --cache-dir {shlex.quote(cache_dir)}" if cache_dir is not None and "--cache-dir" not in rest else ""
        parts.append(text[at : match.end()] + added)
        at = match.end()
    return "".join(parts) + text[at:]


class RootedOutput(Output):
    """Output whose hints and warnings name the root that the command was given; a note's commands are for wherever it says."""

    cache_dir: str | None = None
    root_kind: str | None = None

    def on_root(self, text: str) -> str:
        """The text, its commands for this root."""
        return on_root(text, self.cache_dir, self.root_kind)

    def hint(self, text: str) -> None:
        """The next command to type, for this root."""
        super().hint(self.on_root(text))

    def warn(self, text: str) -> None:
        """A warning; a command in it is for this root."""
        super().warn(self.on_root(text))

    def error(self, error: MlactlError) -> None:
        """An error whose next command is for this root, unless that is typed elsewhere."""
        elsewhere = isinstance(error, MendedElsewhere)
        super().error(error if elsewhere else MlactlError(error.message, hint=error.hint and self.on_root(error.hint)))


def make_output(
    output: options.OutputMode | options.StatsMode | None,
    json: bool,
    quiet: bool,
    cache_dir: str | None,
    root_kind: options.RootKindChoice | None = None,
) -> RootedOutput:
    """As `options.make_output`, for a command that has `--cache-dir`."""
    out = RootedOutput(options.make_output(output, json, quiet).mode)
    out.cache_dir, out.root_kind = cache_dir, _said(root_kind)
    return out


def _said(root_kind: object) -> str | None:
    """The kind that was asked for; None for the one that is looked for without asking."""
    return None if root_kind in (None, options.RootKindChoice.AUTO) else str(root_kind)


def keeps_root(command: Callable[Params, Result]) -> Callable[Params, Result]:
    """Makes the errors of a command carry its `--cache-dir` and `--root-kind` in their hints, those of services and of the parsing of values too."""

    @functools.wraps(command)
    def run(*arguments: Params.args, **values: Params.kwargs) -> Result:
        try:
            return command(*arguments, **values)
        except MlactlError as error:
            cache_dir = values.get("cache_dir")
            if error.hint and not isinstance(error, MendedElsewhere):
                error.hint = on_root(error.hint, cache_dir if isinstance(cache_dir, str) else None, _said(values.get("root_kind")))
            raise

    return run
