"""The manifest beside every object: its commit marker, and everything that a listing, a lookup or an audit needs to know.

One JSON object in one exact spelling (sorted keys, no spaces, one newline at the end). Bytes that are not spelled exactly
as `dump` would spell them are no manifest: that alone refuses duplicate keys, NaN, other number spellings and edits.
"""

from __future__ import annotations

import hashlib
import math
import re
from datetime import datetime
from typing import Literal

import msgspec

from mlactl.cache.key import KEY_FORMAT, KeyInputs, canonical_bytes, symbol_for
from mlactl.cache.toolchain import Toolchain
from mlactl.errors import MlactlError
from mlactl.kernels.spec import ARCHES, CompileSpec

SCHEMA_VERSION = 1
MAX_BYTES = 1 << 20
"""A manifest has 1 to 3 KB; what is larger than this is not read."""


MAX_OBJECT_BYTES = 1 << 30
"""Objects have about 100 KB; a size beyond this is damage, and is not read into memory to find out."""


class BadManifest(MlactlError):
    """Bytes that are not a manifest of this release; `reason` says what is wrong with them."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class KernelResources(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """What one device kernel of the object takes, read from the embedded cubin; sizes in bytes.

    `dynamic_smem_bytes` is None where the machine code does not say.
    """

    name: str
    registers: int
    frame_bytes: int
    static_smem_bytes: int
    dynamic_smem_bytes: int | None = None


class Manifest(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One entry's description; `parse` guarantees that `key` is the key of `key_inputs()`.

    `object_sha256` and `object_bytes` are of the linked object, `code_sha256` of the exported object before linking.
    `created` is ISO 8601 UTC to the second.
    """

    schema_version: int
    key: str
    spec: CompileSpec
    arch: str
    host_arch: str
    sources_digest: str
    toolchain: Toolchain
    python: str
    options: tuple[str, ...]
    linker: str
    object_sha256: str
    object_bytes: int
    code_sha256: str
    symbol: str
    signature: str
    resources: tuple[KernelResources, ...]
    created: str
    compile_s: float

    def key_inputs(self) -> KeyInputs:
        """The inputs that the key was made from."""
        return KeyInputs(KEY_FORMAT, self.spec, self.arch, self.host_arch, self.sources_digest, self.toolchain, self.options)

    def as_json(self) -> dict[str, object]:
        """The manifest as it is written, for `cache show --json`."""
        return msgspec.json.decode(dump(self), type=dict[str, object])


