"""The manifests of b12x: what a listing takes from one, and the whole of one for whoever explains it.

A listing decodes only the few fields it shows; everything else of the 5 to 20 KB is skipped, not built. What it shows is held
against `cache_payload_repr`, the text whose SHA-256 is the key, by looking for each value's spelling in it; `check`
reads that text in full and compares.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from mlactl.cache.entry import Status
from mlactl.cache.foreign.b12x import payload as payloads
from mlactl.cache.foreign.b12x.payload import BadPayload, Device, Payload, Spec
from mlactl.cache.manifest import is_sha256

SCHEMAS = frozenset(f"{package}.compile_manifest.v3" for package in ("b12x.cute", "sparkinfer.cute", "sparkinfer._lib", "b12x._lib"))
MAX_BYTES = 4 << 20
"""Manifests have 5 to 20 KB; what is larger than this is not read."""

_MEMO_LIMIT = 4096
"""Distinct fragments remembered: thousands of manifests spell the same few, and a hostile root must not fill memory."""
_specs: dict[str, Spec] = {}
_devices: dict[bytes, Device | None] = {}
_settings: dict[tuple[bytes, bytes], tuple[tuple[Any, ...], str]] = {}


class Rejected(Exception):
    """A manifest that is not believed: the status it gives its entry and why."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class Manifest(msgspec.Struct, frozen=True, gc=False):
    """What a listing shows of a manifest (`adapter.ManifestView`). No release records when it wrote one: `created` is empty.

    `device` is the identity tuple, empty where the format has none.
    """

    spec: Spec
    arch: str
    cache_format: str
    schema: str
    object_sha256: str
    object_bytes: int
    semantic_key: str
    device: tuple[Any, ...] = ()
    created: str = ""


class _Wire(msgspec.Struct, gc=False):
    schema: str
    cache_key: str
    cache_format: str
    cache_payload_repr: str
    object_sha256: str
    object_bytes: int
    cache_payload: list[msgspec.Raw] = []
    semantic_key: str = ""
    target: str = ""
    compile_options: msgspec.Raw = msgspec.Raw(b"[]")
    compile_environment: msgspec.Raw = msgspec.Raw(b"[]")
    compile_spec_json: str | None = None


class _SchemaOnly(msgspec.Struct):
    schema: str


_decoder = msgspec.json.Decoder(_Wire)
_schema_decoder = msgspec.json.Decoder(_SchemaOnly)
_any_decoder = msgspec.json.Decoder()


def parse(data: bytes, key: str) -> Manifest:
    """What a listing shows of the manifest of `key`; raises Rejected for everything else, whatever the bytes."""
    try:
        wire = _decoder.decode(data)
        hashed = hashlib.sha256(wire.cache_payload_repr.encode()).hexdigest()
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _undecodable(data, error) from None
    if wire.schema not in SCHEMAS:
        raise Rejected(Status.SCHEMA, _unknown("schema", wire.schema))
    if wire.cache_key != key:
        raise Rejected(Status.BAD_MANIFEST, f"it is the manifest of {wire.cache_key[:64]!r}")
    if hashed != key:
        raise Rejected(Status.KEY, f"the SHA-256 of cache_payload_repr is {hashed}, expected the key")
    if not payloads.known_tag(wire.cache_format):
        raise Rejected(Status.SCHEMA, _unknown("cache_format", wire.cache_format))
    if not is_sha256(wire.object_sha256) or wire.object_bytes <= 0:
        raise Rejected(Status.BAD_MANIFEST, "object_sha256 is no digest, or object_bytes no size")
    try:
        return _listed(wire)
    except BadPayload as error:
        raise Rejected(Status.BAD_MANIFEST, error.reason) from None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise Rejected(Status.BAD_MANIFEST, "cache_payload is not the JSON of a payload") from None


