"""The command line as tests call it: in a process of its own, or in this one."""

import pytest
from command_line import Cli, Done


@pytest.fixture
def cli(tmp_path) -> Cli:
    home = tmp_path / "home"
    home.mkdir()
    return Cli(home)


@pytest.fixture
def inside(capsys, monkeypatch, tmp_path):
    """`inside("diff", a, b)` runs a command in this process: for commands that take seconds to start, where a process of their own
    shows nothing more."""
    from mlactl.cli.app import main

    monkeypatch.setenv("MLACTL_CACHE_DIR", str(tmp_path / "cache"))

    def run(*arguments) -> Done:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        found = capsys.readouterr()
        return Done(code, found.out, found.err)

    return run
