"""Counts and sizes of the cache by layer, kernel, arch and status, for people and for a metrics collector."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mlactl.cache.store import Entry, Status, Store


@dataclass(frozen=True, slots=True)
class Group:
    """Entries of one layer that share kernel, version, arch and status; the first three are None where no manifest tells."""

    kernel_id: str | None
    version: int | None
    arch: str | None
    status: Status
    entries: int
    object_bytes: int


@dataclass(frozen=True, slots=True)
class LayerStats:
    """One root. `toolchains` pairs each toolchain that made its objects with the number of them."""

    path: Path
    writable: bool
    entries: int
    object_bytes: int
    groups: tuple[Group, ...]
    toolchains: tuple[tuple[str, int], ...]
    oldest_use: float | None
    newest_use: float | None


@dataclass(frozen=True, slots=True)
class Stats:
    """Every layer, in the order they are searched."""

    layers: tuple[LayerStats, ...]


def collect(store: Store, on_problem: Callable[[str], None] | None = None) -> Stats:
    """Counts every layer from names, sizes and manifests; a folder that is passed over is told to `on_problem`."""
    return Stats(tuple(_layer(layer.path, layer.writable, store.entries([layer], on_problem=on_problem)) for layer in store.roots.layers))


def _layer(path: Path, writable: bool, entries: Iterator[Entry]) -> LayerStats:
    counts: dict[tuple[str | None, int | None, str | None, Status], list[int]] = {}
    toolchains: dict[str, int] = {}
    uses: list[float] = []
    for entry in entries:
        manifest = entry.manifest
        spec = manifest.spec if manifest is not None else None
        kind = (spec.kernel_id if spec else None, spec.version if spec else None, manifest.arch if manifest else None, entry.status)
        count = counts.setdefault(kind, [0, 0])
        count[0] += 1
        count[1] += entry.object_bytes or 0
        if manifest is not None:
            label = manifest.toolchain.label()
            toolchains[label] = toolchains.get(label, 0) + 1
        if entry.last_used is not None:
            uses.append(entry.last_used)
    groups = tuple(Group(*kind, *counts[kind]) for kind in sorted(counts, key=lambda kind: (kind[0] or "~", kind[1] or 0, kind[2] or "", kind[3])))
    total = sum(group.entries for group in groups)
    size = sum(group.object_bytes for group in groups)
    return LayerStats(path, writable, total, size, groups, tuple(sorted(toolchains.items())), min(uses, default=None), max(uses, default=None))


def prometheus(stats: Stats) -> str:
    """The text exposition format of Prometheus, as node_exporter's textfile collector reads it."""
    lines = []
    gauges: tuple[tuple[str, str, Callable[[Group], int]], ...] = (
        ("mlactl_cache_entries", "Entries of the compile cache", lambda group: group.entries),
        ("mlactl_cache_object_bytes", "Bytes of compiled objects in the cache", lambda group: group.object_bytes),
    )
    for name, help_text, value in gauges:
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} gauge"]
        for layer in stats.layers:
            for group in layer.groups:
                labels = {
                    "root": str(layer.path),
                    "kernel_id": group.kernel_id or "",
                    "version": "" if group.version is None else str(group.version),
                    "arch": group.arch or "",
                    "status": str(group.status),
                }
                lines.append(f"{name}{{{','.join(f'{key}={_quoted(text)}' for key, text in labels.items())}}} {value(group)}")
    lines += [
        "# HELP mlactl_cache_newest_use_timestamp_seconds When an entry of the root was last used",
        "# TYPE mlactl_cache_newest_use_timestamp_seconds gauge",
    ]
    lines += [
        f"mlactl_cache_newest_use_timestamp_seconds{{root={_quoted(str(layer.path))}}} {layer.newest_use:.0f}"
        for layer in stats.layers
        if layer.newest_use
    ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
