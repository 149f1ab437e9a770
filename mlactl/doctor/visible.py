"""Which of a node's GPUs a launch sees through CUDA_VISIBLE_DEVICES, resolved as the CUDA driver does.

Source: CUDA programming guide, "CUDA environment variables": an invalid entry ends the list, UUIDs may be abbreviated while
unique. As PyTorch reads it, an index is what a number starts with and a GPU named twice hides all. One process sees one MIG
slice at most (MIG user guide), so that of a list of them the first counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlactl.doctor.node import Gpu, Node

VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"

_INDEX = re.compile(r"\s*\+?([0-9]{1,9})")
_NEGATIVE = re.compile(r"\s*-[0-9]")
_TELLABLE = re.compile(r"-?[0-9]{1,9}|GPU-[0-9a-f-]{0,36}|MIG-(GPU-)?[0-9a-f-]{1,36}(/[0-9]{1,3}/[0-9]{1,3})?")


@dataclass(frozen=True, slots=True)
class Visible:
    """`gpus` are those a launch sees, in its order; None when that cannot be told.

    `ended` says which entry ended the list, or why nothing of it counts; empty when every entry counts, and for a negative
    number after others, which is the usual way to end one. `doubt` says why `gpus` is None, where that may hide every
    usable GPU.
    """

    gpus: tuple[Gpu, ...] | None
    ended: str = ""
    doubt: str = ""


def visible(environ: Mapping[str, str], node: Node) -> Visible:
    """What a launch in this environment sees of the node's GPUs; all of them where the variable is not set."""
    value = environ.get(VARIABLE)
    if value is None:
        return Visible(node.gpus)
    entries = value.split(",")
    if value.startswith("MIG-"):
        return _slice(entries[0], node.gpus)
    if value.startswith("GPU-"):
        return _by_uuid(entries, node.gpus)
    return _by_index(entries, node.gpus, ordered=environ.get(ORDER) == "PCI_BUS_ID")


def _by_index(entries: Sequence[str], gpus: tuple[Gpu, ...], *, ordered: bool) -> Visible:
    found: list[Gpu] = []
    ended = ""
    for number, entry in enumerate(entries):
        match = _INDEX.match(entry)
        if match is None or int(match[1]) >= len(gpus):
            meant = found and (_NEGATIVE.match(entry) or (not entry.strip() and number == len(entries) - 1))
            there = f"there is no such GPU, the last is {len(gpus) - 1}" if match else "it is no index"
            ended = "" if meant else f"{_told(entry)} ends the list: {there}"
            break
        gpu = gpus[int(match[1])]
        if gpu in found:
            return Visible((), f"GPU {gpu.index} stands in it twice, which hides all")
        found.append(gpu)
    mixed = len({(gpu.name, gpu.capability) for gpu in gpus}) > 1
    if ordered or not mixed or len(found) in (0, len(gpus)):
        return Visible(tuple(found), ended)
    # Without PCI_BUS_ID the driver puts what it guesses to be the fastest card first: which cards the indices mean is not known.
    unusable = sum(not gpu.usable for gpu in gpus)
    doubt = f"its indices go by the driver's order, fastest first, while {ORDER} is not PCI_BUS_ID" if unusable >= len(found) else ""
    return Visible(None, ended, doubt)


def _by_uuid(entries: Sequence[str], gpus: tuple[Gpu, ...]) -> Visible:
    found: list[Gpu] = []
    for entry in entries:
        fitting = [gpu for gpu in gpus if gpu.uuid and gpu.uuid.startswith(entry)] if entry.startswith("GPU-") else []
        if len(fitting) != 1:
            if entry.startswith("GPU-") and not all(gpu.uuid for gpu in gpus):
                return Visible(None)  # it may be the one that did not tell its UUID
            return Visible(tuple(found), f"{_told(entry)} ends the list: {f'{len(fitting)} GPUs fit it' if fitting else 'no GPU has that UUID'}")
        if fitting[0] in found:
            return Visible((), f"GPU {fitting[0].index} stands in it twice, which hides all")
        found += fitting
    return Visible(tuple(found))


def _slice(entry: str, gpus: tuple[Gpu, ...]) -> Visible:
    for gpu in gpus:
        if entry in (gpu.slices or ()):
            return Visible((gpu,))
    if any(gpu.problem or (gpu.mig and gpu.slices is None) for gpu in gpus):
        return Visible(None)
    there = "its divided GPUs have others" if any(gpu.mig for gpu in gpus) else "no GPU is divided (MIG)"
    return Visible((), f"{_told(entry)} is no slice of this node: {there}")


def _told(entry: str) -> str:
    """An entry for a message, unless it looks like something that was not meant to be read."""
    if not entry.strip():
        return "an empty entry"
    return entry.strip() if _TELLABLE.fullmatch(entry.strip()) else "an entry that is neither index nor UUID"