def _listed(wire: _Wire) -> Manifest:
    text, tag = wire.cache_payload_repr, wire.cache_format
    if not text.startswith(f"('{tag}', "):
        raise BadPayload("cache_format is not the tag of cache_payload_repr")
    options, variable = _options_and_arch_variable(wire)
    if "_explicit_spec" in tag and payloads.field_place(tag, "spec_json") is not None:
        if wire.compile_spec_json is None or _literal(wire.compile_spec_json) not in text:
            raise BadPayload("compile_spec_json is not the one that the key was made from")
        spec = _spec(wire.compile_spec_json)
        found = _device_at(wire, tag)
    else:
        payload = _older(wire)
        spec = payloads.spec_of(payload, wire.target)
        found = payloads.device(payload.fields.get("device"))
        variable = dict(payloads.environment(payload)).get("CUTE_DSL_ARCH", "")
    if found is not None and repr(found.identity) not in text:
        raise BadPayload("the device in cache_payload is not the one that the key was made from")
    identity = found.identity if found is not None else ()
    arch = payloads.arch_of(found, options, variable)
    return Manifest(spec, arch, tag, wire.schema, wire.object_sha256, wire.object_bytes, wire.semantic_key, identity)


def _literal(text: str) -> str:
    """`repr(text)`, which takes its time to find that there is nothing to escape."""
    return f"'{text}'" if "'" not in text and "\\" not in text and text.isprintable() else repr(text)


def _options_and_arch_variable(wire: _Wire) -> tuple[tuple[Any, ...], str]:
    """The compile options, and what CUTE_DSL_ARCH was set to."""
    spelled = bytes(wire.compile_options), bytes(wire.compile_environment)
    found = _settings.get(spelled)
    if found is None:
        options, variables = (_any_decoder.decode(part) for part in spelled)
        value = next((value for name, value in payloads.pairs(variables) if name == "CUTE_DSL_ARCH"), "")
        found = tuple(options) if isinstance(options, list) else (), value if isinstance(value, str) else ""
        if len(_settings) < _MEMO_LIMIT:
            _settings[spelled] = found
    return found


def _spec(text: str) -> Spec:
    found = _specs.get(text)
    if found is None:
        found = payloads.spec_from_json(text)
        if len(_specs) < _MEMO_LIMIT:
            _specs[text] = found
    return found


def _device_at(wire: _Wire, tag: str) -> Device | None:
    """The device identity of an explicit tag, from the JSON copy of the payload where there is one: reading the text costs far more."""
    place = payloads.field_place(tag, "device")
    if place is None:
        return None
    if wire.cache_payload:
        if len(wire.cache_payload) <= place:
            raise BadPayload(f"cache_payload has {len(wire.cache_payload)} fields")
        spelled = bytes(wire.cache_payload[place])
        found = _devices.get(spelled)
        if found is None:
            found = payloads.device(_any_decoder.decode(spelled))
            if len(_devices) < _MEMO_LIMIT:
                _devices[spelled] = found
    else:
        found = payloads.device(payloads.read_text(wire.cache_payload_repr).fields["device"])
    if found is None:
        raise BadPayload("the payload's device identity is of no known kind")
    return found


def _older(wire: _Wire) -> Payload:
    """The payload of a tag without compile_spec_json: its JSON copy, since the text of some holds objects, else the text."""
    if wire.cache_payload:
        return payloads.from_json([_any_decoder.decode(part) for part in wire.cache_payload])
    return payloads.read_text(wire.cache_payload_repr)


def _undecodable(data: bytes, error: Exception) -> Rejected:
    try:
        schema = _schema_decoder.decode(data).schema
    except (msgspec.MsgspecError, ValueError, RecursionError):
        schema = ""
    if schema and schema not in SCHEMAS:
        return Rejected(Status.SCHEMA, _unknown("schema", schema))
    # The decoder's messages name fields and types; other errors may quote the bytes.
    said = str(error)[:200] if isinstance(error, msgspec.ValidationError) else "no JSON object"
    return Rejected(Status.BAD_MANIFEST, f"not a manifest: {said}")


def _unknown(field: str, value: str) -> str:
    return f"unknown {field} {value[:80]!r}"


class Maker(msgspec.Struct, frozen=True, gc=False):
    """What a manifest says of the package and the tools that wrote it."""

    package_fingerprint: str = ""
    toolchain: list[Any] = []


_maker_decoder = msgspec.json.Decoder(Maker)


def maker(data: bytes) -> Maker:
    """Who wrote a manifest, for statistics: two fields of it, not held against its payload. Raises Rejected."""
    try:
        return _maker_decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise Rejected(Status.BAD_MANIFEST, "package_fingerprint or toolchain is of another type") from None


# ---- the whole of one


