"""Profiles: the numbers of the shipped ones, what a file may hold, and where files are looked for."""

import itertools
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import tomli
from hypothesis import given
from hypothesis import strategies as st

from mlactl import profiles
from mlactl.errors import CannotRun
from mlactl.kernels.envelope import DenseEnvelope, SparseEnvelope, enumerate_specs
from mlactl.kernels.registry import DENSE_FORWARD
from mlactl.profiles import BadProfile, UnknownProfile, examine, load

DENSE = """
name = "mine"
[model]
heads = 64
latent_dim = 512
rope_dim = 64
[parallel]
tp = 4
dcp = 2
interleave = 16
[kv]
record = "bf16"
page_size = 64
kv_dtype = "bf16"
q_dtype = "bf16"
[serving]
modes = ["decode"]
max_context = 100000
"""

SPARSE = """
name = "mine"
[model]
heads = 64
layers = 78
latent_dim = 512
rope_dim = 64
draft_layers = 1
[parallel]
tp = 4
[kv]
record = "nvfp4_ds_mla_368"
page_size = 64
kv_dtype = "uint8"
q_dtype = "bf16"
[serving]
modes = ["decode", "prefill"]
top_k = 2048
"""


@pytest.fixture(autouse=True)
def _no_profiles_of_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(profiles, "MACHINE", tmp_path / "machine")


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def findings(tmp_path, text):
    return [finding.text() for finding in examine(write(tmp_path / "mine.toml", text))[1]]


@pytest.mark.parametrize(
    ("name", "local", "seen", "shard", "record", "page", "modes", "drafts"),
    [
        ("ci-small", 8, 8, 4096, "bf16", 64, ("decode", "verify", "extend"), (3,)),
        ("glm-5.2-tp4-dcp4", 16, 64, 262144, "nvfp4_ds_mla_432", 64, ("decode", "verify", "prefill"), (2, 3)),
        ("glm-5.2-tp8", 8, 8, None, "fp8_ds_mla", 64, ("decode", "verify", "prefill"), (3,)),
        ("kimi-k3-tp16-dcp16", 6, 96, None, "fp8", 1536, ("decode", "verify", "extend"), (1, 2, 3, 4, 5, 6, 7)),
        ("kimi-k3-tp8-dcp8", 12, 96, 131072, "fp8", 1536, ("decode", "verify", "extend"), (1, 2, 3, 4, 5, 6, 7)),
        ("kimi-k3-tp8-dcp8-bf16", 12, 96, 131072, "bf16", 1536, ("decode", "verify", "extend"), (1, 2, 3, 4, 5, 6, 7)),
    ],
)
def test_shipped_profiles(name, local, seen, shard, record, page, modes, drafts):
    """Heads a rank, heads after the DCP gather and shard lengths, as deployments report them."""
    profile = load(name)
    assert (profile.name, profile.local_heads, profile.kernel_heads, profile.local_shard_tokens) == (name, local, seen, shard)
    assert (profile.kv.record, profile.kv.page_size, profile.serving.modes, profile.serving.draft_rows) == (record, page, modes, drafts)


def test_every_shipped_profile_is_tested_above():
    mark = next(mark for mark in test_shipped_profiles.pytestmark if mark.name == "parametrize")
    assert tuple(sorted(case[0] for case in mark.args[1])) == profiles.names()


DENSE_PROFILES = ("ci-small", "kimi-k3-tp16-dcp16", "kimi-k3-tp8-dcp8", "kimi-k3-tp8-dcp8-bf16")


@pytest.mark.parametrize("name", DENSE_PROFILES)
def test_envelopes_stay_small(name):
    """All batch sizes, lengths and page sizes of decode take at most 5 objects; decode, verify of every draft depth and extend,
    exact and sparse, causal and per-query, at most 10."""
    profile = load(name)
    (envelope,) = profile.envelopes()
    assert 1 <= len(enumerate_specs(replace(envelope, modes=("decode",)))) <= 5
    assert len(profile.specs()) <= 10


