"""Compile workers: processes that are handed one missing object at a time, and what becomes of each.

Processes of our own and not an executor's: when one is killed, by the kernel's OOM killer for one, it is known which
object it was at, that object alone fails, and a new worker takes the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

from mlactl.cache.store import Hit, Store
from mlactl.errors import EnvironmentUnfit
from mlactl.warmup.plan import Item

WORKER_COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "mlactl.warmup.worker")
"""-P: a file named like one of our modules in the working directory must not be imported instead."""

STOP_TIMEOUT_S = 10.0
"""How long an interrupted worker may take to unwind (the compiler does not look at signals) before it is killed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one object: `compiled`, `present` (another process made it meanwhile) or `failed` with a message.

    `exit_code` is the failure's own: 1 for a compile that failed, 2 when the cache could not be written.
    """

    item: Item
    status: str
    key: str | None
    seconds: float
    message: str | None
    hint: str | None
    exit_code: int


@dataclass(frozen=True, slots=True)
class Result:
    """Outcomes in the order they were finished; `interrupted` when Ctrl-C left `unfinished` objects."""

    outcomes: tuple[Outcome, ...]
    unfinished: tuple[Item, ...]
    interrupted: bool

    def of(self, status: str) -> tuple[Outcome, ...]:
        """The outcomes with that status."""
        return tuple(outcome for outcome in self.outcomes if outcome.status == status)


def default_jobs(missing: int) -> int:
    """One worker a core this process may use, and no more than there is work for."""
    return max(1, min(len(os.sched_getaffinity(0)), missing))


def compile_missing(
    items: Sequence[Item],
    *,
    jobs: int,
    cache_dir: str | None,
    shared: bool,
    on_start: Callable[[Item], None] = lambda _: None,
    on_outcome: Callable[[Outcome], None] = lambda _: None,
) -> Result:
    """Compiles and publishes `items` in at most `jobs` workers; a failure keeps the others.

    Raises EnvironmentUnfit when this machine cannot compile at all: no compiler, no linker, or one of another flavour;
    and CannotRun, before any worker is started, when the root cannot be written.
    Ctrl-C stops the workers and comes back as `interrupted`, with what was finished.
    """
    _require_compiler()
    _require_writable(cache_dir)
    run = _Run(deque(items), {"cache_dir": cache_dir, "shared": shared}, on_start, on_outcome)
    interrupted = False
    try:
        run.start(min(jobs, len(items)))
        run.loop()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        run.stop()
    done = {outcome.item for outcome in run.outcomes}
    return Result(tuple(run.outcomes), tuple(item for item in items if item not in done), interrupted)


def _require_compiler() -> None:
    """Asks here, in milliseconds, what every worker would otherwise find out after its imports."""
    from mlactl.cache import publish, toolchain

    if toolchain.current() is None:
        raise EnvironmentUnfit(f"no compiler here: {toolchain.absence()}", hint="pip install 'nvidia-cutlass-dsl[cu13]==4.8.1'")
    publish.find_linker()


def _require_writable(cache_dir: str | None) -> None:
    from mlactl.cache import publish

    publish.require_writable(Store.open(cache_dir))


class _Worker:
    """A worker process, the object it is at and what it printed."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the worker
        self.item: Item | None = None
        self.process = subprocess.Popen(
            WORKER_COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            process_group=0,  # Ctrl-C on a terminal goes to the whole foreground group: workers are stopped by us instead
        )
        self._send(settings)

    def give(self, item: Item) -> None:
        self.item = item
        self._send({"spec": item.spec.as_json(), "arch": item.arch})

    def _send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died: reading its answer says so
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The next answer; when the process is gone, a failure that says how it ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line.endswith(b"\n"):
            found: dict[str, Any] = json.loads(line)
            return found
        return {"status": "failed", "message": f"{_label(self.item)}: {self._death()}", "hint": None, "exit_code": 1, "died": True}

    def _death(self) -> str:
        code = self.process.wait()
        how = f"ended with exit code {code}"
        if code < 0:
            name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
            how = f"was killed by {name}" + (", as the kernel does when memory runs out: try fewer --jobs" if code == -signal.SIGKILL else "")
        self.log.seek(0)
        printed = self.log.read().decode(errors="replace").strip().splitlines()
        return f"the compile worker {how}" + (f"; it last said: {printed[-1]}" if printed else "")


