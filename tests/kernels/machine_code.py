"""A compiled object's kernels for tests of what the compiler made: resources, instructions, loops."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mlactl.cache import elf
from mlactl.cache.machine_code import Function, Instruction, disassemble, find_disassembler


@dataclass(frozen=True)
class KernelCode:
    """One kernel of a cubin: resources and code."""

    name: str
    registers: int
    frame_bytes: int
    function: Function

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        return self.function.instructions

    def loops(self) -> list[tuple[Instruction, ...]]:
        """Bodies of backward branches, each from the branch's target to the branch."""
        bodies = []
        for at in self.instructions:
            target = re.search(r"\((\.L_x_\d+)\)", at.operands)
            if at.opcode.startswith("BRA") and target and self.function.labels[target[1]] < at.address:
                start = self.function.labels[target[1]]
                bodies.append(tuple(each for each in self.instructions if start <= each.address <= at.address))
        return bodies

    def loops_over_keys(self) -> list[tuple[Instruction, ...]]:
        """Loops over KV: the backward branches whose body holds HMMA."""
        return [body for body in self.loops() if any(each.opcode.startswith("HMMA") for each in body)]

    def local_accesses(self, body: tuple[Instruction, ...]) -> list[str]:
        """Loads and stores of local memory, that is spills, among instructions."""
        return [str(each) for each in body if each.opcode.startswith(("LDL", "STL"))]


def embedded_cubin(path: Path) -> bytes:
    """The device ELF inside an exported or linked object."""
    return bytes(elf.device_code(path.read_bytes()))


def kernels_of(path: Path) -> list[KernelCode]:
    """Every kernel of an object."""
    data = embedded_cubin(path)
    code = {function.name: function for function in disassemble(data, find_disassembler())}
    return [KernelCode(kernel.name, kernel.registers, kernel.frame_bytes, code[kernel.name]) for kernel in elf.resources(data)]
