"""Records calls of the kernels' `run` into a folder.

    with mlactl.capture("captures") as recorder:
        binding.run()

or MLACTL_CAPTURE_DIR on a serving process. Recording never stops or changes a launch: whatever goes wrong in here becomes
one warning, and recording is off from then on. Inside CUDA-graph capture nothing can be recorded, because the tensors hold
no values of a call yet; calls that a graph replays are recorded from its own buffers after the replay:

    graph.replay()
    recorder.snapshot(binding)
"""

from __future__ import annotations

import difflib
import fnmatch
import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlactl.errors import MlactlError, UsageError
from mlactl.kernels import runtime
from mlactl.kernels.errors import NotBuiltYet
from mlactl.replay import storage
from mlactl.replay.capture import inputs_header, outputs_header
from mlactl.replay.errors import CaptureRefused
from mlactl.replay.header import FileHeader, Parallel
from mlactl.replay.trim import Described, describe

if TYPE_CHECKING:
    import torch

DIRECTORY = "MLACTL_CAPTURE_DIR"
PREFIX = "MLACTL_CAPTURE_"
VARIABLES = (
    "MLACTL_CAPTURE_DIR",
    "MLACTL_CAPTURE_MAX_COUNT",
    "MLACTL_CAPTURE_MAX_BYTES",
    "MLACTL_CAPTURE_INCLUDE",
    "MLACTL_CAPTURE_EXCLUDE",
    "MLACTL_CAPTURE_PROFILE",
    "MLACTL_CAPTURE_PARALLEL",
    "MLACTL_CAPTURE_LAYERS",
)
HEADERS_BYTES = 16 << 10
"""More than the headers of both files of a capture take."""

MAX_COUNT, MAX_BYTES = 100, 8 << 30
MAX_DIGITS = 18


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop: after `max_count` calls or before `max_bytes` of files, inputs and outputs; and which calls count.

    `include` and `exclude` are patterns over `KERNEL_ID:MODE`, such as `attention.dense_mla.*:verify`.
    """

    max_count: int = MAX_COUNT
    max_bytes: int = MAX_BYTES
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def wants(self, label: str) -> bool:
        """Whether a call of that label is to be recorded."""
        wanted = not self.include or any(fnmatch.fnmatchcase(label, pattern) for pattern in self.include)
        return wanted and not any(fnmatch.fnmatchcase(label, pattern) for pattern in self.exclude)


@dataclass(frozen=True, slots=True)
class _Token:
    """A call whose inputs are on disk."""

    name: str
    header: FileHeader
    size: int
    rows: int


class Recorder:
    """Implements the kernels' CallRecorder over one folder; what it cannot do, or write, is one warning and never a launch's error.

    Raises UsageError for limits, layers or a rank that no process can have: of who opens it, ahead of any launch.
    """

    def __init__(
        self, folder: Path, *, limits: Limits | None = None, profile: str | None = None, parallel: Parallel | None = None, layers: int | None = None
    ) -> None:
        self.folder = folder
        self.limits = limits or Limits()
        _require_sense(self.limits, parallel or Parallel(), layers)
        self.profile = profile
        self.parallel = parallel or Parallel()
        self.layers = layers
        self.calls = 0
        self.count = 0
        self.written_bytes = 0
        self.failed: str | None = None
        self._told: set[str] = set()
        self._versions = _versions()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            self._stop(str(error))

    def before(self, call: Any) -> _Token | None:
        """Writes the inputs of a call that is about to be launched; None where it is not to be recorded."""
        try:
            return self._before(call)
        except CaptureRefused as error:
            self._tell("graph", f"{error.message}; {error.hint}")
        except NotBuiltYet as error:
            self._tell(error.message, error.message)
        except Exception as error:
            self._stop(_reason(error))
        return None

    def after(self, token: object, output: torch.Tensor, lse: torch.Tensor) -> None:
        """Writes what the call produced, then the capture's line in the index."""
        if not isinstance(token, _Token):
            return
        try:
            self._write_outputs(token, output, lse)
        except Exception as error:
            self._stop(_reason(error))

    def snapshot(self, call: Any) -> None:
        """Records a call that already ran, from the tensors it is bound to: after a CUDA-graph replay, which launches without asking anyone.

        The kernels never write their inputs, so these still hold what the replay read. Raises CaptureRefused inside
        CUDA-graph capture: nothing is launched here that it could stop.
        """
        _refuse_graph()
        self.after(self.before(call), call.tensors.output, call.tensors.lse)

    def _before(self, call: Any) -> _Token | None:
        number, self.calls = self.calls, self.calls + 1
        if self.failed is not None or self.count >= self.limits.max_count:
            return None
        _refuse_graph()
        # A model calls its layers in order, one launch each; only then does the number of a call tell its layer.
        described = describe(call, self.profile, self.parallel, None if self.layers is None else number % self.layers)
        if not self.limits.wants(f"{described.call.kernel_id}:{described.call.mode}"):
            return None
        if self.written_bytes + described.total_bytes + described.result_bytes + HEADERS_BYTES > self.limits.max_bytes:
            self._stop(f"{self.limits.max_bytes:,} bytes would be passed")
            return None
        return self._write_inputs(described)

    def _write_outputs(self, token: _Token, output: torch.Tensor, lse: torch.Tensor) -> None:
        # Rows past the last request's are scratch of whoever allocated the tensors.
        result = {"output": output[: token.rows], "lse": lse[: token.rows]}
        originals = {"output": output, "lse": lse}
        facts = {name: storage.fact(tensor.detach().cpu().contiguous(), originals[name]) for name, tensor in result.items()}
        size = storage.write_file(self.folder / (token.name + storage.OUT_SUFFIX), outputs_header(token.header, result, facts), result)
        self.written_bytes += size
        storage.append_status(self.folder, {"id": token.name, "status": "complete", "bytes": token.size + size})

    def _write_inputs(self, described: Described) -> _Token:
        header = inputs_header(described.call, described.tensors, described.facts, self._versions)
        rank = f"-dcp{self.parallel.dcp_rank}" if self.parallel.dcp_world > 1 else ""
        number = self.count
        while True:
            name = f"{number:06d}-{described.call.mode}{rank}"
            try:
                size = storage.write_file(self.folder / (name + storage.IN_SUFFIX), header, described.tensors)
                break
            except FileExistsError:
                number += 1
        self.count += 1
        self.written_bytes += size
        return _Token(name, header, size, int(described.tensors["q"].shape[0]))

    def _stop(self, why: str) -> None:
        if self.failed is None:
            self.failed = why
            _warn(f"recording into {self.folder} stopped: {why}")

    def _tell(self, kind: str, why: str) -> None:
        """Says once why calls of that kind are left out; others are still recorded."""
        if kind not in self._told:
            self._told.add(kind)
            _warn(f"a call was not recorded into {self.folder}: {why}")


