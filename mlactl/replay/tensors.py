"""Named tensors out of files that are no captures: safetensors, and .pt files without ever running what they pickle."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlactl.errors import CannotRun, UsageError
from mlactl.regular_files import require_regular
from mlactl.replay.errors import BadCapture

if TYPE_CHECKING:
    import torch

TORCH_SUFFIXES = (".pt", ".pth", ".bin")


def load(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a file by name, mapped rather than read where that can be; a lone tensor of a .pt file is called `tensor`.

    Raises CannotRun for a file that cannot be read, BadCapture for one that is damaged or holds anything but tensors,
    UsageError for an unknown kind.
    """
    require_regular(path)
    if path.suffix == ".safetensors":
        return _safetensors(path)
    if path.suffix in TORCH_SUFFIXES:
        return _torch(path)
    raise UsageError(f"{path}: not a capture, .safetensors or {', '.join(TORCH_SUFFIXES)} file", hint="mlactl diff --help")


def _safetensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in sorted(file.keys())}
    except SafetensorError as error:
        raise BadCapture(f"{path}: not a whole safetensors file: {error}") from error
    except OSError as error:
        raise CannotRun(f"{path} cannot be read: {error.strerror or error}") from error


def _torch(path: Path) -> dict[str, torch.Tensor]:
    import pickle

    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch warns of in files it then refuses
            # weights_only: a pickle may otherwise run any code when it is read.
            value = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise BadCapture(
            f"{path}: holds more than tensors, or is damaged; it was not executed: {' '.join(str(error).split())[:200]}",
            hint="save plain tensors, or a dict of them, with torch.save or safetensors",
        ) from error
    except OSError as error:
        raise CannotRun(f"{path} cannot be read: {error.strerror or error}") from error
    found = dict(_walk(value, ""))
    if not found:
        raise BadCapture(f"{path}: holds no tensor")
    return found


def _walk(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    if isinstance(value, torch.Tensor):
        yield name or "tensor", value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _walk(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            yield from _walk(item, f"{name}.{position}" if name else str(position))
