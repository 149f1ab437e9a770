"""Reads a compiled object without loading it: exported functions, signature, and the cubin inside with its arch and resources.

An object is an x86-64 or AArch64 ELF (the linked `.so`, or the `.o` the compiler writes) with a CUDA ELF in its data.
Both section tables are read here with `struct`: pyelftools takes 5 ms for the same look-ups, eighty times what hashing
the object takes, and verify looks at thousands. pyelftools reads the resources, which only `show` and publishing need,
from a cubin whose section table was found sound here first (it believes counts and sizes as they stand).

Sources: the System V ABI for ELF64; CUDA's own parts (`e_flags`, `.note.nv.tkinfo`, `.nv.info`) are undocumented and
were read off objects compiled for sm_90a, sm_100a, sm_103a, sm_120a, sm_120f and sm_121a.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from io import BytesIO
from typing import Any, TypeAlias

ELF_MAGIC = b"\x7fELF"
FUNCTION_PREFIX = b"__tvm_ffi_"
SIGNATURE_MARK = b" when calling: `"

EM_CUDA = 190
ET_REL, ET_DYN = 1, 3
SHT_SYMTAB, SHT_STRTAB, SHT_NOTE, SHT_NOBITS, SHT_DYNSYM = 2, 3, 7, 8, 11
SHF_COMPRESSED = 0x800
HOST_MACHINES = {62: "x86_64", 183: "aarch64"}

MAX_OBJECT_BYTES = 64 << 20
MAX_SECTIONS = 4096
MAX_NAME_BYTES = 8192
MAX_SIGNATURE_BYTES = 65_536
MAX_CUBINS = 16

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQ8xQQI4x8x8x")  # without address, info, alignment and entry size
_SYMBOL = struct.Struct("<IBBHQQ")
_NOTE_ARCH = re.compile(rb"-arch[ =](sm_([0-9]{2,3})[a-z]?)(?![0-9A-Za-z_])")

# .nv.info attributes: format byte 4 means a payload of the stated size, here (symbol index, value).
_FORMAT_SIZED, _REGISTERS, _FRAME_SIZE = 4, 0x2F, 0x11


class BadElf(Exception):
    """The bytes are no object of ours; `part` is where reading stopped: object, symbol, signature or cubin."""

    def __init__(self, reason: str, part: str = "object") -> None:
        super().__init__(reason)
        self.reason, self.part = reason, part


@dataclass(frozen=True, slots=True)
class KernelResources:
    """What one device kernel takes: registers a thread, stack and local bytes a thread, static shared bytes a block.

    `static_smem_bytes` is the size of the kernel's `.nv.shared` section; kernels that ask for shared memory at launch were
    seen with 1,024 bytes there, the driver's own share of each block. What is asked for at launch is in no ELF.
    """

    name: str
    registers: int
    frame_bytes: int
    static_smem_bytes: int
    local_bytes: int


@dataclass(frozen=True, slots=True)
class ObjectIdentity:
    """What tells one object from another without loading it.

    `symbols`: exported TVM-FFI functions without their prefix. `signature`: the function's signature as its own error
    texts spell it. `arch`: what the cubin's ELF says, `sm_120a`; without a letter where the ELF is of two minds.
    `host`: x86_64 or aarch64. `cubin`: the device ELF, a view of the object's bytes.
    """

    symbols: tuple[str, ...]
    signature: str
    arch: str
    host: str
    cubin: memoryview


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    """An object's identity together with the resources of each of its kernels, by name."""

    symbols: tuple[str, ...]
    signature: str
    arch: str
    host: str
    cubin: memoryview
    kernels: tuple[KernelResources, ...]


_Section: TypeAlias = tuple[int, int, int, int, int, int]
"""Place of its name, type, flags, offset, size and link, as they come: verify reads millions, and names for the fields cost as much again."""


@dataclass(frozen=True, slots=True)
class _Elf:
    kind: int
    machine: int
    flags: int
    abi: int
    sections: list[_Section]
    names: bytes
    size: int


