"""Capture files: deterministic safetensors under a temporary name, then a rename.

FOLDER/<id>.in.safetensors    written before the launch
FOLDER/<id>.out.safetensors   written after it
FOLDER/index.jsonl            one line a capture, appended last; the only place that holds a time
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlactl.errors import CannotRun, MlactlError
from mlactl.kernels.spec import canonical_json
from mlactl.printable import safe, shell_word
from mlactl.regular_files import open_regular, require_writable_folder
from mlactl.regular_files import write_file as write_new_file
from mlactl.replay.errors import RECORD_AGAIN, BadCapture
from mlactl.replay.header import METADATA_KEY, FileHeader, TensorFact, dump, parse

if TYPE_CHECKING:
    import torch

IN_SUFFIX = ".in.safetensors"
OUT_SUFFIX = ".out.safetensors"
RESULTS_SUFFIX = ".results.safetensors"
INDEX = "index.jsonl"
NOT_SAVED = "results were not saved"


def tensor_digest(tensor: torch.Tensor) -> str:
    """SHA-256 over the tensor's bytes in row-major order."""
    import torch

    data = tensor.detach().cpu().contiguous()
    return hashlib.sha256(data.flatten().view(torch.uint8).numpy().data).hexdigest()


def fact(stored: torch.Tensor, original: torch.Tensor | None = None) -> TensorFact:
    """Describes a tensor as the call had it (`original`, itself when None) and as it is stored."""
    source = stored if original is None else original
    return TensorFact(
        dtype=str(stored.dtype).removeprefix("torch."),
        shape=tuple(source.shape),
        strides=tuple(source.stride()),
        storage_offset=int(source.storage_offset()),
        stored_shape=tuple(stored.shape),
        sha256=tensor_digest(stored),
    )


