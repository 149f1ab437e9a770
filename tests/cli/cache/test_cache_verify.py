"""`cache verify`: findings, repair and reproduction as a person and a pipe see them."""

import os
import re
import signal

import pytest
import stand_ins

from mlactl.cache import locks


def test_all_ok_in_every_mode(cache, filled):
    done = cache.every_mode("cache", "verify", rows="entries")
    assert done["human"].stdout == "6 entries, all ok\n"
    assert done["quiet"].stdout == ""
    document = done["json"].json
    assert (document["checked"], document["bad"]) == (6, 0)
    assert [(item["key"], item["status"], item["detail"]) for item in document["entries"]] == [(entry.key, "ok", None) for entry in filled.in_order]


def test_an_empty_root_is_clean(cache):
    done = cache.every_mode("cache", "verify", rows="entries")
    assert done["human"].stdout == "0 entries\n"
    assert done["json"].json == {"schema_version": 1, "checked": 0, "bad": 0, "passed_over": [], "entries": []}


def test_findings_in_every_mode(cache, filled, prebuilt):
    """Every word verify can say, each for its own damage, in one root."""
    stand_ins.flip_bit(filled.current)
    first, second = filled.superseded, filled.newer
    stand_ins.put_object(first, second.object_path.read_bytes(), digests=True)
    os.truncate(second.object_path, 4096)
    filled.other_sources.object_path.unlink()
    filled.other_toolchain.manifest_path.unlink()
    filled.sm_121a.manifest_path.write_bytes(b"not a manifest")
    stand_ins.leave_temporary(filled.other_toolchain)
    expected = {
        (filled.current.key, "digest"),
        (first.key, "symbol"),
        (second.key, "size"),
        (filled.other_sources.key, "no-object"),
        (filled.other_toolchain.key, "no-manifest"),
        (filled.other_toolchain.key, "temp"),
        (filled.sm_121a.key, "bad-manifest"),
    }
    done = cache.every_mode("cache", "verify", rows="entries", code=1)
    document = done["json"].json
    assert {(item["key"], item["status"]) for item in document["entries"]} == expected
    assert all(item["detail"] for item in document["entries"])
    assert document["bad"] == 7
    assert sorted(done["quiet"].lines) == sorted(key for key, _ in expected)
    text = done["human"].stdout
    assert text.endswith("\n7 entries, 7 not ok\n")
    assert (
        f"{second.key[:12]} size test.tiny 2 dtype=f32 factor=5 for sm_120a\n  4096 bytes, expected {second.object_bytes}\n  {second.object_path}\n"
        in text
    )
    assert f"{first.key[:12]} symbol test.tiny 0 dtype=f32 factor=3 for sm_120a\n  exports mlactl_{second.key}, expected mlactl_{first.key}\n" in text
    in_full = [row["key"][:12] for row in document["entries"] if row["status"] in ("digest", "symbol")]
    assert done["human"].stderr.endswith(
        "hint: mlactl cache verify --repair rebuilds what this install can build; mlactl cache prune --status bad-manifest "
        "--status no-manifest --status no-object --status size --status temp --dry-run shows what would go; "
        f"mlactl cache rm {' '.join(in_full)} removes by key\n"
    ), "prune goes by a listing, which never says digest or symbol"


def test_named_keys_and_digests_only(cache, filled):
    stand_ins.flip_bit(filled.current)
    good = cache("cache", "verify", filled.newer.key[:10], filled.superseded.key)
    assert (good.code, good.stdout) == (0, "2 entries, all ok\n")
    assert cache("cache", "verify", filled.current.key, "-q").lines == [filled.current.key]
    assert cache("cache", "verify", "feedc0de").code == 1
    # A swap with rewritten digests is what digests alone cannot see.
    stand_ins.put_object(filled.superseded, filled.newer.object_path.read_bytes(), digests=True)
    assert cache("cache", "verify", filled.superseded.key, "--digests-only").code == 0
    assert cache("cache", "verify", filled.superseded.key).code == 1


def test_repair_rebuilds_with_the_real_compiler(cache, store, filled):
    before = filled.current.object_path.read_bytes()
    stand_ins.flip_bit(filled.current)
    stand_ins.flip_bit(filled.superseded)
    done = cache("cache", "verify", "--repair")
    assert done.code == 1, "one is left"
    assert f"{filled.current.key[:12]} digest, rebuilt\n" in done.stdout
    assert f"{filled.superseded.key[:12]} digest, left: test.tiny: version 0 asked for, this release builds version 1\n" in done.stdout
    assert done.stdout.endswith("6 entries, 1 not ok\n")
    assert f"hint: mlactl cache rm {filled.superseded.key[:12]} removes by key\n" in done.stderr
    assert filled.current.object_path.read_bytes() == before, "objects are reproducible"


