"""Advisories: which entries are known to be wrong by their facts, read from data (`mlactl/advisories.toml`, or a file of one's own).

A case names kernels of one cache format and what their facts must and must not be. An entry whose facts say all of that
is hit. One whose facts cannot be read at all is only suspect, and only where the case says which versions are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from mlactl.cache.listing import kernel_matches
from mlactl.cache.selectors import COMPARE
from mlactl.errors import CannotRun, UsageError
from mlactl.regular_files import read_bytes

if TYPE_CHECKING:
    from mlactl.cache.adapter import CacheEntry, SpecView

SCHEMA_VERSION = 1
BUNDLED = Path(__file__).resolve().parents[1] / "advisories.toml"
MAX_FILE_BYTES = 1 << 20

_BOUND = re.compile(r"(<=|>=|==|<|>)([0-9]{1,9})")
_ID = re.compile(r"[a-z0-9][a-z0-9.-]{0,79}")

Values = dict[str, tuple[bool | int | str, ...]]
Format = Literal["mlactl", "b12x"]


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kind of entry that an advisory is about, in one cache format.

    `where`: facts that must be there with one of these values. `unless`: facts that, there with one of these values, put
    an entry out of the case. `absent`: facts that must not be there. `versions`: spec versions it is about, all when
    empty. `suspect_versions`: versions that are suspect when no fact can be read.
    """

    format: Format
    kernels: tuple[str, ...]
    versions: str = ""
    where: Values = {}
    unless: Values = {}
    absent: tuple[str, ...] = ()
    suspect_versions: str = ""


class Advisory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is wrong with a kind of entry. `acquitted_by` names a parameter; code that reads it is not of this kind."""

    id: str
    title: str
    severity: Literal["conviction", "notice"]
    consequence: str
    remedy: str
    case: tuple[Case, ...]
    acquitted_by: str = ""


class ParameterPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Position of a parameter in kernels of another tool; `fact` is the one that claims whether the code reads it (0) or not (1)."""

    format: Format
    kernel: str
    versions: str
    name: str
    fact: str
    ordinal: int
    size_bytes: int
    where: Values = {}


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    schema_version: int
    advisory: tuple[Advisory, ...] = ()
    parameter: tuple[ParameterPlace, ...] = ()


@dataclass(frozen=True, slots=True)
class Advisories:
    """Everything an audit goes by besides the registry."""

    advisories: tuple[Advisory, ...]
    parameters: tuple[ParameterPlace, ...]


@dataclass(frozen=True, slots=True)
class Hit:
    """An advisory that concerns an entry by its facts; `suspect` when they could not be read. `reason` says which."""

    advisory: Advisory
    suspect: bool
    reason: str


# ---- reading


@lru_cache
def bundled() -> Advisories:
    """The advisories of this release."""
    return _checked(BUNDLED)


def load(extra: Path | None = None) -> Advisories:
    """This release's advisories and those of `extra`; raises CannotRun naming the file and the place of what is wrong in it."""
    known = bundled()
    if extra is None:
        return known
    added = _checked(extra)
    taken = {advisory.id for advisory in known.advisories}
    for number, advisory in enumerate(added.advisories):
        if advisory.id in taken:
            raise _bad(extra, f"advisory[{number}].id", f"{advisory.id!r} is one of this release's advisories, expected another id")
    return Advisories(known.advisories + added.advisories, known.parameters + added.parameters)


def _checked(path: Path) -> Advisories:
    import tomli

    try:
        raw = tomli.loads(read_bytes(path, MAX_FILE_BYTES, "advisories").decode())
    except (UnicodeDecodeError, tomli.TOMLDecodeError) as error:
        raise _bad(path, "", f"not TOML: {error}") from None
    if "schema_version" in raw and raw["schema_version"] != SCHEMA_VERSION:
        raise _bad(path, "schema_version", f"{raw['schema_version']!r}, this release reads {SCHEMA_VERSION}")
    try:
        found = msgspec.convert(raw, _File)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        raise _bad(path, place.rstrip("`").lstrip("."), what) from None
    seen: dict[str, int] = {}
    for number, advisory in enumerate(found.advisory):
        place = f"advisory[{number}]"
        if not _ID.fullmatch(advisory.id):
            raise _bad(path, f"{place}.id", f"{advisory.id!r}, expected lower-case letters, digits, '.' and '-'")
        if seen.setdefault(advisory.id, number) != number:
            raise _bad(path, f"{place}.id", f"{advisory.id!r} is the id of advisory[{seen[advisory.id]}] too")
        _require_words(path, place, title=advisory.title, consequence=advisory.consequence, remedy=advisory.remedy)
        if not advisory.case:
            raise _bad(path, f"{place}.case", "an advisory without a case hits nothing")
        for index, case in enumerate(advisory.case):
            _check_case(path, f"{place}.case[{index}]", case)
    for number, parameter in enumerate(found.parameter):
        place = f"parameter[{number}]"
        _require_words(path, place, kernel=parameter.kernel, name=parameter.name, fact=parameter.fact)
        _check_range(path, f"{place}.versions", parameter.versions)
        _check_values(path, f"{place}.where", parameter.where)
        if parameter.ordinal < 0 or parameter.size_bytes <= 0:
            raise _bad(path, place, f"ordinal {parameter.ordinal} and size_bytes {parameter.size_bytes}, expected at least 0 and at least 1")
        if parameter.format == "mlactl":
            raise _bad(path, f"{place}.format", "the ordinals of this tool's own kernels come from its registry, expected another format")
    return Advisories(found.advisory, found.parameter)


