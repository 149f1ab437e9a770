"""Reading SASS operands and parameter records: what is decided, what is not, and that no bytes break it."""

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlactl.cache import machine_code
from mlactl.cache.elf import BadElf
from mlactl.cache.machine_code import Access, Disassembly, Function, Instruction, Reading, accesses, find_disassembler, parse, reads_of
from mlactl.cache.parameters import Parameter, kernel_parameters

# ---------------------------------------------------------------------- operands


@pytest.mark.parametrize(
    ("opcode", "operands", "expected"),
    [
        ("LDC", "R1, c[0x0][0x37c]", [Access(0x37C, 4, 4)]),
        ("LDC.64", "R2, c[0x0][0x398]", [Access(0x398, 8, 8)]),
        ("LDCU.128", "UR4, c[0x0][0x3a0]", [Access(0x3A0, 16, 16)]),
        ("LDCU.256", "UR4, c[0x0][0x3a0]", [Access(0x3A0, 32, 32)]),
        ("ULDC.U8", "UR4, c[0x0][0x211]", [Access(0x211, 1, 1)]),
        ("LDC.S16", "R4, c[0x0][0x212]", [Access(0x212, 2, 2)]),
        ("FMUL.FTZ", "R4, R5, -c[0x0][0x3b0]", [Access(0x3B0, 4, 4)]),
        ("FFMA", "R4, |c[0x0][0x3b0]|, R2, R3", [Access(0x3B0, 4, 4)]),
        ("IMAD.WIDE", "R2, R3, 0x4, c[0x0][0x210]", [Access(0x210, 4, 8)]),
        ("DADD", "R2, R4, c[0x0][0x218]", [Access(0x218, 4, 8)]),
        ("IADD.64", "R2, R4, c[0x0][0x218]", [Access(0x218, 4, 8)]),
        ("LDC", "R1, c[0x3][0x10]", []),
        ("LDC", "R1, c[0x3][R4+0x10]", []),
        ("LDC", "R1, c[0x0][R4+0x10]", [None]),
        ("LDC", "R1, c[0x0][R4]", [None]),
        ("LDCU", "UR1, c[0x0][UR4]", [None]),
        ("LDC.IL", "R1, c[0x3][R4+0x10]", [None]),
        ("LDC", "R1, c[UR4][0x10]", [None]),
        ("LDC", "R1, cx[UR4][0x10]", [None]),
        ("LDC", "R1, c[0x0]", [None]),
        ("LDC", "R1, c[0x0", [None]),
        ("LDG.E.128.CONSTANT", "R4, desc[UR4][R2.64+0x10]", []),
        ("STG.E", "desc[UR4][R2.64], R7", []),
        ("SEL", "R2, c[0x0][0x400], R3, P0", [Access(0x400, 4, 4)]),
    ],
)
def test_operands(opcode, operands, expected):
    assert list(accesses(opcode, operands)) == expected


def code(*lines):
    return [Function("k", tuple(Instruction(16 * at, "", *line.split(" ", 1)) for at, line in enumerate(lines)), {})]


@pytest.mark.parametrize(
    ("line", "reading"),
    [
        ("LDC R1, c[0x0][0x410]", Reading.READ),
        ("LDC.64 R2, c[0x0][0x408]", Reading.NOT_READ),
        ("LDC.128 R4, c[0x0][0x408]", Reading.READ),
        ("LDCU.128 UR4, c[0x0][0x400]", Reading.NOT_READ),
        ("FMUL R1, R2, c[0x0][0x410]", Reading.READ),
        ("LDC.U8 R1, c[0x0][0x413]", Reading.READ),
        ("LDC R1, c[0x0][0x414]", Reading.NOT_READ),
        ("IMAD.WIDE R2, R3, 0x4, c[0x0][0x40c]", Reading.CANNOT_TELL),
        ("LDC R1, c[0x0][R4+0x10]", Reading.CANNOT_TELL),
        ("LDC R1, cx[UR4][0x10]", Reading.CANNOT_TELL),
        ("LDCU.64 UR4, c[0x0][0x358]", Reading.NOT_READ),
        ("LDC R1, c[0x0][0x37c]", Reading.NOT_READ),
        ("LDCU UR4, c[0x0][0x370]", Reading.NOT_READ),
        ("LDCU.64 UR4, c[0x0][0x348]", Reading.CANNOT_TELL),
        ("LDCU.128 UR4, c[0x0][0x358]", Reading.CANNOT_TELL),
        ("EXIT ", Reading.NOT_READ),
    ],
)
def test_whether_a_word_is_read(line, reading):
    """The word is c[0x0][0x410], parameters start at 0x380, as on sm_120a."""
    found = reads_of(code("NOP ", line), 0x380, 0x410, 4)
    assert found.reading is reading
    assert found.instructions == (() if reading is Reading.NOT_READ else (f"/*0010*/ {line}",))


