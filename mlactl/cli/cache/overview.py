"""`mlactl cache ls`, `stats` and `dir`: what is there."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlactl.cli import hints, options
from mlactl.cli.cache import rendering
from mlactl.cli.cache.rendering import counted
from mlactl.cli.cache.survey import list_roots
from mlactl.errors import UsageError
from mlactl.ui.output import ROW_LIMIT, Column, Mode, Output, bytes_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlactl.cache.adapter import CacheEntry
    from mlactl.cache.stats import LayerStats

BAD_ROWS_EXPLAINED = 5


@hints.keeps_root
def ls(
    kernel: rendering.KernelFilter = None,
    arch: options.ArchOption = None,
    status: rendering.StatusFilter = None,
    show_all: options.AllOption = False,
    all_roots: Annotated[bool, typer.Option("--all-roots", help="Every compile cache of this node, other tools' included")] = False,
    root_kind: options.RootKindOption = options.RootKindChoice.AUTO,
    cache_dir: options.CacheDirOption = None,
    output: options.OutputOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """List entries, by names, sizes and manifests."""
    from mlactl.cache import listing

    out = hints.make_output(output, json, quiet, cache_dir, root_kind)
    if all_roots:
        if kernel or arch or status:
            raise UsageError("--all-roots lists roots, which --kernel, --arch and --status do not filter", hint="mlactl cache ls --all-roots")
        if root_kind is not options.RootKindChoice.AUTO:
            raise UsageError("--all-roots lists roots of every kind", hint="mlactl cache ls --all-roots, without --root-kind")
        list_roots(out, cache_dir, show_all)
        return
    kernels, statuses = rendering.checked_kernels(kernel), rendering.checked_statuses(status)
    cache = rendering.open_cache(out, cache_dir, root_kind)
    filters = listing.Filters(kernels, rendering.checked_arches(cache, arch), statuses)
    everything = cache.entries(on_problem=out.warn)
    rows = listing.order(listing.select(everything, filters))
    columns = rendering.entry_columns(rows) if out.mode is Mode.HUMAN else ()
    dropped: tuple[str, ...] = ()
    if columns and not show_all and out.stdout.isatty():
        columns, dropped = rendering.fitting(columns, rows[:ROW_LIMIT], shutil.get_terminal_size().columns)
    out.listing("entries", rows, columns, key=lambda entry: entry.key, show_all=show_all, empty="0 entries", as_json=cache.row)
    if dropped:
        out.hint(f"no room for {', '.join(dropped)}: mlactl cache ls --all prints them, mlactl cache show KEY all of one entry")
    if rows:
        _explain_bad(out, rows)
    elif everything:
        out.hint(f"nothing matched; the cache has {', '.join(listing.kernels_present(everything)) or 'no readable manifest'}")
    elif rendering.is_own(cache):
        out.hint(f"mlactl warmup --profile NAME fills {cache.paths[0]}")


def _explain_bad(out: Output, rows: Sequence[CacheEntry]) -> None:
    bad = [entry for entry in rows if entry.status != "ok"]
    for entry in bad[:BAD_ROWS_EXPLAINED]:
        out.note(f"{entry.key[: rendering.SHORT_KEY]} {entry.status}: {entry.detail}")
    mend = rendering.reading_hint(bad)
    if mend is not None:
        out.hint(mend)
    if any(entry.status != "unreadable" for entry in bad):
        out.hint("mlactl cache verify checks every object; mlactl cache prune --status WORD --dry-run shows what would go")


@hints.keeps_root
def stats(
    root_kind: options.RootKindOption = options.RootKindChoice.AUTO,
    cache_dir: options.CacheDirOption = None,
    output: options.StatsOutputOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Count entries and bytes by kernel, version, arch and status."""
    from mlactl.cache import listing
    from mlactl.cache import stats as service

    out = hints.make_output(output, json, quiet, cache_dir, root_kind)
    found = service.collect(rendering.open_cache(out, cache_dir, root_kind), out.warn)
    if out.mode is Mode.PROMETHEUS:
        out.line(service.prometheus(found).rstrip("\n"))
        return
    roots: list[dict[str, Any]] = []
    for layer in found.layers:
        uses = {"oldest_use": listing.iso_time(layer.oldest_use), "newest_use": listing.iso_time(layer.newest_use)}
        roots.append({**asdict(layer), "path": str(layer.path), "toolchains": dict(layer.toolchains), **uses})

    def human() -> None:
        for layer in found.layers:
            _stats_human(out, layer)

    out.document(
        {"root_kind": found.root_kind, "roots": roots},
        human,
        lambda: [f"{layer.path} {layer.entries} {layer.object_bytes}" for layer in found.layers],
    )


def _stats_human(out: Output, layer: LayerStats) -> None:
    kind = "" if layer.writable else " (read-only)"
    out.line(f"{layer.path}{kind}: {counted(layer.entries)}, {bytes_text(layer.object_bytes)}")
    if layer.groups:
        out.table(_GROUP_COLUMNS, layer.groups)
    for label, number in layer.toolchains:
        out.line(f"{counted(number)} made by {label}")


_GROUP_COLUMNS = (
    Column("kernel", lambda group: group.kernel_id or "-"),
    Column("version", lambda group: "-" if group.version is None else str(group.version), right=True),
    Column("arch", lambda group: group.arch or "-"),
    Column("status", lambda group: str(group.status)),
    Column("entries", lambda group: str(group.entries), right=True),
    Column("size", lambda group: bytes_text(group.object_bytes), right=True),
)


@hints.keeps_root
def directory(
    cache_dir: options.CacheDirOption = None,
    output: options.OutputOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Print the roots, one a line, in the order they are searched."""
    out = hints.make_output(output, json, quiet, cache_dir)
    layers = rendering.open_store(out, cache_dir).roots.layers
    rows = [{"path": str(layer.path), "writable": layer.writable, "exists": layer.path.is_dir()} for layer in layers]
    paths = [str(layer.path) for layer in layers]

    def human() -> None:
        for row in rows:
            out.line(str(row["path"]))
            if not row["exists"]:
                out.note(f"{row['path']} does not exist yet")
            if not row["writable"]:
                out.note(f"{row['path']} is a read-only layer")

    out.document({"roots": rows}, human, lambda: paths)