@pytest.mark.parametrize("name", DENSE_PROFILES)
def test_complete_profiles_need_only_kernels_of_this_release(name):
    assert load(name).unbuilt() == ()


@pytest.mark.parametrize("name", DENSE_PROFILES[1:])
def test_kimi_profiles_hold_exact_and_sparse_causal_and_per_query(name):
    forwards = [dict(spec.facts) for spec in load(name).specs() if spec.kernel_id == DENSE_FORWARD.kernel_id]
    assert {(facts["lengths"], facts["selection"]) for facts in forwards} == set(itertools.product(("causal", "per_query"), ("exact", "sparse")))


def test_an_e4m3_query_over_bf16_pages_is_a_misfit(tmp_path):
    text = DENSE.replace('q_dtype = "bf16"', 'q_dtype = "e4m3"')
    assert findings(tmp_path, text) == ["kv.q_dtype: 'e4m3' queries are taken over fp8 records, kv.record is 'bf16'"]


def test_a_mode_whose_kernel_comes_later_is_named():
    missing = load("glm-5.2-tp4-dcp4").unbuilt()
    for spec, reason in missing:
        assert reason.startswith("not built yet")
        assert spec in load("glm-5.2-tp4-dcp4").specs()


def test_envelope_of_a_dense_profile(tmp_path):
    text = DENSE.replace('modes = ["decode"]', 'modes = ["decode", "verify"]\ndraft_rows = [3, 7]')
    (envelope,) = load(str(write(tmp_path / "mine.toml", text))).envelopes()
    assert envelope == DenseEnvelope(
        modes=("decode", "verify"),
        heads=32,
        verify_rows=(4, 8),
        record="bf16",
        q_dtype="bf16",
        width=576,
        per_query=True,
        window=False,
        sparse=False,
    )


def test_rows_carry_their_own_lengths_only_on_a_shard(tmp_path):
    (sharded,) = load(str(write(tmp_path / "mine.toml", DENSE))).envelopes()
    (whole,) = load(str(write(tmp_path / "mine.toml", DENSE.replace("dcp = 2", "dcp = 1")))).envelopes()
    assert (sharded.per_query, whole.per_query) == (True, False)
    assert (sharded.heads, whole.heads) == (32, 16)


@pytest.mark.parametrize(("stride", "expected"), [(1, False), (3, True)])
def test_sparse_selection_is_in_the_envelope_only_when_it_can_skip_something(tmp_path, stride, expected):
    text = f"{DENSE}\n[serving.sparse_policy]\nstride = {stride}\nsink_chunks = 1\nrecent_chunks = 2\nmin_tokens = 4096\n"
    profile = load(str(write(tmp_path / "mine.toml", text)))
    assert profile.serving.sparse_policy == profiles.SparsePolicy(stride, 1, 2, 4096, 0)
    assert profile.envelopes()[0].sparse is expected


def test_static_nvfp4_records_need_both_latent_scale_variants(tmp_path):
    """Draft layers run with 1.0 whatever the scale file says; warmed without their variant they compiled while serving."""
    profile = load(str(write(tmp_path / "mine.toml", SPARSE)))
    assert profile.envelopes() == (SparseEnvelope(("decode", "prefill"), 16, "nvfp4_ds_mla_368", "bf16", (0, 1)),)
    assert {spec.fact("latent_scale_identity") for spec in profile.specs() if "mla.sm120" in spec.kernel_id} == {0, 1}
    assert {spec.fact("latent_scale_identity") for spec in profile.specs((0,)) if "mla.sm120" in spec.kernel_id} == {0}
    for record in ("fp8_ds_mla", "nvfp4_ds_mla_368_per_token"):
        other = load(str(write(tmp_path / "mine.toml", SPARSE.replace("nvfp4_ds_mla_368", record))))
        assert other.envelopes()[0].identities == (1,)


