"""`cache prune` and `rm`: plan, ask, apply; every output mode and exit code."""

import os
import pty
import re
import signal
import sys
import time
from types import SimpleNamespace

import msgspec
import pytest
import stand_ins
import tiny

from mlactl.cache import locks
from mlactl.cache.prune import PrunePlan, apply, plan
from mlactl.cache.selectors import Selectors
from mlactl.cli.cache import remove

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


def squeezed(text):
    return [re.sub(r" {2,}", "  ", TIME.sub("TIME", line)) for line in text.splitlines()]


def left(store):
    return sorted(entry.key for entry in store.entries())


def kib(*entries):
    return f"{sum(entry.object_bytes for entry in entries) / 1024:.1f} KiB"


def modes(cache, *words):
    return {mode: cache("cache", *words, "--output", mode) for mode in ("human", "json", "jsonl", "quiet")}


# ---- dry run


def test_a_dry_run_prints_what_apply_consumes(cache, store, filled):
    before, entry = left(store), filled.superseded
    done = modes(cache, "prune", "--dry-run")
    assert {mode: (result.code, left(store) == before) for mode, result in done.items()} == dict.fromkeys(done, (0, True))
    assert squeezed(done["human"].stdout) == [
        "key  kernel  version  status  arch  size  last used  why",
        f"{entry.key[:12]}  test.tiny  0  ok  sm_120a  {kib(entry)}  TIME  version 0 superseded by 1",
        f"1 entry ({kib(entry)}) of 6 entries ({kib(*filled.all)}) in {cache.cache_dir}; selected: superseded",
    ]
    assert done["quiet"].lines == [entry.key]
    assert done["json"].json["schema_version"] == 1
    assert {**done["jsonl"].json, "planned": 0} == {**done["json"].json, "planned": 0}
    plan = msgspec.json.decode(done["json"].stdout, type=PrunePlan)
    assert [item.key for item in plan.entries] == [entry.key]
    assert apply(plan).removed == (entry.key,)
    assert left(store) == sorted(set(before) - {entry.key})


def test_a_dry_run_says_how_to_go_ahead(cache, filled):
    done = cache("cache", "prune", "--spec", "test.tiny<1", "--dry-run")
    assert done.stderr == "dry run: nothing was removed\nhint: mlactl cache prune --spec 'test.tiny<1' --yes\n"
    nothing = cache("cache", "prune", "--kernel", "attention", "--dry-run")
    assert nothing.code == 0
    assert nothing.stdout == f"0 entries (0 B) of 6 entries ({kib(*filled.all)}) in {cache.cache_dir}; selected: --kernel attention\n"
    assert nothing.stderr == "dry run: nothing was removed\nhint: nothing matched; the root has test.tiny 0, test.tiny 1, test.tiny 2\n"


# ---- applied


def test_the_default_removes_superseded_versions(cache, store, filled):
    done = cache("cache", "prune", "--yes")
    assert (done.code, done.stdout) == (0, f"removed 1 entry ({kib(filled.superseded)}) from {cache.cache_dir}\n")
    assert left(store) == sorted(entry.key for entry in filled.all if entry != filled.superseded)
    again = cache("cache", "prune", "--yes")
    assert (again.code, again.stdout) == (0, f"removed 0 entries (0 B) from {cache.cache_dir}\n")


def test_json_and_quiet_tell_what_was_removed(cache, store, filled):
    done = cache("cache", "prune", "--stale", "--yes", "--json")
    assert (done.code, done.stderr) == (0, "")
    gone = {filled.other_sources.key, filled.other_toolchain.key}
    document = done.json
    assert document == {
        "schema_version": 1,
        "root": str(cache.cache_dir),
        "selection": ["--stale"],
        "removed": document["removed"],
        "freed_bytes": filled.other_sources.object_bytes + filled.other_toolchain.object_bytes,
        "skipped": [],
        "failed": [],
        "locks_removed": 0,
        "kept": [],
    }
    assert set(document["removed"]) == gone
    assert cache("cache", "prune", "--arch", "sm_121a", "--yes", "-q").stdout == f"{filled.sm_121a.key}\n"
    assert left(store) == sorted(entry.key for entry in (filled.current, filled.superseded, filled.newer))


