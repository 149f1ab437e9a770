"""Reading and replacing files that a person named: what is no regular file is left alone, and never waited for."""

import hashlib
import os
import socket

import pytest

from mlactl import regular_files
from mlactl.errors import CannotRun, UsageError
from mlactl.regular_files import read_bytes, require_target, sha256_of, write_file


def pipe(path):
    os.mkfifo(path)
    return path


def bound_socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
    return path


def folder(path):
    path.mkdir()
    return path


KINDS = [(pipe, "a pipe"), (bound_socket, "a socket"), (folder, "a folder")]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(("make", "what"), KINDS)
def test_only_a_regular_file_is_replaced(tmp_path, monkeypatch, make, what, force):
    """`scales fit -o` renamed its file over a device node, and every program on the machine lost that device."""
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    target = make(tmp_path / "there")
    before = target.lstat()
    (tmp_path / "link").symlink_to(target)
    for name in ("there", "link"):
        with pytest.raises(UsageError, match=f"{name}: is {what}, expected a file to write") as caught:
            write_file(b"new", tmp_path / name, force=force)
        assert caught.value.exit_code == 2
    after = target.lstat()
    assert (before.st_mode, before.st_ino) == (after.st_mode, after.st_ino)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "there"]


def test_a_link_is_written_through(tmp_path):
    """A link to a shared scale file became a file of its own, and the shared one stayed old."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "scales.json").write_text("old")
    link = tmp_path / "link.json"
    link.symlink_to("shared/scales.json")
    with pytest.raises(UsageError, match="is there already"):
        write_file(b"new", link, force=False)
    write_file(b"new", link, force=True)
    assert link.is_symlink()
    assert (tmp_path / "shared" / "scales.json").read_text() == "new"
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["scales.json"]


def test_a_file_is_not_written_over_what_it_is_made_from(tmp_path):
    """`scales fit A -o A --force` replaced the measured amplitudes by the scales made from them."""
    source = tmp_path / "amplitudes.json"
    source.write_text("[1, 2]")
    (tmp_path / "hard.json").hardlink_to(source)
    (tmp_path / "soft.json").symlink_to(source)
    for name in ("amplitudes.json", "hard.json", "soft.json"):
        with pytest.raises(UsageError, match="is the same file as"):
            write_file(b"new", tmp_path / name, force=True, sources=(tmp_path / "absent", source))
    assert source.read_text() == "[1, 2]"


def test_a_target_that_cannot_be_looked_at(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(CannotRun, match="too many levels of symbolic links"):
        require_target(loop)
    require_target(tmp_path / "absent")


@pytest.mark.parametrize(("make", "what"), [*KINDS[:1], KINDS[2]])
def test_only_a_regular_file_is_read(tmp_path, make, what):
    """A pipe among the profiles made every command that lists them wait for ever."""
    path = make(tmp_path / "there")
    for read in (lambda: read_bytes(path, 10, "text"), lambda: sha256_of(path)):
        with pytest.raises(CannotRun, match=f"there: is {what}, expected a file"):
            read()


def test_a_file_over_the_limit_is_not_read(tmp_path, monkeypatch):
    """A sparse file of a tebibyte is quickly made, and took all memory."""
    path = tmp_path / "big"
    path.touch()
    os.truncate(path, 1 << 40)
    monkeypatch.setattr(regular_files.os, "fdopen", None)
    with pytest.raises(CannotRun, match="big: 1099511627776 bytes, expected at most 10 of text"):
        read_bytes(path, 10, "text")


def test_a_small_file_is_read_and_hashed(tmp_path):
    path = tmp_path / "small"
    path.write_bytes(b"0123456789")
    assert read_bytes(path, 10, "text") == b"0123456789"
    assert sha256_of(path) == hashlib.sha256(b"0123456789").hexdigest()
