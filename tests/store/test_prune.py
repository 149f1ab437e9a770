"""Selecting and removing entries: what goes, what stays, and what happens beside readers and publishers."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import msgspec
import pytest
import stand_ins
import tiny

from mlactl.cache import locks
from mlactl.cache.prune import PlannedFile, PrunePlan, apply, plan, plan_keys
from mlactl.cache.selectors import Selectors, SpecRange, parse_duration, parse_size, parse_spec
from mlactl.cache.store import Status, Store
from mlactl.errors import CannotRun, EnvironmentUnfit, Interrupted, UsageError

DAY = 86_400


def files(store):
    """Every file of the root but locks, relative to it."""
    root = store.roots.writable.path
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and not path.name.endswith(".lock"))


def chosen(made):
    return sorted(entry.key for entry in made.entries)


# ---- selectors


@pytest.mark.parametrize("comparison", ["<", "<=", "==", ">=", ">"])
def test_spec_comparisons(comparison):
    expected = {"<": [1], "<=": [1, 2], "==": [2], ">=": [2, 3], ">": [3]}[comparison]
    found = parse_spec(f"test.tiny{comparison}2")
    assert found == SpecRange("test.tiny", comparison, 2)
    assert [version for version in (1, 2, 3) if found.matches(tiny.CompileSpec("test.tiny", version, ()))] == expected
    assert not found.matches(tiny.CompileSpec("test.tinier", 2, ()))
    assert parse_spec(f" test.* {comparison} 2 ").matches(tiny.CompileSpec("test.tiny", expected[0], ()))


@pytest.mark.parametrize(
    "text", ["", "test.tiny", "test.tiny<", "<18", "test.tiny=18", "test.tiny<-1", "test.tiny<1.5", "a b<1", "test.tiny<18 or 1"]
)
def test_spec_that_is_none_is_refused(text):
    with pytest.raises(UsageError) as caught:
        parse_spec(text)
    assert repr(text) in caught.value.message
    assert "--spec" in caught.value.hint


def test_durations_and_sizes():
    assert [parse_duration(text, "--x") for text in ("45s", "90m", "12h", "30d", "2w", "0s")] == [45, 5400, 43_200, 30 * DAY, 14 * DAY, 0]
    assert [parse_size(text, "--x") for text in ("0", "1048576", "512B", "2GiB", "1.5MiB", "500MB", "1kB")] == [
        0, 1_048_576, 512, 2 << 30, 1_572_864, 500_000_000, 1000,
    ]  # fmt: skip
    for text in ("", "30", "d", "-1d", "1.5d", "30 days", "1y"):
        with pytest.raises(UsageError, match="--older-than"):
            parse_duration(text, "--older-than")
    for text in ("", "GiB", "-1", "2 gigs", "1e9", "inf", "nan"):
        with pytest.raises(UsageError, match="--max-size"):
            parse_size(text, "--max-size")


@pytest.fixture
def filled(store, prebuilt):
    """Entries that differ in version, sources, toolchain, arch, age and last use, by name."""
    now = time.time()
    old = "2020-01-01T00:00:00Z"
    return {
        "current": stand_ins.publish(store, prebuilt, tiny.spec(2), last_used=now - 5 * DAY),
        "superseded": stand_ins.publish(store, prebuilt, tiny.spec(3), version=0, last_used=now - 40 * DAY),
        "newer": stand_ins.publish(store, prebuilt, tiny.spec(5), version=2, last_used=now - 1),
        "other sources": stand_ins.publish(store, prebuilt, tiny.spec(7), sources_digest="ab" * 32, created=old, last_used=now - 2 * DAY),
        "other toolchain": stand_ins.publish(store, prebuilt, tiny.spec(3), toolchain=stand_ins.older_toolchain(), last_used=now - 20 * DAY),
        "sm_121a": stand_ins.publish(store, prebuilt, tiny.spec(2), arch="sm_121a", created=old, last_used=now - 30 * DAY),
    }


@pytest.mark.parametrize(
    ("selectors", "names"),
    [
        (Selectors(), ["superseded"]),
        (Selectors(specs=(parse_spec("test.tiny<1"),)), ["superseded"]),
        (Selectors(specs=(parse_spec("test.tiny<1"), parse_spec("test.tiny>1"))), ["newer", "superseded"]),
        (Selectors(specs=(parse_spec("test.tiny>=0"),), arches=("sm_121a",)), ["sm_121a"]),
        (Selectors(kernels=("test.tiny",)), ["current", "newer", "other sources", "other toolchain", "sm_121a", "superseded"]),
        (Selectors(kernels=("test",), arches=("sm_121a",)), ["sm_121a"]),
        (Selectors(kernels=("attention",)), []),
        (Selectors(stale=True), ["other sources", "other toolchain"]),
        (Selectors(older_than_s=30 * DAY), ["other sources", "sm_121a"]),
        (Selectors(unused_for_s=14 * DAY), ["other toolchain", "sm_121a", "superseded"]),
        (Selectors(unused_for_s=14 * DAY, stale=True), ["other toolchain"]),
        (Selectors(statuses=("ok",), unused_for_s=35 * DAY), ["superseded"]),
        (Selectors(statuses=("digest",)), []),
        (Selectors(locks=True), []),
        (Selectors(locks=True, stale=True), ["other sources", "other toolchain"]),
    ],
)
def test_selection(store, filled, selectors, names):
    """Any selector replaces the default; different ones AND, repeats of one OR."""
    assert chosen(plan(store, selectors)) == sorted(filled[name].key for name in names)


def test_max_size_takes_the_least_recently_used_last_of_all(store, filled):
    size = filled["current"].object_bytes
    total = sum(entry.object_bytes for entry in filled.values())
    order = ["superseded", "sm_121a", "other toolchain", "current", "other sources", "newer"]
    assert chosen(plan(store, Selectors(max_bytes=total))) == []
    assert chosen(plan(store, Selectors(max_bytes=total - 1))) == [filled["superseded"].key]
    assert chosen(plan(store, Selectors(max_bytes=total - 2 * size - 1))) == sorted(filled[name].key for name in order[:3])
    assert chosen(plan(store, Selectors(max_bytes=0))) == sorted(entry.key for entry in filled.values())
    # With another selector only what that one selects may go, however large the rest is.
    assert chosen(plan(store, Selectors(max_bytes=0, stale=True))) == sorted(filled[name].key for name in ("other sources", "other toolchain"))
    assert chosen(plan(store, Selectors(max_bytes=total - 1, stale=True))) == [filled["other toolchain"].key]


def test_an_unknown_last_use_is_never_selected_by_unused_for(store, filled):
    os.utime(filled["current"].manifest_path, (0, 0))
    assert store.entry(filled["current"].key).last_used is None
    assert filled["current"].key not in chosen(plan(store, Selectors(unused_for_s=1)))


def test_a_kept_profile_outranks_every_selector(store, filled):
    kept = plan(store, Selectors(kernels=("test.tiny",)), keep=[tiny.spec(2), tiny.spec(7)])
    assert chosen(kept) == sorted(filled[name].key for name in ("superseded", "newer", "other toolchain"))
    assert sorted(item.key for item in kept.kept) == sorted(filled[name].key for name in ("current", "other sources", "sm_121a"))
    assert {item.reason for item in kept.kept} == {"named by a kept profile"}


def test_stale_needs_a_compiler_to_compare_with(store, filled, monkeypatch):
    monkeypatch.setattr("mlactl.cache.toolchain._probe", lambda: "nvidia-cutlass-dsl is not installed")
    with pytest.raises(EnvironmentUnfit, match="nvidia-cutlass-dsl is not installed"):
        plan(store, Selectors(stale=True))
    assert chosen(plan(store, Selectors())) == [filled["superseded"].key]


# ---- plan and apply


def test_the_printed_plan_is_what_apply_consumes(store, filled):
    made = plan(store, Selectors(kernels=("test.tiny",), arches=("sm_120a",)))
    read_back = msgspec.json.decode(msgspec.json.encode(made), type=PrunePlan)
    assert read_back == made
    entry = filled["superseded"]
    planned = next(item for item in made.entries if item.key == entry.key)
    assert planned.reason == "kernel test.tiny, arch sm_120a"
    assert [item.path for item in planned.files] == [f"v1/{entry.key[:2]}/{entry.key}.json", f"v1/{entry.key[:2]}/{entry.key}.so"]
    assert (made.root_entries, made.freed_bytes) == (6, 5 * entry.object_bytes)
    result = apply(read_back)
    assert sorted(result.removed) == chosen(made)
    assert (result.freed_bytes, result.skipped, result.failed) == (made.freed_bytes, (), ())
    assert [entry.key for entry in store.entries()] == [filled["sm_121a"].key]


def test_applying_twice_removes_nothing_the_second_time(store, filled):
    made = plan(store, Selectors())
    assert apply(made).removed == (filled["superseded"].key,)
    again = apply(made)
    assert (again.removed, [item.reason for item in again.skipped]) == ((), ["changed or used since the plan was made"])


def test_what_changed_since_the_plan_stays(store, filled, prebuilt):
    """A plan that waited at a prompt must not remove what was published again, or used, in the meantime."""
    made = plan(store, Selectors(kernels=("test.tiny",)))
    used, replaced = filled["sm_121a"], filled["superseded"]
    os.utime(used.manifest_path)
    stand_ins.publish(store, prebuilt, tiny.spec(3), version=0)
    result = apply(made)
    assert {item.key for item in result.skipped} == {used.key, replaced.key}
    assert sorted(entry.key for entry in store.entries() if entry.status is Status.OK) == sorted([used.key, replaced.key])


def test_removing_takes_the_manifest_first(store, filled, monkeypatch):
    """Killed between the two, the cache holds an object without its commit marker and never a manifest without object."""
    removed = []
    unlink = os.unlink
    monkeypatch.setattr(os, "unlink", lambda name, **options: (removed.append(str(name)), unlink(name, **options)))
    key = filled["superseded"].key
    apply(plan(store, Selectors()))
    assert removed == [f"{key}.json", f"{key}.so"]


def test_every_damage_can_be_pruned_by_its_status(store, filled):
    damaged = list(filled.values())
    damaged[0].manifest_path.unlink()
    damaged[1].object_path.unlink()
    damaged[2].manifest_path.write_bytes(b"{")
    os.truncate(damaged[3].object_path, 4096)
    temporary = stand_ins.leave_temporary(damaged[4])
    stand_ins.quarantine(damaged[5])
    words = ["no-manifest", "no-object", "bad-manifest", "size", "temp", "quarantined"]
    for word, entry in zip(words, damaged, strict=True):
        assert chosen(plan(store, Selectors(statuses=(word,)))) == [entry.key], word
    apply(plan(store, Selectors(statuses=("temp",))))
    assert not temporary.exists()
    assert store.entry(damaged[4].key).status is Status.OK, "the entry beside the temporary is untouched"
    apply(plan(store, Selectors(statuses=tuple(words))))
    assert files(store) == sorted([f"v1/{damaged[4].key[:2]}/{damaged[4].key}{suffix}" for suffix in (".json", ".so")])


def test_named_entries(store, filled):
    made = plan_keys(store, [filled["current"], filled["newer"]])
    assert made.selection == ("named",)
    assert sorted(apply(made).removed) == sorted([filled["current"].key, filled["newer"].key])
    layered = Store.open(f"{store.roots.writable.path.parent}/other:{store.roots.writable.path}")
    with pytest.raises(CannotRun, match="read-only layer"):
        plan_keys(layered, [layered.entry(filled["superseded"].key)])


def test_only_the_writable_layer_is_pruned(store, filled, tmp_path):
    with pytest.raises(CannotRun, match="every layer is read-only"):
        plan(Store.open(f":{store.roots.writable.path}"), Selectors())
    upper = Store.open(f"{tmp_path}/upper:{store.roots.writable.path}")
    assert plan(upper, Selectors(kernels=("test.tiny",))).entries == ()


# ---- C12: beside readers and publishers, links and strangers' files

READER = """
import sys, time
import tiny; tiny.register()
from mlactl.cache.load import read_verified
from mlactl.cache.store import Store
held = read_verified(Store.open(sys.argv[1]).entry(sys.argv[2]))
print(len(held.data), flush=True)
time.sleep(120)
"""

PUBLISHER = """
import sys, time
import tiny; tiny.register()
from pathlib import Path
from mlactl.cache.publish import compile_and_publish
from mlactl.cache.store import Store
prebuilt = tiny.Prebuilt(Path(sys.argv[2])).compiler()
def slow(spec, arch, symbol, flavour, out):
    print(symbol, flush=True)
    sys.stdin.readline()
    prebuilt(spec, arch, symbol, flavour, out)
