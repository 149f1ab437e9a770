"""What every check looks at, gathered once: the node, the store and its entries, the toolchain, and what a miss could do."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from mlactl.cache import key as keys
from mlactl.cache import publish, trust
from mlactl.cache import toolchain as toolchains
from mlactl.cache.adapters import require_own
from mlactl.cache.key import KeyInputs
from mlactl.cache.manifest import Manifest
from mlactl.cache.roots import Layer, Roots
from mlactl.cache.store import Entry, Status, Store
from mlactl.cache.toolchain import Toolchain
from mlactl.doctor.findings import Severity
from mlactl.doctor.node import Node
from mlactl.doctor.visible import Visible, visible
from mlactl.errors import MlactlError
from mlactl.kernels import registry
from mlactl.kernels.compiler import CODE_VARIABLES
from mlactl.kernels.spec import CompileSpec
from mlactl.warmup.arches import DEFAULT_ARCH


@dataclass(frozen=True, slots=True)
class LayerEntries:
    """What one layer holds: `problem` is the error that reading it raised, `passed_over` folders that could not be looked at.

    `unreadable` are keys of entries with a file that this user may not read, `owners` whose files those are. `foreign` is
    the refusal of another tool's root.
    """

    layer: Layer
    entries: tuple[Entry, ...]
    passed_over: tuple[str, ...] = ()
    problem: MlactlError | None = None
    unreadable: frozenset[str] = frozenset()
    owners: tuple[str, ...] = ()
    foreign: MlactlError | None = None


@dataclass(frozen=True, slots=True)
class Situation:
    """One node and one environment. `build_node` only compiles: nothing is launched there. `visible` are the GPUs that a launch sees.

    `obstacle` says why a miss could not be compiled at launch, None when it could. `no_store` is the error of an
    environment that names no root at all; `store` is None then. `unwritable` says why nothing can be published to the root.
    """

    environ: Mapping[str, str]
    cache_dir: str | None
    build_node: bool
    node: Node
    store: Store | None
    no_store: MlactlError | None
    visible: Visible
    layers: tuple[LayerEntries, ...]
    toolchain: Toolchain | None
    absence: str
    obstacle: str | None
    arches: tuple[str, ...]
    unwritable: MlactlError | None = None
    _here: dict[tuple[CompileSpec, str, Toolchain], KeyInputs | str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def good(self) -> tuple[Entry, ...]:
        """Entries that names, sizes and manifests have nothing against, and that this user may read."""
        return tuple(
            entry
            for held in self.layers
            for entry in held.entries
            if entry.status is Status.OK and entry.manifest is not None and entry.key not in held.unreadable
        )

    @property
    def unreadable(self) -> int:
        """How many entries there are of which this user may not read a file: what they hold is not known."""
        return sum(len(held.unreadable) for held in self.layers)

    def owner_first(self) -> str:
        """What lets every entry be judged: as whom to run the doctor."""
        return as_owner(owner for held in self.layers for owner in held.owners)

    def warmup(self, options: str) -> str:
        """The warmup command that works here; where one refuses the root, a command that names another root."""
        if any(held.foreign is not None for held in self.layers):
            return f"in a root of mlactl's own: mlactl warmup --cache-dir DIR {options}"
        if self.no_store is None and self.unwritable is None:
            return f"mlactl warmup {options}"
        if self.store is None or self.store.roots.writable is None:
            return f"in a root that may be written: mlactl warmup --cache-dir DIR {options}"
        return f"mend the root first, as said under cache, or name another: mlactl warmup --cache-dir DIR {options}"

    @property
    def loadable(self) -> tuple[Entry, ...]:
        """Of those, the ones for this node's targets that a lookup here finds: what a launch can load."""
        return tuple(entry for entry in self.good if entry.manifest is not None and entry.manifest.arch in self.arches and self.findable(entry))

    def missing(self) -> Severity:
        """How bad a missing object is: fatal where a launch of it could not be helped by compiling."""
        return Severity.FATAL if self.obstacle is not None and not self.build_node else Severity.ERROR

    def findable(self, entry: Entry) -> bool:
        """Whether a lookup here computes this entry's key: same sources, options, host architecture and toolchain."""
        return entry.manifest is not None and entry.manifest.key_inputs() == self.inputs_here(entry.manifest)

    def inputs_here(self, manifest: Manifest) -> KeyInputs | str:
        """What this release would make the same object from, or why it would not; sources are read once for many entries."""
        wanted = (manifest.spec, manifest.arch, self.toolchain or manifest.toolchain)
        if wanted not in self._here:
            try:
                registry.validate(manifest.spec)
                self._here[wanted] = keys.inputs_for(*wanted)
            except MlactlError as error:
                self._here[wanted] = error.message
        return self._here[wanted]


