"""Named tensors out of files that are no captures: safetensors, and .pt files without ever running what they pickle."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlactl.errors import UsageError
from mlactl.printable import plain
from mlactl.regular_files import require_regular
from mlactl.replay.errors import BadCapture

if TYPE_CHECKING:
    import torch

TORCH_SUFFIXES = (".pt", ".pth", ".bin")
MAX_DEPTH = 64
MAX_ITEMS = 1 << 17
"""Lists in lists may name one list many times: what a small file holds can be walked for ever."""

MAX_PICKLE_BYTES = 1 << 20
"""A name that is looked for in a refused file is near its start."""

_SAVE = "save plain tensors, or a dict of them, with torch.save or safetensors"


@dataclass(frozen=True, slots=True)
class Loaded:
    """The tensors of a file by name, and what else it holds: `step (int)`."""

    tensors: dict[str, torch.Tensor]
    others: tuple[str, ...] = ()


def load(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a file by name, mapped rather than read where that can be; raises as `read` does."""
    return read(path).tensors


def read(path: Path) -> Loaded:
    """Every tensor of a file; a lone tensor of a .pt file is called `tensor`, nested ones by their path: `layers.0.weight`.

    Raises CannotRun for what is no file or cannot be read, BadCapture for one that is damaged, holds something other than
    plain values, or two tensors of one name, UsageError for an unknown kind.
    """
    if path.suffix != ".safetensors" and path.suffix not in TORCH_SUFFIXES:
        raise UsageError(f"{plain(path)}: not a capture, .safetensors or {', '.join(TORCH_SUFFIXES)} file", hint="mlactl diff --help")
    require_regular(path)
    return _safetensors(path) if path.suffix == ".safetensors" else _torch(path)


def _safetensors(path: Path) -> Loaded:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return Loaded({name: file.get_tensor(name) for name in sorted(file.keys())})
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        # RuntimeError: torch cannot map a sparse file of terabytes; ValueError: a name that is not UTF-8.
        raise BadCapture(f"{plain(path)}: not a whole safetensors file: {plain(error)}", hint="copy or write the file again") from error


def _torch(path: Path) -> Loaded:
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch warns of in files it then refuses
            # weights_only: a pickle may otherwise run any code when it is read.
            value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Of damaged files and of files that are no torch files at all the unpickler raises nearly everything.
        raise _refusal(path, error) from error
    found: dict[str, torch.Tensor] = {}
    others: list[str] = []
    for name, item in _walk(value, path):
        if not isinstance(item, torch.Tensor):
            others.append(f"{plain(name) or 'value'} ({type(item).__name__})")
        elif (name or "tensor") in found:
            raise BadCapture(
                f"{plain(path)}: two tensors are called {plain(name or 'tensor')!r} once the keys of its dicts are joined",
                hint="rename one of the keys, or save the tensors flat",
            )
        else:
            found[name or "tensor"] = item
    if not found:
        raise BadCapture(f"{plain(path)}: holds no tensor", hint=_SAVE)
    return Loaded(found, tuple(others))


def _refusal(path: Path, error: Exception) -> BadCapture:
    """What was found, in our own words: torch's message advises to load the file again and run what it holds."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    found = named[1] if named is not None else _first_global(path)
    if found is not None:
        return BadCapture(f"{plain(path)}: holds {plain(found)}, which is no tensor; it was not executed", hint=_SAVE)
    if "TorchScript" in str(error):
        return BadCapture(f"{plain(path)}: is a TorchScript archive, which holds a program; it was not executed", hint=_SAVE)
    return BadCapture(f"{plain(path)}: is no torch file, or a damaged one; it was not executed", hint=f"write or copy it again; {_SAVE}")


def _first_global(path: Path) -> str | None:
    """The first class or function that a bare pickle names; reading opcodes runs none of them. None where it is no pickle."""
    import pickletools

    strings: list[str] = []
    try:
        with path.open("rb") as file:
            for opcode, argument, _ in pickletools.genops(file.read(MAX_PICKLE_BYTES)):
                if opcode.name == "GLOBAL":
                    return str(argument).replace(" ", ".")
                if opcode.name == "STACK_GLOBAL" and len(strings) > 1:
                    return ".".join(strings[-2:])
                if isinstance(argument, str):
                    strings.append(argument)
    except Exception:  # of bytes that are no pickle it raises whatever their opcodes lead to
        return None
    return None


def _walk(value: Any, path: Path) -> Iterator[tuple[str, Any]]:
    """(name, tensor or other value) of everything inside."""
    seen = 0

    def inside(item: Any, name: str, around: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
        nonlocal seen
        seen += 1
        if id(item) in around:
            raise BadCapture(f"{plain(path)}: {plain(name) or 'its value'} holds itself", hint=_SAVE)
        if len(around) > MAX_DEPTH or seen > MAX_ITEMS:
            raise BadCapture(f"{plain(path)}: nested more than {MAX_DEPTH} deep, or more than {MAX_ITEMS:,} values", hint=_SAVE)
        if isinstance(item, dict):
            parts: Iterator[tuple[Any, Any]] = iter(item.items())
        elif isinstance(item, (list, tuple)):
            parts = iter(enumerate(item))
        else:
            yield name, item
            return
        for key, part in parts:
            yield from inside(part, f"{name}.{key}" if name else str(key), (*around, id(item)))

    return inside(value, "", ())
