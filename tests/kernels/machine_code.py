"""Reads a compiled object's embedded cubin: resources from its info sections, instructions from nvdisasm."""

from __future__ import annotations

import io
import re
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from elftools.elf.elffile import ELFFile

REGISTER_COUNT, FRAME_SIZE = 0x2F, 0x11
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);")
LABEL = re.compile(r"^(\.L_x_\d+):", re.M)


@dataclass(frozen=True)
class KernelCode:
    """One kernel of a cubin: resources and its instructions as (address, opcode, operands), labels by address."""

    name: str
    registers: int
    frame_bytes: int
    instructions: tuple[tuple[int, str, str], ...]
    labels: dict[str, int]
    predicated: frozenset[int]

    def loops(self) -> list[tuple[tuple[int, str, str], ...]]:
        """Bodies of backward branches, each from the branch's target to the branch."""
        bodies = []
        for address, opcode, operands in self.instructions:
            target = re.search(r"\((\.L_x_\d+)\)", operands)
            if opcode.startswith("BRA") and target and self.labels[target[1]] < address:
                start = self.labels[target[1]]
                bodies.append(tuple(i for i in self.instructions if start <= i[0] <= address))
        return bodies

    def loops_over_keys(self) -> list[tuple[tuple[int, str, str], ...]]:
        """Loops over KV: the backward branches whose body holds HMMA."""
        return [body for body in self.loops() if any(opcode.startswith("HMMA") for _, opcode, _ in body)]

    def local_accesses(self, body: tuple[tuple[int, str, str], ...]) -> list[str]:
        """Loads and stores of local memory, that is spills, among instructions."""
        return [f"{address:#x} {opcode}" for address, opcode, _ in body if opcode.startswith(("LDL", "STL"))]


def embedded_cubin(path: Path) -> bytes:
    """The device ELF inside an exported or linked object."""
    elf = ELFFile(io.BytesIO(path.read_bytes()))
    table = elf.get_section_by_name(".symtab") or elf.get_section_by_name(".dynsym")
    for symbol in table.iter_symbols():
        if symbol.name.startswith("kernels_binary"):
            section = elf.get_section(symbol["st_shndx"])
            start = symbol["st_value"] - section["sh_addr"]
            blob = section.data()[start : start + symbol["st_size"]]
            return blob[blob.find(b"\x7fELF") :]
    raise AssertionError(f"{path.name} holds no cubin")


def _attributes(cubin: ELFFile) -> dict[str, dict[int, int]]:
    """Per kernel: the values of the 4-byte attributes in .nv.info."""
    info, names, at = cubin.get_section_by_name(".nv.info").data(), cubin.get_section_by_name(".symtab"), 0
    found: dict[str, dict[int, int]] = {}
    while at < len(info):
        kind, attribute, size = info[at], info[at + 1], struct.unpack_from("<H", info, at + 2)[0]
        if kind == 4 and attribute in (REGISTER_COUNT, FRAME_SIZE):
            index, value = struct.unpack_from("<II", info, at + 4)
            found.setdefault(names.get_symbol(index).name, {})[attribute] = value
        at += 4 + (size if kind == 4 else 0)
    return found


def nvdisasm() -> Path:
    """nvdisasm of the wheel nvidia-cuda-nvdisasm."""
    package = find_spec("nvidia")
    for base in package.submodule_search_locations if package else []:
        for path in Path(base).glob("**/bin/nvdisasm"):
            return path
    raise AssertionError("nvdisasm not found: pip install nvidia-cuda-nvdisasm")


def kernels_of(path: Path) -> list[KernelCode]:
    """Every kernel of an object."""
    data = embedded_cubin(path)
    attributes = _attributes(ELFFile(io.BytesIO(data)))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(data)
        file.flush()
        text = subprocess.run([nvdisasm(), "-c", file.name], check=True, capture_output=True, text=True).stdout
    kernels = []
    for part in re.split(r"^\s*\.section\s+\.text\.", text, flags=re.M)[1:]:
        name = part.split(",", 1)[0].strip().strip('"')
        instructions, labels, waiting, predicated = [], {}, [], set()
        for line in part.splitlines():
            label = re.match(r"^(\.L_x_\d+):", line)
            if label:
                waiting.append(label[1])
            found = INSTRUCTION.search(line)
            if found:
                address = int(found[1], 16)
                labels.update(dict.fromkeys(waiting, address))
                waiting = []
                instructions.append((address, found[3], found[4]))
                if found[2]:
                    predicated.add(address)
        resources = attributes[name]
        kernels.append(KernelCode(name, resources[REGISTER_COUNT], resources.get(FRAME_SIZE, 0), tuple(instructions), labels, frozenset(predicated)))
    return kernels
