"""Every compile cache of this environment, whichever tool's: size, entries, inodes, owner, filesystem, and whether mlactl prunes it.

Looks at names and file states only; no file is opened, no link followed, nothing of the tools is run.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mlactl.cache import roots, trust
from mlactl.cache.tools import Place, Rule, places

MAX_INODES = 5_000_000
"""A walk stops there and says so: counting a home folder that somebody named as a cache must end."""

MAX_PROBLEMS = 5
"""Folders that could not be read, named of each root; more are counted only."""

PROGRESS_STEP = 1_000


@dataclass(frozen=True, slots=True)
class Surveyed:
    """One root as it is. `entries` are counted by the tool's own layout, in `noun`; None of the numbers where it does not exist.

    `object_bytes` is the sum of file sizes, hard links once; `inodes` counts files, folders and links, the root included.
    `shared_with` names tools that use the same folder, `inside` the one whose root it lies in (and is counted in again).
    `complete` is False when something could not be read or the walk was cut short; `problems` says what.
    """

    place: Place
    exists: bool
    owner: str | None = None
    uid: int | None = None
    mode: int | None = None
    filesystem: str = ""
    network: bool = False
    entries: int | None = None
    file_bytes: int | None = None
    inodes: int | None = None
    shared_with: tuple[str, ...] = ()
    inside: str | None = None
    complete: bool = True
    problems: tuple[str, ...] = ()

    def as_json(self) -> dict[str, object]:
        """The row of `cache ls --all-roots --json`."""
        return {
            "tool": self.place.tool,
            "path": str(self.place.path),
            "source": self.place.source,
            "remark": self.place.remark or None,
            "exists": self.exists,
            "entries": self.entries,
            "counted": self.place.noun,
            "bytes": self.file_bytes,
            "inodes": self.inodes,
            "owner": self.owner,
            "uid": self.uid,
            "mode": None if self.mode is None else f"{self.mode:04o}",
            "filesystem": self.filesystem or None,
            "network": self.network,
            "prunable": self.place.prune is not None,
            "shared_with": list(self.shared_with),
            "inside": self.inside,
            "complete": self.complete,
            "problems": list(self.problems),
        }


@dataclass(slots=True)
class _Count:
    """What a walk has seen so far."""

    rule: Rule
    names: set[str] = field(default_factory=set)
    file_bytes: int = 0
    inodes: int = 1
    unreadable: int = 0
    problems: list[str] = field(default_factory=list)
    linked: set[tuple[int, int]] = field(default_factory=set)

    def problem(self, text: str) -> None:
        self.unreadable += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(text)


def survey(
    environ: Mapping[str, str] = os.environ,
    cache_dir: str | None = None,
    *,
    on_root: Callable[[Place], None] = lambda _: None,
    on_inodes: Callable[[int], None] = lambda _: None,
    max_inodes: int = MAX_INODES,
) -> tuple[Surveyed, ...]:
    """Looks at every root that `tools.places` finds, in its order; absent ones come back with `exists` False.

    `on_root` is told which root is next and `on_inodes` how many files and folders were counted since the last call.
    """
    found = []
    for place in places(environ, cache_dir):
        on_root(place)
        found.append(_look(place, on_inodes, max_inodes))
    return _related(found)


def _look(place: Place, on_inodes: Callable[[int], None], max_inodes: int) -> Surveyed:
    try:
        # The root itself may be a link: whoever set the variable chose it.
        info = place.path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return Surveyed(place, False)
    except OSError as error:
        return Surveyed(place, True, complete=False, problems=(f"{trust.describe(place.path)} cannot be looked at: {_why(error)}",))
    kind = roots.filesystem(place.path)
    seen = Surveyed(place, True, trust.user_name(info.st_uid), info.st_uid, stat.S_IMODE(info.st_mode), kind, roots.is_network(kind))
    if not stat.S_ISDIR(info.st_mode):
        return replace(seen, complete=False, problems=(f"{place.path} is not a folder",))
    count = _walk(place, info.st_dev, on_inodes, max_inodes)
    more = count.unreadable - len(count.problems)
    problems = (*count.problems, f"and {more} more") if more else tuple(count.problems)
    return replace(seen, entries=len(count.names), file_bytes=count.file_bytes, inodes=count.inodes, complete=not count.problems, problems=problems)


def _walk(place: Place, device: int, on_inodes: Callable[[int], None], max_inodes: int) -> _Count:
    """Counts everything below a root, one folder at a time; a folder of another filesystem is told and not entered."""
    count = _Count(place.rule)
    folders: list[tuple[str, tuple[str, ...]]] = [(str(place.path), ())]
    told = 0
    while folders and count.inodes < max_inodes:
        folder, parts = folders.pop()
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if parts else 0))
        except FileNotFoundError:
            continue  # removed meanwhile
        except OSError as error:
            count.problem(f"{trust.describe(folder)} cannot be read: {_why(error)}")
            continue
        try:
            if os.fstat(fd).st_dev != device:
                count.problem(f"{folder} is another filesystem, which was not entered")
                continue
            with os.scandir(fd) as items:
                for item in items:
                    _count_item(count, item, parts, folders, folder)
                    if count.inodes - told >= PROGRESS_STEP:
                        on_inodes(count.inodes - told)
                        told = count.inodes
                    if count.inodes >= max_inodes:
                        break
        except OSError as error:
            count.problem(f"{trust.describe(folder)} cannot be read: {_why(error)}")
        finally:
            os.close(fd)
    if count.inodes >= max_inodes:
        count.problem(f"counting stopped at {max_inodes} files and folders: is {place.path} a cache?")
    on_inodes(count.inodes - told)
    return count


def _count_item(count: _Count, item: os.DirEntry[str], parts: tuple[str, ...], folders: list[tuple[str, tuple[str, ...]]], folder: str) -> None:
    count.inodes += 1
    if item.is_dir(follow_symlinks=False):
        folders.append((f"{folder}/{item.name}", (*parts, item.name)))
    else:
        _count_file(count, item, parts)


def _count_file(count: _Count, item: os.DirEntry[str], parts: tuple[str, ...]) -> None:
    try:
        info = item.stat(follow_symlinks=False)
    except FileNotFoundError:
        count.inodes -= 1  # removed meanwhile
        return
    if not stat.S_ISREG(info.st_mode):
        return
    name = count.rule((*parts, item.name))
    if name is not None:
        count.names.add(name)
    if info.st_nlink > 1:
        if (info.st_dev, info.st_ino) in count.linked:
            count.inodes -= 1
            return
        count.linked.add((info.st_dev, info.st_ino))
    count.file_bytes += info.st_size


def _related(found: Sequence[Surveyed]) -> tuple[Surveyed, ...]:
    """The same, with what shares a folder or lies inside another root; the nearest such root is named."""
    real = [os.path.realpath(one.place.path) for one in found]
    related = []
    for number, one in enumerate(found):
        others = [(other.place.tool, path) for index, (other, path) in enumerate(zip(found, real, strict=True)) if index != number and other.exists]
        same = tuple(dict.fromkeys(tool for tool, path in others if path == real[number] and tool != one.place.tool))
        above = [(path, tool) for tool, path in others if real[number].startswith(path.rstrip("/") + "/")]
        related.append(replace(one, shared_with=same, inside=max(above, key=lambda pair: len(pair[0]))[1] if above else None) if one.exists else one)
    return tuple(related)


def _why(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
