"""Removing from a b12x root and setting aside in one: what goes, what stays, and in which order, beside b12x at work."""

import fcntl
import hashlib
import os
import subprocess
import sys
import time
from dataclasses import replace

import msgspec
import pytest
from b12x_files import KERNEL, PLAIN, Made, Root
from users import NOBODY, as_root

from mlactl.cache.advisories import bundled
from mlactl.cache.audit import Claim, audit, read_code, restore
from mlactl.cache.foreign.b12x.prune import ACCESS_TIME_STEP_S, TEMP_AGE_S
from mlactl.cache.removal import PlannedFile, PrunePlan, apply
from mlactl.cache.roots import keeps_access_times
from mlactl.cache.selectors import Selectors, parse_spec
from mlactl.errors import CannotRun, UsageError

DAY = 86_400
DECODE = "attention.mla.sm120.decode"


def chosen(plan):
    return sorted(entry.key for entry in plan.entries)


def names(root, *suffixes):
    return [name for name in root.files() if name.endswith(suffixes)]


def aged(path, seconds, now=None):
    moment = (now or time.time()) - seconds
    os.utime(path, (moment, moment))


@pytest.fixture
def filled(root):
    """Entries by what is special about them; `old` was written 40 days ago."""
    keys = {
        "forward": root.add(),
        "decode 17": root.add(Made(kernel=DECODE, version=17)),
        "decode 53": root.add(Made(kernel=DECODE, version=53)),
        "sm_121a": root.add(Made(device=("cuda", (12, 1), 48), arch="sm_121a")),
        "bare": root.add(Made(version=3), manifest=False),
        "old": root.add(Made(version=2)),
        "unversioned": root.add(Made(tag=PLAIN[3])),
    }
    aged(root.file(keys["old"], "o"), 40 * DAY)
    return keys


CONVICTED = ("--advisory X", lambda entry: "convicted" if entry.manifest and entry.manifest.spec.version == 17 else None)


@pytest.mark.parametrize(
    ("selectors", "expected"),
    [
        (Selectors(specs=(parse_spec(f"{DECODE}<18"),)), ["decode 17"]),
        (Selectors(specs=(parse_spec(f"{DECODE}<18"), parse_spec(f"{KERNEL}<3"))), ["decode 17", "old"]),
        (Selectors(specs=(parse_spec("*<1000"),)), ["decode 17", "decode 53", "forward", "old", "sm_121a"]),
        (Selectors(kernels=("attention.mla",)), ["decode 17", "decode 53"]),
        (Selectors(arches=("sm_121a",)), ["sm_121a"]),
        (Selectors(arches=("sm_120a",), kernels=(KERNEL,)), ["forward", "old"]),
        (Selectors(statuses=("no-manifest",)), ["bare"]),
        (Selectors(older_than_s=30 * DAY), ["old"]),
        (Selectors(older_than_s=50 * DAY), []),
        (Selectors(judges=(CONVICTED,)), ["decode 17"]),
    ],
    ids=["spec", "specs", "every version", "kernel", "arch", "arch and kernel", "orphans", "age", "no age", "judge"],
)  # fmt: skip
def test_selection(cache, filled, selectors, expected):
    """A tag that numbers no versions is in no range of versions."""
    assert chosen(cache.plan(selectors)) == sorted(filled[name] for name in expected)


def test_words_and_reasons_are_those_typed(cache, filled):
    plan = cache.plan(Selectors(specs=(parse_spec(f"{DECODE}<18"),), older_than_s=0))
    assert (plan.selection, plan.root_kind) == ((f"--spec {DECODE}<18", "--older-than 0s"), "b12x")
    assert plan.entries[0].reason.startswith(f"matches {DECODE}<18, written 2")
    assert plan.root_entries == len(filled)


@pytest.mark.parametrize(
    ("selectors", "keep", "said"),
    [
        (Selectors(), (), f"a foreign root has no default selection; it has {KERNEL} 2, {KERNEL} 4, {DECODE} 17, {DECODE} 53, b12x."),
        (Selectors(locks=True), (), "its lock files are never removed"),
        (Selectors(locks=True, kernels=(KERNEL,)), (), "its lock files are never removed"),
        (Selectors(stale=True), (), "--stale is for this project's own cache"),
        (Selectors(kernels=(KERNEL,)), ("a spec",), "--keep-profile is for this project's own cache"),
    ],
    ids=["nothing", "locks", "locks and more", "stale", "profile"],
)
def test_what_cannot_be_selected_on_a_foreign_root(cache, filled, selectors, keep, said):
    """Our registry's numbers say nothing of b12x's, so that nothing there is superseded."""
    with pytest.raises(UsageError) as caught:
        cache.plan(selectors, keep=keep)
    assert said in caught.value.message
    assert caught.value.hint