def _check_case(path: Path, place: str, case: Case) -> None:
    if not case.kernels or not all(case.kernels):
        raise _bad(path, f"{place}.kernels", "no kernel, expected ids, dotted starts or patterns")
    if not case.where and not case.absent:
        raise _bad(path, place, "neither where nor absent: it would hit every entry of the kernel")
    for name in ("versions", "suspect_versions"):
        if getattr(case, name):
            _check_range(path, f"{place}.{name}", getattr(case, name))
    for name in ("where", "unless"):
        _check_values(path, f"{place}.{name}", getattr(case, name))


def _check_values(path: Path, place: str, values: Values) -> None:
    for fact, allowed in values.items():
        if not allowed:
            raise _bad(path, f"{place}.{fact}", "an empty list of values")


def _check_range(path: Path, place: str, text: str) -> None:
    if _bounds(text) is None:
        raise _bad(path, place, f"{text!r}, expected comparisons such as '>=15,<18' (< <= == >= >)")


def _require_words(path: Path, place: str, **texts: str) -> None:
    for name, text in texts.items():
        if not text.strip():
            raise _bad(path, f"{place}.{name}", "an empty text")


def _bad(path: Path, place: str, what: str) -> CannotRun:
    return CannotRun(f"{path}: {f'{place}: ' if place else ''}{what}", hint="docs/audit.md describes the format")


@lru_cache(maxsize=256)
def _bounds(text: str) -> tuple[tuple[str, int], ...] | None:
    """The comparisons of `>=15,<18`; None when it is not spelled so."""
    found = [_BOUND.fullmatch("".join(part.split())) for part in text.split(",")]
    return None if None in found else tuple((match[1], int(match[2])) for match in found if match)


def in_range(version: int, text: str) -> bool:
    """Whether a version is in a range that was checked when it was read; the empty one has every version."""
    return not text or all(COMPARE[sign](version, bound) for sign, bound in _bounds(text) or ())


# ---- matching


def hits(advisories: Iterable[Advisory], spec: SpecView, kind: str) -> tuple[Hit, ...]:
    """The advisories that concern a spec of a cache of that kind, each by its first case that does."""
    found = []
    for advisory in advisories:
        hit = next((hit for case in advisory.case if (hit := _hit(advisory, case, spec, kind)) is not None), None)
        if hit is not None:
            found.append(hit)
    return tuple(found)


IDENTITY_REPLAY = "identity-replay"


def takes_outer_scale(spec: SpecView, kind: str) -> bool:
    """Whether facts say static NVFP4 records that are restored by an outer scale, whatever else they say of it.

    Those are the kernels, `where` and `unless` of the identity-replay cases of a cache of that kind; facts that are silent or
    unreadable say no.
    """
    facts = dict(spec.facts)
    return any(
        case.format == kind
        and any(kernel_matches(spec.kernel_id, name) for name in case.kernels)
        and all(fact in facts and _among(facts[fact], values) for fact, values in case.where.items())
        and not any(fact in facts and _among(facts[fact], values) for fact, values in case.unless.items())
        for advisory in bundled().advisories
        if advisory.id == IDENTITY_REPLAY
        for case in advisory.case
    )


def _hit(advisory: Advisory, case: Case, spec: SpecView, kind: str) -> Hit | None:
    facts = dict(spec.facts)
    if case.format != kind or not any(kernel_matches(spec.kernel_id, name) for name in case.kernels) or not in_range(spec.version, case.versions):
        return None
    if any(_among(facts[fact], values) for fact, values in case.unless.items() if fact in facts) or any(fact in facts for fact in case.absent):
        return None
    if any(not _among(facts[fact], values) for fact, values in case.where.items() if fact in facts):
        return None
    if not facts:
        if not case.suspect_versions or not in_range(spec.version, case.suspect_versions):
            return None
        return Hit(advisory, True, f"facts cannot be read, and version {spec.version} is among {case.suspect_versions}")
    if any(fact not in facts for fact in case.where):
        return None  # a key without the fact is of a kernel without the choice
    said = [f"{fact}={facts[fact]}" for fact in case.where] + [f"no {fact}" for fact in case.absent]
    return Hit(advisory, False, f"facts: {', '.join(said)}")


def _among(value: Any, values: Sequence[bool | int | str]) -> bool:
    # type(): to Python true is 1, to a compile key it is another fact.
    return any(type(value) is type(allowed) and value == allowed for allowed in values)


def parameter_of(parameters: Iterable[ParameterPlace], spec: SpecView, kind: str) -> ParameterPlace | None:
    """Where a kernel of another tool has a parameter worth looking at; None when that is not known for these facts and this version."""
    facts = dict(spec.facts)
    for place in parameters:
        known = place.format == kind and place.kernel == spec.kernel_id and in_range(spec.version, place.versions)
        if known and all(fact in facts and _among(facts[fact], values) for fact, values in place.where.items()):
            return place
    return None


def judge(advisories: Advisories, ids: Sequence[str], kind: str = "mlactl") -> Callable[[CacheEntry], str | None]:
    """Tells why an entry is hit by one of the advisories of these ids, by facts alone; raises UsageError for an unknown id."""
    known = {advisory.id: advisory for advisory in advisories.advisories}
    for identity in ids:
        if identity not in known:
            raise UsageError(f"no advisory {identity!r}, there is {', '.join(sorted(known))}", hint="mlactl cache audit names what hits each entry")
    chosen = [known[identity] for identity in dict.fromkeys(ids)]

    def reason(entry: CacheEntry) -> str | None:
        if entry.manifest is None:
            return None
        found = hits(chosen, entry.manifest.spec, kind)
        return f"{found[0].advisory.id}: {'suspect, ' if found[0].suspect else ''}{found[0].reason}" if found else None

    return reason
