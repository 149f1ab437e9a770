"""Runs the command line as a person does: a process of its own, a home of its own, every output mode."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

LAUNCH = (sys.executable, "-c", "import sys; from mlactl.cli.app import main; sys.exit(main())")


@dataclass(frozen=True)
class Done:
    """What a finished command left behind."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self):
        return json.loads(self.stdout)

    @property
    def lines(self):
        return self.stdout.splitlines()


class Cli:
    """`cli("cache", "ls", "--json")` runs `mlactl cache ls --json` with nothing of this machine's user in its environment."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.launch = LAUNCH
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLACTL_", "XDG_", "CUTE_DSL_")) and name != "NO_COLOR"}
        self.env = {**kept, "HOME": str(home), "MLACTL_CACHE_DIR": str(home / "cache")}

    @property
    def cache_dir(self) -> Path:
        return Path(self.env["MLACTL_CACHE_DIR"])

    def start(self, *arguments, env=None, **options) -> subprocess.Popen:
        """The running process, its output in pipes."""
        merged = {name: value for name, value in {**self.env, **(env or {})}.items() if value is not None}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **options}
        return subprocess.Popen([*self.launch, *map(str, arguments)], env=merged, text=True, **pipes)

    def __call__(self, *arguments, env=None, timeout=300, **options) -> Done:
        with self.start(*arguments, env=env, **options) as process:
            stdout, stderr = process.communicate(timeout=timeout)
        assert "Traceback" not in stderr or (env or {}).get("MLACTL_DEBUG"), stderr
        return Done(process.returncode, stdout or "", stderr or "")

    def every_mode(self, *arguments, code=0, rows: str | None = None, env=None) -> dict[str, Done]:
        """Runs one command in each output mode and holds each to its contract; returns what each printed.

        The exit code is `code` in all of them. JSON is one document with schema version 1; with `rows`, the name of its
        list, JSONL has those rows a line each. Without colours asked for, nothing has an escape sequence.
        """
        done = {mode: self(*arguments, "--output", mode, env=env) for mode in ("human", "json", "jsonl", "quiet")}
        assert {mode: result.code for mode, result in done.items()} == dict.fromkeys(done, code), done["human"].stderr
        assert all("\x1b" not in result.stdout + result.stderr for result in done.values())
        document = done["json"].json
        assert document["schema_version"] == 1
        lines = [json.loads(line) for line in done["jsonl"].lines]
        assert lines == (document[rows] if rows else [document])
        assert all(line and line == line.strip() for line in done["quiet"].lines)
        assert self(*arguments, "--json", env=env).stdout == done["json"].stdout
        assert self(*arguments, "-q", env=env).stdout == done["quiet"].stdout
        return done
