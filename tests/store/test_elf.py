"""Reading objects without loading them: against pyelftools, against the compiler's own words, and against damage."""

import resource
import struct
from io import BytesIO

import pytest
import stand_ins
from elftools.elf.elffile import ELFFile
from hypothesis import given
from hypothesis import strategies as st

from mlactl.cache import elf
from mlactl.cache.elf import BadElf, identify, inspect
from mlactl.cache.key import inputs_for, symbol_for


@pytest.fixture(scope="session")
def exported(prebuilt):
    import tiny

    return prebuilt.path(symbol_for(inputs_for(tiny.spec(), "sm_120a").key())).read_bytes()


@pytest.fixture(scope="session")
def linked(exported):
    return stand_ins.link(exported)


def cubin_at(data):
    return data.index(b"\x7fELF", 64)


def test_exported_and_linked_objects_say_the_same(prebuilt):
    import tiny

    for arch in ("sm_120a", "sm_121a"):
        key = inputs_for(tiny.spec(), arch).key()
        relocatable = prebuilt.path(symbol_for(key)).read_bytes()
        for data in (relocatable, stand_ins.link(relocatable)):
            facts = inspect(data)
            assert facts.symbols == (f"mlactl_{key}",)
            assert facts.signature == "__call__(x: Tensor([n0], float32), y: Tensor([n1], float32))"
            assert (facts.arch, facts.host) == (arch, "x86_64" if struct.unpack_from("<H", data, 18)[0] == 62 else "aarch64")


def test_facts_are_what_pyelftools_reads(linked):
    """The section tables are read by hand for speed; an independent reader has to agree with every fact."""
    facts = inspect(linked)
    host = ELFFile(BytesIO(linked))
    names = [symbol.name for symbol in host.get_section_by_name(".dynsym").iter_symbols() if symbol["st_shndx"] != "SHN_UNDEF"]
    assert [f"__tvm_ffi_{symbol}" for symbol in facts.symbols] == [name for name in names if name.startswith("__tvm_ffi_")]
    symbol = next(symbol for symbol in host.get_section_by_name(".symtab").iter_symbols() if symbol.name == "kernels_binary")
    section = host.get_section(symbol["st_shndx"])
    blob = section.data()[symbol["st_value"] - section["sh_addr"] :][: symbol["st_size"]]
    cubin = blob[blob.index(b"\x7fELF") :]
    assert cubin.startswith(bytes(facts.cubin))
    assert not cubin[len(facts.cubin) :].strip(b"\0"), "only padding may be left out"
    (kernel,) = facts.kernels
    assert f".text.{kernel.name}" in [section.name for section in ELFFile(BytesIO(cubin)).iter_sections()]
    assert 8 <= kernel.registers <= 32
    assert (kernel.frame_bytes, kernel.static_smem_bytes, kernel.local_bytes) == (0, 0, 0)


def test_another_arch_is_what_its_own_elf_says(prebuilt):
    """sm_100a code under an sm_120a label: the label is in the manifest, the truth in the ELF."""
    assert inspect(prebuilt.sm_100a.read_bytes()).arch == "sm_100a"


@pytest.mark.parametrize(("number", "note", "said"), [(100, b"sm_120a", "sm_100"), (120, b"sm_100a", "sm_120"), (120, b"sm_120f", "sm_120f")])
def test_arch_flags_and_note_have_to_agree(linked, number, note, said):
    """e_flags are the same for sm_120a and sm_120f; what the two sources do not agree on is no arch we make objects for."""
    data = bytearray(linked)
    at = cubin_at(data)
    flags = struct.unpack_from("<I", data, at + 48)[0]
    struct.pack_into("<I", data, at + 48, flags & ~0xFF00 | number << 8)
    assert data.count(b"-arch sm_120a") == 1
    changed = bytes(data).replace(b"-arch sm_120a", b"-arch " + note)
    assert identify(changed).arch == said


