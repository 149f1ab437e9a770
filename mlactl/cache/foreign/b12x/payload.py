"""The payload tuples whose `repr` b12x hashes into its keys: every tag, read without trusting any of it.

A tuple's fields stand under names of our own, the same in all tags; which tag has which is `LAYOUTS`. Values come either
from the text that was hashed (`read_text`, tuples) or from its JSON copy in a manifest (`from_json`, lists).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_TEXT_CHARS = 1 << 20
MAX_DEPTH = 64

UNVERSIONED = -1

_TAG = re.compile(r"(?:b12x|sparkinfer)_cute_compile_cache_v([1-7])(_explicit_spec)?")
_STARTS_OLD = ("target", "fingerprint", "toolchain")
LAYOUTS: dict[tuple[int, bool], tuple[str, ...]] = {
    (1, False): ("target", "fingerprint", "args", "kwargs", "options", "arch_variable", "toolkit_variable"),
    (2, False): (*_STARTS_OLD, "args", "kwargs", "options", "environment"),
    (3, False): (*_STARTS_OLD, "device", "args", "kwargs", "options", "environment"),
    (4, False): (*_STARTS_OLD, "device", "args", "kwargs", "options", "environment"),
    (3, True): (*_STARTS_OLD, "spec_key", "kwargs_key", "options", "environment"),
    (4, True): (*_STARTS_OLD, "spec_key", "kwargs_key", "options", "environment"),
    (5, True): (*_STARTS_OLD, "spec_hash", "spec_json", "kwargs_hash", "kwargs_json", "options", "environment"),
    (6, True): (*_STARTS_OLD, "device", "spec_hash", "spec_json", "kwargs_hash", "kwargs_json", "options", "environment"),
    (7, True): (*_STARTS_OLD, "device", "spec_hash", "spec_json", "kwargs_hash", "kwargs_json", "options", "environment"),
}
"""Names of the fields after the tag, by (version, explicit spec)."""


class BadPayload(Exception):
    """Not a payload of any release; `reason` says why and quotes nothing of it, since a payload holds environment values."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Spec(msgspec.Struct, frozen=True, gc=False):
    """A foreign compile spec (`adapter.SpecView`); `version` is -1 where the format numbers none.

    Facts without a name are called arg0, arg1, … by their place; tensor facts are lists as they stand.
    """

    kernel_id: str
    version: int
    facts: tuple[tuple[str, Any], ...]

    def as_json(self) -> dict[str, Any]:
        """`kernel_id`, `version` (null where there is none) and `facts`."""
        return {"kernel_id": self.kernel_id, "version": self.version if self.version >= 0 else None, "facts": dict(self.facts)}

    def label(self) -> str:
        """Kernel id, version and the facts that are plain values."""
        plain = [f"{name}={value}" for name, value in self.facts if not isinstance(value, list | tuple | dict)]
        return " ".join([self.kernel_id, *([str(self.version)] if self.version >= 0 else []), *plain])


@dataclass(frozen=True, slots=True)
class Payload:
    """One payload tuple: its tag, and its fields by name."""

    tag: str
    fields: dict[str, Any]

    @property
    def explicit(self) -> bool:
        """Whether the tag is one of an explicit compile spec."""
        return self.tag.endswith("_explicit_spec")


@dataclass(frozen=True, slots=True)
class Device:
    """What a payload says of the device it was compiled for; `identity` is the tuple as it stands."""

    arch: str
    identity: tuple[Any, ...]


def known_tag(tag: str) -> bool:
    """Whether some release wrote payloads of this tag."""
    return _layout(tag) is not None


def _layout(tag: str) -> tuple[str, ...] | None:
    match = _TAG.fullmatch(tag)
    return LAYOUTS.get((int(match[1]), match[2] is not None)) if match else None


def field_place(tag: str, name: str) -> int | None:
    """Index in the payload of a named field; None where the tag is unknown or has no such field."""
    layout = _layout(tag) or ()
    return layout.index(name) + 1 if name in layout else None


