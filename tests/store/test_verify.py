"""Damage of every kind is named right, rebuilt where this install can, and good entries are proven by recompiling."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys

import pytest
import stand_ins
import tiny

from mlactl.cache import locks
from mlactl.cache.key import inputs_for, symbol_for
from mlactl.cache.store import Status, Store
from mlactl.cache.verify import Repair, Reproduced, repair, reproduce, verify
from mlactl.errors import Interrupted


def statuses(report):
    return [(entry.key, str(entry.status)) for entry in report.entries]


def exported(prebuilt, spec, arch="sm_120a"):
    return prebuilt.path(symbol_for(inputs_for(spec, arch).key())).read_bytes()


# ---- what is found


def test_good_entries_and_an_empty_root(store, publish):
    assert verify(store).entries == ()
    entries = [publish(tiny.spec(2)), publish(tiny.spec(3)), publish(tiny.spec(2), "sm_121a")]
    report = verify(store)
    assert sorted(statuses(report)) == sorted((entry.key, "ok") for entry in entries)
    assert report.bad == ()


@pytest.mark.parametrize(
    ("damage", "status", "words"),
    [
        (lambda entry: entry.manifest_path.unlink(), "no-manifest", "never committed"),
        (lambda entry: entry.object_path.unlink(), "no-object", "not there"),
        (lambda entry: entry.manifest_path.write_bytes(b""), "bad-manifest", ""),
        (lambda entry: entry.manifest_path.write_bytes(b"\xff\x00"), "bad-manifest", ""),
        (lambda entry: os.truncate(entry.object_path, 4096), "size", "4096 bytes, expected"),
        (lambda entry: os.truncate(entry.object_path, 0), "size", "0 bytes, expected"),
        (stand_ins.flip_bit, "digest", "SHA-256"),
        (stand_ins.quarantine, "quarantined", "set aside"),
        (lambda entry: entry.object_path.rename(entry.object_path.with_suffix(".bak")), "no-object", "not there"),
    ],
)
def test_damage_by_status_word(store, publish, damage, status, words):
    """C3: cut, empty, absent, flipped; the good entry beside it stays ok."""
    entry, good = publish(tiny.spec(2)), publish(tiny.spec(3))
    damage(entry)
    report = verify(store)
    assert dict(statuses(report)) == {entry.key: status, good.key: "ok"}
    (bad,) = report.bad
    assert words in bad.detail


def test_a_temporary_and_a_running_publisher(store, publish):
    entry = publish(tiny.spec(2))
    stand_ins.leave_temporary(entry)
    assert sorted(str(found.status) for found in verify(store).entries) == ["ok", "temp"]
    with locks.entry_lock(entry.layer, entry.key, exclusive=True, wait_s=0.0):
        entry.manifest_path.unlink()
        code = "import sys; from mlactl.cache.store import Store; from mlactl.cache.verify import verify\n"
        code += "print(*sorted(str(found.status) for found in verify(Store.open(sys.argv[1])).entries))"
        seen = tiny.run_python(code, str(store.roots.writable.path)).stdout
    assert seen.split() == ["locked", "locked"]


def test_swapped_objects_are_refused_by_digest(store, publish):
    """C3: two entries' objects swapped, each of the right size."""
    first, second = publish(tiny.spec(2)), publish(tiny.spec(3))
    data = first.object_path.read_bytes()
    first.object_path.write_bytes(second.object_path.read_bytes())
    second.object_path.write_bytes(data)
    assert {status for _, status in statuses(verify(store))} == {"digest"}
    assert {status for _, status in statuses(verify(store, digests_only=True))} == {"digest"}


def test_swapped_objects_with_rewritten_digests_are_refused_by_symbol(store, publish):
    """C3: whoever swaps objects and makes the manifests fit still has the other key's function inside."""
    first, second = publish(tiny.spec(2)), publish(tiny.spec(3))
    one, other = first.object_path.read_bytes(), second.object_path.read_bytes()
    stand_ins.put_object(first, other, digests=True)
    stand_ins.put_object(second, one, digests=True)
    report = verify(store)
    assert {status for _, status in statuses(report)} == {"symbol"}
    assert f"exports {second.manifest.symbol}, expected {first.manifest.symbol}" in [entry.detail for entry in report.bad]
    assert {status for _, status in statuses(verify(store, digests_only=True))} == {"ok"}, "digests alone cannot see it"


def test_another_function_under_the_right_symbol_is_refused_by_signature(store, publish, prebuilt):
    """C3: symbol and digests made to fit; the argument types give it away."""
    entry = publish(tiny.spec(2, "f32"))
    other = exported(prebuilt, tiny.spec(2, "i32"))
    stand_ins.put_object(entry, stand_ins.link(stand_ins.renamed(other, inputs_for(tiny.spec(2, "i32"), "sm_120a").key(), entry.key)), digests=True)
    (bad,) = verify(store).bad
    assert bad.status is Status.SIGNATURE
    assert "int32" in bad.detail
    assert "float32" in bad.detail


