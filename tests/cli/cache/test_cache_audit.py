"""`cache audit`: convicts by machine code and by facts, sets aside, puts back; as a person and a pipe see it."""

import shlex
import sys

import pytest
import scale_bodies
import stand_ins
import tiny
from test_cache_prune import ask

from mlactl.cache import locks
from mlactl.cache.publish import compile_and_publish
from mlactl.cache.store import Status

DECODE = "attention.mla.sm120.decode"


@pytest.fixture(scope="module")
def bodies(tmp_path_factory):
    return scale_bodies.Bodies(tmp_path_factory.mktemp("bodies"), [("sm_120a", 0), ("sm_120a", 1)])


@pytest.fixture
def old(store, bodies):
    """What a release before `latent_scale_identity` would have left: NVFP4 records, and a key that does not say which code it is."""
    facts = {name: value for name, value in scale_bodies.spec_of(1).facts if name != "latent_scale_identity"}
    return scale_bodies.publish(store, bodies["sm_120a", 1], "sm_120a", 1, version=17, facts=facts)


def test_an_empty_root_is_acquitted(cache):
    done = cache.every_mode("cache", "audit", rows="entries")
    assert done["human"].stdout == "0 entries\n"
    assert done["quiet"].stdout == ""
    assert done["json"].json == {"schema_version": 1, "audited": 0, "failing": 0, "facts_only": False, "passed_over": [], "entries": []}


def test_the_incident_from_finding_to_the_right_object(cache, store, bodies):
    """Identity code under a dynamic key, and the other way round: everything that verify looks at fits, the code does not."""
    identity = scale_bodies.publish(store, bodies["sm_120a", 1], "sm_120a", 0)
    dynamic = scale_bodies.publish(store, bodies["sm_120a", 0], "sm_120a", 1)
    assert cache("cache", "verify").stdout == "2 entries, all ok\n"
    done = cache("cache", "audit", "--jobs", "2")
    assert done.code == 1
    lines = done.lines
    at = lines.index(f"{identity.key[:12]} convicted {identity.manifest.spec.label()} for sm_120a")
    assert lines[at + 1] == "  facts say latent_scale_identity=0, the code never reads latent_scale"
    assert "…: parameter 22 (latent_scale, 4 bytes at c[0x0][0x" in lines[at + 2]
    assert ": not read, 0 of " in lines[at + 2]
    assert lines[at + 3] == f"  {identity.object_path}"
    at = lines.index(f"{dynamic.key[:12]} convicted {dynamic.manifest.spec.label()} for sm_120a")
    assert lines[at + 1] == "  facts say latent_scale_identity=1, the code reads latent_scale"
    assert ": /*" in lines[at + 2], "the instruction that reads it"
    assert "c[0x0][" in lines[at + 2].rpartition("*/")[2]
    assert lines[-1] == "2 entries audited: 2 convicted; machine code of 2 entries read"
    named = " ".join(sorted((identity.key[:12], dynamic.key[:12]), key=[line[:12] for line in lines].index))
    assert done.stderr.endswith(f"hint: mlactl cache audit {named} --quarantine sets them aside\n")

    refused = cache("cache", "audit", "--quarantine")
    assert (refused.code, refused.stdout) == (2, "")
    assert "setting entries aside needs a yes" in refused.stderr
    assert {entry.status for entry in store.entries()} == {Status.OK}

    row = cache("cache", "audit", identity.key, "--quarantine", "--yes", "--json")
    assert row.code == 1
    (item,) = row.json["entries"]
    assert (item["verdict"], item["quarantine"]) == ("convicted", {"done": True, "reason": None})
    assert (item["code"]["ordinal"], item["code"]["reading"], item["code"]["instructions"]) == (22, "not read", [])
    cache("cache", "audit", dynamic.key, "--quarantine", "--yes")
    assert [row["status"] for row in cache("cache", "ls", "--json").json["entries"]] == ["quarantined"] * 2
    again = cache("cache", "audit")
    assert (again.code, again.lines[-1].partition(";")[0]) == (0, "2 entries audited: 2 convicted and quarantined"), "nothing loads them"

    shown = cache("cache", "show", identity.key)
    assert shown.code == 0
    assert "why            convicted\n" in shown.stdout
    assert "               facts say latent_scale_identity=0, the code never reads latent_scale\n" in shown.stdout
    short = identity.key[:12]
    assert shown.stderr == (
        "hint: mlactl warmup --profile NAME compiles what was set aside again, and refuses the very object that was; "
        f"mlactl cache audit {short} --restore puts it back if it is acquitted; mlactl cache rm {short} forgets it\n"
    )

    left = cache("cache", "audit", identity.key, "--restore")
    assert left.code == 1
    assert left.lines[0].startswith(f"{identity.key[:12]} left as it is: the audit says convicted: facts say")
    assert f"mlactl cache audit {identity.key[:12]} --restore --force puts an intact one back all the same" in left.stderr
    forced = cache("cache", "audit", identity.key, "--restore", "--force", "--json")
    assert (forced.code, forced.json["entries"][0]["restored"]) == (0, True)
    assert f"warning: {identity.key} was put back in spite of convicted: facts say" in forced.stderr
    assert cache("cache", "audit", identity.key, "--quarantine", "--yes").code == 1

    def compiler(spec, arch, symbol, flavour, out):
        out.write_bytes(bodies["sm_120a", 0].replace(scale_bodies.PLACEHOLDER.encode(), symbol.removeprefix("mlactl_").encode()))

    made = compile_and_publish(store, scale_bodies.spec_of(0), "sm_120a", compiler=compiler)
    assert (made.compiled, made.entry.key) == (True, identity.key)
    mended = cache("cache", "audit", identity.key)
    assert (mended.code, mended.lines[-1]) == (0, "1 entry audited: 1 clean; machine code of 1 entry read")
    assert "  facts say latent_scale_identity=0, the code reads latent_scale" in mended.lines