compile_and_publish(Store.open(sys.argv[1]), tiny.spec(2), "sm_120a", compiler=slow)
"""


def start(code, *arguments):
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tiny.HERE)!r})\n{code}", *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_an_entry_in_use_is_skipped_until_its_reader_ends(store, filled):
    """C12: pruned under a reader, the entry's next load in that process would be a miss and a compile in serving."""
    entry = filled["superseded"]
    with start(READER, store.roots.writable.path, entry.key) as reader:
        try:
            assert reader.stdout.readline().strip() == str(entry.object_bytes)
            made = plan(store, Selectors(kernels=("test.tiny",)))
            result = apply(made)
            (skipped,) = result.skipped
            assert skipped.key == entry.key
            assert f"in use by process {reader.pid}" in skipped.reason
            assert len(result.removed) == 5
            assert store.entry(entry.key).status is Status.OK
        finally:
            reader.kill()
    assert apply(plan(store, Selectors())).removed == (entry.key,)


def test_an_entry_that_is_being_published_is_skipped(store, filled, prebuilt):
    """C12: a pruner that took a writer's temporary would make the warmup fail."""
    entry = filled["current"]
    stand_ins.flip_bit(entry)
    with start(PUBLISHER, store.roots.writable.path, prebuilt.folder) as publisher:
        assert publisher.stdout.readline().strip() == f"mlactl_{entry.key}"
        result = apply(plan(store, Selectors(kernels=("test.tiny",))))
        (skipped,) = result.skipped
        assert skipped.key == entry.key
        assert f"process {publisher.pid}" in skipped.reason
        publisher.stdin.write("\n")
        publisher.stdin.close()
        assert publisher.wait(60) == 0
    assert store.entry(entry.key).status is Status.OK


