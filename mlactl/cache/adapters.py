"""Opens a cache root, whichever tool wrote it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from mlactl.cache import roots
from mlactl.cache.adapter import CacheAdapter, RootKind
from mlactl.cache.foreign.b12x.roots import candidates
from mlactl.errors import UsageError

AUTO = "auto"
KINDS = (RootKind.MLACTL.value, RootKind.B12X.value, AUTO)
"""Values of `--root-kind`."""


def open_cache(cache_dir: str | None, kind: str = AUTO) -> CacheAdapter:
    """The cache that `cache_dir` or the environment names, of the given kind or the kind that its contents show.

    `b12x` without `cache_dir` takes the root that b12x's own variables lead to: of several eras' that exist the newest, the
    others are in `remarks`. Raises UsageError for an unknown kind, a b12x root within a list, and a folder that is of both
    kinds or of none; CannotRun when no home folder says where a root is.
    """
    if kind not in KINDS:
        raise UsageError(f"--root-kind {kind!r} is not one of {', '.join(KINDS)}", hint="--root-kind auto looks at what is in the root")
    if kind == RootKind.B12X and cache_dir is None:
        return _b12x_of(os.environ)
    layers = roots.resolve(cache_dir).layers
    if kind == AUTO:
        found = [detect(layer.path) for layer in layers]
        kind = RootKind.B12X if RootKind.B12X in found else RootKind.MLACTL
    if kind == RootKind.B12X:
        if len(layers) > 1:
            named = ", ".join(str(layer.path) for layer in layers)
            raise UsageError(
                f"a b12x cache is one folder, found a list of {len(layers)}: {named}",
                hint=f"one at a time: --root-kind b12x --cache-dir {shlex.quote(str(layers[0].path))}",
            )
        from mlactl.cache.foreign.b12x.adapter import B12xCache

        return B12xCache(layers[0].path)
    from mlactl.cache.own import OwnCache
    from mlactl.cache.store import Store

    return OwnCache(Store(roots.Roots(layers)))


def _b12x_of(environ: Mapping[str, str]) -> CacheAdapter:
    from mlactl.cache.foreign.b12x.adapter import B12xCache

    known = candidates(environ)
    if not known:
        raise UsageError("nothing says where b12x keeps its cache: no variable of its own and no home folder", hint="name it: --cache-dir DIR")
    there = [candidate for candidate in known if candidate.path.is_dir()]
    chosen, *others = there or known
    if not there:
        looked = ", ".join(f"{candidate.path} ({candidate.variable})" for candidate in known)
        return B12xCache(chosen.path, (f"no b12x cache here yet, looked for {looked}",))
    remarks = [f"{chosen.path} is looked at ({chosen.era}, by {chosen.variable})"] if others else []
    for other in others:
        remarks.append(f"{other.path} is there too ({other.era}, by {other.variable}): --cache-dir {shlex.quote(str(other.path))} looks at it")
    return B12xCache(chosen.path, tuple(remarks))


_OF_NOBODY = {"lost+found"}
"""What a fresh filesystem has in it."""


def detect(path: Path, environ: Mapping[str, str] = os.environ) -> RootKind:
    """Whose root a folder is, by what is in it: `v1` is ours, `<two hex digits>/<64 hex digits>.{o,json,lock}` is b12x's.

    An empty or absent folder is ours unless b12x itself would use it. Raises UsageError for a folder with both, or with
    other things only: then it is most likely not the folder that was meant.
    """
    try:
        names = sorted(os.listdir(path))
    except FileNotFoundError:
        names = []
    except OSError:
        return RootKind.MLACTL  # whoever reads it next says what is wrong with it
    ours, theirs = roots.LAYOUT in names, _has_b12x_files(path, names)
    quoted = shlex.quote(str(path))
    if ours and theirs:
        raise UsageError(
            f"{path} holds both an mlactl cache ({roots.LAYOUT}/) and a b12x cache",
            hint=f"say which: --root-kind mlactl or --root-kind b12x, with --cache-dir {quoted}",
        )
    if ours or theirs:
        return RootKind.MLACTL if ours else RootKind.B12X
    left = [name for name in names if not name.startswith(".") and name not in _OF_NOBODY]
    if left:
        shown = ", ".join(left[:3]) + (", …" if len(left) > 3 else "")
        raise UsageError(
            f"{path} is no compile cache: found {shown}, expected {roots.LAYOUT}/ (mlactl) or <two hex digits>/<key>.o (b12x)",
            hint="name another root: --cache-dir DIR; --root-kind mlactl or --root-kind b12x takes this one as it is",
        )
    return RootKind.B12X if path in {candidate.path for candidate in candidates(environ)} else RootKind.MLACTL


def _has_b12x_files(path: Path, names: list[str]) -> bool:
    from mlactl.cache.foreign.b12x import entry, prepared

    if prepared.FOLDER in names and prepared.has_selections(path):
        return True
    for name in names:
        if entry.is_bucket(name) and not (path / name).is_symlink():
            try:
                if any(entry.recognised(name, file) for file in os.listdir(path / name)):
                    return True
            except OSError:
                continue
    return False


def require_own(layers: roots.Roots) -> None:
    """Refuses to treat another tool's root as ours: publishing there would make it a cache of both kinds. Raises UsageError."""
    for layer in layers.layers:
        try:
            names = sorted(os.listdir(layer.path))
        except OSError:
            continue  # whoever reads or writes it next says what is wrong with it
        if roots.LAYOUT not in names and _has_b12x_files(layer.path, names):
            raise UsageError(
                f"{layer.path} is a b12x cache, expected one of mlactl's own",
                hint="name another root: --cache-dir DIR or MLACTL_CACHE_DIR; mlactl cache ls --all-roots shows what is on this node",
            )