def _refuse_graph() -> None:
    import torch

    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise CaptureRefused(
            "a call cannot be recorded while a CUDA graph is being captured: its tensors hold no call yet",
            hint="recorder.snapshot(binding) records it after a replay",
        )


def _reason(error: Exception) -> str:
    if isinstance(error, MlactlError):
        return error.message
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"


def _warn(text: str) -> None:
    """A warning that never becomes an error: under `-W error` it is logged instead, as a launch is waiting."""
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=5)
    except RuntimeWarning:
        logging.getLogger(__name__).warning(text)


def _require_sense(limits: Limits, parallel: Parallel, layers: int | None) -> None:
    wrong = parallel.fault()
    if wrong:
        raise UsageError(
            f"captures of {wrong}", hint="parallel=Parallel(dcp_rank=3, dcp_world=8) or MLACTL_CAPTURE_PARALLEL=tp=0/8,dcp=3/8,interleave=1"
        )
    for name, value in (("max_count", limits.max_count), ("max_bytes", limits.max_bytes), ("layers", layers)):
        if value is not None and type(value) is not int:
            raise UsageError(f"{name} is {value!r}, expected a whole number", hint="a number without quotes, or leave it out")
    if layers is not None and layers < 1:
        raise UsageError(f"captures over {layers} layers: at least 1 is needed", hint="leave layers out where a launch does not tell its layer")
    for name, value in (("max_count", limits.max_count), ("max_bytes", limits.max_bytes)):
        if value < 1:
            raise UsageError(f"{name} is {value}, expected at least 1: nothing would be recorded", hint=f"leave {name} out, or do not record")


