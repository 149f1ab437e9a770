"""`cache ls`, `show`, `stats`, `dir` and `why`: every output mode and exit code, whole outputs."""

import contextlib
import os
import pty
import re
import shutil
import sys

import pytest
import stand_ins
import tiny

from mlactl.cache.key import inputs_for

SIZE = re.compile(r"\d+(\.\d)? (B|KiB)")


def squeezed(text, *, ages=True):
    """Lines with columns two spaces apart and, where they end in an age and a last use, those two left out."""
    lines = [re.sub(r" {2,}", "  ", SIZE.sub("SIZE", line)) for line in text.splitlines()]
    return [re.sub(r"  (\d+[smhd]|-)  (\d+[smhd]|-)$", "  AGE  USED", line) for line in lines] if ages else lines


def row(entry):
    spec = entry.manifest.spec
    facts = f"dtype={spec.fact('dtype')} factor={spec.fact('factor')}"
    return f"{entry.key[:12]}  test.tiny  {spec.version}  {entry.status}  {entry.manifest.arch}  {facts}  SIZE  AGE  USED"


HEAD = "key  kernel  version  status  arch  facts  size  age  used"


# ---- ls


def test_ls_in_every_mode(cache, filled):
    done = cache.every_mode("cache", "ls", rows="entries")
    assert squeezed(done["human"].stdout) == [HEAD, *map(row, filled.in_order)]
    assert done["human"].stderr == "6 entries\n"
    assert done["quiet"].lines == [entry.key for entry in filled.in_order]
    assert done["json"].json == {
        "schema_version": 1,
        "entries": [
            {
                "key": entry.key,
                "spec": entry.manifest.spec.as_json(),
                "status": "ok",
                "arch": entry.manifest.arch,
                "object_bytes": entry.object_path.stat().st_size,
                "created": entry.manifest.created,
                "last_used": iso(entry.manifest_path.stat().st_mtime),
            }
            for entry in filled.in_order
        ],
    }


def iso(moment):
    import time

    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))


def test_ls_of_an_empty_root_is_clean(cache):
    done = cache.every_mode("cache", "ls", rows="entries")
    assert done["json"].json == {"schema_version": 1, "entries": []}
    assert (done["human"].stdout, done["quiet"].stdout, done["jsonl"].stdout) == ("", "", "")
    assert done["human"].stderr == f"0 entries\nhint: mlactl warmup --profile NAME fills {cache.cache_dir}\n"
    assert not cache.cache_dir.exists(), "looking makes nothing"


def test_ls_filters(cache, filled):
    """Values of one filter are alternatives, filters narrow each other; a kernel is its id, a dotted start or a pattern."""
    everything = ["newer", "current", "other_sources", "other_toolchain", "sm_121a", "superseded"]
    for options, names in (
        (("--kernel", "test.tiny"), everything),
        (("--kernel", "test"), everything),
        (("--kernel", "*.tiny"), everything),
        (("--kernel", "test.tin"), []),
        (("--arch", "sm_121a"), ["sm_121a"]),
        (("--arch", "sm_121a", "--arch", "sm_90a"), ["sm_121a"]),
        (("--arch", "sm_90a"), []),
        (("--status", "ok", "--status", "temp", "--arch", "sm_121a"), ["sm_121a"]),
        (("--status", "size"), []),
    ):
        assert sorted(cache("cache", "ls", "-q", *options).lines) == sorted(getattr(filled, name).key for name in names), options
    nothing = cache("cache", "ls", "--status", "size")
    assert (nothing.code, nothing.stdout) == (0, "")
    assert nothing.stderr == "0 entries\nhint: nothing matched; the cache has test.tiny 0, test.tiny 1, test.tiny 2\n"