def test_links_are_not_followed_and_strangers_files_stay(store, filled, tmp_path):
    """C12: a link out of the root once let a cleaner delete what it pointed at."""
    root = store.roots.writable.path
    outside = tmp_path / "outside"
    outside.mkdir()
    entry = filled["superseded"]
    bucket = entry.object_path.parent
    precious = [outside / entry.object_path.name, outside / entry.manifest_path.name]
    for path in precious:
        path.write_bytes((bucket / path.name).read_bytes())
    stranger, notes = bucket / "notes.txt", root / "v1" / "README"
    stranger.write_text("mine")
    notes.write_text("mine too")
    # An entry made of links, in a bucket of its own key.
    linked = filled["newer"]
    target = outside / "target.so"
    target.write_bytes(linked.object_path.read_bytes())
    linked.object_path.unlink()
    linked.object_path.symlink_to(target)
    made = plan(store, Selectors(kernels=("test.tiny",)))
    # The planned bucket becomes a link after the plan was made.
    moved = root / "moved"
    bucket.rename(moved)
    bucket.symlink_to(outside)
    result = apply(made)
    gone = [item.key for item in result.skipped]
    assert entry.key in gone
    assert all(path.exists() for path in precious)
    assert target.exists()
    assert not (outside / f"{entry.key}.lock").exists(), "not even a lock file is made behind a link"
    assert (moved / "notes.txt").read_text() == "mine"
    assert notes.read_text() == "mine too"
    again = plan(store, Selectors(kernels=("test.tiny",)))
    assert entry.key not in chosen(again), "nothing behind a linked bucket is listed"


