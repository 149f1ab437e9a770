"""Why a lookup hits or misses: the fields of an entry's key beside those this machine would build with now."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from mlactl.cache import key as keys
from mlactl.cache import toolchain as toolchains
from mlactl.cache.entry import examine
from mlactl.cache.key import KeyInputs
from mlactl.cache.manifest import Manifest
from mlactl.cache.store import Entry, Hit, Miss, Status, Store
from mlactl.errors import MlactlError
from mlactl.kernels import registry
from mlactl.kernels.spec import CompileSpec


@dataclass(frozen=True, slots=True)
class Difference:
    """One key field: what the entry was built with and what this machine would use; None where a side has no such field."""

    field: str
    entry: object
    here: object


@dataclass(frozen=True, slots=True)
class Explanation:
    """One lookup. `key` is what this machine looks for (None when it cannot be known here).

    `entry` is what answers it or, for a miss, the entry that comes nearest; `differences` are between that entry's key
    and this machine's. `notes` are remarks such as why the kernel's version was raised.
    """

    key: str | None
    spec: CompileSpec | None
    arch: str | None
    hit: bool
    reason: str
    entry: Entry | None
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]


def explain_entry(store: Store, entry: Entry) -> Explanation:
    """Whether a lookup here would be answered by this entry and, if not, which key fields or what damage stand against it."""
    manifest = entry.manifest
    if manifest is None:
        return Explanation(None, None, None, False, f"status {entry.status}: {entry.detail}", entry, (), ())
    differences, notes = _against_here(manifest)
    checked = examine(entry)
    spec, arch = manifest.spec, manifest.arch
    if differences:
        named = ", ".join(difference.field for difference in differences)
        return Explanation(_key_here(_todays(spec), arch), spec, arch, False, f"this machine builds with another {named}", entry, differences, notes)
    if checked.status is not Status.OK:
        return Explanation(entry.key, spec, arch, False, f"same key, but status {checked.status}: {checked.detail}", checked, (), notes)
    found = _lookup(store, spec, arch)
    if isinstance(found, Hit) and found.entry.layer != entry.layer:
        return Explanation(entry.key, spec, arch, True, f"the same entry of {found.entry.layer.path} answers first", entry, (), notes)
    if isinstance(found, Hit):
        return Explanation(entry.key, spec, arch, True, "a lookup here finds this entry", entry, (), notes)
    return Explanation(entry.key, spec, arch, False, found.reason, entry, (), notes)


def explain_specs(store: Store, specs: Iterable[CompileSpec], arches: Iterable[str]) -> tuple[Explanation, ...]:
    """One explanation for each (spec, arch), specs outermost."""
    wanted = [(spec, arch) for spec in specs for arch in arches]
    # Read the root once however many lookups miss; an entry of another arch is no near miss, it is another need.
    candidates: dict[tuple[str, str], list[Manifest]] = {}
    entries: dict[str, Entry] = {}
    for entry in store.entries():
        if entry.manifest is not None and not entry.residue:
            candidates.setdefault((entry.manifest.spec.kernel_id, entry.manifest.arch), []).append(entry.manifest)
            entries.setdefault(entry.key, entry)
    return tuple(_explain_spec(store, spec, arch, candidates.get((spec.kernel_id, arch), []), entries) for spec, arch in wanted)


def _explain_spec(store: Store, spec: CompileSpec, arch: str, candidates: list[Manifest], entries: dict[str, Entry]) -> Explanation:
    missing = registry.not_built(spec)
    found = _lookup(store, spec, arch)
    if isinstance(found, Hit):
        return Explanation(found.entry.key, spec, arch, True, f"found in {found.entry.layer.path}", found.entry, (), ())
    notes = (missing,) if missing is not None else ()
    if found.key in entries:
        return Explanation(found.key, spec, arch, False, found.reason, examine(entries[found.key]), (), notes)
    if not candidates:
        return Explanation(found.key, spec, arch, False, f"no {spec.kernel_id} for {arch} in the cache", None, (), notes)
    here = _inputs_here(spec, arch, candidates[0])
    if isinstance(here, str):
        return Explanation(found.key, spec, arch, False, here, None, (), notes)
    nearest = min(candidates, key=lambda manifest: _distance(manifest, here))
    differences, more = _compare(nearest, here), _remarks(nearest.spec)
    return Explanation(found.key, spec, arch, False, found.reason, entries[nearest.key], differences, (*notes, *more))


def _lookup(store: Store, spec: CompileSpec, arch: str) -> Hit | Miss:
    """The lookup a launch would make; files that cannot be trusted or told apart are a miss that says so."""
    try:
        return store.lookup(spec, arch)
    except MlactlError as error:
        return Miss(_key_here(spec, arch), error.message)


def _distance(manifest: Manifest, here: KeyInputs) -> tuple[int, int, str]:
    """How far an entry's key is from this machine's: fields of the spec first, then everything else."""
    differences = _compare(manifest, here)
    in_spec = sum(difference.field.startswith("spec.") for difference in differences)
    return in_spec, len(differences), manifest.key


def _against_here(manifest: Manifest) -> tuple[tuple[Difference, ...], tuple[str, ...]]:
    """Fields in which an entry's key differs from the one that the same facts have here, at today's version of the kernel."""
    here = _inputs_here(_todays(manifest.spec), manifest.arch, manifest)
    if isinstance(here, str):
        return (Difference("spec.kernel_id", manifest.spec.kernel_id, None),), (here,)
    return (*_compare(manifest, here), *_undeclared(manifest.spec)), _remarks(manifest.spec)


def _inputs_here(spec: CompileSpec, arch: str, manifest: Manifest) -> KeyInputs | str:
    """What this machine would build (spec, arch) from, or why it cannot; without a compiler, with the manifest's toolchain."""
    try:
        return keys.inputs_for(spec, arch, toolchains.current() or manifest.toolchain)
    except MlactlError as error:
        return error.message


