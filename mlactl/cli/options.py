"""Options that several commands share, how they are checked, and shell completion of their values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mlactl.errors import MlactlError, UsageError
from mlactl.kernels.spec import ARCHES
from mlactl.ui.output import Mode, Output


class OutputMode(StrEnum):
    """`--output` of every command; `cache stats` has StatsMode."""

    HUMAN = "human"
    JSON = "json"
    JSONL = "jsonl"
    QUIET = "quiet"


class StatsMode(StrEnum):
    """`--output` of commands that can also feed a metrics collector."""

    HUMAN = "human"
    JSON = "json"
    JSONL = "jsonl"
    QUIET = "quiet"
    PROMETHEUS = "prometheus"


class RootKindChoice(StrEnum):
    """`--root-kind` of the cache commands."""

    AUTO = "auto"
    MLACTL = "mlactl"
    B12X = "b12x"


def complete_arch(incomplete: str) -> list[str]:
    """Arches that start with what was typed."""
    return [arch for arch in ARCHES if arch.startswith(incomplete)]


def complete_profile(incomplete: str) -> list[str]:
    """Profile names that start with what was typed; nothing, rather than an error, when they cannot be read."""
    from mlactl.profiles import names

    try:
        return [name for name in names() if name.startswith(incomplete)]
    except (MlactlError, OSError):
        return []


def complete_key(incomplete: str) -> list[str]:
    """Keys in the cache that start with what was typed; nothing, rather than an error, when it cannot be read."""
    from mlactl.cache.listing import keys_that_start
    from mlactl.cache.store import Store

    try:
        return keys_that_start(Store.open(), incomplete)
    except (MlactlError, OSError):
        return []


OutputOption = Annotated[OutputMode | None, typer.Option("--output", help="What stdout holds", show_default="human")]
StatsOutputOption = Annotated[StatsMode | None, typer.Option("--output", help="What stdout holds", show_default="human")]
JsonOption = Annotated[bool, typer.Option("--json", help="Same as --output json")]
QuietOption = Annotated[bool, typer.Option("-q", "--quiet", help="One key or name a line, for pipes")]
CacheDirOption = Annotated[str | None, typer.Option("--cache-dir", metavar="DIR", help="Cache root, or a list rw:ro1:ro2")]
RootKindOption = Annotated[RootKindChoice, typer.Option("--root-kind", help="Which tool wrote the root; auto looks at it")]
ShowSecretsOption = Annotated[bool, typer.Option("--show-secrets", help="Environment values that a b12x manifest records")]
IncludePreparedOption = Annotated[bool, typer.Option("--include-prepared", help="Also what b12x's preparation files name")]
ArchOption = Annotated[
    list[str] | None, typer.Option("--arch", metavar="ARCH", help=f"Target, repeatable: {', '.join(ARCHES)}", autocompletion=complete_arch)
]
ProfileOption = Annotated[str, typer.Option("--profile", metavar="NAME|PATH", help="Deployment profile", autocompletion=complete_profile)]
OptionalProfileOption = Annotated[
    str | None, typer.Option("--profile", metavar="NAME|PATH", help="Deployment profile", autocompletion=complete_profile)
]
ProfileArgument = Annotated[str, typer.Argument(metavar="NAME|PATH", help="Profile name or file", autocompletion=complete_profile)]
KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="Key, or the start of one", autocompletion=complete_key)]
KeysArgument = Annotated[list[str], typer.Argument(metavar="KEY...", help="Keys, or starts of them", autocompletion=complete_key)]
OptionalKeyArgument = Annotated[str | None, typer.Argument(metavar="KEY", help="Key, or the start of one", autocompletion=complete_key)]
OptionalKeysArgument = Annotated[list[str] | None, typer.Argument(metavar="KEY...", help="Keys, or starts of them", autocompletion=complete_key)]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and do nothing")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Go ahead without asking")]
AtolOption = Annotated[float | None, typer.Option("--atol", help="Absolute tolerance of an element, instead of the table's; not of LSE")]
RtolOption = Annotated[float | None, typer.Option("--rtol", help="Relative tolerance of an element, instead of the table's; not of LSE")]
RowToleranceOption = Annotated[
    float | None, typer.Option("--row-tol", help="Tolerance as a share of a row's maximum, instead of the table's; not of LSE")
]
AllowNanOption = Annotated[bool, typer.Option("--allow-nan", help="NaN against NaN passes")]
JunitOption = Annotated[Path | None, typer.Option("--junit", metavar="FILE.xml", readable=False, help="Write the report as JUnit XML too")]
AllOption = Annotated[bool, typer.Option("--all", help="Every row, as plain lines")]


def make_output(output: OutputMode | StatsMode | None = None, json: bool = False, quiet: bool = False) -> Output:
    """The renderer that the three output options ask for; raises UsageError when they contradict each other."""
    asked = {mode for mode, wanted in ((Mode.JSON, json), (Mode.QUIET, quiet)) if wanted}
    if output is not None:
        asked.add(Mode(output.value))
    if len(asked) > 1:
        raise UsageError(f"two output modes were asked for: {' and '.join(sorted(asked))}", hint="keep one of --output, --json and -q")
    return Output(asked.pop() if asked else Mode.HUMAN)


def checked_arches(values: Sequence[str] | None) -> tuple[str, ...]:
    """`--arch` values without repeats, in the order given; raises UsageError naming one that no object is made for."""
    for value in values or ():
        if value not in ARCHES:
            raise UsageError(
                f"--arch {value} is not supported, objects are made for {', '.join(ARCHES)}", hint=" or ".join(f"--arch {arch}" for arch in ARCHES)
            )
    return tuple(dict.fromkeys(values or ()))


_FOREIGN_ARCH = re.compile(r"sm_[0-9]{2,3}[af]?")


def checked_foreign_arches(values: Sequence[str] | None) -> tuple[str, ...]:
    """`--arch` values for a root of another tool, which may hold targets that no object is made for here; raises UsageError."""
    for value in values or ():
        if not _FOREIGN_ARCH.fullmatch(value):
            raise UsageError(f"--arch {value} is no target", hint="--arch sm_120a")
    return tuple(dict.fromkeys(values or ()))


MAX_INDEX, MAX_INDICES = (1 << 31) - 1, 1 << 20


def parse_indices(option: str, text: str | None) -> tuple[int, ...] | None:
    """`3`, `0-3,8` as sorted indices without repeats; None stays None.

    Raises UsageError for anything else, for indices over 2^31 - 1 and for more than 2^20 of them.
    """
    if text is None:
        return None
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        ends = [first, last] if dash else [first]
        # isdigit alone also takes superscripts, and int refuses thousands of digits.
        if not all(end.isascii() and end.isdigit() for end in ends) or (all(len(end) <= 10 for end in ends) and int(ends[-1]) < int(first)):
            raise UsageError(f"{option} {text} is no list of indices", hint=f"{option} 3 or {option} 0-3,8")
        if any(len(end) > 10 or int(end) > MAX_INDEX for end in ends):
            raise UsageError(f"{option} {text}: an index is at most {MAX_INDEX:,}", hint=f"{option} 0-3,8")
        if len(found) + int(ends[-1]) - int(first) >= MAX_INDICES:
            raise UsageError(f"{option} {text}: {MAX_INDICES:,} indices at most can be asked for", hint=f"leave {option} out for all of them")
        found.update(range(int(first), int(ends[-1]) + 1))
    return tuple(sorted(found))
