"""The compiled objects that a benchmark launches: which are in the cache, and what those take on the card."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from mlactl.bench.arms import Planned
from mlactl.cache.manifest import KernelResources
from mlactl.cache.store import Store
from mlactl.kernels import registry
from mlactl.kernels.spec import CompileSpec
from mlactl.warmup.plan import PRESENT, Item, look_up


@dataclass(frozen=True, slots=True)
class ObjectRow:
    """One object; `kernels` is empty unless it is in the cache."""

    item: Item
    kernels: tuple[KernelResources, ...]

    def as_json(self) -> dict[str, Any]:
        """The row of a record."""
        return {**self.item.as_json(), "kernels": [msgspec.structs.asdict(kernel) for kernel in self.kernels]}


def peak_spec() -> CompileSpec:
    """The mma.sync microbenchmark."""
    return registry.MMA_PEAK.spec(**{fact.name: fact.allowed[0] for fact in registry.MMA_PEAK.facts})


def specs_of(arms: Iterable[Planned]) -> tuple[CompileSpec, ...]:
    """Every spec that these arms launch, and the microbenchmark, without repeats."""
    found = [spec for arm in arms if arm.plan is not None for spec in arm.plan.specs]
    return (*dict.fromkeys(found), peak_spec())


def object_rows(specs: Iterable[CompileSpec], arch: str, store: Store) -> tuple[ObjectRow, ...]:
    """Each object against the cache, with what its manifest says that it takes."""
    return tuple(_row(look_up(spec, arch, store), store) for spec in specs)


def _row(item: Item, store: Store) -> ObjectRow:
    manifest = store.entry(item.key).manifest if item.state == PRESENT and item.key is not None else None
    return ObjectRow(item, () if manifest is None else manifest.resources)
