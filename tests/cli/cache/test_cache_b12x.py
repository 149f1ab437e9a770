"""`mlactl cache …` over a b12x cache: every command, what it refuses there, and that no recorded environment value gets out."""

import json
import os
import re

import pytest
from b12x_files import EXPLICIT, KERNEL, PLAIN, SECRET, Made, Root

DECODE = "attention.mla.sm120.decode"


@pytest.fixture
def root(tmp_path):
    return Root(tmp_path / "b12x")


@pytest.fixture
def filled(root):
    return {
        "decode": root.add(Made(kernel=DECODE, version=17)),
        "forward": root.add(),
        "forward of another card": root.add(Made(device=("cuda", (12, 0), 170))),
        "with a variable": root.add(Made(environment=(*Made().environment, ("B12X_TRACE", SECRET)))),
        "plain": root.add(Made(tag=PLAIN[3])),
        "oldest": root.add(Made(tag=PLAIN[0])),
        "sparkinfer": root.add(Made(tag=EXPLICIT[0], package="sparkinfer")),
        "bare": root.add(Made(version=3), manifest=False),
        "edited": root.add(Made(version=6), compile_spec_json="{}"),
        "key": root.add(Made(version=7), cache_payload_repr=Made(version=8).text),
        "schema": root.add(Made(version=9), schema="b12x._lib.compile_manifest.v4"),
    }


def test_ls_in_every_mode(cli, root, filled):
    done = cli.every_mode("cache", "ls", "--cache-dir", root.path, rows="entries")
    entries = {row["key"]: row for row in done["json"].json["entries"]}
    assert entries.keys() == set(filled.values())
    assert entries[filled["decode"]]["spec"]["version"] == 17
    assert entries[filled["plain"]]["spec"] == {"kernel_id": "b12x.attention.dense_mla._forward.Forward", "version": None, "facts": {}}
    assert {name: entries[key]["status"] for name, key in filled.items() if entries[key]["status"] != "ok"} == {
        "bare": "no-manifest",
        "edited": "bad-manifest",
        "key": "key",
        "schema": "schema",
    }
    assert {row["root_kind"] for row in entries.values()} == {"b12x"}
    assert re.search(
        rf"{filled['decode'][:12]} +{DECODE} +17 +ok +sm_120a +dtype=bf16 heads=96 window_size=None q=bfloat16\[3\]", done["human"].stdout
    )
    assert f"{filled['bare'][:12]} no-manifest: no manifest: older releases load it as it is, 1.5.1 treats it as a miss" in done["human"].stderr
    assert "warmup" not in done["human"].stderr


def test_ls_filters(cli, root, filled):
    def listed(*words):
        return set(cli("cache", "ls", "-q", "--cache-dir", root.path, *words).lines)

    assert listed("--kernel", "attention.mla") == {filled["decode"]}
    assert listed("--status", "key", "--status", "schema") == {filled["key"], filled["schema"]}
    assert listed("--arch", "sm_100a") == set()
    assert cli("cache", "ls", "--cache-dir", root.path, "--arch", "sm120").code == 2


def test_the_root_is_found_by_b12x_own_variables(cli, root, filled, tmp_path):
    older = Root(cli.home / ".cache/sparkinfer/compile")
    older.add()
    env = {"B12X_COMPILE_CACHE_DIR": str(root.path)}
    done = cli("cache", "ls", "-q", "--root-kind", "b12x", env=env)
    assert (done.code, len(done.lines)) == (0, len(filled))
    assert f"warning: {older.path} is there too (sparkinfer, later, by HOME): --cache-dir {older.path} looks at it\n" in done.stderr
    assert len(cli("cache", "ls", "-q", "--root-kind", "b12x").lines) == 1
    told = cli("cache", "prune", "--root-kind", "b12x", env=env)
    assert told.code == 2
    assert "hint: mlactl cache prune --root-kind b12x --spec 'KERNEL<N' --dry-run" in told.stderr


def test_show_in_every_mode(cli, root, filled):
    key = filled["forward"]
    done = cli.every_mode("cache", "show", key[:12], "--cache-dir", root.path)
    assert done["quiet"].lines == [key]
    document = done["json"].json
    assert (document["symbols"], document["object_arch"], document["signature"]) == ([f"b12x_cute_{key}"], "sm_120a", None)
    manifest = document["manifest"]
    assert manifest["compile_environment"] == {"CC": "", "CUDA_HOME": "hidden, --show-secrets shows it", "CUTE_DSL_ARCH": ""}
    assert manifest["hidden_fields"] == ["cache_payload", "cache_payload_repr", "semantic_payload"]
    assert manifest["launch_metadata"] == Made().manifest()["launch_metadata"]
    assert re.search(r"^environment +CUDA_HOME$", done["human"].stdout, re.MULTILINE)
    assert re.search(rf"^toolchain +python .*torch 2\.9\.0.*\npackage|^package +{'f1' * 32}$", done["human"].stdout, re.MULTILINE)


