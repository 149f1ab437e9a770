"""Bundles of real objects: one spelling, checked to the last byte, published whole or not at all."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import signal
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import stand_ins
import test_crash
import tiny
import users
import zstandard

from mlactl.cache import locks
from mlactl.cache import toolchain as toolchains
from mlactl.cache.bundle import layout, merge, packages, read, select, write
from mlactl.cache.bundle.layout import BadBundle
from mlactl.cache.entry import examine
from mlactl.cache.key import inputs_for
from mlactl.cache.listing import Filters
from mlactl.cache.locks import entry_lock
from mlactl.cache.store import Entry, Hit, Status, Store
from mlactl.errors import CannotRun, Interrupted

SPEC = tiny.spec()
Publish = Callable[..., Entry]


def bundle_of(store: Store, keys: list[str] | None = None) -> bytes:
    chosen = select.by_filters(store, Filters()).keys if keys is None else keys
    with write.pack(store, chosen) as packed:
        assert packed.left_out == ()
        file = io.BytesIO()
        packed.copy_to(file)
        data = file.getvalue()
        assert packed.sha256 == hashlib.sha256(data).hexdigest()
        assert packed.size == len(data)
    return data


def unpacked(bundle: bytes) -> bytes:
    return zstandard.ZstdDecompressor().stream_reader(io.BytesIO(bundle), read_across_frames=True).read()


def listing_end(tar: bytes) -> int:
    """Where the first member of an archive ends, at the end of the archive at the latest."""
    field = tar[124:135]
    return min(len(tar), 512 + (int(field, 8) + 511) // 512 * 512) if len(field) == 11 and not field.strip(b"01234567") else len(tar)


def repacked(tar: bytes) -> bytes:
    """An archive in two frames, as a bundle has it, of another level and with the content's size in them."""
    at = listing_end(tar)
    return b"".join(zstandard.ZstdCompressor(level=5).compress(part) for part in (tar[:at], tar[at:]))