class _WireSpec(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    kernel_id: str
    version: int
    facts: dict[str, bool | int | str]


class _WireToolchain(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    distributions: dict[str, str]
    flavour: Literal["cu12", "cu13"]
    tvm_ffi_abi: str


class _Wire(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    # Alphabetical, so that encoding needs no sort of its own.
    arch: str
    code_sha256: str
    compile_s: float
    created: str
    host_arch: str
    key: str
    linker: str
    object_bytes: int
    object_sha256: str
    options: tuple[str, ...]
    python: str
    resources: tuple[KernelResources, ...]
    schema_version: int
    signature: str
    sources_digest: str
    spec: msgspec.Raw
    symbol: str
    toolchain: msgspec.Raw


class _WireInputs(msgspec.Struct, frozen=True, gc=False):
    # `KeyInputs.as_json`, alphabetical.
    arch: str
    format: int
    host_arch: str
    options: tuple[str, ...]
    sources_digest: str
    spec: msgspec.Raw
    toolchain: msgspec.Raw


class _SchemaOnly(msgspec.Struct):
    schema_version: int


_decoder = msgspec.json.Decoder(_Wire)
_spec_decoder = msgspec.json.Decoder(_WireSpec)
_toolchain_decoder = msgspec.json.Decoder(_WireToolchain)
_schema_decoder = msgspec.json.Decoder(_SchemaOnly)
_encoder = msgspec.json.Encoder(order="sorted")
_THREE_DIGESTS = re.compile(r"[0-9a-f]{64}( [0-9a-f]{64}){2}")
_MEMO_LIMIT = 4096
"""Distinct specs or toolchains remembered; a root has tens of them, and a hostile one must not fill memory."""
_specs: dict[bytes, CompileSpec] = {}
_toolchains: dict[bytes, Toolchain] = {}


def parse(data: bytes) -> Manifest:
    """The manifest spelled by `data`; raises BadManifest for everything else, whatever the bytes."""
    try:
        wire = _decoder.decode(data)
        spec, toolchain = _spec(wire.spec), _toolchain(wire.toolchain)
        canonical = _encoder.encode(wire) + b"\n"
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadManifest(_reason(data, error)) from None
    if wire.schema_version != SCHEMA_VERSION:
        raise BadManifest(_other_schema(wire.schema_version))
    if canonical != data or spec is None or toolchain is None:
        raise BadManifest("not in canonical form: edited, or written by something else")
    wrong = _first_wrong(wire, toolchain)
    if wrong is not None:
        raise BadManifest(wrong)
    inputs = _WireInputs(wire.arch, KEY_FORMAT, wire.host_arch, wire.options, wire.sources_digest, wire.spec, wire.toolchain)
    if hashlib.sha256(canonical_bytes(inputs)).hexdigest() != wire.key:
        raise BadManifest("key is not the key of the fields beside it")
    return Manifest(
        schema_version=wire.schema_version,
        key=wire.key,
        spec=spec,
        arch=wire.arch,
        host_arch=wire.host_arch,
        sources_digest=wire.sources_digest,
        toolchain=toolchain,
        python=wire.python,
        options=wire.options,
        linker=wire.linker,
        object_sha256=wire.object_sha256,
        object_bytes=wire.object_bytes,
        code_sha256=wire.code_sha256,
        symbol=wire.symbol,
        signature=wire.signature,
        resources=wire.resources,
        created=wire.created,
        compile_s=wire.compile_s,
    )


def dump(manifest: Manifest) -> bytes:
    """The one spelling of a manifest."""
    spec, tools = manifest.spec, manifest.toolchain
    wire = _Wire(
        arch=manifest.arch,
        code_sha256=manifest.code_sha256,
        compile_s=float(manifest.compile_s),
        created=manifest.created,
        host_arch=manifest.host_arch,
        key=manifest.key,
        linker=manifest.linker,
        object_bytes=manifest.object_bytes,
        object_sha256=manifest.object_sha256,
        options=manifest.options,
        python=manifest.python,
        resources=manifest.resources,
        schema_version=manifest.schema_version,
        signature=manifest.signature,
        sources_digest=manifest.sources_digest,
        spec=msgspec.Raw(_encoder.encode(_WireSpec(spec.kernel_id, spec.version, dict(spec.facts)))),
        symbol=manifest.symbol,
        toolchain=msgspec.Raw(_encoder.encode(_WireToolchain(dict(tools.distributions), tools.flavour, tools.tvm_ffi_abi))),  # type: ignore[arg-type]
    )
    return _encoder.encode(wire) + b"\n"


def _spec(raw: msgspec.Raw) -> CompileSpec | None:
    """The spec spelled by one fragment of a manifest, None when it is not spelled canonically.

    Thousands of manifests spell the same few specs and toolchains: each spelling is decoded and checked once.
    """
    text = bytes(raw)
    found = _specs.get(text)
    if found is None:
        wire = _spec_decoder.decode(text)
        if _encoder.encode(wire) != text:
            return None
        # Canonical form has the facts sorted by name already.
        found = CompileSpec(wire.kernel_id, wire.version, tuple(wire.facts.items()))
        if len(_specs) < _MEMO_LIMIT:
            _specs[text] = found
    return found


def _toolchain(raw: msgspec.Raw) -> Toolchain | None:
    """As `_spec`, for the toolchain."""
    text = bytes(raw)
    found = _toolchains.get(text)
    if found is None:
        wire = _toolchain_decoder.decode(text)
        if _encoder.encode(wire) != text:
            return None
        found = Toolchain(tuple(wire.distributions.items()), wire.flavour, wire.tvm_ffi_abi)
        if len(_toolchains) < _MEMO_LIMIT:
            _toolchains[text] = found
    return found


def _first_wrong(wire: _Wire, toolchain: Toolchain) -> str | None:
    if wire.arch not in ARCHES:
        return f"arch {wire.arch!r} is not one of {', '.join(ARCHES)}"
    if not _THREE_DIGESTS.fullmatch(f"{wire.object_sha256} {wire.code_sha256} {wire.sources_digest}"):
        return "object_sha256, code_sha256 or sources_digest is not 64 lower-case hex digits"
    if wire.symbol != symbol_for(wire.key):
        return "symbol is not the key's"
    if not 0 < wire.object_bytes <= MAX_OBJECT_BYTES or not math.isfinite(wire.compile_s) or wire.compile_s < 0:
        return "object_bytes or compile_s is out of range"
    if not toolchain.distributions:
        return "toolchain names no distribution"
    if not _is_time(wire.created):
        return f"created {wire.created[:40]!r} is not an ISO 8601 UTC time"
    return None


def is_sha256(text: str) -> bool:
    """Whether `text` is 64 lower-case hex digits."""
    return len(text) == 64 and not text.strip("0123456789abcdef")


def _is_time(text: str) -> bool:
    if len(text) != 20 or text[19] != "Z" or text[7] != "-" or text[10] != "T" or not text.isascii():
        return False
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


def _other_schema(version: int) -> str:
    return f"schema version {version}, this release reads {SCHEMA_VERSION}"


def _reason(data: bytes, error: Exception) -> str:
    try:
        version = _schema_decoder.decode(data).schema_version
    except (msgspec.MsgspecError, ValueError, RecursionError):
        version = SCHEMA_VERSION
    return _other_schema(version) if version != SCHEMA_VERSION else str(error)[:200]