def test_show_of_a_bare_object_says_what_the_object_does(cli, root, filled):
    document = cli("cache", "show", filled["bare"], "--cache-dir", root.path, "--json").json
    assert (document["entry"]["status"], document["manifest"], document["object_arch"]) == ("no-manifest", None, "sm_120a")
    assert document["symbols"] == [f"b12x_cute_{filled['bare']}"]


def test_why_in_every_mode(cli, root, filled):
    key = filled["with a variable"]
    done = cli.every_mode("cache", "why", key[:12], "--cache-dir", root.path)
    document = done["json"].json
    assert (document["sibling"], document["relation"]) == (filled["forward"], "same kernel id and facts")
    assert document["forks"] == [{"field": "environment.B12X_TRACE", "entry": "hidden, --show-secrets shows it", "sibling": None}]
    assert done["quiet"].lines == [filled["forward"]]
    assert f"nearest  {filled['forward']}  (same kernel id and facts): 1 field forks the two\n" in done["human"].stdout
    assert re.search(r"environment\.B12X_TRACE +hidden, --show-secrets shows it +absent", done["human"].stdout)


def test_no_command_prints_an_environment_value_unless_asked(inside, root, filled):
    commands = [["ls"], ["ls", "--all"], ["stats"], ["verify"], ["prune", "--kernel", "attention", "--dry-run"], ["prune"]]
    commands += [["rm", *filled.values(), "--dry-run"]]
    commands += [[name, key] for key in filled.values() for name in ("show", "why")]
    for words in commands:
        for mode in ("human", "json", "jsonl", "quiet"):
            done = inside("cache", *words, "--cache-dir", root.path, "--output", mode)
            assert done.code in (0, 1) or words == ["prune"], done.stderr
            assert SECRET not in done.stdout + done.stderr, (words, mode)
    assert SECRET not in inside("cache", "stats", "--output", "prometheus", "--cache-dir", root.path).stdout


@pytest.mark.parametrize("name", ["forward", "plain", "oldest", "sparkinfer"])
@pytest.mark.parametrize("command", ["show", "why"])
def test_values_are_shown_when_asked_for(inside, root, filled, command, name):
    for mode in ("human", "json"):
        done = inside("cache", command, filled[name], "--cache-dir", root.path, "--show-secrets", "--output", mode)
        assert (done.code, SECRET in done.stdout) == (0, True), (mode, done.stdout)


def test_stats_for_people_and_collectors(cli, root, filled):
    found = cli("cache", "stats", "--cache-dir", root.path, "--json").json
    assert found["root_kind"] == "b12x"
    groups = {(group["kernel_id"], group["version"], group["arch"], group["status"]): group["entries"] for group in found["roots"][0]["groups"]}
    assert groups[DECODE, 17, "sm_120a", "ok"] == 1
    assert groups[KERNEL, 4, "sm_120a", "ok"] == 3
    assert groups[None, None, None, "no-manifest"] == 1
    assert sum(groups.values()) == found["roots"][0]["entries"] == len(filled)
    assert found["roots"][0]["toolchains"][f"package {'f1' * 6}, cutlass_dsl 4.3.0, torch 2.9.0, torch_cuda 12.9"] == 6
    lines = cli("cache", "stats", "--cache-dir", root.path, "--output", "prometheus").lines
    labels = f'{{root="{root.path}",root_kind="b12x",kernel_id="{DECODE}",version="17",arch="sm_120a",status="ok"}}'
    assert f"mlactl_cache_entries{labels} 1" in lines


def test_verify_finds_and_names_what_is_wrong(cli, root, filled):
    root.file(filled["forward"], "o").write_bytes(b"\0" * len(Made().object))
    done = cli("cache", "verify", "--cache-dir", root.path)
    assert done.code == 1
    assert f"{filled['forward'][:12]} digest {KERNEL} 4" in done.stdout
    assert done.lines[-1] == f"{len(filled)} entries, 5 not ok"
    assert "--repair" not in done.stderr
    assert cli("cache", "verify", filled["decode"], "--cache-dir", root.path).code == 0


