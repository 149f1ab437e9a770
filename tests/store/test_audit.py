"""The audit's verdicts: advisories by facts, era by era, and real machine code under right and wrong labels."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import scale_bodies
import stand_ins

from mlactl.cache import machine_code
from mlactl.cache.adapter import CacheAdapter, RootKind
from mlactl.cache.adapters import open_cache
from mlactl.cache.advisories import Advisories, ParameterPlace, bundled, judge, load, takes_outer_scale
from mlactl.cache.audit import Verdict, audit, restore, set_convicted_aside
from mlactl.cache.machine_code import Reading
from mlactl.cache.store import Hit, Miss, Status, Store
from mlactl.cache.verify import verify
from mlactl.errors import EnvironmentUnfit, UsageError
from mlactl.kernels import registry

DECODE, PREFILL = "attention.mla.sm120.decode", "attention.mla.sm120.prefill_mg"


@dataclass(frozen=True)
class Spec:
    kernel_id: str
    version: int
    facts: tuple[tuple[str, Any], ...]

    def label(self) -> str:
        return f"{self.kernel_id} {self.version}"

    def as_json(self) -> dict[str, Any]:
        return {"kernel_id": self.kernel_id, "version": self.version, "facts": dict(self.facts)}


@dataclass(frozen=True)
class Manifest:
    spec: Spec
    arch: str = "sm_120a"
    created: str = "2026-01-01T00:00:00Z"
    object_sha256: str = ""


@dataclass(frozen=True)
class Foreign:
    """An entry of another tool's cache."""

    manifest: Manifest | None
    key: str = "ab" * 32
    status: str = "ok"
    detail: str = ""
    root: Path = Path("/b12x")
    object_bytes: int | None = 1
    last_used: float | None = None
    residue: str = ""
    object_path: Path = Path("/b12x/ab/x.o")


class Cache:
    """A root of another tool that holds one object's bytes."""

    paths = (Path("/b12x"),)

    def __init__(self, kind: RootKind = RootKind.B12X, data: bytes = b"") -> None:
        self.kind, self.data, self.moved = kind, data, []

    def entries(self, *, on_problem: object = None) -> Sequence[Foreign]:
        return ()

    def entry(self, prefix: str) -> Foreign:
        raise AssertionError

    def examine(self, entry: Foreign, *, digests_only: bool = False) -> Foreign:
        return entry

    def verify(self, entries: Iterable[Foreign]) -> Sequence[Foreign]:
        digest = hashlib.sha256(self.data).hexdigest()
        return [entry if entry.manifest is None else replace(entry, manifest=replace(entry.manifest, object_sha256=digest)) for entry in entries]

    def in_place(self, entry: Foreign) -> Foreign:
        return replace(self.verify([entry])[0], status="ok")

    def masked(self, entry: Foreign) -> bool:
        return False

    def read_object(self, entry: Foreign) -> bytes:
        return self.data

    def set_aside(self, entries: Iterable[Foreign]) -> Sequence[str]:
        self.moved += (keys := [entry.key for entry in entries])
        return keys

    put_back = set_aside


def entry_of(kernel: str, version: int, **facts: Any) -> Foreign:
    return Foreign(Manifest(Spec(kernel, version, tuple(facts.items()))))


# ---------------------------------------------------------------------- facts, era by era

NVFP4, FP32, UE8M0 = {"model_type": 1, "scale_format": 2}, {"model_type": 1, "scale_format": 1}, {"model_type": 0, "scale_format": 0}

