"""Progress of long work: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from mlactl.printable import safe
from mlactl.ui.output import Task

if TYPE_CHECKING:
    from rich.console import Console

LINE_INTERVAL_S = 5.0
FIRST_LINE_S = 1.0
"""When work that another program waits for says that it goes on: nothing takes longer in silence."""


@contextmanager
def bar(console: Console, title: str, total: int | None, unit: str) -> Iterator[Task]:
    """A bar with a count, a rate and the current item; it is gone when the work is done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[current]}", style="dim"),
    )
    started = time.monotonic()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=total, rate="", current="")

        def advance(steps: int) -> None:
            progress.advance(task, steps)
            done = progress.tasks[0].completed
            progress.update(task, rate=_rate(done, started, unit))

        yield Task(advance, lambda text: progress.update(task, current=safe(text)))


@contextmanager
def lines(stream: TextIO, title: str, total: int | None, unit: str) -> Iterator[Task]:
    """A line when work starts, then at most one every few seconds, and one with the final count."""
    started = last = time.monotonic()
    done = written = 0
    stream.write(f"{title}: {_count(0, total)} {unit}\n")
    stream.flush()

    def write() -> None:
        nonlocal written
        written = done
        stream.write(f"{title}: {_count(done, total)} {unit}, {_rate(done, started, unit)}\n")
        stream.flush()

    def advance(steps: int) -> None:
        nonlocal done, last
        done += steps
        now = time.monotonic()
        if now - last >= LINE_INTERVAL_S:
            last = now
            write()

    yield Task(advance, lambda _: None)
    if done != written:
        write()


def _count(done: int, total: int | None) -> str:
    return f"{done}/{total}" if total is not None else str(done)


def _rate(done: float, started: float, unit: str) -> str:
    return f"{done / max(time.monotonic() - started, 1e-9):.1f} {unit}/s"


@contextmanager
def steady_lines(stream: TextIO, title: str, total: int | None, unit: str, *, first_after_s: float) -> Iterator[Task]:
    """As `lines` for work whose single steps may take long: a line now and then with the count and what is being done, even between two
    counts. The first line comes after `first_after_s`, so that short work for a program stays silent.

    A thread writes them: not for work that forks this process.
    """
    done, current, spoke = 0, "", False
    stop = threading.Event()

    def write() -> None:
        stream.write(f"{title}: {_count(done, total)} {unit}{f', {current}' if current else ''}\n")
        stream.flush()

    def speak() -> None:
        nonlocal spoke
        wait = first_after_s
        while not stop.wait(wait):
            spoke, wait = True, LINE_INTERVAL_S
            write()

    def advance(steps: int) -> None:
        nonlocal done
        done += steps

    def describe(text: str) -> None:
        nonlocal current
        current = safe(text)

    if not first_after_s:
        spoke, first_after_s = True, LINE_INTERVAL_S
        write()
    speaker = threading.Thread(target=speak, name="progress", daemon=True)
    speaker.start()
    try:
        yield Task(advance, describe)
    finally:
        stop.set()
        speaker.join()
    current = ""
    if spoke:
        write()
