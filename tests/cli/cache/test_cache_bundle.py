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