def unshared(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors by name, contiguous and on the CPU, each with memory of its own: safetensors refuses views of one another."""
    found: dict[str, torch.Tensor] = {}
    owned: set[int] = set()
    for name, tensor in sorted(tensors.items()):
        made = tensor.detach().cpu().contiguous()
        if made.untyped_storage().data_ptr() in owned:
            made = made.clone()
        owned.add(made.untyped_storage().data_ptr())
        found[name] = made
    return found


def write_file(path: Path, header: FileHeader, tensors: Mapping[str, torch.Tensor], *, again: bool = False) -> int:
    """Writes one file and returns its size in bytes; it exists whole under its name, or not at all.

    Raises CannotRun where the folder cannot be written and FileExistsError where the name is taken; with `again` a file
    that has these very bytes already counts as written.
    """
    from safetensors.torch import save

    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    contiguous = unshared(tensors)
    try:
        data = save(contiguous, {METADATA_KEY: dump(header)})
        if again and path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data:
            return len(data)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        _publish(temporary, path)
    except FileExistsError:
        raise
    except OSError as error:
        raise CannotRun(
            f"{path} cannot be written: {error.strerror or error}",
            hint=f"name a folder with room that this user may write; df -h {shell_word(path.parent)}",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return len(data)


def _publish(temporary: Path, path: Path) -> None:
    """Gives the whole file its name. A link refuses a name that exists, where a rename would silently take its place."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, "exists", str(path)) from None
        temporary.replace(path)


def read_header(path: Path) -> FileHeader:
    """The header of one file alone; raises BadCapture or CannotRun."""
    with _opened(path) as file:
        return _header_of(file.metadata(), path)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file through its descriptor: what was checked is what is read, and a name of any bytes can be opened."""
    from safetensors import SafetensorError, safe_open

    with open_regular(path) as (descriptor, _):
        through = Path(f"/proc/self/fd/{descriptor}")
        source = through if through.exists() else path
        try:
            with safe_open(source, framework="pt") as file:
                yield file
        except SafetensorError as error:
            raise BadCapture(
                f"{path}: not a whole safetensors file: {error}",
                hint=f"copy it again from where it was recorded: ls -l {shell_word(path)} should say the same size there",
            ) from error
        except (OSError, RuntimeError, MemoryError) as error:
            reason = " ".join(str(error).replace(str(source), str(path)).split()) or type(error).__name__
            raise CannotRun(f"{path} cannot be read: {reason}", hint=f"ls -l {shell_word(path)}; free -g") from error


def _header_of(metadata: Mapping[str, str] | None, path: Path) -> FileHeader:
    if METADATA_KEY not in (metadata or {}):
        raise BadCapture(f"{path}: no metadata key {METADATA_KEY!r}, so it is no capture", hint="mlactl diff compares plain safetensors files")
    return parse((metadata or {})[METADATA_KEY], str(path))


def read_file(path: Path) -> tuple[FileHeader, dict[str, torch.Tensor]]:
    """Header and tensors of one file, every digest checked; raises BadCapture or CannotRun. Tensors are mapped, not copied."""
    with _opened(path) as file:
        header = _header_of(file.metadata(), path)
        names = set(file.keys())
        if names != set(header.tensors):
            raise BadCapture(f"{path}: holds tensors {sorted(names)}, declares {sorted(header.tensors)}", hint=RECORD_AGAIN)
        tensors = {name: file.get_tensor(name) for name in sorted(names)}
    for name, tensor in tensors.items():
        _check_tensor(path, name, tensor, header.tensors[name])
    return header, tensors


def _check_tensor(path: Path, name: str, tensor: torch.Tensor, declared: TensorFact) -> None:
    found = str(tensor.dtype).removeprefix("torch.")
    if found != declared.dtype:
        raise BadCapture(f"{path}: {name} is {found}, declared as {declared.dtype}", hint=RECORD_AGAIN)
    if tuple(tensor.shape) != declared.stored_shape:
        raise BadCapture(f"{path}: {name} is {list(tensor.shape)}, declared as {list(declared.stored_shape)}", hint=RECORD_AGAIN)
    if len(declared.strides) != len(declared.shape) or min((*declared.shape, *declared.strides, declared.storage_offset)) < 0:
        raise BadCapture(
            f"{path}: {name} was {list(declared.shape)} with strides {list(declared.strides)} from offset {declared.storage_offset}; "
            "a tensor has one stride a dimension, none of them below 0",
            hint=RECORD_AGAIN,
        )
    digest = tensor_digest(tensor)
    if digest != declared.sha256:
        raise BadCapture(
            f"{path}: {name} has digest {digest[:16]}…, declared is {declared.sha256[:16]}…", hint="the file was changed after it was written"
        )


def results_path(folder: Path, name: str) -> Path:
    """Where the results of that capture are saved."""
    return folder / f"{name}{RESULTS_SUFFIX}"


def save_results(folder: Path, name: str, sources: Sequence[tuple[str, tuple[torch.Tensor | None, torch.Tensor | None]]]) -> tuple[str, ...]:
    """Writes (output, LSE) pairs by their sources' names as `FOLDER/<name>.results.safetensors`, for `mlactl diff`.

    A file that is there stays as it is. Returns a note where that fails, nothing where it is done: what was computed is
    worth more than its file.
    """
    from safetensors.torch import save

    found = {
        f"{source}.{what}": tensor for source, pair in sources for what, tensor in zip(("output", "lse"), pair, strict=True) if tensor is not None
    }
    path = results_path(folder, name)
    try:
        require_writable_folder(path.parent)
        write_new_file(save(unshared(found)), path, force=False)
    except MlactlError as error:
        return (f"{NOT_SAVED}: {safe(error.message)}",)
    return ()


def append_status(folder: Path, fields: Mapping[str, Any]) -> None:
    """One line at the end of the index, with the time; a single write, so that ranks sharing the folder do not mix lines."""
    line = canonical_json({**fields, "time": datetime.now(UTC).isoformat(timespec="milliseconds")}) + "\n"
    try:
        descriptor = os.open(folder / INDEX, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CannotRun(f"{folder / INDEX} cannot be written: {error.strerror or error}") from error