def test_the_elf_says_which_arch_it_is(store, publish, prebuilt):
    """C8: an entry labelled sm_120a whose embedded ELF says sm_100a, beside a good one."""
    entry, good = publish(tiny.spec(2)), publish(tiny.spec(3))
    stand_ins.put_object(entry, stand_ins.link(prebuilt.sm_100a.read_bytes()), digests=True)
    report = verify(store)
    assert dict(statuses(report)) == {entry.key: "arch", good.key: "ok"}
    assert "sm_100a" in report.bad[0].detail
    assert "sm_120a" in report.bad[0].detail


def test_an_object_that_is_none_of_ours(store, publish):
    entry = publish(tiny.spec(2))
    stand_ins.put_object(entry, b"#!/bin/sh\n" * 1000, digests=True)
    (bad,) = verify(store).bad
    assert bad.status is Status.SYMBOL
    assert "no ELF" in bad.detail


def test_an_entry_removed_meanwhile_is_not_called_damaged(store, publish):
    entries = [publish(tiny.spec(2)), publish(tiny.spec(3))]
    listed = list(store.entries())
    for path in (entries[0].manifest_path, entries[0].object_path):
        path.unlink()
    assert statuses(verify(store, listed)) == [(entries[1].key, "ok")]


def test_an_entry_republished_meanwhile_is_judged_as_it_is_now(store, publish):
    """Listed damaged, rebuilt by a warmup before verify reads it: a finding that is gone by the time anybody looks."""
    entry = publish(tiny.spec(2))
    os.truncate(entry.object_path, 10)
    listed = list(store.entries())
    assert listed[0].status is Status.SIZE
    publish(tiny.spec(2))
    assert statuses(verify(store, listed)) == [(entry.key, "ok")]


@stand_ins.as_root
def test_another_owners_root_is_verified_without_locks(store, publish, in_child):
    entry, damaged = publish(tiny.spec(2)), publish(tiny.spec(3))
    stand_ins.flip_bit(damaged)
    root = store.roots.writable.path
    stand_ins.let_others_read(root)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}

    def check():
        assert dict(statuses(verify(Store.open(str(root))))) == {entry.key: "ok", damaged.key: "digest"}

    assert in_child(check, uid=stand_ins.NOBODY) == 0
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_ctrl_c_says_how_far_it_came(store, publish):
    for factor in (2, 3, 5):
        publish(tiny.spec(factor))

    def stop(_steps):
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="1 entries were checked, nothing was changed"):
        verify(store, on_done=stop)


# ---- repair


def test_what_this_install_builds_is_rebuilt(store, publish, prebuilt):
    """C3: flipped, swapped, cut and lost objects come back; the good one is not compiled again."""
    entries = [publish(tiny.spec(factor)) for factor in (2, 3, 5, 7)]
    good = publish(tiny.spec(2, "i32"))
    before = {entry.key: entry.object_path.read_bytes() for entry in entries}
    stand_ins.flip_bit(entries[0])
    stand_ins.put_object(entries[1], before[entries[2].key], digests=True)
    os.truncate(entries[2].object_path, 4096)
    entries[3].object_path.unlink()
    bad = verify(store).bad
    assert sorted(str(entry.status) for entry in bad) == ["digest", "no-object", "size", "symbol"]
    compiled = []
    outcomes = repair(store, bad, compiler=prebuilt.compiler(compiled.append))
    assert {outcome.outcome for outcome in outcomes} == {Repair.REBUILT}, outcomes
    assert sorted(compiled) == sorted(entry.manifest.symbol for entry in entries)
    assert verify(store).bad == ()
    assert {entry.key: entry.object_path.read_bytes() for entry in entries} == before
    assert store.entry(good.key).last_used == good.last_used


def test_what_cannot_be_rebuilt_is_left_and_named(store, prebuilt, publish):
    old = stand_ins.publish(store, prebuilt, tiny.spec(2), version=0)
    sources = stand_ins.publish(store, prebuilt, tiny.spec(3), sources_digest="cd" * 32)
    tools = stand_ins.publish(store, prebuilt, tiny.spec(5), toolchain=stand_ins.older_toolchain())
    lost, aside = publish(tiny.spec(7)), publish(tiny.spec(2))
    for entry in (old, sources, tools):
        stand_ins.flip_bit(entry)
    lost.manifest_path.unlink()
    stand_ins.quarantine(aside)
    before = {path: path.read_bytes() for path in store.roots.writable.path.rglob("*") if path.is_file()}
    outcomes = {outcome.entry.key: outcome for outcome in repair(store, verify(store).bad, compiler=prebuilt.compiler())}
    assert {outcome.outcome for outcome in outcomes.values()} == {Repair.LEFT}
    assert "version 0 asked for, this release builds version 1" in outcomes[old.key].reason
    assert outcomes[sources.key].reason == "built from other sources_digest"
    assert "toolchain.distributions.nvidia-cutlass-dsl" in outcomes[tools.key].reason
    assert outcomes[lost.key].reason == "no manifest says what it was compiled from"
    assert outcomes[aside.key].reason == "it is quarantined, which a repair does not undo"
    assert {path: path.read_bytes() for path in store.roots.writable.path.rglob("*") if path.is_file()} == before


