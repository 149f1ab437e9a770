"""Why a lookup hits or misses: exactly the fields that differ, and no others."""

from dataclasses import replace

import pytest
import stand_ins
import tiny

from mlactl.cache import key as keys
from mlactl.cache.why import Difference, explain_entry, explain_specs
from mlactl.kernels import registry
from mlactl.kernels.registry import Bump, Fact


def fields(explanation):
    return [difference.field for difference in explanation.differences]


def test_the_same_key_is_a_hit(store, publish):
    entry = publish(tiny.spec(2))
    found = explain_entry(store, entry)
    assert (found.hit, found.key, found.differences, found.reason) == (True, entry.key, (), "a lookup here finds this entry")
    (by_spec,) = explain_specs(store, [tiny.spec(2)], ["sm_120a"])
    assert (by_spec.hit, by_spec.key, by_spec.entry.key) == (True, entry.key, entry.key)


def test_other_sources_and_toolchain_are_the_fields_named(store, prebuilt):
    here = keys.inputs_for(tiny.spec(2), "sm_120a")
    entry = stand_ins.publish(store, prebuilt, tiny.spec(2), sources_digest="ab" * 32, toolchain=stand_ins.older_toolchain())
    found = explain_entry(store, entry)
    assert not found.hit
    assert found.key == here.key()
    names = [name for name, _ in here.toolchain.distributions]
    assert sorted(fields(found)) == sorted(["sources_digest", *(f"toolchain.distributions.{name}" for name in names)])
    assert found.differences[0] == Difference("sources_digest", "ab" * 32, here.sources_digest)
    version = next(item for item in found.differences if item.field == "toolchain.distributions.nvidia-cutlass-dsl")
    assert (version.entry, version.here) == ("4.7.0", dict(here.toolchain.distributions)["nvidia-cutlass-dsl"])


def test_a_superseded_version_says_why_it_was_raised(store, prebuilt, monkeypatch):
    newer = replace(
        tiny.TINY,
        version=3,
        history=(Bump(1, "first"), Bump(2, "doubles in place"), Bump(3, "identity became a fact")),
        facts=(*tiny.TINY.facts, Fact("identity", int, "no multiply in the code", (0, 1))),
    )
    entry = stand_ins.publish(store, prebuilt, tiny.spec(2))
    monkeypatch.setattr(registry, "KERNELS", {**registry.KERNELS, "test.tiny": newer})
    found = explain_entry(store, entry)
    assert not found.hit
    assert found.differences == (Difference("spec.version", 1, 3), Difference("spec.facts.identity", None, "one of [0, 1]"))
    assert found.notes == ("version 2: doubles in place", "version 3: identity became a fact")
    assert found.reason == "this machine builds with another spec.version, spec.facts.identity"


def test_a_kernel_this_release_does_not_know(store, prebuilt, monkeypatch):
    entry = stand_ins.publish(store, prebuilt, tiny.spec(2))
    monkeypatch.setattr(registry, "KERNELS", {name: kernel for name, kernel in registry.KERNELS.items() if name != "test.tiny"})
    found = explain_entry(store, entry)
    assert (found.hit, fields(found)) == (False, ["spec.kernel_id"])
    assert "unknown kernel id 'test.tiny'" in found.notes[0]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (stand_ins.flip_bit, "same key, but status digest: SHA-256"),
        (lambda entry: entry.object_path.unlink(), "same key, but status no-object"),
        (stand_ins.quarantine, "same key, but status quarantined"),
        (lambda entry: entry.manifest_path.write_bytes(b"{}"), "status bad-manifest: "),
        (lambda entry: entry.manifest_path.unlink(), "status no-manifest: "),
    ],
)
def test_damage_is_why_the_same_key_misses(store, publish, damage, words):
    entry = publish(tiny.spec(2))
    damage(entry)
    found = explain_entry(store, store.entry(entry.key))
    assert not found.hit
    assert found.reason.startswith(words)
    assert found.differences == ()
    (by_spec,) = explain_specs(store, [tiny.spec(2)], ["sm_120a"])
    assert (by_spec.hit, by_spec.key) == (False, entry.key)


def test_a_miss_shows_the_nearest_entry(store, prebuilt):
    """Of several entries the one whose code differs least is shown, not whichever came first."""
    far = stand_ins.publish(store, prebuilt, tiny.spec(3), sources_digest="ab" * 32)
    near = stand_ins.publish(store, prebuilt, tiny.spec(2), sources_digest="cd" * 32)
    found, other = explain_specs(store, [tiny.spec(2), tiny.spec(7)], ["sm_120a"])
    assert (found.hit, found.entry.key, fields(found)) == (False, near.key, ["sources_digest"])
    assert found.key == keys.inputs_for(tiny.spec(2), "sm_120a").key()
    assert other.entry.key in (far.key, near.key)
    assert fields(other) == ["spec.facts.factor", "sources_digest"]


def test_another_arch_is_no_near_miss(store, publish):
    """C11: an sm_120a-only cache asked for sm_121a has nothing to fall back on."""
    publish(tiny.spec(2), "sm_120a")
    (found,) = explain_specs(store, [tiny.spec(2)], ["sm_121a"])
    assert (found.hit, found.entry, found.reason) == (False, None, "no test.tiny for sm_121a in the cache")


def test_without_a_compiler_the_toolchain_is_not_compared(store, publish, prebuilt, monkeypatch):
    hit = publish(tiny.spec(2))
    other = stand_ins.publish(store, prebuilt, tiny.spec(3), sources_digest="ab" * 32)
    monkeypatch.setattr("mlactl.cache.toolchain._probe", lambda: "nvidia-cutlass-dsl is not installed")
    assert explain_entry(store, hit).hit
    found = explain_entry(store, other)
    assert fields(found) == ["sources_digest"]
    assert found.notes == ("toolchain not compared: nvidia-cutlass-dsl is not installed",)
    assert [item.hit for item in explain_specs(store, [tiny.spec(2), tiny.spec(3)], ["sm_120a"])] == [True, False]


def test_files_that_cannot_be_trusted_are_why(store, publish):
    entry = publish(tiny.spec(2))
    entry.object_path.chmod(0o666)
    found = explain_entry(store, entry)
    assert not found.hit
    assert "not trusted" in found.reason
    (by_spec,) = explain_specs(store, [tiny.spec(2)], ["sm_120a"])
    assert not by_spec.hit
    assert "not trusted" in by_spec.reason


def test_a_layer_above_answers_first(store, publish, prebuilt, tmp_path):
    entry = publish(tiny.spec(2))
    upper = type(store).open(f"{tmp_path / 'upper'}:{store.roots.writable.path}")
    stand_ins.publish(upper, prebuilt, tiny.spec(2))
    found = explain_entry(upper, upper.entry(entry.key, [upper.roots.layers[1]]))
    assert found.hit
    assert found.reason == f"the same entry of {tmp_path / 'upper'} answers first"
