"""The standard streams of a process that were closed before it began, or that stop taking what is written."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, TextIO

from mlactl.errors import CannotRun


def open_missing() -> None:
    """Gives a process that was started with closed streams (`>&-`) ones on the null device.

    Python leaves them None, and the first file opened afterwards would take their descriptor and whatever is written to it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))  # noqa: SIM115  open until the process ends


def discard(stream: TextIO) -> None:
    """Lets what is still buffered go nowhere: flushed at exit it would fail once more, with an exit code of Python's own."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class GuardedStdout:
    """stdout whose failures say whose they are: CannotRun for a full disk or a lost device, BrokenPipeError as ever."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.failed = stream, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """As the stream's own."""
        try:
            return self.stream.write(text)
        except OSError as error:
            raise self._fault(error) from error

    def flush(self) -> None:
        """As the stream's own."""
        try:
            self.stream.flush()
        except OSError as error:
            raise self._fault(error) from error

    def _fault(self, error: OSError) -> Exception:
        if isinstance(error, BrokenPipeError):
            return error
        self.failed = True
        return CannotRun(f"cannot write stdout: {(error.strerror or str(error)).lower()}", hint="df -h, where stdout goes to a file")