def test_facts_of_an_older_key_in_every_mode(cache, old):
    done = cache.every_mode("cache", "audit", rows="entries", code=1)
    assert done["human"].lines == [
        f"{old.key[:12]} convicted {DECODE} 17 output=split q_dtype=bf16 record=nvfp4_ds_mla_432 tile=heads16 for sm_120a",
        "  identity-replay: Identity kernels under a key that does not say so; facts: record=nvfp4_ds_mla_432, no latent_scale_identity",
        f"  {old.object_path}",
        "identity-replay: Identity kernels under a key that does not say so",
        "  what goes wrong: launches with a real latent scale get the identity kernel: outputs have the right direction and the wrong size, "
        "and nothing fails",
        "  what to do: quarantine or remove the entry and warm up again with a release whose keys carry latent_scale_identity "
        "(b12x: decode 18, prefill_mg 4)",
        "1 entry audited: 1 convicted; machine code of 0 entries read",
    ]
    assert done["quiet"].lines == [old.key]
    (row,) = done["json"].json["entries"]
    assert (row["verdict"], row["advisories"], row["code"], row["quarantined"]) == ("convicted", ["identity-replay"], None, False)
    assert (done["json"].json["audited"], done["json"].json["failing"]) == (1, 1)


def test_prune_removes_what_an_advisory_hits(cache, filled, old):
    planned = cache("cache", "prune", "--advisory", "identity-replay", "--dry-run", "--json").json
    assert [(entry["key"], entry["reason"]) for entry in planned["entries"]] == [
        (old.key, "identity-replay: facts: record=nvfp4_ds_mla_432, no latent_scale_identity")
    ]
    assert planned["selection"] == ["--advisory identity-replay"]
    unknown = cache("cache", "prune", "--advisory", "nope", "--dry-run")
    assert unknown.code == 2
    assert "no advisory 'nope', there is b12x-planned-path-without-scale, identity-replay" in unknown.stderr
    removed = cache("cache", "prune", "--advisory", "identity-replay", "--yes")
    assert (removed.code, old.object_path.exists()) == (0, False)
    assert all(entry.object_path.exists() for entry in filled.all)


LOCAL = """
schema_version = 1
[[advisory]]
id = "local-tiny"
title = "Factor 3 is wrong here"
severity = "conviction"
consequence = "outputs are three times too large"
remedy = "remove it"
[[advisory.case]]
format = "mlactl"
kernels = ["test.tiny"]
where = { factor = [3] }
"""


