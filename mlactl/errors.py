"""Errors of the command line's services; each names what was found, what was expected and the next command."""

from mlactl.kernels.errors import EnvironmentUnfit, MlactlError

__all__ = ["CannotRun", "EnvironmentUnfit", "Interrupted", "MendedElsewhere", "MlactlError", "NotFound", "UsageError"]


class UsageError(MlactlError):
    """What was typed does not make sense: exit 2."""


class CannotRun(MlactlError):
    """The inputs are there but cannot be read or written (permissions, a full disk, a busy lock): exit 2."""


class NotFound(MlactlError):
    """Something asked for by name is not there: exit 1."""

    exit_code = 1


class MendedElsewhere(MlactlError):
    """An error whose next command is typed on another machine: no root of this one belongs into it."""


class Interrupted(MlactlError):
    """Ctrl-C stopped long work half way; the message says what was finished: exit 130."""

    exit_code = 130
