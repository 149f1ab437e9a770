"""`mlactl cache export` and `import` as a person runs them: every output mode, exit codes, pipes, URLs, refusals."""

import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import stand_ins
import tiny
from fsspec.registry import known_implementations

from mlactl.cache import locks, trust
from mlactl.cache.bundle import places
from mlactl.cache.entry import examine
from mlactl.cache.store import Store
from mlactl.errors import CannotRun, EnvironmentUnfit, UsageError


@pytest.fixture
def bundle(cache, filled, tmp_path):
    path = tmp_path / "bundle.tar.zst"
    done = cache("cache", "export", "-o", path)
    assert done.code == 0, done.stderr
    return path


@pytest.fixture
def run(inside, cache, monkeypatch):
    """The command line in this process, on the root of `cache` or another."""

    def one(*words, env=None):
        monkeypatch.setenv("MLACTL_CACHE_DIR", (env or cache.env)["MLACTL_CACHE_DIR"])
        return inside(*words)

    return one


def node(tmp_path, name="node"):
    return {"MLACTL_CACHE_DIR": str(tmp_path / name)}


def keys(entries):
    return sorted(entry.key for entry in entries)


# ---- export


def test_export_in_every_mode(cache, filled, tmp_path):
    path = tmp_path / "bundle.tar.zst"
    done = cache.every_mode("cache", "export", "-o", path, "--force")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    document = done["json"].json
    assert [entry["key"] for entry in document["entries"]] == keys(filled.all)
    assert (document["sha256"], document["bytes"], document["bundle"]) == (digest, path.stat().st_size, str(path))
    assert document["entries"][0].keys() == {"key", "spec", "arch", "host_arch", "object_bytes"}
    assert document["requires"][0]["name"] == "apache-tvm-ffi"
    assert done["quiet"].lines == keys(filled.all)
    assert done["human"].lines[0].startswith("exported 6 entries (")
    assert done["human"].lines[1] == f"sha256 {digest}"
    assert f"on the node: mlactl cache import {path} --sha256 {digest}\n" in done["human"].stderr


def test_export_of_keys_filters_and_nothing(run, filled, tmp_path):
    def exported(*words):
        return run("cache", "export", "-o", tmp_path / "b", "--force", "-q", *words)

    assert exported(filled.current.key[:10], filled.newer.key).lines == keys([filled.current, filled.newer])
    assert exported("--arch", "sm_121a").lines == [filled.sm_121a.key]
    assert exported("--kernel", "test.tiny").lines == keys(filled.all)
    for words, code, said in (
        (("--kernel", "attention"), 1, "error: nothing to export: no entry matches"),
        (("feed",), 1, "error: no entry feed"),
        ((filled.current.key, "--arch", "sm_120a"), 2, "error: KEYs were given beside --profile, --arch or --kernel"),
        (("--arch", "sm_100a"), 2, "--arch sm_100a is not supported"),
    ):
        done = exported(*words)
        assert done.code == code
        assert said in done.stderr
    assert "mlactl cache export -o FILE" in run("cache", "export").stderr


def test_export_never_replaces_without_force(run, bundle):
    before = bundle.read_bytes()
    done = run("cache", "export", "-o", bundle)
    assert (done.code, done.stderr.splitlines()[-2:]) == (2, [f"error: {bundle}: is there already, nothing was written", "hint: --force replaces it"])
    assert bundle.read_bytes() == before
    assert run("cache", "export", "-o", bundle.parent).code == 2
    missing = run("cache", "export", "-o", bundle.parent / "no" / "where")
    assert (missing.code, f"hint: mkdir -p {bundle.parent / 'no'}" in missing.stderr) == (2, True)
    assert sorted(path.name for path in bundle.parent.iterdir()) == ["bundle.tar.zst", "home"]


