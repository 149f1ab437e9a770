"""Payload tuples of every tag, and texts that are none."""

import contextlib

import pytest
from b12x_files import CUDA, EXPLICIT, FACTS, KERNEL, PLAIN, SECRET, V7, Made, spec_json
from hypothesis import example, given
from hypothesis import strategies as st

from mlactl.cache.foreign.b12x import payload as payloads
from mlactl.cache.foreign.b12x.payload import UNVERSIONED, BadPayload, Spec, device, environment, read_text, spec_of


@pytest.mark.parametrize("tag", [*EXPLICIT, *PLAIN])
def test_every_tag_is_read_back_whole(tag):
    made = Made(tag=tag)
    found = read_text(made.text)
    assert (found.tag, tuple(found.fields.values())) == (tag, made.payload[1:])
    assert found.fields["fingerprint"] == made.fingerprint
    assert environment(found)[-1 if tag == PLAIN[0] else 1][1] == SECRET
    assert payloads.target_label(found.fields["target"]) == "b12x.attention.dense_mla._forward.Forward"


@pytest.mark.parametrize("tag", EXPLICIT)
def test_the_spec_of_explicit_tags(tag):
    spec = spec_of(read_text(Made(tag=tag, version=18).text))
    assert (spec.kernel_id, spec.version) == (KERNEL, 18)
    facts = dict(spec.facts)
    assert [facts[name] for name in ("dtype", "heads", "window_size")] == ["bf16", 96, None]
    assert list(facts["q"]) == list(FACTS[3][1])
    assert spec.label() == f"{KERNEL} 18 dtype=bf16 heads=96 window_size=None"


@pytest.mark.parametrize("tag", PLAIN)
def test_tags_without_a_spec_go_by_their_target(tag):
    spec = spec_of(read_text(Made(tag=tag).text))
    assert spec == Spec("b12x.attention.dense_mla._forward.Forward", UNVERSIONED, ())
    assert spec.as_json() == {"kernel_id": spec.kernel_id, "version": None, "facts": {}}


def test_a_spec_key_that_carries_its_json():
    made = Made(tag=EXPLICIT[1])
    payload = list(made.payload)
    payload[4] = ("kernel_spec_json", KERNEL, 17, "00" * 32, spec_json(version=17))
    assert spec_of(read_text(repr(tuple(payload)))).version == 17


@pytest.mark.parametrize(
    ("identity", "arch"),
    [
        (("arch", 12, 0, "NVIDIA RTX PRO 6000"), "sm_120a"),
        (("arch", "unavailable"), ""),
        (("device_uuid", "GPU-1234"), ""),
        (CUDA, "sm_120a"),
        (("cuda", (12, 1), 48), "sm_121a"),
        (("cuda", (8, 9), 128), "sm_89"),
    ],
)
@pytest.mark.parametrize("tag", [tag for tag in [*EXPLICIT, *PLAIN] if payloads.field_place(tag, "device")])
def test_the_device_is_told_by_its_first_element_whatever_the_tag(tag, identity, arch):
    """Releases changed the identity without a new tag, and back."""
    found = device(read_text(Made(tag=tag, device=identity).text).fields["device"])
    assert (found.arch, found.identity) == (arch, identity)


@pytest.mark.parametrize("other", [None, (), ("cuda",), ("cuda", (12,), 188), ("cuda", (12, 0), "188"), ("rocm", 9), ("arch", 12), 3, "cuda"])
def test_an_unknown_identity_is_none(other):
    assert device(other) is None


def test_an_option_wins_over_the_variable_and_that_over_the_device():
    known = device(CUDA)
    assert payloads.arch_of(known, ("opt-level=3",), "") == "sm_120a"
    assert payloads.arch_of(known, (), "sm_121a") == "sm_121a"
    assert payloads.arch_of(known, ("--gpu-arch sm_100a",), "sm_121a") == "sm_100a"
    assert payloads.arch_of(None, (), SECRET) == ""


def test_facts_without_names_keep_their_place():
    assert payloads.named_facts([["a", 1], 5, ["a", 2]]) == (("a", 1), ("arg1", 5), ("arg2", ["a", 2]))
    assert payloads.named_facts(["legacy", "k", 1, [["field", "rows", 8], ["field", "cols", 9]]]) == (("rows", 8), ("cols", 9))


HOSTILE = {
    "a call": "__import__('os').system('true')",
    "an attribute": "('a').upper",
    "operators": "1" + "+1" * 50_000,
    "signs": "-" * 50_000 + "1",
    "brackets": "(" * 50_000 + ")" * 50_000,
    "deep lists": "[" * 65 + "]" * 65,
    "an f-string": "f'{1}'",
    "a name": "(a, b)",
    "a set of tuples": "{(1, 2)}",
    "unhashable": "{[]: 1}",
    "a call of a tuple": "()()",
    "an odd escape": r"('\d',)",
    "a huge number": "(" + "9" * 5000 + ",)",
    "too long": "('" + "a" * payloads.MAX_TEXT_CHARS + "',)",
    "cut short": Made().text[:-5],
    "a number": "5",
    "empty": "",
    "an unknown tag": repr(("b12x_cute_compile_cache_v8_explicit_spec", 1)),
    "a field too few": repr(Made().payload[:-1]),
    "a field too many": repr((*Made().payload, 0)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_payload_is_refused_without_quoting_it(name):
    """The parser recurses: a text made for it ended the process before it was looked at."""
    with pytest.raises(BadPayload) as caught:
        read_text(HOSTILE[name])
    assert len(caught.value.reason) < 200
    assert SECRET not in caught.value.reason


@given(st.text() | st.text(alphabet="()[]{},:'\"\\-+.e0123 TrueFalsN_bx\n"))
@example("(" * 64 + ")" * 64)
@example("'\\x0'")
@example("1True")
def test_no_text_is_a_payload_by_chance(text):
    with pytest.raises(BadPayload):
        read_text(text)


LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner).map(tuple) | st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(st.tuples(*[LITERALS] * 10))
def test_any_literals_in_the_places_of_fields_come_back_or_are_refused(values):
    """Reading the fields of a payload never fails in another way than by saying so."""
    payload = (V7, *values)
    try:
        found = read_text(repr(payload))
    except BadPayload:
        return
    assert tuple(found.fields.values()) == values
    device(found.fields["device"])
    environment(found)
    payloads.target_label(found.fields["target"])
    with contextlib.suppress(BadPayload):
        spec_of(found)
