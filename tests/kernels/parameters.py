"""Where a kernel's parameters lie in the constant bank, and which instructions read a range of it.

Sources: `.nv.info.<kernel>` of CUDA ELFs, attributes 0x0A (offset and size of the parameters) and 0x17 (one parameter:
ordinal, offset, size), read off objects of sm_90a and sm_120a; nvdisasm's text.
"""

from __future__ import annotations

import io
import re
import struct

from elftools.elf.elffile import ELFFile
from machine_code import KernelCode, embedded_cubin

_BANK, _PARAMETER = 0x0A, 0x17
_CONSTANT = re.compile(r"c\[0x0\]\[(?:UR\d+\+|R\d+\+)?(0x[0-9a-f]+)\]")


def parameter_bytes(path, kernel: str, ordinal: int) -> tuple[int, int]:
    """(first byte in constant bank 0, size) of one parameter of a kernel."""
    info = ELFFile(io.BytesIO(embedded_cubin(path))).get_section_by_name(f".nv.info.{kernel}").data()
    at, base, found = 0, None, None
    while at < len(info):
        kind, attribute, size = info[at], info[at + 1], struct.unpack_from("<H", info, at + 2)[0]
        if kind == 4 and attribute == _BANK:
            base = struct.unpack_from("<H", info, at + 8)[0]
        if kind == 4 and attribute == _PARAMETER:
            _, number, offset, packed = struct.unpack_from("<IHHI", info, at + 4)
            if number == ordinal:
                found = (offset, packed >> 18)
        at += 4 + (size if kind == 4 else 0)
    assert base is not None
    assert found is not None, f"no parameter {ordinal}"
    return base + found[0], found[1]


def reads_of(code: KernelCode, first: int, size: int) -> list[str]:
    """Instructions that read any of constant bytes [first, first + size), vector loads counted over their whole width."""
    found = []
    for address, opcode, operands in code.instructions:
        bits = max((int(width) for width in re.findall(r"\.(64|128|256)\b", opcode)), default=32) if opcode.startswith(("LDC", "ULDC")) else 32
        for match in _CONSTANT.findall(operands):
            begin = int(match, 16)
            if begin < first + size and first < begin + bits // 8:
                found.append(f"{address:#x} {opcode} {operands}")
    return found