def test_repair_of_everything_is_clean(cache, store, filled):
    filled.current.object_path.unlink()
    done = cache("cache", "verify", "--repair", "--json")
    assert done.code == 0, done.stderr
    row = next(item for item in done.json["entries"] if item["key"] == filled.current.key)
    assert (row["status"], row["repair"]) == ("ok", {"outcome": "rebuilt", "found": "no-object", "reason": None})
    assert cache("cache", "verify").code == 0


def test_repair_says_who_is_busy(cache, store, filled):
    stand_ins.flip_bit(filled.current)
    with locks.entry_lock(store.roots.writable, filled.current.key, exclusive=False, wait_s=0.0):
        done = cache("cache", "verify", "--repair")
    assert done.code == 1
    assert re.search(rf"{filled.current.key[:12]} digest, busy: .*in use by process {os.getpid()}", done.stdout)


def test_reproduce(cache, filled):
    """Proven, not comparable and different are three answers with three exit codes."""
    same = cache("cache", "verify", filled.current.key, filled.sm_121a.key, "--reproduce")
    assert same.code == 0, same.stderr
    assert same.stdout == "2 of 2 entries compiled again to the same bytes\n2 entries, all ok\n"
    both = cache("cache", "verify", filled.current.key, filled.other_toolchain.key, "--reproduce")
    assert both.code == 3
    assert "1 of 2 entries compiled again to the same bytes\n" in both.stdout
    assert re.search(
        rf"error: cannot compare 1 entry of 2: built from other toolchain\..*\nhint: mlactl cache why {filled.other_toolchain.key[:12]}\n",
        both.stderr,
    )
    stand_ins.rewrite_manifest(filled.current, code_sha256="ab" * 32)
    different = cache("cache", "verify", filled.current.key, filled.other_toolchain.key, "--reproduce", "--json")
    assert different.code == 1
    results = {item["key"]: item["reproduced"]["result"] for item in different.json["entries"]}
    assert results == {filled.current.key: "different", filled.other_toolchain.key: "cannot compare"}
    assert cache("cache", "verify", "--reproduce", "--digests-only").code == 2


def test_ctrl_c_is_130_and_says_how_far_it_came(cache, filled, prebuilt):
    """Stopped while it compiles again: nothing was published by it, so nothing can be half done."""
    process = cache.start("cache", "verify", "--reproduce")
    for line in process.stderr:
        if line.startswith("compiling again"):
            break
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert "interrupted" in stderr
    assert stdout == ""


def test_what_no_load_would_trust_is_a_finding(cache, filled):
    """`verify` said "all ok" of a root and of an object that others may write, which every load refuses."""
    target = filled.current.object_path
    target.chmod(0o666)
    done = cache("cache", "verify", "--cache-dir", cache.cache_dir)
    assert done.code == 1
    assert f"{filled.current.key[:12]} untrusted test.tiny 1" in done.stdout
    assert f"  {target} is not trusted: owner " in done.stdout
    assert "6 entries, 1 not ok\n" in done.stdout
    assert done.stderr.endswith(f"hint: chmod go-w {target}, or name the root in MLACTL_TRUST_ROOT if this is meant\n")
    why = cache("cache", "why", filled.current.key)
    assert "miss" in why.stdout
    assert "status untrusted" in why.stdout
    assert f"hint: chmod go-w {target}" in why.stderr
    assert "mlactl warmup" not in why.stderr, "compiling again changes no mode"
    cache.cache_dir.chmod(0o777)
    rows = cache("cache", "verify", "--json").json["entries"]
    assert {row["status"] for row in rows} == {"untrusted"}


