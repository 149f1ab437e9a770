"""From entry to bytes that may be loaded: trusted files, one descriptor, checked digest, machine code that is what the manifest says."""

from __future__ import annotations

from mlactl.cache.manifest import Manifest
from mlactl.cache.store import Entry, Status, Store
from mlactl.kernels.errors import BadObject
from mlactl.kernels.runtime import VerifiedObject
from mlactl.kernels.spec import CompileSpec


class RejectedObject(BadObject):
    """An entry that was not loaded; `status` is what is wrong with it."""

    def __init__(self, status: Status, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status


def check_object(manifest: Manifest, data: bytes, *, digests_only: bool = False) -> tuple[Status, str]:
    """Status of an object's bytes against its manifest, and what was found and expected when it is not ok.

    Size and SHA-256, then (unless `digests_only`) what the ELF says: embedded arch, exported symbol, signature.
    """
    raise NotImplementedError


def examine(entry: Entry, *, digests_only: bool = False) -> Entry:
    """The entry with the status of a full check (`check_object`); an entry that is not ok already comes back as it is."""
    raise NotImplementedError


def read_verified(entry: Entry) -> VerifiedObject:
    """The checked bytes of an entry, marked as in use for as long as the result is referenced.

    Raises RejectedObject for an entry that is not ok and Untrusted (a CannotRun) for files that others may write.
    """
    raise NotImplementedError


class StoreSource:
    """`kernels.runtime.ObjectSource` over a store."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def fetch(self, spec: CompileSpec, arch: str) -> VerifiedObject | None:
        """The first usable object of (spec, arch); None when every candidate is absent or bad."""
        raise NotImplementedError

    def compile(self, spec: CompileSpec, arch: str) -> VerifiedObject:
        """Compiles, publishes and reads back one object."""
        raise NotImplementedError

    def describe_miss(self, spec: CompileSpec, arch: str) -> str:
        """`no object for sm_121a of …`, with the key and what there is instead."""
        raise NotImplementedError