def test_prune_and_rm(cli, root, filled):
    words = ["--cache-dir", root.path]
    plan = cli("cache", "prune", "--spec", f"{DECODE}<18", "--dry-run", "--json", *words).json
    assert (plan["root_kind"], [entry["key"] for entry in plan["entries"]]) == ("b12x", [filled["decode"]])
    key = filled["decode"]
    assert [file["path"] for file in plan["entries"][0]["files"]] == [f"{key[:2]}/{key}.o", f"{key[:2]}/{key}.json"]
    done = cli("cache", "prune", "--spec", f"{DECODE}<18", "--yes", "--json", *words)
    assert (done.code, done.json["removed"]) == (0, [filled["decode"]])
    gone = cli("cache", "rm", filled["bare"], "--yes", *words)
    assert (gone.code, gone.stdout) == (0, f"removed 1 entry ({len(Made().object) / 1024:.1f} KiB) from {root.path}\n")
    root.prepare(filled["forward"])
    kept = cli("cache", "rm", filled["forward"], "--yes", *words)
    assert kept.code == 2
    assert "error: 1 entry of 1 named still there; named by preparation/" in kept.stderr
    assert "1 entry kept: named by preparation/" in kept.stdout
    assert cli("cache", "rm", filled["forward"], "--include-prepared", "--yes", *words).code == 0
    assert not root.file(filled["forward"], "o").exists()
    assert root.file(filled["forward"], "lock").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["prune", "--yes"], "a foreign root has no default selection; it has attention.dense_mla.forward 4, attention.mla.sm120.decode 17"),
        (["prune", "--locks", "--yes"], "its lock files are never removed"),
        (["prune", "--stale", "--yes"], "--stale is for this project's own cache"),
        (["prune", "--kernel", "attention", "--keep-profile", "ci-small", "--yes"], "--keep-profile is for this project's own cache"),
        (["verify", "--repair"], "--repair compiles"),
        (["verify", "--reproduce"], "--reproduce compiles"),
        (["why", "--profile", "ci-small"], "--profile names kernels of this project"),
        (["ls", "--root-kind", "rocm"], "rocm"),
    ],
)
def test_what_is_refused_on_a_b12x_root(cli, root, filled, words, said):
    before = root.files()
    done = cli("cache", *words, "--cache-dir", root.path)
    assert (done.code, done.stdout, said in done.stderr) == (2, "", True), done.stderr
    assert root.files() == before


def test_what_only_b12x_roots_have_is_refused_on_our_own(cli):
    done = cli("cache", "prune", "--include-prepared", "--dry-run")
    assert (done.code, "--include-prepared is for a b12x cache" in done.stderr) == (2, True)


def test_a_root_of_both_kinds_or_of_none(cli, root, filled, tmp_path):
    (root.path / "v1").mkdir()
    both = cli("cache", "ls", "--cache-dir", root.path)
    assert (both.code, "holds both an mlactl cache (v1/) and a b12x cache" in both.stderr) == (2, True)
    assert len(cli("cache", "ls", "-q", "--root-kind", "b12x", "--cache-dir", root.path).lines) == len(filled)
    assert cli("cache", "ls", "-q", "--root-kind", "mlactl", "--cache-dir", root.path).lines == []
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    none = cli("cache", "ls", "--cache-dir", tmp_path / "other")
    assert (none.code, "is no compile cache: found notes.txt, expected v1/ (mlactl)" in none.stderr) == (2, True)


def test_hints_keep_the_kind(cli, root, filled):
    done = cli("cache", "verify", "--root-kind", "b12x", "--cache-dir", root.path)
    assert f"hint: mlactl cache prune --root-kind b12x --cache-dir {root.path} --status bad-manifest" in done.stderr


def test_a_listing_reads_manifests_of_any_size_and_kind_without_a_traceback(cli, root):
    key = root.add()
    for name, text in (("00" * 32, "[" * 100_000), ("01" * 32, json.dumps({"schema": "x" * 10_000})), ("02" * 32, "\x1b[31m")):
        root.file(name, "json").parent.mkdir(exist_ok=True)
        root.file(name, "json").write_text(text)
    os.truncate(root.file("02" * 32, "json"), 8 << 20)
    done = cli.every_mode("cache", "ls", "--cache-dir", root.path, rows="entries")
    found = {row["key"]: row["status"] for row in done["json"].json["entries"]}
    assert found == {key: "ok", "00" * 32: "bad-manifest", "01" * 32: "schema", "02" * 32: "bad-manifest"}
