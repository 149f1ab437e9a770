"""What a warmup has to do: every object a profile can launch, on every arch asked for, against what the cache holds.

Imports neither torch nor the compiler: this is all that `warmup --check` and `--dry-run` run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlactl.cache import key as keys
from mlactl.cache.store import Hit, Store
from mlactl.cache.trust import Untrusted
from mlactl.errors import MlactlError
from mlactl.kernels import registry
from mlactl.kernels.spec import CompileSpec
from mlactl.profiles import Profile

PRESENT, MISSING, NOT_BUILT, UNTRUSTED = "present", "missing", "not-built", "untrusted"


@dataclass(frozen=True, slots=True)
class Item:
    """One object of a plan: `state` is present, missing, not-built or untrusted (there, but others could have written it).

    `key` is None where no compiler says what it would be; `hint` is how to mend an untrusted one.
    """

    spec: CompileSpec
    arch: str
    key: str | None
    state: str
    reason: str | None
    hint: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The row of `--json` output."""
        return {"key": self.key, "spec": self.spec.as_json(), "arch": self.arch, "status": self.state, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class Plan:
    """Every object of one warmup, in a fixed order: arch by arch, as the profile lists its specs."""

    profile: Profile
    arches: tuple[str, ...]
    items: tuple[Item, ...]

    def of(self, state: str) -> tuple[Item, ...]:
        """The items in that state."""
        return tuple(item for item in self.items if item.state == state)

    @property
    def complete(self) -> bool:
        """True when nothing is missing, what cannot be built yet included."""
        return all(item.state == PRESENT for item in self.items)


def make_plan(profile: Profile, arches: Sequence[str], store: Store, identities: tuple[int, ...] | None = None) -> Plan:
    """Looks up every (spec, arch); `identities` narrows the latent-scale variants to what a scale file needs."""
    items = tuple(look_up(spec, arch, store) for arch in arches for spec in profile.specs(identities))
    return Plan(profile, tuple(arches), items)


def look_up(spec: CompileSpec, arch: str, store: Store) -> Item:
    """One object against what the cache holds."""
    reason = registry.not_built(spec)
    if reason is not None:
        return Item(spec, arch, None, NOT_BUILT, reason)
    try:
        found = store.lookup(spec, arch)
    except Untrusted as refused:
        return Item(spec, arch, _key(spec, arch), UNTRUSTED, refused.message, refused.hint)
    if isinstance(found, Hit):
        return Item(spec, arch, found.entry.key, PRESENT, None)
    return Item(spec, arch, found.key, MISSING, found.reason)


def _key(spec: CompileSpec, arch: str) -> str | None:
    try:
        return keys.inputs_for(spec, arch).key()
    except MlactlError:
        return None
