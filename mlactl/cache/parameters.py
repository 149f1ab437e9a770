"""Where the parameters of each kernel of a cubin lie, read from the cubin itself.

Source: `.nv.info.<kernel>` sections of CUDA ELFs, which are undocumented and were read off objects of sm_90a, sm_120a and
sm_121a: records of a format byte, an attribute byte and 16 bits that are a value or, for format 4, the size of a payload.
Attribute 0x0A is where parameters start in constant bank 0 and how many bytes they are; 0x17 is one parameter.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from mlactl.cache.elf import BadElf, sections

_INFO = ".nv.info."
_FORMATS, _SIZED = (1, 2, 3, 4), 4
_BANK, _PARAMETER = 0x0A, 0x17


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter: position, first byte in constant bank 0, and size in bytes."""

    ordinal: int
    first: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class KernelParameters:
    """A kernel's parameters by ordinal; they start at byte `base` of constant bank 0."""

    kernel: str
    base: int
    parameters: tuple[Parameter, ...]

    def parameter(self, ordinal: int) -> Parameter | None:
        """The parameter at that position, None when there is none."""
        return next((found for found in self.parameters if found.ordinal == ordinal), None)


def kernel_parameters(cubin: bytes | memoryview) -> tuple[KernelParameters, ...]:
    """The parameters of every kernel in a device ELF, in order of name; raises BadElf."""
    infos = {name.removeprefix(_INFO): data for name, data in sections(cubin).items() if name.startswith(_INFO)}
    return tuple(found for name in sorted(infos) if (found := _read(name, infos[name])) is not None)


def _read(kernel: str, info: bytes) -> KernelParameters | None:
    """One kernel's parameters; None for a device function, whose section says nothing of a parameter bank."""
    bank: tuple[int, int] | None = None
    places: dict[int, tuple[int, int]] = {}
    at = 0
    while at < len(info):
        payload = b""
        if at + 4 > len(info):
            raise BadElf(f"the last record of {_INFO}{kernel[:80]} is cut short", "cubin")
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form not in _FORMATS:
            raise BadElf(f"{_INFO}{kernel[:80]} has a record of unknown format {form}", "cubin")
        if form == _SIZED:
            payload, at = info[at : at + size], at + size
            if at > len(info):
                raise BadElf(f"the last record of {_INFO}{kernel[:80]} is cut short", "cubin")
        if attribute == _BANK and len(payload) == 8:
            if bank is not None:
                raise BadElf(f"{_INFO}{kernel[:80]} says twice where parameters start", "cubin")
            _, first, size_bytes = struct.unpack("<IHH", payload)
            bank = first, size_bytes
        elif attribute == _PARAMETER and len(payload) == 12:
            _, ordinal, offset, packed = struct.unpack("<IHHI", payload)
            if ordinal in places:
                raise BadElf(f"{_INFO}{kernel[:80]} has parameter {ordinal} twice", "cubin")
            places[ordinal] = offset, packed >> 18
        elif attribute in (_BANK, _PARAMETER):
            raise BadElf(f"{_INFO}{kernel[:80]} has a parameter record of {len(payload)} bytes", "cubin")
    if bank is None:
        return None
    for ordinal, (offset, size_bytes) in places.items():
        if offset + size_bytes > bank[1]:
            raise BadElf(f"parameter {ordinal} of {kernel[:80]} ends at byte {offset + size_bytes} of {bank[1]}", "cubin")
    found = (Parameter(ordinal, bank[0] + places[ordinal][0], places[ordinal][1]) for ordinal in sorted(places))
    return KernelParameters(kernel, bank[0], tuple(found))