def inspect(data: bytes | memoryview) -> ObjectFacts:
    """Everything an object says of itself, about 5 ms; raises BadElf for anything that is not one of our objects."""
    found = identify(data)
    return ObjectFacts(found.symbols, found.signature, found.arch, found.host, found.cubin, resources(found.cubin))


def identify(data: bytes | memoryview) -> ObjectIdentity:
    """An object's exported functions, signature, arch and cubin, about 0.1 ms; raises BadElf."""
    data = _bounded(data)
    host, machine = _host(data)
    symbols = _exported(data, host)
    if not symbols:
        raise BadElf("exports no TVM-FFI function", "symbol")
    at, cubin = _only_cubin(data)
    signature = _signature(data, at, at + cubin.size)
    view = memoryview(data)[at : at + cubin.size]
    return ObjectIdentity(symbols, signature, _arch(view, cubin), machine, view)


@dataclass(frozen=True, slots=True)
class ForeignIdentity:
    """What an object of another tool says of itself: every global symbol it defines, its arch, its host and its device ELFs."""

    symbols: tuple[str, ...]
    arch: str
    host: str
    cubins: tuple[memoryview, ...]


def identify_foreign(data: bytes | memoryview) -> ForeignIdentity:
    """As `identify`, for objects of any calling convention: several device ELFs are fine as long as they are for one arch. Raises BadElf."""
    data = _bounded(data)
    host, machine = _host(data)
    found = _cubins(data)
    if not found:
        raise BadElf("no device ELF inside", "cubin")
    views = tuple(memoryview(data)[at : at + cubin.size] for at, cubin in found)
    arches = sorted({_arch(view, cubin) for view, (_, cubin) in zip(views, found, strict=True)})
    if len(arches) > 1:
        raise BadElf(f"device ELFs for {', '.join(arches)}, expected one arch", "cubin")
    names = [name for name in _defined(data, host) if name]
    return ForeignIdentity(tuple(sorted(_text(name, "symbol") for name in names)), arches[0], machine, views)


# ---- ELF


def _read_elf(data: bytes, at: int, part: str) -> _Elf:
    """The ELF64 that starts at byte `at`; every section lies inside the data."""
    room = len(data) - at
    if room < _HEADER.size or data[at : at + 4] != ELF_MAGIC:
        raise BadElf(f"no ELF: {room} bytes that start with {data[at : at + 4].hex() or 'nothing'}", part)
    ident, kind, machine, _, _, segments, table, flags, _, segment, segment_count, entry, count, names_index = _HEADER.unpack_from(data, at)
    if ident[4:6] != b"\x02\x01":
        raise BadElf("not a 64-bit little-endian ELF", part)
    if entry != _SECTION.size or not 0 < count <= MAX_SECTIONS or table + count * entry > room or names_index >= count:
        raise BadElf(f"its section table ({count} entries of {entry} bytes at {table}) does not fit {room} bytes: cut short or damaged", part)
    sections = list(_SECTION.iter_unpack(memoryview(data)[at + table : at + table + count * entry]))
    # A cubin has its program headers last.
    end = max(table + count * entry, segments + segment_count * segment)
    if end > room:
        raise BadElf(f"its program headers end at byte {end} of {room}: cut short or damaged", part)
    last = max([offset + size for _, kind, _, offset, size, _ in sections if kind not in (0, SHT_NOBITS)], default=0)
    if last > room:
        raise BadElf(f"a section ends at byte {last} of {room}: cut short or damaged", part)
    end = max(end, last)
    _, names_kind, _, offset, size, _ = sections[names_index]
    if names_kind != SHT_STRTAB:
        raise BadElf("its section names are no string table", part)
    return _Elf(kind, machine, flags, ident[8], sections, data[at + offset : at + offset + size], end)


def _bounded(data: bytes | memoryview) -> bytes:
    if len(data) > MAX_OBJECT_BYTES:
        raise BadElf(f"{len(data)} bytes, more than the {MAX_OBJECT_BYTES} an object can have")
    return bytes(data)


