"""The command tree: help, version, completion, and what an exception becomes on the way out."""

import errno
import os
import pty
import signal
import subprocess
import sys
import textwrap

import pytest

HEAVY = ("torch", "cutlass", "numpy", "tvm_ffi")

# Runs a command line in this interpreter and reports what it imported.
IMPORTS = """
import sys
from mlactl.cli.app import main
try:
    code = main(sys.argv[1:])
except SystemExit as error:
    code = error.code
sys.stderr.write(f"\\nimported: {' '.join(sorted({name.partition('.')[0] for name in sys.modules}))}\\n")
sys.exit(code)
"""


def imported(cli, *arguments, env=None):
    cli.launch = (sys.executable, "-c", IMPORTS)
    done = cli(*arguments, env=env)
    return done, set(done.stderr.rpartition("imported: ")[2].split())


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        ("cache", "--help"),
        ("cache", "ls"),
        ("cache", "ls", "--json"),
        ("cache", "ls", "--all-roots"),
        ("cache", "stats"),
        ("cache", "dir"),
        ("cache", "prune", "--dry-run"),
        ("cache", "verify"),
        ("profile", "ls"),
        ("profile", "show", "ci-small"),
        ("profile", "check", "ci-small"),
        ("warmup", "--help"),
        ("warmup", "--profile", "ci-small", "--arch", "sm_120a", "--check"),
        ("warmup", "--profile", "ci-small", "--arch", "sm_120a", "--dry-run"),
        ("verify-scales", "--help"),
        ("doctor", "--no-gpu", "--profile", "ci-small"),
    ],
    ids=" ".join,
)
def test_light_commands_import_nothing_heavy(cli, arguments):
    """A listing that imports torch takes seconds, and fails on a node whose driver torch does not like."""
    done, modules = imported(cli, *arguments)
    assert done.code in (0, 1), done.stderr
    assert "mlactl" in modules
    assert modules.isdisjoint(HEAVY)


def test_help_draws_nothing_with_rich_and_imports_no_command(cli):
    done, modules = imported(cli, "--help")
    assert "rich" not in modules
    assert "msgspec" not in modules
    assert done.code == 0


def test_json_is_written_without_rich(cli):
    _, modules = imported(cli, "profile", "ls", "--json")
    assert "rich" not in modules


def test_help_lists_every_command_with_what_it_does(cli):
    from mlactl.cli.app import ENTRIES

    done = cli("--help")
    assert done.code == 0
    assert done.stderr == ""
    for entry in ENTRIES:
        shown = f"  {entry.name} " in done.stdout
        assert shown is not entry.hidden
        assert entry.hidden or entry.summary in " ".join(done.stdout.split())


def test_every_listed_command_can_be_asked_for_help(cli):
    from mlactl.cli.app import ENTRIES

    assert [entry.name for entry in ENTRIES] == [
        "warmup",
        "cache",
        "profile",
        "verify-scales",
        "scales",
        "replay",
        "diff",
        "dcp-ranks",
        "bench",
        "doctor",
    ]
    for entry in ENTRIES:
        done = cli(entry.name, "--help")
        assert done.code == 0, done.stderr
        assert done.stdout.startswith(f"Usage: mlactl {entry.name} ")


def test_version(cli):
    from importlib.metadata import version

    done = cli("--version")
    assert (done.code, done.stdout) == (0, f"mlactl {version('mlactl')}\n")


