"""Files and folders a person points at: what is refused before any work, and how a path is written into a command."""

import os
import subprocess
import sys

import pytest
from users import NOBODY, as_root

from mlactl.errors import CannotRun, UsageError
from mlactl.printable import shell_word
from mlactl.regular_files import require_regular, require_writable, require_writable_folder


@pytest.mark.parametrize(
    ("path", "word"),
    [("a/b.c", "a/b.c"), ("a b", "'a b'"), ("it's", "'it'\"'\"'s'"), ("-x", "./-x"), ("a\nb\udcff'\\ü", "$'a\\x0ab\\xff\\x27\\x5c\\xc3\\xbc'")],
)
def test_a_path_is_one_word_on_one_line(path, word):
    assert shell_word(path) == word
    printed = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True).stdout
    assert printed == os.fsencode(path if path != "-x" else "./-x")


def test_what_is_no_regular_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, words in (("pipe", "is a pipe, expected a file"), ("absent", "does not exist"), (".", "is a folder, expected a file")):
        with pytest.raises(CannotRun, match=words):
            require_regular(tmp_path / name)
    (tmp_path / "file").touch()
    require_regular(tmp_path / "file")


def test_targets_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    for name, kind, words in (
        ("absent/x", CannotRun, "there is no folder"),
        ("file/x", CannotRun, "not a directory"),
        (".", UsageError, "is a folder, expected a file to write"),
    ):
        with pytest.raises(kind, match=words):
            require_writable(tmp_path / name)
    require_writable(tmp_path / "new")
    require_writable(tmp_path / "file")
    with pytest.raises(CannotRun, match="file: file exists; no file can be written there"):
        require_writable_folder(tmp_path / "file")
    require_writable_folder(tmp_path / "deep" / "er")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["deep", "er", "file"]


@as_root
def test_a_closed_folder_is_known_before_the_work(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from mlactl import regular_files; from mlactl.errors import CannotRun\n"
        "os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))\n"
        "for check, name in ((regular_files.require_writable, 'x'), (regular_files.require_writable_folder, 'deep')):\n"
        "    try: check(Path(sys.argv[1]) / name)\n"
        "    except CannotRun as error: print(error.message.replace(sys.argv[1], ''))"
    )
    for place in (tmp_path, *tmp_path.parents[:2]):
        place.chmod(0o755)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), str(NOBODY)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["/x cannot be written: permission denied in ", "/deep: permission denied; no file can be written there"]
