"""The store: what entries there are, and which of them answers a lookup."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from mlactl.cache import locks, trust
from mlactl.cache import toolchain as toolchains
from mlactl.cache.entry import Entry, RejectedObject, Status, linked, read_checked, read_entry, shallow
from mlactl.cache.key import KeyInputs, inputs_for
from mlactl.cache.manifest import Manifest
from mlactl.cache.prefix import entry_of
from mlactl.cache.roots import Layer, Roots, resolve
from mlactl.cache.toolchain import Toolchain
from mlactl.errors import CannotRun
from mlactl.kernels.spec import CompileSpec

__all__ = ["Entry", "Hit", "Miss", "SeveralToolchains", "Status", "Store"]

T = TypeVar("T")

TEMP_SUFFIX = ".tmp"
_FILE = re.compile(r"([0-9a-f]{64})\.(so|json|quarantined|.+\.tmp)")
_HEX = "0123456789abcdef"
_TOUCH_INTERVAL_S = 60.0


@dataclass(frozen=True, slots=True)
class Hit:
    """A lookup's answer: an entry that was checked in full."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Miss:
    """Nothing usable: the key that was looked for (None when it cannot be known here), why, and the bad entries passed over."""

    key: str | None
    reason: str
    inputs: KeyInputs | None = None
    rejected: tuple[Entry, ...] = ()


class SeveralToolchains(CannotRun):
    """Without a compiler here nothing says which of several objects is meant; names them."""