def test_ls_names_damage_it_can_see(cache, filled):
    """Names, sizes and manifests only: a flipped bit stays unseen here, and verify finds it."""
    filled.current.manifest_path.unlink()
    filled.superseded.object_path.unlink()
    filled.newer.manifest_path.write_bytes(b"{}")
    os.truncate(filled.other_sources.object_path, 4096)
    stand_ins.leave_temporary(filled.other_toolchain)
    stand_ins.flip_bit(filled.other_toolchain)
    stand_ins.quarantine(filled.sm_121a)
    done = cache.every_mode("cache", "ls", rows="entries")
    found = sorted((item["key"], item["status"]) for item in done["json"].json["entries"])
    assert found == sorted(
        [
            (filled.current.key, "no-manifest"),
            (filled.superseded.key, "no-object"),
            (filled.newer.key, "bad-manifest"),
            (filled.other_sources.key, "size"),
            (filled.other_toolchain.key, "ok"),
            (filled.other_toolchain.key, "temp"),
            (filled.sm_121a.key, "quarantined"),
        ]
    )
    bad = next(item for item in done["json"].json["entries"] if item["status"] == "bad-manifest")
    assert (bad["spec"], bad["arch"], bad["created"]) == (None, None, None)
    assert f"{filled.other_sources.key[:12]} size: 4096 bytes, expected {filled.other_sources.object_bytes}\n" in done["human"].stderr
    assert done["human"].stderr.endswith("mlactl cache verify checks every object; mlactl cache prune --status WORD --dry-run shows what would go\n")
    only = cache("cache", "ls", "-q", "--status", "size", "--status", "temp")
    assert sorted(only.lines) == sorted([filled.other_sources.key, filled.other_toolchain.key])


def test_ls_shows_200_rows_and_says_so(cache, filled, store):
    """A listing of thousands of rows scrolls its head away; the count says what is not shown."""
    one = filled.current
    for number in range(300):
        key = f"{number:064x}"
        bucket = one.object_path.parents[1] / key[:2]
        bucket.mkdir(exist_ok=True)
        (bucket / f"{key}.so").write_bytes(b"")
    done = cache("cache", "ls")
    assert len(done.lines) == 201
    assert done.stderr.startswith("306 entries, 200 shown; --all prints every one\n")
    everything = cache("cache", "ls", "--all")
    assert len(everything.lines) == 306
    assert everything.lines[0].split()[:2] == [filled.newer.key[:12], "test.tiny"]
    assert len(cache("cache", "ls", "-q").lines) == 306


def test_ls_tells_layers_apart(cache, filled, tmp_path):
    lower = tmp_path / "lower"
    shutil.copytree(cache.cache_dir, lower)
    both = cache("cache", "ls", "--cache-dir", f"{cache.cache_dir}:{lower}")
    assert both.lines[0].split()[-1] == "root"
    assert sorted({line.split()[-1] for line in both.lines[1:]}) == sorted([str(cache.cache_dir), str(lower)])
    assert both.stderr == "12 entries\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--status", "broken"), "--status 'broken' is not one of ok, no-manifest, no-object,"),
        (("--arch", "sm_120"), "--arch sm_120 is not supported, objects are made for sm_120a, sm_121a, sm_90a"),
        (("--json", "-q"), "two output modes were asked for: json and quiet"),
        (("--output", "prometheus"), "prometheus"),
    ],
)
def test_ls_refuses_what_makes_no_sense(cache, options, words):
    done = cache("cache", "ls", *options)
    assert (done.code, done.stdout) == (2, "")
    assert words in done.stderr
    assert "\nhint: " in done.stderr


@pytest.mark.parametrize("command", [("ls",), ("stats",), ("show", "ab"), ("why", "ab"), ("verify",), ("prune", "--dry-run"), ("rm", "ab", "--yes")])
def test_an_unreadable_root_is_exit_2(cache, command):
    """A path that is no folder, as a mistyped variable gives."""
    cache.cache_dir.write_text("a file")
    done = cache("cache", *command)
    assert (done.code, done.stdout) == (2, "")
    assert str(cache.cache_dir) in done.stderr
    assert "\nhint: " in done.stderr