def repadded(data: bytes) -> bytes:
    """The same object with another byte between two of its sections: another one, in order."""
    code = bytearray(data)
    code[code.index(b"\0" * 64, len(code) // 3) + 8] = 1
    return bytes(code)


def bring(store: Store, bundle: bytes, **options: object) -> merge.Imported:
    return merge.bring_in(store, io.BytesIO(bundle), **options)  # type: ignore[arg-type]


@pytest.fixture
def other(tmp_path: Path) -> Store:
    """The node: a store that has nothing yet."""
    return Store.open(str(tmp_path / "node"))


@pytest.fixture
def three(publish: Publish) -> list[Entry]:
    return [publish(), publish(tiny.spec(3)), publish(arch="sm_121a")]


@pytest.fixture
def bundle(store: Store, three: list[Entry]) -> bytes:
    return bundle_of(store)


def no_trace(store: Store) -> bool:
    """Nothing published and nothing left in the spool."""
    return list(store.entries()) == [] and not Path(store.roots.layers[0].folder(), merge.SPOOL).exists()


# ---- the format


def test_any_tar_reads_it_and_its_list_says_what_is_in_it(bundle: bytes, three: list[Entry]) -> None:
    with tarfile.open(fileobj=io.BytesIO(unpacked(bundle))) as archive:
        members = archive.getmembers()
        content = {member.name: archive.extractfile(member).read() for member in members}  # type: ignore[union-attr]
    keys = sorted(entry.key for entry in three)
    assert [member.name for member in members] == [
        "bundle.json",
        *(name for key in keys for name in (f"{key[:2]}/{key}.json", f"{key[:2]}/{key}.so")),
    ]
    assert {(member.mode, member.uid, member.gid, member.mtime, member.uname, member.gname, member.type) for member in members} == {
        (0o644, 0, 0, 0, "", "", tarfile.REGTYPE)
    }
    document = msgspec.json.decode(content["bundle.json"])
    assert [entry["key"] for entry in document["entries"]] == keys
    for entry in three:
        row = next(row for row in document["entries"] if row["key"] == entry.key)
        assert row["spec"] == entry.manifest.spec.as_json()
        assert (row["arch"], row["host_arch"]) == (entry.manifest.arch, os.uname().machine)
        assert row["toolchain"] == entry.manifest.toolchain.as_json()
        for file, path in zip(row["files"], (entry.manifest_path, entry.object_path), strict=True):
            assert content[file["name"]] == path.read_bytes()
            assert file["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
            assert file["size"] == path.stat().st_size
    assert document["schema_version"] == 1
    flavour = three[0].manifest.toolchain.flavour
    assert document["requires"] == [
        {"name": "apache-tvm-ffi", "version": ">=0.1.15.post2,<0.2"},
        {"name": f"nvidia-cutlass-dsl-libs-{flavour}", "version": "==4.8.1"},
    ]
    assert not any("libcute_dsl_runtime" in name for name in content), "its licence keeps it out"


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 1 << 30])
def test_a_header_is_what_tarfile_writes(size: int) -> None:
    info = tarfile.TarInfo("ab/name.so")
    info.size, info.mode = size, 0o644
    assert layout.header("ab/name.so", size) == info.tobuf(tarfile.USTAR_FORMAT)
    assert len(layout.padding(size)) == -size % 512


def test_the_same_entries_give_the_same_bytes(
    store: Store, three: list[Entry], other: Store, publish: Publish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Order of publishing, times of files, number of cores and of layers: none of it is in a bundle."""
    first = bundle_of(store)
    bring(other, first)
    for path in Path(other.roots.layers[0].folder()).rglob("*.*"):
        os.utime(path, (1, 1))
    for cores in ({0}, set(range(64))):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores)
        assert bundle_of(other, [entry.key for entry in reversed(three)]) == first
    layered = Store.open(f"{tmp_path / 'empty'}:{other.roots.layers[0].path}")
    assert bundle_of(layered) == first


def test_compressed_bytes_do_not_depend_on_the_number_of_workers_or_on_chunks() -> None:
    data = b"".join(hashlib.sha256(str(number).encode()).digest() * 3 for number in range(300_000))

    def compressed(threads: int, chunk: int) -> bytes:
        out = io.BytesIO()
        with write._compressor(threads).stream_writer(out, closefd=False) as stream:
            for at in range(0, len(data), chunk):
                stream.write(data[at : at + chunk])
        return out.getvalue()

    expected = compressed(1, 1 << 20)
    assert len(data) > 3 * (8 << 20), "several jobs"
    assert all(compressed(threads, chunk) == expected for threads, chunk in ((2, 99_991), (4, 1 << 24)))


# ---- export


def test_the_first_layer_with_a_usable_entry_answers(store: Store, three: list[Entry], other: Store, tmp_path: Path) -> None:
    expected = bundle_of(store)
    bring(other, expected)
    stand_ins.flip_bit(three[0])
    layered = Store.open(f"{store.roots.layers[0].path}:{other.roots.layers[0].path}")
    assert bundle_of(layered) == expected


def test_bad_entries_are_left_out_and_named(store: Store, three: list[Entry]) -> None:
    damaged, quarantined, good = three
    stand_ins.flip_bit(damaged)
    stand_ins.quarantine(quarantined)
    stand_ins.leave_temporary(good)
    selection = select.by_filters(store, Filters())
    assert selection.quarantined == (quarantined.key,)
    with write.pack(store, selection.keys) as packed:
        assert [manifest.key for manifest in packed.entries] == [good.key]
        assert [(item.key, item.reason.partition(": SHA")[0]) for item in packed.left_out] == [(damaged.key, f"{damaged.object_path}: digest")]
    assert select.by_filters(store, Filters(arches=("sm_121a",))).keys == (good.key,)
    assert select.by_filters(store, Filters(kernels=("test.tiny",))).keys == tuple(sorted((damaged.key, good.key)))
    assert select.by_filters(store, Filters(kernels=("attention",))).keys == ()


@pytest.mark.parametrize("filters", [Filters(), Filters(arches=("sm_120a",))], ids=["all", "arch"])
@pytest.mark.parametrize("unreadable", [False, True])
def test_an_object_set_aside_in_one_layer_is_not_taken_from_another(
    store: Store, publish: Publish, prebuilt: tiny.Prebuilt, other: Store, filters: Filters, unreadable: bool
) -> None:
    convicted, good = publish(), publish(tiny.spec(3))
    bring(other, bundle_of(store))
    stand_ins.quarantine(convicted)
    if unreadable:
        (convicted.root / "v1" / convicted.key[:2] / f"{convicted.key}.quarantined").write_bytes(b"{}")
    layered = Store.open(f"{store.roots.layers[0].path}:{other.roots.layers[0].path}")
    assert select.by_filters(layered, filters) == select.Selection((good.key,), quarantined=(convicted.key,))
    with write.pack(layered, [convicted.key, good.key]) as packed:
        assert [manifest.key for manifest in packed.entries] == [good.key]
        assert [(item.key, f"{convicted.object_path}: quarantined: " in item.reason) for item in packed.left_out] == [(convicted.key, True)]
    upside_down = Store.open(f"{other.roots.layers[0].path}:{store.roots.layers[0].path}")
    assert select.by_filters(upside_down, filters) == select.Selection((good.key,), quarantined=(convicted.key,)), "lookups miss it too"
    with write.pack(upside_down, [convicted.key, good.key]) as packed:
        assert [manifest.key for manifest in packed.entries] == [good.key]
        assert [(item.key, item.reason.startswith(f"quarantined: {convicted.root} has set ")) for item in packed.left_out] == [(convicted.key, True)]


def test_another_object_than_the_one_set_aside_above_is_packed(store: Store, publish: Publish, prebuilt: tiny.Prebuilt, other: Store) -> None:
    convicted = publish()
    theirs = tiny.published(other, convicted.manifest.key_inputs(), repadded(convicted.object_path.read_bytes()))
    stand_ins.quarantine(convicted)
    layered = Store.open(f"{store.roots.layers[0].path}:{other.roots.layers[0].path}")
    assert select.by_filters(layered, Filters()) == select.Selection((convicted.key,))
    with write.pack(layered, [convicted.key]) as packed:
        assert [manifest.object_sha256 for manifest in packed.entries] == [theirs.manifest.object_sha256]


def test_an_untrusted_entry_is_left_out(store: Store, three: list[Entry]) -> None:
    three[0].object_path.chmod(0o666)
    with write.pack(store, [three[0].key, three[1].key]) as packed:
        assert [manifest.key for manifest in packed.entries] == [three[1].key]
        assert f"{three[0].object_path} is not trusted" in packed.left_out[0].reason
        assert (packed.left_out[0].hint or "").startswith("chmod go-w")


def test_lookups_select_what_a_launch_would_load(store: Store, three: list[Entry]) -> None:
    specs = (SPEC, tiny.spec(3), tiny.spec(5))
    selection = select.by_lookups(store, specs, ("sm_120a",))
    assert selection.keys == tuple(sorted(entry.key for entry in three[:2]))
    assert [(item.key, item.label) for item in selection.missing] == [
        (inputs_for(tiny.spec(5), "sm_120a").key(), f"{tiny.spec(5).label()} for sm_120a")
    ]
    assert select.by_lookups(store, specs, ("sm_120a",), kernels=("attention",)) == select.Selection(())


# ---- import


def test_import_publishes_every_entry_byte_for_byte(bundle: bytes, three: list[Entry], other: Store) -> None:
    result = bring(other, bundle)
    assert {outcome.outcome for outcome in result.outcomes} == {"published"}
    assert result.sha256 == hashlib.sha256(bundle).hexdigest()
    assert result.bundle_bytes == len(bundle)
    for entry in three:
        found = other.lookup(entry.manifest.spec, entry.manifest.arch)
        assert isinstance(found, Hit)
        assert examine(found.entry).status is Status.OK
        assert found.entry.object_path.read_bytes() == entry.object_path.read_bytes()
        assert found.entry.manifest_path.read_bytes() == entry.manifest_path.read_bytes()
        assert found.entry.object_path.stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(other.roots.layers[0].folder()))[-2:] == ["import.lock", "root.lock"], "the spool is gone"


def test_an_interrupted_import_counts_what_it_published_itself(store: Store, bundle: bytes, three: list[Entry], other: Store) -> None:
    """An entry that somebody else published first is there, but not imported; the third is cut off before its turn."""
    first, *rest = sorted(three, key=lambda entry: entry.key)
    seen = 0

    def somebody_else(_: int) -> None:
        bucket = Path(other.roots.layers[0].bucket(first.key))
        bucket.mkdir(parents=True, exist_ok=True, mode=0o700)
        for suffix in (".so", ".json"):
            shutil.copy(Path(store.roots.layers[0].bucket(first.key), first.key + suffix), bucket)

    def stop() -> None:
        nonlocal seen
        seen += 1
        if seen == 2:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="interrupted: 1 of 3 entries were imported, each of them whole"):
        bring(other, bundle, watch=merge.Watch(publishing=somebody_else, published=stop))
    assert {entry.key for entry in other.entries()} == {first.key, rest[0].key}


def test_last_use_is_the_import(bundle: bytes, three: list[Entry], store: Store, other: Store) -> None:
    os.utime(three[0].manifest_path, (1_000_000_000, 1_000_000_000))
    os.utime(three[1].manifest_path, (1_000_000_000, 1_000_000_000))
    assert {outcome.outcome for outcome in bring(store, bundle, dry_run=True).outcomes} == {"already there"}
    assert store.entry(three[0].key).last_used == 1_000_000_000, "a dry run touches nothing"
    assert {outcome.outcome for outcome in bring(store, bundle).outcomes} == {"already there"}
    bring(other, bundle)
    for entry in (*store.entries(), *other.entries()):
        assert entry.last_used > 1_700_000_000


def test_import_merges(bundle: bytes, three: list[Entry], store: Store, prebuilt: tiny.Prebuilt) -> None:
    intact, damaged, aside = three
    before = intact.object_path.stat().st_ino
    stand_ins.flip_bit(damaged)
    stand_ins.quarantine(aside)
    outcomes = {outcome.manifest.key: outcome for outcome in bring(store, bundle).outcomes}
    assert {key: outcome.outcome for key, outcome in outcomes.items()} == {
        intact.key: "already there",
        damaged.key: "replaced",
        aside.key: "quarantined",
    }
    assert "set aside" in outcomes[aside.key].reason
    assert intact.object_path.stat().st_ino == before
    assert examine(store.entry(damaged.key)).status is Status.OK
    assert store.entry(aside.key).status is Status.QUARANTINED


def test_another_object_under_the_same_key_is_said_and_stays(store: Store, publish: Publish, prebuilt: tiny.Prebuilt, other: Store) -> None:
    mine = publish()
    theirs = tiny.published(other, mine.manifest.key_inputs(), repadded(mine.object_path.read_bytes()))
    assert examine(theirs).status is Status.OK
    outcome = bring(store, bundle_of(other)).outcomes[0]
    assert outcome.outcome == "already there"
    assert f"with another object: SHA-256 {mine.manifest.object_sha256}" in outcome.reason
    assert store.entry(mine.key).manifest == mine.manifest


def test_filters_and_dry_run(bundle: bytes, three: list[Entry], other: Store) -> None:
    dry = bring(other, bundle, dry_run=True)
    assert [outcome.outcome for outcome in dry.outcomes] == ["published"] * 3
    assert not other.roots.layers[0].path.exists()
    result = bring(other, bundle, filters=Filters(arches=("sm_121a",)))
    assert sorted(outcome.outcome for outcome in result.outcomes) == ["not selected", "not selected", "published"]
    assert [entry.key for entry in other.entries()] == [three[2].key]


def test_entries_for_another_host_are_not_imported(bundle: bytes, other: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlactl.cache.key.host_arch", lambda: "aarch64")
    result = bring(other, bundle)
    assert {(outcome.outcome, outcome.reason) for outcome in result.outcomes} == {("other host", "host code for x86_64, this machine is aarch64")}
    assert result.requires == ()
    assert no_trace(other)


def test_what_launches_here_never_ask_for_is_counted(store: Store, prebuilt: tiny.Prebuilt) -> None:
    stand_ins.publish(store, prebuilt, tiny.spec(2))
    stand_ins.publish(store, prebuilt, tiny.spec(3), version=0)
    stand_ins.publish(store, prebuilt, tiny.spec(5), sources_digest="ab" * 32)
    stand_ins.publish(store, prebuilt, tiny.spec(7), toolchain=stand_ins.older_toolchain())
    reasons = merge.unanswered(bring(store, bundle_of(store)).outcomes)
    here, older = toolchains.current(), stand_ins.older_toolchain()
    assert reasons == {
        "test.tiny version 0, this install has version 1": 1,
        "test.tiny compiled from other sources than this install's": 1,
        f"made by {older.label()}, the compiler of this install is {here.label()}": 1,
    }


# ---- what is refused


def change(tar: bytes, **changes: object) -> bytes:
    """The archive with other fields in the header of its third member (an object), its checksum made right."""
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        member = archive.getmembers()[2]
    at = member.offset
    for name, value in changes.items():
        setattr(member, name, value)
    return tar[:at] + member.tobuf(tarfile.USTAR_FORMAT) + tar[at + 512 :]


def relisted(tar: bytes, edit: Callable[[dict], None]) -> bytes:
    """The archive with an edited list, spelled canonically."""
    size = int(tar[124:135], 8)
    document = msgspec.json.decode(tar[512 : 512 + size])
    edit(document)
    data = msgspec.json.encode(document, order="sorted") + b"\n"
    return layout.header("bundle.json", len(data)) + data + layout.padding(len(data)) + tar[512 + size + (-size % 512) :]


def set_in(document: dict, path: str, value: object) -> None:
    *parents, last = path.split("/")
    for name in parents:
        document = document[int(name) if name.isdigit() else name]
    document[int(last) if last.isdigit() else last] = value


REFUSED = {
    "symbolic link": (lambda tar: change(tar, type=tarfile.SYMTYPE, linkname="/etc/passwd"), "symbolic link"),
    "hard link": (lambda tar: change(tar, type=tarfile.LNKTYPE, linkname="bundle.json"), "hard link"),
    "device": (lambda tar: change(tar, type=tarfile.CHRTYPE), "device"),
    "fifo": (lambda tar: change(tar, type=tarfile.FIFOTYPE), "FIFO"),
    "folder": (lambda tar: change(tar, type=tarfile.DIRTYPE), "folder"),
    "traversal": (lambda tar: change(tar, name="../../evil.so"), "file ../../evil.so"),
    "absolute": (lambda tar: change(tar, name="/etc/evil.so"), "file /etc/evil.so"),
    "owner": (lambda tar: change(tar, uid=1000), "uid 1000"),
    "setuid": (lambda tar: change(tar, mode=0o4755), "mode 4755"),
    "time": (lambda tar: change(tar, mtime=1), "mtime 1"),
    "size": (lambda tar: change(tar, size=5), "of 5 bytes"),
    "checksum": (lambda tar: tar[:512], "truncated"),
    "unlisted member": (lambda tar: tar[:-1024] + layout.header("x", 0) + tar[-1024:], "does not list"),
    "missing member": (lambda tar: relisted(tar, lambda d: d["entries"].pop()), "does not list"),
    "listed and absent": (lambda tar: tar[: tar.index(b".so\0") // 512 * 512] + bytes(1024), "end of the archive"),
    "duplicate": (lambda tar: relisted(tar, lambda d: d["entries"].insert(0, d["entries"][0])), "listed twice or out of order"),
    "name in the list": (lambda tar: relisted(tar, lambda d: set_in(d, "entries/0/files/1/name", "../x.so")), "../x.so"),
    "key": (lambda tar: relisted(tar, lambda d: set_in(d, "entries/0/key", "../../../x")), "is no key"),
    "object too large": (lambda tar: relisted(tar, lambda d: set_in(d, "entries/0/files/1/size", 1 << 40)), "expected 1 to 67108864"),
    "manifest too large": (lambda tar: relisted(tar, lambda d: set_in(d, "entries/0/files/0/size", 1 << 21)), "expected 1 to 1048576"),
    "digest": (lambda tar: relisted(tar, lambda d: set_in(d, "entries/0/files/0/sha256", "0" * 64)), "digest"),
    "object digest": (lambda tar: relisted(tar, lambda d: set_in(d, "entries/0/files/1/sha256", "0" * 64)), "says otherwise"),
    "spec": (lambda tar: relisted(tar, lambda d: set_in(d, "entries/0/spec/version", 7)), "says otherwise"),
    "arch": (lambda tar: relisted(tar, lambda d: set_in(d, "entries/0/arch", "sm_90a")), "says otherwise"),
    "requires": (lambda tar: relisted(tar, lambda d: set_in(d, "requires/0/name", "evil")), "requires other packages"),
    "schema": (lambda tar: relisted(tar, lambda d: set_in(d, "schema_version", 2)), "schema version 2, this release reads 1"),
    "field": (lambda tar: relisted(tar, lambda d: set_in(d, "made_by", "me")), "bundle.json"),
    "no entries": (lambda tar: relisted(tar, lambda d: d["entries"].clear()), "lists no entries"),
    "spelling": (lambda tar: tar.replace(b'"schema_version":1}', b'"schema_version":01', 1), "bundle.json"),
    "list too large": (lambda tar: layout.header("bundle.json", 17 << 20) + tar[512:], "expected at most 16777216"),
    "another first member": (lambda tar: layout.header("other.json", 10) + tar[512:], "expected file bundle.json"),
    "trailing zeros": (lambda tar: tar + bytes(512), "trailing data"),
    "nothing": (lambda tar: b"", "truncated"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(bundle: bytes, other: Store, name: str) -> None:
    edit, said = REFUSED[name]
    with pytest.raises(BadBundle) as raised:
        bring(other, repacked(edit(unpacked(bundle))))
    assert said in raised.value.message
    assert raised.value.exit_code == 1
    assert no_trace(other)


def test_the_edits_start_from_what_is_accepted(bundle: bytes, other: Store) -> None:
    tar = unpacked(bundle)
    assert change(tar) == tar
    assert relisted(tar, lambda _: None) == tar
    assert len(bring(other, repacked(tar)).outcomes) == 3, "frames of any level"


def test_damaged_content_is_named(bundle: bytes, other: Store, three: list[Entry]) -> None:
    """A flipped bit under the right digests in the list: what a load would refuse, an import does."""
    tar = bytearray(unpacked(bundle))
    first = min(entry.key for entry in three)
    start = tar.index(layout.header(f"{first[:2]}/{first}.so", min(three, key=lambda entry: entry.key).object_bytes))
    tar[start + 5000] ^= 1
    with pytest.raises(BadBundle, match=rf"entry {first[:12]}: digest: SHA-256"):
        bring(other, repacked(bytes(tar)))
    assert no_trace(other)


def test_an_object_of_another_kind_is_refused_whatever_the_digests_say(store: Store, publish: Publish, prebuilt: tiny.Prebuilt, other: Store) -> None:
    """Everything recomputed by whoever forged it: the object's own arch still says what it is."""
    entry = publish()
    data = stand_ins.link(prebuilt.sm_100a.read_bytes())
    forged = msgspec.structs.replace(entry.manifest, object_sha256=hashlib.sha256(data).hexdigest(), object_bytes=len(data))
    text = write.dump(forged)
    row = layout.row(forged, hashlib.sha256(text).hexdigest(), len(text))
    listing = layout.dump(layout.Listing((row,), packages.required([forged.toolchain]), 1))
    parts = [("bundle.json", listing), *zip((file.name for file in row.files), (text, data), strict=True)]
    tar = b"".join(layout.header(name, len(part)) + part + layout.padding(len(part)) for name, part in parts) + layout.END
    with pytest.raises(BadBundle, match=r"arch: the object is for sm_100a"):
        bring(other, repacked(tar))
    assert no_trace(other)


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 100, -1, -3, -5, -400])
def test_truncated(bundle: bytes, other: Store, cut: int) -> None:
    with pytest.raises(BadBundle, match=r"truncated|not a bundle"):
        bring(other, bundle[:cut])
    assert no_trace(other)