def from_json(values: Sequence[Any]) -> Payload:
    """The payload whose values are a tuple or its JSON copy; raises BadPayload."""
    tag = values[0] if values else None
    layout = _layout(tag) if isinstance(tag, str) else None
    if layout is None or not isinstance(tag, str):
        raise BadPayload("a payload with a tag that no known release wrote")
    if len(values) != len(layout) + 1:
        raise BadPayload(f"a payload of {len(values)} fields, expected {len(layout) + 1} for {tag}")
    return Payload(tag, dict(zip(layout, values[1:], strict=True)))


# What `repr` writes for tuples, lists, dicts, strings, bytes, numbers, True, False and None. Nothing else is given to the
# parser: it recurses over operators and brackets, and a text made for it could end the process. Possessive repeats, so that
# a string without an end costs one pass and no more.
_TOKEN = re.compile(
    r"""\s*(?:
      (?P<open>[(\[{]) | (?P<close>[)\]}]) | [,:] | True\b | False\b | None\b
    | b?'(?:[^'\\\n]++|\\[\\'"nrtabfv0]|\\x[0-9a-f]{2}|\\u[0-9a-f]{4}|\\U000[0-9a-f]{5}|\\U0010[0-9a-f]{4})*+'
    | b?"(?:[^"\\\n]++|\\[\\'"nrtabfv0]|\\x[0-9a-f]{2}|\\u[0-9a-f]{4}|\\U000[0-9a-f]{5}|\\U0010[0-9a-f]{4})*+"
    | -?[0-9]{1,40}(?:\.[0-9]{1,40})?(?:e[+-]?[0-9]{1,4})?(?![\w.])
    )""",
    re.VERBOSE,
)


def read_text(text: str) -> Payload:
    """The payload that a `cache_payload_repr` spells; raises BadPayload for everything else, whatever the text."""
    if len(text) > MAX_TEXT_CHARS:
        raise BadPayload(f"a payload of {len(text)} characters, more than the {MAX_TEXT_CHARS} one can have")
    at = depth = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise BadPayload("a payload that is no literal tuple")
        depth += (match["open"] is not None) - (match["close"] is not None)
        if depth > MAX_DEPTH:
            raise BadPayload(f"a payload nested deeper than {MAX_DEPTH}")
        at = match.end()
    try:
        values = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise BadPayload("a payload that is no literal tuple") from None
    if not isinstance(values, tuple):
        raise BadPayload("a payload that is no tuple")
    return from_json(values)


# ---- what the fields say


def device(value: Any) -> Device | None:
    """The device identity, told apart by its first element: the tags do not say which of the four it is. None for anything else."""
    if not isinstance(value, tuple | list) or not value:
        return None
    identity = tuple(tuple(part) if isinstance(part, list) else part for part in value)
    match identity:
        case ("arch", "unavailable") | ("device_uuid", str()):
            return Device("", identity)
        case ("arch", int(major), int(minor), str()) | ("cuda", (int(major), int(minor)), int()):
            return Device(_sm(major, minor), identity)
    return None


def _sm(major: int, minor: int) -> str:
    """The target that the compiler takes for a compute capability; from 9.0 on it is the one with architecture-specific instructions."""
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}" if 0 <= major < 100 and 0 <= minor < 10 else ""


_ARCH = re.compile(r"sm_[0-9]{2,3}[af]?")
_ARCH_OPTION = re.compile(r"(?:--)?gpu-arch[= ](sm_[0-9]{2,3}[af]?)")


def arch_of(payload_device: Device | None, options: Iterable[Any], arch_variable: str) -> str:
    """The target an entry was compiled for, empty when nothing says: an option wins over CUTE_DSL_ARCH, that over the device."""
    for option in options:
        match = _ARCH_OPTION.search(option) if isinstance(option, str) else None
        if match:
            return match[1]
    if _ARCH.fullmatch(arch_variable):
        return arch_variable
    return payload_device.arch if payload_device is not None else ""


