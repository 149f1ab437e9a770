"""Where the installed `mlactl` starts: Ctrl-C while modules are still being imported ends like any other."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Runs the command line; returns its exit code, 130 for Ctrl-C before it got going."""
    try:
        from mlactl.cli.app import main as run

        return run()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one has nothing left to stop
        sys.stderr.write("interrupted\n")
        return 130
