"""Scale files and what has to be warm for them, in our own roots and in b12x's; coverage of profiles."""

import json
import os

import pytest
from doctor_nodes import PRO_6000, hold_to_fixes, node
from fabricated import HERE, b12x_entry, put
from scale_files import LAYERS, v1, write_json
from users import as_nobody, as_root, let_through

from mlactl.cache import toolchain as toolchains
from mlactl.cache.adapters import open_cache
from mlactl.cache.listing import collect
from mlactl.cache.store import Store
from mlactl.doctor import coverage, scale_files, situation
from mlactl.doctor.scale_files import Variants, named_files, split_variants
from mlactl.doctor.situation import gather
from mlactl.errors import CannotRun
from mlactl.kernels.registry import DENSE_MERGE, SPARSE_DECODE
from mlactl.profiles import UnknownProfile, load

DECODE = "attention.mla.sm120.decode"
GLM = "glm-5.2-tp4-dcp4"


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    hold_to_fixes(monkeypatch)
    for name in list(os.environ):
        if name.startswith(("MLACTL_", "XDG_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(toolchains, "_probe", lambda: HERE)
    monkeypatch.setattr(situation, "linker", lambda: "GNU ld 2.44")


@pytest.fixture
def root(tmp_path):
    return tmp_path / "cache"


def at(root, environ=None, **options):
    environ = {"HOME": "/nonexistent/home", "MLACTL_FROZEN": "1", **(environ or {})}
    return gather(environ, **{"cache_dir": str(root), "arches": (), "build_node": False, "node": node(PRO_6000), **options})


def sparse(identity, record="nvfp4_ds_mla_432"):
    return SPARSE_DECODE.spec(tile="heads16", output="split", q_dtype="bf16", record=record, latent_scale_identity=identity)


def told(findings):
    return [(finding.severity.value, finding.check, finding.what) for finding in findings]


def scales(tmp_path, name="scales.json", **changes):
    path = tmp_path / name
    write_json(path, v1(**changes))
    return path


def checked(situation, file=None, profiles=()):
    return list(scale_files.check(situation, file, [load(name) for name in profiles]))


# ---- which file


def test_no_file_anywhere_is_said(root):
    words = "no scale file is named by VLLM_NVFP4_MLA_SCALES_FILE, --scales or a profile"
    assert told(checked(at(root))) == [("ok", "no-scale-file", words)]


def test_a_file_named_twice_is_looked_at_once(root, tmp_path):
    path = scales(tmp_path)
    (tmp_path / "link.json").symlink_to(path)
    found = named_files(at(root, {scale_files.VARIABLE: str(tmp_path / "link.json")}), path, ())
    assert [(one.path, one.by) for one in found] == [(path, "--scales")]
    found = named_files(at(root, {scale_files.VARIABLE: str(scales(tmp_path, "other.json"))}), path, ())
    assert [one.by for one in found] == ["--scales", "VLLM_NVFP4_MLA_SCALES_FILE"]


def test_a_valid_file_says_which_variants_it_needs(root, tmp_path):
    path = scales(tmp_path)
    assert told(checked(at(root), path)) == [("ok", "scale-file", f"{path} (named by --scales): 78 layers, needs the dynamic variant")]
    # GLM has draft layers, which always run with 1.0.
    found = checked(at(root, {scale_files.VARIABLE: str(path)}), profiles=[GLM])
    words = f"{path} (named by VLLM_NVFP4_MLA_SCALES_FILE): 78 layers, needs the dynamic and identity variants"
    assert told(found)[0] == ("ok", "scale-file", words.replace("dynamic and identity", "dynamic and identity"))


def test_an_invalid_file_is_an_error_with_the_command_that_lists_its_faults(root, tmp_path):
    path = scales(tmp_path, layers=77)
    (found,) = checked(at(root), path, [GLM])
    assert (found.severity.value, found.check) == ("error", "invalid-scale-file")
    assert "77" in found.what
    assert found.what.endswith("(named by --scales)")
    faults = f"mlactl verify-scales {path} --profile {GLM} lists every fault"
    assert found.fix == f"{faults}; then name a valid file by --scales, which mlactl scales fit writes from amplitudes"


def test_a_file_that_is_not_there_or_of_a_format_that_is_not_public(root, tmp_path):
    (found,) = checked(at(root, {scale_files.VARIABLE: "/nonexistent/scales.json"}))
    assert (found.severity.value, found.check) == ("error", "unreadable-scale-file")
    assert found.what == "/nonexistent/scales.json: no such file or directory (named by VLLM_NVFP4_MLA_SCALES_FILE)"
    path = tmp_path / "v2.json"
    path.write_text(json.dumps({"format": "nvfp4_ds_mla_outer_scale_v2"}))
    (found,) = checked(at(root), path)
    assert (found.check, "nvfp4_ds_mla_outer_scale_v2" in found.what) == ("invalid-scale-file", True)


def test_doubts_about_a_file_are_a_warning(root, tmp_path):
    path = scales(tmp_path, scales=[1.0] * LAYERS, max_abs=None)
    found = checked(at(root), path)
    assert [row[:2] for row in told(found)] == [("warning", "doubtful-scale-file"), ("ok", "scale-file")]
    assert found[0].fix == f"mlactl verify-scales {path}"
    assert told(found)[1][2].endswith("needs the identity variant")


def test_profile_and_environment_must_not_name_two_files(root, tmp_path):
    mine, theirs = scales(tmp_path), scales(tmp_path, "theirs.json")
    profile = tmp_path / "own.toml"
    text = load(GLM).path.read_text().replace(f'name = "{GLM}"', 'name = "own"')
    profile.write_text(f'{text}\n[scales]\nfile = "{mine}"\n')
    found = checked(at(root, {scale_files.VARIABLE: str(theirs)}), profiles=[str(profile)])
    assert told(found)[0] == ("warning", "two-scale-files", f"VLLM_NVFP4_MLA_SCALES_FILE={theirs}, and profile own names {mine}")
    assert found[0].fix == f"mlactl verify-scales {theirs} --against {mine}"
    assert scale_files.file_for(at(root, {scale_files.VARIABLE: str(theirs)}), load(str(profile)), None) == theirs
    assert scale_files.file_for(at(root), load(str(profile)), None) == mine


def test_a_file_does_nothing_for_records_without_an_outer_scale(root, tmp_path):
    situation = at(root, {scale_files.VARIABLE: str(scales(tmp_path))})
    found = checked(situation, profiles=["kimi-k3-tp8-dcp8"])
    assert told(found)[0][:2] == ("notice", "inert-scale-file")
    assert "the fp8 records of profile kimi-k3-tp8-dcp8 have no outer scale: it does nothing there" in told(found)[0][2]
    assert scale_files.file_for(situation, load("kimi-k3-tp8-dcp8"), None) is None


# ---- identity alone


def entries_of(root):
    return collect(Store.open(str(root)))


def test_variants_are_counted_from_facts_alone(root):
    put(root, sparse(1))
    put(root, sparse(1, "nvfp4_ds_mla_368"))
    put(root, sparse(1, "fp8_ds_mla"))  # carries its own scales: has no dynamic variant
    put(root, sparse(0), arch="sm_90a")
    put(root, DENSE_MERGE.spec(groups=1, value_width=512))
    assert split_variants(entries_of(root), "mlactl") == (Variants(DECODE, 18, "sm_120a", 2, 0), Variants(DECODE, 18, "sm_90a", 0, 1))


def test_what_cannot_be_used_is_no_variant(root):
    key = put(root, sparse(0))
    put(root, sparse(1))
    (root / "v1" / key[:2] / f"{key}.so").write_bytes(b"another size than it had")
    assert split_variants(entries_of(root), "mlactl") == (Variants(DECODE, 18, "sm_120a", 1, 0),)


def test_a_root_with_identity_objects_alone_is_a_finding_for_a_file_that_needs_dynamic_ones(root, tmp_path):
    """The incident: identity code served real scales in silence, and the model got worse without an error."""
    path = scales(tmp_path)
    put(root, sparse(1))
    found = checked(at(root), path)
    words = f"only identity objects of {DECODE} for sm_120a; {path} needs dynamic ones"
    assert told(found)[1:] == [("fatal", "identity-only", words)]
    assert found[1].expected == "objects with latent_scale_identity=0"
    assert found[1].fix == f"mlactl warmup --profile NAME --arch sm_120a --scales {path}"
    assert told(checked(at(root, {"MLACTL_FROZEN": ""}), path))[1][0] == "error"
    put(root, sparse(0))
    assert [row[1] for row in told(checked(at(root), path))] == ["scale-file"]


FACTS = {"latent_scale_identity": 1, "model_type": 1, "scale_format": 2, "fp8_rope": 0, "latent_scale_per_token": 0, "num_heads": 16}


@pytest.fixture
def b12x(tmp_path):
    return tmp_path / "b12x"


def test_a_b12x_root_with_identity_entries_alone(root, b12x, tmp_path):
    path = scales(tmp_path)
    b12x_entry(b12x, DECODE, 53, FACTS)
    b12x_entry(b12x, "attention.dense_mla.forward", 4, {"width": 576})
    environ = {"B12X_COMPILE_CACHE_DIR": str(b12x), scale_files.VARIABLE: str(path)}
    ((severity, check, what),) = told(checked(at(root, environ)))[1:]
    assert (severity, check) == ("error", "b12x-identity-only")
    assert what.startswith(f"{b12x} holds only identity entries of {DECODE} 53")
    assert what.endswith(f"a server that sets {path} and runs them serves without the restore")
    assert told(checked(at(root, {"B12X_COMPILE_CACHE_DIR": str(b12x)}))) == told(checked(at(root)))


@pytest.mark.parametrize(
    "facts",
    [
        {**FACTS, "scale_format": 1},
        {**FACTS, "latent_scale_per_token": 1},
        {**FACTS, "model_type": 2},
        {**FACTS, "model_type": 3},
        {name: value for name, value in FACTS.items() if name != "latent_scale_identity"},
    ],
    ids=["fp8-records", "per-token", "model-2", "model-3", "without-the-fact"],
)
def test_b12x_entries_that_prove_nothing(root, b12x, tmp_path, facts):
    """Models 2 and 3 never had an outer scale: a node that serves one, beside a scale file, was called broken."""
    b12x_entry(b12x, DECODE, 53, facts)
    assert split_variants(open_cache(str(b12x), "b12x").entries(), "b12x") == ()
    found = checked(at(root, {"B12X_COMPILE_CACHE_DIR": str(b12x)}), scales(tmp_path))
    assert [row[1] for row in told(found)] == ["scale-file"]


def test_a_b12x_root_with_both_variants_is_fine(root, b12x, tmp_path):
    b12x_entry(b12x, DECODE, 53, FACTS)
    b12x_entry(b12x, DECODE, 53, {**FACTS, "latent_scale_identity": 0})
    found = checked(at(root, {"B12X_COMPILE_CACHE_DIR": str(b12x)}), scales(tmp_path))
    assert told(found)[1:] == [("ok", "b12x-variants", f"{b12x} holds dynamic entries of every kernel that has identity ones")]


def test_a_b12x_root_that_cannot_be_read_is_a_finding_and_no_crash(root, b12x, tmp_path, monkeypatch):
    b12x.mkdir()

    def refuse(cache_dir, kind):
        raise CannotRun(f"{cache_dir} cannot be read: Permission denied")

    monkeypatch.setattr(scale_files, "open_cache", refuse)
    found = checked(at(root, {"B12X_COMPILE_CACHE_DIR": str(b12x)}), scales(tmp_path))
    words = f"the b12x cache {b12x} could not be looked at: {b12x} cannot be read: Permission denied"
    assert told(found)[1:] == [("warning", "b12x-unreadable", words)]
    assert found[1].fix == f"run mlactl doctor in this environment as its owner, or as root; ls -ld {b12x}"


AS_OWNER = "run mlactl doctor in this environment as the owner, root (uid 0), or as root"


def b12x_told(root, b12x, file):
    return [(row.severity.value, row.check, row.what, row.fix) for row in checked(at(root, {"B12X_COMPILE_CACHE_DIR": str(b12x)}), file)[1:]]


@as_root
def test_b12x_entries_of_another_user_cannot_be_judged(root, b12x, tmp_path):
    """Their manifests are mode 0600: the file needs the dynamic variant was all that was said, and it was called fine."""
    path = scales(tmp_path)
    keys = [b12x_entry(b12x, DECODE, 53, {**FACTS, "num_heads": heads}) for heads in (16, 32)]
    for key in keys:
        (b12x / key[:2] / f"{key}.json").chmod(0o600)
    let_through(tmp_path)
    words = f"{b12x}: 2 entries could not be judged for the variants of {path}, which needs the dynamic ones: 2 unreadable (Permission denied)"
    assert as_nobody(lambda: b12x_told(root, b12x, path)) == repr([("warning", "b12x-unjudged", words, AS_OWNER)])
    assert [row[1] for row in b12x_told(root, b12x, path)] == ["b12x-identity-only"], "root reads them"
    (b12x / keys[0][:2] / f"{keys[0]}.json").chmod(0o644)
    both = as_nobody(lambda: [(row[1], "as far as it can be read" in row[2]) for row in b12x_told(root, b12x, path)])
    assert both == repr([("b12x-unjudged", False), ("b12x-identity-only", True)])


@as_root
def test_b12x_folders_that_cannot_be_entered_are_told(root, b12x, tmp_path):
    path = scales(tmp_path)
    key = b12x_entry(b12x, DECODE, 53, FACTS)
    let_through(tmp_path)
    (b12x / key[:2]).chmod(0o700)
    words = f"{b12x}: 1 folder could not be judged for the variants of {path}, which needs the dynamic ones: {b12x}/{key[:2]} (owner root (uid 0)"
    assert as_nobody(lambda: b12x_told(root, b12x, path)).startswith(f"[('warning', 'b12x-unjudged', '{words}")
    b12x.chmod(0o700)
    assert as_nobody(lambda: [row[:2] for row in b12x_told(root, b12x, path)]) == repr([("warning", "b12x-unreadable")])
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    b12x.rename(closed / "b12x")
    assert as_nobody(lambda: [row[:2] for row in b12x_told(root, closed / "b12x", path)]) == repr([("warning", "b12x-unreadable")])


@pytest.mark.parametrize("damage", ["manifest", "no-manifest", "size"])
def test_damaged_b12x_entries_cannot_be_judged(root, b12x, tmp_path, damage):
    path = scales(tmp_path)
    b12x_entry(b12x, DECODE, 53, {**FACTS, "latent_scale_identity": 0})
    b12x_entry(b12x, DECODE, 53, FACTS)
    key = b12x_entry(b12x, DECODE, 53, {**FACTS, "num_heads": 32})
    manifest = b12x / key[:2] / f"{key}.json"
    if damage == "manifest":
        manifest.write_bytes(b"{")
    elif damage == "no-manifest":
        manifest.unlink()
    else:
        (b12x / key[:2] / f"{key}.o").write_bytes(b"of another size than it had")
    ((severity, check, what, fix),) = b12x_told(root, b12x, path)
    assert (severity, check) == ("warning", "b12x-unjudged"), "and nothing calls every kernel fine"
    status = {"manifest": "bad-manifest"}.get(damage, damage)
    assert what.startswith(f"{b12x}: 1 entry could not be judged for the variants of {path}, which needs the dynamic ones: 1 {status} (")
    at_root = f"--root-kind b12x --cache-dir {b12x}"
    assert fix == f"mlactl cache audit {at_root} judges what it can, mlactl cache ls {at_root} names them"


def test_a_b12x_manifest_without_its_object_is_loaded_by_nobody(root, b12x, tmp_path):
    key = b12x_entry(b12x, DECODE, 53, FACTS)
    (b12x / key[:2] / f"{key}.o").unlink()
    assert b12x_told(root, b12x, scales(tmp_path)) == []


@as_root
def test_entries_of_our_own_that_cannot_be_read_are_told(root, tmp_path):
    path = scales(tmp_path)
    key = put(root, sparse(1))
    for folder in (root, root / "v1", root / "v1" / key[:2]):
        folder.chmod(0o755)
    (root / "v1" / key[:2] / f"{key}.json").chmod(0o600)
    let_through(tmp_path)
    words = f"{root}: 1 entry could not be judged for the variants of {path}, which needs the dynamic ones: this user may not read them"
    look = as_nobody(lambda: [(row.severity.value, row.check, row.what, row.fix) for row in checked(at(root), path)[1:]])
    assert look == repr([("warning", "unjudged", words, AS_OWNER)])


# ---- coverage


def covered(situation, *names, file=None):
    return list(coverage.check(situation, coverage.choose(situation, names), file))


def test_nothing_asked_and_nothing_warm_is_a_notice(root):
    (found,) = covered(at(root))
    assert told([found]) == [
        ("notice", "no-profile", "no profile was asked for, and the cache holds no object of a known one: coverage was not checked")
    ]
    assert found.fix == "mlactl doctor --profile NAME; mlactl profile ls"


def test_missing_objects_are_named_with_the_command_that_makes_them(root, tmp_path):
    count = len(load("ci-small").specs())
    (found,) = covered(at(root, {"MLACTL_FROZEN": ""}), "ci-small")
    assert (found.severity.value, found.check) == ("error", "missing-objects")
    assert found.what.startswith(f"profile ci-small for sm_120a: 0 of {count} objects are warm, {count} missing: attention.dense_mla.forward 5 ")
    assert found.what.endswith(f", and {count - 3} more")
    assert (found.expected, found.fix) == ("all of them, before serving", "mlactl warmup --profile ci-small --arch sm_120a")
    (found,) = covered(at(root), "ci-small")
    assert (found.severity.value, found.what.rpartition("; ")[2]) == ("fatal", "MLACTL_FROZEN=1 forbids compiling at launch")


def test_a_scale_file_decides_which_variants_are_missing(root, tmp_path):
    """As `warmup --check --scales`: this file needs no identity decoder layers, the draft layers do."""
    path, both = scales(tmp_path), len(load(GLM).specs())
    (found,) = covered(at(root), GLM, file=path)
    assert f"0 of {both} objects are warm" in found.what
    assert found.fix == f"mlactl warmup --profile {GLM} --arch sm_120a --scales {path}"
    ones = scales(tmp_path, "ones.json", scales=[1.0] * LAYERS, max_abs=None)
    (found,) = covered(at(root), GLM, file=ones)
    assert f"0 of {len(load(GLM).specs((1,)))} objects are warm" in found.what
    (found,) = covered(at(root), GLM, file=scales(tmp_path, "bad.json", layers=77))
    assert (f"0 of {both} objects" in found.what, "--scales" in found.fix) == (True, False)


def test_every_target_of_the_node_is_covered(root):
    found = covered(at(root, arches=("sm_120a", "sm_121a")), "ci-small")
    assert [finding.fix for finding in found] == [f"mlactl warmup --profile ci-small --arch {arch}" for arch in ("sm_120a", "sm_121a")]


def test_profiles_begun_are_found_by_what_is_warm(root):
    """Without a profile: those of which this node has an object; a stranger's entries choose none."""
    spec = load("ci-small").specs()[0]
    put(root, spec)
    chosen = coverage.choose(at(root), ())
    assert "ci-small" in [name for name, _ in chosen.profiles]
    assert all(spec in profile.specs() for _, profile in chosen.profiles)
    assert GLM not in [name for name, _ in chosen.profiles]
    assert coverage.choose(at(root, arches=("sm_121a",)), ()).profiles == ()
    # Nobody asked for them: none of them is complete, which is worth a warning and proves no launch impossible.
    assert {(finding.severity.value, finding.check) for finding in covered(at(root))} == {("warning", "missing-objects")}


def test_a_complete_profile_makes_those_it_shares_objects_with_a_notice(root, monkeypatch):
    """Two deployments of one model share objects: serving the one must not warn of the other for ever."""
    from mlactl.warmup.plan import MISSING, PRESENT, Item

    put(root, DENSE_MERGE.spec(groups=8, value_width=512))
    small = load("ci-small").specs()
    monkeypatch.setattr(coverage, "look_up", lambda spec, arch, store: Item(spec, arch, None, PRESENT if spec in small else MISSING, None))
    found = {finding.what.split()[1]: finding for finding in covered(at(root))}
    assert len(found) > 1
    assert found.pop("ci-small").severity.value == "ok"
    assert {(finding.severity.value, finding.check) for finding in found.values()} == {("notice", "missing-objects")}


def test_a_profile_that_is_wrong_is_a_finding_and_one_that_is_not_there_an_error(root, tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_text(load("ci-small").path.read_text().replace('name = "ci-small"', 'name = "wrong"\nodd = 1'))
    (found,) = covered(at(root), str(path))
    assert (found.severity.value, found.check) == ("error", "bad-profile")
    assert found.what.startswith(f"{path}: ")
    assert found.fix == f"mlactl profile check {path}"
    with pytest.raises(UnknownProfile):
        covered(at(root), "ci-smal")
    with pytest.raises(CannotRun):
        covered(at(root), "/nonexistent/x.toml")


def test_objects_that_would_be_refused_are_fatal(root):
    put(root, load("ci-small").specs()[0])
    root.chmod(0o770)
    found = covered(at(root, {"MLACTL_FROZEN": ""}), "ci-small")
    assert [row[:2] for row in told(found)] == [("fatal", "untrusted-objects"), ("fatal", "missing-objects")]
    assert f"1 are there and refused: {root} is not trusted" in found[0].what
    assert found[0].fix.startswith(f"chmod go-w {root}")
    assert [row[0] for row in told(covered(at(root, build_node=True), "ci-small"))] == ["error", "error"]


def test_objects_of_several_toolchains_are_told_and_not_raised(root, monkeypatch):
    from dataclasses import replace

    from mlactl.cache import store
    from mlactl.cache.store import SeveralToolchains

    def several(*_):
        raise SeveralToolchains("objects of 2 toolchains fit", hint="mlactl cache rm KEY")

    monkeypatch.setattr(store.Store, "lookup", several)
    (found,) = covered(replace(at(root), obstacle=None), "ci-small")
    assert told([found]) == [("error", "lookup-failed", "profile ci-small for sm_120a: objects of 2 toolchains fit")]
    assert found.fix == "mlactl cache rm KEY"


def test_objects_that_this_release_cannot_build(root, monkeypatch):
    from mlactl.warmup import plan

    monkeypatch.setattr(plan.registry, "not_built", lambda spec: "its code is not written")
    (found,) = covered(at(root), "ci-small")
    count = len(load("ci-small").specs())
    words = f"profile ci-small for sm_120a: {count} objects cannot be built by this release: its code is not written"
    assert told([found]) == [("warning", "not-built", words)]
    assert found.fix == "mlactl profile show ci-small"
