"""`mlactl cache prune` and `rm`: plan, ask, apply."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Annotated

import typer

from mlactl.cli import hints, options
from mlactl.cli.cache import rendering
from mlactl.cli.cache.rendering import counted
from mlactl.errors import CannotRun, UsageError
from mlactl.ui.output import Column, Output, bytes_text

if TYPE_CHECKING:
    from mlactl.cache.adapter import CacheAdapter
    from mlactl.cache.removal import PlannedEntry, PrunePlan, PruneResult
    from mlactl.cache.selectors import Judge
    from mlactl.kernels.spec import CompileSpec


_SHOWN_KEYS = 3


@hints.keeps_root
def prune(
    spec: Annotated[list[str] | None, typer.Option("--spec", metavar="'ID<N'", help="Versions: < <= == >= >; repeatable")] = None,
    kernel: rendering.KernelFilter = None,
    arch: options.ArchOption = None,
    status: rendering.StatusFilter = None,
    stale: Annotated[bool, typer.Option("--stale", help="Same version, other sources or toolchain")] = False,
    older_than: Annotated[str | None, typer.Option("--older-than", metavar="30d", help="Made longer ago than this")] = None,
    unused_for: Annotated[str | None, typer.Option("--unused-for", metavar="14d", help="Not used for this long")] = None,
    max_size: Annotated[str | None, typer.Option("--max-size", metavar="2GiB", help="Least recently used first, down to this")] = None,
    keep_profile: rendering.KeepProfileOption = None,
    advisory: Annotated[
        list[str] | None,
        typer.Option("--advisory", metavar="ID", help="Hit by this advisory; repeatable", autocompletion=rendering.complete_advisory),
    ] = None,
    locks: Annotated[bool, typer.Option("--locks", help="Lock files, while nobody uses the root")] = False,
    include_prepared: options.IncludePreparedOption = False,
    dry_run: options.DryRunOption = False,
    yes: options.YesOption = False,
    root_kind: options.RootKindOption = options.RootKindChoice.AUTO,
    cache_dir: options.CacheDirOption = None,
    output: options.OutputOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Remove entries, by default those whose version is superseded.

    Different selectors must all match, repeats of one are alternatives, and any of them replaces the default.
    """
    from mlactl.cache import selectors as parsing

    out = hints.make_output(output, json, quiet, cache_dir, root_kind)
    cache = rendering.open_cache(out, cache_dir, root_kind)
    selectors = parsing.Selectors(
        specs=tuple(parsing.parse_spec(text) for text in spec or ()),
        kernels=rendering.checked_kernels(kernel),
        arches=rendering.checked_arches(cache, arch),
        statuses=rendering.checked_statuses(status),
        stale=stale,
        older_than_s=None if older_than is None else parsing.parse_duration(older_than, "--older-than"),
        unused_for_s=None if unused_for is None else parsing.parse_duration(unused_for, "--unused-for"),
        max_bytes=None if max_size is None else parsing.parse_size(max_size, "--max-size"),
        locks=locks,
        judges=_by_advisory(cache, advisory),
    )
    keep = _kept_specs(keep_profile)
    plan = cache.plan(selectors, keep=keep, include_prepared=include_prepared, on_problem=out.warn)
    _carry_out(out, plan, dry_run=dry_run, yes=yes)