class Store:
    """Entries of the layers of `roots`; the first layer that has a usable entry answers."""

    def __init__(self, roots: Roots) -> None:
        self.roots = roots
        self._recorded: tuple[object, dict[tuple[CompileSpec, str], list[Entry]]] = (None, {})

    @classmethod
    def open(cls, cache_dir: str | None = None) -> Store:
        """The store that `cache_dir` or the environment names; makes and reads nothing yet."""
        return cls(resolve(cache_dir))

    # ---- what there is

    def entries(self, layers: Iterable[Layer] | None = None, *, on_problem: Callable[[str], None] | None = None) -> Iterator[Entry]:
        """Every entry and temporary, by layer and key; looks at names, sizes and manifests only.

        Files of other names are nobody's business here. Raises CannotRun for a root that cannot be read; a bucket that
        cannot is passed over and told to `on_problem`, and so is a link in the place of a bucket or of `v1`.
        """
        for layer in self.roots.layers if layers is None else layers:
            for name in self._buckets(layer, on_problem):
                try:
                    yield from _bucket_entries(layer, name)
                except OSError as error:
                    if on_problem is not None:
                        on_problem(f"{trust.describe(f'{layer.folder()}/{name}')} cannot be read: {error.strerror}")

    def committed(self, *, on_problem: Callable[[str], None] | None = None) -> tuple[set[str], set[str]]:
        """Keys that have a manifest in some layer, and keys set aside in some layer, by file names alone; raises what `entries` does."""
        found: dict[str, set[str]] = {"json": set(), "quarantined": set()}
        for layer in self.roots.layers:
            for bucket in self._buckets(layer, on_problem):
                try:
                    names = os.listdir(f"{layer.folder()}/{bucket}")
                except OSError as error:
                    if on_problem is not None:
                        on_problem(f"{trust.describe(f'{layer.folder()}/{bucket}')} cannot be read: {error.strerror}")
                    continue
                for name in names:
                    match = _FILE.fullmatch(name) if name.startswith(bucket) else None
                    if match is not None and match[2] in found:
                        found[match[2]].add(match[1])
        return found["json"], found["quarantined"]

    def entry(self, key: str, layers: Iterable[Layer] | None = None) -> Entry:
        """The entry of a key or unique prefix, from the first layer that has it; raises what `prefix.entry_of` does."""
        chosen = self.roots.layers if layers is None else tuple(layers)

        def matching(start: str) -> Iterator[Entry]:
            for layer in chosen:
                for name in self._buckets(layer):
                    if name.startswith(start[:2]):
                        yield from _matching(layer, name, start)

        return entry_of(key, ", ".join(str(layer.path) for layer in chosen), matching)

    def entry_in(self, layer: Layer, key: str) -> Entry | None:
        """The entry of a full key in one layer; None when the layer has no file of it."""
        return read_entry(layer, key)

    def _buckets(self, layer: Layer, on_problem: Callable[[str], None] | None = None) -> list[str]:
        """Names of the bucket folders of a layer; a link in the place of one, or of `v1`, is not followed but told to `on_problem`."""
        tell = on_problem or (lambda _: None)
        if os.path.islink(layer.folder()):  # noqa: PTH114
            tell(_not_followed(layer.folder()))
            return []
        names = []
        try:
            with os.scandir(layer.folder()) as found:
                for item in found:
                    if len(item.name) != 2 or item.name.strip(_HEX):
                        continue
                    if item.is_dir(follow_symlinks=False):
                        names.append(item.name)
                    elif item.is_symlink():
                        tell(_not_followed(item.path))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CannotRun(
                f"{trust.describe(layer.folder())} cannot be read: {error.strerror}", hint="name another root: --cache-dir DIR or MLACTL_CACHE_DIR"
            ) from None
        return sorted(names)

    # ---- which one is meant

    def lookup(self, spec: CompileSpec, arch: str) -> Hit | Miss:
        """The entry that a launch of (spec, arch) would load here, its object checked in full, or why there is none.

        Without a compiler the toolchain is the one the root was warmed with; raises SeveralToolchains when objects of
        several fit, and Untrusted when the only object there is cannot be trusted.
        """
        answer = self.search(spec, arch, read_checked)
        return answer if isinstance(answer, Miss) else Hit(answer[0])

    def search(self, spec: CompileSpec, arch: str, attempt: Callable[[Entry], T]) -> tuple[Entry, T] | Miss:
        """The first candidate, in the order of the layers, that `attempt` accepts, with what it returned.

        `attempt` refuses by raising RejectedObject or Untrusted; the latter is raised again when nothing else is there.
        """
        inputs, candidates = self._candidates(spec, arch)
        accepted: list[tuple[Entry, T]] = []
        rejected: list[Entry] = []
        untrusted: trust.Untrusted | None = None
        for same_key in candidates:
            for entry in same_key:
                try:
                    if entry.status is not Status.OK:
                        raise RejectedObject(entry)
                    accepted.append((entry, attempt(entry)))
                    break
                except RejectedObject as refused:
                    rejected.append(refused.entry)
                except trust.Untrusted as refused:
                    untrusted = untrusted or refused
        if len(accepted) > 1:
            raise _several(spec, arch, [entry for entry, _ in accepted])
        if accepted:
            return accepted[0]
        if untrusted is not None:
            raise untrusted
        key = inputs.key() if inputs else None
        return Miss(key, self._reason(rejected, key), inputs, tuple(rejected))

    def _candidates(self, spec: CompileSpec, arch: str) -> tuple[KeyInputs | None, list[list[Entry]]]:
        """What is looked for, and the entries that could answer: for each key its entries in the order of the layers."""
        if toolchains.current() is not None:
            inputs = inputs_for(spec, arch)
            return inputs, [self.everywhere(inputs.key())]
        return self._recorded_candidates(spec, arch)

    def everywhere(self, key: str) -> list[Entry]:
        """The entries of a full key in the order of the layers. An object that is set aside in one layer is so in all of them.

        A quarantine whose manifest cannot be read does not say which object it is about, and then it is about every one.
        """
        found = [entry for layer in self.roots.layers if (entry := read_entry(layer, key)) is not None]
        aside = [entry for entry in found if entry.status is Status.QUARANTINED]
        return [_masked(entry, aside) for entry in found] if aside and len(found) > len(aside) else found

    def _recorded_candidates(self, spec: CompileSpec, arch: str) -> tuple[KeyInputs | None, list[list[Entry]]]:
        """Candidates by everything in the key but the toolchain, which is taken from the manifests: they record what warmed the root."""
        index = self._index()
        recorded: list[Toolchain] = list(dict.fromkeys(entry.manifest.toolchain for found in index.values() for entry in found if entry.manifest))
        keys = []
        for entry in index.get((spec, arch), ()):
            assert entry.manifest is not None
            if inputs_for(spec, arch, entry.manifest.toolchain).key() == entry.key:
                keys.append(entry.key)
        inputs = inputs_for(spec, arch, recorded[0]) if len(recorded) == 1 else None
        return inputs, [self.everywhere(key) for key in dict.fromkeys(keys)]

    def _index(self) -> dict[tuple[CompileSpec, str], list[Entry]]:
        """Entries with a readable manifest by (spec, arch); read again when any bucket has changed since."""
        seen = tuple((layer.path, name, _modified(f"{layer.folder()}/{name}")) for layer in self.roots.layers for name in self._buckets(layer))
        if self._recorded[0] != seen:
            index: dict[tuple[CompileSpec, str], list[Entry]] = {}
            for entry in self.entries():
                if entry.manifest is not None and not entry.residue:
                    index.setdefault((entry.manifest.spec, entry.manifest.arch), []).append(entry)
            self._recorded = (seen, index)
        return self._recorded[1]

    def _reason(self, rejected: list[Entry], key: str | None) -> str:
        links = [link for layer in self.roots.layers if (link := linked(layer, key or "")) is not None]
        if links or rejected:
            bad = [f"{entry.object_path}: {entry.status}: {entry.detail}" for entry in rejected]
            return "; ".join([*map(_not_followed, links), *bad])
        return f"not in {', '.join(_searched(layer) for layer in self.roots.layers)}"

    # ---- last use

    def touch(self, entry: Entry) -> None:
        """Sets an entry's last use to now unless that was within the last minute; on a read-only layer it does nothing."""
        touch(entry)


