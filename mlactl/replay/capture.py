"""One captured attention call: its inputs, what it produced, and where both are on disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlactl.errors import CannotRun, UsageError
from mlactl.replay import checks, storage
from mlactl.replay.errors import BadCapture
from mlactl.replay.header import SCHEMA_VERSION, CallHeader, FileHeader, TensorFact
from mlactl.replay.records import RecordLayout, latent_elements, record_layout

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Capture:
    """A call. Tensors by the names of the kernels' contract, on the CPU:

    dense pages: `q` [T, H, width], `kv_cache` [pages, page_size, width] (only pages the call can touch), `page_table`
    int32 [batch, columns] renumbered to them, `page_ids` int64 [pages] the ids they had, `cache_seqlens` int32 [batch],
    `cu_seqlens_q` int32 [batch + 1], optionally `query_cache_seqlens` int32 [T]. Selected slots: `indices` int32
    [T, topk] renumbered, `lengths` int32 [T] instead of tables. `output` [T, H, latent] and `lse` [T, H] are what the
    call produced, None where it never came back.
    """

    name: str
    call: CallHeader
    tensors: Mapping[str, torch.Tensor]
    facts: Mapping[str, TensorFact] = field(default_factory=dict)
    output: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    path: Path | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def dense(self) -> bool:
        """Whether KV comes from pages through a table, and not from selected slots."""
        return "page_table" in self.tensors

    @property
    def layout(self) -> RecordLayout:
        """The record layout of its KV."""
        return record_layout(self.call.record)

    @property
    def rows(self) -> int:
        """Query rows of the call."""
        return int(self.tensors["q"].shape[0])

    @property
    def heads(self) -> int:
        """Heads the kernel saw."""
        return int(self.tensors["q"].shape[1])

    @property
    def values(self) -> int:
        """Elements of an output row."""
        return latent_elements(self.layout, int(self.tensors["q"].shape[2]))

    @property
    def boundaries(self) -> tuple[int, ...]:
        """First row of each request, and the end; one request a row for selected slots."""
        if self.dense:
            return tuple(int(value) for value in self.tensors["cu_seqlens_q"].tolist())
        return tuple(range(self.rows + 1))

    @property
    def requests(self) -> tuple[int, ...]:
        """The request of each row."""
        ends = self.boundaries
        return tuple(request for request in range(len(ends) - 1) for _ in range(ends[request], ends[request + 1]))

    def with_result(self, output: torch.Tensor | None, lse: torch.Tensor | None) -> Capture:
        """The same call with another result."""
        return replace(self, output=output, lse=lse)


def stem(path: Path) -> Path:
    """`FOLDER/<id>` of either file of a capture."""
    for suffix in (storage.IN_SUFFIX, storage.OUT_SUFFIX):
        if path.name.endswith(suffix):
            return path.with_name(path.name.removesuffix(suffix))
    return path


def inputs_path(path: Path) -> Path:
    """The inputs file that a name on the command line means."""
    return stem(path).with_name(stem(path).name + storage.IN_SUFFIX)


def find(paths: Iterable[str | Path]) -> tuple[Path, ...]:
    """Inputs files of all captures named or held by the folders named, sorted in each folder, without repeats.

    Raises UsageError for a path that is neither a capture nor a folder that holds one.
    """
    found: dict[Path, None] = {}
    for given in paths:
        path = Path(given)
        if path.is_dir():
            inside = sorted(path.rglob(f"*{storage.IN_SUFFIX}"))
            if not inside:
                raise UsageError(
                    f"{path} holds no captures (*{storage.IN_SUFFIX})", hint="set MLACTL_CAPTURE_DIR on a serving process, or try examples/captures"
                )
        elif inputs_path(path).exists():
            inside = [inputs_path(path)]
        else:
            raise CannotRun(f"{inputs_path(path)} does not exist", hint="name a capture, its .in.safetensors file or a folder of them")
        found.update(dict.fromkeys(inside))
    return tuple(found)


def read(path: Path) -> Capture:
    """Reads and checks a capture; raises BadCapture naming both sides of the first misfit, or CannotRun."""
    source = inputs_path(path)
    header, tensors = storage.read_file(source)
    if header.role != "inputs" or header.call is None:
        raise BadCapture(f"{source}: holds {header.role}, expected inputs")
    output = lse = None
    result = stem(source).with_name(stem(source).name + storage.OUT_SUFFIX)
    facts = dict(header.tensors)
    if result.exists():
        output, lse, outputs = _read_result(result, source, header)
        facts |= outputs
    capture = Capture(stem(source).name, header.call, tensors, facts, output, lse, stem(source), header.versions)
    checks.check(capture, str(source))
    return capture


def _read_result(path: Path, source: Path, inputs: FileHeader) -> tuple[torch.Tensor | None, torch.Tensor | None, dict[str, TensorFact]]:
    header, tensors = storage.read_file(path)
    if header.role != "outputs":
        raise BadCapture(f"{path}: holds {header.role}, expected outputs")
    expected = inputs_digest(inputs)
    if header.inputs_sha256 != expected:
        raise BadCapture(
            f"{path}: outputs of inputs {str(header.inputs_sha256)[:16]}…, but {source.name} is {expected[:16]}…",
            hint="files of two captures were mixed",
        )
    unknown = set(tensors) - {"output", "lse"}
    if unknown:
        raise BadCapture(f"{path}: holds {sorted(unknown)}, expected output and lse")
    return tensors.get("output"), tensors.get("lse"), dict(header.tensors)


def inputs_digest(header: FileHeader) -> str:
    """What ties outputs to their inputs: a digest over the inputs' header, which holds the digest of every tensor."""
    import hashlib

    from mlactl.replay.header import dump

    return hashlib.sha256(dump(header).encode()).hexdigest()


def inputs_header(call: CallHeader, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, TensorFact], versions: Mapping[str, str]) -> FileHeader:
    """The header of an inputs file; tensors without a fact are described as they are."""
    described = {name: facts.get(name) or storage.fact(tensor) for name, tensor in tensors.items()}
    return FileHeader(schema_version=SCHEMA_VERSION, role="inputs", tensors=described, versions=dict(versions), call=call)


def outputs_header(inputs: FileHeader, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, TensorFact] | None = None) -> FileHeader:
    """The header of the outputs file of those inputs."""
    described = {name: (facts or {}).get(name) or storage.fact(tensor) for name, tensor in tensors.items()}
    return FileHeader(schema_version=SCHEMA_VERSION, role="outputs", tensors=described, versions=inputs.versions, inputs_sha256=inputs_digest(inputs))


def save(capture: Capture, folder: Path, name: str | None = None) -> Path:
    """Writes a capture (inputs, then outputs, then its status) and returns its stem; an existing one of that name is refused."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / (name or capture.name)
    kept = {
        key: value for key, value in capture.facts.items() if key in capture.tensors and storage.tensor_digest(capture.tensors[key]) == value.sha256
    }
    header = inputs_header(capture.call, capture.tensors, kept, capture.versions)
    result = {key: value for key, value in (("output", capture.output), ("lse", capture.lse)) if value is not None}
    try:
        size = storage.write_file(target.with_name(target.name + storage.IN_SUFFIX), header, capture.tensors)
        if result:
            size += storage.write_file(target.with_name(target.name + storage.OUT_SUFFIX), outputs_header(header, result), result)
    except FileExistsError:
        raise UsageError(f"{target} exists already", hint="name another folder, or remove it first") from None
    storage.append_status(folder, {"id": target.name, "status": "complete" if result else "inputs", "bytes": size})
    return target
