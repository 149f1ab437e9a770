"""Gives the kernels' runtime its objects: checked bytes, marked as in use for as long as they are loaded."""

from __future__ import annotations

from mlactl.cache import locks, publish
from mlactl.cache import toolchain as toolchains
from mlactl.cache.entry import Entry, RejectedObject, check_object, examine, read_checked
from mlactl.cache.key import differences
from mlactl.cache.store import Miss, Store, touch
from mlactl.errors import EnvironmentUnfit
from mlactl.kernels.errors import MissingObject
from mlactl.kernels.runtime import VerifiedObject
from mlactl.kernels.spec import CompileSpec

__all__ = ["RejectedObject", "StoreSource", "check_object", "examine", "read_verified"]

_READ_WAIT_S = 60.0
"""How long a reader waits for a publisher or remover of the same entry."""


def read_verified(entry: Entry) -> VerifiedObject:
    """The checked bytes of an entry, marked as in use for as long as the result is referenced.

    Raises RejectedObject for an entry that is not ok, Untrusted (a CannotRun) for files that others may write, and
    LockBusy when somebody keeps rewriting it. A layer whose lock cannot be opened is read without one.
    """
    lease = _lease(entry)
    try:
        manifest, data = read_checked(entry)
    except BaseException:
        if lease is not None:
            lease.close()  # not left to the traceback's frames: the entry is about to be rebuilt
        raise
    touch(entry)
    return VerifiedObject(
        manifest.key, manifest.spec, manifest.arch, manifest.symbol, manifest.toolchain.flavour, data, str(entry.object_path), lease
    )


def _lease(entry: Entry) -> locks.Lease | None:
    try:
        return locks.acquire_entry(entry.layer, entry.key, exclusive=False, wait_s=_READ_WAIT_S)
    except (OSError, locks.NotALockFile):
        return None


class StoreSource:
    """`kernels.runtime.ObjectSource` over a store."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def fetch(self, spec: CompileSpec, arch: str) -> VerifiedObject | None:
        """The first usable object of (spec, arch); None when every candidate is absent or bad.

        Raises Untrusted when all there is could have been written by others: compiling again would not help.
        """
        answer = self.store.search(spec, arch, read_verified)
        return None if isinstance(answer, Miss) else answer[1]

    def compile(self, spec: CompileSpec, arch: str) -> VerifiedObject:
        """Compiles, publishes and reads back one object; raises what `publish.compile_and_publish` does."""
        if toolchains.current() is None:
            raise EnvironmentUnfit(
                f"{self.describe_miss(spec, arch)}; no compiler here: {toolchains.absence()}",
                hint=f"on a machine with the compiler: mlactl warmup --profile PROFILE --arch {arch}",
            )
        for _ in range(3):
            publish.compile_and_publish(self.store, spec, arch)
            found = self.fetch(spec, arch)
            if found is not None:
                return found
            # Removed by a prune between publishing and taking the reader's lock.
        raise MissingObject(
            f"{self.describe_miss(spec, arch)}; it was compiled and removed again three times", hint="stop whatever is pruning this cache"
        )

    def describe_miss(self, spec: CompileSpec, arch: str) -> str:
        """`no object for sm_121a: …` with the key, what is wrong with it, and what there is for other arches or from other inputs."""
        found = self.store.lookup(spec, arch)
        if not isinstance(found, Miss):
            return f"no object for {arch} a moment ago, there is one now: {found.entry.key}"
        key = f"key {found.key}" if found.key else "its key cannot be known without the compiler that warmed the cache"
        parts = [f"no object for {arch}: {spec.label()}, {key}, {found.reason}"]
        relatives = [entry for entry in self.store.entries() if entry.manifest is not None and entry.manifest.spec == spec and not entry.residue]
        others = sorted({entry.manifest.arch for entry in relatives if entry.manifest is not None} - {arch})
        if others:
            parts.append(f"there is one for {', '.join(others)}, which is never used instead")
        for entry in relatives:
            if entry.manifest is not None and entry.manifest.arch == arch and entry.key != found.key and found.inputs is not None:
                fields = ", ".join(name for name, _, _ in differences(found.inputs, entry.manifest.key_inputs()))
                parts.append(f"{entry.key[:12]} differs in {fields}")
        return "; ".join(parts)