B12X_ERAS = {
    "decode 6, before NVFP4": (DECODE, 6, FP32, Verdict.CLEAN, ""),
    "decode 8, facts unreadable, before NVFP4": (DECODE, 8, {}, Verdict.CLEAN, ""),
    "decode 15, NVFP4": (DECODE, 15, NVFP4, Verdict.CONVICTED, "facts: scale_format=2, no latent_scale_identity"),
    "decode 17, 368 bytes": (DECODE, 17, {**NVFP4, "fp8_rope": 1}, Verdict.CONVICTED, "facts: scale_format=2, no latent_scale_identity"),
    "decode 17, fp32 scales": (DECODE, 17, {**FP32, "fp8_rope": 0}, Verdict.CLEAN, ""),
    "decode 17, model without an outer scale": (DECODE, 17, UE8M0, Verdict.CLEAN, ""),
    "decode 17, facts unreadable": (DECODE, 17, {}, Verdict.SUSPECT, "facts cannot be read, and version 17 is among >=15,<18"),
    "decode 17, facts without a scale format": (DECODE, 17, {"num_heads": 16}, Verdict.CLEAN, ""),
    "decode 18, identity": (DECODE, 18, {**NVFP4, "latent_scale_identity": 1}, Verdict.CLEAN, ""),
    "decode 18, the fact left out": (DECODE, 18, NVFP4, Verdict.CONVICTED, "facts: scale_format=2, no latent_scale_identity"),
    "decode 18, facts unreadable": (DECODE, 18, {}, Verdict.CLEAN, ""),
    "decode 19, per-token records": (DECODE, 19, {**NVFP4, "latent_scale_per_token": 1}, Verdict.CLEAN, ""),
    "decode 53, GLM next": (DECODE, 53, {"model_type": 2, "scale_format": 2}, Verdict.CLEAN, ""),
    "decode 53, planned identity": (
        DECODE,
        53,
        {**NVFP4, "latent_scale_per_token": 0, "latent_scale_identity": 1},
        Verdict.NOTICE,
        "facts: scale_format=2, latent_scale_identity=1",
    ),
    "decode 53, dynamic": (DECODE, 53, {**NVFP4, "latent_scale_identity": 0}, Verdict.CLEAN, ""),
    "prefill 1, facts unreadable": (PREFILL, 1, {}, Verdict.SUSPECT, "facts cannot be read, and version 1 is among <4"),
    "prefill 3, NVFP4": (PREFILL, 3, NVFP4, Verdict.CONVICTED, "facts: scale_format=2, no latent_scale_identity"),
    "prefill 4": (PREFILL, 4, {**NVFP4, "latent_scale_identity": 0}, Verdict.CLEAN, ""),
    "a fact of another type": (DECODE, 17, {"scale_format": True}, Verdict.CLEAN, ""),
    "a tensor fact": (DECODE, 17, {"scale_format": [2]}, Verdict.CLEAN, ""),
    "dense": ("attention.dense_mla.forward", 4, NVFP4, Verdict.CLEAN, ""),
}


@pytest.mark.parametrize("era", B12X_ERAS)
def test_b12x_facts(era: str) -> None:
    kernel, version, facts, verdict, reason = B12X_ERAS[era]
    (result,) = audit(Cache(), [entry_of(kernel, version, **facts)], bundled(), facts_only=True).results
    assert result.verdict is verdict
    assert result.reasons[-1].endswith(reason)
    expected = {Verdict.NOTICE: ["b12x-planned-path-without-scale"], Verdict.CLEAN: []}.get(verdict, ["identity-replay"])
    assert [advisory.id for advisory in result.advisories] == expected
    assert result.failing is (verdict in (Verdict.CONVICTED, Verdict.SUSPECT))


@pytest.mark.parametrize("kernel", [DECODE, PREFILL])
@pytest.mark.parametrize(
    ("record", "identity", "verdict"),
    [
        ("nvfp4_ds_mla_432", None, Verdict.CONVICTED),
        ("nvfp4_ds_mla_368", None, Verdict.CONVICTED),
        ("nvfp4_ds_mla_432", 1, Verdict.CLEAN),
        ("nvfp4_ds_mla_368_per_token", None, Verdict.CLEAN),
        ("fp8_ds_mla", None, Verdict.CLEAN),
        ("bf16", None, Verdict.CLEAN),
    ],
)
@pytest.mark.parametrize("version", [3, 17, 18])
def test_facts_of_our_own_format(kernel: str, record: str, identity: int | None, verdict: Verdict, version: int) -> None:
    """By facts: the version does not matter, ours are not b12x's."""
    facts = {"record": record} | ({"latent_scale_identity": identity} if identity is not None else {})
    (result,) = audit(Cache(RootKind.MLACTL), [entry_of(kernel, version, **facts)], bundled(), facts_only=True).results
    assert result.verdict is verdict


def test_what_has_no_manifest() -> None:
    bare = Foreign(None, status="no-manifest", detail="an object without a manifest")
    (result,) = audit(Cache(), [bare], bundled()).results
    assert result.verdict is Verdict.UNTOLD
    assert "releases before manifests load it all the same" in result.reasons[0]
    (damaged,) = audit(Cache(), [replace(bare, status="digest", detail="SHA-256 aa, expected bb")], bundled()).results
    assert (damaged.verdict, damaged.reasons) == (Verdict.DAMAGED, ("digest: SHA-256 aa, expected bb",))
    assert audit(Cache(), [replace(bare, residue="x.tmp")], bundled()).results == (), "a temporary is no entry"