def _listed(name: str, patterns: Sequence[str]) -> tuple[str, ...]:
    """Patterns as given in code: a lone string is a sequence too, of one-character patterns such as `*`."""
    if isinstance(patterns, str):
        raise UsageError(f"{name} is {patterns!r}, expected a list of patterns", hint=f"{name}=[{patterns!r}]")
    if not isinstance(patterns, Iterable) or not all(isinstance(pattern, str) for pattern in patterns):
        raise UsageError(f"{name} is {patterns!r}, expected a list of patterns", hint=f'{name}=["attention.dense_mla.*:verify"]')
    return tuple(patterns)


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("mlactl", "torch", "nvidia-cutlass-dsl"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@contextmanager
def capture(
    folder: str | os.PathLike[str],
    *,
    max_count: int = MAX_COUNT,
    max_bytes: int = MAX_BYTES,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    profile: str | None = None,
    parallel: Parallel | None = None,
    layers: int | None = None,
) -> Iterator[Recorder]:
    """Records every call launched inside the block into `folder`; whatever recorded before does so again afterwards.

    `layers`: the block runs a model that launches once for each of that many layers, in order; captures then name their layer.
    """
    limits = Limits(max_count, max_bytes, _listed("include", include), _listed("exclude", exclude))
    made = Recorder(Path(folder), limits=limits, profile=profile, parallel=parallel, layers=layers)
    previous = runtime.record_with(made)
    try:
        yield made
    finally:
        runtime.record_with(previous)


def from_environment(environ: Mapping[str, str] = os.environ) -> Recorder | None:
    """The recorder that MLACTL_CAPTURE_DIR asks for, None where it is not set.

    MLACTL_CAPTURE_MAX_COUNT, _MAX_BYTES, _LAYERS, _INCLUDE and _EXCLUDE (patterns separated by commas), _PROFILE, and _PARALLEL
    (`tp=RANK/WORLD,dcp=RANK/WORLD,interleave=N`) refine it. Raises UsageError for a value that does not parse or that no
    process can have, and for another variable of that prefix: at the start, where it is seen, and not as a recording that
    says something else.
    """
    folder = environ.get(DIRECTORY)
    if not folder:
        return None
    unknown = sorted(name for name in environ if name.startswith(PREFIX) and name not in VARIABLES)
    if unknown:
        close = difflib.get_close_matches(unknown[0], VARIABLES, 1)
        raise UsageError(f"{unknown[0]} is no setting of a recording", hint=f"{close[0]}, or unset it" if close else f"unset {unknown[0]}")
    limits = Limits(
        _whole(environ, "MLACTL_CAPTURE_MAX_COUNT", MAX_COUNT, least=1),
        _whole(environ, "MLACTL_CAPTURE_MAX_BYTES", MAX_BYTES, least=1),
        _patterns(environ, "MLACTL_CAPTURE_INCLUDE"),
        _patterns(environ, "MLACTL_CAPTURE_EXCLUDE"),
    )
    return Recorder(
        Path(folder),
        limits=limits,
        profile=environ.get("MLACTL_CAPTURE_PROFILE"),
        parallel=_parallel(environ.get("MLACTL_CAPTURE_PARALLEL", "")),
        layers=_whole(environ, "MLACTL_CAPTURE_LAYERS", 1, least=1) if environ.get("MLACTL_CAPTURE_LAYERS") else None,
    )


def _whole(environ: Mapping[str, str], name: str, default: int, *, least: int) -> int:
    text = environ.get(name, str(default))
    if not _is_whole(text):
        raise UsageError(f"{name}={text} is not a whole number of at most {MAX_DIGITS} digits", hint=f"{name}={default}, or leave it out")
    if int(text) < least:
        raise UsageError(f"{name}={text}: at least {least} is needed", hint=f"{name}={default}, or leave it out")
    return int(text)


def _is_whole(text: str) -> bool:
    # isdigit alone also takes digits of other scripts and superscripts, which int refuses.
    return text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS


def _patterns(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in environ.get(name, "").split(",") if part.strip())


def _parallel(text: str) -> Parallel:
    fields: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        numbers = value.split("/")
        if key in ("tp", "dcp") and len(numbers) == 2 and all(_is_whole(number) for number in numbers):
            fields |= {f"{key}_rank": int(numbers[0]), f"{key}_world": int(numbers[1])}
        elif key == "interleave" and _is_whole(value):
            fields["interleave"] = int(value)
        else:
            raise UsageError(f"MLACTL_CAPTURE_PARALLEL={text}: {part} is not understood", hint="tp=0/8,dcp=3/8,interleave=1")
    made = Parallel(**fields)
    if wrong := made.fault():
        raise UsageError(f"MLACTL_CAPTURE_PARALLEL={text}: {wrong}", hint="tp=0/8,dcp=3/8,interleave=1")
    return made
