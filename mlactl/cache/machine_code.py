"""Disassembles a cubin with nvdisasm and tells whether its code reads given bytes of the parameters.

A read is an instruction with a constant-bank operand whose bytes overlap; nothing is said about whether the instruction
runs, or what becomes of the value. Whatever cannot be decided (an address from a register, a bindless bank, text that is
not understood, a word that could hold the bank's own address) makes the answer "cannot tell": code is never acquitted
because this module did not understand it.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from mlactl.cache.elf import BadElf, sections
from mlactl.errors import EnvironmentUnfit

DISTRIBUTION = "nvidia-cuda-nvdisasm"
TIMEOUT_S = 120.0
INSTRUCTION_BYTES = 16
"""Size of an instruction on every arch since sm_70."""

_TEXT = ".text."
_SECTION = re.compile(r'^\s*\.section\s+"?\.text\.', re.M)
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);")
_LABEL = re.compile(r"(\.L_x_\d+):\s*$")

_CONSTANT = re.compile(r"(?<!\w)(cx?)\[([^\]]*)\](?:\[([^\]]*)\])?")
_IMMEDIATE = re.compile(r"0x[0-9a-f]{1,8}")
_LOAD = re.compile(r"(LDC|ULDC|LDCU)(\.|$)")
_LOAD_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
_INDEXED_BANK = re.compile(r"\.(IL|IS|ISL)(\.|$)")
_WIDE = re.compile(r"64|128|256|WIDE|^D[A-Z]")

_DRIVER_WORDS: Mapping[int, tuple[tuple[int, int], ...]] = {
    # parameters at: (first byte, bytes) of block and grid size, stack pointer, descriptor of global memory
    0x210: ((0x0, 24), (0x28, 4), (0x208, 8)),
    0x380: ((0x360, 12), (0x370, 12), (0x37C, 4), (0x358, 8)),
}
"""What the driver puts before the parameters and code may read without hiding anything, by where the parameters start. Any
other word there could be the address of the bank itself, through which parameters can be read by ordinary loads."""


class Disassembly(Exception):
    """Machine code that nvdisasm or this module could not read; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Instruction(NamedTuple):
    """One line of nvdisasm: byte address in its function, guard (`@!P0` or nothing), opcode, operands."""

    address: int
    guard: str
    opcode: str
    operands: str

    def __str__(self) -> str:
        return f"/*{self.address:04x}*/ {f'{self.guard} ' if self.guard else ''}{self.opcode} {self.operands}".rstrip()


@dataclass(frozen=True, slots=True)
class Function:
    """The code of one section: every instruction in order, and where each label stands."""

    name: str
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]


class Reading(StrEnum):
    """Whether code reads a range of its parameters."""

    READ = "read"
    NOT_READ = "not read"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, slots=True)
class Reads:
    """What was found: the answer, the instructions behind it, and how many constant operands were looked at."""

    reading: Reading
    instructions: tuple[str, ...]
    operands: int


