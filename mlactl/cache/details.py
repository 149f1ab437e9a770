"""One entry in full: its manifest beside what its object says of itself."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mlactl.cache.elf import MAX_OBJECT_BYTES, BadElf, ObjectFacts, inspect
from mlactl.cache.entry import Entry, examine


@dataclass(frozen=True, slots=True)
class KernelRow:
    """Resources of one kernel: from the cubin, with the dynamic shared memory that the manifest records."""

    name: str
    registers: int
    frame_bytes: int
    local_bytes: int
    static_smem_bytes: int
    dynamic_smem_bytes: int | None


@dataclass(frozen=True, slots=True)
class Details:
    """An entry with the status of a full check; `facts` is None and `problem` says why when its object cannot be read."""

    entry: Entry
    facts: ObjectFacts | None
    problem: str
    kernels: tuple[KernelRow, ...]


def details(entry: Entry) -> Details:
    """Reads an entry's object, trusting nothing in it; damage ends up in `problem` and the status, never in an exception."""
    checked = examine(entry)
    facts, problem = None, ""
    try:
        facts = inspect(_read(entry))
    except BadElf as error:
        problem = error.reason
    except OSError as error:
        problem = f"{entry.object_path}: {error.strerror}"
    manifest = entry.manifest
    dynamic = {kernel.name: kernel.dynamic_smem_bytes for kernel in manifest.resources} if manifest is not None else {}
    rows = tuple(
        KernelRow(kernel.name, kernel.registers, kernel.frame_bytes, kernel.local_bytes, kernel.static_smem_bytes, dynamic.get(kernel.name))
        for kernel in (facts.kernels if facts is not None else ())
    )
    return Details(checked, facts, problem, rows)


def _read(entry: Entry) -> bytes:
    # Non-blocking: a named pipe put in an object's place must not hang whoever looks at it.
    fd = os.open(entry.object_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        return file.read(MAX_OBJECT_BYTES + 1)
