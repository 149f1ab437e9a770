"""`mlactl cache verify`: every object against its manifest, rebuilt or proven on request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlactl.cli import hints, options
from mlactl.cli.cache import rendering
from mlactl.cli.cache.rendering import counted
from mlactl.errors import EnvironmentUnfit, UsageError
from mlactl.ui.output import Mode, Output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlactl.cache.adapter import CacheAdapter, CacheEntry
    from mlactl.cache.own import OwnCache
    from mlactl.cache.verify import RepairOutcome, Reproduction

_Key = tuple[Any, str, str]


@hints.keeps_root
def verify(
    keys: options.OptionalKeysArgument = None,
    digests_only: Annotated[bool, typer.Option("--digests-only", help="Sizes and digests, not what the ELF says")] = False,
    repair: Annotated[bool, typer.Option("--repair", help="Rebuild what this install builds under the same key")] = False,
    reproduce: Annotated[bool, typer.Option("--reproduce", help="Compile again and compare; exit 3 where that cannot be done")] = False,
    root_kind: options.RootKindOption = options.RootKindChoice.AUTO,
    cache_dir: options.CacheDirOption = None,
    output: options.OutputOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Check digest, arch, symbol and signature of every object."""
    from mlactl.cache import listing

    out = hints.make_output(output, json, quiet, cache_dir, root_kind)
    if digests_only and reproduce:
        raise UsageError("--digests-only and --reproduce were both given", hint="--reproduce checks objects in full before it compiles them again")
    cache = rendering.open_cache(out, cache_dir, root_kind)
    passed_over: list[str] = []
    wanted = rendering.resolve_keys(cache, keys) if keys else listing.order(cache.entries(on_problem=passed_over.append))
    for text in passed_over:
        out.warn(text)
    checked = _check(out, cache, wanted, digests_only)
    repairs: tuple[RepairOutcome, ...] = ()
    reproductions: tuple[Reproduction, ...] = ()
    if repair or reproduce:
        own = _own(cache, "--repair" if repair else "--reproduce")
        repairs = _repair(out, own, checked) if repair else ()
        fixed = {_identity(outcome.entry) for outcome in repairs if outcome.outcome == "rebuilt"}
        if fixed:
            checked = _check(out, cache, [_as_it_is_now(own, entry) for entry in checked], digests_only)
        reproductions = _reproduce(out, checked) if reproduce else ()
    _report(out, cache, checked, repairs, reproductions, passed_over)
    if _bad(checked) or passed_over or any(item.result == "different" for item in reproductions):
        raise typer.Exit(1)
    uncompared = [item for item in reproductions if item.result == "cannot compare"]
    if uncompared:
        raise EnvironmentUnfit(
            f"cannot compare {counted(len(uncompared))} of {len(reproductions)}: {uncompared[0].reason}",
            hint=f"mlactl cache why {uncompared[0].entry.key[: rendering.SHORT_KEY]}",
        )


def _own(cache: CacheAdapter, option: str) -> OwnCache:
    from mlactl.cache.own import OwnCache

    if not isinstance(cache, OwnCache):
        raise UsageError(
            f"{option} compiles, and what {cache.paths[0]} holds is compiled by {cache.kind} alone", hint="mlactl cache verify without it"
        )
    return cache


def _bad(checked: Sequence[CacheEntry]) -> list[CacheEntry]:
    return [entry for entry in checked if entry.status != "ok"]


def _as_it_is_now(own: OwnCache, entry: CacheEntry) -> CacheEntry:
    from mlactl.cache.store import Entry

    assert isinstance(entry, Entry)
    return own.store.entry_in(entry.layer, entry.key) or entry


def _check(out: Output, cache: CacheAdapter, entries: Sequence[CacheEntry], digests_only: bool) -> Sequence[CacheEntry]:
    with out.progress("verifying", len(entries), "entries") as task:
        return cache.verify(entries, digests_only=digests_only, on_done=task.advance)


def _repair(out: Output, own: OwnCache, checked: Sequence[CacheEntry]) -> tuple[RepairOutcome, ...]:
    from mlactl.cache.store import Entry
    from mlactl.cache.verify import repair

    bad = [entry for entry in _bad(checked) if isinstance(entry, Entry)]
    if not bad:
        return ()
    with out.progress("rebuilding", len(bad), "entries") as task:
        return repair(own.store, bad, task.advance)


def _reproduce(out: Output, checked: Sequence[CacheEntry]) -> tuple[Reproduction, ...]:
    from mlactl.cache.store import Entry
    from mlactl.cache.verify import reproduce

    good = [entry for entry in checked if entry.status == "ok" and isinstance(entry, Entry)]
    with out.progress("compiling again", len(good), "entries") as task:
        return reproduce(good, task.advance)