def test_judging_by_one_advisory() -> None:
    """What `prune --advisory` selects by."""
    reason = judge(bundled(), ["identity-replay"], RootKind.B12X)
    assert reason(entry_of(DECODE, 17, **NVFP4)) == "identity-replay: facts: scale_format=2, no latent_scale_identity"
    assert reason(entry_of(DECODE, 17)) == "identity-replay: suspect, facts cannot be read, and version 17 is among >=15,<18"
    assert reason(entry_of(DECODE, 53, **NVFP4, latent_scale_identity=1)) is None, "another advisory's"
    assert reason(Foreign(None)) is None
    with pytest.raises(UsageError, match="no advisory 'nope', there is b12x-planned-path-without-scale, identity-replay"):
        judge(bundled(), ["nope"])


# ---------------------------------------------------------------------- machine code

BODIES = [("sm_120a", 0), ("sm_120a", 1), ("sm_121a", 1), ("sm_90a", 0)]


@pytest.fixture(scope="module")
def bodies(tmp_path_factory: pytest.TempPathFactory) -> scale_bodies.Bodies:
    return scale_bodies.Bodies(tmp_path_factory.mktemp("bodies"), BODIES)


@pytest.fixture
def cache(store: Store) -> CacheAdapter:
    return open_cache(str(store.roots.layers[0].path))


@pytest.mark.parametrize(("arch", "body"), BODIES)
@pytest.mark.parametrize("label", [0, 1])
def test_code_is_held_to_its_facts(store: Store, cache: CacheAdapter, bodies: scale_bodies.Bodies, arch: str, body: int, label: int) -> None:
    """Digest, arch, symbol and signature fit whatever the label says; only the code itself tells."""
    scale_bodies.publish(store, bodies[arch, body], arch, label)
    assert verify(store).bad == ()
    (result,) = audit(cache, cache.entries(), bundled()).results
    assert result.verdict is (Verdict.CLEAN if body == label else Verdict.CONVICTED)
    verb = "never reads" if body else "reads"
    assert result.reasons[0] == f"facts say latent_scale_identity={label}, the code {verb} latent_scale"
    assert result.code is not None
    assert (result.code.parameter, result.code.ordinal, result.code.size_bytes) == ("latent_scale", 22, 4)
    assert result.code.reading is (Reading.NOT_READ if body else Reading.READ)
    assert result.code.offset > (0x210 if arch == "sm_90a" else 0x380)
    place = f"parameter 22 (latent_scale, 4 bytes at c[0x0][{result.code.offset:#x}])"
    assert place in result.reasons[1]
    if body == 0:
        assert f"c[0x0][{result.code.offset:#x}]" in result.code.instructions[0]
        assert result.reasons[1].endswith(result.code.instructions[0])


def test_a_convicted_entry_is_set_aside_and_put_back_with_force_only(store: Store, cache: CacheAdapter, bodies: scale_bodies.Bodies) -> None:
    """The incident: identity code served launches with real scales. Set aside it is a miss; nothing is deleted."""
    poisoned = scale_bodies.publish(store, bodies["sm_120a", 1], "sm_120a", 0)
    honest = scale_bodies.publish(store, bodies["sm_120a", 1], "sm_120a", 1)
    report = audit(cache, cache.entries(), bundled())
    assert [result.entry.key for result in report.failing] == [poisoned.key]
    (moved,) = set_convicted_aside(cache, report)
    assert (moved.entry.key, moved.done, moved.reason) == (poisoned.key, True, "")
    assert isinstance(store.lookup(scale_bodies.spec_of(0), "sm_120a"), Miss)
    assert isinstance(store.lookup(scale_bodies.spec_of(1), "sm_120a"), Hit)
    assert poisoned.object_path.exists()
    again = audit(cache, cache.entries(), bundled())
    assert {(result.entry.key, result.verdict, result.quarantined) for result in again.results} == {
        (poisoned.key, Verdict.CONVICTED, True),
        (honest.key, Verdict.CLEAN, False),
    }
    assert again.failing == (), "nothing loads it any more"
    aside = cache.entry(poisoned.key)
    (refused,) = restore(cache, [aside], bundled())
    assert (refused.done, refused.reason) == (False, "the audit says convicted: facts say latent_scale_identity=0, the code never reads latent_scale")
    (not_aside,) = restore(cache, [cache.entry(honest.key)], bundled())
    assert (not_aside.done, not_aside.reason) == (False, "it is not quarantined: ok")
    (back,) = restore(cache, [aside], bundled(), force=True)
    assert back.done
    assert back.reason.startswith("in spite of convicted: ")
    assert isinstance(store.lookup(scale_bodies.spec_of(0), "sm_120a"), Hit)


