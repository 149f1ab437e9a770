"""`mlactl cache show` and `why`: one entry in full, and why a lookup hits or misses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mlactl.cli import hints, options
from mlactl.cli.cache import foreign_view, rendering
from mlactl.errors import EnvironmentUnfit, UsageError
from mlactl.ui.output import Column, Output, bytes_text

if TYPE_CHECKING:
    from mlactl.cache.adapter import CacheAdapter, CacheEntry, Description
    from mlactl.cache.store import Store
    from mlactl.cache.why import Explanation


@hints.keeps_root
def show(
    key: options.KeyArgument,
    show_secrets: options.ShowSecretsOption = False,
    root_kind: options.RootKindOption = options.RootKindChoice.AUTO,
    cache_dir: options.CacheDirOption = None,
    output: options.OutputOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Show one entry: manifest, resources, symbols."""
    out = hints.make_output(output, json, quiet, cache_dir, root_kind)
    cache = rendering.open_cache(out, cache_dir, root_kind)
    found = cache.describe(cache.entry(key), show_secrets=show_secrets)
    aside = found.entry.status == "quarantined"
    why_aside = _why_quarantined(cache, found.entry) if aside else ()
    document = {
        "entry": {**cache.row(found.entry), "detail": found.entry.detail or found.problem or None},
        "root": str(found.entry.root),
        "object_path": str(found.entry.object_path),
        "manifest_path": str(found.manifest_path),
        "manifest": found.manifest,
        "resources": [asdict(kernel) for kernel in found.kernels],
        "symbols": list(found.symbols) if found.symbols is not None else None,
        "signature": found.signature,
        "object_arch": found.object_arch,
        "why_quarantined": list(why_aside) if aside else None,
    }
    out.document(document, lambda: _show_human(out, cache, found, why_aside), lambda: [found.entry.key])


def _why_quarantined(cache: CacheAdapter, entry: CacheEntry) -> tuple[str, ...]:
    """What an audit says of an entry that was set aside; by facts alone where there is no nvdisasm."""
    from mlactl.cache.advisories import load
    from mlactl.cache.audit import UNKNOWN_CAUSE, audit

    try:
        (result,) = audit(cache, [entry], load(), jobs=1).results
    except EnvironmentUnfit as unfit:
        (result,) = audit(cache, [entry], load(), facts_only=True, jobs=1).results
        return f"{result.verdict} by facts alone, {unfit.message}", *result.reasons, *(() if result.guilty else (UNKNOWN_CAUSE,))
    return str(result.verdict), *result.reasons, *(() if result.guilty else (UNKNOWN_CAUSE,))


def _show_human(out: Output, cache: CacheAdapter, found: Description, why_aside: Sequence[str]) -> None:
    entry, manifest = found.entry, found.entry.manifest
    trouble = "set aside, nothing loads it" if why_aside else entry.detail or found.problem
    pairs = [("key", entry.key), ("status", f"{entry.status}: {trouble}" if trouble else str(entry.status))]
    pairs += [("why" if not number else "", text) for number, text in enumerate(why_aside)]
    if manifest is not None:
        pairs += [
            ("kernel", manifest.spec.kernel_id),
            ("version", rendering.version_cell(entry)),
            ("facts", rendering.facts_text(dict(manifest.spec.facts))),
            ("arch", manifest.arch or "-"),
        ]
    pairs += [*found.lines, ("size", bytes_text(entry.object_bytes)), ("path", str(entry.object_path))]
    pairs += [("object's arch", found.object_arch)] if found.object_arch is not None else []
    pairs += [("symbols", ", ".join(found.symbols))] if found.symbols is not None else []
    pairs += [("signature", found.signature)] if found.signature is not None else []
    width = max(len(name) for name, _ in pairs)
    for name, text in pairs:
        out.line(f"{name:<{width}}  {text}")
    if found.kernels:
        out.line()
        out.table(_KERNEL_COLUMNS, found.kernels)
    short = entry.key[: rendering.SHORT_KEY]
    if entry.status == "untrusted":
        out.hint(rendering.distrust_hint([entry]) or f"ls -ld {entry.object_path}")
    elif entry.status == "quarantined":
        again = f"{rendering.AGAIN}; " if rendering.is_own(cache) else ""
        out.hint(f"{again}mlactl cache audit {short} --restore puts it back if it is acquitted; mlactl cache rm {short} forgets it")
    elif entry.status in ("unreadable", "locked"):
        out.hint(rendering.reading_hint([entry]) or "run it again when that is done")
    elif rendering.rebuildable(cache, entry):
        out.hint(f"mlactl cache verify {short} --repair, or mlactl cache rm {short}")
    elif entry.status != "ok":
        out.hint(f"mlactl cache rm {short}")


def _bytes_cell(size: int | None) -> str:
    return "-" if size is None else str(size)