@stand_ins.as_root
def test_another_owners_root(cache, filled, as_nobody):
    """Readable: listed, verified, explained. Closed: exit 2 with owner and mode. Never a traceback."""
    root = cache.cache_dir
    stand_ins.let_others_read(root)
    listed = as_nobody("cache", "ls", "-q")
    assert (listed.code, len(listed.lines)) == (0, 6)
    assert as_nobody("cache", "verify", "--json").json["bad"] == 0
    assert as_nobody("cache", "show", filled.current.key, "-q").lines == [filled.current.key]
    refused = as_nobody("cache", "prune", "--yes", "--json")
    assert refused.code == 2
    assert re.search(r"1 entry could not be removed; .*owner root.*mode 0\d+", refused.stderr), refused.stderr
    assert filled.superseded.object_path.exists()
    (root / "v1").chmod(0o700)
    closed = as_nobody("cache", "ls", "-q")
    assert (closed.code, closed.stdout) == (2, "")
    assert re.search(r"v1 \(owner root \(uid 0\), mode 0700\) cannot be read", closed.stderr), closed.stderr


# ---- show


def test_show_in_every_mode(cache, filled):
    entry = filled.current
    done = cache.every_mode("cache", "show", entry.key[:10])
    assert done["quiet"].lines == [entry.key]
    document = done["json"].json
    manifest = entry.manifest
    assert document["entry"] == {
        "key": entry.key,
        "spec": manifest.spec.as_json(),
        "status": "ok",
        "arch": "sm_120a",
        "object_bytes": entry.object_bytes,
        "created": manifest.created,
        "last_used": document["entry"]["last_used"],
        "detail": None,
    }
    assert document["manifest"] == manifest.as_json()
    assert document["symbols"] == [f"mlactl_{entry.key}"]
    assert document["signature"] == "__call__(x: Tensor([n0], float32), y: Tensor([n1], float32))"
    assert (document["root"], document["object_arch"]) == (str(cache.cache_dir), "sm_120a")
    (kernel,) = document["resources"]
    recorded = manifest.resources[0]
    assert kernel == {
        "name": recorded.name,
        "registers": recorded.registers,
        "frame_bytes": 0,
        "local_bytes": 0,
        "static_smem_bytes": 0,
        "dynamic_smem_bytes": None,
    }
    lines = squeezed(done["human"].stdout, ages=False)
    assert lines[:6] == [f"key  {entry.key}", "status  ok", "kernel  test.tiny", "version  1", "facts  dtype=f32 factor=2", "arch  sm_120a"]
    assert f"symbols  mlactl_{entry.key}" in lines
    assert lines[-2] == "device kernel  registers  frame bytes  local bytes  static smem bytes  dynamic smem bytes"
    assert lines[-1] == f"{recorded.name[:47]}…  {recorded.registers}  0  0  0  -"


@pytest.mark.parametrize(
    ("damage", "status"),
    [
        (stand_ins.flip_bit, "digest"),
        (lambda entry: os.truncate(entry.object_path, 100), "size"),
        (lambda entry: entry.object_path.unlink(), "no-object"),
        (lambda entry: entry.manifest_path.unlink(), "no-manifest"),
        (lambda entry: entry.manifest_path.write_bytes(b"\x00" * 10), "bad-manifest"),
        (stand_ins.quarantine, "quarantined"),
    ],
)
def test_show_of_a_bad_entry_is_exit_0_and_says_what_is_wrong(cache, filled, damage, status):
    damage(filled.current)
    done = cache("cache", "show", filled.current.key)
    assert done.code == 0
    assert squeezed(done.stdout)[1].startswith(f"status  {status}: ")
    assert f"mlactl cache rm {filled.current.key[:12]}" in done.stderr
    assert cache("cache", "show", filled.current.key, "--json").json["entry"]["status"] == status