def test_each_selector_reaches_the_service(cache, filled):
    """Together they AND; each was tried alone by the service's own tests, here the options have to arrive."""

    def selected(*words):
        done = cache("cache", "prune", "--dry-run", "-q", *words)
        assert done.code == 0, done.stderr
        return sorted(done.lines)

    assert selected("--older-than", "30d", "--unused-for", "2w") == [filled.sm_121a.key]
    assert selected("--kernel", "test", "--spec", "test.tiny<1", "--spec", "test.tiny>1") == sorted([filled.superseded.key, filled.newer.key])
    assert selected("--max-size", str(5 * filled.current.object_bytes)) == [filled.superseded.key]
    assert selected("--status", "temp") == []
    assert selected("--locks") == []
    assert selected("--stale", "--keep-profile", "ci-small") == sorted([filled.other_sources.key, filled.other_toolchain.key])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--spec", "test.tiny"), "--spec 'test.tiny' is no kernel, comparison and version"),
        (("--older-than", "30"), "--older-than '30' is no duration"),
        (("--unused-for", "soon"), "--unused-for 'soon' is no duration"),
        (("--max-size", "big"), "--max-size 'big' is no size"),
        (("--status", "stale"), "--status 'stale' is not one of"),
        (("--arch", "sm_100a"), "--arch sm_100a is not supported"),
        (("--keep-profile", "no-such-profile"), "no-such-profile"),
        (("--cache-dir", ":/nowhere"), "every layer is read-only: /nowhere"),
    ],
)
def test_what_makes_no_sense_is_exit_2_and_removes_nothing(cache, words, said):
    done = cache("cache", "prune", "--yes", *words)
    assert (done.code, done.stdout) == (2, "")
    assert said in done.stderr
    assert "\nhint: " in done.stderr


def test_off_a_terminal_without_yes_it_refuses(cache, store, filled):
    """A cron job that waits for an answer nobody gives; or worse, one that takes silence for yes."""
    before = left(store)
    for words in (("prune",), ("prune", "--json"), ("prune", "--kernel", "nothing.here"), ("rm", filled.current.key)):
        done = cache("cache", *words)
        assert (done.code, done.stdout) == (2, ""), words
        assert re.search(
            r"error: removing \d entr.* from .* needs a yes, and there is no terminal to ask on\n"
            r"hint: add --yes to go ahead or --dry-run to only look\n",
            done.stderr,
        )
    assert left(store) == before


