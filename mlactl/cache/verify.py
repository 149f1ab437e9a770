"""Checking entries against their machine code, rebuilding the bad ones, and proving the good ones by recompiling.

`verify` reads every object: digest, ELF, arch, symbol and signature against the manifest. `repair` rebuilds what this
install can build under the very same key and touches nothing else. `reproduce` compiles again and compares the exported
object's digest: objects are reproducible, so an equal one proves that the entry comes from these sources.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from mlactl.cache import key as keys
from mlactl.cache import locks
from mlactl.cache import toolchain as toolchains
from mlactl.cache.entry import examine
from mlactl.cache.interrupts import held_back
from mlactl.cache.manifest import Manifest
from mlactl.cache.reading import out_of_reach
from mlactl.cache.roots import Roots
from mlactl.cache.store import Entry, Status, Store
from mlactl.errors import Interrupted, MlactlError
from mlactl.kernels import registry
from mlactl.kernels.compiler import compile_object
from mlactl.kernels.spec import CompileSpec

OnDone = Callable[[int], None]
Compiler = Callable[[CompileSpec, str, str, str, Path], int | None]
"""(spec, arch, symbol, flavour, out): writes the relocatable object to `out`."""


def _ignore(_steps: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Report:
    """Checked entries in the order of the listing; each has the status of the full check."""

    entries: tuple[Entry, ...]

    @property
    def bad(self) -> tuple[Entry, ...]:
        """The entries that are not ok."""
        return tuple(entry for entry in self.entries if entry.status is not Status.OK)


class Repair(StrEnum):
    """What became of a bad entry."""

    REBUILT = "rebuilt"
    BUSY = "busy"
    LEFT = "left"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RepairOutcome:
    """One bad entry: what was done and, unless it was rebuilt, why not."""

    entry: Entry
    outcome: Repair
    reason: str


class Reproduced(StrEnum):
    """What recompiling an entry showed."""

    SAME = "same"
    DIFFERENT = "different"
    CANNOT_COMPARE = "cannot compare"


@dataclass(frozen=True, slots=True)
class Reproduction:
    """One entry recompiled: `reason` names what differs, or what is missing for a comparison."""

    entry: Entry
    result: Reproduced
    reason: str


def verify(store: Store, entries: Iterable[Entry] | None = None, *, digests_only: bool = False, on_done: OnDone = _ignore) -> Report:
    """Checks the given entries, or every one of every layer; `on_done` counts them.

    An entry that looks bad is looked at a second time under its lock, so that one that is being replaced or removed at
    this moment is not called damaged. Raises CannotRun when a root cannot be read and Interrupted on Ctrl-C.
    """
    checked: list[Entry] = []
    try:
        for entry in store.entries() if entries is None else entries:
            found: Entry | None = examine(entry, digests_only=digests_only)
            if found is not None and found.status is not Status.OK:
                found = _second_look(store, found, digests_only)
            if found is not None:
                checked.append(found)
            on_done(1)
    except KeyboardInterrupt:
        raise Interrupted(
            f"interrupted: {len(checked)} entries were checked, nothing was changed", hint="run it again, or name keys to check fewer"
        ) from None
    return Report(tuple(checked))


def _second_look(store: Store, entry: Entry, digests_only: bool) -> Entry | None:
    """The entry as it is while nobody writes it; None when it is gone by now."""
    if entry.residue:
        return entry if entry.object_path.exists() else None
    try:
        lease = locks.acquire_entry(entry.layer, entry.key, exclusive=False, wait_s=0.0) if entry.layer.writable else None
    except locks.LockBusy as busy:
        return msgspec.structs.replace(entry, status=Status.LOCKED, detail=busy.message)
    except (OSError, locks.NotALockFile):
        lease = None  # another user's root, or a read-only mount: judge what can be read
    try:
        now = store.entry_in(entry.layer, entry.key)
        if now is None:  # in a folder that this user may list and not enter nothing is known to be gone
            return entry if out_of_reach(entry.object_path) else None
        return examine(now, digests_only=digests_only)
    finally:
        if lease is not None:
            lease.close()


# ---- repair


def repair(store: Store, bad: Iterable[Entry], on_done: OnDone = _ignore, compiler: Compiler = compile_object) -> tuple[RepairOutcome, ...]:
    """Rebuilds the entries of the writable layer that this install builds under the same key; the others are left and named.

    Raises Interrupted on Ctrl-C; entries rebuilt until then stay rebuilt.
    """
    # That layer alone: a good copy in a read-only one would count as nothing to do.
    alone = Store(Roots((store.roots.require_writable(),)))
    outcomes: list[RepairOutcome] = []
    try:
        for entry in bad:
            with held_back():
                outcomes.append(_repair(alone, entry, compiler))
            on_done(1)
    except KeyboardInterrupt:
        rebuilt = sum(outcome.outcome is Repair.REBUILT for outcome in outcomes)
        raise Interrupted(f"interrupted: {rebuilt} entries were rebuilt, the cache is valid", hint="run it again for the rest") from None
    return tuple(outcomes)


def _repair(store: Store, entry: Entry, compiler: Compiler) -> RepairOutcome:
    manifest = entry.manifest
    if entry.layer != store.roots.writable:
        return RepairOutcome(entry, Repair.LEFT, f"{entry.layer.path} is a read-only layer")
    if entry.status is Status.QUARANTINED:
        return RepairOutcome(entry, Repair.LEFT, "it is quarantined, which a repair does not undo")
    if entry.status in (Status.UNTRUSTED, Status.UNREADABLE):
        return RepairOutcome(entry, Repair.LEFT, entry.detail)
    if entry.status is Status.LOCKED:
        return RepairOutcome(entry, Repair.BUSY, entry.detail)
    if manifest is None:
        return RepairOutcome(entry, Repair.LEFT, "no manifest says what it was compiled from")
    reason = cannot_build(manifest)
    if reason is not None:
        return RepairOutcome(entry, Repair.LEFT, reason)
    from mlactl.cache import publish  # brings in what runs the linker; plain verifying does without

    try:
        publish.compile_and_publish(store, manifest.spec, manifest.arch, lock_timeout_s=0.0, compiler=compiler)
    except locks.LockBusy as busy:
        return RepairOutcome(entry, Repair.BUSY, busy.message)
    except MlactlError as error:
        return RepairOutcome(entry, Repair.FAILED, error.message)
    now = store.entry_in(entry.layer, entry.key)
    if now is None or examine(now).status is not Status.OK:
        return RepairOutcome(entry, Repair.FAILED, "it was compiled again and is still not ok")
    return RepairOutcome(entry, Repair.REBUILT, "")


def cannot_build(manifest: Manifest) -> str | None:
    """Why this install does not build an entry under its key: version, facts, sources, toolchain; None when it does."""
    spec = manifest.spec
    try:
        missing = registry.not_built(spec)
        if missing is not None:
            return missing
        here = keys.inputs_for(spec, manifest.arch)
    except MlactlError as error:
        return error.message
    different = [field for field, _, _ in keys.differences(manifest.key_inputs(), here)]
    return f"built from other {', '.join(different)}" if different else None


# ---- reproduce


def reproduce(entries: Iterable[Entry], on_done: OnDone = _ignore, compiler: Compiler = compile_object) -> tuple[Reproduction, ...]:
    """Compiles each entry again, in private folders, and compares the exported objects' digests; publishes nothing."""
    results: list[Reproduction] = []
    try:
        for entry in entries:
            with held_back():
                results.append(_reproduce(entry, compiler))
            on_done(1)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted: {len(results)} entries were compiled and compared, nothing was changed") from None
    return tuple(results)