def gather(
    environ: Mapping[str, str],
    *,
    cache_dir: str | None,
    arches: tuple[str, ...],
    build_node: bool,
    node: Node,
    on_entry: Callable[[], None] = lambda: None,
) -> Situation:
    """Reads the store and the toolchain; what goes wrong is kept for the checks to tell."""
    store: Store | None = None
    no_store: MlactlError | None = None
    try:
        store = Store.open(cache_dir)
    except MlactlError as error:
        no_store = error
    layers = tuple(_read(store, layer, on_entry) for layer in store.roots.layers) if store is not None else ()
    here = toolchains.current()
    seen = visible(environ, node)
    unwritable = _unwritable(store)
    return Situation(
        environ, cache_dir, build_node, node, store, no_store, seen, layers, here, toolchains.absence(),
        _obstacle(environ, unwritable, here), arches or (() if build_node else _targets(node, seen)) or _warmed(layers) or (DEFAULT_ARCH,),
        unwritable,
    )  # fmt: skip


def _targets(node: Node, seen: Visible) -> tuple[str, ...]:
    """Targets of the GPUs that a launch sees; of all of them where it sees none that it could use, which is a finding."""
    return tuple(dict.fromkeys(gpu.arch for gpu in seen.gpus or () if gpu.arch is not None and gpu.usable)) or node.arches


def _read(store: Store, layer: Layer, on_entry: Callable[[], None]) -> LayerEntries:
    found: list[Entry] = []
    passed_over: list[str] = []
    unreadable: set[str] = set()
    owners: dict[str, None] = {}
    problem: MlactlError | None = None
    try:
        for entry in store.entries([layer], on_problem=passed_over.append):
            found.append(entry)
            if not entry.residue and entry.status is not Status.QUARANTINED:
                shut = owners_of_closed(filter(None, (entry.manifest_path, entry.object_path)))
                if shut:
                    unreadable.add(entry.key)
                    owners |= dict.fromkeys(shut)
            on_entry()
    except MlactlError as error:
        problem = error
    return LayerEntries(layer, tuple(found), tuple(passed_over), problem, frozenset(unreadable), tuple(owners), _foreign(layer))


def owners_of_closed(paths: Iterable[Path]) -> list[str]:
    """Owners of those of some files that this user may not read."""
    found = []
    for path in paths:
        with suppress(OSError):
            info = path.lstat()
            if stat.S_ISREG(info.st_mode) and not os.access(path, os.R_OK):
                found.append(trust.user_name(info.st_uid))
    return found


def as_owner(owners: Iterable[str]) -> str:
    """As whom to run the doctor where some files are their owners' alone; a shell's variables decide which roots are found."""
    return f"run mlactl doctor in this environment as the owner, {' or '.join(dict.fromkeys(owners))}, or as root"


def _foreign(layer: Layer) -> MlactlError | None:
    """The refusal of a root that another tool wrote, in the words of a warmup."""
    try:
        require_own(Roots((layer,)))
    except MlactlError as error:
        return error
    return None


def _unwritable(store: Store | None) -> MlactlError | None:
    """Why no launch could publish to the root of this environment."""
    if store is None:
        return None
    try:
        publish.require_writable(store)
    except MlactlError as error:
        return error
    return None


def _warmed(layers: tuple[LayerEntries, ...]) -> tuple[str, ...]:
    """Targets that the cache has objects for: what a node without a GPU is asked about."""
    return tuple(sorted({entry.manifest.arch for held in layers for entry in held.entries if entry.manifest is not None and not entry.residue}))


def _obstacle(environ: Mapping[str, str], unwritable: MlactlError | None, here: Toolchain | None) -> str | None:
    """Why a launch that misses could not compile, in the order in which it would find out."""
    if environ.get("MLACTL_FROZEN") == "1":
        return "MLACTL_FROZEN=1 forbids compiling at launch"
    if here is None:
        return f"no compiler here: {toolchains.absence()}"
    refused = next((name for name in CODE_VARIABLES if environ.get(name)), None)
    if refused is not None:
        return f"{refused} is set, with which nothing is compiled"
    if linker() is None:
        return "no linker here to compile with"
    return None if unwritable is None else unwritable.message


@lru_cache(maxsize=1)
def linker() -> str | None:
    """Name and version of `ld`; None where objects cannot be linked."""
    try:
        return publish.find_linker()[1]
    except (MlactlError, OSError):
        return None