def ask(cache, answer, *words):
    """Runs the command on a terminal of its own and answers its question; (exit code, what the terminal showed)."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ.clear()
        os.environ.update({**cache.env, "TERM": "dumb", "COLUMNS": "200"})
        os.execv(sys.executable, [*cache.launch, "cache", *words])
    shown = b""
    while b"[y/N]" not in shown and (part := read(terminal)):
        shown += part
    os.write(terminal, answer)
    while part := read(terminal):
        shown += part
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), shown.decode()


def read(terminal):
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""


def test_on_a_terminal_the_plan_is_shown_and_asked_about(cache, store, filled):
    before = left(store)
    code, shown = ask(cache, b"n\n", "prune")
    assert code == 1
    assert "version 0 superseded by 1" in shown
    assert f"remove 1 entry ({kib(filled.superseded)}) from {cache.cache_dir}? [y/N]" in shown
    assert "stopped, nothing was changed" in shown
    assert left(store) == before
    code, shown = ask(cache, b"y\n", "prune")
    assert (code, f"removed 1 entry ({kib(filled.superseded)})" in shown) == (0, True)
    assert left(store) == sorted(set(before) - {filled.superseded.key})


def test_in_use_is_skipped_and_said(cache, store, filled):
    with locks.entry_lock(store.roots.writable, filled.superseded.key, exclusive=False, wait_s=0.0):
        done = cache("cache", "prune", "--yes")
    assert done.code == 0
    assert done.lines[0] == f"removed 0 entries (0 B) from {cache.cache_dir}"
    assert re.fullmatch(rf"skipped {filled.superseded.key[:12]}: .*\.lock is in use by process {os.getpid()}", done.lines[1])


def test_locks_alone(cache, store, filled):
    plan = cache("cache", "prune", "--locks", "--dry-run")
    assert len([line for line in plan.lines if line.endswith(".lock")]) == 6
    done = cache("cache", "prune", "--locks", "--yes")
    assert (done.code, done.stdout) == (0, f"removed 0 entries (0 B) and 6 lock files from {cache.cache_dir}\n")
    assert len(left(store)) == 6


def test_ctrl_c_leaves_a_valid_cache_and_says_so(cache, store, prebuilt, tmp_path):
    """Stopped in the middle of thousands of removals: exit 130, and what is left is whole."""
    entry = stand_ins.publish(store, prebuilt, tiny.spec(3), version=0)
    buckets = entry.object_path.parents[1]
    for number in range(20_000):
        key = f"{number * 7919 % 0xFFFFFF:06x}{number:058x}"
        (buckets / key[:2]).mkdir(mode=0o700, exist_ok=True)
        (buckets / key[:2] / f"{key}.so").write_bytes(b"x")
    process = cache.start("cache", "prune", "--status", "no-manifest", "--yes")
    deadline = time.monotonic() + 120
    while sum(1 for _ in buckets.glob("0*/*.lock")) < 10 and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    said = re.search(r"interrupted: (\d+) of 20000 entries were looked at, (\d+) removed; the cache is valid\n", stderr)
    assert said, stderr
    assert said[1] == said[2]
    remaining = [item for item in store.entries() if item.key != entry.key]
    assert len(remaining) == 20_000 - int(said[2])
    assert store.entry(entry.key).status == "ok"


# ---- rm


def test_rm_by_unique_start(cache, store, filled):
    keys = [filled.current.key, filled.newer.key]
    dry = cache("cache", "rm", keys[0][:9], keys[1], keys[1], "--dry-run", "-q")
    assert (dry.code, sorted(dry.lines)) == (0, sorted(keys))
    done = cache("cache", "rm", keys[0][:9], keys[1], "--yes")
    assert (done.code, done.stdout) == (0, f"removed 2 entries ({kib(filled.current, filled.newer)}) from {cache.cache_dir}\n")
    assert left(store) == sorted(entry.key for entry in filled.all if entry.key not in keys)


def test_rm_of_an_absent_key_is_exit_1_and_removes_nothing(cache, store, filled):
    before = left(store)
    done = cache("cache", "rm", filled.current.key, "feedc0de", "--yes")
    assert (done.code, done.stdout) == (1, "")
    assert done.stderr == f"error: no entry feedc0de in {cache.cache_dir}\nhint: mlactl cache ls shows the keys there are\n"
    assert left(store) == before
    assert cache("cache", "rm", "--yes").code == 2


def test_rm_of_what_is_in_use_is_exit_2(cache, store, filled):
    """The exit code said 0 while the entry was still there."""
    busy, free = filled.current, filled.newer
    with locks.entry_lock(store.roots.writable, busy.key, exclusive=False, wait_s=0.0):
        done = cache("cache", "rm", busy.key, free.key, "--yes", "--json")
    assert (done.code, done.json["removed"]) == (2, [free.key])
    assert f"error: 1 entry of 2 named still there; {locks.entry_lock_path(busy.layer, busy.key)} is in use by process {os.getpid()}" in done.stderr
    assert busy.object_path.exists()


def test_rm_takes_a_damaged_entry_too(cache, store, filled):
    filled.current.manifest_path.write_bytes(b"{")
    filled.newer.object_path.unlink()
    done = cache("cache", "rm", filled.current.key, filled.newer.key, "--yes", "-q")
    assert sorted(done.lines) == sorted([filled.current.key, filled.newer.key])
    assert left(store) == sorted(entry.key for entry in filled.all if entry not in (filled.current, filled.newer))


def test_what_is_no_regular_file_is_left_alone_and_said(cache, store, filled):
    """Over a folder, a FIFO and a link in an object's place `rm` said "removed 3 entries (0 B)" and left them without a manifest."""
    folder, fifo, link = filled.current, filled.superseded, filled.newer
    for entry, put in ((folder, lambda path: path.mkdir()), (fifo, os.mkfifo), (link, lambda path: path.symlink_to("nowhere"))):
        entry.object_path.unlink()
        put(entry.object_path)
    keys = [entry.key for entry in (folder, fifo, link)]
    done = cache("cache", "rm", *keys, "--yes")
    assert done.code == 2
    assert done.stdout.startswith("removed 0 entries (0 B)")
    assert "error: 3 entries of 3 named still there; not a regular file, left alone" in done.stderr
    for entry, kind in ((folder, "a directory"), (fifo, "a FIFO"), (link, "a symbolic link")):
        assert f"1 entry kept: not a regular file, left alone: ls -ld {entry.object_path}\n" in done.stdout
        assert entry.manifest_path.exists()
        assert store.entry(entry.key).detail == f"not a regular file but {kind}"
    pruned = cache("cache", "prune", "--status", "no-object", "--yes")
    assert (pruned.code, "nothing matched" in pruned.stderr, "0/0" in pruned.stderr) == (0, False, False)
    folder.manifest_path.unlink()
    os.mkfifo(folder.manifest_path)
    assert store.entry(folder.key).detail == "not a regular file but a FIFO"