@hints.keeps_root
def rm(
    keys: options.KeysArgument,
    include_prepared: options.IncludePreparedOption = False,
    dry_run: options.DryRunOption = False,
    yes: options.YesOption = False,
    root_kind: options.RootKindOption = options.RootKindChoice.AUTO,
    cache_dir: options.CacheDirOption = None,
    output: options.OutputOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Remove named entries."""
    out = hints.make_output(output, json, quiet, cache_dir, root_kind)
    cache = rendering.open_cache(out, cache_dir, root_kind)
    plan = cache.plan_entries(rendering.resolve_keys(cache, keys), include_prepared=include_prepared, on_problem=out.warn)
    result = _carry_out(out, plan, dry_run=dry_run, yes=yes)
    if result is not None:
        _refuse_what_is_left(plan, result)


def _refuse_what_is_left(plan: PrunePlan, result: PruneResult) -> None:
    """Raises CannotRun when something that was named is still there, whatever kept it."""
    from mlactl.cache.removal import left

    still = left(plan, result)
    if still:
        keys = " ".join(dict.fromkeys(item.key[: rendering.SHORT_KEY] for item in still))
        again = f"mlactl cache rm {keys}" if len(still) <= _SHOWN_KEYS else "the same command again"
        raise CannotRun(
            f"{counted(len(still))} of {len(plan.entries) + len(plan.kept)} named still there; {still[0].reason}",
            hint=f"mlactl cache show {keys.partition(' ')[0]}; once that is mended: {again}",
        )


def _kept_specs(profiles: list[str] | None) -> tuple[CompileSpec, ...]:
    if not profiles:
        return ()
    from mlactl.profiles import load

    return tuple(spec for name in profiles for spec in load(name).specs())


def _by_advisory(cache: CacheAdapter, ids: list[str] | None) -> tuple[tuple[str, Judge], ...]:
    if not ids:
        return ()
    from mlactl.cache.advisories import bundled, judge

    return ((" ".join(f"--advisory {identity}" for identity in ids), judge(bundled(), ids, cache.kind)),)


def _carry_out(out: Output, plan: PrunePlan, *, dry_run: bool, yes: bool) -> PruneResult | None:
    """Prints the plan or, once agreed to, applies it and returns what came of it; off a terminal it refuses without --yes."""
    empty = not plan.entries and not plan.locks
    if dry_run:
        out.document(
            {field.name: getattr(plan, field.name) for field in fields(plan)},
            lambda: _plan_human(out, plan),
            lambda: [entry.key for entry in plan.entries],
        )
        out.note("dry run: nothing was removed")
        if empty:
            _nothing_selected(out, plan)
        else:
            out.hint(_same_command_with_yes())
        return None
    if not (empty and out.can_ask):
        if not empty and not yes and out.can_ask:
            _plan_human(out, plan)
        if not yes and not out.can_ask:
            raise UsageError(
                f"removing {_what(plan)} from {plan.root} needs a yes, and there is no terminal to ask on",
                hint="add --yes to go ahead or --dry-run to only look",
            )
        if not out.confirm(f"remove {_what(plan)} from {plan.root}?", yes=yes):
            raise typer.Abort
    result = _apply(out, plan)
    if empty:
        _nothing_selected(out, plan)
    return result


def _apply(out: Output, plan: PrunePlan) -> PruneResult:
    from mlactl.cache.removal import apply

    if plan.entries:
        with out.progress("removing", len(plan.entries), "entries") as task:
            result = apply(plan, task.advance)
    else:
        result = apply(plan)
    document = {"root": plan.root, "selection": plan.selection, **asdict(result), "kept": [asdict(kept) for kept in plan.kept]}
    out.document(document, lambda: _result_human(out, plan, result), lambda: result.removed)
    if result.failed:
        first = result.failed[0]
        raise CannotRun(
            f"{counted(len(result.failed))} could not be removed; {first.reason}", hint=f"mlactl cache ls --cache-dir {shlex.quote(plan.root)}"
        )
    return result


def _what(plan: PrunePlan) -> str:
    parts = [f"{counted(len(plan.entries))} ({bytes_text(plan.freed_bytes)})"] if plan.entries or not plan.locks else []
    parts += [counted(len(plan.locks), "lock file", "lock files")] if plan.locks else []
    return " and ".join(parts)


def _plan_human(out: Output, plan: PrunePlan) -> None:
    if plan.entries:
        out.table(_PLAN_COLUMNS, plan.entries)
    for path in plan.locks:
        out.line(path)
    out.line(f"{_what(plan)} of {counted(plan.root_entries)} ({bytes_text(plan.root_bytes)}) in {plan.root}; selected: {', '.join(plan.selection)}")
    _kept_human(out, plan)


def _kept_human(out: Output, plan: PrunePlan) -> None:
    """What was selected and stays, by reason."""
    for reason, number in Counter(kept.reason for kept in plan.kept).items():
        out.line(f"{counted(number)} kept: {reason}")


def _result_human(out: Output, plan: PrunePlan, result: PruneResult) -> None:
    locks = f" and {counted(result.locks_removed, 'lock file', 'lock files')}" if plan.locks else ""
    out.line(f"removed {counted(len(result.removed))} ({bytes_text(result.freed_bytes)}){locks} from {plan.root}")
    _kept_human(out, plan)
    for outcome in result.skipped:
        out.line(f"skipped {outcome.key[: rendering.SHORT_KEY]}: {outcome.reason}")
    for outcome in result.failed:
        out.line(f"failed {outcome.key[: rendering.SHORT_KEY]}: {outcome.reason}")


def _nothing_selected(out: Output, plan: PrunePlan) -> None:
    """What could have been selected, for whoever expected something to go."""
    if plan.kept:
        return  # said already, with the reason
    if plan.selection != ("--locks",):
        unread = f"{counted(plan.root_unreadable)} that cannot be read: run it as their owner or as root" if plan.root_unreadable else ""
        readable = ", ".join(plan.root_kernels) or ("" if unread else "no readable manifest" if plan.root_entries else "no entries")
        out.hint(f"nothing matched; the root has {', and '.join(filter(None, (readable, unread)))}")


def _same_command_with_yes() -> str:
    words = [word for word in sys.argv[1:] if word != "--dry-run"]
    return shlex.join(["mlactl", *words, "--yes"])


def _version_cell(entry: PlannedEntry) -> str:
    version = entry.spec["version"] if entry.spec else None
    return "-" if version is None else str(version)


_PLAN_COLUMNS = (
    Column("key", lambda entry: entry.key[: rendering.SHORT_KEY]),
    Column("kernel", lambda entry: entry.spec["kernel_id"] if entry.spec else "-"),
    Column("version", _version_cell, right=True),
    Column("status", lambda entry: entry.status),
    Column("arch", lambda entry: entry.arch or "-"),
    Column("size", lambda entry: bytes_text(entry.object_bytes), right=True),
    Column("last used", lambda entry: entry.last_used or "-"),
    Column("why", lambda entry: entry.reason),
)
