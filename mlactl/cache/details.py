"""One entry of our own store in full: its manifest beside what its object says of itself."""

from __future__ import annotations

from mlactl.cache.adapter import Description, KernelRow
from mlactl.cache.elf import BadElf, ObjectFacts, inspect
from mlactl.cache.entry import Entry, examine, read_object


def details(entry: Entry) -> Description:
    """Reads an entry's object, trusting nothing in it; damage ends up in `problem` and the status, never in an exception."""
    checked = examine(entry)
    facts, problem = None, ""
    try:
        facts = inspect(read_object(entry))
    except BadElf as error:
        problem = error.reason
    except OSError as error:
        problem = f"{entry.object_path}: {error.strerror}"
    manifest = entry.manifest
    return Description(
        entry=checked,
        manifest_path=entry.manifest_path,
        manifest=manifest.as_json() if manifest is not None else None,
        lines=_lines(entry),
        kernels=_kernels(entry, facts),
        symbols=facts.symbols if facts is not None else None,
        signature=facts.signature if facts is not None else None,
        object_arch=facts.arch if facts is not None else None,
        problem=problem,
    )


def _kernels(entry: Entry, facts: ObjectFacts | None) -> tuple[KernelRow, ...]:
    dynamic = {kernel.name: kernel.dynamic_smem_bytes for kernel in entry.manifest.resources} if entry.manifest is not None else {}
    return tuple(
        KernelRow(kernel.name, kernel.registers, kernel.frame_bytes, kernel.local_bytes, kernel.static_smem_bytes, dynamic.get(kernel.name))
        for kernel in (facts.kernels if facts is not None else ())
    )


def _lines(entry: Entry) -> tuple[tuple[str, str], ...]:
    manifest = entry.manifest
    if manifest is None:
        return ()
    return (
        ("host", manifest.host_arch),
        ("toolchain", f"{manifest.toolchain.label()}, python {manifest.python}, {manifest.linker}"),
        ("options", " ".join(manifest.options)),
        ("sources", manifest.sources_digest),
        ("object", f"sha256 {manifest.object_sha256}"),
        ("code", f"sha256 {manifest.code_sha256}, compiled in {manifest.compile_s:.1f} s"),
        ("created", manifest.created),
    )