def test_the_facts_of_the_incident_convict(store: Store, cache: CacheAdapter, bodies: scale_bodies.Bodies) -> None:
    """C1: a key from before the fact existed. Its parameter's place is not known for that version, its facts are enough."""
    facts = {name: value for name, value in scale_bodies.spec_of(1).facts if name != "latent_scale_identity"}
    scale_bodies.publish(store, bodies["sm_120a", 1], "sm_120a", 1, version=17, facts=facts)
    (result,) = audit(cache, cache.entries(), bundled()).results
    assert result.verdict is Verdict.CONVICTED
    assert result.code is None
    assert result.reasons == (
        "identity-replay: Identity kernels under a key that does not say so; facts: record=nvfp4_ds_mla_432, no latent_scale_identity",
    )


@pytest.mark.parametrize(
    ("ordinal", "said"),
    [(None, "which parameter latent_scale is"), (0, "is 8 bytes, expected 4"), (23, "is not there, expected 4 bytes")],
    ids=["unknown", "a pointer", "past the last"],
)
def test_a_parameter_that_is_not_where_it_should_be_acquits_nobody(
    store: Store, cache: CacheAdapter, bodies: scale_bodies.Bodies, monkeypatch: pytest.MonkeyPatch, ordinal: int | None, said: str
) -> None:
    scale_bodies.publish(store, bodies["sm_120a", 1], "sm_120a", 1)
    scalars = tuple(replace(scalar, ordinal=ordinal) if scalar.name == "latent_scale" else scalar for scalar in registry.SPARSE_DECODE.scalars)
    monkeypatch.setattr(registry, "KERNELS", {**registry.KERNELS, DECODE: replace(registry.SPARSE_DECODE, scalars=scalars)})
    (result,) = audit(cache, cache.entries(), bundled()).results
    assert result.verdict is Verdict.UNTOLD
    assert said in result.reasons[0]


def test_another_version_of_ours_is_an_open_question(store: Store, cache: CacheAdapter, bodies: scale_bodies.Bodies) -> None:
    scale_bodies.publish(store, bodies["sm_120a", 1], "sm_120a", 1, version=19)
    (result,) = audit(cache, cache.entries(), bundled()).results
    assert result.verdict is Verdict.UNTOLD
    assert result.reasons == ("facts say latent_scale_identity=1; which parameter latent_scale is in this version is not known to this release",)
    (by_facts,) = audit(cache, cache.entries(), bundled(), facts_only=True).results
    assert by_facts.verdict is Verdict.CLEAN
    assert "machine code was not read" in by_facts.reasons[0]