@pytest.mark.parametrize("more", [b"\0", b"x" * 100, b"\x50\x2a\x4d\x18\x04\0\0\0abcd", None], ids=["zero", "text", "skippable-frame", "itself"])
def test_trailing_data(bundle: bytes, other: Store, more: bytes | None) -> None:
    with pytest.raises(BadBundle, match="trailing data"):
        bring(other, bundle + (bundle if more is None else more))
    assert no_trace(other)


def frame(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(content)


def blocks(content: bytes, size: int) -> bytes:
    """A frame with a flushed block for each `size` bytes; with none, as many empty blocks as there are bytes, then the content."""
    if not size:
        # Magic, a descriptor without anything optional, the window; then raw blocks: three bytes of header each.
        return b"\x28\xb5\x2f\xfd\0\x40" + bytes(3) * len(content) + (len(content) << 3 | 1).to_bytes(3, "little") + content
    out, stream = b"", zstandard.ZstdCompressor(level=1).compressobj()
    for at in range(0, len(content), size):
        out += stream.compress(content[at : at + size]) + stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    return out + stream.flush()


FRAMES = {
    "one frame": (lambda head, rest: frame(head + rest), "bundle.json shares its zstd frame with what follows, expected two frames"),
    "three frames": (lambda head, rest: frame(head) + frame(rest[:512]) + frame(rest[512:]), "truncated: zstd frame 2"),
    "list in two frames": (lambda head, rest: frame(head[:512]) + frame(head[512:]) + frame(rest), "truncated: zstd frame 1"),
    "more in the first frame": (lambda head, rest: frame(head + rest[:1]) + frame(rest[1:]), "shares its zstd frame"),
    "less in the first frame": (lambda head, rest: frame(head[:-1]) + frame(head[-1:] + rest), "truncated: zstd frame 1"),
    "empty frame before": (lambda head, rest: frame(b"") + frame(head) + frame(rest), "truncated: zstd frame 1"),
    "empty frames before": (lambda head, rest: frame(b"") * 3000 + frame(head) + frame(rest), "truncated: zstd frame 1"),
    "empty frame between": (lambda head, rest: frame(head) + frame(b"") + frame(rest), "truncated: zstd frame 2"),
    "empty frame behind": (lambda head, rest: frame(head) + frame(rest) + frame(b""), "trailing data after the last zstd frame"),
    "list alone": (lambda head, rest: frame(head), "truncated: the file ends before zstd frame 2"),
    "entries first": (lambda head, rest: frame(rest) + frame(head), "expected file bundle.json"),
    "empty blocks in the list": (lambda head, rest: blocks(head, 0) + frame(rest), "65 blocks for 0 bytes, which no encoder writes"),
    "tiny blocks": (lambda head, rest: frame(head) + blocks(rest[:100_000], 9) + frame(rest[100_000:]), "bytes, which no encoder writes"),
}


@pytest.mark.parametrize("name", FRAMES)
def test_frames_that_no_export_writes(bundle: bytes, other: Store, name: str) -> None:
    edit, said = FRAMES[name]
    tar = unpacked(bundle)
    at = listing_end(tar)
    with pytest.raises(BadBundle) as raised:
        bring(other, edit(tar[:at], tar[at:]))
    assert said in raised.value.message
    assert no_trace(other)


def test_the_frames_above_start_from_what_is_accepted(bundle: bytes, other: Store) -> None:
    tar = unpacked(bundle)
    at = listing_end(tar)
    assert len(bring(other, frame(tar[:at]) + blocks(tar[at:], 1000)).of("published")) == 3


def test_a_bomb_is_refused_in_little_memory(other: Store, in_child: Callable[..., int]) -> None:
    """64 GiB of zeros in 2 MB, where the list should be and behind it: refused as soon as it is more than was announced."""
    zeros = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 27))
    listed = zstandard.ZstdCompressor().compress(layout.header("bundle.json", 15 << 20)) + zeros * 8

    def work() -> None:
        import resource

        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + (400 << 20), now + (400 << 20)))
        for bomb in (zeros, listed):
            with pytest.raises(BadBundle):
                bring(other, bomb)

    assert in_child(work) == 0
    assert no_trace(other)


