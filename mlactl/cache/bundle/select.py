"""Which entries go into a bundle: named keys, what a profile's lookups are answered with, or what filters pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mlactl.cache import listing
from mlactl.cache.manifest import Manifest
from mlactl.cache.store import Entry, Miss, Status, Store
from mlactl.cache.trust import Untrusted
from mlactl.kernels import registry
from mlactl.kernels.spec import CompileSpec


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something that was asked for and has no usable entry: its key and manifest as far as they are known, why, and what mends it."""

    key: str | None
    manifest: Manifest | None
    reason: str
    hint: str | None
    label: str = ""


@dataclass(frozen=True, slots=True)
class Selection:
    """Keys to pack, in order and without repeats; what is known beforehand to be missing; and keys set aside on purpose."""

    keys: tuple[str, ...]
    missing: tuple[LeftOut, ...] = ()
    quarantined: tuple[str, ...] = ()


def by_keys(store: Store, keys: Sequence[str]) -> Selection:
    """The entries of these keys or unique starts of keys; raises NotFound and UsageError."""
    return Selection(tuple(sorted({store.entry(key).key for key in keys})))


def by_lookups(store: Store, specs: Iterable[CompileSpec], arches: Sequence[str], *, kernels: Sequence[str] = ()) -> Selection:
    """What launches of these specs on these arches would load; raises SeveralToolchains where that is in doubt."""
    keys: set[str] = set()
    missing: list[LeftOut] = []
    for spec in dict.fromkeys(specs):
        if kernels and not any(listing.kernel_matches(spec.kernel_id, name) for name in kernels):
            continue
        not_built = registry.not_built(spec)
        for arch in arches:
            label = f"{spec.label()} for {arch}"
            if not_built is not None:
                missing.append(LeftOut(None, None, not_built, None, label))
                continue
            try:
                found = store.lookup(spec, arch)
            except Untrusted as refused:
                missing.append(LeftOut(None, None, refused.message, refused.hint, label))
                continue
            if isinstance(found, Miss):
                missing.append(LeftOut(found.key, None, found.reason, None, label))
            else:
                keys.add(found.entry.key)
    return Selection(tuple(sorted(keys)), tuple(missing))


def by_filters(store: Store, filters: listing.Filters, on_problem: Callable[[str], None] | None = None) -> Selection:
    """Every entry that passes, of all layers; an object without a manifest is none. What is set aside is named, if it passes."""
    committed, aside = store.committed(on_problem=on_problem)
    # A key that is set aside in one layer and committed in another: only the manifests tell whether that is the same object.
    aside -= {key for key in committed & aside if _answers(store, key)}
    if filters != listing.Filters():
        passing = {entry.key for entry in listing.select(listing.collect(store), filters)}
        committed, aside = committed & passing, aside & passing
    return Selection(tuple(sorted(committed - aside)), quarantined=tuple(sorted(aside)))


def _answers(store: Store, key: str) -> bool:
    """Whether some layer has another object of this key than those that are set aside, by the manifests."""
    return any(entry.status is not Status.QUARANTINED for entry in store.everywhere(key))


def set_aside_in(entry: Entry) -> str:
    """Why an object of another layer is not used."""
    return f"quarantined: {entry.root} has set {'this very object' if entry.manifest else 'an object of this key'} aside"