def test_damaged_entries_stop_an_export_unless_partial(cache, filled, tmp_path):
    stand_ins.flip_bit(filled.current)
    stand_ins.quarantine(filled.newer)
    path = tmp_path / "b"
    done = cache.every_mode("cache", "export", "-o", path, code=1)
    assert f"cannot go in: test.tiny 1 dtype=f32 factor=2 for sm_120a: {filled.current.object_path}: digest: " in done["human"].stdout
    assert "hint: --partial writes the rest" in done["human"].stderr
    assert done["quiet"].lines == [filled.current.key]
    assert done["json"].json["bundle"] is None
    assert not path.exists()
    partial = cache("cache", "export", "-o", path, "--partial", "--json")
    assert partial.code == 0
    assert "warning: left out: test.tiny 1 dtype=f32 factor=2 for sm_120a: " in partial.stderr
    document = partial.json
    assert [item["key"] for item in document["left_out"]] == [filled.current.key]
    assert document["quarantined"] == [filled.newer.key]
    assert len(document["entries"]) == 4


PROFILE = f"""
import sys
sys.path.insert(0, {str(Path(tiny.__file__).parent)!r})
import tiny
tiny.register()
from mlactl.profiles import Profile
Profile.specs = lambda self, identities=None: (tiny.spec(2), tiny.spec(3))
from mlactl.cli.app import main
sys.exit(main())
"""


def test_export_of_a_profile_names_what_is_missing_and_the_warmup(cache, filled, tmp_path):
    cache.launch = (sys.executable, "-c", PROFILE)
    words = ("cache", "export", "-o", tmp_path / "b", "--profile", "kimi-k3-tp8-dcp8-bf16", "--arch", "sm_120a")
    done = cache(*words)
    assert done.code == 1
    assert done.lines[0].startswith("cannot go in: test.tiny 1 dtype=f32 factor=3 for sm_120a: not in ")
    assert "hint: mlactl warmup --profile kimi-k3-tp8-dcp8-bf16 --arch sm_120a" in done.stderr
    assert cache(*words, "--partial", "-q").lines == [filled.current.key]


def test_stdout_and_stdin(cache, filled, bundle, tmp_path):
    piped = tmp_path / "piped"
    with piped.open("wb") as file:
        done = cache("cache", "export", "-o", "-", stdout=file)
    assert (done.code, piped.read_bytes()) == (0, bundle.read_bytes())
    assert "exported 6 entries" in done.stderr
    with piped.open("rb") as file:
        assert cache("cache", "import", "-", "-q", env=node(tmp_path), stdin=file).lines == keys(filled.all)
    clash = cache("cache", "export", "-o", "-", "--json")
    assert (clash.code, "stdout cannot hold both" in clash.stderr) == (2, True)


# ---- import


def test_import_in_every_mode(cache, filled, bundle, tmp_path):
    done = cache.every_mode("cache", "import", bundle, "--dry-run", env=node(tmp_path))
    document = done["json"].json
    assert {entry["outcome"] for entry in document["entries"]} == {"published"}
    assert document["dry_run"] is True
    assert document["sha256"] == hashlib.sha256(bundle.read_bytes()).hexdigest()
    assert [need["name"] for need in document["requires"]] == ["apache-tvm-ffi", "nvidia-cutlass-dsl-libs-cu13", "nvidia-cutlass-dsl-libs-cu13"]
    assert done["quiet"].lines == keys(filled.all)
    assert done["human"].lines[0].startswith(f"would import into {tmp_path / 'node'}: 6 published; 6 entries (")
    assert "dry run: nothing was written" in done["human"].stderr
    assert not (tmp_path / "node").exists()
    real = cache("cache", "import", bundle, env=node(tmp_path))
    assert (real.code, real.lines[0].partition(";")[0]) == (0, f"imported into {tmp_path / 'node'}: 6 published")
    assert "warning: launches of this install never load 1 entry: test.tiny version 0, this install has version 1" in real.stderr
    assert "hint: pip install --no-deps nvidia-cutlass-dsl-libs-cu13==4.7.0" in real.stderr
    assert cache("cache", "verify", "-q", env=node(tmp_path)).code == 0
    again = cache("cache", "import", bundle, env=node(tmp_path))
    assert "6 already there" in again.stdout