def _masked(entry: Entry, aside: list[Entry]) -> Entry:
    """An entry as quarantined when its very object is among those that other layers have set aside."""
    if entry.status is Status.QUARANTINED:
        return entry
    other = convicting(aside, entry.manifest)
    if other is None:
        return entry
    detail = f"this very object is set aside in {other.root}: mlactl cache show {entry.key} says what speaks against it"
    if other.manifest is None:
        detail = f"this key is set aside in {other.root} with a manifest that cannot be read, so nothing says which object was convicted"
    return msgspec.structs.replace(entry, status=Status.QUARANTINED, detail=detail)


def convicting(aside: Iterable[Entry], manifest: Manifest | None) -> Entry | None:
    """The quarantined entry by which the object of this manifest is convicted too: of the same object, or of one that nobody can tell."""
    for other in aside:
        if other.manifest is None or manifest is None or other.manifest.object_sha256 == manifest.object_sha256:
            return other
    return None


def _not_followed(link: str) -> str:
    return f"{link} is a symbolic link, which is never followed below the root; move what it points at here, or make the root the link"


def _searched(layer: Layer) -> str:
    try:
        os.scandir(layer.folder()).close()
    except PermissionError:
        return f"{trust.describe(layer.path)}, which cannot be read"
    except OSError:
        pass
    return str(layer.path)


def touch(entry: Entry) -> None:
    """`Store.touch`; by descriptor, so that a manifest that was replaced meanwhile keeps its own time. Never an error."""
    if not entry.layer.writable or entry.manifest_path is None:
        return
    try:
        fd = os.open(entry.manifest_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if abs(time.time() - os.fstat(fd).st_mtime) >= _TOUCH_INTERVAL_S:
            os.utime(fd)
    except OSError:
        pass  # a read-only mount, or another owner's entry
    finally:
        os.close(fd)


def _modified(folder: str) -> int:
    try:
        return Path(folder).stat().st_mtime_ns
    except OSError:
        return 0


def _bucket_entries(layer: Layer, bucket_name: str) -> Iterator[Entry]:
    bucket = f"{layer.folder()}/{bucket_name}"
    keys: set[str] = set()
    manifests: set[str] = set()
    quarantined: set[str] = set()
    temporaries: list[str] = []
    for name in os.listdir(bucket):
        match = _FILE.fullmatch(name)
        if match is None or not name.startswith(bucket_name):
            continue
        key, suffix = match.groups()
        if suffix == "json":
            manifests.add(key)
        elif suffix == "quarantined":
            quarantined.add(key)
        elif suffix != "so":
            temporaries.append(name)
            continue
        keys.add(key)
    for key in sorted(keys):
        entry = shallow(layer, bucket, key, manifest=key in manifests, quarantined=key in quarantined)
        if entry is not None:
            yield _being_written(entry) if entry.status is Status.NO_MANIFEST else entry
    for name in sorted(temporaries):
        yield _temporary(layer, bucket, name)


def _matching(layer: Layer, bucket_name: str, prefix: str) -> Iterator[Entry]:
    """Entries, not temporaries, of one bucket whose key starts so; reads the manifests of those alone."""
    bucket = f"{layer.folder()}/{bucket_name}"
    try:
        names = os.listdir(bucket)
    except OSError:
        return
    there = {name for name in names if name.startswith(prefix)}
    for key in sorted({name.partition(".")[0] for name in there}):
        files = there & {f"{key}.so", f"{key}.json", f"{key}.quarantined"}
        if files and len(key) == 64 and key[:2] == bucket_name and not key.strip(_HEX):
            entry = shallow(layer, bucket, key, manifest=f"{key}.json" in files, quarantined=f"{key}.quarantined" in files)
            if entry is not None:
                yield entry


def _being_written(entry: Entry) -> Entry:
    """The same, as `locked` when a live process holds its lock."""
    holder = locks.holder_of(entry.layer, entry.key)
    if holder is None:
        return entry
    return Entry(entry.key, entry.layer, None, Status.LOCKED, f"being written by {holder.label()}", entry.object_bytes, None, entry.residue)


def _temporary(layer: Layer, bucket: str, name: str) -> Entry:
    try:
        size = os.lstat(f"{bucket}/{name}").st_size
    except OSError:
        size = None
    detail = "left by a writer that did not finish"
    return _being_written(Entry(name.partition(".")[0], layer, None, Status.TEMP, detail, size, None, name))


def _several(spec: CompileSpec, arch: str, entries: list[Entry]) -> SeveralToolchains:
    named = "; ".join(f"{entry.key[:12]} by {entry.manifest.toolchain.label()}" for entry in entries if entry.manifest)
    return SeveralToolchains(
        f"{spec.label()} for {arch}: objects of {len(entries)} toolchains fit and no compiler here says which is meant: {named}",
        hint="remove the one that is not meant: mlactl cache rm KEY",
    )