def _identity(entry: CacheEntry) -> _Key:
    return entry.root, entry.key, entry.residue


def _report(
    out: Output,
    cache: CacheAdapter,
    checked: Sequence[CacheEntry],
    repairs: Sequence[RepairOutcome],
    reproductions: Sequence[Reproduction],
    passed_over: Sequence[str],
) -> None:
    repaired = {_identity(item.entry): item for item in repairs}
    compared = {_identity(item.entry): item for item in reproductions}
    rows = [_row(cache, entry, repaired.get(_identity(entry)), compared.get(_identity(entry))) for entry in checked]
    if out.mode is Mode.HUMAN:
        _report_human(out, cache, checked, repairs, reproductions)
        if passed_over:
            out.line(f"{counted(len(passed_over), 'folder', 'folders')} not looked at")
        return
    shown = rows if out.mode is not Mode.QUIET else [row for row in rows if row["status"] != "ok"]
    counts = {"checked": len(rows), "bad": len(_bad(checked)), "passed_over": list(passed_over)}
    out.listing("entries", shown, (), key=lambda row: row["key"], extra=counts)


def _row(cache: CacheAdapter, entry: CacheEntry, repaired: RepairOutcome | None, compared: Reproduction | None) -> dict[str, Any]:
    row: dict[str, Any] = {**cache.row(entry), "detail": entry.detail or None}
    if repaired is not None:
        row["repair"] = {"outcome": repaired.outcome, "found": repaired.entry.status, "reason": repaired.reason or None}
    if compared is not None:
        row["reproduced"] = {"result": compared.result, "reason": compared.reason or None}
    return row


def _report_human(
    out: Output, cache: CacheAdapter, checked: Sequence[CacheEntry], repairs: Sequence[RepairOutcome], reproductions: Sequence[Reproduction]
) -> None:
    bad = _bad(checked)
    for item in repairs:
        said = f": {item.reason}" if item.reason else ""
        out.line(f"{item.entry.key[: rendering.SHORT_KEY]} {item.entry.status}, {item.outcome}{said}")
    for entry in bad if not repairs else ():
        what = f"{entry.manifest.spec.label()} for {entry.manifest.arch or 'an unknown arch'}" if entry.manifest else ""
        out.line(f"{entry.key[: rendering.SHORT_KEY]} {entry.status} {what}".rstrip())
        out.line(f"  {entry.detail or 'nothing more is known'}")
        out.line(f"  {entry.object_path}")
    for compared in reproductions:
        if compared.result != "same":
            out.line(f"{compared.entry.key[: rendering.SHORT_KEY]} {compared.result}: {compared.reason}")
    if reproductions:
        same = sum(item.result == "same" for item in reproductions)
        out.line(f"{same} of {counted(len(reproductions))} compiled again to the same bytes")
    summary = f", {len(bad)} not ok" if bad else ", all ok" if checked else ""
    out.line(f"{counted(len(checked))}{summary}")
    _hint_at(out, cache, bad, repaired=bool(repairs))


_NOT_TO_PRUNE = frozenset({"locked", "quarantined", "unreadable", "untrusted"})
"""Status words of entries that no removal is suggested for: at work, set aside on purpose, or not judged."""


def _hint_at(out: Output, cache: CacheAdapter, bad: Sequence[CacheEntry], *, repaired: bool) -> None:
    """What to do about bad entries: mend an owner or mode, look as who may, rebuild, prune, or name those that only a full check finds."""
    for mend in (rendering.distrust_hint(bad), rendering.reading_hint(bad)):
        if mend is not None:
            out.hint(mend)
    aside = next((entry for entry in bad if entry.status == "quarantined"), None)
    if aside is not None:
        short = aside.key[: rendering.SHORT_KEY]
        out.hint(f"mlactl cache show {short} says why it is quarantined; mlactl cache rm {short} forgets it")
    damaged = [entry for entry in bad if entry.status not in _NOT_TO_PRUNE]
    deep = [entry for entry in damaged if entry.status in rendering.DEEP_STATUSES]
    words = " ".join(f"--status {status}" for status in sorted({entry.status for entry in damaged} - rendering.DEEP_STATUSES))
    ways = []
    if not repaired and any(rendering.rebuildable(cache, entry) for entry in damaged):
        ways.append("mlactl cache verify --repair rebuilds what this install can build")
    ways += [f"mlactl cache prune {words} --dry-run shows what would go"] if words else []
    ways += [rendering.removal_hint(deep)] if deep else []
    if ways:
        out.hint("; ".join(ways))
    elif any(entry.status == "locked" for entry in bad):
        out.hint("what is being written is checked when that is done: run it again")
