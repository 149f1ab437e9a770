"""Putting an object into the store, so that every crash leaves a valid cache, and taking one out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlactl.cache.key import KeyInputs
from mlactl.cache.roots import Layer
from mlactl.cache.store import Entry, Store
from mlactl.kernels.compiler import compile_object
from mlactl.kernels.spec import CompileSpec

Compiler = Callable[[CompileSpec, str, str, str, Path], None]
LOCK_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class PublishResult:
    """`compiled` is False when somebody else had published the key first; `seconds` is what compiling and linking took."""

    entry: Entry
    compiled: bool
    seconds: float


def find_linker() -> tuple[str, str]:
    """Path of `ld` and its name with version; raises EnvironmentUnfit when there is none."""
    raise NotImplementedError


def compile_and_publish(
    store: Store, spec: CompileSpec, arch: str, *, shared: bool = False, lock_timeout_s: float = LOCK_TIMEOUT_S, compiler: Compiler = compile_object
) -> PublishResult:
    """Makes sure the store holds a good object of (spec, arch), compiling it unless another process did meanwhile.

    Raises CompileFailed, NotBuiltYet, EnvironmentUnfit (no compiler, no linker, wrong flavour), LockBusy, Untrusted, or
    CannotRun naming path, owner and mode when the root cannot be written; nothing is published then.
    """
    raise NotImplementedError


def publish_object(
    layer: Layer,
    inputs: KeyInputs,
    object_path: Path,
    *,
    code_sha256: str,
    linker: str,
    compile_s: float,
    python: str | None = None,
    created: str | None = None,
    shared: bool = False,
) -> Entry:
    """Publishes a linked object under the key of `inputs`; the caller holds the entry's exclusive lock.

    `object_path` is a private file on the layer's filesystem and is consumed. Raises RejectedObject when the object is
    not one of that key and arch, CannotRun when it cannot be written.
    """
    raise NotImplementedError


def remove_entry(entry: Entry) -> int:
    """Removes an entry (manifest first, then object) or a temporary, under its exclusive lock; returns the bytes freed.

    Raises LockBusy when it is in use or being written, CannotRun when it cannot be removed.
    """
    raise NotImplementedError
