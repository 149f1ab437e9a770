"""What the cache commands share: opening the store, filter options, columns and cells."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlactl.cli import options
from mlactl.errors import UsageError
from mlactl.ui.output import Column, Output, age_text, bytes_text

if TYPE_CHECKING:
    from pathlib import Path

    from mlactl.cache.adapter import CacheAdapter, CacheEntry
    from mlactl.cache.store import Store

SHORT_KEY = 12
"""Digits of a key in a human listing; commands take any unique start of a key."""


def complete_kernel(incomplete: str) -> list[str]:
    """Kernel ids that start with what was typed."""
    from mlactl.kernels.registry import KERNELS

    return sorted(kernel_id for kernel_id in KERNELS if kernel_id.startswith(incomplete))


def complete_status(incomplete: str) -> list[str]:
    """Status words that start with what was typed."""
    from mlactl.cache.store import Status

    return [status.value for status in Status if status.startswith(incomplete) and status not in DEEP_STATUSES]


def complete_advisory(incomplete: str) -> list[str]:
    """Ids of this release's advisories that start with what was typed."""
    from mlactl.cache.advisories import bundled

    return [advisory.id for advisory in bundled().advisories if advisory.id.startswith(incomplete)]


KernelFilter = Annotated[
    list[str] | None,
    typer.Option("--kernel", metavar="ID", help="Kernel id, its dotted start, or a pattern; repeatable", autocompletion=complete_kernel),
]
StatusFilter = Annotated[
    list[str] | None, typer.Option("--status", metavar="WORD", help="ok, size, no-object, temp, ...; repeatable", autocompletion=complete_status)
]
KeepProfileOption = Annotated[
    list[str] | None,
    typer.Option(
        "--keep-profile",
        metavar="NAME|PATH",
        help="Never remove what this profile names; repeatable",
        autocompletion=options.complete_profile,
    ),
]


def checked_statuses(values: Sequence[str] | None) -> tuple[str, ...]:
    """`--status` values; raises UsageError naming the words there are, and for those that only a full check gives."""
    from mlactl.cache.store import Status

    words = [status.value for status in Status if status not in DEEP_STATUSES]
    for value in values or ():
        if value in DEEP_STATUSES:
            raise UsageError(
                f"--status {value} would match nothing: only a full check says that, and this goes by names, sizes and manifests: {', '.join(words)}",
                hint="mlactl cache verify names such entries; mlactl cache rm KEY removes one",
            )
        if value not in words:
            raise UsageError(f"--status {value!r} is not one of {', '.join(words)}", hint="mlactl cache ls shows the status of each entry")
    return tuple(dict.fromkeys(values or ()))


AGAIN = "mlactl warmup --profile NAME compiles what was set aside again, and refuses the very object that was"
"""What follows a quarantine: the right object takes the place of a mislabelled one, the same sources give the same object."""

DEEP_STATUSES = frozenset({"digest", "arch", "symbol", "signature", "untrusted"})
"""Status words that only a full check gives: `--status` of a listing or a plan never meets them."""


def checked_kernels(values: Sequence[str] | None) -> tuple[str, ...]:
    """`--kernel` values; raises UsageError for an empty one."""
    from mlactl.kernels.registry import KERNELS

    if any(not value.strip() for value in values or ()):
        raise UsageError("--kernel is empty, expected a kernel id, its dotted start or a pattern", hint=f"one of {', '.join(sorted(KERNELS))}")
    return tuple(values or ())


def distrust_hint(entries: Sequence[CacheEntry]) -> str | None:
    """How to mend the owner or mode of the first untrusted entry; None when there is none."""
    from mlactl.cache.entry import Entry, distrust

    ours = [entry for entry in entries if entry.status == "untrusted" and isinstance(entry, Entry)]
    refused = next((found for entry in ours if (found := distrust(entry)) is not None), None)
    return refused.hint if refused is not None else None


def reading_hint(entries: Sequence[CacheEntry]) -> str | None:
    """Who can look at the entries that this user cannot read; None when all can be read."""
    if all(entry.status != "unreadable" for entry in entries):
        return None
    return "what cannot be read is not judged and stays: run it again as its owner or as root; where that fails too, the disk does (dmesg)"


def removal_hint(entries: Sequence[CacheEntry]) -> str:
    """A command that removes these entries, or the first of them, by key."""
    shown = list(dict.fromkeys(entry.key[:SHORT_KEY] for entry in entries))
    some = f"the first {_SHOWN_KEYS} of {len(shown)}" if len(shown) > _SHOWN_KEYS else "by key"
    return f"mlactl cache rm {' '.join(shown[:_SHOWN_KEYS])} removes {some}"


def rebuildable(cache: CacheAdapter, entry: CacheEntry) -> bool:
    """Whether `cache verify --repair` may help: one of our own, damaged, in the writable root, with a manifest that says what it was built from."""
    beyond = ("ok", "untrusted", "unreadable", "quarantined", "locked")
    return is_own(cache) and entry.status not in beyond and entry.manifest is not None and entry.root == cache.writable