def test_without_a_command_help_goes_to_stderr_and_the_exit_code_is_2(cli):
    done = cli()
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith("Usage: mlactl ")


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (("warmpu",), "error: no such command 'warmpu'. Did you mean 'warmup'?", "hint: mlactl --help"),
        (("--colour",), "error: no such option: --colour", "hint: mlactl --help"),
        (("profile", "shwo"), "error: no such command 'shwo'. Did you mean 'show'?", "hint: mlactl profile --help"),
        (("warmup",), "error: missing option '--profile'", "hint: mlactl warmup --help"),
        (("profile", "ls", "--json", "-q"), "error: two output modes were asked for: json and quiet", "hint: keep one of --output, --json and -q"),
        (
            ("warmup", "--profile", "ci-small", "--arch", "sm_100a"),
            "error: --arch sm_100a is not supported, objects are made for sm_120a, sm_121a, sm_90a",
            "hint: --arch sm_120a or --arch sm_121a or --arch sm_90a",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_usage_errors_say_what_was_wrong_and_where_help_is(cli, arguments, error, hint):
    done = cli(*arguments)
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [error, hint]


# Replaces what `profile ls` calls, to see what main makes of the exception.
RAISING = """
import sys
import mlactl.cli.profile as profile
from mlactl.errors import EnvironmentUnfit, Interrupted, NotFound
def failing():
    {statement}
profile.found = failing
from mlactl.cli.app import main
sys.exit(main(["profile", "ls"]))
"""


def raising(cli, statement, env=None):
    cli.launch = (sys.executable, "-c", RAISING.format(statement=statement))
    return cli(env=env)


@pytest.mark.parametrize(
    ("statement", "code", "stderr"),
    [
        ("raise NotFound('no such thing', hint='mlactl cache ls')", 1, "error: no such thing\nhint: mlactl cache ls\n"),
        ("raise EnvironmentUnfit('no linker')", 3, "error: no linker\n"),
        ("raise Interrupted('interrupted: 3 of 5 done', hint='again')", 130, "interrupted: 3 of 5 done\nhint: again\n"),
        ("raise KeyboardInterrupt", 130, "interrupted\n"),
        (
            "raise ValueError('two\\nlines')",
            2,
            "error: internal error: ValueError: two lines\nhint: set MLACTL_DEBUG=1 and run it again to see the traceback\n",
        ),
    ],
)
def test_exceptions_become_exit_codes_and_two_lines_at_most(cli, statement, code, stderr):
    done = raising(cli, statement)
    assert (done.code, done.stdout, done.stderr) == (code, "", stderr)


def test_the_traceback_is_there_when_asked_for(cli):
    done = raising(cli, "raise ValueError('inner')", env={"MLACTL_DEBUG": "1"})
    assert done.code == 2
    assert "Traceback (most recent call last)" in done.stderr
    assert "line 6, in failing" in done.stderr
    assert done.stderr.endswith("error: internal error: ValueError: inner\n")


def test_a_reader_that_goes_away_is_no_error_message(cli):
    """`mlactl cache ls | head -1` printed a BrokenPipeError and a second one while the interpreter shut down."""
    read, write = os.pipe()
    os.close(read)
    done = cli("profile", "ls", "--json", stdout=write)
    os.close(write)
    assert (done.code, done.stderr) == (141, "")


def test_a_path_that_is_not_utf_8_and_full_of_escapes_in_every_mode(cli, tmp_path):
    """Such a name crashed JSON output, and in the other modes its escape sequences reached the terminal."""
    path = os.fsencode(tmp_path) + b"/x\x1b[31m\xff.toml"
    with open(path, "w") as file:
        file.write("nothing")
    done = cli.every_mode("profile", "check", os.fsdecode(path), code=1)
    assert done["json"].json["profiles"][0]["path"] == f"{tmp_path}/x\x1b[31m\\udcff.toml"
    assert done["human"].stdout.startswith(f"{tmp_path}/x\\x1b[31m\\udcff.toml: ")
    assert done["quiet"].lines == [f"{tmp_path}/x\\x1b[31m\\udcff.toml"]
    wrong = cli("profile", "\x1b[31m")
    assert (wrong.code, "\x1b" in wrong.stderr) == (2, False)


def shell(cli, line):
    """Runs `line` with "$@" standing for mlactl, as only a shell can close streams."""
    return subprocess.run(["bash", "-c", line, "bash", *cli.launch], capture_output=True, text=True, env=cli.env, check=False)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ('"$@" profile ls >&-', 0),
        ('"$@" profile ls --json >&-', 0),
        ('"$@" --version >&-', 0),
        ('"$@" profile ls 2>&-', 0),
        ('"$@" --nonsense 2>&-', 2),
        ('"$@" profile show nosuch <&- >&- 2>&-', 2),
    ],
)
def test_closed_streams_change_no_exit_code(cli, line, code):
    """A job started with `>&-` got a traceback over None and exit code 1, which means findings."""
    done = shell(cli, line)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    if line.endswith("ls 2>&-"):
        assert "ci-small" in done.stdout