def announcing(tar: bytes, size: int, room: int) -> bytes:
    """The archive with that size announced for its first object, in the list and before it, and so many zeros in its place."""
    listed = relisted(tar, lambda document: set_in(document, "entries/0/files/1/size", size))
    with tarfile.open(fileobj=io.BytesIO(listed)) as archive:
        member = archive.getmembers()[2]
    return listed[: member.offset] + layout.header(member.name, size) + bytes(room)


def tiny_rows() -> bytes:
    """The list that makes most of 16 MiB, as far as decoding goes."""
    row = b'{"arch":"x","files":[{"name":"","sha256":"","size":1},{"name":"","sha256":"","size":1}],"host_arch":"x","key":"x","spec":0,"toolchain":0}'
    head, tail = b'{"entries":[', b'],"requires":[],"schema_version":1}\n'
    rows = b",".join([row] * ((layout.MAX_LISTING_BYTES - len(head) - len(tail)) // (len(row) + 1)))
    data = head + rows + tail
    return layout.header("bundle.json", len(data)) + data + layout.padding(len(data))


@pytest.mark.parametrize("bomb", ["object of 1 GiB", "objects of 64 MiB", "list of 16 MiB"])
def test_what_a_bundle_announces_costs_little_memory(bundle: bytes, other: Store, in_child: Callable[..., int], bomb: str) -> None:
    """A small file, sizes in order by its own account: refused at the price of the largest object there can be."""
    tar = unpacked(bundle)
    made = {
        "object of 1 GiB": lambda: announcing(tar, 1 << 30, 1 << 28),
        "objects of 64 MiB": lambda: announcing(tar, 64 << 20, 64 << 20) + tar[-1024:],
        "list of 16 MiB": tiny_rows,
    }[bomb]()
    small = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(made)
    assert len(small) < 100_000
    del made

    def work() -> None:
        import resource

        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(BadBundle):
            bring(other, small)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
        assert grown < 200, f"{grown} MiB"

    assert in_child(work) == 0
    assert no_trace(other)


def test_a_window_larger_than_a_writers_is_refused(bundle: bytes, other: Store) -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27, write_content_size=False)
    out = io.BytesIO()
    with zstandard.ZstdCompressor(compression_params=parameters).stream_writer(out, closefd=False) as stream:
        stream.write(unpacked(bundle))
    with pytest.raises(BadBundle, match="not a zstd stream of a bundle"):
        bring(other, out.getvalue())


def test_a_pin_that_does_not_fit(bundle: bytes, other: Store) -> None:
    with pytest.raises(BadBundle, match=r"has SHA-256 .*, --sha256 says 000"):
        bring(other, bundle, sha256="0" * 64)
    assert no_trace(other)
    assert bring(other, bundle, sha256=hashlib.sha256(bundle).hexdigest()).of("published")


# ---- crashes, locks, users


def test_kill_at_every_step_of_an_import(bundle: bytes, three: list[Entry], tmp_path: Path, in_child: Callable[..., int]) -> None:
    good, counts = {entry.key for entry in three}, set()
    for step in range(1, 400, 2):
        store = Store.open(str(tmp_path / f"node{step}"))

        def work(step: int = step, store: Store = store) -> None:
            test_crash.dies_at(step, after=bool(step % 4 == 1))
            bring(store, bundle)

        status = in_child(work)
        found = [examine(entry) for entry in store.entries()]
        assert {str(entry.status) for entry in found} <= {"ok", "no-manifest"}
        counts.add(sum(entry.status is Status.OK for entry in found))
        assert {outcome.outcome for outcome in bring(store, bundle).outcomes} <= {"published", "already there", "replaced"}
        assert {entry.key for entry in store.entries() if examine(entry).status is Status.OK} == good
        assert not Path(store.roots.layers[0].folder(), merge.SPOOL).exists()
        if status == 0:
            break
    else:
        pytest.fail("no import came to its end")
    assert counts == {0, 1, 2, 3}
    assert status != -signal.SIGKILL


def test_a_full_disk_leaves_a_valid_cache(bundle: bytes, other: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: str, data: bytes, mode: int) -> None:
        raise OSError(28, "No space left on device", path)

    with monkeypatch.context() as patched:
        patched.setattr(merge, "_write", full)
        with pytest.raises(CannotRun, match="No space left on device") as raised:
            bring(other, bundle)
    assert "mlactl cache prune" in (raised.value.hint or "")
    assert no_trace(other)
    assert len(bring(other, bundle).of("published")) == 3


@pytest.mark.parametrize(("at", "said"), [("checked", "nothing was imported"), ("published", "1 of 3 entries were imported, each of them whole")])
def test_ctrl_c_says_what_was_finished(bundle: bytes, other: Store, at: str, said: str) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(Interrupted, match=said):
        bring(other, bundle, watch=merge.Watch(**{at: stop}))
    assert len([entry for entry in other.entries() if examine(entry).status is Status.OK]) == int(at == "published")
    assert len(bring(other, bundle).outcomes) == 3


def test_an_entry_in_use_stops_no_other(bundle: bytes, three: list[Entry], store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins.flip_bit(three[0])
    stand_ins.flip_bit(three[1])
    with entry_lock(three[0].layer, three[0].key, exclusive=False, wait_s=1):
        outcomes = {outcome.manifest.key: outcome for outcome in bring(store, bundle).outcomes}
    assert outcomes[three[0].key].outcome == "failed"
    assert "is in use by" in outcomes[three[0].key].reason
    assert outcomes[three[1].key].outcome == "replaced"


def test_a_dry_run_foresees_an_entry_in_use(bundle: bytes, three: list[Entry], store: Store) -> None:
    stand_ins.flip_bit(three[0])
    stand_ins.flip_bit(three[1])
    locked = sorted(Path(three[0].layer.folder()).glob("*/*.lock"))
    with entry_lock(three[0].layer, three[0].key, exclusive=False, wait_s=1):
        foreseen = bring(store, bundle, dry_run=True).outcomes
        assert foreseen == bring(store, bundle, dry_run=True).outcomes
        done = bring(store, bundle).outcomes
    assert foreseen == done
    assert [outcome.outcome for outcome in done if outcome.manifest.key == three[0].key] == ["failed"]
    assert sorted(Path(three[0].layer.folder()).glob("*/*.lock")) == locked
    with entry_lock(three[0].layer, three[0].key, exclusive=True, wait_s=1):
        assert len(bring(store, bundle, dry_run=True).of("replaced")) == 1, "a publisher is done soon"


def release_when(said: list[str], ready: int) -> Callable[[str], None]:
    """Notes what is waited for and has the process at the other end of a pipe give its lock back."""

    def on_wait(text: str) -> None:
        said.append(text)
        os.write(ready, b"x")

    return on_wait


@pytest.mark.parametrize("command", ["import", "export"])
def test_who_holds_an_entry_that_is_waited_for_is_said(bundle: bytes, three: list[Entry], store: Store, command: str) -> None:
    entry = three[0]
    stand_ins.flip_bit(entry)
    (taken, take), (release, ready) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        with entry_lock(entry.layer, entry.key, exclusive=True, wait_s=1):
            os.write(take, b"x")
            os.read(release, 1)
        os._exit(0)
    os.read(taken, 1)
    said: list[str] = []
    if command == "import":
        outcomes = bring(store, bundle, watch=merge.Watch(waiting=release_when(said, ready))).outcomes
        assert {outcome.manifest.key: outcome.outcome for outcome in outcomes}[entry.key] == "replaced"
    else:
        with write.pack(store, [entry.key], on_wait=release_when(said, ready)) as packed:
            assert [item.key for item in packed.left_out] == [entry.key]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(said) == 1
    assert said[0].startswith(f"{locks.entry_lock_path(entry.layer, entry.key)} is still held by process {child} on ")
    for fd in (taken, take, release, ready):
        os.close(fd)


def test_a_private_root_gets_no_lock_files_from_an_import_and_a_shared_one_does(bundle: bytes, other: Store, tmp_path: Path) -> None:
    bring(other, bundle)
    shared = Store.open(str(tmp_path / "shared"))
    bring(shared, bundle, shared=True)
    assert [len(list(Path(store.roots.layers[0].folder()).glob("*/*.lock"))) for store in (other, shared)] == [0, 3]


def test_nobody_has_an_entrys_lock_while_an_import_publishes(bundle: bytes, three: list[Entry], other: Store, in_child: Callable[..., int]) -> None:
    """Another process that asks for one meanwhile gets it when the entries are all there, also when it would not wait long."""
    layer, asked = other.roots.layers[0], []
    key = max(entry.key for entry in three)

    def ask() -> None:
        if asked:
            return
        holder = locks.holder_of(layer, key)
        asked.append((holder.pid if holder else None, os.fork()))
        if asked[0][1] == 0:
            with entry_lock(layer, key, exclusive=True, wait_s=0.0):
                found = layer.path / "v1" / key[:2] / f"{key}.json"
                os._exit(0 if found.exists() else 3)

    bring(other, bundle, watch=merge.Watch(published=ask))
    pid, child = asked[0]
    assert pid == os.getpid()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_import_beside_a_reader_takes_each_entrys_lock(bundle: bytes, other: Store, publish: Publish) -> None:
    held = publish(tiny.spec(5), into=other)
    with entry_lock(held.layer, held.key, exclusive=False, wait_s=1):
        assert len(bring(other, bundle).of("published")) == 3
    assert len(list(Path(held.layer.folder()).glob("*/*.lock"))) == 4


def test_the_spool_of_a_killed_import_goes_and_nothing_else_in_its_place(bundle: bytes, other: Store, publish: Publish) -> None:
    publish(into=other)
    spool = Path(other.roots.layers[0].folder(), merge.SPOOL)
    spool.mkdir()
    (spool / "left").write_bytes(b"x")
    bring(other, bundle)
    assert not spool.exists()
    spool.symlink_to("/tmp")
    with pytest.raises(CannotRun, match="is a symbolic link, expected a folder"):
        bring(other, bundle)
    assert spool.is_symlink()


@users.as_root
def test_imported_to_a_shared_root_and_read_by_another_user(
    bundle: bytes, other: Store, reachable: None, in_child: Callable[..., int], tmp_path: Path
) -> None:
    bring(other, bundle, shared=True)
    root = other.roots.layers[0].path
    with entry_lock(other.roots.layers[0], inputs_for(SPEC, "sm_120a").key(), exclusive=False, wait_s=1):
        pass
    readers = Store.open(f":{root}")

    def work() -> None:
        found = readers.lookup(SPEC, "sm_120a")
        assert isinstance(found, Hit)
        with pytest.raises(CannotRun, match="every layer is read-only"):
            bring(readers, bundle)

    assert in_child(work, uid=users.NOBODY) == 0


def test_import_goes_to_the_writable_layer(bundle: bytes, store: Store, tmp_path: Path) -> None:
    layered = Store.open(f"{tmp_path / 'mine'}:{store.roots.layers[0].path}")
    assert {outcome.outcome for outcome in bring(layered, bundle).outcomes} == {"published"}
    assert len(list((tmp_path / "mine" / "v1").glob("*/*.so"))) == 3


# ---- packages


def test_packages_that_fit_and_the_commands_for_those_that_do_not() -> None:
    tools = toolchains.current()
    assert all(need.fits and need.installed for need in packages.needs(packages.required([tools])))
    older = stand_ins.older_toolchain()
    needs = packages.needs(packages.required([replace(older, flavour="cu12", tvm_ffi_abi="0.2")]))
    assert [(need.name, need.version, need.fits) for need in needs] == [
        ("apache-tvm-ffi", ">=0.2,<0.3", False),
        ("nvidia-cutlass-dsl-libs-cu12", "==4.7.0", False),
    ]
    assert packages.install_commands(needs) == (
        "pip install 'apache-tvm-ffi>=0.2,<0.3'",
        "pip install --no-deps nvidia-cutlass-dsl-libs-cu12==4.7.0",
    )


def test_the_floor_of_tvm_ffi_is_the_projects_own() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '"apache-tvm-ffi>=0.1.15.post2,<0.2"' in text
    assert packages.TVM_FFI_FLOORS["0.1"] == "0.1.15.post2"


@pytest.mark.parametrize("version", ["", "4.8.1; rm -rf /", "--index-url=http://evil", "4.8.1 evil"])
def test_a_version_that_is_none_never_becomes_a_command(store: Store, prebuilt: tiny.Prebuilt, version: str) -> None:
    tools = toolchains.current()
    odd = replace(tools, distributions=tuple((name, version) for name, _ in tools.distributions))
    entry = stand_ins.publish(store, prebuilt, SPEC, toolchain=odd)
    with write.pack(store, [entry.key]) as packed:
        assert packed.entries == ()
        assert "that a package can have" in packed.left_out[0].reason


def test_reading_needs_no_more_than_read(bundle: bytes) -> None:
    """A pipe hands out less than was asked for."""

    class Dribble:
        def __init__(self) -> None:
            self.file = io.BytesIO(bundle)

        def read(self, size: int) -> bytes:
            return self.file.read(min(size, 777))

    assert len(list(read.Bundle(Dribble()).entries())) == 3  # type: ignore[arg-type]