def _host(data: bytes) -> tuple[_Elf, str]:
    """The object's own ELF and the host it is for."""
    host = _read_elf(data, 0, "object")
    machine = HOST_MACHINES.get(host.machine)
    if machine is None or host.kind not in (ET_REL, ET_DYN):
        raise BadElf(f"an ELF of machine {host.machine} and type {host.kind}, expected an x86-64 or AArch64 object")
    return host, machine


def _string(table: bytes, at: int) -> bytes:
    end = table.find(b"\0", at, at + MAX_NAME_BYTES)
    return table[at:end] if 0 <= at <= end else b""


def _exported(data: bytes, host: _Elf) -> tuple[str, ...]:
    """Defined TVM-FFI functions, by name."""
    found = []
    for name in _defined(data, host, FUNCTION_PREFIX):
        # A second underscore marks the calling convention's own symbols.
        name = name[len(FUNCTION_PREFIX) :]
        if name and not name.startswith(b"_"):
            found.append(_text(name, "symbol"))
    return tuple(sorted(found))


def _defined(data: bytes, host: _Elf, prefix: bytes = b"") -> list[bytes]:
    """Names of defined symbols that start so and are bound GLOBAL or WEAK: in .dynsym of a linked object, in .symtab of a relocatable one."""
    kind = SHT_DYNSYM if host.kind == ET_DYN else SHT_SYMTAB
    table = next(((offset, size, link) for _, this, _, offset, size, link in host.sections if this == kind), None)
    if table is None or table[1] % _SYMBOL.size or table[2] >= len(host.sections) or host.sections[table[2]][1] != SHT_STRTAB:
        raise BadElf("has no readable table of exported symbols", "symbol")
    at, size, link = table
    _, _, _, names_at, names_size, _ = host.sections[link]
    names = data[names_at : names_at + names_size]
    found = []
    for name_at, info, _, section, _, _ in _SYMBOL.iter_unpack(memoryview(data)[at : at + size]):
        if section and info >> 4 and names.startswith(prefix, name_at):
            found.append(_string(names, name_at))
    return found


def device_code(data: bytes | memoryview) -> memoryview:
    """Cubin of any relocatable or shared object with one device ELF inside, whichever tool exported it; raises BadElf."""
    data = _bounded(data)
    _host(data)
    at, cubin = _only_cubin(data)
    return memoryview(data)[at : at + cubin.size]


def sections(cubin: bytes | memoryview) -> dict[str, bytes]:
    """Content of each section of a device ELF that has some, by name; raises BadElf, also when two have one name."""
    data = bytes(cubin)
    elf = _read_elf(data, 0, "cubin")
    found: dict[str, bytes] = {}
    for name_at, kind, _, offset, size, _ in elf.sections:
        if kind in (0, SHT_NOBITS):
            continue
        name = _string(elf.names, name_at).decode(errors="backslashreplace")
        if name in found:
            raise BadElf(f"two sections {name[:80]}", "cubin")
        found[name] = data[offset : offset + size]
    return found


def _text(raw: bytes, part: str) -> str:
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        text = ""
    if not text.isprintable() or not text:
        raise BadElf(f"a {part} that is no text", part)
    return text


def _signature(data: bytes, cubin_begin: int, cubin_end: int) -> str:
    """The function's signature as its error texts spell it; the same in each of them. They are host code's: the cubin is passed over."""
    found: str | None = None
    for begin, end in ((0, cubin_begin), (cubin_end, len(data))):
        at = data.find(SIGNATURE_MARK, begin, end)
        while at >= 0:
            start = at + len(SIGNATURE_MARK)
            stop = data.find(b"`", start, min(start + MAX_SIGNATURE_BYTES, end))
            if stop < 0:
                raise BadElf("its signature has no end", "signature")
            text = _text(data[start:stop], "signature")
            if found is not None and text != found:
                raise BadElf("two different signatures in one object", "signature")
            found = text
            at = data.find(SIGNATURE_MARK, stop, end)
    if found is None:
        raise BadElf("holds no signature text", "signature")
    return found


# ---- the cubin