def test_advisories_of_ones_own_and_filters(cache, filled, tmp_path):
    clean = cache("cache", "audit")
    assert (clean.code, clean.lines) == (0, ["6 entries audited: 6 clean; machine code of 0 entries read"])
    file = tmp_path / "local.toml"
    file.write_text(LOCAL)
    done = cache("cache", "audit", "--advisories", file, "--facts-only", "--json")
    assert done.code == 1
    expected = {entry.key for entry in filled.all if entry.manifest.spec.fact("factor") == 3}
    assert {row["key"] for row in done.json["entries"] if row["verdict"] == "convicted"} == expected
    assert done.json["facts_only"] is True
    arch = cache("cache", "audit", "--advisories", file, "--arch", "sm_121a", "--kernel", "test.tiny")
    assert (arch.code, arch.lines[-1].partition(";")[0]) == (0, "1 entry audited: 1 clean")
    assert cache("cache", "audit", "--kernel", "attention.dense_mla").stdout == "0 entries\n"
    file.write_text(LOCAL.replace("factor = [3]", "factor = 3"))
    bad = cache("cache", "audit", "--advisories", file)
    assert (bad.code, bad.stdout) == (2, "")
    assert f"error: {file}: advisory[0].case[0].where[...]: Expected `array`, got `int`\nhint: docs/audit.md describes the format\n" in bad.stderr
    file.write_text(LOCAL)
    with locks.entry_lock(filled.superseded.layer, filled.superseded.key, exclusive=False, wait_s=0):
        held = cache("cache", "audit", "--advisories", file, "--quarantine", "--yes")
    assert held.code == 1
    assert (
        f"{filled.superseded.key[:12]} left in place: {locks.entry_lock_path(filled.superseded.layer, filled.superseded.key)} is in use by"
        in held.stdout
    )
    assert f"{len(expected) - 1} of {len(expected)} entries set aside\n" in held.stdout


def test_damage_is_reported_with_its_status(cache, filled):
    stand_ins.flip_bit(filled.current)
    filled.newer.manifest_path.unlink()
    stand_ins.leave_temporary(filled.newer)
    done = cache("cache", "audit")
    assert done.code == 1
    assert f"{filled.current.key[:12]} damaged {filled.current.manifest.spec.label()} for sm_120a\n  digest: SHA-256 " in done.stdout
    assert f"{filled.newer.key[:12]} damaged\n  no-manifest: an object that was never committed" in done.stdout
    assert "\n6 entries audited: 4 clean, 2 damaged; machine code" in done.stdout
    assert done.stderr.endswith("hint: mlactl cache verify --repair rebuilds damaged entries that this install can build\n")


NO_WHEEL = f"""
import importlib.metadata, sys
sys.path.insert(0, {str(tiny.HERE)!r}); import tiny; tiny.register()
real = importlib.metadata.files
def files(name):
    if name == "nvidia-cuda-nvdisasm":
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)
importlib.metadata.files = files
from mlactl.cli.app import main
sys.exit(main())
"""


def test_without_nvdisasm(cache, store, bodies):
    """Exit 3 naming the wheel where machine code is to be read; by facts alone all the same; `show` says what it can."""
    entry = scale_bodies.publish(store, bodies["sm_120a", 1], "sm_120a", 1)
    cache.launch = (sys.executable, "-c", NO_WHEEL)
    done = cache("cache", "audit")
    assert (done.code, done.stdout) == (3, "")
    assert "error: no nvdisasm to read machine code with: nvidia-cuda-nvdisasm is not installed\n" in done.stderr
    assert "hint: pip install 'nvidia-cuda-nvdisasm>=13', or audit by facts alone: mlactl cache audit --facts-only\n" in done.stderr
    facts = cache("cache", "audit", "--facts-only")
    assert (facts.code, facts.lines) == (0, ["1 entry audited: 1 clean, by facts alone"])
    stand_ins.quarantine(entry)
    why = cache("cache", "show", entry.key, "--json").json["why_quarantined"]
    assert why[0] == "clean by facts alone, no nvdisasm to read machine code with: nvidia-cuda-nvdisasm is not installed"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--restore",), "--restore without a KEY"),
        (("ab", "--restore", "--quarantine"), "--restore and --quarantine were both given"),
        (("ab", "--restore", "--facts-only"), "--restore and --facts-only were both given"),
        (("--force",), "--force goes with --restore"),
        (("--arch", "sm_100a"), "--arch sm_100a is not supported"),
        (("--jobs", "0"), "0 is not in the range"),
    ],
)
def test_what_makes_no_sense_is_refused(cache, words, said):
    done = cache("cache", "audit", *words)
    assert (done.code, done.stdout) == (2, "")
    assert said in done.stderr