def _compare(manifest: Manifest, here: KeyInputs) -> tuple[Difference, ...]:
    theirs = here if toolchains.current() is not None else replace(here, toolchain=manifest.toolchain)
    return tuple(Difference(*found) for found in keys.differences(manifest.key_inputs(), theirs))


def _remarks(spec: CompileSpec) -> tuple[str, ...]:
    """Why the kernel's version was raised since this spec's, and whether the toolchain could be compared."""
    declared = registry.KERNELS.get(spec.kernel_id)
    history = declared.history if declared is not None else ()
    bumps = [f"version {bump.version}: {bump.reason}" for bump in history if bump.version > spec.version]
    return (*bumps, *([f"toolchain not compared: {toolchains.absence()}"] if toolchains.current() is None else []))


def _todays(spec: CompileSpec) -> CompileSpec:
    """The same facts at the version that the registry declares now."""
    declared = registry.KERNELS.get(spec.kernel_id)
    return spec if declared is None else replace(spec, version=declared.version)


def _undeclared(spec: CompileSpec) -> list[Difference]:
    """Facts that only the entry or only today's declaration has."""
    declared = registry.KERNELS.get(spec.kernel_id)
    if declared is None:
        return []
    had, has = dict(spec.facts), {fact.name: fact.allowed for fact in declared.facts}
    gone = [Difference(f"spec.facts.{name}", value, None) for name, value in had.items() if name not in has]
    added = [Difference(f"spec.facts.{name}", None, f"one of {list(allowed)}") for name, allowed in has.items() if name not in had]
    return gone + added


def _key_here(spec: CompileSpec, arch: str) -> str | None:
    """The key of (spec, arch) on this machine; None where it has no such kernel or no compiler."""
    try:
        registry.validate(spec)
        inputs: KeyInputs = keys.inputs_for(spec, arch)
    except MlactlError:
        return None
    return inputs.key()