def _only_cubin(data: bytes) -> tuple[int, _Elf]:
    """Offset and tables of the device ELF; several of them are refused, since a launch could pick any."""
    found = _cubins(data)
    if len(found) != 1:
        raise BadElf(f"{len(found) or 'no'} device ELF{'s' if found else ''} inside, expected one", "cubin")
    return found[0]


def _cubins(data: bytes) -> list[tuple[int, _Elf]]:
    """Offset and tables of every device ELF."""
    found: list[tuple[int, _Elf]] = []
    at = data.find(ELF_MAGIC, _HEADER.size)
    while at >= 0:
        if len(found) == MAX_CUBINS:
            raise BadElf(f"more than {MAX_CUBINS} device ELFs", "cubin")
        elf = _read_elf(data, at, "cubin")
        if elf.machine != EM_CUDA:
            raise BadElf(f"its device code is an ELF of machine {elf.machine}, expected {EM_CUDA}", "cubin")
        found.append((at, elf))
        at = data.find(ELF_MAGIC, at + elf.size)
    return found


def _arch(cubin: memoryview, elf: _Elf) -> str:
    """`e_flags` has the number (bits 8-15 in ABI 8, the low byte before), the assembler's own note the letter.

    The flags are the same for sm_120a and sm_120f, so the letter can come from the note only; where the two disagree
    on the number, or there is no note, the flags' number alone is the answer and fits no arch that objects are made for.
    """
    number = elf.flags >> 8 & 0xFF if elf.abi >= 8 else elf.flags & 0xFF
    for name_at, kind, _, offset, size, _ in elf.sections:
        if kind == SHT_NOTE and _string(elf.names, name_at) == b".note.nv.tkinfo":
            match = _NOTE_ARCH.search(cubin[offset : offset + size])
            if match and int(match[2]) == number:
                return match[1].decode()
    return f"sm_{number}"


def resources(cubin: bytes | memoryview) -> tuple[KernelResources, ...]:
    """Resources of each kernel in a device ELF, in order of name; raises BadElf."""
    data = bytes(cubin)
    elf = _read_elf(data, 0, "cubin")
    if any(flags & SHF_COMPRESSED for _, _, flags, _, _, _ in elf.sections):  # pyelftools would unpack them, however large
        raise BadElf("compressed sections in the device ELF", "cubin")
    from elftools.elf.elffile import ELFFile

    try:
        return _kernels(ELFFile(BytesIO(data)))
    except BadElf:
        raise
    except Exception as error:  # pyelftools lets construct's, struct's and its own errors through
        raise BadElf(f"its kernels' resources cannot be read: {error}", "cubin") from error


def _kernels(cubin: Any) -> tuple[KernelResources, ...]:
    sizes: dict[str, int] = {}
    info, symbols = b"", None
    for section in cubin.iter_sections():
        sizes[section.name] = section["sh_size"]
        if section.name == ".nv.info" and section["sh_type"] != "SHT_NOBITS":
            info = section.data()
        elif section.name == ".symtab" and section["sh_type"] == "SHT_SYMTAB":
            symbols = section
    if symbols is None or not info:
        raise BadElf("no .nv.info or no symbols in the device ELF", "cubin")
    values: dict[int, dict[int, int]] = {}
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != _FORMAT_SIZED:
            continue
        if attribute in (_REGISTERS, _FRAME_SIZE):
            if size != 8 or at + 8 > len(info):
                raise BadElf("its .nv.info is damaged", "cubin")
            index, value = struct.unpack_from("<II", info, at)
            values.setdefault(index, {})[attribute] = value
        at += size
    kernels = []
    for index, found in values.items():
        if _REGISTERS in found:
            name = symbols.get_symbol(index).name
            frame, shared, local = found.get(_FRAME_SIZE, 0), sizes.get(f".nv.shared.{name}", 0), sizes.get(f".nv.local.{name}", 0)
            kernels.append(KernelResources(name, found[_REGISTERS], frame, shared, local))
    if not kernels:
        raise BadElf("no kernel in the device ELF", "cubin")
    return tuple(sorted(kernels, key=lambda kernel: kernel.name))