@pytest.mark.parametrize(
    ("max_context", "dcp", "interleave", "expected"),
    [(1_048_576, 8, 1, 131_072), (9, 2, 1, 5), (100, 2, 16, 64), (97, 2, 16, 64), (96, 2, 16, 48), (1, 4, 16, 16)],
)
def test_shard_tokens_round_up_to_whole_interleaves(tmp_path, max_context, dcp, interleave, expected):
    text = DENSE.replace("max_context = 100000", f"max_context = {max_context}").replace("tp = 4", "tp = 8")
    text = text.replace("dcp = 2", f"dcp = {dcp}").replace("interleave = 16", f"interleave = {interleave}")
    profile = load(str(write(tmp_path / "mine.toml", text)))
    assert profile.local_shard_tokens == expected
    # The formula, against counting: rank r holds token t when (t // interleave) % dcp == r.
    assert expected >= max(sum((t // interleave) % dcp == rank for t in range(min(max_context, 200))) for rank in range(dcp))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("tp = 4", "tp = 3", "model.heads: 64 heads do not divide over parallel.tp = 3 ranks"),
        ("dcp = 2", "dcp = 3", "parallel.dcp: groups of 3 do not divide parallel.tp = 4 ranks"),
        ("page_size = 64", "page_size = 40", "kv.page_size: 40 is neither 1 nor a multiple of 16"),
        ("heads = 64", "heads = true", "model.heads: true is not a whole number of at least 1"),
        ("heads = 64", "heads = 64.0", "model.heads: 64.0 is not a whole number of at least 1"),
        ("heads = 64", 'heads = "64"', "model.heads: '64' is not a whole number of at least 1"),
        ("heads = 64", "heads = 0", "model.heads: 0 is not a whole number of at least 1"),
        ("heads = 64", "head = 64", "model.head: unknown key, the nearest known one is model.heads"),
        ("page_size = 64", "page_size = 64\nkv_dtyp = 1", "kv.kv_dtyp: unknown key, the nearest known one is kv.kv_dtype"),
        ("[kv]", "[kvs]", "kvs: unknown key, the nearest known one is kv"),
        ("tp = 4\n", "", "parallel.tp: is missing, expected a whole number of at least 1"),
        ('name = "mine"', "", "name: is missing, expected a name of letters, digits, '.', '_' and '-'"),
        ('name = "mine"', 'name = "../mine"', "name: '../mine' is not a name of letters, digits, '.', '_' and '-'"),
        (
            '"bf16"\npage',
            '"bf17"\npage',
            "kv.record: 'bf17' is not one of bf16, fp8, nvfp4_ds_mla_432, nvfp4_ds_mla_368, nvfp4_ds_mla_368_per_token, fp8_ds_mla",
        ),
        ('kv_dtype = "bf16"', 'kv_dtype = "e4m3"', "kv.kv_dtype: 'e4m3' pages do not hold bf16 records, which are bf16"),
        ('q_dtype = "bf16"', 'q_dtype = "fp4"', "kv.q_dtype: 'fp4' is not one of bf16, e4m3, which kernels over bf16 records take"),
        (
            '["decode"]',
            '["decode", "prefill"]',
            "serving.modes: 'prefill' is not one of decode, verify, extend, which kernels over bf16 records have",
        ),
        ('["decode"]', "[]", "serving.modes: [] is not a list of different strings"),
        ('["decode"]', '["decode", "decode"]', "serving.modes: ['decode', 'decode'] is not a list of different strings"),
        (
            '["decode"]',
            '["verify"]',
            "serving.draft_rows: [] does not fit serving.modes = ['verify']: draft rows and mode verify come together",
        ),
        ("max_context = 100000", "top_k = 2048", "serving.top_k: 2048 selects slots, bf16 records are read page by page"),
        ("latent_dim = 512", "latent_dim = 500", "model.latent_dim: 500 + 64 = 564 elements is none of 576, 1088"),
        ("max_context = 100000", "max_contxt = 1", "serving.max_contxt: unknown key, the nearest known one is serving.max_context"),
        (
            "max_context = 100000",
            "[serving.sparse_policy]\nstride = 0\nsink_chunks = 1\nrecent_chunks = 1",
            "serving.sparse_policy.stride: 0 is not a whole number of at least 1",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and ": " in value else "",
)
def test_a_misfit_is_named_with_what_was_found_and_expected(tmp_path, old, new, expected):
    assert old in DENSE
    assert expected in findings(tmp_path, DENSE.replace(old, new))
    with pytest.raises(BadProfile) as caught:
        load(str(tmp_path / "mine.toml"))
    assert str(tmp_path / "mine.toml") in caught.value.message
    assert caught.value.hint == f"mlactl profile check {tmp_path / 'mine.toml'}"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("top_k = 2048", "", "serving.top_k: is missing, nvfp4_ds_mla_368 records are read by selected slots"),
        ("latent_dim = 512", "latent_dim = 1024", "model.latent_dim: dims 1024 + 64 are not the 512 + 64 of nvfp4_ds_mla_368 records"),
        ('q_dtype = "bf16"', 'q_dtype = "e4m3"', "kv.q_dtype: 'e4m3' is not one of bf16, which kernels over nvfp4_ds_mla_368 records take"),
        (
            "top_k = 2048",
            "top_k = 2048\n[serving.sparse_policy]\nstride = 2\nsink_chunks = 1\nrecent_chunks = 1",
            "serving.sparse_policy: selects chunks of dense pages, nvfp4_ds_mla_368 records are read by selected slots",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and ": " in value else "",
)
def test_a_misfit_of_a_sparse_profile(tmp_path, old, new, expected):
    assert old in SPARSE
    assert findings(tmp_path, SPARSE.replace(old, new)) == [expected]


def test_a_section_that_is_no_table(tmp_path):
    text = "parallel = 4\n" + DENSE.replace("[parallel]\ntp = 4\ndcp = 2\ninterleave = 16\n", "")
    assert findings(tmp_path, text) == ["parallel: 4 is not a table, expected a table [parallel]"]


def test_every_finding_is_reported_and_not_only_the_first(tmp_path):
    found = findings(tmp_path, DENSE.replace("tp = 4", "tp = 3").replace("page_size = 64", "page_size = 17"))
    assert found == [
        "model.heads: 64 heads do not divide over parallel.tp = 3 ranks",
        "parallel.dcp: groups of 2 do not divide parallel.tp = 3 ranks",
        "kv.page_size: 17 is neither 1 nor a multiple of 16",
    ]
    with pytest.raises(BadProfile, match=r"3 ranks \(and 2 more\)$"):
        load(str(tmp_path / "mine.toml"))


def test_the_unchanged_texts_are_valid(tmp_path):
    assert findings(tmp_path, DENSE) == []
    assert findings(tmp_path, SPARSE) == []


@pytest.mark.parametrize("data", [b"name = ", b"\xff\xfe", b"a = 1\na = 2", b"[[[[", b"x = " + b"[" * 5000])
def test_what_is_no_toml_is_one_finding(tmp_path, data):
    (tmp_path / "mine.toml").write_bytes(data)
    profile, found = examine(tmp_path / "mine.toml")
    assert profile is None
    assert len(found) == 1
    assert found[0].message.startswith("not a TOML file: ")


TOML_VALUES = st.recursive(
    st.one_of(st.booleans(), st.integers(-5, 5000), st.floats(), st.text(max_size=5), st.sampled_from(["bf16", "fp8", "decode", "verify"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["heads", "tp", "record", "x"]), inner, max_size=3),
    max_leaves=5,
)


@given(section=st.sampled_from(["model", "parallel", "kv", "serving", "scales"]), key=st.integers(0, 6), value=TOML_VALUES)
def test_any_value_anywhere_gives_a_verdict(section, key, value):
    """A wrong type in one key of a profile reached arithmetic and came out as a TypeError."""
    from mlactl.profile_file import _SECTIONS, _read_document

    document = tomli.loads(SPARSE)
    names = list(_SECTIONS[section])
    document.setdefault(section, {})[names[key % len(names)]] = value
    values, found = _read_document(document)
    if not found:
        found = list(profiles._misfits(profiles._build(values, Path("/nowhere/mine.toml"))))
    assert all(finding.message for finding in found)


def test_scale_file_is_found_next_to_the_profile_and_its_digest_checked(tmp_path):
    import hashlib

    digest = hashlib.sha256(b"{}").hexdigest()
    text = f'{SPARSE}\n[scales]\nfile = "scales.json"\nsha256 = "{digest}"\n'
    assert findings(tmp_path, text) == [f"scales.file: {tmp_path / 'scales.json'}: no such file or directory"]
    (tmp_path / "scales.json").write_text("{}")
    assert load(str(tmp_path / "mine.toml")).scales == profiles.ScaleFile(tmp_path / "scales.json", digest)
    (tmp_path / "scales.json").write_text("{ }")
    (found,) = findings(tmp_path, text)
    assert found.startswith(f"scales.sha256: {digest} is not the digest of {tmp_path / 'scales.json'}, which is ")


def test_a_scale_file_makes_no_sense_for_records_without_outer_scales(tmp_path):
    (tmp_path / "scales.json").write_text("{}")
    assert "scales.file: bf16 records have no outer scale" in findings(tmp_path, DENSE + '\n[scales]\nfile = "scales.json"\n')


def test_search_order_and_shadowing(tmp_path):
    user, machine = tmp_path / "config" / "mlactl" / "profiles", tmp_path / "machine"
    write(user / "mine.toml", DENSE)
    write(machine / "mine.toml", DENSE.replace("heads = 64", "heads = 32"))
    write(machine / "other.toml", DENSE.replace('"mine"', '"other"'))
    write(user / "ci-small.toml", DENSE.replace('"mine"', '"ci-small"'))
    places = {item.name: (item.origin, item.shadows) for item in profiles.found()}
    assert places["mine"] == ("user", ("machine",))
    assert places["other"] == ("machine", ())
    assert places["ci-small"] == ("user", ("shipped",))
    assert places["glm-5.2-tp8"] == ("shipped", ())
    assert load("mine").model.heads == 64
    assert load("ci-small").model.heads == 64
    assert load(str(machine / "mine.toml")).model.heads == 32


def test_the_users_folder_is_under_home_without_xdg(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "somebody"))
    write(tmp_path / "somebody" / ".config" / "mlactl" / "profiles" / "mine.toml", DENSE)
    assert "mine" in profiles.names()


def test_a_found_file_must_have_the_name_it_is_found_by(tmp_path):
    write(tmp_path / "config" / "mlactl" / "profiles" / "copy.toml", DENSE)
    with pytest.raises(BadProfile, match="name: 'mine' is not the file's name 'copy', by which it is found"):
        load("copy")


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(UnknownProfile, match=r"no profile named 'kimi-k3-tp8', did you mean kimi-k3-tp8-dcp8\?"):
        load("kimi-k3-tp8")
    with pytest.raises(UnknownProfile, match="no profile named 'zzz', there are ci-small, "):
        load("zzz")


def test_an_absent_path_is_named(tmp_path):
    with pytest.raises(CannotRun, match=f"^{tmp_path}/absent.toml: no such file or directory$"):
        load(f"{tmp_path}/absent.toml")


def test_a_folder_that_cannot_be_listed_is_named(monkeypatch):
    """Root can list anything, so this asks as an unprivileged user, in a process of its own."""
    with tempfile.TemporaryDirectory() as base:  # pytest's own folders are closed to that user
        folder = Path(base, "mlactl", "profiles")
        folder.mkdir(parents=True)
        Path(base).chmod(0o755)
        monkeypatch.setenv("XDG_CONFIG_HOME", base)
        monkeypatch.setattr(profiles, "MACHINE", Path(base, "absent"))
        assert "ci-small" in _as_nobody(lambda: " ".join(profiles.names()))
        folder.chmod(0)
        assert _as_nobody(lambda: profiles.names()) == f"{folder}: Permission denied"
        folder.chmod(0o755)


def _as_nobody(call) -> str:
    """What `call` returns, or the message of its CannotRun, for a user who owns nothing."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        if os.geteuid() == 0:
            os.setuid(65534)
        try:
            text = str(call())
        except CannotRun as error:
            text = error.message
        except BaseException as error:
            text = repr(error)
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return text
