"""The manifest: one exact spelling, and nothing else ever counts as one."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from mlactl.cache.key import KeyInputs, inputs_for
from mlactl.cache.manifest import BadManifest, KernelResources, Manifest, dump, parse
from mlactl.cache.toolchain import Toolchain
from mlactl.kernels.spec import CompileSpec

TOOLS = Toolchain((("nvidia-cutlass-dsl", "4.8.1"), ("nvidia-cutlass-dsl-libs-cu13", "4.8.1")), "cu13", "0.1")
INPUTS = KeyInputs(
    1, CompileSpec.of("attention.dense_mla.merge", 5, {"groups": 4, "window": False, "record": "bf16"}), "sm_120a", "x86_64", "ab" * 32, TOOLS,
    ("--gpu-arch sm_120a", "--enable-tvm-ffi"),
)  # fmt: skip
MANIFEST = Manifest(
    schema_version=1,
    key=INPUTS.key(),
    spec=INPUTS.spec,
    arch="sm_120a",
    host_arch="x86_64",
    sources_digest="ab" * 32,
    toolchain=TOOLS,
    python="3.11",
    options=INPUTS.options,
    linker="GNU ld (GNU Binutils) 2.40",
    object_sha256="01" * 32,
    object_bytes=81_320,
    code_sha256="23" * 32,
    symbol=f"mlactl_{INPUTS.key()}",
    signature="__call__(q: Tensor([n0, 8, 576], bfloat16))",
    resources=(KernelResources("kernel_0", 168, 0, 1024, None), KernelResources("kernel_1", 40, 16, 0, 98_304)),
    created="2026-11-30T12:00:00Z",
    compile_s=0.512,
)
DATA = dump(MANIFEST)


def spelled(document: dict[str, Any]) -> bytes:
    """A document in the canonical spelling, whether or not it is a manifest."""
    return msgspec.json.encode(document, order="sorted") + b"\n"


def rejected(data: bytes) -> str:
    with pytest.raises(BadManifest) as raised:
        parse(data)
    return raised.value.reason


def test_a_manifest_comes_back_as_it_was_written() -> None:
    assert parse(DATA) == MANIFEST
    assert dump(parse(DATA)) == DATA
    assert parse(DATA).key_inputs() == INPUTS
    assert parse(DATA).key_inputs().key() == MANIFEST.key


def test_the_fields_are_those_of_the_format() -> None:
    named = "schema_version key spec arch host_arch sources_digest toolchain python options linker object_sha256 object_bytes"
    assert " ".join(sorted(json.loads(DATA))) == " ".join(sorted(f"{named} code_sha256 symbol signature resources created compile_s".split()))
    assert MANIFEST.as_json() == json.loads(DATA)
    assert json.loads(DATA)["spec"] == {
        "kernel_id": "attention.dense_mla.merge",
        "version": 5,
        "facts": {"groups": 4, "window": False, "record": "bf16"},
    }


def test_facts_keep_their_types() -> None:
    assert [type(value) for _, value in parse(DATA).spec.facts] == [int, str, bool]


@given(st.binary(max_size=300))
def test_arbitrary_bytes_never_crash_and_never_count(data: bytes) -> None:
    rejected(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@given(JSON)
def test_arbitrary_json_never_counts(value: object) -> None:
    rejected(json.dumps(value).encode())


@given(st.sampled_from(sorted(json.loads(DATA))), JSON)
def test_a_field_with_another_value_never_counts(name: str, value: object) -> None:
    """Whatever stands in a field: either it makes no manifest, or it is one that spells itself back (a later `created`)."""
    data = (
        json.dumps({**json.loads(DATA), name: value}, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(errors="surrogatepass")
        + b"\n"
    )
    try:
        found = parse(data)
    except BadManifest:
        return
    assert dump(found) == data
    assert name in ("python", "linker", "object_bytes", "signature", "resources", "created", "compile_s")


@given(st.integers(0, len(DATA) - 1), st.integers(0, 255))
def test_a_changed_byte_never_counts_unless_it_is_in_a_free_field(at: int, byte: int) -> None:
    changed = DATA[:at] + bytes([byte]) + DATA[at + 1 :]
    try:
        found = parse(changed)
    except BadManifest:
        assert changed != DATA
        return
    assert dump(found) == changed
    assert found.key == MANIFEST.key
    assert found.key_inputs() == INPUTS


@given(st.integers(0, len(DATA) - 1))
def test_a_cut_manifest_never_counts(length: int) -> None:
    rejected(DATA[:length])


@pytest.mark.parametrize("name", sorted(json.loads(DATA)))
def test_every_field_is_needed_and_typed(name: str) -> None:
    document = json.loads(DATA)
    missing = {field: value for field, value in document.items() if field != name}
    assert name in rejected(spelled(missing))
    wrong_types: list[Any] = [None, True, [1], {"a": 1}, "text", 7, 7.5]
    for wrong in wrong_types:
        if type(wrong) is not type(document[name]):
            rejected(spelled({**document, name: wrong}))


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("key", "00" * 32, "symbol is not the key's"),
        ("arch", "sm_121a", "key is not the key"),
        ("arch", "sm_100a", "is not one of"),
        ("host_arch", "aarch64", "key is not the key"),
        ("sources_digest", "cd" * 32, "key is not the key"),
        ("options", ["--gpu-arch sm_120a"], "key is not the key"),
        ("schema_version", 2, "schema version 2, this release reads 1"),
        ("symbol", "mlactl_other", "symbol is not the key's"),
        ("object_sha256", "01" * 31, "64 lower-case hex digits"),
        ("object_sha256", "AB" * 32, "64 lower-case hex digits"),
        ("code_sha256", "g1" * 32, "64 lower-case hex digits"),
        ("object_bytes", 0, "out of range"),
        ("object_bytes", -1, "out of range"),
        ("object_bytes", 10**30, "out of range"),
        ("compile_s", -0.5, "out of range"),
        ("compile_s", 1, "canonical"),
        ("created", "2026-11-30 12:00:00", "not an ISO 8601 UTC time"),
        ("created", "2026-13-30T12:00:00Z", "not an ISO 8601 UTC time"),
        ("created", "2026-W05-1T00:00:00Z", "not an ISO 8601 UTC time"),
    ],
)
def test_wrong_values_are_named(name: str, value: object, reason: str) -> None:
    data = json.dumps({**json.loads(DATA), name: value}, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    assert reason in rejected(data)


def test_the_key_covers_every_nested_fact() -> None:
    document = json.loads(DATA)
    other = "00" * 32
    assert rejected(spelled({**document, "key": other, "symbol": f"mlactl_{other}"})) == "key is not the key of the fields beside it"
    for change in (("spec", "version", 6), ("spec", "kernel_id", "attention.dense_mla.forward"), ("toolchain", "flavour", "cu12")):
        changed = {**document, change[0]: {**document[change[0]], change[1]: change[2]}}
        assert rejected(spelled(changed)) == "key is not the key of the fields beside it"
    facts = {**document["spec"]["facts"], "groups": 8}
    assert rejected(spelled({**document, "spec": {**document["spec"], "facts": facts}})) == "key is not the key of the fields beside it"
    # An identity kernel relabelled as one with a real scale, the fault this cache exists for.
    relabelled = {**document["spec"]["facts"], "latent_scale_identity": 0}
    assert rejected(spelled({**document, "spec": {**document["spec"], "facts": relabelled}})) == "key is not the key of the fields beside it"


@pytest.mark.parametrize(
    "data",
    [
        DATA.replace(b'"compile_s":0.512', b'"compile_s":NaN'),
        DATA.replace(b'"compile_s":0.512', b'"compile_s":1e999'),
        DATA.replace(b'"compile_s":0.512', b'"compile_s":0.5120'),
        DATA.replace(b'"arch":"sm_120a"', b'"arch":"sm_121a","arch":"sm_120a"'),
        DATA.replace(b'"groups":4', b'"groups":8,"groups":4'),
        DATA.replace(b'"groups":4', b'"groups":4.0'),
        DATA.replace(b'"sm_120a"', b'"sm\\u005f120a"', 1),
        DATA.replace(b":", b": "),
        DATA + b"\n",
        DATA[:-1],
        b"\xef\xbb\xbf" + DATA,
        DATA[:-2] + b',"zzz":1}\n',
        DATA.decode().encode("utf-16"),
        b"[" * 200_000,
        b'{"schema_version":' + b"9" * 5000 + b"}",
    ],
    ids=lambda data: data[:40].decode(errors="replace"),
)
def test_other_spellings_are_refused(data: bytes) -> None:
    """Two readers that take different ones of two duplicate keys disagree about what an object is."""
    assert data != DATA
    rejected(data)


def test_a_newer_schema_is_said_to_be_newer() -> None:
    newer = spelled({"schema_version": 2, "entirely": "different"})
    assert rejected(newer) == "schema version 2, this release reads 1"


def test_a_key_with_text_beyond_ascii_is_the_same_when_read_back() -> None:
    spec = CompileSpec.of("test.tiny", 1, {"factor": 2, "dtype": "f32 \x7f é \U0001f600"})
    inputs = inputs_for(tiny.spec(), "sm_120a", TOOLS)
    inputs = KeyInputs(1, spec, inputs.arch, inputs.host_arch, inputs.sources_digest, TOOLS, inputs.options)
    changes = {
        "key": inputs.key(),
        "symbol": f"mlactl_{inputs.key()}",
        "spec": spec,
        "sources_digest": inputs.sources_digest,
        "host_arch": inputs.host_arch,
        "options": inputs.options,
    }
    manifest = msgspec.structs.replace(MANIFEST, **changes)
    assert parse(dump(manifest)) == manifest