def test_an_unknown_or_ambiguous_key(cache, filled):
    for command in ("show", "why"):
        unknown = cache("cache", command, "feedc0de")
        assert (unknown.code, unknown.stdout) == (1, "")
        assert unknown.stderr == f"error: no entry feedc0de in {cache.cache_dir}\nhint: mlactl cache ls shows the keys there are\n"
        assert cache("cache", command, "../../etc/passwd").code == 1
    twin = filled.current.key[:-1] + ("0" if filled.current.key[-1] != "0" else "1")
    filled.current.object_path.with_name(f"{twin}.so").write_bytes(b"")
    ambiguous = cache("cache", "show", filled.current.key[:20])
    assert (ambiguous.code, ambiguous.stdout) == (2, "")
    assert "fits 2 keys" in ambiguous.stderr


# ---- stats and dir


def test_stats_in_every_mode(cache, filled):
    os.truncate(filled.newer.object_path, 10)
    done = cache.every_mode("cache", "stats")
    sizes = {entry.key: entry.object_path.stat().st_size for entry in filled.all}
    total = sum(sizes.values())
    assert done["quiet"].lines == [f"{cache.cache_dir} 6 {total}"]
    (root,) = done["json"].json["roots"]
    assert (root["path"], root["writable"], root["entries"], root["object_bytes"]) == (str(cache.cache_dir), True, 6, total)
    assert [(group["version"], group["arch"], group["status"], group["entries"]) for group in root["groups"]] == [
        (0, "sm_120a", "ok", 1),
        (1, "sm_120a", "ok", 3),
        (1, "sm_121a", "ok", 1),
        (2, "sm_120a", "size", 1),
    ]
    assert sorted(root["toolchains"].values()) == [1, 5]
    assert root["oldest_use"] == iso(filled.superseded.last_used)
    assert squeezed(done["human"].stdout)[:6] == [
        f"{cache.cache_dir}: 6 entries, SIZE",
        "kernel  version  arch  status  entries  size",
        "test.tiny  0  sm_120a  ok  1  SIZE",
        "test.tiny  1  sm_120a  ok  3  SIZE",
        "test.tiny  1  sm_121a  ok  1  SIZE",
        "test.tiny  2  sm_120a  size  1  SIZE",
    ]


def test_stats_for_prometheus(cache, filled):
    done = cache("cache", "stats", "--output", "prometheus")
    assert (done.code, done.stderr) == (0, "")
    labels = f'{{root="{cache.cache_dir}",root_kind="mlactl",kernel_id="test.tiny",version="1",arch="sm_121a",status="ok"}}'
    assert f"mlactl_cache_entries{labels} 1" in done.lines
    assert f"mlactl_cache_object_bytes{labels} {filled.sm_121a.object_bytes}" in done.lines
    assert done.lines[:2] == ["# HELP mlactl_cache_entries Entries of the compile cache", "# TYPE mlactl_cache_entries gauge"]
    sample = re.compile(r'[a-z_]+\{([a-z_]+="[^"\n]*",?)+\} \d+|# (HELP|TYPE) .+')
    assert all(sample.fullmatch(line) for line in done.lines)


def test_stats_of_an_empty_root(cache):
    done = cache.every_mode("cache", "stats")
    assert done["human"].stdout == f"{cache.cache_dir}: 0 entries, 0 B\n"
    assert done["json"].json["roots"][0]["groups"] == []


def test_dir_in_every_mode(cache, tmp_path):
    layers = {"MLACTL_CACHE_DIR": f"{tmp_path}:/shared/kernels"}
    done = cache.every_mode("cache", "dir", env=layers)
    assert done["human"].stdout == done["quiet"].stdout == f"{tmp_path}\n/shared/kernels\n"
    assert done["human"].stderr == "/shared/kernels does not exist yet\n/shared/kernels is a read-only layer\n"
    assert done["json"].json["roots"] == [
        {"path": str(tmp_path), "writable": True, "exists": True},
        {"path": "/shared/kernels", "writable": False, "exists": False},
    ]


# ---- why