class _Run:
    """The state of one `compile_missing`."""

    def __init__(self, todo: deque[Item], settings: dict[str, Any], on_start: Callable[[Item], None], on_outcome: Callable[[Outcome], None]) -> None:
        self.todo, self.settings, self.on_start, self.on_outcome = todo, settings, on_start, on_outcome
        self.outcomes: list[Outcome] = []
        self.workers: list[_Worker] = []
        self.selector = selectors.DefaultSelector()

    def start(self, count: int) -> None:
        for _ in range(count):
            self._add_worker()

    def _add_worker(self) -> None:
        worker = _Worker(self.settings)
        self.workers.append(worker)
        self.selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]
        self._next(worker)

    def _next(self, worker: _Worker) -> None:
        if self.todo:
            item = self.todo.popleft()
            self.on_start(item)
            worker.give(item)
        else:
            worker.item = None
            assert worker.process.stdin is not None
            worker.process.stdin.close()

    def loop(self) -> None:
        while any(worker.item is not None for worker in self.workers):
            for ready, _ in self.selector.select():
                self._take(ready.data)

    def _take(self, worker: _Worker) -> None:
        item = worker.item
        answer: dict[str, Any] = worker.answer() if item is not None else {"died": True}
        if answer.get("died"):
            self.selector.unregister(worker.process.stdout)  # type: ignore[arg-type]
            self._retire(worker)
        if item is None:
            return
        if answer["status"] == "failed" and answer["exit_code"] == EnvironmentUnfit.exit_code:
            raise EnvironmentUnfit(answer["message"], hint=answer["hint"])
        self._record(item, answer)
        if not answer.get("died"):
            self._next(worker)
        elif self.todo:
            self._add_worker()

    def _record(self, item: Item, answer: dict[str, Any]) -> None:
        outcome = Outcome(
            item,
            answer["status"],
            answer.get("key"),
            answer.get("seconds", 0.0),
            answer.get("message"),
            answer.get("hint"),
            answer.get("exit_code", 0),
        )
        self.outcomes.append(outcome)
        self.on_outcome(outcome)

    def _retire(self, worker: _Worker) -> None:
        self.workers.remove(worker)
        _close(worker)

    def stop(self) -> None:
        """Ends every worker; those still at work are asked to unwind, then killed. Ctrl-C meanwhile kills at once."""
        for worker in self.workers:
            _close_stdin(worker)
            if worker.item is not None:
                worker.process.terminate()
        try:
            deadline = time.monotonic() + STOP_TIMEOUT_S
            for worker in self.workers:
                worker.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            for worker in self.workers:
                worker.process.kill()
        finally:
            for worker in self.workers:
                self._take_last(worker)
                _close(worker)
            self.selector.close()

    def _take_last(self, worker: _Worker) -> None:
        """What a stopped worker had finished counts; a failure does not, because stopping it makes the compiler fail."""
        # Ctrl-C may have come between recording an answer and handing out the next object: that one counts once.
        if worker.item is None or worker.item in {outcome.item for outcome in self.outcomes}:
            return
        worker.process.wait()
        answer = worker.answer()
        if answer["status"] == "failed":
            # It may have been stopped between publishing and answering.
            found = Store.open(self.settings["cache_dir"]).lookup(worker.item.spec, worker.item.arch)
            if not isinstance(found, Hit):
                return
            answer = {"status": "compiled", "key": found.entry.key}
        self._record(worker.item, answer)


def _close_stdin(worker: _Worker) -> None:
    if worker.process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            worker.process.stdin.close()


def _close(worker: _Worker) -> None:
    process = worker.process
    _close_stdin(worker)
    if process.stdout is not None:
        process.stdout.close()
    process.wait()
    worker.log.close()


def _label(item: Item | None) -> str:
    return "a worker" if item is None else f"{item.spec.label()} for {item.arch}"
