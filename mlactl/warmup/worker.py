"""One compile worker: a process of its own that reads tasks and answers results, a JSON line each.

Started by `mlactl.warmup.pool` as `python -m mlactl.warmup.worker`. The compiler is imported once, with the first task.
The environment is the user's, unchanged: the target arch is a compile option and not a variable. Whatever the compiler
prints to stdout goes to stderr, which the pool keeps for the case that the process dies.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, TextIO

from mlactl.errors import MlactlError
from mlactl.kernels.spec import CompileSpec

Answer = dict[str, Any]
Compile = Callable[[CompileSpec, str], Answer]


def main() -> int:
    """Serves tasks until stdin ends: the parent closed it, or is gone."""
    # Ctrl-C on a terminal reaches the pool, which decides; SIGTERM unwinds, so that a publish removes its temporary.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    serve(sys.stdin, answers, _compiler(settings["cache_dir"], settings["shared"]))
    return 0


def _compiler(cache_dir: str | None, shared: bool) -> Compile:
    from mlactl.cache.publish import compile_and_publish
    from mlactl.cache.store import Store

    store = Store.open(cache_dir)

    def compile_one(spec: CompileSpec, arch: str) -> Answer:
        result = compile_and_publish(store, spec, arch, shared=shared)
        return {"status": "compiled" if result.compiled else "present", "key": result.entry.key, "seconds": result.seconds}

    return compile_one


def serve(tasks: TextIO, answers: TextIO, compile_one: Compile) -> None:
    """Answers every task, in order; an exception becomes an answer that says what went wrong."""
    for line in tasks:
        task = json.loads(line)
        spec = CompileSpec.of(task["spec"]["kernel_id"], task["spec"]["version"], task["spec"]["facts"])
        answers.write(json.dumps(_answer(compile_one, spec, task["arch"])) + "\n")
        answers.flush()


def _answer(compile_one: Compile, spec: CompileSpec, arch: str) -> Answer:
    try:
        return compile_one(spec, arch)
    except MlactlError as error:
        return {"status": "failed", "message": error.message, "hint": error.hint, "exit_code": error.exit_code}
    except Exception as error:
        if os.environ.get("MLACTL_DEBUG") == "1":
            traceback.print_exc()
        return {"status": "failed", "message": f"{spec.label()} for {arch}: {type(error).__name__}: {error}", "hint": None, "exit_code": 1}


if __name__ == "__main__":
    sys.exit(main())