def test_a_certain_read_outweighs_an_undecided_one():
    found = reads_of(code("LDC R1, c[0x0][R4]", "LDC R1, c[0x0][0x410]"), 0x380, 0x410, 4)
    assert (found.reading, found.instructions, found.operands) == (Reading.READ, ("/*0010*/ LDC R1, c[0x0][0x410]",), 2)


def test_below_the_parameters_nothing_is_harmless_on_an_arch_never_seen():
    assert reads_of(code("LDC R1, c[0x0][0x28]"), 0x210, 0x300, 4).reading is Reading.NOT_READ
    assert reads_of(code("LDC R1, c[0x0][0x28]"), 0x160, 0x300, 4).reading is Reading.CANNOT_TELL


@given(st.text(), st.text())
def test_no_operand_text_breaks_it(opcode, operands):
    for access in accesses(opcode, operands):
        assert access is None or access.size <= access.at_most


PIECES = st.sampled_from(["c[", "cx[", "0x0", "][", "]", "R4", "UR4", "+", "0x410", "desc[", ".64", "-", "|", ", ", "c[0x0][0x410]"])


@given(st.lists(PIECES, max_size=12).map("".join))
def test_an_operand_that_names_the_word_is_never_passed_over(operands):
    """Whatever else stands around it: seen, or undecided, but not missed."""
    if "c[0x0][0x410]" in operands and "desc[0x0][0x410]" not in operands:
        found = list(accesses("LDC", operands))
        assert None in found or Access(0x410, 4, 4) in found or any(f"{letter}c[0x0][0x410]" in operands for letter in "0R4")


# ---------------------------------------------------------------------- nvdisasm's text

TEXT = """\t.target\tsm_120a
//--------------------- .text.k --------------------------
\t.section\t.text.k,"ax",@progbits
\t.align\t128
k:
.text.k:
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
.L_x_1:
        /*0010*/              @!P0 BRA `(.L_x_1) ;
        /*0020*/                   EXIT ;
\t.section\t.text.f,"ax",@progbits
        /*0000*/                   RET.REL.NODEC R2 `(k) ;
"""


def test_functions_labels_and_guards():
    first, second = parse(TEXT)
    assert (first.name, second.name) == ("k", "f")
    assert first.labels == {".L_x_1": 0x10}
    assert [str(each) for each in first.instructions] == ["/*0000*/ LDC R1, c[0x0][0x37c]", "/*0010*/ @!P0 BRA `(.L_x_1)", "/*0020*/ EXIT"]


def test_a_line_that_is_missing_is_noticed():
    """An instruction that was not understood would otherwise count as one that reads nothing."""
    with pytest.raises(Disassembly, match="at byte 0x20 of k, expected one at 0x10"):
        parse(TEXT.replace("@!P0 BRA", "@!P0 ???"))


@given(st.text())
def test_no_text_breaks_the_parser(text):
    for made in (text, TEXT + text, f'\t.section\t.text."{text}'):
        try:
            functions = parse(made)
        except Disassembly:
            continue
        assert all(each.address == 16 * at for function in functions for at, each in enumerate(function.instructions))


