"""Opens a cache root of any supported kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from mlactl.cache.adapter import CacheAdapter
from mlactl.errors import CannotRun, UsageError


@dataclass(frozen=True)
class _B12x:
    paths: tuple[Path, ...]
    kind: str = "b12x"

    def entries(self, *, on_problem: Callable[[str], None] | None = None) -> list[Any]:
        found = []
        try:
            for path in sorted(self.paths[0].iterdir()):
                for manifest in sorted(path.glob("*.json")) if len(path.name) == 2 else ():
                    try:
                        spec = json.loads(json.loads(manifest.read_text())["compile_spec_json"])
                    except (ValueError, KeyError):
                        continue
                    facts = tuple((name, value) for name, value in spec["facts"])
                    view = SimpleNamespace(spec=SimpleNamespace(kernel_id=spec["kernel"], version=spec["version"], facts=facts), arch="", created="")
                    found.append(SimpleNamespace(key=manifest.stem, manifest=view, status="ok", residue=""))
        except OSError as error:
            raise CannotRun(f"{self.paths[0]} cannot be read: {error.strerror}") from None
        return found


def open_cache(cache_dir: str | None, kind: str) -> CacheAdapter:
    """The adapter of a root."""
    if kind != "b12x" or cache_dir is None:
        raise UsageError(f"no root of kind {kind}")
    return cast(CacheAdapter, _B12x((Path(cache_dir),)))
