"""Errors of the kernel layer: each says what was found, what was expected and what to type next."""


class MlactlError(Exception):
    """Base of every error a person is meant to read.

    `message` names what was found and what was expected; `hint` is the next command or step, shown on its own line;
    `exit_code` is what the command line returns (docs/architecture.md has the table).
    """

    exit_code = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class SpecError(MlactlError):
    """A compile spec that the registry does not declare: unknown kernel, version, fact or value."""


class NotBuiltYet(MlactlError):
    """A declared kernel or fact value whose code is not in this release; compiling it is refused, never faked."""

    exit_code = 1


class EnvironmentUnfit(MlactlError):
    """This machine cannot do what was asked: no compiler, no linker, no GPU of that arch, wrong compiler flavour."""

    exit_code = 3


class CompileFailed(MlactlError):
    """The compiler or the export of one kernel failed; nothing was published for it."""

    exit_code = 1


class MissingObject(MlactlError):
    """No usable object for (spec, arch) where compiling is not allowed; names the key and the warmup command."""


class BadObject(MlactlError):
    """An object that does not hold what its manifest says; it was not loaded."""


class PlanError(MlactlError):
    """Capacities that no launch can have; names the capacity, its value and what is allowed."""


class BindError(MlactlError):
    """Tensors or lengths that do not fit the plan; names the argument, the index and both values."""
