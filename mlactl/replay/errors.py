"""Errors of captures, replay and diff."""

from mlactl.errors import MlactlError

RECORD_AGAIN = "MLACTL_CAPTURE_DIR=DIR records the call again (docs/replay.md); the folder's other captures are replayed all the same"
"""The next step for a capture that does not hold what it declares."""


class BadCapture(MlactlError):
    """A capture that does not hold what it declares; names both sides. Nothing of it was computed with."""


class NothingCompared(MlactlError):
    """There was nothing to compare: exit 2, so that a run that checked nothing never looks like one that passed."""


class CaptureRefused(MlactlError):
    """A call that cannot be recorded here, and how it can be."""