_SHOWN_KEYS = 3


def open_store(out: Output, cache_dir: str | None) -> Store:
    """The store that the options and the environment name; warns of what a person should know about its roots."""
    from mlactl.cache.roots import warnings
    from mlactl.cache.store import Store

    store = Store.open(cache_dir)
    for text in warnings(store.roots):
        out.warn(text)
    return store


def open_cache(out: Output, cache_dir: str | None, root_kind: options.RootKindChoice) -> CacheAdapter:
    """The cache that the options and the environment name, whichever tool wrote it; warns of what a person should know about its roots."""
    from mlactl.cache.adapters import open_cache as open_any

    cache = open_any(cache_dir, root_kind.value)
    for text in cache.remarks:
        out.warn(text)
    return cache


def checked_arches(cache: CacheAdapter, values: Sequence[str] | None) -> tuple[str, ...]:
    """`--arch` values for a root of this kind; raises UsageError."""
    return options.checked_arches(values) if is_own(cache) else options.checked_foreign_arches(values)


def is_own(cache: CacheAdapter) -> bool:
    """Whether it is this project's own cache."""
    from mlactl.cache.adapter import RootKind

    return cache.kind is RootKind.MLACTL


def entry_columns(entries: Sequence[CacheEntry]) -> tuple[Column, ...]:
    """Columns of a listing of entries; the root is told only when there are several."""
    now = time.time()
    root = (Column("root", lambda entry: str(entry.root)),) if len({entry.root for entry in entries}) > 1 else ()
    return (
        Column("key", lambda entry: entry.key[:SHORT_KEY]),
        Column("kernel", kernel_cell),
        Column("version", version_cell, right=True),
        Column("status", lambda entry: str(entry.status)),
        Column("arch", lambda entry: (entry.manifest.arch if entry.manifest else "") or "-"),
        Column("facts", lambda entry: facts_text(dict(entry.manifest.spec.facts)) if entry.manifest else "-"),
        Column("size", lambda entry: bytes_text(entry.object_bytes), right=True),
        Column("age", lambda entry: _age(_made(entry), now), right=True),
        Column("used", lambda entry: _age(entry.last_used, now), right=True),
        *root,
    )


_EXPENDABLE = ("facts", "used", "age", "size", "arch", "version")
"""Columns in the order they go when the terminal is too narrow: a folded key or kernel id cannot be read or copied."""

_PADDING = 2


def fitting(columns: Sequence[Column], rows: Sequence[CacheEntry], width: int) -> tuple[tuple[Column, ...], tuple[str, ...]]:
    """The columns that a terminal of `width` characters holds without folding, and the titles of those left out."""
    needs = {column.title: _PADDING + max([len(column.title), *(len(column.cell(row)) for row in rows)]) for column in columns}
    dropped: list[str] = []
    for title in _EXPENDABLE:
        if sum(needs.values()) <= width:
            break
        dropped.append(title)
        needs.pop(title, None)
    return tuple(column for column in columns if column.title in needs), tuple(dropped)


def kernel_cell(entry: CacheEntry) -> str:
    """The kernel id, or the end of the name of what a writer left behind."""
    return entry.manifest.spec.kernel_id if entry.manifest else entry.residue.removeprefix(entry.key) or "-"


def version_cell(entry: CacheEntry) -> str:
    """The spec version; a dash where none is known."""
    return str(entry.manifest.spec.version) if entry.manifest and entry.manifest.spec.version >= 0 else "-"


def _made(entry: CacheEntry) -> str | float | None:
    """When an entry was made: what its manifest says, else when a foreign file was written."""
    from mlactl.cache.foreign.b12x.entry import Entry as B12xEntry

    if isinstance(entry, B12xEntry):
        return entry.written
    return entry.manifest.created if entry.manifest else None


def facts_text(facts: dict[str, Any]) -> str:
    """`groups=4 window=false`, tensors of foreign facts by name, dtype and rank."""
    return " ".join(f"{name}={_fact_text(value)}" for name, value in facts.items()) or "-"


def _fact_text(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case ["tensor", _, str(dtype), int(rank), *_]:
            return f"{dtype.removeprefix('torch.')}[{rank}]"
    return str(value)


def _age(moment: str | float | None, now: float) -> str:
    from mlactl.cache.listing import seconds_since

    return age_text(seconds_since(moment, now))


def counted(number: int, noun: str = "entry", plural: str = "entries") -> str:
    """`1 entry`, `12 entries`."""
    return f"{number} {noun if number == 1 else plural}"


def resolve_keys(cache: CacheAdapter, keys: Sequence[str]) -> list[CacheEntry]:
    """The entries of these keys or unique starts of keys, without repeats; raises NotFound or UsageError before anything is done."""
    found = [cache.entry(key) for key in keys]
    by_identity: dict[tuple[Path, str], CacheEntry] = {(entry.root, entry.key): entry for entry in found}
    return list(by_identity.values())