def test_every_cut_is_named(linked):
    for size in (0, 1, 4, 63, 64, 4096, len(linked) // 2, len(linked) - 1):
        with pytest.raises(BadElf) as caught:
            identify(linked[:size])
        assert caught.value.reason


def test_parts_that_are_missing_are_named(linked):
    with pytest.raises(BadElf) as caught:
        identify(linked.replace(b"__tvm_ffi_mlactl", b"__tvm_fff_mlactl"))
    assert (caught.value.part, caught.value.reason) == ("symbol", "exports no TVM-FFI function")
    with pytest.raises(BadElf) as caught:
        identify(linked.replace(b" when calling: `", b" when galling: `"))
    assert (caught.value.part, caught.value.reason) == ("signature", "holds no signature text")
    at = cubin_at(linked)
    with pytest.raises(BadElf) as caught:
        identify(linked[:at] + b"\0\0\0\0" + linked[at + 4 :])
    assert (caught.value.part, caught.value.reason) == ("cubin", "no device ELF inside, expected one")
    with pytest.raises(BadElf) as caught:
        identify(linked + linked[at:])
    assert (caught.value.part, caught.value.reason) == ("cubin", "2 device ELFs inside, expected one")


def test_two_signatures_are_refused(linked):
    with pytest.raises(BadElf) as caught:
        identify(linked + b" when calling: `other(x: int32)`")
    assert caught.value.part == "signature"


def test_an_object_of_another_kind_is_refused():
    with open("/proc/self/exe", "rb") as file:
        interpreter = file.read(elf.MAX_OBJECT_BYTES)
    with pytest.raises(BadElf):
        identify(interpreter)
    with pytest.raises(BadElf) as caught:
        identify(b"\0" * (elf.MAX_OBJECT_BYTES + 1))
    assert "more than" in caught.value.reason


def read(data):
    """Facts, or None for BadElf; anything else is raised."""
    try:
        return inspect(data)
    except BadElf:
        return None


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_never_an_object(data):
    assert read(data) is None
    assert read(b"\x7fELF\x02\x01" + data) is None


@given(st.data())
def test_damage_anywhere_never_escapes(linked, data):
    """Bit flips and cuts, most of them in the two section tables, where counts and offsets are."""
    tables = []
    for at in (0, cubin_at(linked)):
        table = struct.unpack_from("<Q", linked, at + 40)[0]
        count = struct.unpack_from("<H", linked, at + 60)[0]
        tables += [st.integers(at, at + 63), st.integers(at + table, at + table + 64 * count - 1)]
    damaged = bytearray(linked)
    for _ in range(data.draw(st.integers(1, 8))):
        position = data.draw(st.one_of(*tables, st.integers(0, len(linked) - 1)))
        damaged[position] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.none(), st.integers(0, len(linked))))
    read(bytes(damaged[:cut]))


@pytest.mark.parametrize("field", range(4, 10))
@pytest.mark.parametrize("value", [0, 1, 0xFFFFFFFF, 1 << 40, (1 << 64) - 1])
def test_absurd_section_sizes_allocate_nothing(linked, field, value):
    """A size of 2^64 in a section header makes a reader that believes it ask for all memory."""
    section = struct.Struct("<IIQQQQIIQQ")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for at in (0, cubin_at(linked)):
        table = at + struct.unpack_from("<Q", linked, at + 40)[0]
        for index in range(struct.unpack_from("<H", linked, at + 60)[0]):
            damaged = bytearray(linked)
            fields = list(section.unpack_from(damaged, table + 64 * index))
            fields[field] = value & (0xFFFFFFFF if field in (6, 7) else (1 << 64) - 1)
            section.pack_into(damaged, table + 64 * index, *fields)
            read(bytes(damaged))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "KiB"


def test_absurd_section_counts_end_at_once(linked):
    for at in (0, cubin_at(linked)):
        for count in (0, 0xFFFF):
            damaged = bytearray(linked)
            struct.pack_into("<H", damaged, at + 60, count)
            with pytest.raises(BadElf, match="section table"):
                identify(bytes(damaged))