@dataclass(frozen=True, slots=True)
class Document:
    """A manifest in full: its JSON as it stands, and its payload, None where that cannot be read (`problem` says why)."""

    raw: dict[str, Any]
    payload: Payload | None
    problem: str


def read_document(data: bytes) -> Document:
    """Everything a manifest holds; raises Rejected when it is no JSON object."""
    try:
        raw = _any_decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise Rejected(Status.BAD_MANIFEST, "not a manifest: no JSON object") from None
    if not isinstance(raw, dict):
        raise Rejected(Status.BAD_MANIFEST, "not a manifest: no JSON object")
    text, copy = raw.get("cache_payload_repr"), raw.get("cache_payload")
    try:
        return Document(raw, payloads.read_text(text if isinstance(text, str) else ""), "")
    except BadPayload as error:
        problem = error.reason
    try:
        found = payloads.from_json(copy) if isinstance(copy, list) else None
    except BadPayload:
        found = None
    # An explicit payload is all literals; the others may hold objects, whose repr nothing can read back.
    return Document(raw, found, problem if found is None or found.explicit else "")


def check(listed: Manifest, document: Document) -> None:
    """Holds what a listing showed against the payload that the key was made from, in full; raises Rejected."""
    payload = document.payload
    if payload is None or document.problem:
        raise Rejected(Status.BAD_MANIFEST, document.problem or "no readable payload")
    try:
        spec = payloads.spec_of(payload, str(document.raw.get("target", "")))
    except BadPayload as error:
        raise Rejected(Status.BAD_MANIFEST, error.reason) from None
    found = payloads.device(payload.fields.get("device"))
    copies = {
        "compile_spec_json": payload.fields.get("spec_json"),
        "kernel_id": spec.kernel_id if "spec_json" in payload.fields else None,
        "compile_spec_version": spec.version if "spec_json" in payload.fields else None,
        "package_fingerprint": payload.fields.get("fingerprint"),
    }
    for name, hashed in copies.items():
        if hashed is not None and name in document.raw and document.raw[name] != hashed:
            raise Rejected(Status.BAD_MANIFEST, f"{name} is not the one that the key was made from")
    if spec.as_json() != listed.spec.as_json() and "spec_json" in payload.fields:
        raise Rejected(Status.BAD_MANIFEST, "its facts are not those that the key was made from")
    if payload.tag != listed.cache_format or (found.identity if found is not None else ()) != listed.device:
        raise Rejected(Status.BAD_MANIFEST, "its device or format is not the one that the key was made from")


_SHOWN = (
    "schema", "cache_key", "cache_format", "object_sha256", "object_bytes", "semantic_key", "target", "target_identity", "package_fingerprint",
    "toolchain", "compile_options", "launch_metadata", "artifact_evidence_sha256", "kernel_id", "compile_spec_version", "compile_spec_hash",
    "compile_spec_json", "compile_kwargs_hash", "compile_kwargs_json",
)  # fmt: skip
"""Fields that hold nothing of anybody's environment; all others are left out unless secrets are asked for."""

HIDDEN = "hidden, --show-secrets shows it"


def public(document: Document, *, show_secrets: bool) -> dict[str, Any]:
    """The manifest as a document to show: whole with `show_secrets`, else without environment values and fields that hold them."""
    raw = document.raw
    if show_secrets:
        return dict(raw)
    shown = {name: raw[name] for name in _SHOWN if name in raw}
    names = payloads.environment(document.payload) if document.payload is not None else payloads.pairs(raw.get("compile_environment"))
    shown["compile_environment"] = {name: HIDDEN if value else "" for name, value in names}
    shown["hidden_fields"] = sorted(raw.keys() - shown.keys())
    return shown


_SMEM = re.compile(r"[\x20-\x7e]{1,4096}")


def dynamic_smem(raw: dict[str, Any]) -> dict[str, int]:
    """Dynamic shared memory of each kernel's launch in bytes, the largest where there are several."""
    metadata = raw.get("launch_metadata")
    sizes = metadata.get("launch_dynamic_smem_bytes") if isinstance(metadata, dict) else None
    found = {}
    for name, values in sizes.items() if isinstance(sizes, dict) else ():
        numbers = [value for value in values if type(value) is int] if isinstance(values, list) else []
        if numbers and _SMEM.fullmatch(name):
            found[name] = max(numbers)
    return found