def test_a_plan_that_names_anything_else_removes_nothing(store, filled):
    """A plan is a file a person can edit: paths in it are checked as if they came from anywhere."""
    made = plan(store, Selectors())
    root = store.roots.writable.path
    secret = root / "secret"
    secret.write_text("keep me")
    status = secret.stat()
    for path in ("secret", "v1/../secret", "../secret", f"v1/{made.entries[0].key[:2]}/../../secret", f"v1/{made.entries[0].key[:2]}/secret"):
        forged = PlannedFile(path, status.st_ino, status.st_size, status.st_mtime_ns)
        changed = replace(made, entries=(replace(made.entries[0], files=(forged,)),))
        assert [item.reason for item in apply(changed).skipped] == ["not an entry of this cache"], path
    assert secret.read_text() == "keep me"


# ---- locks, other owners, Ctrl-C


def test_lock_files_go_only_while_nobody_uses_the_root(store, filled):
    root = store.roots.writable.path
    count = len(list(root.rglob("*/*.lock"))) - 1
    assert count == 6
    made = plan(store, Selectors(locks=True))
    assert (made.entries, len(made.locks)) == ((), 6)
    entry = filled["current"]
    with start(READER, root, entry.key) as reader:
        try:
            reader.stdout.readline()
            busy = apply(made)
            assert busy.locks_removed == 0
            assert f"process {reader.pid}" in busy.skipped[0].reason
            assert len(list(root.rglob("*/*.lock"))) - 1 == 6
        finally:
            reader.kill()
    assert apply(made).locks_removed == 6
    assert sorted(path.name for path in root.rglob("*.lock")) == ["root.lock"]
    assert len(list(store.entries())) == 6


