"""One captured attention call: its inputs, what it produced, and where both are on disk."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlactl.errors import CannotRun, MlactlError, UsageError
from mlactl.printable import plain, safe, shell_word
from mlactl.regular_files import read_bytes, require_writable_folder, unreadable
from mlactl.replay import checks, storage
from mlactl.replay.errors import RECORD_AGAIN, BadCapture
from mlactl.replay.header import SCHEMA_VERSION, CallHeader, FileHeader, TensorFact
from mlactl.replay.records import RecordLayout, latent_elements, record_layout

if TYPE_CHECKING:
    import torch

INDEX_LIMIT_BYTES = 64 << 20
ROLES = "inputs are NAME.in.safetensors and outputs NAME.out.safetensors: give the files their own names again"


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


def files(path: Path) -> tuple[Path, ...]:
    """Every file that reading a capture may open, there or not: inputs, outputs and its folder's index."""
    base = stem(path)
    return (*(base.with_name(base.name + suffix) for suffix in (storage.IN_SUFFIX, storage.OUT_SUFFIX)), base.with_name(storage.INDEX))


def find(paths: Iterable[str | Path]) -> tuple[Path, ...]:
    """Inputs files of all captures named or held by the folders named, sorted in each folder; one that is named twice comes once.

    Outputs without their inputs are found as the inputs they should have, so that reading them says what is missing.
    Raises UsageError for a name that is empty and a folder without captures, CannotRun for what is not there or closed.
    """
    found: dict[tuple[str, str], Path] = {}
    for given in paths:
        if not str(given):
            raise UsageError("an empty name was given, expected a capture or a folder of them", hint="mlactl replay examples/captures")
        path = Path(given)
        for item in _inside(path) if _is_folder(path) else (_named(path),):
            found.setdefault((os.path.realpath(item.parent), item.name), item)
    return tuple(found.values())


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def _named(path: Path) -> Path:
    inputs = inputs_path(path)
    try:
        inputs.lstat()
    except FileNotFoundError:
        _require_pair(inputs)
        raise CannotRun(f"{plain(inputs)} does not exist", hint="name a capture, its .in.safetensors file or a folder of them") from None
    except (OSError, ValueError) as error:
        raise unreadable(inputs, error) from error
    return inputs


def _require_pair(inputs: Path) -> None:
    """Raises CannotRun where the outputs are there and the inputs are not."""
    outputs = stem(inputs).with_name(stem(inputs).name + storage.OUT_SUFFIX)
    if os.path.lexists(outputs) and not os.path.lexists(inputs):
        raise CannotRun(
            f"{plain(inputs)} is missing: {plain(outputs.name)} alone is half of a capture",
            hint=f"copy {shell_word(inputs.name)} there too, or record again; ls -l {shell_word(inputs.parent)}",
        )


def _inside(folder: Path) -> list[Path]:
    """Inputs files of a folder and those below it; a folder that cannot be looked into is an error, never skipped."""

    def closed(error: OSError) -> None:
        raise unreadable(Path(error.filename), error)

    found: set[Path] = set()
    for place, folders, files in os.walk(folder, onerror=closed):
        # A folder in a capture's place is one too: reading it says what it is.
        names = [name for name in (*files, *folders) if name.endswith((storage.IN_SUFFIX, storage.OUT_SUFFIX))]
        folders[:] = [name for name in folders if name not in names]
        found |= {inputs_path(Path(place) / name) for name in names}
    if not found:
        raise UsageError(
            f"{plain(folder)} holds no captures (*{storage.IN_SUFFIX})", hint="set MLACTL_CAPTURE_DIR on a serving process, or try examples/captures"
        )
    return sorted(found)


def display_names(paths: Sequence[Path]) -> tuple[str, ...]:
    """What each capture is called in reports: its file's name, with as much of its folder as tells it from others of that name."""
    stems = [stem(path) for path in paths]
    repeated = {name for name, count in Counter(item.name for item in stems).items() if count > 1}
    common = {name: Path(os.path.commonpath([item.parent.absolute() for item in stems if item.name == name])) for name in repeated}
    return tuple(safe(item.absolute().relative_to(common[item.name]) if item.name in repeated else item.name) for item in stems)


