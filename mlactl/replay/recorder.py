"""Records calls of the kernels' `run` into a folder.

    with mlactl.capture("captures") as recorder:
        binding.run()

or MLACTL_CAPTURE_DIR on a serving process. Inside CUDA-graph capture nothing can be recorded, because the tensors hold no
values of a call yet; calls that a graph replays are recorded from its own buffers after the replay:

    graph.replay()
    recorder.snapshot(binding)
"""

from __future__ import annotations

import fnmatch
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlactl.errors import CannotRun, UsageError
from mlactl.kernels import runtime
from mlactl.replay import storage
from mlactl.replay.capture import inputs_header, outputs_header
from mlactl.replay.errors import CaptureRefused
from mlactl.replay.header import FileHeader, Parallel
from mlactl.replay.trim import Described, describe

if TYPE_CHECKING:
    import torch

DIRECTORY = "MLACTL_CAPTURE_DIR"
MAX_COUNT, MAX_BYTES = 100, 8 << 30


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop: after `max_count` calls or before `max_bytes` of files; and which calls count.

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
    """Implements the kernels' CallRecorder over one folder. A folder that cannot be written stops recording with a warning, never a launch."""

    def __init__(
        self, folder: Path, *, limits: Limits | None = None, profile: str | None = None, parallel: Parallel | None = None, layers: int | None = None
    ) -> None:
        self.folder = folder
        self.limits = limits or Limits()
        self.profile = profile
        self.parallel = parallel or Parallel()
        self.layers = layers
        self.calls = 0
        self.count = 0
        self.written_bytes = 0
        self.failed: str | None = None
        self._versions = _versions()
        folder.mkdir(parents=True, exist_ok=True)

    def before(self, call: Any) -> _Token | None:
        """Writes the inputs of a call that is about to be launched; None where it is not to be recorded.

        Raises CaptureRefused inside CUDA-graph capture.
        """
        import torch

        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise CaptureRefused(
                "a call cannot be recorded while a CUDA graph is being captured: its tensors hold no call yet",
                hint="capture the graph outside mlactl.capture, then recorder.snapshot(binding) after a replay",
            )
        number, self.calls = self.calls, self.calls + 1
        if self.failed is not None or self.count >= self.limits.max_count:
            return None
        # A model calls its layers in order, one launch each; only then does the number of a call tell its layer.
        described = describe(call, self.profile, self.parallel, None if self.layers is None else number % self.layers)
        if not self.limits.wants(f"{described.call.kernel_id}:{described.call.mode}"):
            return None
        if self.written_bytes + described.total_bytes > self.limits.max_bytes:
            self._stop(f"{self.limits.max_bytes:,} bytes would be passed")
            return None
        try:
            return self._write_inputs(described)
        except (CannotRun, OSError) as error:
            self._stop(error.message if isinstance(error, CannotRun) else str(error))
            return None

    def after(self, token: object, output: torch.Tensor, lse: torch.Tensor) -> None:
        """Writes what the call produced, then the capture's line in the index."""
        if not isinstance(token, _Token):
            return
        # Rows past the last request's are scratch of whoever allocated the tensors.
        result = {"output": output[: token.rows], "lse": lse[: token.rows]}
        originals = {"output": output, "lse": lse}
        facts = {name: storage.fact(tensor.detach().cpu().contiguous(), originals[name]) for name, tensor in result.items()}
        try:
            size = storage.write_file(self.folder / (token.name + storage.OUT_SUFFIX), outputs_header(token.header, result, facts), result)
            storage.append_status(self.folder, {"id": token.name, "status": "complete", "bytes": token.size + size})
            self.written_bytes += size
        except (CannotRun, OSError) as error:
            self._stop(error.message if isinstance(error, CannotRun) else str(error))

    def snapshot(self, call: Any) -> None:
        """Records a call that already ran, from the tensors it is bound to: after a CUDA-graph replay, which launches without asking anyone.

        The kernels never write their inputs, so these still hold what the replay read.
        """
        self.after(self.before(call), call.tensors.output, call.tensors.lse)

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
        self.failed = why
        warnings.warn(f"recording into {self.folder} stopped: {why}", RuntimeWarning, stacklevel=3)


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
    limits = Limits(max_count, max_bytes, tuple(include), tuple(exclude))
    made = Recorder(Path(folder), limits=limits, profile=profile, parallel=parallel, layers=layers)
    previous = runtime.record_with(made)
    try:
        yield made
    finally:
        runtime.record_with(previous)


def from_environment(environ: Mapping[str, str] = os.environ) -> Recorder | None:
    """The recorder that MLACTL_CAPTURE_DIR asks for, None where it is not set.

    MLACTL_CAPTURE_MAX_COUNT, _MAX_BYTES, _LAYERS, _INCLUDE and _EXCLUDE (patterns separated by commas), _PROFILE, and _PARALLEL
    (`tp=RANK/WORLD,dcp=RANK/WORLD,interleave=N`) refine it. Raises UsageError for a value that does not parse.
    """
    folder = environ.get(DIRECTORY)
    if not folder:
        return None
    limits = Limits(
        _whole(environ, "MLACTL_CAPTURE_MAX_COUNT", MAX_COUNT),
        _whole(environ, "MLACTL_CAPTURE_MAX_BYTES", MAX_BYTES),
        _patterns(environ, "MLACTL_CAPTURE_INCLUDE"),
        _patterns(environ, "MLACTL_CAPTURE_EXCLUDE"),
    )
    return Recorder(
        Path(folder),
        limits=limits,
        profile=environ.get("MLACTL_CAPTURE_PROFILE"),
        parallel=_parallel(environ.get("MLACTL_CAPTURE_PARALLEL", "")),
        layers=_whole(environ, "MLACTL_CAPTURE_LAYERS", 0) or None,
    )


def _whole(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, str(default))
    if not text.isdigit():
        raise UsageError(f"{name}={text} is not a whole number")
    return int(text)


def _patterns(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in environ.get(name, "").split(",") if part.strip())


def _parallel(text: str) -> Parallel:
    fields: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        numbers = value.split("/")
        if key in ("tp", "dcp") and len(numbers) == 2 and all(number.isdigit() for number in numbers):
            fields |= {f"{key}_rank": int(numbers[0]), f"{key}_world": int(numbers[1])}
        elif key == "interleave" and value.isdigit():
            fields["interleave"] = int(value)
        else:
            raise UsageError(f"MLACTL_CAPTURE_PARALLEL={text}: {part} is not understood", hint="tp=0/8,dcp=3/8,interleave=1")
    return Parallel(**fields)
