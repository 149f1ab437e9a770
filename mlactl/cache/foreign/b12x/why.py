"""Why b12x has two entries where one would do: what an entry was built from, and what forks it from its nearest sibling.

b12x keys by everything that might change the code, and by some things that do not: which variables were set, the CUDA
ordinal inside tensor facts, in some releases the card's UUID. Environment values are another user's secrets: the names are
told, the values only when asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mlactl.cache.entry import Status
from mlactl.cache.foreign.b12x import entry as entries
from mlactl.cache.foreign.b12x import payload as payloads
from mlactl.cache.foreign.b12x.entry import Entry
from mlactl.cache.foreign.b12x.manifest import HIDDEN, Document, Rejected
from mlactl.cache.foreign.b12x.payload import Payload

MAX_COMPARED = 256
"""Siblings read in full to find the nearest; beyond that those with the same semantic key or facts come first."""


@dataclass(frozen=True, slots=True)
class Fork:
    """A field in which two entries differ; None where a side has no such field. Hidden values are words, not values."""

    field: str
    entry: Any
    sibling: Any


@dataclass(frozen=True, slots=True)
class Explanation:
    """What an entry was built from, its nearest sibling with how the two are related, and every field that forks them."""

    entry: Entry
    built_from: tuple[tuple[str, Any], ...]
    sibling: Entry | None
    relation: str
    forks: tuple[Fork, ...]
    notes: tuple[str, ...]


def explain(entry: Entry, everything: Iterable[Entry], *, show_secrets: bool = False) -> Explanation:
    """Explains an entry beside the others of its root; damage is a note, never an exception."""
    document, problem = _document(entry)
    if entry.manifest is None or document is None or document.payload is None:
        return Explanation(entry, (), None, "", (), (entry.detail or problem or "its payload cannot be read",))
    fields = flat(document.payload)
    built = tuple((name, _shown(name, value, show_secrets)) for name, value in fields.items())
    related = sorted((other for other in everything if _comparable(entry, other)), key=lambda other: _kinship(entry, other))
    compared = []
    for other in related[:MAX_COMPARED]:
        theirs, _ = _document(other)
        if theirs is not None and theirs.payload is not None:
            difference = _differences(fields, flat(theirs.payload))
            compared.append((_kinship(entry, other)[0], len(difference), other.key, other, difference))
    if not compared:
        return Explanation(entry, built, None, "", (), ("no other entry of this kernel to compare with",))
    kinship, _, _, sibling, difference = min(compared, key=lambda item: item[:3])
    forks = tuple(_fork(name, mine, other, show_secrets) for name, (mine, other) in difference.items())
    return Explanation(entry, built, sibling, _RELATIONS[kinship], forks, _notes(forks))


_RELATIONS = ("same semantic key", "same kernel id and facts", "same kernel id")


def _comparable(entry: Entry, other: Entry) -> bool:
    if other.manifest is None or entry.manifest is None or other.residue or (other.key == entry.key):
        return False
    return other.manifest.spec.kernel_id == entry.manifest.spec.kernel_id


def _kinship(entry: Entry, other: Entry) -> tuple[int, bool, str]:
    """0 for the same semantic key, 1 for the same facts and version, 2 for the same kernel id only; good ones before others."""
    mine, theirs = entry.manifest, other.manifest
    assert mine is not None
    assert theirs is not None
    if mine.semantic_key and mine.semantic_key == theirs.semantic_key:
        nearness = 0
    else:
        nearness = 1 if mine.spec == theirs.spec else 2
    return nearness, other.status is not Status.OK, other.key


def _document(entry: Entry) -> tuple[Document | None, str]:
    try:
        return entries.read_document(entry), ""
    except Rejected as rejected:
        return None, rejected.reason
    except OSError as error:
        return None, error.strerror or str(error)


# ---- the fields of a payload, one by one

_ABSENT = object()


def flat(payload: Payload) -> dict[str, Any]:
    """Every field of a payload by a dotted name, as fine as a person would name what differs."""
    fields = payload.fields
    found: dict[str, Any] = {"format": payload.tag, "target": payloads.target_label(fields["target"]) or "unknown"}
    try:
        spec = payloads.spec_of(payload)
    except payloads.BadPayload:
        spec = None
    if spec is not None:
        found |= {"kernel": spec.kernel_id, "version": spec.version if spec.version >= 0 else None}
        for name, value in spec.facts:
            found |= _fact(f"facts.{name}", value)
    found["fingerprint"] = fields["fingerprint"]
    for name, value in payloads.pairs(fields.get("toolchain")):
        found[f"toolchain.{name}"] = _version(value)
    found |= _device(fields.get("device"))
    for name in ("args", "kwargs", "kwargs_key", "kwargs_json"):
        if fields.get(name):
            found[name] = _plain(fields[name])
    found["options"] = _plain(fields.get("options"))
    found |= {f"environment.{name}": value for name, value in payloads.environment(payload)}
    return found


def _fact(name: str, value: Any) -> dict[str, Any]:
    """A tensor fact is ["tensor", name, dtype, rank, dims, strides, [device type, ordinal], align, layout]: told part by part."""
    match value:
        case ["tensor", _, dtype, rank, [*dims], [*strides], [kind, ordinal], *rest]:
            parts = {"dtype": dtype, "rank": rank, "device": kind, "ordinal": ordinal}
            parts |= {f"dim{place}": _extent(part) for place, part in enumerate(dims)}
            parts |= {f"stride{place}": _extent(part) for place, part in enumerate(strides)}
            parts |= dict(zip(("align", "layout"), map(_plain, rest), strict=False))
            return {f"{name}.{part}": found for part, found in parts.items()}
    return {name: _plain(value)}


def _extent(value: Any) -> Any:
    """`exact 96`, `bucket 2048` or `dynamic` for ["dim", kind, value]; older strides are plain numbers."""
    match value:
        case ["dim", str(kind), None]:
            return kind
        case ["dim", str(kind), size]:
            return f"{kind} {size}"
    return _plain(value)


def _device(value: Any) -> dict[str, Any]:
    found = payloads.device(value)
    if found is None:
        return {}
    match found.identity:
        case ("cuda", (major, minor), count):
            return {"device.capability": f"{major}.{minor}", "device.sm_count": count}
        case ("arch", major, minor, name):
            return {"device.capability": f"{major}.{minor}", "device.name": name}
        case ("device_uuid", uuid):
            return {"device.uuid": uuid}
    return {"device": "unavailable"}


def _version(value: Any) -> Any:
    """A version as people write it: Python's is recorded as (implementation, (3, 12, 3))."""
    match value:
        case [str(implementation), [*numbers]] if all(type(number) is int for number in numbers):
            return f"{implementation} {'.'.join(map(str, numbers))}"
    return _plain(value)