def test_import_checks_the_pin_and_names_what_is_wrong(run, filled, bundle, tmp_path):
    wrong = run("cache", "import", bundle, "--sha256", "0" * 64, env=node(tmp_path))
    assert (wrong.code, "--sha256 says 000" in wrong.stderr) == (1, True)
    assert run("cache", "import", bundle, "--sha256", "beef", env=node(tmp_path)).code == 2
    digest = hashlib.sha256(bundle.read_bytes()).hexdigest().upper()
    assert run("cache", "import", bundle, "--sha256", digest, "--dry-run", env=node(tmp_path)).code == 0
    for data, said in ((bundle.read_bytes()[:-1], "truncated"), (b"", "truncated"), (b"PK\3\4 what is this", "not a bundle")):
        bad = tmp_path / "bad"
        bad.write_bytes(data)
        done = run("cache", "import", bad, "--json", env=node(tmp_path))
        assert (done.code, done.stdout) == (1, "")
        assert said in done.stderr
        assert "mlactl cache export -o FILE" in done.stderr
    assert list(Store.open(str(tmp_path / "node")).entries()) == []


def test_import_of_what_cannot_be_read(run, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, said in ((tmp_path / "none", "no such file"), (tmp_path, "is a folder"), (tmp_path / "pipe", "is a pipe")):
        done = run("cache", "import", name)
        assert done.code == 2
        assert said in done.stderr


def test_a_quarantined_key_is_named_and_exits_1(run, filled, bundle):
    stand_ins.quarantine(filled.current)
    done = run("cache", "import", bundle)
    assert done.code == 1
    assert f"warning: {filled.current.key[:12]} quarantined: this key was set aside here; mlactl cache rm" in done.stderr
    assert not filled.current.manifest_path.exists()


def test_filters_that_leave_nothing(run, filled, bundle, tmp_path):
    done = run("cache", "import", bundle, "--kernel", "attention", env=node(tmp_path))
    assert (done.code, "nothing to import from 6 entries: none passes --arch and --kernel" in done.stderr) == (1, True)
    assert run("cache", "import", bundle, "--arch", "sm_121a", "-q", env=node(tmp_path)).lines == [filled.sm_121a.key]


def test_shared_import_has_the_modes_of_a_shared_warmup(run, filled, bundle, tmp_path):
    assert run("cache", "import", bundle, "--shared", env=node(tmp_path)).code == 0
    root = tmp_path / "node"
    assert {path.stat().st_mode & 0o777 for path in root.rglob("*.so")} == {0o644}
    assert {path.stat().st_mode & 0o777 for path in (root, root / "v1", *root.glob("v1/??"))} == {0o755}


@stand_ins.as_root
def test_a_root_of_somebody_else_is_named(cache, filled, bundle, tmp_path):
    root = tmp_path / "node"
    root.mkdir(mode=0o755)
    os.chown(root, stand_ins.NOBODY, stand_ins.NOBODY)
    done = cache("cache", "import", bundle, env=node(tmp_path))
    assert done.code == 2
    assert f"{root} is not trusted: owner nobody" in done.stderr


def test_bundles_stay_light(cache, filled, bundle, tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(Path(tiny.__file__).parent)!r})
import tiny; tiny.register()
from mlactl.cli.app import main
assert main(["cache", "export", "-o", {str(tmp_path / "b")!r}, "-q"]) == 0
assert main(["cache", "import", {str(bundle)!r}, "-q"]) == 0
print(sorted({{"torch", "cutlass", "numpy", "tvm_ffi", "fsspec", "rich"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], env=cache.env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# ---- roots, hints and refusals


@pytest.fixture
def b12x_root(tmp_path):
    root = tmp_path / "b12x"
    (root / "ab").mkdir(parents=True)
    (root / "ab" / f"{'ab' * 32}.o").write_bytes(b"theirs")
    return root


@pytest.mark.parametrize("words", [("import", "BUNDLE"), ("import", "BUNDLE", "--dry-run"), ("export", "-o", "NEW")], ids=" ".join)
def test_a_b12x_root_is_nobody_elses(run, bundle, b12x_root, tmp_path, words):
    places_named = {"BUNDLE": bundle, "NEW": tmp_path / "new"}
    done = run("cache", *(places_named.get(word, word) for word in words), "--cache-dir", b12x_root)
    assert (done.code, done.stdout) == (2, "")
    assert f"error: {b12x_root} is a b12x cache, expected one of mlactl's own" in done.stderr
    assert [path.name for path in b12x_root.iterdir()] == ["ab"]
    assert not (tmp_path / "new").exists()


def test_a_command_in_a_warning_or_reason_is_for_the_root_that_was_given(run, filled, bundle, tmp_path):
    stand_ins.quarantine(filled.current)
    root = filled.current.root
    elsewhere = {"MLACTL_CACHE_DIR": str(tmp_path / "default")}
    done = run("cache", "import", bundle, "--cache-dir", root, "--json", env=elsewhere)
    command = f"mlactl cache rm --cache-dir {root} {filled.current.key[:12]} forgets that"
    assert f"warning: {filled.current.key[:12]} quarantined: this key was set aside here; {command}" in done.stderr
    reasons = {entry["key"]: entry["reason"] for entry in done.json["entries"]}
    assert reasons[filled.current.key] == f"this key was set aside here; {command}"


def test_what_is_mended_where_the_bundle_was_made_names_no_root_of_here(run, bundle, tmp_path):
    bad = tmp_path / "bad"
    bad.write_bytes(b"nothing of the kind")
    done = run("cache", "import", bad, "--cache-dir", tmp_path / "node")
    assert (done.code, done.stderr.splitlines()[-1]) == (1, "hint: make it again where it came from: mlactl cache export -o FILE")
    done = run("cache", "import", bundle, "--sha256", "beef", "--cache-dir", tmp_path / "node")
    assert done.stderr.splitlines()[-1] == "hint: cache export printed it where the bundle was made; sha256sum FILE"


def test_nothing_selected_hints_the_very_bundle(run, filled, bundle, tmp_path):
    odd = bundle.rename(tmp_path / "a bundle")
    done = run("cache", "import", odd, "--kernel", "attention", env=node(tmp_path))
    assert done.stderr.splitlines()[-1] == f"hint: mlactl cache import '{odd}' --dry-run --json shows what is in it"


def test_a_quarantined_key_cannot_be_exported_and_the_hint_says_why(run, filled, tmp_path):
    stand_ins.quarantine(filled.current)
    done = run("cache", "export", filled.current.key, "-o", tmp_path / "b")
    assert done.code == 1
    assert f"{filled.current.object_path}: quarantined: " in done.stdout
    assert f"hint: mlactl cache show {filled.current.key[:12]}" in done.stderr
    assert "--repair" not in done.stderr
    assert "--partial" not in done.stderr


def test_partial_with_nothing_usable_names_what_is_missing(cache, filled, tmp_path):
    cache.launch = (sys.executable, "-c", PROFILE)
    words = ("cache", "export", "-o", tmp_path / "b", "--profile", "kimi-k3-tp8-dcp8-bf16", "--arch", "sm_90a", "--partial")
    done = cache(*words)
    assert done.code == 1
    assert [line.partition(": not in ")[0] for line in done.lines] == [
        "cannot go in: test.tiny 1 dtype=f32 factor=2 for sm_90a",
        "cannot go in: test.tiny 1 dtype=f32 factor=3 for sm_90a",
        "2 entries cannot go into the bundle, nothing was written",
    ]
    assert done.stderr.splitlines()[-1] == "hint: mlactl warmup --profile kimi-k3-tp8-dcp8-bf16 --arch sm_90a"
    assert [item["entry"] for item in cache(*words, "--json").json["left_out"]] == [f"test.tiny 1 dtype=f32 factor={n} for sm_90a" for n in (2, 3)]


EXPORT_AS_NOBODY = f"""
import os, sys
sys.path.insert(0, {str(Path(tiny.__file__).parent)!r})
import tiny; tiny.register()
from mlactl.cli.app import main
# The interpreter may be closed to that user: everything the real run imports is imported here.
assert main(["cache", "export", "-o", sys.argv[1], "-q"]) == 0
os.setgroups([]); os.setgid({stand_ins.NOBODY}); os.setuid({stand_ins.NOBODY})
sys.exit(main(sys.argv[2:]))
"""


@stand_ins.as_root
def test_a_folder_that_may_not_be_written_is_named_with_its_owner(cache, filled, tmp_path):
    stand_ins.let_others_read(cache.cache_dir)
    place = tmp_path / "place"
    place.mkdir(mode=0o755)
    cache.launch = (sys.executable, "-c", EXPORT_AS_NOBODY, tmp_path / "warm")
    done = cache("cache", "export", "-o", place / "b")
    owner = trust.user_name(os.geteuid())
    said = [
        f"error: cannot write the bundle in {place} (owner {owner}, mode 0755): Permission denied",
        f"hint: ls -ld {place}; mlactl cache export -o FILE puts it into another folder",
    ]
    assert (done.code, done.stderr.splitlines()[-2:]) == (2, said)


FULL = f"""
import resource, sys
sys.path.insert(0, {str(Path(tiny.__file__).parent)!r})
import tiny; tiny.register()
from mlactl.cli.app import main
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
sys.exit(main())
"""


@pytest.mark.parametrize("target", ["FILE", "memory://b"])
def test_where_nothing_more_fits_the_place_and_the_way_out_are_named(cache, filled, tmp_path, target):
    cache.launch = (sys.executable, "-c", FULL)
    place, other = tmp_path / "place", tmp_path / "temporaries"
    place.mkdir(mode=0o700)
    other.mkdir(mode=0o750)
    named = place / "b" if target == "FILE" else target
    done = cache("cache", "export", "-o", named, env={"TMPDIR": str(other)})
    where, mode, out = (place, "0700", "mlactl cache export -o FILE puts it into another folder")
    if target != "FILE":
        where, mode, out = (other, "0750", "TMPDIR=DIR names another folder for temporaries")
    owner = trust.user_name(os.geteuid())
    said = [f"error: cannot write the bundle in {where} (owner {owner}, mode {mode}): File too large", f"hint: df -h {where}; {out}"]
    assert (done.code, done.stderr.splitlines()[-2:]) == (2, said)
    assert list(place.iterdir()) == list(other.iterdir()) == []


def test_delivery_that_fails_names_the_folder(tmp_path):
    def full(file):
        raise OSError(28, "No space left on device")

    with pytest.raises(CannotRun, match=rf"cannot write the bundle in {tmp_path} \(owner .*\): No space left on device") as raised:
        places.deliver(str(tmp_path / "b"), full, force=False)
    assert raised.value.hint.startswith(f"df -h {tmp_path}; ")
    assert list(tmp_path.iterdir()) == []


def test_stdout_that_is_full_is_named(cache, filled):
    with Path("/dev/full").open("wb") as full:
        done = cache("cache", "export", "-o", "-", stdout=full)
    assert done.code == 2
    assert "error: cannot write the bundle to stdout: No space left on device" in done.stderr


def test_a_dry_run_of_an_entry_in_use_ends_as_the_import_would(run, filled, bundle):
    stand_ins.flip_bit(filled.current)
    with locks.entry_lock(filled.current.layer, filled.current.key, exclusive=False, wait_s=1):
        dry, real = run("cache", "import", bundle, "--dry-run"), run("cache", "import", bundle)
    assert (dry.code, real.code) == (2, 2)
    assert "1 failed" in dry.stdout
    assert "error: 1 entry could not be imported now; " in dry.stderr
    assert f"{filled.current.key}.lock is in use by process {os.getpid()}" in dry.stderr


def test_a_bundle_is_not_read_from_a_terminal(run, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", terminal)
    done = run("cache", "import", "-")
    assert (done.code, "error: stdin is a terminal, expected a bundle" in done.stderr) == (2, True)


# ---- URLs


def test_memory_and_file_urls(filled, bundle, tmp_path, inside, monkeypatch):
    monkeypatch.setenv("MLACTL_CACHE_DIR", str(filled.current.root))
    url = "memory://bundles/one.tar.zst"
    done = inside("cache", "export", "-o", url, "--json")
    assert done.code == 0, done.err if hasattr(done, "err") else done.stderr
    assert json.loads(done.stdout)["sha256"] == hashlib.sha256(bundle.read_bytes()).hexdigest()
    assert "is there already" in inside("cache", "export", "-o", url).stderr
    assert inside("cache", "export", "-o", url, "--force", "-q").code == 0
    with places.source(url) as file:
        assert file.read(1 << 30) == bundle.read_bytes()
    monkeypatch.setenv("MLACTL_CACHE_DIR", str(tmp_path / "node"))
    assert inside("cache", "import", url, "-q").stdout.splitlines() == keys(filled.all)
    local = tmp_path / "by-url"
    monkeypatch.setenv("MLACTL_CACHE_DIR", str(filled.current.root))
    assert inside("cache", "export", "-o", f"file://{local}", "-q").code == 0
    assert local.read_bytes() == bundle.read_bytes()
    assert inside("cache", "import", f"file://{local}", "-q").code == 0
    none = inside("cache", "import", "memory://bundles/none")
    assert (none.code, "memory://bundles/none: there is nothing" in none.stderr) == (2, True)
    assert all(examine(entry).status == "ok" for entry in Store.open(str(tmp_path / "node")).entries())


def test_a_remote_write_that_fails_leaves_nothing():
    def half(file):
        file.write(b"half")
        raise OSError(5, "Input/output error")

    with pytest.raises(CannotRun, match="cannot write memory://bundles/half: Input/output error"):
        places.deliver("memory://bundles/half", half, force=False)
    with pytest.raises(CannotRun, match="there is nothing"), places.source("memory://bundles/half"):
        pass


@pytest.mark.parametrize(
    ("url", "error", "said"),
    [
        ("nosuch://bucket/x", UsageError, "Protocol not known: nosuch"),
        ("s3://bucket/x", EnvironmentUnfit, "s3:// needs a package that is not installed"),
    ],
)
def test_urls_that_lead_nowhere(url, error, said):
    with pytest.raises(error) as raised, places.source(url):
        pass
    assert said in raised.value.message
    if error is EnvironmentUnfit:
        assert raised.value.hint == "pip install s3fs"


def test_a_failing_source_is_named_without_its_credentials():
    class Broken(io.BytesIO):
        def read(self, size=-1):
            raise RuntimeError("connection reset")

    with pytest.raises(CannotRun, match=r"cannot read https://host/b: connection reset"):
        places.guarded(Broken(), "https://user:secret@host/b?token=1").read(1)
    assert places.shown("s3://key:secret@bucket/b") == "s3://bucket/b"
    assert places.shown("/a?b@c") == "/a?b@c"


SIGNED = "https://bucket.example/b.tar.zst?X-Amz-Credential=AKIA%2F20260101&X-Amz-Signature=0a1b2c3d4e"


@pytest.mark.parametrize(
    ("where", "shown"),
    [
        ("ftp://user:pa@ss@host/b", "ftp://host/b"),
        ("ftp://user:se/cret@host/b", "ftp://…@host/b"),
        ("ftp://user:se?cret@host/b", "ftp://…"),
        ("ftp://user:se#cret@host/b", "ftp://…"),
        ("https://ghp_token@host/b", "https://host/b"),
        ("https://host/b#access_token=abcd", "https://host/b"),
        ("https://host:8443/b?to=a@secret", "https://…"),
        ("https://host/b?to=a@secret", "https://host/b"),
        ("https://host/pkg@1/b", "https://host/pkg@1/b"),
        ("simplecache::https://user:secret@host/b?secret", "simplecache::https://host/b"),
        ("s3://AK:SEC/RETSECRET@bucket/x", "s3://…@bucket/x"),
        ("s3:///AK:secret@bucket/x", "s3:///bucket/x"),
        ("http://[secret/x", "http://…"),
        ("http://user:secret@[::1]:8080/x", "http://[::1]:8080/x"),
        ("s3:/AK:secret@b/x", "s3:/b/x"),
        ("s3:AK:secret@b/x", "s3:b/x"),
        ("s3//AK:secret@b/x", "s3//b/x"),
        ("s3;//AK:secret@b/x", "s3;//b/x"),
        ("//AK:secret@b/x", "//b/x"),
        ("s3:/b/x?sig=secret", "s3:/b/x"),
        ("out//run@1/x", "out//run@1/x"),
        ("kimi:1.tar.zst", "kimi:1.tar.zst"),
        (SIGNED, "https://bucket.example/b.tar.zst"),
    ],
)
def test_a_url_is_shown_without_its_credentials(where, shown):
    assert places.shown(where) == shown


@pytest.mark.parametrize(
    ("where", "error", "said"),
    [
        # aiohttp's text has the URL as yarl normalises it, urllib3's the path and query, ftplib's neither.
        (
            SIGNED,
            RuntimeError(
                "403, message='Forbidden', url='https://bucket.example/b.tar.zst?X-Amz-Credential=AKIA/20260101&X-Amz-Signature=0a1b2c3d4e'"
            ),
            "403, message='Forbidden', url='https://bucket.example/b.tar.zst",
        ),
        (SIGNED, OSError("Max retries exceeded with url: /b.tar.zst?X-Amz-Signature=0a1b2c3d4e (refused)"), "with url: /b.tar.zst (refused)"),
        (SIGNED, OSError(13, "bad signature 0a1b2c3d4e for AKIA/20260101"), "bad signature … for …"),
        (
            "ftp://user:pa@ss@host/b",
            RuntimeError("530 user:pa@ss was refused by ftp://user:pa%40ss@host:21/"),
            "530 user:… was refused by ftp://host:21/",
        ),
        ("ftp://user:se/cret@host/b", ConnectionError("no host se/cret in 'ftp://user:se%2Fcret@host/b'"), "no host … in 'ftp://host/b'"),
        ("https://user:two%20words@host/b", RuntimeError("https://user:two words@host/b: reset"), "https://host/b: reset"),
    ],
    ids=["aiohttp", "urllib3", "strerror", "ftp", "slash", "blank"],
)
@pytest.mark.parametrize("what", ["read", "open", "exists", "write"])
def test_what_a_client_says_is_shown_without_credentials(where, error, said, what, monkeypatch):
    class Filesystem:
        transaction = contextlib.nullcontext()

        def open(self, path, mode):
            if what == "open":
                raise error
            return io.BytesIO() if mode == "wb" else self

        def exists(self, path):
            if what == "exists":
                raise error
            return False

        def read(self, size):
            raise error

        def close(self):
            raise error

    def write(file):
        raise error

    monkeypatch.setattr("fsspec.core.url_to_fs", lambda url: (Filesystem(), url))

    def go():
        if what in ("exists", "write"):
            places.deliver(where, write, force=False)
            return
        with places.source(where) as file:
            file.read(1)

    with pytest.raises(CannotRun) as raised:
        go()
    assert raised.value.message.endswith(said)
    printed = "".join(traceback.format_exception(raised.value))
    assert not [
        secret
        for secret in ("0a1b2c3d4e", "AKIA", "pa@ss", "ss@host", "pa%40ss", "se/cret", "cret@", "words")
        if secret in printed.partition("CannotRun: ")[2]
    ]
    assert "direct cause" not in printed
    assert "another exception" not in printed


def test_a_url_that_fsspec_refuses_is_named_without_credentials(monkeypatch):
    def refuse(url):
        raise ValueError(f"cannot parse {url}")

    monkeypatch.setattr("fsspec.core.url_to_fs", refuse)
    with pytest.raises(UsageError) as raised, places.source("sftp://user:pa@ss@host/b"):
        pass
    assert raised.value.message == "sftp://host/b: cannot parse sftp://host/b"


@pytest.mark.parametrize("command", [("import",), ("export", "-o")], ids=["import", "export"])
@pytest.mark.parametrize(
    "where",
    [
        "s3://AK:SEC/RETSECRET@bucket/x",
        "https://h/x#SECRET",
        "http://[SECRET/x",
        "ftp://[SECRET/x",
        "nosuch:///AK:SECRET@b/x",
        "s3:/AK:SECRET@b/x",
        "s3:AK:SECRET@b/x",
        "s3//AK:SECRET@b/x",
        "s4;//AK:SECRET@b/x",
        "//AK:SECRET@b/x",
        "http:/b/x?sig=SECRET",
    ],
)
def test_no_spelling_of_a_url_prints_what_is_secret_in_it(run, tmp_path, monkeypatch, command, where):
    monkeypatch.chdir(tmp_path)
    done = run("cache", *command, where)
    assert done.code in (2, 3)
    assert "SECRET" not in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "home"]


def test_names_with_colons_are_files(run, filled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("kimi:1.tar.zst", "./s3:b"):
        assert run("cache", "export", "-o", name, "-q").code == 0
        assert run("cache", "import", name, "--dry-run", "-q").code == 0


@pytest.mark.parametrize(
    ("where", "hint"),
    [
        ("s3://b/x", "pip install s3fs"),
        ("https://h/x", "pip install 'fsspec[http]'"),
        ("simplecache::https://h/x", "pip install 'fsspec[http]'"),
        ("github://h/x", "pip install requests"),
        ("webhdfs://h/x", "pip install requests"),
        ("jlab://h/x", "pip install requests"),
        ("sftp://h/x", "pip install paramiko"),
        ("smb://h/x", "pip install 'fsspec[smb]'"),
        ("dropbox://h/x", "pip install 'fsspec[dropbox]'"),
        ("libarchive://h/x", "pip install 'fsspec[libarchive]'"),
        ("adl://h/x", "pip install adlfs"),
        ("dask://h/x", "pip install 'fsspec[dask]'"),
        ("asynclocal://h/x", "install what it asks for, or name a local file"),
    ],
)
def test_the_package_of_a_filesystem_is_one_that_there_is(where, hint, monkeypatch):
    """What fsspec's table says of each filesystem, as fsspec raises it when the import fails."""
    protocol = where.rpartition("::")[2].partition("://")[0]

    def missing(url):
        raise ImportError(known_implementations[protocol]["err"])

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(EnvironmentUnfit, match=f"{protocol}:// needs a package") as raised, places.source(where):
        pass
    assert raised.value.hint == hint


def test_what_a_client_says_names_no_package(monkeypatch):
    def missing(url):
        raise ImportError("Install the whole thing to use it")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(EnvironmentUnfit) as raised, places.source("s3://b/x"):
        pass
    assert raised.value.hint == "install what it asks for, or name a local file"