def _reproduce(entry: Entry, compiler: Compiler) -> Reproduction:
    manifest = entry.manifest
    if manifest is None or entry.status is not Status.OK:
        return Reproduction(entry, Reproduced.CANNOT_COMPARE, f"the entry is not ok: {entry.status}")
    reason = cannot_build(manifest)
    if reason is None and manifest.python != toolchains.python_minor():
        reason = f"compiled by Python {manifest.python}, this is {toolchains.python_minor()}"
    if reason is not None:
        return Reproduction(entry, Reproduced.CANNOT_COMPARE, reason)
    import tempfile

    with tempfile.TemporaryDirectory(prefix="mlactl-reproduce-") as folder:
        out = Path(folder) / "object.o"
        try:
            compiler(manifest.spec, manifest.arch, manifest.symbol, manifest.toolchain.flavour, out)
        except MlactlError as error:
            return Reproduction(entry, Reproduced.CANNOT_COMPARE, error.message)
        digest = hashlib.sha256(out.read_bytes()).hexdigest()
    if digest != manifest.code_sha256:
        return Reproduction(entry, Reproduced.DIFFERENT, f"code_sha256 is {manifest.code_sha256} in the manifest, compiling again gives {digest}")
    return Reproduction(entry, Reproduced.SAME, "")