def test_rm_does_not_go_on_without_the_roots_lock(cache, store, filled):
    """A FIFO in the place of root.lock was locked in silence: nothing kept `prune --locks` away any more."""
    lock = store.roots.writable.path / "v1" / "root.lock"
    lock.unlink()
    os.mkfifo(lock)
    done = cache("cache", "rm", filled.current.key, "--yes")
    assert (done.code, filled.current.object_path.exists()) == (2, True)
    assert f"{lock} is a FIFO, expected a lock file" in done.stderr


def test_a_foreign_file_named_like_a_bucket_stops_no_lock_pruning(cache, store, filled):
    """A file `v1/00` ended `prune --locks` with NotADirectoryError."""
    (store.roots.writable.path / "v1" / "00").touch()
    done = cache("cache", "prune", "--locks", "--yes")
    assert (done.code, "6 lock files" in done.stdout) == (0, True), done.stderr


def test_slips_of_the_hand(cache, filled, tmp_path):
    """Empty values acted as if they had not been given, and hints led nowhere."""
    for words, said in (
        (("prune", "--kernel", ""), "error: --kernel is empty"),
        (("ls", "--kernel", ""), "error: --kernel is empty"),
        (("show", ""), "error: an empty KEY names no entry"),
        (("rm", "", "--yes"), "error: an empty KEY names no entry"),
        (("ls", "--cache-dir", ""), "error: cache directory list '' names no path"),
        (("prune", "--arch", "sm_120"), "hint: --arch sm_120a or"),
    ):
        done = cache("cache", *words)
        assert (done.code, said in done.stderr) == (2, True), (words, done.stderr)
    assert cache("cache", "show", filled.current.key.upper(), "-q").stdout == f"{filled.current.key}\n"


def test_everything_kept_is_not_called_nothing_matched(store, filled):
    """`prune --kernel X --keep-profile P` that keeps all of X said that nothing matched."""
    made = plan(store, Selectors(kernels=("test.tiny",)), keep=[entry.manifest.spec for entry in filled.all])
    told = []
    remove._nothing_selected(SimpleNamespace(hint=told.append), made)
    assert (len(made.kept), made.entries, told) == (6, (), [])
    remove._nothing_selected(SimpleNamespace(hint=told.append), plan(store, Selectors(kernels=("other",))))
    assert told[0].startswith("nothing matched; the root has test.tiny 0")
