"""Counts and sizes of the cache by layer, kernel, arch and status, for people and for a metrics collector."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from mlactl.cache.adapter import CacheAdapter, CacheEntry, RootKind


@dataclass(frozen=True, slots=True)
class Group:
    """Entries of one layer that share kernel, version, arch and status; the first three are None where no manifest tells."""

    kernel_id: str | None
    version: int | None
    arch: str | None
    status: str
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

    root_kind: RootKind
    layers: tuple[LayerStats, ...]


def collect(cache: CacheAdapter, on_problem: Callable[[str], None] | None = None) -> Stats:
    """Counts every root from names, sizes and manifests; a folder that is passed over is told to `on_problem`."""
    found: dict[Path, list[CacheEntry]] = {path: [] for path in cache.paths}
    for entry in cache.entries(on_problem=on_problem):
        found[entry.root].append(entry)
    return Stats(cache.kind, tuple(_layer(cache, path, entries) for path, entries in found.items()))


def _layer(cache: CacheAdapter, path: Path, entries: Iterable[CacheEntry]) -> LayerStats:
    counts: dict[tuple[str | None, int | None, str | None, str], list[int]] = {}
    toolchains: dict[str, int] = {}
    uses: list[float] = []
    for entry in entries:
        count = counts.setdefault(_kind_of(entry), [0, 0])
        count[0] += 1
        count[1] += entry.object_bytes or 0
        label = cache.made_by(entry)
        if label is not None:
            toolchains[label] = toolchains.get(label, 0) + 1
        if entry.last_used is not None:
            uses.append(entry.last_used)
    groups = tuple(Group(*kind, *counts[kind]) for kind in sorted(counts, key=lambda kind: (kind[0] or "~", kind[1] or 0, kind[2] or "", kind[3])))
    total = sum(group.entries for group in groups)
    size = sum(group.object_bytes for group in groups)
    made_by = tuple(sorted(toolchains.items()))
    return LayerStats(path, path == cache.writable, total, size, groups, made_by, min(uses, default=None), max(uses, default=None))


def _kind_of(entry: CacheEntry) -> tuple[str | None, int | None, str | None, str]:
    """What entries are counted by: kernel, version, arch and status, None for what the manifest does not tell."""
    manifest = entry.manifest
    if manifest is None:
        return None, None, None, entry.status
    spec = manifest.spec
    return spec.kernel_id, spec.version if spec.version >= 0 else None, manifest.arch or None, entry.status


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
                # The kind too: a foreign tool numbers the versions of kernels of the same name in its own way.
                labels = {
                    "root": str(layer.path),
                    "root_kind": str(stats.root_kind),
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