def _plain(value: Any) -> Any:
    """A value as JSON has it, tuples as lists, so that entries of different eras compare; anything else by its repr."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def _differences(mine: dict[str, Any], theirs: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = dict.fromkeys([*mine, *theirs])
    pairs = {name: (mine.get(name, _ABSENT), theirs.get(name, _ABSENT)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] or type(pair[0]) is not type(pair[1])}


def _fork(name: str, mine: Any, other: Any, show_secrets: bool) -> Fork:
    sides = [None if side is _ABSENT else _shown(name, side, show_secrets) for side in (mine, other)]
    if sides[0] == sides[1] == HIDDEN:
        sides[1] = f"another value, {HIDDEN}"
    return Fork(name, *sides)


def _shown(name: str, value: Any, show_secrets: bool) -> Any:
    # A card's UUID names one card of a machine; that is what the entry was keyed by, and no secret of its owner.
    return HIDDEN if name.startswith("environment.") and value and not show_secrets else value


_NOTES = (
    ("environment.", "every variable that a release counts as a compile setting forks the cache, whether or not it changes the code"),
    (".ordinal", "the CUDA ordinal stands in tensor facts: each GPU index of a node compiles and keeps its own copy of the same code"),
    ("device.uuid", "this format keys by the card's UUID: every card compiles its own copy"),
    ("device.sm_count", "cards with another number of SMs have entries of their own"),
    ("fingerprint", "another release of the package, or an edited one: it keys by every byte of its sources"),
    ("toolchain.", "another compiler or torch: old entries stay until somebody removes them"),
    ("format", "written by releases of different eras: the newer one never loads the older one's entry"),
)


def _notes(forks: tuple[Fork, ...]) -> tuple[str, ...]:
    """What the fields that differ mean, for whoever has to make them agree."""
    names = [fork.field for fork in forks]
    found = [note for mark, note in _NOTES if any(name.startswith(mark) if mark.endswith(".") or "." not in mark else mark in name for name in names)]
    return tuple(found) or (("the two have equal payload fields",) if not forks else ())
