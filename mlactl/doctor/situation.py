"""What every check looks at, gathered once: the node, the store and its entries, the toolchain, and what a miss could do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from mlactl.cache import key as keys
from mlactl.cache import publish
from mlactl.cache import toolchain as toolchains
from mlactl.cache.key import KeyInputs
from mlactl.cache.manifest import Manifest
from mlactl.cache.roots import Layer
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
    """What one layer holds: `problem` is the error that reading it raised, `passed_over` folders that could not be looked at."""

    layer: Layer
    entries: tuple[Entry, ...]
    passed_over: tuple[str, ...] = ()
    problem: MlactlError | None = None


@dataclass(frozen=True, slots=True)
class Situation:
    """One node and one environment. `build_node` only compiles: nothing is launched there. `visible` are the GPUs that a launch sees.

    `obstacle` says why a miss could not be compiled at launch, None when it could. `no_store` is the error of an
    environment that names no root at all; `store` is None then.
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
    _here: dict[tuple[CompileSpec, str, Toolchain], KeyInputs | str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def good(self) -> tuple[Entry, ...]:
        """Entries that names, sizes and manifests have nothing against."""
        return tuple(entry for held in self.layers for entry in held.entries if entry.status is Status.OK and entry.manifest is not None)

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
    return Situation(
        environ, cache_dir, build_node, node, store, no_store, seen, layers, here, toolchains.absence(),
        _obstacle(environ, store, here), arches or (() if build_node else _targets(node, seen)) or _warmed(layers) or (DEFAULT_ARCH,),
    )  # fmt: skip


def _targets(node: Node, seen: Visible) -> tuple[str, ...]:
    """Targets of the GPUs that a launch sees; of all of them where it sees none that it could use, which is a finding."""
    return tuple(dict.fromkeys(gpu.arch for gpu in seen.gpus or () if gpu.arch is not None and gpu.usable)) or node.arches


def _read(store: Store, layer: Layer, on_entry: Callable[[], None]) -> LayerEntries:
    found: list[Entry] = []
    passed_over: list[str] = []
    try:
        for entry in store.entries([layer], on_problem=passed_over.append):
            found.append(entry)
            on_entry()
    except MlactlError as error:
        return LayerEntries(layer, tuple(found), tuple(passed_over), error)
    return LayerEntries(layer, tuple(found), tuple(passed_over))


def _warmed(layers: tuple[LayerEntries, ...]) -> tuple[str, ...]:
    """Targets that the cache has objects for: what a node without a GPU is asked about."""
    return tuple(sorted({entry.manifest.arch for held in layers for entry in held.entries if entry.manifest is not None and not entry.residue}))


def _obstacle(environ: Mapping[str, str], store: Store | None, here: Toolchain | None) -> str | None:
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
    try:
        if store is not None:
            publish.require_writable(store)
    except MlactlError as error:
        return error.message
    return None


@lru_cache(maxsize=1)
def linker() -> str | None:
    """Name and version of `ld`; None where objects cannot be linked."""
    try:
        return publish.find_linker()[1]
    except (MlactlError, OSError):
        return None