def pairs(value: Any) -> list[tuple[str, Any]]:
    """A list of (name, value…) pairs, as toolchains and environments are; what is none is left out."""
    found = []
    for item in value if isinstance(value, tuple | list) else ():
        if isinstance(item, tuple | list) and len(item) >= 2 and isinstance(item[0], str):
            found.append((item[0], item[1] if len(item) == 2 else item[1:]))
    return found


def target_label(target: Any) -> str:
    """`module.Class.method` of what was compiled; empty where the target does not say."""
    match target:
        case ["method" | "function", [str(module), str(name), *_], *_]:
            return f"{module}.{name}"
        case ["callable_instance" | "callable", str(module), str(name), *_]:
            return f"{module}.{name}"
    return ""


def spec_from_json(text: str) -> Spec:
    """The spec that a `compile_spec_json` spells; raises BadPayload."""
    try:
        wire = _spec_decoder.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise BadPayload("compile_spec_json is no spec with facts, kernel and version") from None
    if wire.version < 0:
        raise BadPayload("compile_spec_json has a negative version")
    return Spec(wire.kernel, wire.version, named_facts(wire.facts))


class _WireSpec(msgspec.Struct, gc=False):
    facts: list[Any]
    kernel: str
    version: int


_spec_decoder = msgspec.json.Decoder(_WireSpec)


def named_facts(facts: Iterable[Any]) -> tuple[tuple[str, Any], ...]:
    """(name, value) of every fact, each name once."""
    found: dict[str, Any] = {}
    listed = list(facts)
    if len(listed) == 4 and listed[0] == "legacy" and isinstance(listed[3], tuple | list):
        listed = list(listed[3])  # a spec made of fields rather than facts says its kernel and version once more
    for place, fact in enumerate(listed):
        match fact:
            case [str(name), value] | ["field", str(name), value] if name not in found:
                found[name] = value
            case _:
                found[f"arg{place}"] = fact
    return tuple(found.items())


def spec_from_key(value: Any) -> Spec | None:
    """The spec in a `spec_key` of tags v3 and v4: (word, kernel id, version, …, fields or their JSON); None where it is none."""
    match value:
        case [str(), str(kernel_id), int(version), *rest] if not isinstance(version, bool):
            last = rest[-1] if rest else ()
            if isinstance(last, str):
                try:
                    return spec_from_json(last)
                except BadPayload:
                    return Spec(kernel_id, version, ())
            return Spec(kernel_id, version, named_facts(last if isinstance(last, tuple | list) else ()))
        case [str(kernel_id), int(version), *rest] if not isinstance(version, bool):
            return Spec(kernel_id, version, named_facts(rest[0] if len(rest) == 1 and isinstance(rest[0], tuple | list) else rest))
    return None


def spec_of(payload: Payload, target: str = "") -> Spec:
    """What was compiled: the explicit spec, else the target's name without a version; raises BadPayload for an unreadable spec."""
    fields = payload.fields
    if "spec_json" in fields:
        return spec_from_json(fields["spec_json"] if isinstance(fields["spec_json"], str) else "")
    found = spec_from_key(fields["spec_key"]) if "spec_key" in fields else None
    return found or Spec(target_label(fields["target"]) or target or "unknown", UNVERSIONED, ())


def environment(payload: Payload) -> list[tuple[str, str]]:
    """(variable, value) of the recorded compile environment. The values are another user's secrets: print names alone."""
    fields = payload.fields
    if "environment" in fields:
        return [(name, str(value)) for name, value in pairs(fields["environment"])]
    old = (("CUTE_DSL_ARCH", fields["arch_variable"]), ("CUDA_TOOLKIT_PATH", fields["toolkit_variable"]))
    return [(name, value if isinstance(value, str) else "") for name, value in old]