def test_code_that_the_text_leaves_out_is_no_answer(tmp_path):
    """A disassembler that prints less than the ELF holds must not acquit."""
    tool = tmp_path / "nvdisasm"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{TEXT}END\n")
    tool.chmod(0o700)
    whole = cubin({".text.k": b"\0" * 48, ".text.f": b"\0" * 16})
    assert [function.name for function in machine_code.disassemble(whole, tool)] == ["k", "f"]
    for sections in ({".text.k": b"\0" * 64, ".text.f": b"\0" * 16}, {".text.k": b"\0" * 48, ".text.f": b"\0" * 16, ".text.g": b"\0" * 16}):
        with pytest.raises(Disassembly, match="nvdisasm listed 64 bytes of code in 2 functions, the ELF has"):
            machine_code.disassemble(cubin(sections), tool)
    tool.write_text("#!/bin/sh\necho 'nvdisasm fatal: unknown arch' >&2; exit 1\n")
    with pytest.raises(Disassembly, match="exit code 1: fatal: unknown arch"):
        machine_code.disassemble(whole, tool)


def test_the_wheel_brings_a_disassembler():
    path = find_disassembler()
    assert path.name == "nvdisasm"
    assert Path(path).stat().st_mode & 0o111


# ---------------------------------------------------------------------- parameter records


def cubin(sections):
    """A device ELF with these sections and nothing else."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in [*sections, ".shstrtab"])
    body, table, at = b"", [struct.pack("<IIQQQQIIQQ", *[0] * 10)], 1
    for name, data in [*sections.items(), (".shstrtab", names)]:
        table.append(struct.pack("<IIQQQQIIQQ", at, 3 if name == ".shstrtab" else 1, 0, 0, 64 + len(body), len(data), 0, 0, 1, 0))
        body += data
        at += len(name) + 1
    ident = b"\x7fELF\x02\x01\x01\x41\x08" + b"\0" * 7
    return (
        struct.pack("<16sHHIQQQIHHHHHH", ident, 2, 190, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64, len(table), len(table) - 1) + body + b"".join(table)
    )


def bank(first, size):
    return struct.pack("<BBHIHH", 4, 0x0A, 8, 11, first, size)


def parameter(ordinal, offset, size):
    return struct.pack("<BBHIHHI", 4, 0x17, 12, 0, ordinal, offset, size << 18 | 0x1F000)


def test_parameters():
    info = struct.pack("<BBH", 3, 0x19, 24) + bank(0x380, 24) + parameter(1, 16, 4) + parameter(0, 0, 8) + struct.pack("<BBHI", 4, 0x2F, 4, 7)
    (kernel,) = kernel_parameters(cubin({".nv.info": b"", ".nv.info.k": info, ".nv.info.function": struct.pack("<BBH", 1, 0x50, 0)}))
    assert (kernel.kernel, kernel.base) == ("k", 0x380)
    assert kernel.parameters == (Parameter(0, 0x380, 8), Parameter(1, 0x390, 4))
    assert kernel.parameter(1) == Parameter(1, 0x390, 4)
    assert kernel.parameter(2) is None


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        (bank(0x380, 8) + parameter(0, 8, 4), "parameter 0 of k ends at byte 12 of 8"),
        (bank(0x380, 8) + parameter(0, 0, 4) + parameter(0, 4, 4), "has parameter 0 twice"),
        (bank(0x380, 8) + bank(0x210, 8), "says twice where parameters start"),
        (bank(0x380, 8)[:-1], "is cut short"),
        (bank(0x380, 8) + b"\x04\x17", "is cut short"),
        (struct.pack("<BBHI", 4, 0x17, 4, 0), "a parameter record of 4 bytes"),
        (b"\x09\0\0\0", "a record of unknown format 9"),
    ],
)
def test_damaged_records(info, reason):
    with pytest.raises(BadElf, match=reason):
        kernel_parameters(cubin({".nv.info.k": info}))


@given(st.binary(max_size=200), st.binary(max_size=60))
def test_no_bytes_break_the_reader(data, info):
    for made in (data, b"\x7fELF\x02\x01" + data, cubin({".nv.info.k": info}), cubin({".nv.info.k": bank(0x380, 64) + info})):
        try:
            found = kernel_parameters(made)
        except BadElf:
            continue
        assert all(each.first >= kernel.base for kernel in found for each in kernel.parameters)