def test_links_below_the_root_are_told_and_the_root_may_be_one(cache, filled, tmp_path):
    """A bucket that was a link was followed by loads and unseen by ls, verify and prune."""
    moved = tmp_path / "moved"
    cache.cache_dir.rename(moved)
    cache.cache_dir.symlink_to(moved)
    assert cache("cache", "verify").stdout == "6 entries, all ok\n"
    bucket = moved / "v1" / filled.current.key[:2]
    bucket.rename(tmp_path / "bucket")
    bucket.symlink_to(tmp_path / "bucket")
    link = cache.cache_dir / "v1" / filled.current.key[:2]
    verify, ls = cache("cache", "verify"), cache("cache", "ls")
    assert (verify.code, ls.code) == (1, 0)
    assert "1 folder not looked at\n" in verify.stdout
    for done in (verify, ls):
        assert f"warning: {link} is a symbolic link, which is never followed below the root" in done.stderr
    assert cache("cache", "show", filled.current.key).code == 1
    (moved / "v1").rename(tmp_path / "v1")
    (moved / "v1").symlink_to(tmp_path / "v1")
    verify = cache("cache", "verify")
    assert (verify.code, verify.stdout.splitlines()[0]) == (1, "0 entries")
    assert f"warning: {cache.cache_dir}/v1 is a symbolic link" in verify.stderr


def test_hints_carry_the_cache_dir_that_was_given(cache, filled, tmp_path):
    """Following a hint acted on the default root instead of the one that was looked at."""
    other = tmp_path / "other root"
    cache.cache_dir.rename(other)
    given, key = ("--cache-dir", str(other)), filled.current.key
    quoted = f"--cache-dir '{other}'"
    (other / "v1" / key[:2] / f"{key}.so").unlink()
    expected = {
        ("verify",): (1, [f"mlactl cache verify {quoted} --repair", f"mlactl cache prune {quoted} --status no-object --dry-run"]),
        ("ls",): (0, [f"mlactl cache verify {quoted} checks", f"mlactl cache prune {quoted} --status WORD"]),
        ("show", key): (0, [f"mlactl cache verify {quoted} {key[:12]} --repair", f"mlactl cache rm {quoted} {key[:12]}"]),
        ("why", key): (0, [f"mlactl warmup {quoted} --profile NAME"]),
        ("show", "feedc0de"): (1, [f"hint: mlactl cache ls {quoted} shows"]),
        ("rm", "feedc0de"): (1, [f"hint: mlactl cache ls {quoted} shows"]),
        ("prune", "--status", "no-object", "--dry-run"): (0, [f"hint: mlactl cache prune --status no-object {quoted} --yes"]),
    }
    for words, (code, hints) in expected.items():
        done = cache("cache", *words, *given)
        assert done.code == code, (words, done.stderr)
        assert all(hint in done.stderr for hint in hints), (words, done.stderr)
    assert "--cache-dir" not in cache("cache", "show", "feedc0de").stderr, "nothing was given"


def test_what_is_quarantined_or_at_work_is_sent_to_what_helps(cache, store, filled):
    """`--repair` answered "left" and no more; `prune --status locked` was suggested and matches nothing."""
    stand_ins.quarantine(filled.current)
    short = filled.current.key[:12]
    done = cache("cache", "verify", short, "--repair")
    assert (done.code, f"{short} quarantined, left: it is quarantined, which a repair does not undo\n" in done.stdout) == (1, True)
    assert done.stderr.endswith(f"hint: mlactl cache show {short} says why it is quarantined; mlactl cache rm {short} forgets it\n")
    filled.newer.manifest_path.unlink()
    with locks.entry_lock(store.roots.writable, filled.newer.key, exclusive=True, wait_s=0.0):
        busy = cache("cache", "verify", filled.newer.key)
    assert (busy.code, busy.stdout.startswith(f"{filled.newer.key[:12]} locked")) == (1, True)
    assert busy.stderr.endswith("hint: what is being written is checked when that is done: run it again\n")


def test_many_damaged_keys_give_a_command_that_works(cache, filled):
    for entry in filled.all:
        stand_ins.flip_bit(entry)
    done = cache("cache", "verify")
    named = " ".join(entry.key[:12] for entry in filled.in_order[:3])
    assert done.stderr.endswith(f"mlactl cache rm {named} removes the first 3 of 6\n")


@pytest.mark.parametrize("command", ["ls", "prune"])
@pytest.mark.parametrize("word", ["digest", "arch", "symbol", "signature", "untrusted"])
def test_a_status_that_only_a_full_check_gives_is_refused(inside, command, word):
    done = inside("cache", command, "--status", word)
    assert (done.code, done.stdout) == (2, "")
    assert f"--status {word} would match nothing: only a full check says that" in done.stderr
    assert "hint: mlactl cache verify names such entries; mlactl cache rm KEY removes one" in done.stderr
