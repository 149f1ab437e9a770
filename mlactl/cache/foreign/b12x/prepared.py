"""Which programs a root's tuning selections name: `preparation/<sha256>.json`, written by 1.5.1.

A record lists the programs that its measured configuration needs as [dialect, program key]; of the dialect `cute` that is
the key of an object here. Removing such an object costs b12x a compile at its next start, which it may not expect.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from mlactl.cache.manifest import is_sha256
from mlactl.cache.reading import read_whole, refusal

FOLDER = "preparation"
MAX_BYTES = 64 << 20


class _Record(msgspec.Struct, gc=False):
    programs: list[list[Any]] = []


class _Selections(msgspec.Struct, gc=False):
    records: dict[str, _Record]


@dataclass(frozen=True, slots=True)
class Named:
    """The keys that preparation files name, each with the first file that does; `unknown` has a line for each file or folder that
    could name any key at all, because it cannot be read."""

    by: dict[str, str]
    unknown: tuple[str, ...]


def named(root: Path) -> Named:
    """What the preparation files of a root name."""
    found: dict[str, str] = {}
    unknown: list[str] = []
    folder = root / FOLDER
    try:
        if stat.S_ISLNK(os.lstat(folder).st_mode):
            return Named(found, (f"{folder} is a symbolic link, which is never followed: what it names is not known",))
        names = sorted(name for name in os.listdir(folder) if name.endswith(".json") and is_sha256(name.removesuffix(".json")))
    except FileNotFoundError:
        return Named(found, ())
    except OSError as error:
        return Named(found, (f"{refusal(folder, error)}, so what it names is not known",))
    for name in names:
        try:
            selections = msgspec.json.decode(read_whole(str(folder / name), MAX_BYTES)[0], type=_Selections)
        except FileNotFoundError:  # removed since the listing
            continue
        except OSError as error:
            unknown.append(f"{refusal(folder / name, error)}, so what it names is not known")
            continue
        except (msgspec.MsgspecError, ValueError, RecursionError):
            unknown.append(f"{folder / name} is no readable selection file, so what it names is not known")
            continue
        for record in selections.records.values():
            for program in record.programs:
                if len(program) == 2 and program[0] == "cute" and isinstance(program[1], str):
                    found.setdefault(program[1], f"{FOLDER}/{name[:12]}….json")
    return Named(found, tuple(unknown))


def has_selections(root: Path) -> bool:
    """Whether a root has preparation files."""
    try:
        return any(is_sha256(name.removesuffix(".json")) for name in os.listdir(root / FOLDER))
    except OSError:
        return False
