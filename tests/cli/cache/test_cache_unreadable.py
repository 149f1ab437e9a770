"""What this user cannot read: told with owner and mode, judged by nobody, removed by nothing; on our own roots and on b12x's."""

import errno
import os
import sys

import pytest
import tiny
from b12x_files import Made, Root
from users import NOBODY, as_root, let_through

from mlactl.cache.foreign.b12x.adapter import B12xCache

# The interpreter may be closed to that user: what the runs import is imported before.
AS_NOBODY = f"""
import contextlib, io, os, sys
sys.path[:0] = [{str(tiny.HERE)!r}]
import tiny; tiny.register()
from mlactl.cli.app import main
root, key, words = sys.argv[1], sys.argv[2], sys.argv[3:]
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    for warm in (["ls", "--json"], ["verify"], ["show", key], ["audit"], ["prune", "--kernel", "x", "--dry-run"], ["rm", key, "--dry-run"]):
        main(["cache", *warm, "--cache-dir", root])
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
sys.exit(main(words))
"""


@pytest.fixture
def closed(cli, tmp_path):
    """Runs `mlactl cache` as another user on a root that is theirs to write, with the manifests of all entries root's and 0600."""

    def closed(path, key, manifests):
        let_through(tmp_path)
        for name in (path, *path.rglob("*")):
            os.chown(name, NOBODY, NOBODY)
        for manifest in manifests:
            os.chown(manifest, 0, 0)
            manifest.chmod(0o600)
        cli.launch = (sys.executable, "-c", AS_NOBODY, str(path), key)
        return lambda *words: cli("cache", *words, "--cache-dir", path)

    return closed


def holds(run, root, key, removers):
    """What every command says of a root whose entries cannot be read."""
    before = sorted(path.name for path in root.rglob("*") if path.suffix != ".lock")
    listed = run("ls", "--json")
    assert {row["status"] for row in listed.json["entries"]} == {"unreadable"}
    said = "(owner root (uid 0), mode 0600) cannot be read: Permission denied"
    checked = run("verify", key)
    assert (checked.code, said in checked.stdout) == (1, True), checked.stderr
    assert "run it again as its owner or as root" in checked.stderr
    assert "prune" not in checked.stderr
    assert "prune" not in run("ls").stderr
    audited = run("audit", "--facts-only")
    assert (audited.code, "1 cannot tell" in audited.lines[-1] or "3 cannot tell" in audited.lines[-1]) == (1, True), audited.stdout
    assert f"  unreadable: {root}" in run("audit", key).stdout
    assert "run it again as its owner or as root" in run("show", key).stderr
    for words in removers:
        done = run("prune", *words, "--yes")
        assert (done.code, done.lines[0].startswith("removed 0 entries")) == (0, True), done.stderr
    kept = run("prune", "--status", "unreadable", "--yes")
    assert "kept: cannot be read, so nothing says what would go: " in kept.stdout
    named = run("rm", key, "--yes")
    assert (named.code, said in named.stderr) == (2, True)
    nothing = run("prune", "--kernel", "attention", "--yes")
    assert "that cannot be read: run it as their owner or as root\n" in nothing.stderr
    assert "no entries" not in nothing.stderr
    assert sorted(path.name for path in root.rglob("*") if path.suffix != ".lock") == before


EVERY = (("--status", "bad-manifest"), ("--max-size", "0B"))


@as_root
def test_unreadable_manifests_of_b12x_are_not_damaged(closed, tmp_path):
    """They were "damaged", and `prune --status bad-manifest` removed three intact entries."""
    root = Root(tmp_path / "b12x")
    keys = [root.add(Made(version=number)) for number in (1, 2, 3)]
    run = closed(root.path, keys[0], [root.file(key, "json") for key in keys])
    holds(run, root.path, keys[0], EVERY)


@as_root
def test_unreadable_manifests_of_our_own_are_not_damaged(closed, filled, cache):
    for entry in filled.all[1:]:
        entry.manifest_path.unlink()
        entry.object_path.unlink()
    run = closed(cache.cache_dir, filled.current.key, [filled.current.manifest_path])
    holds(run, cache.cache_dir, filled.current.key, EVERY)


@as_root
def test_objects_in_a_folder_that_may_be_listed_and_not_entered(closed, tmp_path):
    root = Root(tmp_path / "b12x")
    bare, whole = root.add(Made(version=1), manifest=False), root.add(Made(version=2))
    run = closed(root.path, whole, [])
    for key in (bare, whole):
        os.chown(root.file(key, "o").parent, 0, 0)
        root.file(key, "o").parent.chmod(0o744)
    assert {row["status"] for row in run("ls", "--json").json["entries"]} == {"unreadable"}
    assert run("verify", "--json").json["bad"] == 2


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_disk_that_fails_convicts_nothing(tmp_path, monkeypatch, number):
    root = Root(tmp_path / "b12x")
    root.add()
    cache = B12xCache(root.path)
    (entry,) = cache.entries()

    def failing(*_args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "read", failing)
    assert [found.status for found in cache.entries()] == ["unreadable"]
    examined = cache.examine(entry)
    assert (examined.status, os.strerror(number) in examined.detail) == ("unreadable", True)