def test_repair_does_not_wait_for_who_is_busy(store, publish, prebuilt):
    entry = publish(tiny.spec(2))
    stand_ins.flip_bit(entry)
    bad = verify(store).bad
    code = "import sys, time; from mlactl.cache import locks; from mlactl.cache.roots import Layer; from pathlib import Path\n"
    code += "held = locks.acquire_entry(Layer(Path(sys.argv[1]), True), sys.argv[2], exclusive=False, wait_s=0.0)\n"
    code += "print('held', flush=True)\ntime.sleep(120)"
    command = [sys.executable, "-c", code, str(store.roots.writable.path), entry.key]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        try:
            assert reader.stdout.readline() == "held\n"
            (outcome,) = repair(store, bad, compiler=prebuilt.compiler())
        finally:
            reader.kill()
    assert outcome.outcome is Repair.BUSY
    assert f"process {reader.pid}" in outcome.reason


def test_a_failing_compile_leaves_nothing_valid_behind(store, publish):
    entry = publish(tiny.spec(2))
    stand_ins.flip_bit(entry)

    def broken(_spec, _arch, _symbol, _flavour, out):
        out.write_bytes(b"")

    (outcome,) = repair(store, verify(store).bad, compiler=broken)
    assert outcome.outcome is Repair.FAILED
    assert "wrote nothing" in outcome.reason
    assert [str(found.status) for found in verify(store).entries] != ["ok"]


def test_repair_goes_to_the_writable_layer_even_where_a_lower_one_has_a_good_copy(store, publish, prebuilt, tmp_path):
    """A good copy in a read-only layer once counted as nothing to do, and the damaged one stayed."""
    entry = publish(tiny.spec(2))
    shutil.copytree(store.roots.writable.path, tmp_path / "lower")
    stand_ins.flip_bit(entry)
    layered = Store.open(f"{store.roots.writable.path}:{tmp_path / 'lower'}")
    bad = verify(layered).bad
    assert [outcome.outcome for outcome in repair(layered, bad, compiler=prebuilt.compiler())] == [Repair.REBUILT]
    assert verify(layered).bad == ()
    stand_ins.flip_bit(layered.entry(entry.key, [layered.roots.layers[1]]))
    (left,) = repair(layered, verify(layered).bad, compiler=prebuilt.compiler())
    assert (left.outcome, left.reason) == (Repair.LEFT, f"{tmp_path / 'lower'} is a read-only layer")


# ---- reproduce


def test_an_entry_of_these_sources_is_proven(store, publish, prebuilt):
    entries = [publish(tiny.spec(2)), publish(tiny.spec(2), "sm_121a")]
    compiled = []
    results = reproduce(entries, compiler=prebuilt.compiler(compiled.append))
    assert [(item.result, item.reason) for item in results] == [(Reproduced.SAME, "")] * 2
    assert compiled == [entry.manifest.symbol for entry in entries]


def test_other_code_under_right_digests_is_different(store, publish, prebuilt):
    """An object somebody else built, manifest and all made to fit, passes every check but this one."""
    entry = publish(tiny.spec(2))
    other = stand_ins.renamed(exported(prebuilt, tiny.spec(3)), inputs_for(tiny.spec(3), "sm_120a").key(), entry.key)
    stand_ins.put_object(entry, stand_ins.link(other), digests=True)
    stand_ins.rewrite_manifest(store.entry(entry.key), code_sha256=hashlib.sha256(other).hexdigest())
    report = verify(store)
    assert report.bad == ()
    (item,) = reproduce(report.entries, compiler=prebuilt.compiler())
    assert item.result is Reproduced.DIFFERENT
    assert hashlib.sha256(other).hexdigest() in item.reason
    assert entry.manifest.code_sha256 in item.reason


def test_what_was_built_otherwise_cannot_be_compared(store, publish, prebuilt, monkeypatch):
    entries = [
        stand_ins.publish(store, prebuilt, tiny.spec(2), version=0),
        stand_ins.publish(store, prebuilt, tiny.spec(3), sources_digest="cd" * 32),
        stand_ins.publish(store, prebuilt, tiny.spec(5), toolchain=stand_ins.older_toolchain()),
    ]
    other_python = publish(tiny.spec(7))
    stand_ins.rewrite_manifest(other_python, python="3.99")
    damaged = publish(tiny.spec(2))
    stand_ins.flip_bit(damaged)
    checked = {entry.key: entry for entry in verify(store).entries}
    wanted = [checked[entry.key] for entry in (*entries, other_python, damaged)]
    compiled = []
    results = reproduce(wanted, compiler=prebuilt.compiler(compiled.append))
    assert {item.result for item in results} == {Reproduced.CANNOT_COMPARE}
    assert compiled == []
    assert "version 0" in results[0].reason
    assert "sources_digest" in results[1].reason
    assert "toolchain" in results[2].reason
    assert "Python 3.99" in results[3].reason
    assert "digest" in results[4].reason