def test_removing_leaves_every_lock_and_nothing_else(cache, root, filled):
    before = names(root, ".lock")
    result = apply(cache.plan(Selectors(kernels=("attention", "b12x"), statuses=("ok",))))
    assert (len(result.removed), result.skipped, result.failed) == (6, (), ())
    bare = f"{filled['bare'][:2]}/{filled['bare']}.o"
    assert root.files() == sorted([*before, bare])
    assert result.freed_bytes == 6 * len(Made().object)


def test_the_object_goes_first(cache, root, filled, monkeypatch):
    """Older releases load a bare object: one whose manifest went first, and whose removal then stopped, would be run unchecked."""
    removed, unlink = [], os.unlink
    monkeypatch.setattr(os, "unlink", lambda name, **options: (removed.append(str(name)), unlink(name, **options)))
    key = filled["decode 17"]
    apply(cache.plan_entries([cache.entry(key)]))
    assert removed == [f"{key}.o", f"{key}.json"]


def test_a_removal_cut_short_leaves_a_miss(cache, root, filled, monkeypatch):
    key, unlink = filled["forward"], os.unlink

    def once(name, **options):
        if str(name).endswith(".json"):
            raise PermissionError(1, "Operation not permitted")
        unlink(name, **options)

    monkeypatch.setattr(os, "unlink", once)
    result = apply(cache.plan_entries([cache.entry(key)]))
    assert "Operation not permitted" in result.failed[0].reason
    assert cache.entry(key).status == "no-object"


def test_a_plan_survives_json(cache, root, filled):
    plan = cache.plan(Selectors(kernels=(DECODE,)))
    again = msgspec.json.decode(msgspec.json.encode(plan), type=PrunePlan)
    assert again == plan
    assert sorted(apply(again).removed) == sorted([filled["decode 17"], filled["decode 53"]])


HOLD = "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"