def test_why_of_a_hit_and_of_other_sources(cache, filled):
    done = cache.every_mode("cache", "why", filled.current.key)
    assert done["human"].stdout == (
        f"hit   test.tiny 1 dtype=f32 factor=2 for sm_120a\n      a lookup here finds this entry\n      key here  {filled.current.key}\n"
    )
    assert done["quiet"].lines == []
    here = inputs_for(tiny.spec(7), "sm_120a")
    done = cache.every_mode("cache", "why", filled.other_sources.key)
    assert squeezed(done["human"].stdout, ages=False) == [
        "miss  test.tiny 1 dtype=f32 factor=7 for sm_120a",
        "  this machine builds with another sources_digest",
        f"  key here  {here.key()}",
        f"  entry  {filled.other_sources.key}",
        "  field  entry  here",
        f"  sources_digest  {'ab' * 32}  {here.sources_digest}",
    ]
    assert done["quiet"].lines == [here.key()]
    assert done["json"].json["lookups"][0] == {
        "key": here.key(),
        "spec": tiny.spec(7).as_json(),
        "arch": "sm_120a",
        "hit": False,
        "reason": "this machine builds with another sources_digest",
        "entry": filled.other_sources.key,
        "status": "ok",
        "differences": [{"field": "sources_digest", "entry": "ab" * 32, "here": here.sources_digest}],
        "notes": [],
    }


def test_why_for_a_profile(cache, filled):
    """A lookup of the profile's kernels in a root that has others: misses, each with the key that is looked for."""
    done = cache.every_mode("cache", "why", "--profile", "ci-small", "--arch", "sm_120a")
    lookups = done["json"].json["lookups"]
    assert lookups
    assert not any(item["hit"] for item in lookups)
    assert done["quiet"].lines == [item["key"] for item in lookups]
    assert done["human"].lines[-1] == f"0 of {len(lookups)} lookups hit"
    assert done["human"].stderr == "hint: mlactl warmup --profile ci-small compiles what is missing\n"


def test_why_needs_one_thing_to_explain(cache):
    neither, both = cache("cache", "why"), cache("cache", "why", "ab", "--profile", "ci-small")
    assert (neither.code, both.code) == (2, 2)
    assert neither.stderr.startswith("error: expected a KEY or --profile, found neither\n")
    assert both.stderr.startswith("error: expected a KEY or --profile, found both\n")
    assert cache("cache", "why", "--profile", "no-such-profile").code == 2


# ---- completion


def test_keys_are_completed(cache, filled):
    key = filled.current.key
    words = {"_MLACTL_COMPLETE": "complete_bash", "COMP_WORDS": f"mlactl cache show {key[:5]}", "COMP_CWORD": "3"}
    done = cache(env=words)
    assert key in done.stdout.split()
    assert all(word.startswith(key[:5]) for word in done.stdout.split())
    statuses = cache(env={**words, "COMP_WORDS": "mlactl cache ls --status no-", "COMP_CWORD": "4"})
    assert sorted(statuses.stdout.split()) == ["no-manifest", "no-object"]


@pytest.mark.parametrize(("width", "dropped"), [(80, "facts"), (60, "facts, used, age, size"), (200, "")])
def test_a_narrow_terminal_drops_columns_and_folds_no_key(cache, filled, width, dropped):
    """At 80 columns keys and kernel ids were folded over several lines, to be neither read nor copied."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ.clear()
        os.environ.update({**cache.env, "TERM": "dumb", "COLUMNS": str(width)})
        os.execv(sys.executable, [*cache.launch, "cache", "ls"])
    shown = b""
    with contextlib.suppress(OSError):  # what the end of a terminal is
        while part := os.read(terminal, 4096):
            shown += part
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    lines = shown.decode().splitlines()
    rows = [line for line in lines if "test.tiny" in line]
    assert [row.split()[0] for row in rows] == [entry.key[:12] for entry in filled.in_order]
    assert all(len(row) <= width for row in rows)
    hint = [line for line in lines if line.startswith("hint: no room for")]
    expected = [f"hint: no room for {dropped}: mlactl cache ls --all prints them, mlactl cache show KEY all of one entry"] if dropped else []
    assert hint == expected
    assert ("factor=2" in shown.decode()) == (not dropped)