def why_no_output(path: Path) -> str:
    """Why a capture holds no output, as far as its folder's index tells."""
    name = stem(path).name
    try:
        lines = read_bytes(path.parent / storage.INDEX, INDEX_LIMIT_BYTES, "index lines").decode(errors="replace").splitlines()
    except MlactlError:
        lines = []
    written = [entry for entry in map(_index_entry, lines) if entry.get("id") == name]
    if not written:
        return "no output was captured: the launch did not come back, or recording stopped first"
    if written[-1].get("status") == "complete":
        return f"no output is here, though {storage.INDEX} says it was captured: {plain(name)}{storage.OUT_SUFFIX} was lost"
    return "no output was captured: it was written as inputs alone"


def _index_entry(line: str) -> dict[str, object]:
    import msgspec

    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read(path: Path) -> Capture:
    """Reads and checks a capture; raises BadCapture naming both sides of the first misfit, or CannotRun."""
    source = inputs_path(path)
    _require_pair(source)
    header, tensors = storage.read_file(source)
    if header.role != "inputs" or header.call is None:
        raise BadCapture(f"{source}: holds {header.role}, expected inputs", hint=ROLES)
    output = lse = None
    result = stem(source).with_name(stem(source).name + storage.OUT_SUFFIX)
    facts = dict(header.tensors)
    if os.path.lexists(result):  # a link to nothing is no call that never came back
        output, lse, outputs = _read_result(result, source, header)
        facts |= outputs
    capture = Capture(stem(source).name, header.call, tensors, facts, output, lse, stem(source), header.versions)
    checks.check(capture, str(source))
    return capture


def _read_result(path: Path, source: Path, inputs: FileHeader) -> tuple[torch.Tensor | None, torch.Tensor | None, dict[str, TensorFact]]:
    header, tensors = storage.read_file(path)
    if header.role != "outputs":
        raise BadCapture(f"{path}: holds {header.role}, expected outputs", hint=ROLES)
    expected = inputs_digest(inputs)
    if header.inputs_sha256 != expected:
        raise BadCapture(
            f"{path}: outputs of inputs {str(header.inputs_sha256)[:16]}…, but {source.name} is {expected[:16]}…",
            hint="files of two captures were mixed: copy both files of one capture again",
        )
    unknown = set(tensors) - {"output", "lse"}
    if unknown:
        raise BadCapture(f"{path}: holds {sorted(unknown)}, expected output and lse", hint=RECORD_AGAIN)
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


def save(capture: Capture, folder: Path, name: str | None = None, *, again: bool = False) -> Path:
    """Writes a capture (inputs, then outputs, then its status) and returns its stem.

    An existing one of that name is refused with UsageError, but for the very same one with `again`. Raises CannotRun
    where the folder cannot be made or written.
    """
    target = folder / (name or capture.name)
    require_writable_folder(target.parent)
    kept = {
        key: value for key, value in capture.facts.items() if key in capture.tensors and storage.tensor_digest(capture.tensors[key]) == value.sha256
    }
    header = inputs_header(capture.call, capture.tensors, kept, capture.versions)
    result = {key: value for key, value in (("output", capture.output), ("lse", capture.lse)) if value is not None}
    written = [target.with_name(target.name + suffix) for suffix in (storage.IN_SUFFIX, storage.OUT_SUFFIX)[: 1 + bool(result)]]
    there = all(path.exists() for path in written)
    try:
        size = storage.write_file(written[0], header, capture.tensors, again=again)
        if result:
            size += storage.write_file(written[1], outputs_header(header, result), result, again=again)
    except FileExistsError:
        raise UsageError(
            f"{plain(target)} exists already{' and holds something else' if again else ''}", hint="name another folder, or remove it first"
        ) from None
    if not there:
        storage.append_status(target.parent, {"id": target.name, "status": "complete" if result else "inputs", "bytes": size})
    return target