def test_damage_is_said_and_not_disassembled(store: Store, cache: CacheAdapter, bodies: scale_bodies.Bodies, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins.flip_bit(scale_bodies.publish(store, bodies["sm_120a", 1], "sm_120a", 0))
    monkeypatch.setattr(machine_code, "disassemble", lambda *_: pytest.fail("damaged code was disassembled"))
    (result,) = audit(cache, cache.entries(), bundled()).results
    assert result.verdict is Verdict.DAMAGED
    assert result.reasons[0].startswith("digest: SHA-256 ")
    assert result.entry.status is Status.DIGEST


FOREIGN_PLACE = ParameterPlace(
    format="b12x", kernel=DECODE, versions=">=15", name="latent_scale", fact="latent_scale_identity", ordinal=22, size_bytes=4
)


@pytest.mark.parametrize(
    ("version", "fact", "body", "verdict", "said"),
    [
        (17, None, 0, Verdict.CLEAN, "acquitted of identity-replay"),
        (17, None, 1, Verdict.CONVICTED, "the code never reads latent_scale"),
        (18, 1, 0, Verdict.CLEAN, "the code reads latent_scale; it is right for every scale that it is given"),
        (18, 1, 1, Verdict.CLEAN, "the code never reads latent_scale"),
        (18, 0, 0, Verdict.CLEAN, "the code reads latent_scale"),
        (18, 0, 1, Verdict.CONVICTED, "facts say latent_scale_identity=0, the code never reads latent_scale"),
    ],
)
def test_code_of_another_tool_convicts_and_acquits(
    bodies: scale_bodies.Bodies, version: int, fact: int | None, body: int, verdict: Verdict, said: str
) -> None:
    facts = {**NVFP4} | ({"latent_scale_identity": fact} if fact is not None else {})
    known = Advisories(bundled().advisories, (FOREIGN_PLACE,))
    cache = Cache(data=bodies["sm_120a", body])
    report = audit(cache, [entry_of(DECODE, version, **facts)], known)
    (result,) = report.results
    assert (result.verdict, result.code is not None) == (verdict, True)
    assert said in result.reasons[0]
    assert [moved.entry.key for moved in set_convicted_aside(cache, report)] == cache.moved == (["ab" * 32] if verdict is Verdict.CONVICTED else [])


def test_code_of_another_tool_whose_parameters_are_not_known() -> None:
    """Judged by facts, and said so."""
    (result,) = audit(Cache(), [entry_of(DECODE, 19, **NVFP4, latent_scale_identity=0)], bundled()).results
    assert result.verdict is Verdict.CLEAN
    assert result.reasons == (
        "facts say latent_scale_identity=0; which parameter latent_scale is in this version is not known to this release; "
        "by facts alone nothing speaks against it",
    )


def test_code_that_cannot_be_read_leaves_the_facts_verdict() -> None:
    known = Advisories(bundled().advisories, (FOREIGN_PLACE,))
    results = audit(Cache(data=b"no object"), [entry_of(DECODE, 17, **NVFP4), entry_of(DECODE, 18, **NVFP4, latent_scale_identity=0)], known).results
    assert [result.verdict for result in results] == [Verdict.CONVICTED, Verdict.UNTOLD]
    assert "its machine code cannot be read: no ELF" in results[1].reasons[0]


def test_entries_that_claim_nothing_need_no_disassembler(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    own = Cache(RootKind.MLACTL)
    assert audit(own, [], bundled()).results == ()
    (result,) = audit(own, [entry_of("attention.dense_mla.merge", 5, groups=8)], load()).results
    assert result.verdict is Verdict.CLEAN
    assert result.reasons[0].startswith("no claim to check: ")
    with pytest.raises(EnvironmentUnfit, match="nvidia-cuda-nvdisasm is not installed") as unfit:
        audit(own, [entry_of(DECODE, 18, record="bf16", latent_scale_identity=1)], bundled())
    assert unfit.value.exit_code == 3
    assert unfit.value.hint is not None
    assert unfit.value.hint.startswith("pip install 'nvidia-cuda-nvdisasm>=13'")


# ---------------------------------------------------------------------- layers


def test_what_the_writable_layer_set_aside_is_judged_in_every_layer(bodies: scale_bodies.Bodies, tmp_path: Path) -> None:
    """Both layers hold the convicted object: setting aside the one that can be is enough, and the other is still looked at."""
    below, both = Store.open(str(tmp_path / "below")), Store.open(f"{tmp_path / 'above'}:{tmp_path / 'below'}")
    poisoned = scale_bodies.publish(below, bodies["sm_120a", 1], "sm_120a", 0)
    scale_bodies.publish(both, bodies["sm_120a", 1], "sm_120a", 0)
    cache = open_cache(f"{tmp_path / 'above'}:{tmp_path / 'below'}")
    entries = cache.entries_of(poisoned.key[:12])
    assert [entry.root for entry in entries] == [tmp_path / "above", tmp_path / "below"]
    report = audit(cache, entries, bundled())
    assert len(report.failing) == 2
    moved = set_convicted_aside(cache, report)
    assert [item.done for item in moved] == [True, True]
    assert moved[1].reason.startswith(f"{tmp_path / 'below'} still has it")
    assert poisoned.manifest_path.exists()
    again = audit(cache, cache.entries_of(poisoned.key), bundled())
    assert [(result.verdict, result.quarantined) for result in again.results] == [(Verdict.CONVICTED, True)] * 2
    assert again.failing == ()
    assert isinstance(both.lookup(scale_bodies.spec_of(0), "sm_120a"), Miss)
    alone = audit(open_cache(str(tmp_path / "below")), [poisoned], bundled())
    assert len(alone.failing) == 1, "on its own the layer below still loads it"


def test_the_outer_scale_is_taken_by_static_nvfp4_records_alone() -> None:
    def takes(kind: str, kernel: str, **facts: Any) -> bool:
        return takes_outer_scale(Spec(kernel, 53, tuple(facts.items())), kind)

    assert takes("b12x", DECODE, **NVFP4)
    assert takes("b12x", PREFILL, **NVFP4, latent_scale_identity=1), "whatever the key says of the scale"
    assert takes("mlactl", DECODE, record="nvfp4_ds_mla_368")
    for refused in (FP32, UE8M0, {}, {"model_type": 2, "scale_format": 2}, {**NVFP4, "latent_scale_per_token": 1}, {"scale_format": True}):
        assert not takes("b12x", DECODE, **refused), refused
    assert not takes("b12x", "attention.dense_mla.forward", **NVFP4)
    assert not takes("mlactl", DECODE, **NVFP4), "another format's facts"
    assert not takes("mlactl", DECODE, record="nvfp4_ds_mla_432_per_token")