_KERNEL_COLUMNS = (
    # The compiler's names carry every argument's layout; what tells them apart is in front.
    Column("device kernel", lambda row: row.name if len(row.name) <= 48 else f"{row.name[:47]}…"),
    Column("registers", lambda row: str(row.registers), right=True),
    Column("frame bytes", lambda row: _bytes_cell(row.frame_bytes), right=True),
    Column("local bytes", lambda row: _bytes_cell(row.local_bytes), right=True),
    Column("static smem bytes", lambda row: _bytes_cell(row.static_smem_bytes), right=True),
    Column("dynamic smem bytes", lambda row: _bytes_cell(row.dynamic_smem_bytes), right=True),
)


@hints.keeps_root
def why(
    key: options.OptionalKeyArgument = None,
    profile: options.OptionalProfileOption = None,
    arch: options.ArchOption = None,
    show_secrets: options.ShowSecretsOption = False,
    root_kind: options.RootKindOption = options.RootKindChoice.AUTO,
    cache_dir: options.CacheDirOption = None,
    output: options.OutputOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Tell which key fields differ from what this machine builds; of a b12x entry, from its nearest sibling."""
    from mlactl.cache.own import OwnCache

    out = hints.make_output(output, json, quiet, cache_dir, root_kind)
    if (key is None) == (profile is None):
        found = "both" if key is not None else "neither"
        raise UsageError(f"expected a KEY or --profile, found {found}", hint="mlactl cache why KEY, or mlactl cache why --profile NAME")
    if key is not None and arch:
        raise UsageError("--arch goes with --profile: an entry has one arch", hint=f"mlactl cache why {key}")
    cache = rendering.open_cache(out, cache_dir, root_kind)
    if not isinstance(cache, OwnCache):
        foreign_view.why(out, cache, key, show_secrets=show_secrets)
        return
    explanations = _explanations(cache.store, key, profile, options.checked_arches(arch))
    document = {"lookups": [_as_json(item) for item in explanations]}
    out.document(document, lambda: _why_human(out, explanations, profile), lambda: [item.key or "-" for item in explanations if not item.hit])


def _explanations(store: Store, key: str | None, profile: str | None, arches: tuple[str, ...]) -> tuple[Explanation, ...]:
    from mlactl.cache.why import explain_entry, explain_specs

    if key is not None:
        return (explain_entry(store, store.entry(key)),)
    from mlactl.profiles import load
    from mlactl.warmup.arches import DEFAULT_ARCH, present_arches

    return explain_specs(store, load(profile or "").specs(), arches or present_arches() or (DEFAULT_ARCH,))


def _as_json(item: Explanation) -> dict[str, Any]:
    return {
        "key": item.key,
        "spec": item.spec.as_json() if item.spec is not None else None,
        "arch": item.arch,
        "hit": item.hit,
        "reason": item.reason,
        "entry": item.entry.key if item.entry is not None else None,
        "status": item.entry.status if item.entry is not None else None,
        "differences": [asdict(difference) for difference in item.differences],
        "notes": list(item.notes),
    }


def _why_human(out: Output, explanations: Sequence[Explanation], profile: str | None) -> None:
    for item in explanations:
        what = f"{item.spec.label()} for {item.arch}" if item.spec is not None else item.entry.key if item.entry is not None else "-"
        out.line(f"{'hit ' if item.hit else 'miss'}  {what}")
        out.line(f"      {item.reason}")
        if item.key is not None:
            out.line(f"      key here  {item.key}")
        if item.entry is not None and item.entry.key != item.key:
            out.line(f"      {'nearest ' if profile else 'entry   '}  {item.entry.key}")
        if item.differences:
            out.table(_DIFFERENCE_COLUMNS, item.differences)
        for note in item.notes:
            out.line(f"      {note}")
    misses = sum(not item.hit for item in explanations)
    if profile is not None:
        out.line(f"{len(explanations) - misses} of {len(explanations)} lookups hit")
    mend = rendering.distrust_hint([item.entry for item in explanations if item.entry is not None and not item.hit])
    unread = rendering.reading_hint([item.entry for item in explanations if item.entry is not None and not item.hit])
    for text in filter(None, (mend, unread)):  # compiling again would not change an owner or a mode
        out.hint(text)
    if sum(not item.hit and (item.entry is None or item.entry.status not in ("untrusted", "unreadable")) for item in explanations):
        out.hint(f"mlactl warmup --profile {profile or 'NAME'} compiles what is missing")


_DIFFERENCE_COLUMNS = (
    Column("      field", lambda difference: f"      {difference.field}"),
    Column("entry", lambda difference: _value(difference.entry)),
    Column("here", lambda difference: _value(difference.here)),
)


def _value(value: object) -> str:
    if value is None:
        return "absent"
    return str(value).lower() if isinstance(value, bool) else str(value)