@pytest.mark.parametrize("arguments", [("profile", "ls", "--json"), ("profile", "ls"), ("profile", "ls", "-q"), ("--help",), ("--version",)])
def test_a_full_disk_behind_stdout_is_an_ordinary_error(cli, arguments):
    """Python reported the lost output after the program had ended, with exit code 120, or it was called an internal error."""
    with open("/dev/full", "wb") as full:
        done = cli(*arguments, stdout=full)
    assert done.code == 2
    said = [line for line in done.stderr.splitlines() if line.startswith(("error", "internal", "Exception"))]
    assert said == ["error: cannot write stdout: no space left on device"]


def test_a_full_disk_behind_stderr_is_no_traceback(cli):
    """The error about the error had a traceback and exit code 120."""
    with open("/dev/full", "wb") as full:
        process = cli.start("profile", "show", "nosuch", stderr=full)
    assert process.communicate(timeout=300) == ("", None)
    assert process.returncode == 2


def test_ctrl_c_before_anything_started(cli):
    cli.launch = (
        sys.executable,
        "-c",
        textwrap.dedent("""
            import os, signal, sys
            import mlactl.cli.profile as profile
            profile.found = lambda: os.kill(os.getpid(), signal.SIGINT)
            from mlactl.cli.app import main
            sys.exit(main(["profile", "ls"]))
        """),
    )
    done = cli()
    assert (done.code, done.stdout, done.stderr) == (130, "", "interrupted\n")


def complete(cli, *words):
    line = " ".join(["mlactl", *words])
    done = cli(env={"_MLACTL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words))})
    assert done.code == 0, done.stderr
    return done.lines


def test_completion_of_commands_profiles_and_arches(cli):
    own = cli.home / ".config" / "mlactl" / "profiles"
    own.mkdir(parents=True)
    (own / "mine.toml").write_text("")
    assert complete(cli, "war") == ["warmup"]
    assert complete(cli, "profile", "s") == ["show"]
    assert complete(cli, "profile", "show", "kimi-k3-tp8") == ["kimi-k3-tp8-dcp8", "kimi-k3-tp8-dcp8-bf16"]
    assert complete(cli, "warmup", "--profile", "m") == ["mine"]
    assert complete(cli, "warmup", "--profile", "mine", "--arch", "sm_12") == ["sm_120a", "sm_121a"]


def test_completion_script_can_be_shown(cli):
    done = cli("--show-completion", "bash", env={"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"})
    assert done.code == 0
    assert "_MLACTL_COMPLETE=complete_bash" in done.stdout


def on_a_terminal(cli, *arguments, env=None):
    """stdout and stderr of the command on a pseudo-terminal, as one text."""
    parent, child = pty.openpty()
    with cli.start(*arguments, stdout=child, stderr=child, env={"TERM": "xterm-256color", "COLUMNS": "120", **(env or {})}) as process:
        os.close(child)
        chunks = []
        while True:
            try:
                chunk = os.read(parent, 65536)
            except OSError as error:  # the terminal's other end is closed
                if error.errno == errno.EIO:
                    break
                raise
            if not chunk:
                break
            chunks.append(chunk)
    os.close(parent)
    assert process.returncode == 0
    return b"".join(chunks).decode()


def test_colours_on_a_terminal_and_none_with_no_color(cli):
    assert "\x1b[" in on_a_terminal(cli, "profile", "ls")
    assert "\x1b" not in on_a_terminal(cli, "profile", "ls", env={"NO_COLOR": "1"})


def test_sigint_while_the_interpreter_starts_leaves_no_partial_output(cli):
    process = cli.start("profile", "ls", "--json")
    process.send_signal(signal.SIGINT)
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode in (0, 1, 130, -signal.SIGINT)
    assert stdout == "" or stdout.endswith("}\n")


def test_the_installed_script_is_this_program():
    from pathlib import Path

    script = Path(sys.executable).parent / "mlactl"
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[0]) == (0, "mlactl")


def test_ctrl_c_while_modules_are_imported_is_exit_130(tmp_path):
    """It printed a traceback: nobody had taken over yet."""
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from mlactl.cli.start import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", script, "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
