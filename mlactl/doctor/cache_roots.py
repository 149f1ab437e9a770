"""The roots of our own cache: may they be read, written and trusted, is there room, and what lies in them."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlactl.cache import locks, roots, trust
from mlactl.cache.bundle.merge import SPOOL
from mlactl.cache.foreign.b12x import roots as b12x
from mlactl.cache.reading import lock_holder
from mlactl.cache.roots import Layer
from mlactl.cache.store import Entry, Status
from mlactl.doctor.findings import Finding, Severity
from mlactl.doctor.situation import LayerEntries, Situation, as_owner
from mlactl.printable import counted, shell_word

LOW_BYTES, FULL_BYTES = 256 << 20, 16 << 20
"""Free space below which a root is warned of (a few hundred profiles' worth) and below which a warmup may not finish."""

LOW_INODES, FULL_INODES = 10_000, 100
"""The same in files: an entry is three of them."""

_ANOTHER_ROOT = "name another root: --cache-dir DIR or MLACTL_CACHE_DIR"

_DAMAGED = (Status.NO_OBJECT, Status.BAD_MANIFEST, Status.SIZE, Status.NO_MANIFEST)


@dataclass(frozen=True, slots=True)
class Space:
    """What is left for this user on a filesystem; `inodes` is None where it has no fixed number of them."""

    free_bytes: int
    inodes: int | None


def check(situation: Situation) -> Iterator[Finding]:
    """Every layer of this environment, then the roots of other tools that this one can prune."""
    if situation.no_store is not None:
        error = situation.no_store
        fix = error.hint or "name a root: --cache-dir DIR, or MLACTL_CACHE_DIR=DIR"
        yield Finding("cache", Severity.FATAL, "no-root", error.message, "a folder to keep the cache in", fix)
        return
    for held in situation.layers:
        found = list(_layer(situation, held))
        yield from found
        if not any(finding.counts for finding in found) and os.path.isdir(held.layer.path):  # noqa: PTH112
            yield Finding("cache", Severity.OK, "root", _described(held))
    yield from _foreign(situation)


def _described(held: LayerEntries) -> str:
    path = held.layer.path
    kind = "" if held.layer.writable else "read-only layer, "
    size = sum(entry.object_bytes or 0 for entry in held.entries)
    holds = f"{counted(len(held.entries), 'entry', 'entries')}, {size / (1 << 20):.1f} MiB"
    return f"{trust.describe(path)}: {kind}{holds}, on {roots.filesystem(path) or 'an unknown filesystem'}"


def _layer(situation: Situation, held: LayerEntries) -> Iterator[Finding]:
    layer = held.layer
    if held.foreign is not None:
        # Nothing else of it is ours to judge: what counts is that it is not used.
        severity = _blocked(situation, held) if layer.writable else Severity.ERROR
        fix = "MLACTL_CACHE_DIR=DIR, or --cache-dir DIR, a root of mlactl's own; of this one: mlactl cache ls --root-kind b12x" + _named(layer)
        yield Finding("cache", severity, "foreign-root", held.foreign.message, "a root of mlactl's own", fix)
        return
    yield from _filesystem(layer)
    if not os.path.isdir(layer.path):  # noqa: PTH112  Path.is_dir raises below a folder that may not be entered
        yield from _absent(situation, held)
        return
    yield from _readable(held)
    yield from _trusted(situation, held)
    if layer.writable:
        yield from _writable(situation, layer)
        yield from _room(layer.path)
    yield from _states(situation, held)


def _filesystem(layer: Layer) -> Iterator[Finding]:
    kind = roots.filesystem(layer.path)
    if roots.is_network(kind):
        what = f"{layer.path} is on a network filesystem ({kind}): locks and renames may not hold between machines"
        yield Finding(
            "cache", Severity.WARNING, "network", what, "a local folder", "MLACTL_CACHE_DIR=/local/cache:SHARED reads the shared one as a layer"
        )
    closed = roots.closed_above(layer.path)
    if closed is not None:
        what = f"{layer.path} is shared, but {closed} above it lets no other user through"
        yield Finding(
            "cache",
            Severity.WARNING,
            "closed-above",
            what,
            "folders that others may enter",
            f"chmod o+x {shell_word(closed)}, or share a root elsewhere",
        )


def _absent(situation: Situation, held: LayerEntries) -> Iterator[Finding]:
    layer = held.layer
    if not gone(layer.path):
        what = f"{trust.describe(layer.path)} is no folder that can be entered"
        fix = f"name a folder instead: MLACTL_CACHE_DIR=DIR, or --cache-dir DIR; ls -ld {shell_word(layer.path)} shows what is there"
        yield Finding("cache", _blocked(situation, held), "root-unreadable", what, "a folder", fix)
    elif layer.writable:
        fault = situation.unwritable
        if fault is None:
            fix = f"{situation.warmup('--profile NAME')} makes it"
            yield Finding("cache", Severity.NOTICE, "root-absent", f"{layer.path} does not exist yet", "", fix)
        else:
            what = f"{layer.path} does not exist, and {fault.message}"
            yield Finding("cache", _blocked(situation, held), "root-unwritable", what, "a root", fault.hint or _ANOTHER_ROOT)
    else:
        what = f"the read-only layer {layer.path} does not exist"
        yield Finding("cache", Severity.WARNING, "layer-absent", what, "a cache", "mount it, or take it out of MLACTL_CACHE_DIR")


def gone(path: Path) -> bool:
    """Whether nothing is there, as against something that this user may not look at."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass
    return False


def _readable(held: LayerEntries) -> Iterator[Finding]:
    if held.problem is not None:
        what = f"{held.problem.message}: every lookup passes it over"
        fix = f"chmod -R a+rX {shell_word(held.layer.path)}, or {held.problem.hint or _ANOTHER_ROOT}"
        yield Finding("cache", Severity.ERROR, "root-unreadable", what, "a root that this user may read", fix)
    for text in held.passed_over:
        fix = f"ls -l {shell_word(held.layer.folder())}; move a link away, and let this user read: chmod -R a+rX {shell_word(held.layer.path)}"
        yield Finding("cache", Severity.ERROR, "folder-unreadable", text, "a folder of this root that this user may read", fix)
    if held.unreadable:
        number = counted(len(held.unreadable), "entry", "entries")
        what = f"{held.layer.path}: {number} could not be judged, this user may not read them: each is a miss at launch"
        fix = f"{as_owner(held.owners)}; for this user to load them: chmod -R a+rX {shell_word(held.layer.path)}"
        yield Finding("cache", Severity.ERROR, "entries-unreadable", what, "entries that this user may read", fix)


def _trusted(situation: Situation, held: LayerEntries) -> Iterator[Finding]:
    """What a load would refuse: an owner or a mode that lets others write code which this user then runs."""
    root = str(held.layer.path)
    if trust.exempt(root):
        info = held.layer.path.stat()
        yield Finding(
            "cache",
            Severity.NOTICE,
            "trust-exempt",
            f"{root} is trusted whatever its owner ({trust.user_name(info.st_uid)}), by MLACTL_TRUST_ROOT",
            "",
            "unset MLACTL_TRUST_ROOT, if that is not meant",
        )
        return
    try:
        trust.check_folders(held.layer.folder(), root)
    except trust.Untrusted as refused:
        yield Finding(
            "cache",
            _blocked(situation, held),
            "untrusted-root",
            refused.message,
            "folders that nobody else may write",
            refused.hint or f"run as a user who may enter every folder above {shell_word(root)}, or {_ANOTHER_ROOT}",
        )
        return
    buckets: dict[str, trust.Untrusted | None] = {}
    refusals = [found for entry in held.entries if (found := _refusal(entry, buckets)) is not None]
    if refusals:
        more = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
        yield Finding(
            "cache",
            Severity.ERROR,
            "untrusted-entry",
            f"{refusals[0].message}{more}",
            "entries that nobody else may write",
            refusals[0].hint or f"chmod -R go-w {shell_word(root)}",
        )


def _blocked(situation: Situation, held: LayerEntries) -> Severity:
    """A root that nothing can be loaded from, or compiled into, is as good as none, unless another layer has objects or a miss can compile."""
    if situation.build_node:
        return Severity.FATAL if held.layer.writable else Severity.ERROR
    others = {entry.layer for entry in situation.loadable} - {held.layer}
    return Severity.ERROR if any(_trusts(layer) for layer in others) else situation.missing()


def _trusts(layer: Layer) -> bool:
    try:
        trust.check_folders(layer.folder(), str(layer.path))
    except trust.Untrusted:
        return False
    return True


def _refusal(entry: Entry, buckets: dict[str, trust.Untrusted | None]) -> trust.Untrusted | None:
    """Why a load would refuse an entry's bucket or files; each bucket is looked at once."""
    bucket = entry.layer.bucket(entry.key)
    if bucket not in buckets:
        buckets[bucket] = _refused(bucket)
    files = (str(path) for path in (entry.manifest_path, entry.object_path) if path is not None)
    return buckets[bucket] or next(filter(None, map(_refused, files)), None)


def _refused(path: str) -> trust.Untrusted | None:
    try:
        trust.check(path, os.lstat(path))
    except trust.Untrusted as refused:
        return refused
    except OSError:
        pass  # gone meanwhile, or a state that is told elsewhere
    return None


def _writable(situation: Situation, layer: Layer) -> Iterator[Finding]:
    fault = situation.unwritable
    if fault is None or isinstance(fault, trust.Untrusted):
        return  # the latter is told as what it is
    if situation.environ.get("MLACTL_FROZEN") == "1" and not situation.build_node:
        what, fix = f"{fault.message}: nothing needs to, with MLACTL_FROZEN=1", "run warmups as a user who may write it"
        yield Finding("cache", Severity.NOTICE, "root-unwritable", what, "", fix)
        return
    severity = Severity.FATAL if situation.build_node else Severity.WARNING
    fix = f"{fault.hint or _ANOTHER_ROOT}; to only read it: MLACTL_CACHE_DIR={shell_word(f':{layer.path}')} MLACTL_FROZEN=1"
    yield Finding("cache", severity, "root-unwritable", fault.message, "a root that this user may write", fix)


def _room(path: Path) -> Iterator[Finding]:
    space = space_of(path)
    fix = f"mlactl cache prune --max-size 1GiB; df -h {shell_word(path)}"
    if space.free_bytes < LOW_BYTES:
        severity = Severity.ERROR if space.free_bytes < FULL_BYTES else Severity.WARNING
        what = f"{path}: {space.free_bytes >> 20} MiB are free"
        yield Finding("cache", severity, "space", what, f"at least {LOW_BYTES >> 20} MiB", fix)
    if space.inodes is not None and space.inodes < LOW_INODES:
        severity = Severity.ERROR if space.inodes < FULL_INODES else Severity.WARNING
        what = f"{path}: {space.inodes} inodes are free, an entry takes 3"
        yield Finding(
            "cache",
            severity,
            "inodes",
            what,
            f"at least {LOW_INODES}",
            f"df -i {shell_word(path)}; mlactl cache ls --all-roots counts who holds them",
        )


def space_of(path: Path) -> Space:
    """What is left on a folder's filesystem for a user who is not root."""
    state = os.statvfs(path)
    return Space(state.f_bavail * state.f_frsize, state.f_favail if state.f_files else None)


def _states(situation: Situation, held: LayerEntries) -> Iterator[Finding]:
    counts = Counter(entry.status for entry in held.entries if entry.key not in held.unreadable)
    path = held.layer.path
    damaged = [f"{counts[status]} {status}" for status in _DAMAGED if counts[status]]
    if damaged:
        words = " ".join(f"--status {status}" for status in _DAMAGED if counts[status])
        fix = f"{situation.warmup('--profile NAME')}; mlactl cache verify --repair; mlactl cache prune {words} --dry-run"
        yield Finding(
            "cache", Severity.ERROR, "damaged", f"{path}: damaged entries, each a miss at launch: {', '.join(damaged)}", "entries with status ok", fix
        )
    if counts[Status.QUARANTINED]:
        number = counted(counts[Status.QUARANTINED], "quarantined entry", "quarantined entries")
        what = f"{path}: {number}, which no launch loads; a warmup puts another object in its place, never the same one"
        fix = "mlactl cache ls --status quarantined; mlactl cache show KEY says why; mlactl cache rm KEY"
        yield Finding("cache", Severity.WARNING, "quarantined", what, "none", fix)
    if counts[Status.TEMP]:
        what = f"{path}: {counted(counts[Status.TEMP], 'temporary', 'temporaries')} of writers that did not finish"
        yield Finding("cache", Severity.NOTICE, "residue", what, "", f"mlactl cache prune{_of_layer(held.layer)} --status temp")
    yield from _spool(held.layer)


def _of_layer(layer: Layer) -> str:
    """What to add to a `mlactl cache` command so that it is about a layer that is not written otherwise."""
    return "" if layer.writable else _named(layer)


def _named(layer: Layer) -> str:
    return f" --cache-dir {shell_word(layer.path)}"


def _spool(layer: Layer) -> Iterator[Finding]:
    """What an import that was killed left: it may be as large as the bundle, and no listing counts it."""
    path = Path(layer.folder(), SPOOL)
    try:
        mode = path.lstat().st_mode
    except OSError:
        return
    if not stat.S_ISDIR(mode):
        what = f"{path} is {locks.kind_of(mode)}: no import into this root is possible"
        yield Finding("cache", Severity.WARNING, "import-spool", what, "a folder or nothing", f"ls -ld {shell_word(path)}; move it away")
    elif lock_holder(f"{layer.folder()}/{locks.IMPORT_LOCK}") is None:  # an import holds it until its spool is gone
        size, files, complete = _below(path)
        what = f"{path}: {'' if complete else 'at least '}{size / (1 << 20):.1f} MiB in {counted(files, 'file')} of an import that did not finish"
        yield Finding(
            "cache", Severity.NOTICE, "import-spool", what, "", f"mlactl cache prune{_of_layer(layer)} --status temp; the next import removes it too"
        )


def _below(folder: Path) -> tuple[int, int, bool]:
    """Bytes and files below a folder, no link followed, and whether all of it could be looked at."""
    size, files, problems = 0, 0, list[OSError]()
    for parent, _, names in os.walk(folder, onerror=problems.append):
        for name in names:
            with suppress(FileNotFoundError):
                size += Path(parent, name).lstat().st_size
                files += 1
    return size, files, not problems


def _foreign(situation: Situation) -> Iterator[Finding]:
    """b12x roots that exist: their filesystem, and whether several eras left one each."""
    present = [item for item in b12x.candidates(situation.environ) if os.path.isdir(item.path)]  # noqa: PTH112
    for item in present:
        kind = roots.filesystem(item.path)
        if roots.is_network(kind):
            what = f"the b12x cache {item.path} is on a network filesystem ({kind})"
            yield Finding(
                "cache",
                Severity.WARNING,
                "network",
                what,
                "a local folder",
                f"{item.variable}=DIR" if item.variable != "HOME" else "B12X_COMPILE_CACHE_DIR=DIR",
            )
    if len({os.path.realpath(item.path) for item in present}) > 1:
        named = ", ".join(f"{item.path} ({item.era})" for item in present)
        what = f"b12x left caches of several eras, of which a release reads one: {named}"
        yield Finding("cache", Severity.NOTICE, "several-eras", what, "", "mlactl cache ls --all-roots names the command that prunes each")