def find_disassembler() -> Path:
    """The nvdisasm of the installed wheel; raises EnvironmentUnfit naming the wheel when it is not there."""
    hint = f"pip install '{DISTRIBUTION}>=13', or audit by facts alone: mlactl cache audit --facts-only"
    try:
        files = importlib.metadata.files(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise EnvironmentUnfit(f"no nvdisasm to read machine code with: {DISTRIBUTION} is not installed", hint=hint) from None
    for file in files or ():
        if file.name == "nvdisasm" and file.parent.name == "bin":
            path = Path(str(file.locate()))
            if os.access(path, os.X_OK):
                return path
            raise EnvironmentUnfit(f"{path} of {DISTRIBUTION} is missing or cannot be run", hint=f"pip install --force-reinstall {DISTRIBUTION}")
    raise EnvironmentUnfit(f"the installed {DISTRIBUTION} has no bin/nvdisasm", hint=hint)


def disassemble(cubin: bytes | memoryview, tool: Path) -> tuple[Function, ...]:
    """Every function of a cubin, about a second; raises Disassembly unless each instruction of each code section is there."""
    try:
        code = {name.removeprefix(_TEXT): len(data) for name, data in sections(cubin).items() if name.startswith(_TEXT)}
    except BadElf as error:
        raise Disassembly(error.reason) from None
    functions = parse(_run(cubin, tool))
    listed = {function.name: INSTRUCTION_BYTES * len(function.instructions) for function in functions}
    if listed != code or len(listed) != len(functions):
        raise Disassembly(f"nvdisasm listed {sum(listed.values())} bytes of code in {len(functions)} functions, the ELF has {sum(code.values())}")
    return functions


def _run(cubin: bytes | memoryview, tool: Path) -> str:
    with tempfile.TemporaryDirectory(prefix="mlactl-audit-") as folder:
        path = Path(folder) / "object.cubin"
        path.write_bytes(cubin)
        try:
            # -ndf: without the flow analysis, which labels indirect branches and may refuse code; the instructions are the same.
            ran = subprocess.run([tool, "-c", "-ndf", path], capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise Disassembly(f"nvdisasm did not finish within {TIMEOUT_S:g} s") from None
        except OSError as error:
            raise EnvironmentUnfit(f"{tool} cannot be run: {error.strerror}", hint=f"pip install --force-reinstall {DISTRIBUTION}") from error
    if ran.returncode != 0:
        raise Disassembly(f"nvdisasm failed with exit code {ran.returncode}: {ran.stderr.strip().removeprefix('nvdisasm ')[:200]}")
    return ran.stdout


def parse(text: str) -> tuple[Function, ...]:
    """The functions in nvdisasm's text; raises Disassembly when the addresses of one do not count up from 0 without a gap."""
    return tuple(map(_function, _SECTION.split(text)[1:]))


def _function(part: str) -> Function:
    name = part.partition("\n")[0].partition(",")[0].strip().removesuffix('"')
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in part.splitlines()[1:]:
        here = len(instructions) * INSTRUCTION_BYTES
        label = _LABEL.match(line)
        if label:
            labels[label[1]] = here
        found = _INSTRUCTION.match(line)
        if found is None:
            continue
        if int(found[1], 16) != here:
            raise Disassembly(f"an instruction at byte {int(found[1], 16):#x} of {name[:80]}, expected one at {here:#x}")
        instructions.append(Instruction(here, (found[2] or "").strip(), found[3], " ".join(found[4].split())))
    return Function(name, tuple(instructions), labels)


# ---- constant operands


class Access(NamedTuple):
    """Bytes of constant bank 0 that an operand takes: `size` from `first` for certain, up to `at_most`. None: unknown bytes."""

    first: int
    size: int
    at_most: int


def accesses(opcode: str, operands: str) -> Iterator[Access | None]:
    """What each constant operand of an instruction takes of bank 0; None for one that cannot be decided. Other banks yield nothing."""
    for kind, bank, offset in _CONSTANT.findall(operands):
        if kind == "c" and _IMMEDIATE.fullmatch(bank) and not _INDEXED_BANK.search(opcode):
            if int(bank, 16) != 0:
                continue
            if _IMMEDIATE.fullmatch(offset):
                yield _access(opcode, int(offset, 16))
                continue
        yield None
    left = _CONSTANT.sub("", operands)
    if re.search(r"(?<!\w)cx?\[", left):  # an operand without its end
        yield None


def _access(opcode: str, first: int) -> Access:
    if not _LOAD.match(opcode):
        # An operand of arithmetic is a word; of 64-bit arithmetic it can be two, by its place, which is not looked at.
        return Access(first, 4, 8 if _WIDE.search(opcode) else 4)
    size = next((_LOAD_BYTES[part] for part in opcode.split(".")[1:] if part in _LOAD_BYTES), 4)
    return Access(first, size, size)


def reads_of(functions: Iterable[Function], base: int, first: int, size: int) -> Reads:
    """Whether any of these functions reads bytes [first, first + size) of constant bank 0, where parameters start at `base`.

    READ when an instruction certainly does; else CANNOT_TELL when one may; else NOT_READ.
    """
    certain: list[str] = []
    possible: list[str] = []
    operands = 0
    for function in functions:
        for instruction in function.instructions:
            for access in accesses(instruction.opcode, instruction.operands):
                operands += 1
                if access is None or _may_find_bank(access, base):
                    possible.append(str(instruction))
                elif access.first < first + size and first < access.first + access.at_most:
                    (certain if first < access.first + access.size else possible).append(str(instruction))
    reading = Reading.READ if certain else Reading.CANNOT_TELL if possible else Reading.NOT_READ
    return Reads(reading, tuple(certain or possible), operands)


def _may_find_bank(access: Access, base: int) -> bool:
    """Whether an access below the parameters takes a word that is not known to be harmless."""
    if access.first >= base:
        return False
    return not any(first <= access.first and access.first + access.size <= first + size for first, size in _DRIVER_WORDS.get(base, ()))