@stand_ins.as_root
def test_another_owners_root_is_named_and_untouched(store, filled, in_child):
    root = store.roots.writable.path
    before = files(store)
    stand_ins.let_others_read(root)

    def prune_as_nobody():
        made = plan(store, Selectors())
        assert len(made.entries) == 1
        result = apply(made)
        assert result.removed == ()
        (failed,) = result.failed
        assert "owner root" in failed.reason, failed.reason
        assert "mode 0" in failed.reason, failed.reason

    assert in_child(prune_as_nobody, uid=stand_ins.NOBODY) == 0
    assert files(store) == before


def test_ctrl_c_stops_between_entries_and_says_so(store, filled):
    made = plan(store, Selectors(kernels=("test.tiny",)))
    done = []

    def stop(steps):
        done.append(steps)
        if len(done) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="2 of 6 entries were looked at, 2 removed; the cache is valid"):
        apply(made, stop)
    assert [entry.status for entry in store.entries()] == [Status.OK] * 4


def test_an_unreadable_root_is_an_error_and_an_absent_one_is_empty(store, tmp_path):
    assert plan(store, Selectors()).entries == ()
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(CannotRun):
        plan(Store.open(str(blocked)), Selectors())


def test_a_held_lock_alone_makes_no_entry(store, filled):
    entry = filled["superseded"]
    with locks.entry_lock(store.roots.writable, entry.key, exclusive=False, wait_s=0.0):
        assert [item.key for item in apply(plan(store, Selectors())).skipped] == [entry.key]
    assert apply(plan(store, Selectors())).removed == (entry.key,)


# ---- what is set aside


ANY = ("--advisory X", lambda _entry: "convicted")


@pytest.mark.parametrize(
    "selectors",
    [
        Selectors(),
        Selectors(specs=(parse_spec("test.tiny<1"),)),
        Selectors(older_than_s=30 * DAY),
        Selectors(unused_for_s=30 * DAY),
        Selectors(judges=(ANY,)),
        Selectors(max_bytes=0),
    ],
    ids=["default", "spec", "older", "unused", "advisory", "max size"],
)
def test_a_quarantined_entry_is_kept_by_name(store, filled, selectors):
    """Removed, it was forgotten: the next warmup published the convicted object again."""
    aside = filled["superseded"]
    stand_ins.quarantine(aside)
    made = plan(store, selectors, now=time.time() + 31 * DAY)
    assert aside.key not in chosen(made)
    assert [(kept.key, kept.reason) for kept in made.kept] == [(aside.key, "quarantined: mlactl cache rm KEY forgets it")]


def test_a_quarantined_entry_goes_when_it_is_named(store, filled):
    aside = filled["superseded"]
    stand_ins.quarantine(aside)
    named = plan(store, Selectors(statuses=("quarantined",), kernels=("test",)))
    assert (chosen(named), named.kept) == ([aside.key], ())
    assert apply(plan_keys(store, [store.entry(aside.key)])).removed == (aside.key,)


def test_max_size_does_not_count_on_what_is_kept(store, filled):
    """The quarantined one is the least recently used: the size is reached by others, as if it could not be freed."""
    aside = filled["superseded"]
    stand_ins.quarantine(aside)
    everything = list(store.entries())
    total = sum(entry.object_bytes for entry in everything)
    made = plan(store, Selectors(max_bytes=total - aside.object_bytes))
    assert made.freed_bytes >= aside.object_bytes
    assert aside.key not in chosen(made)
