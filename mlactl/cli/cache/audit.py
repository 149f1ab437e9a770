"""`mlactl cache audit`: entries against advisories and their own machine code; set aside and put back."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlactl.cli import hints, options
from mlactl.cli.cache import rendering
from mlactl.cli.cache.rendering import counted
from mlactl.errors import UsageError
from mlactl.ui.output import Mode, Output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlactl.cache.adapter import CacheAdapter, CacheEntry
    from mlactl.cache.advisories import Advisories
    from mlactl.cache.audit import Moved, Report, Result

_SHOWN_KEYS = 3


@hints.keeps_root
def audit(
    keys: options.OptionalKeysArgument = None,
    quarantine: Annotated[bool, typer.Option("--quarantine", help="Set convicted entries aside, so that nothing loads them")] = False,
    restore: Annotated[bool, typer.Option("--restore", help="Put the named entries back that are intact and acquitted")] = False,
    force: Annotated[bool, typer.Option("--force", help="With --restore: convicted ones too")] = False,
    facts_only: Annotated[bool, typer.Option("--facts-only", help="Advisories by facts; no machine code is read")] = False,
    advisories: Annotated[Path | None, typer.Option("--advisories", metavar="FILE", help="More advisories, TOML")] = None,
    kernel: rendering.KernelFilter = None,
    arch: options.ArchOption = None,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Disassemblers at a time, default one a core up to 4")] = None,
    yes: options.YesOption = False,
    root_kind: options.RootKindOption = options.RootKindChoice.AUTO,
    cache_dir: options.CacheDirOption = None,
    output: options.OutputOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Check machine code against what keys claim, and known faults."""
    from mlactl.cache.advisories import load

    out = hints.make_output(output, json, quiet, cache_dir, root_kind)
    _refuse_contradictions(out, keys, quarantine=quarantine, restore=restore, force=force, facts_only=facts_only, yes=yes)
    known = load(advisories)
    kernels = rendering.checked_kernels(kernel)
    cache = rendering.open_cache(out, cache_dir, root_kind)
    arches = rendering.checked_arches(cache, arch)
    passed_over: list[str] = []
    entries = _chosen(cache, keys, kernels, arches, passed_over)
    for text in passed_over:
        out.warn(text)
    if restore:
        _restore(out, cache, _meant(entries), known, force, advisories)
        return
    report = _audit(out, cache, entries, known, facts_only, jobs)
    again = _Asked(tuple(keys or ()), kernels, arches, advisories, facts_only)
    moved: Sequence[Moved] = ()
    if quarantine and report.convicted:
        if not yes:
            _report_human(out, cache, report, (), facts_only, False, again)
        if not out.confirm(f"quarantine {counted(len(report.convicted))} in {', '.join(map(str, cache.paths))}?", yes=yes):
            raise typer.Abort
        moved = _quarantine(out, cache, report)
    _report(out, cache, report, moved, facts_only, again, passed_over=passed_over)
    if report.failing or passed_over:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What an audit was asked to look at, and by what: a hint that repeats it must convict the same entries."""

    keys: tuple[str, ...]
    kernels: tuple[str, ...]
    arches: tuple[str, ...]
    advisories: Path | None
    facts_only: bool

    def naming(self, keys: Sequence[str]) -> str:
        """The words after `mlactl cache audit` that come to the same for these keys; of many, for everything that was asked for."""
        named = list(keys) if len(keys) <= _SHOWN_KEYS else list(self.keys)
        filters = [word for option, values in (("--kernel", self.kernels), ("--arch", self.arches)) for value in values for word in (option, value)]
        file = ["--advisories", str(self.advisories)] if self.advisories is not None else []
        return shlex.join([*named, *([] if named else filters), *file, *(["--facts-only"] if self.facts_only else [])])


def _refuse_contradictions(
    out: Output, keys: Sequence[str] | None, *, quarantine: bool, restore: bool, force: bool, facts_only: bool, yes: bool
) -> None:
    if restore and (quarantine or facts_only):
        raise UsageError(
            f"--restore and {'--quarantine' if quarantine else '--facts-only'} were both given", hint="mlactl cache audit KEY --restore, by itself"
        )
    if restore and not keys:
        raise UsageError("--restore without a KEY: expected the entries to put back", hint="mlactl cache ls --status quarantined shows them")
    if force and not restore:
        raise UsageError("--force goes with --restore", hint="mlactl cache audit KEY --restore --force")
    if quarantine and not yes and not out.can_ask:
        raise UsageError(
            "setting entries aside needs a yes, and there is no terminal to ask on",
            hint="add --yes to go ahead, or leave out --quarantine",
        )


def _chosen(
    cache: CacheAdapter, keys: Sequence[str] | None, kernels: tuple[str, ...], arches: tuple[str, ...], problems: list[str]
) -> list[CacheEntry]:
    from mlactl.cache.listing import Filters, select

    if keys:
        found = [entry for key in keys for entry in cache.entries_of(key)]
        return select({(entry.root, entry.object_path): entry for entry in found}.values(), Filters(kernels, arches))
    return select(cache.entries(on_problem=problems.append), Filters(kernels, arches))


def _meant(entries: Sequence[CacheEntry]) -> list[CacheEntry]:
    """One entry of each key to put back: the first that is set aside, in the order of the layers."""
    by_key: dict[str, CacheEntry] = {}
    for entry in sorted(entries, key=lambda entry: entry.status != "quarantined"):
        by_key.setdefault(entry.key, entry)
    return list(by_key.values())


def _audit(out: Output, cache: CacheAdapter, entries: Sequence[CacheEntry], known: Advisories, facts_only: bool, jobs: int | None) -> Report:
    from mlactl.cache import audit as service

    with out.progress("auditing", sum(not entry.residue for entry in entries), "entries") as task:
        return service.audit(cache, entries, known, facts_only=facts_only, jobs=jobs, on_done=task.advance)


def _quarantine(out: Output, cache: CacheAdapter, report: Report) -> tuple[Moved, ...]:
    from mlactl.cache.audit import set_convicted_aside

    with out.progress("setting aside", len(report.convicted), "entries") as task:
        return set_convicted_aside(cache, report, task.advance)


def _restore(out: Output, cache: CacheAdapter, entries: Sequence[CacheEntry], known: Advisories, force: bool, file: Path | None) -> None:
    from mlactl.cache.audit import restore

    with out.progress("auditing", len(entries), "entries") as task:
        moved = restore(cache, entries, known, force=force, on_done=task.advance)
    back = [item for item in moved if item.done]
    for item in back:
        if item.reason:
            out.warn(f"{item.entry.key} was put back{'' if item.reason.startswith('in spite') else ';'} {item.reason}")

    def human() -> None:
        for item in moved:
            said = "put back" if item.done else "left as it is"
            out.line(f"{item.entry.key[: rendering.SHORT_KEY]} {said}{f': {item.reason}' if item.reason else ''}")
        out.line(f"{len(back)} of {counted(len(moved))} put back")

    rows = [{"key": item.entry.key, "restored": item.done, "reason": item.reason or None} for item in moved]
    out.document({"entries": rows}, human, lambda: [item.entry.key for item in back])
    refused = next((item for item in moved if not item.done), None)
    if refused is not None:
        short = refused.entry.key[: rendering.SHORT_KEY]
        if refused.entry.status == "quarantined" and not force:
            again = f"{rendering.AGAIN}; " if rendering.is_own(cache) else ""
            by = f" --advisories {shlex.quote(str(file))}" if file is not None else ""
            out.hint(f"{again}mlactl cache audit {short} --restore --force{by} puts an intact one back all the same")
        raise typer.Exit(1)


# ---- what is shown


def _report(
    out: Output, cache: CacheAdapter, report: Report, moved: Sequence[Moved], facts_only: bool, asked: _Asked, *, passed_over: Sequence[str]
) -> None:
    if out.mode is Mode.HUMAN:
        _report_human(out, cache, report, moved, facts_only, bool(asked.keys), asked)
        if passed_over:
            out.line(f"{counted(len(passed_over), 'folder', 'folders')} not looked at")
        return
    by_entry = {id(item.entry): item for item in moved}
    rows = [_row(result, by_entry.get(id(result.entry))) for result in report.results if out.mode is not Mode.QUIET or result.failing]
    counts = {"audited": len(report.results), "failing": len(report.failing), "facts_only": facts_only, "passed_over": list(passed_over)}
    out.listing("entries", rows, (), key=lambda row: row["key"], extra=counts)


def _row(result: Result, moved: Moved | None) -> dict[str, Any]:
    from dataclasses import asdict

    from mlactl.cache import listing

    row: dict[str, Any] = {
        **listing.as_json(result.entry),
        "root": str(result.entry.root),
        "verdict": result.verdict,
        "quarantined": result.quarantined,
        "reasons": list(result.reasons),
        "advisories": [advisory.id for advisory in result.advisories],
        "code": asdict(result.code) if result.code is not None else None,
    }
    if moved is not None:
        row["quarantine"] = {"done": moved.done, "reason": moved.reason or None}
    return row


def _report_human(out: Output, cache: CacheAdapter, report: Report, moved: Sequence[Moved], facts_only: bool, in_full: bool, asked: _Asked) -> None:
    for result in report.results:
        if in_full or result.guilty or result.verdict == "notice":
            _result_human(out, result)
    for advisory in {advisory.id: advisory for result in report.results for advisory in result.advisories}.values():
        out.line(f"{advisory.id}: {advisory.title}")
        out.line(f"  what goes wrong: {advisory.consequence}")
        out.line(f"  what to do: {advisory.remedy}")
    for item in moved:
        said = "set aside" if item.done else "left in place"
        out.line(f"{item.entry.key[: rendering.SHORT_KEY]} {said}{f': {item.reason}' if item.reason else ''}")
    counts = Counter(f"{result.verdict}{' and quarantined' if result.quarantined else ''}" for result in report.results)
    verdicts = f": {', '.join(f'{number} {verdict}' for verdict, number in sorted(counts.items()))}" if counts else ""
    read = sum(result.code is not None for result in report.results)
    how = ", by facts alone" if facts_only else f"; machine code of {counted(read)} read"
    out.line(f"{counted(len(report.results))} audited{verdicts}{how}" if report.results else "0 entries")
    if moved:
        out.line(f"{sum(item.done for item in moved)} of {counted(len(moved))} set aside")
    _hint_at(out, cache, report, moved, asked)


def _result_human(out: Output, result: Result) -> None:
    entry = result.entry
    what = f"{entry.manifest.spec.label()} for {entry.manifest.arch or 'an unknown arch'}" if entry.manifest else ""
    said = f"{result.verdict}{' and quarantined' if result.quarantined else ''}"
    out.line(f"{entry.key[: rendering.SHORT_KEY]} {said} {what}".rstrip())
    for reason in result.reasons:
        out.line(f"  {reason}")
    out.line(f"  {entry.object_path}")


def _hint_at(out: Output, cache: CacheAdapter, report: Report, moved: Sequence[Moved], asked: _Asked) -> None:
    """What to do next: set aside what was convicted, compile it again once it is, mend what can be mended, remove the rest."""
    own = rendering.is_own(cache)
    if any(item.done for item in moved):
        again = rendering.AGAIN if own else "b12x compiles them again when it needs them: audit what it writes"
        out.hint(f"{again}; processes that loaded one keep it until they end")
    elif report.convicted and not moved:
        words = asked.naming([result.entry.key[: rendering.SHORT_KEY] for result in report.convicted])
        out.hint(f"mlactl cache audit {f'{words} ' if words else ''}--quarantine sets them aside")
    failing = [result.entry for result in report.failing]
    for mend in (rendering.distrust_hint(failing), rendering.reading_hint(failing)):
        if mend is not None:
            out.hint(mend)
    damaged = [result.entry for result in report.failing if result.verdict == "damaged" and result.entry.status != "untrusted"]
    if any(rendering.rebuildable(cache, entry) for entry in damaged):
        out.hint("mlactl cache verify --repair rebuilds damaged entries that this install can build")
    elif damaged:
        out.hint(rendering.removal_hint(damaged))