def test_what_b12x_is_compiling_is_skipped(cache, root, filled):
    """A release opens the lock for writing and holds it from its second look to the published manifest."""
    key = filled["decode 17"]
    holder = subprocess.Popen([sys.executable, "-c", HOLD, root.file(key, "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with holder:
        assert holder.stdout.readline() == "held\n"
        result = apply(cache.plan(Selectors(kernels=(DECODE,))))
        assert result.removed == (filled["decode 53"],)
        assert result.skipped[0].reason == f"{root.file(key, 'lock')} is held by process {holder.pid}: b12x is compiling it"
        assert root.file(key, "o").exists()
        assert root.file(key, "json").exists()
        holder.stdin.close()
    assert apply(cache.plan(Selectors(kernels=(DECODE,)))).removed == (key,)


def test_the_lock_is_held_while_files_go(cache, root, filled, monkeypatch):
    key, unlink, busy = filled["forward"], os.unlink, []

    def watched(name, **options):
        with root.file(key, "lock").open("w") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                busy.append(str(name))
        unlink(name, **options)

    monkeypatch.setattr(os, "unlink", watched)
    apply(cache.plan_entries([cache.entry(key)]))
    assert busy == [f"{key}.o", f"{key}.json"]


def test_a_missing_lock_file_is_made_as_b12x_makes_it(cache, root):
    key = root.add(lock=False)
    apply(cache.plan_entries([cache.entry(key)]))
    info = root.file(key, "lock").stat()
    assert (info.st_size, info.st_mode & 0o600) == (0, 0o600)


@as_root
def test_a_lock_made_by_root_belongs_to_the_owner_of_the_cache(cache, root):
    """The owner's b12x opens it for writing: one that root kept would end the owner's compiles of that key."""
    key = root.add(lock=False)
    os.chown(root.file(key, "o").parent, NOBODY, NOBODY)
    apply(cache.plan_entries([cache.entry(key)]))
    assert root.file(key, "lock").stat().st_uid == NOBODY


@pytest.mark.parametrize("thing", ["link", "folder", "fifo"])
def test_what_stands_for_a_lock_file_is_never_opened(cache, root, thing, tmp_path):
    key = root.add(lock=False)
    path = root.file(key, "lock")
    {"link": lambda: path.symlink_to(tmp_path / "target"), "folder": path.mkdir, "fifo": lambda: os.mkfifo(path)}[thing]()
    result = apply(cache.plan_entries([cache.entry(key)]))
    assert (result.removed, len(result.failed)) == ((), 1)
    assert not (tmp_path / "target").exists()
    assert root.file(key, "o").exists()


def test_a_lock_that_somebody_replaced_is_no_lock(cache, root, monkeypatch):
    """Whoever waits for the unlinked file and whoever opens the new one would both hold "the" lock."""
    key, flock = root.add(), fcntl.flock

    def replaced(file, operation):
        flock(file, operation)
        if operation & fcntl.LOCK_EX:
            root.file(key, "lock").rename(root.path / "old")
            root.file(key, "lock").touch()

    plan = cache.plan_entries([cache.entry(key)])
    monkeypatch.setattr(fcntl, "flock", replaced)
    assert [outcome.reason for outcome in apply(plan).skipped] == [f"{root.file(key, 'lock')} was replaced by another file"]
    assert root.file(key, "o").exists()


def test_what_changed_since_the_plan_stays(cache, root, filled):
    plan = cache.plan(Selectors(kernels=(DECODE,)))
    made = Made(kernel=DECODE, version=17)
    root.file(made.key, "o").unlink()
    root.add(made)
    result = apply(plan)
    assert (result.removed, [outcome.reason for outcome in result.skipped]) == ((filled["decode 53"],), ["changed or used since the plan was made"])


def test_links_are_neither_followed_nor_removed(cache, root, tmp_path, filled):
    plan = cache.plan_entries([cache.entry(filled["forward"]), cache.entry(filled["sm_121a"])])
    bucket = root.file(filled["forward"], "o").parent
    bucket.rename(tmp_path / "moved")
    bucket.symlink_to(tmp_path / "moved")
    result = apply(plan)
    assert result.removed == (filled["sm_121a"],)
    assert (tmp_path / "moved" / f"{filled['forward']}.o").exists()
    key = filled["decode 17"]
    root.file(key, "o").rename(tmp_path / "object")
    root.file(key, "o").symlink_to(tmp_path / "object")
    kept = cache.plan_entries([cache.entry(key)]).kept
    assert "not a regular file, left alone" in kept[0].reason


def tampered(root, name):
    info = (root.path / name).stat()
    return PlannedFile(name, info.st_ino, info.st_size, info.st_mtime_ns)


@pytest.mark.parametrize("target", ["lock", "stranger", "preparation", "another key", "outside", "manifest first"])
def test_a_plan_that_names_other_files_removes_none(cache, root, filled, tmp_path, target):
    """A plan is a file that anybody can edit."""
    key, other = filled["forward"], filled["sm_121a"]
    (root.path / key[:2] / "README").write_text("x")
    (tmp_path / "precious").write_text("x")
    prepared = root.prepare(other)
    plan = cache.plan_entries([cache.entry(key)])
    files = {
        "lock": [tampered(root, f"{key[:2]}/{key}.lock")],
        "stranger": [tampered(root, f"{key[:2]}/README")],
        "preparation": [tampered(root, f"preparation/{prepared}")],
        "another key": [tampered(root, f"{other[:2]}/{other}.o")],
        "outside": [tampered(root, "../precious")],
        "manifest first": [tampered(root, f"{key[:2]}/{key}.json"), tampered(root, f"{key[:2]}/{key}.o")],
    }[target]
    before = root.files()
    result = apply(replace(plan, entries=(replace(plan.entries[0], files=tuple(files)),)))
    assert (result.removed, result.skipped[0].reason) == ((), "not an entry of this cache")
    assert root.files() == before
    assert (tmp_path / "precious").exists()


def test_a_plan_of_locks_is_refused(cache, root, filled):
    plan = replace(cache.plan_entries([cache.entry(filled["forward"])]), entries=(), locks=(f"{filled['forward'][:2]}/{filled['forward']}.lock",))
    result = apply(plan)
    assert (result.locks_removed, "are never removed" in result.failed[0].reason) == (0, True)


# ---- temporaries, preparation files, sizes and times


def test_young_temporaries_stay(cache, root):
    key = root.add()
    bucket = root.path / key[:2]
    for name, age in ((f"{key}.tmp", TEMP_AGE_S + 60), (f".{key}.o.abc.tmp", 10), (".peer-3", TEMP_AGE_S + 60), ("._stage_ab", TEMP_AGE_S - 60)):
        (bucket / name).write_bytes(b"half")
        aged(bucket / name, age)
    (root.path / ".peer-0").write_bytes(b"half")
    aged(root.path / ".peer-0", DAY)
    plan = cache.plan(Selectors(statuses=("temp",)))
    assert [kept.reason for kept in plan.kept] == ["a temporary younger than 60m: its writer may still be at work"] * 2
    assert len(apply(plan).removed) == 3
    assert sorted(name for name in root.files() if "lock" not in name) == sorted(
        [f"{key[:2]}/{key}.o", f"{key[:2]}/{key}.json", f"{key[:2]}/.{key}.o.abc.tmp", f"{key[:2]}/._stage_ab"]
    )


def test_what_preparation_files_name_is_kept_unless_asked_for(cache, root, filled):
    name = root.prepare(filled["decode 17"], filled["forward"])
    (root.path / "preparation" / "notes.json").write_text("not ours to read")
    plan = cache.plan(Selectors(kernels=(DECODE,)))
    assert chosen(plan) == [filled["decode 53"]]
    assert [(kept.key, kept.reason) for kept in plan.kept] == [
        (filled["decode 17"], f"named by preparation/{name[:12]}….json; --include-prepared removes it too")
    ]
    told = []
    plan = cache.plan(Selectors(kernels=(DECODE,)), include_prepared=True, on_problem=told.append)
    assert chosen(plan) == sorted([filled["decode 17"], filled["decode 53"]])
    assert told == [f"named by tuning selections in {root.path}/preparation: 1 of 2 to remove; b12x compiles what it needs of them again"]
    named = cache.plan_entries([cache.entry(filled["forward"])])
    assert (named.entries, len(named.kept)) == ((), 1)
    apply(plan)
    assert (root.path / "preparation" / name).exists()


@pytest.mark.parametrize("text", ["", "[]", '{"records": 5}', '{"records": {"a": {"programs": [5]}}}', "{"])
def test_a_preparation_file_that_cannot_be_read_is_told(cache, root, filled, text):
    path = root.path / "preparation" / root.prepare("ab")
    path.write_text(text)
    told = []
    cache.plan(Selectors(kernels=(DECODE,)), on_problem=told.append)
    assert told == [f"{path} is no readable selection file, so what it names is not known"]


def test_max_size_takes_the_longest_unread_then_the_oldest(cache, root):
    keys = [root.add(Made(version=number)) for number in range(4)]
    now = time.time()
    for number, key in enumerate(keys):
        os.utime(root.file(key, "o"), (now - number * DAY, now - 10 * DAY))
    cache._uses = True
    size = len(Made().object)
    assert chosen(cache.plan(Selectors(max_bytes=2 * size))) == sorted(keys[2:])
    cache._uses = False
    aged(root.file(keys[1], "o"), 20 * DAY)
    assert chosen(cache.plan(Selectors(max_bytes=3 * size))) == [keys[1]]


def test_unused_for_goes_by_the_access_time_and_never_by_a_guess(cache, root):
    read, unread = root.add(), root.add(Made(version=5))
    now = time.time()
    os.utime(root.file(read, "o"), (now - 20 * DAY, now - 30 * DAY))
    aged(root.file(unread, "o"), 30 * DAY)
    cache._uses = True
    plan = cache.plan(Selectors(unused_for_s=14 * DAY))
    assert [(entry.key, entry.reason) for entry in plan.entries] == [(read, "not read for 19d")]
    assert chosen(cache.plan(Selectors(unused_for_s=20 * DAY - ACCESS_TIME_STEP_S + 60))) == []
    cache._uses = False
    assert chosen(cache.plan(Selectors(unused_for_s=0))) == []


@pytest.mark.parametrize(
    ("mount", "kept"),
    [
        ("rw,relatime - ext4 /dev/sda", True),
        ("rw,noatime - ext4 /dev/sda", False),
        ("rw,relatime - nfs4 host:/x", False),
        ("rw,relatime - overlay overlay", False),
    ],
)
def test_where_access_times_are_believed(tmp_path, mount, kept):
    table = tmp_path / "mountinfo"
    options, _, rest = mount.partition(" - ")
    table.write_text(f"22 1 8:1 / / {options} shared:1 - {rest} rw\n")
    assert keeps_access_times(tmp_path, table) is kept


# ---- setting aside


def aside(cache):
    return [entry for entry in cache.entries() if entry.status == "quarantined"]


def test_setting_aside_and_putting_back(cache, root, filled):
    key = filled["decode 17"]
    before = root.files()
    assert cache.set_aside([cache.entry(key)]) == [key]
    assert names(root, ".quarantined") == [f"{key[:2]}/{key}.json.quarantined", f"{key[:2]}/{key}.o.quarantined"]
    (entry,) = aside(cache)
    assert (entry.key, entry.manifest.spec.version, cache.entry(key)) == (key, 17, entry)
    assert cache.read_object(entry) == Made(kernel=DECODE, version=17).object
    assert cache.describe(entry).symbols == (f"b12x_cute_{key}",)
    assert [found.status for found in cache.verify([entry])] == ["quarantined"]
    assert cache.put_back(aside(cache)) == [key]
    assert root.files() == before
    assert cache.verify([cache.entry(key)])[0].status == "ok"


class Stopped(BaseException):
    """A kill."""


def stopping_at(monkeypatch, root, key, step):
    """Counts renames and removals, notes which live files are there after each, and is killed at the given one."""
    seen = []

    def watched(original):
        def call(*args, **options):
            if len(seen) == step:
                monkeypatch.undo()
                raise Stopped
            original(*args, **options)
            seen.append((root.file(key, "o").exists(), root.file(key, "json").exists()))

        return call

    for name in ("rename", "unlink"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    return seen


@pytest.mark.parametrize("move", ["set_aside", "put_back"])
def test_at_no_moment_is_there_an_object_without_what_it_can_be_checked_by(cache, root, filled, monkeypatch, move):
    key = filled["decode 17"]
    if move == "put_back":
        cache.set_aside([cache.entry(key)])
    seen = stopping_at(monkeypatch, root, key, None)
    getattr(cache, move)([cache.entry(key)])
    assert seen == ([(True, True), (False, True), (False, False)] if move == "set_aside" else [(False, True), (True, True), (True, True)])


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("move", ["set_aside", "put_back"])
def test_a_move_cut_short_loses_nothing_and_can_be_done_again(cache, root, monkeypatch, move, step):
    """Done again after the object had been renamed, setting aside removed that object as an earlier one."""
    key = root.add()
    before = {name: (root.path / name).read_bytes() for name in root.files()}
    if move == "put_back":
        cache.set_aside([cache.entry(key)])
    judged = cache.entry(key)
    stopping_at(monkeypatch, root, key, step)
    with pytest.raises(Stopped):
        getattr(cache, move)([judged])
    assert sum((root.path / name).read_bytes() == Made().object for name in names(root, ".o", ".o.quarantined")) == 1
    assert any((root.path / name).read_bytes() == before[f"{key[:2]}/{key}.json"] for name in names(root, ".json", ".json.quarantined"))
    if move == "set_aside" and step == 2:
        assert aside(cache)[0].manifest is not None, "the object has its manifest beside it already"
        cache.put_back(aside(cache))
        assert {name: (root.path / name).read_bytes() for name in root.files()} == before
        return
    if move == "put_back" and step == 2:
        assert cache.verify([cache.entry(key)])[0].status == "ok"
        return
    getattr(cache, move)([judged])
    expected = before
    if move == "set_aside":
        expected = {name if name.endswith("lock") else f"{name}.quarantined": data for name, data in before.items()}
    assert {name: (root.path / name).read_bytes() for name in root.files()} == expected


@pytest.mark.parametrize("harm", ["digest", "size", "object", "manifest", "key"])
def test_what_is_not_intact_stays_set_aside(cache, root, harm):
    """`audit --restore` put any file back that had the name: the full check was never made of what was set aside."""
    key, other = root.add(), root.add(Made(version=5))
    cache.set_aside([cache.entry(key)])
    obj, manifest = root.file(key, "o.quarantined"), root.file(key, "json.quarantined")
    data = obj.read_bytes()
    {
        "digest": lambda: obj.write_bytes(data[:-1] + bytes([data[-1] ^ 1])),
        "size": lambda: obj.write_bytes(data[:-1]),
        "object": obj.unlink,
        "manifest": lambda: manifest.write_bytes(b"{"),
        "key": lambda: manifest.write_bytes(root.file(other, "json").read_bytes()),
    }[harm]()
    status = {"object": "no-object", "manifest": "bad-manifest", "key": "bad-manifest"}.get(harm, harm)
    (result,) = audit(cache, aside(cache), bundled()).results
    assert (result.verdict, result.reasons[0].partition(":")[0]) == ("damaged", status)
    for force in (False, True):
        (refused,) = restore(cache, aside(cache), bundled(), force=force)
        assert not refused.done
        assert f"{status}: " in refused.reason
    assert not root.file(key, "o").exists()
    assert not root.file(key, "json").exists()


def test_the_object_that_is_put_back_is_checked_under_the_lock(cache, root, monkeypatch):
    """What changes between the audit and the rename is not put back."""
    key = root.add()
    cache.set_aside([cache.entry(key)])
    entry, flock, obj = cache.entry(key), fcntl.flock, root.file(key, "o.quarantined")

    def changed(file, operation):
        flock(file, operation)
        if operation & fcntl.LOCK_EX:
            obj.write_bytes(obj.read_bytes()[:-1] + b"?")

    monkeypatch.setattr(fcntl, "flock", changed)
    (refused,) = restore(cache, [entry], bundled(), force=True)
    assert (refused.done, "stays quarantined: it is not intact: digest" in refused.reason) == (False, True)


def test_another_entry_than_the_acquitted_one_does_not_go_back(cache, root):
    """Judging takes seconds: what b12x compiled again and was set aside meanwhile is another object under the same key."""
    key = root.add()
    cache.set_aside([cache.entry(key)])
    acquitted = cache.entry(key)
    for suffix in ("o.quarantined", "json.quarantined"):
        root.file(key, suffix).unlink()
    code = bytes(reversed(Made().object))
    root.add(object_sha256=hashlib.sha256(code).hexdigest())
    root.file(key, "o").write_bytes(code)
    cache.set_aside([cache.entry(key)])
    with pytest.raises(CannotRun, match=f"{key} is not the entry that was looked at: b12x has written another one since"):
        cache.put_back([acquitted])
    assert root.file(key, "o.quarantined").read_bytes() == code


def test_an_intact_one_goes_back(cache, root):
    key = root.add()
    cache.set_aside([cache.entry(key)])
    (back,) = restore(cache, aside(cache), bundled())
    assert (back.done, cache.verify([cache.entry(key)])[0].status) == (True, "ok")


def test_what_b12x_wrote_since_it_was_judged_is_left(cache, root):
    """The convicted object was replaced meanwhile; what lay there instead was set aside in its place."""
    key = root.add()
    judged = cache.entry(key)
    other = Made().object[:-1] + b"?"
    root.file(key, "o").write_bytes(other)
    with pytest.raises(CannotRun, match=f"{key} is not the entry that was looked at: b12x has written another one since"):
        cache.set_aside([judged])
    assert root.file(key, "o").read_bytes() == other
    root.add(object_sha256=hashlib.sha256(other).hexdigest())
    root.file(key, "o").write_bytes(other)
    with pytest.raises(CannotRun, match="is not the entry that was looked at"):
        cache.set_aside([judged])
    root.add()
    assert cache.set_aside([judged]) == [key], "the same object, written again"


def test_earlier_evidence_of_a_key_stays(cache, root):
    made, key = Made(), root.add()
    cache.set_aside([cache.entry(key)])
    root.add(made)
    cache.set_aside([cache.entry(key)])
    assert names(root, ".quarantined", ".1") == [f"{key[:2]}/{key}.json.quarantined", f"{key[:2]}/{key}.o.quarantined"], "one and the same object"
    other = made.object[:-1] + b"?"
    root.add(made, object_sha256=hashlib.sha256(other).hexdigest())
    root.file(key, "o").write_bytes(other)
    cache.set_aside([cache.entry(key)])
    assert root.file(key, "o.quarantined").read_bytes() == made.object
    assert root.file(key, "o.quarantined.1").read_bytes() == other
    first, second = cache.entries_of(key)
    assert (first.aside, second.aside, {first.status, second.status}) == (".quarantined", ".quarantined.1", {"quarantined"})
    assert cache.read_object(second) == other
    assert cache.put_back([second]) == [key]
    assert root.file(key, "o").read_bytes() == other
    assert apply(cache.plan(Selectors(statuses=("quarantined",)))).removed == (key,)
    assert names(root, ".quarantined", ".1") == []


def test_code_that_changes_while_it_is_audited_is_not_read(cache, root):
    key = root.add()
    entry = cache.entry(key)
    root.file(key, "o").write_bytes(Made().object[:-1] + b"?")
    with pytest.raises(Exception, match="its object changed while it was audited"):
        read_code(cache, entry, Claim("latent_scale", "latent_scale_identity", 1, 6), root.path)


@pytest.mark.parametrize(
    "selectors",
    [
        Selectors(specs=(parse_spec(f"{DECODE}<18"),)),
        Selectors(kernels=(DECODE,)),
        Selectors(older_than_s=0),
        Selectors(judges=(CONVICTED,)),
        Selectors(max_bytes=0),
    ],
    ids=["spec", "kernel", "older", "advisory", "max size"],
)
def test_what_is_set_aside_is_kept_by_name(cache, root, filled, selectors):
    key = filled["decode 17"]
    cache.set_aside([cache.entry(key)])
    plan = cache.plan(selectors)
    assert key not in chosen(plan)
    assert [(kept.key, kept.reason) for kept in plan.kept] == [(key, "quarantined: mlactl cache rm KEY forgets it")]
    assert chosen(cache.plan(Selectors(statuses=("quarantined",)))) == [key]
    assert chosen(cache.plan_entries([cache.entry(key)])) == [key]


def test_what_b12x_compiled_again_is_not_overwritten(cache, root, filled):
    made = Made(kernel=DECODE, version=17)
    cache.set_aside([cache.entry(made.key)])
    root.add(made)
    with pytest.raises(CannotRun, match="is there already: b12x compiled it again") as caught:
        cache.put_back(aside(cache))
    assert caught.value.message.startswith("0 of 1 entries were put back")
    assert {entry.status for entry in cache.entries() if entry.key == made.key} == {"ok", "quarantined"}
    cache.set_aside([cache.entry(made.key)])
    assert [entry.status for entry in cache.entries() if entry.key == made.key] == ["quarantined"]


def test_a_busy_key_is_not_set_aside(cache, root, filled):
    key = filled["forward"]
    with root.file(key, "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CannotRun, match=f"1 of 2 entries were set aside; .*held by process {os.getpid()}"):
            cache.set_aside([cache.entry(key), cache.entry(filled["decode 17"])])
    assert [entry.key for entry in aside(cache)] == [filled["decode 17"]]


def test_what_was_set_aside_can_be_removed_without_touching_what_came_after(cache, root, filled):
    made = Made(kernel=DECODE, version=17)
    cache.set_aside([cache.entry(made.key)])
    root.add(made)
    result = apply(cache.plan(Selectors(statuses=("quarantined",))))
    assert result.removed == (made.key,)
    assert names(root, ".quarantined") == []
    assert cache.verify([cache.entry(made.key)])[0].status == "ok"


def test_a_bare_object_is_set_aside_alone(cache, root, filled):
    key = filled["bare"]
    cache.set_aside([cache.entry(key)])
    assert names(root, ".quarantined") == [f"{key[:2]}/{key}.o.quarantined"]
    cache.put_back(aside(cache))
    assert cache.entry(key).status == "no-manifest"


def test_an_empty_root(tmp_path):
    from mlactl.cache.foreign.b12x.adapter import B12xCache

    cache = B12xCache(Root(tmp_path / "absent").path)
    assert cache.entries() == []
    assert cache.plan(Selectors(kernels=("x",))).entries == ()


# ---- moves that were cut short


def cut_short(root, key, window):
    """The files of a key after a move was stopped: `whole`, a copy of the manifest beside a live entry; `object`, the object away and both
    manifests there; `older`, the object away and its manifest still the live one."""
    live, copy = root.file(key, "json"), root.file(key, "json.quarantined")
    if window in ("whole", "object"):
        copy.write_bytes(live.read_bytes())
    if window in ("object", "older"):
        root.file(key, "o").rename(root.file(key, "o.quarantined"))


WINDOWS = ("whole", "object", "older")


@pytest.mark.parametrize("window", WINDOWS)
def test_restore_completes_a_move_that_was_cut_short(cache, root, window):
    """`audit KEY --restore` refused an object whose manifest had the live name: "b12x compiled it again"."""
    key = root.add()
    before = root.files()
    cut_short(root, key, window)
    (entry,) = aside(cache)
    (result,) = audit(cache, [entry], bundled()).results
    assert (result.verdict, result.quarantined) == ("clean", True)
    (back,) = restore(cache, [entry], bundled())
    assert back.done, back.reason
    assert root.files() == before
    assert cache.verify([cache.entry(key)])[0].status == "ok"


@pytest.mark.parametrize("window", WINDOWS)
def test_rm_removes_both_halves(cache, root, window):
    key = root.add()
    cut_short(root, key, window)
    result = apply(cache.plan_entries([cache.entry(key)]))
    assert set(result.removed) == {key}
    assert root.files() == [f"{key[:2]}/{key}.lock"]


@pytest.mark.parametrize("window", ["object", "older"])
def test_a_half_is_one_entry_that_nothing_loads(cache, root, window):
    """`prune --status no-object`, which verify hinted at, took the manifest of the object that was set aside."""
    key = root.add(Made(kernel=DECODE, version=17))
    cut_short(root, key, window)
    (entry,) = cache.entries()
    assert (entry.status, entry.manifest.spec.version) == ("quarantined", 17)
    assert f"mlactl cache audit {key[:12]} --restore completes it" in entry.detail
    assert cache.describe(entry).manifest["cache_key"] == key
    for selectors in (Selectors(statuses=("no-object",)), Selectors(kernels=(DECODE,)), Selectors(max_bytes=0)):
        assert chosen(cache.plan(selectors)) == []
    apply(cache.plan(Selectors(statuses=("quarantined",))))
    assert names(root, ".o", ".json", ".quarantined") == []


def test_a_manifest_of_another_object_is_no_half(cache, root):
    """b12x compiled the key again and lost that object: the evidence and the new manifest have nothing to do with each other."""
    key = root.add()
    root.file(key, "o").rename(root.file(key, "o.quarantined"))
    root.add(obj=False, object_bytes=17)
    assert [entry.status for entry in cache.entries()] == ["no-object", "quarantined"]
    apply(cache.plan_entries([cache.entry(key)]))
    assert names(root, ".o", ".json", ".quarantined") == [f"{key[:2]}/{key}.o.quarantined"]


def test_an_object_with_another_digest_does_not_go_back(cache, root):
    key = root.add()
    cut_short(root, key, "older")
    obj = root.file(key, "o.quarantined")
    obj.write_bytes(obj.read_bytes()[:-1] + b"?")
    (refused,) = restore(cache, aside(cache), bundled(), force=True)
    assert (refused.done, "digest: " in refused.reason) == (False, True)
    assert obj.exists()


# ---- preparation files that say nothing


@pytest.mark.parametrize("harm", ["text", "link", "folder link", "no folder", "pipe"])
def test_nothing_goes_while_a_preparation_file_cannot_be_read(cache, root, harm):
    """What it names is not known, and the plan went on as if it named nothing."""
    keys = [root.add(), root.add(Made(version=5))]
    name = root.prepare(keys[0])
    folder, path = root.path / "preparation", root.path / "preparation" / name
    {
        "text": lambda: path.write_text("{bad"),
        "link": lambda: (path.rename(root.path / "elsewhere"), path.symlink_to(root.path / "elsewhere")),
        "folder link": lambda: (folder.rename(root.path / "elsewhere"), folder.symlink_to(root.path / "elsewhere")),
        "no folder": lambda: (path.unlink(), folder.rmdir(), folder.write_text("")),
        "pipe": lambda: (path.unlink(), os.mkfifo(path)),
    }[harm]()
    for plan in (cache.plan(Selectors(kernels=(KERNEL,))), cache.plan_entries([cache.entry(keys[1])]), cache.plan(Selectors(max_bytes=0))):
        assert plan.entries == ()
        assert {kept.reason.partition(": it may name this one; ")[2] for kept in plan.kept} == {"--include-prepared removes it all the same"}
    told = []
    assert chosen(cache.plan(Selectors(kernels=(KERNEL,)), include_prepared=True, on_problem=told.append)) == sorted(keys)
    assert "not known" in told[0]