def test_a_key_that_is_not_there(cache, filled):
    done = cache("cache", "audit", "feedc0de")
    assert done.code == 1
    assert "no entry feedc0de" in done.stderr


def test_it_asks_on_a_terminal(cache, store, old):
    """What it would set aside is shown before the question."""
    code, shown = ask(cache, b"n\n", "audit", "--quarantine")
    assert code == 1
    assert f"quarantine 1 entry in {cache.cache_dir}? [y/N]" in shown
    assert shown.index("identity-replay: ") < shown.index("[y/N]")
    assert "stopped, nothing was changed" in shown
    assert [entry.status for entry in store.entries()] == [Status.OK]
    code, shown = ask(cache, b"y\n", "audit", "--quarantine")
    assert (code, f"{old.key[:12]} set aside" in shown) == (1, True)
    assert [entry.status for entry in store.entries()] == [Status.QUARANTINED]


def test_it_needs_neither_the_compiler_nor_torch(cache, old):
    probe = (
        "import atexit, sys; atexit.register(lambda: sys.stderr.write(' '.join(sorted(sys.modules.keys() & {'torch', 'cutlass', 'numpy', 'rich'}))))"
    )
    cache.launch = (sys.executable, "-c", f"{probe}\n{cache.launch[2]}")
    done = cache("cache", "audit", "--json")
    assert (done.code, done.stderr) == (1, "")
    assert old.object_path.exists()


def test_a_quarantine_hint_convicts_the_same_entries(cache, filled, tmp_path):
    """It dropped the file and the option without which nothing is convicted, and of many keys printed a literal ellipsis."""
    file = tmp_path / "my local.toml"
    file.write_text(LOCAL)
    few = cache("cache", "audit", "--advisories", file, "--facts-only")
    hint = next(line for line in few.stderr.splitlines() if line.startswith("hint: mlactl cache audit"))
    words = shlex.split(hint.removeprefix("hint: mlactl ").removesuffix(" sets them aside"))
    assert (words[-4:-1], words[-1]) == (["--advisories", str(file), "--facts-only"], "--quarantine")
    done = cache(*words, "--yes", "--json")
    assert [row["quarantine"]["done"] for row in done.json["entries"]] == [True, True]

    key = filled.superseded.key
    shown = cache("cache", "show", key)
    assert "nothing this release knows speaks against it: what it was set aside for is not recorded" in shown.stdout
    kept = cache("cache", "audit", key, "--restore", "--advisories", file)
    assert (kept.code, f"--restore --force --advisories '{file}'" in kept.stderr) == (1, True)
    back = cache("cache", "audit", key, "--restore")
    assert (back.code, f"warning: {key} was put back; nothing this release knows speaks against it" in back.stderr) == (0, True)


def test_a_hint_for_many_keys_works_as_printed(cache, filled, tmp_path):
    file = tmp_path / "local.toml"
    file.write_text(LOCAL.replace("factor = [3]", "factor = [2, 3, 5, 7]"))
    many = cache("cache", "audit", "--advisories", file, "--facts-only", "--kernel", "test")
    assert f"hint: mlactl cache audit --kernel test --advisories {file} --facts-only --quarantine sets them aside\n" in many.stderr


def test_damage_that_a_rebuild_cannot_mend_is_not_sent_there(cache, filled):
    filled.current.object_path.chmod(0o666)
    filled.newer.manifest_path.write_bytes(b"{}")
    done = cache("cache", "audit", filled.current.key, filled.newer.key)
    assert f"hint: chmod go-w {filled.current.object_path}" in done.stderr
    assert f"hint: mlactl cache rm {filled.newer.key[:12]} removes by key\n" in done.stderr
    assert "--repair" not in done.stderr
