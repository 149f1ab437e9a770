"""What a listing and a full check say of a b12x root: every status, every era, and files that are nobody's business."""

import fcntl
import hashlib
import json
import os
from dataclasses import replace

import pytest
from b12x_files import EXPLICIT, FACTS, KERNEL, PLAIN, SCHEMAS, SECRET, V7, Made, Root, object_file, spec_json, tensor
from hypothesis import given
from hypothesis import strategies as st

from mlactl.cache import adapters, listing
from mlactl.cache.adapter import RootKind
from mlactl.cache.entry import Status
from mlactl.cache.foreign.b12x import manifest as manifests
from mlactl.cache.foreign.b12x import roots
from mlactl.cache.foreign.b12x.manifest import Rejected
from mlactl.errors import NotFound, UsageError


def only(cache):
    (entry,) = cache.entries()
    return entry


def status_of(cache):
    entry = only(cache)
    return entry.status, entry.detail


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("tag", [*EXPLICIT, *PLAIN])
def test_every_tag_and_schema_is_listed_and_verified(root, cache, tag, schema):
    made = Made(tag=tag, schema=schema, package="sparkinfer" if "sparkinfer" in schema else "b12x")
    root.add(made)
    entry = only(cache)
    assert (entry.key, entry.status, entry.detail) == (made.key, Status.OK, "")
    assert entry.manifest.spec.kernel_id == (KERNEL if tag in EXPLICIT else "b12x.attention.dense_mla._forward.Forward")
    with_device = [*EXPLICIT[3:], *PLAIN[2:]]
    assert entry.manifest.arch == ("sm_120a" if tag in with_device else "")
    assert [(found.status, found.detail) for found in cache.verify([entry])] == [(Status.OK, "")]


def test_a_row_has_the_shape_of_our_own(root, cache):
    key = root.add()
    row = cache.row(only(cache))
    written = listing.iso_time(root.file(key, "o").stat().st_mtime)
    assert row == {
        "key": key,
        "spec": {"kernel_id": KERNEL, "version": 4, "facts": dict(FACTS)},
        "status": "ok",
        "arch": "sm_120a",
        "object_bytes": len(Made().object),
        "created": None,
        "last_used": None,
        "root_kind": "b12x",
        "cache_format": V7,
        "written": written,
    }


def damaged(root, key, **changed):
    path = root.file(key, "json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


OTHER = Made(version=5)
FOREIGN_DEVICE = [*json.loads(json.dumps(Made().payload))[:4], ["cuda", [9, 0], 132], 0]


def edit(**changed):
    return lambda root, key: damaged(root, key, **changed)


def cut(suffix, size):
    return lambda root, key: os.truncate(root.file(key, suffix), size)


def write(text):
    return lambda root, key: root.file(key, "json").write_text(text)


def swap(suffix, make):
    def damage(root, key):
        root.file(key, suffix).unlink()
        make(root.file(key, suffix))

    return damage


DAMAGE = {
    "object gone": (lambda root, key: root.file(key, "o").unlink(), "no-object", "a manifest without its object"),
    "manifest gone": (lambda root, key: root.file(key, "json").unlink(), "no-manifest", "1.5.1 treats it as a miss"),
    "object cut": (cut("o", 100), "size", f"100 bytes, expected {len(Made().object)}"),
    "manifest cut": (cut("json", 500), "bad-manifest", "not a manifest"),
    "manifest empty": (cut("json", 0), "bad-manifest", "not a manifest"),
    "no object in JSON": (write("[1]"), "bad-manifest", "not a manifest"),
    "unknown schema": (edit(schema="b12x._lib.compile_manifest.v4"), "schema", "unknown schema 'b12x._lib.compile_manifest.v4'"),
    "new schema, other fields": (write('{"schema": "b12x.v9"}'), "schema", "unknown schema 'b12x.v9'"),
    "unknown tag": (edit(cache_format="b12x_cute_compile_cache_v9"), "schema", "unknown cache_format"),
    "another tag": (edit(cache_format=EXPLICIT[-2]), "bad-manifest", "cache_format is not the tag"),
    "payload edited": (edit(cache_payload_repr=OTHER.text), "key", f"is {OTHER.key}, expected the key"),
    "manifest of another": (write(json.dumps(OTHER.manifest())), "bad-manifest", f"it is the manifest of '{OTHER.key}'"),
    "facts edited": (edit(compile_spec_json=spec_json(version=18)), "bad-manifest", "compile_spec_json is not the one"),
    "device edited": (edit(cache_payload=FOREIGN_DEVICE), "bad-manifest", "the device in cache_payload is not"),
    "no digest": (edit(object_sha256="ab"), "bad-manifest", "object_sha256 is no digest"),
    "size of another type": (edit(object_bytes="5"), "bad-manifest", "object_bytes"),
    "a folder for an object": (swap("o", lambda path: path.mkdir()), "no-object", "not a regular file but a directory"),
    "a pipe for an object": (swap("o", os.mkfifo), "no-object", "a FIFO"),
    "a pipe for a manifest": (swap("json", os.mkfifo), "bad-manifest", "a FIFO"),
    "a link for a manifest": (swap("json", lambda path: path.symlink_to("/dev/zero")), "bad-manifest", "symbolic link"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_that_a_listing_sees(root, cache, name):
    damage, status, said = DAMAGE[name]
    key = root.add()
    damage(root, key)
    found, detail = status_of(cache)
    assert (found, said in detail) == (status, True), detail
    assert cache.verify(cache.entries())[0].status == status
    assert SECRET not in detail


def rewritten(root, key, data):
    root.file(key, "o").write_bytes(data)
    damaged(root, key, object_bytes=len(data), object_sha256=hashlib.sha256(data).hexdigest())


def rebuilt(make):
    return lambda root, key: rewritten(root, key, make(key))


def flipped(root, key):
    data = Made().object
    root.file(key, "o").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


DEEP = {
    "a bit": (flipped, "digest", "SHA-256"),
    "another key's object": (rebuilt(lambda key: OTHER.object), "symbol", f"exports b12x_cute_{OTHER.key}, expected b12x_cute_"),
    "another arch": (rebuilt(lambda key: object_file(f"b12x_cute_{key}", "sm_121a")), "arch", "for sm_121a, expected sm_120a"),
    "no ELF": (rebuilt(lambda key: b"not an object"), "symbol", "no ELF"),
    "no cubin": (rebuilt(lambda key: b"\x7fELF" + Made().object[4:].replace(b"\x7fELF", b"\0ELF")), "arch", "no device ELF"),
    "kernel id edited": (edit(kernel_id="attention.mla.sm120.decode"), "bad-manifest", "kernel_id is not the one"),
    "version edited": (edit(compile_spec_version=53), "bad-manifest", "compile_spec_version is not the one"),
}


@pytest.mark.parametrize("name", DEEP)
def test_damage_that_only_a_full_check_sees(root, cache, name):
    damage, status, said = DEEP[name]
    key = root.add()
    damage(root, key)
    assert status_of(cache)[0] == "ok"
    (checked,) = cache.verify(cache.entries())
    assert (checked.status, said in checked.detail) == (status, True), checked.detail


def test_a_spec_that_only_looks_hashed_is_found_out(root, cache):
    """A listing looks for the spec's spelling in the hashed text; a forged one can hide in another field of it."""
    forged = spec_json("attention.mla.sm120.decode", 53, [["latent_scale_identity", 0]])
    made = Made(options=(forged,))
    root.add(made, compile_spec_json=forged, kernel_id=None, compile_spec_version=None)
    assert only(cache).manifest.spec.version == 53
    (checked,) = cache.verify(cache.entries())
    assert (checked.status, checked.detail) == ("bad-manifest", "compile_spec_json is not the one that the key was made from")


def test_a_bare_object_of_the_oldest_era(root, cache):
    made = Made(tag=PLAIN[0], package="sparkinfer")
    root.add(made, manifest=False, lock=False)
    entry = only(cache)
    assert (entry.status, entry.manifest, entry.object_bytes) == ("no-manifest", None, len(made.object))
    found = cache.describe(entry)
    assert (found.symbols, found.object_arch, found.manifest) == ((f"sparkinfer_cute_{made.key}",), "sm_120a", None)


RESIDUE = ["{key}.tmp", ".{key}.o.k3_x9a.tmp", ".{key}.json.abcdefgh.tmp", ".peer-0-{key}", ".peer-17", "._stage_0a1b2c"]


@pytest.mark.parametrize("pattern", RESIDUE)
def test_residue_of_every_kind(root, cache, pattern):
    key = Made().key
    name = pattern.format(key=key)
    (root.path / key[:2]).mkdir()
    (root.path / key[:2] / name).write_bytes(b"half")
    entry = only(cache)
    assert (entry.key, entry.status, entry.residue, entry.object_bytes) == (key if "{key}" in pattern else name, "temp", name, 4)
    assert entry.detail == "left by a writer that did not finish"
    assert entry.object_path.read_bytes() == b"half"


def test_staged_copies_beside_the_buckets(root, cache):
    (root.path / "._stage_ab").write_bytes(b"x")
    (root.path / "notes.txt").write_bytes(b"x")
    entry = only(cache)
    assert (entry.residue, entry.object_path) == ("._stage_ab", root.path / "._stage_ab")


def test_what_is_not_the_formats_is_neither_listed_nor_told(root, cache):
    key = root.add()
    bucket = root.path / key[:2]
    for name in (
        "README",
        f"{key}.so",
        f"{key}.o.bak",
        "ff" * 32 + ".o" if key[:2] != "ff" else "00" * 32 + ".o",
        f"{key.upper()}.o",
        f"{key}.o.tmp",
    ):
        (bucket / name).write_bytes(b"x")
    for name in ("g0", "ABC", "abc", "AB"):
        (root.path / name).mkdir(exist_ok=True)
        (root.path / name / f"{name[:2].lower()}{'0' * 62}.o").write_bytes(b"x")
    root.prepare(key)
    told = []
    assert [entry.key for entry in cache.entries(on_problem=told.append)] == [key]
    assert told == []


def test_a_link_for_a_bucket_is_not_followed(root, cache, tmp_path):
    key = root.add()
    (root.path / key[:2]).rename(tmp_path / "elsewhere")
    (root.path / key[:2]).symlink_to(tmp_path / "elsewhere")
    told = []
    assert cache.entries(on_problem=told.append) == []
    assert told == [f"{root.path / key[:2]} is a symbolic link, which is never followed below the root"]


@pytest.mark.parametrize("state", ["nothing", "object alone", "temporary"])
def test_a_held_lock_is_told_with_its_process(root, cache, state):
    """b12x holds the lock of a key while it compiles it; what is half there then is no damage."""
    key = root.add(manifest=False, obj=state == "object alone")
    if state == "temporary":
        (root.path / key[:2] / f".{key}.o.x.tmp").write_bytes(b"half")
    with root.file(key, "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = cache.entries()
        assert {entry.status for entry in found} == {"locked"}
        assert all(f"{root.file(key, 'lock')} is held by process {os.getpid()}" in entry.detail for entry in found)
        assert [entry.status for entry in cache.verify(found)] == ["locked"] * len(found)
    assert {entry.status for entry in cache.entries()} == {"nothing": set(), "object alone": {"no-manifest"}, "temporary": {"temp"}}[state]


def test_a_good_entry_stays_ok_while_its_lock_is_held(root, cache):
    """Publishers of older releases take the lock before they look whether there is anything to do."""
    key = root.add()
    with root.file(key, "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert status_of(cache) == ("ok", "")


def test_a_payload_with_objects_in_it_is_read_from_its_copy(root, cache):
    """Tags without an explicit spec key by `repr` of whatever was passed, which nothing can read back."""

    class Stream:
        def __repr__(self):
            return "<cuda stream at 0x7f>"

    class WithStream(Made):
        @property
        def text(self):
            return repr((*self.payload[:5], Stream(), *self.payload[6:]))

    made = WithStream(tag=PLAIN[3])
    root.add(made)
    assert status_of(cache) == ("ok", "")
    assert [entry.status for entry in cache.verify(cache.entries())] == ["ok"]


def test_keys_and_starts_of_keys(root, cache):
    first, second = root.add(), root.add(OTHER)
    assert cache.entry(first[:10].upper()).key == first
    with pytest.raises(NotFound, match="no entry zz"):
        cache.entry("zz")
    with pytest.raises(NotFound):
        cache.entry("../" + first)
    with pytest.raises(UsageError, match="empty KEY"):
        cache.entry("")
    twin = Root(root.path)
    twin.file(second, "o").with_name(f"{second[:-1]}{'0' if second[-1] != '0' else '1'}.o").write_bytes(b"x")
    with pytest.raises(UsageError, match="fits 2 keys"):
        cache.entry(second[:20])


def test_arches_by_option_variable_and_device(root, cache):
    for made in (Made(options=("gpu-arch sm_121a",)), Made(environment=(("CUTE_DSL_ARCH", "sm_100a"),)), Made(device=("device_uuid", "GPU-1"))):
        root.add(made)
    assert sorted(entry.manifest.arch for entry in cache.entries()) == ["", "sm_100a", "sm_121a"]


# ---- arbitrary manifests


@given(st.binary(max_size=2000))
def test_no_bytes_are_a_manifest_by_chance(data):
    with pytest.raises(Rejected):
        manifests.parse(data, "ab" * 32)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
FIELDS = sorted(Made().manifest())


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1))
def test_a_manifest_with_fields_of_anything_is_refused_or_says_the_same(changed):
    made = Made()
    data = json.dumps({**made.manifest(), **changed}).encode()
    try:
        found = manifests.parse(data, made.key)
        document = manifests.read_document(data)
        manifests.check(found, document)
    except Rejected:
        return
    assert (found.spec.kernel_id, found.spec.version, found.spec.as_json()["facts"]) == (made.kernel, made.version, dict(FACTS))
    assert SECRET not in json.dumps(manifests.public(document, show_secrets=False))
    manifests.dynamic_smem(document.raw)


@given(st.text(max_size=300))
def test_a_payload_of_any_text_under_its_own_key_is_never_ok(text):
    key = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    made = Made()
    data = json.dumps({**made.manifest(), "cache_key": key, "cache_payload_repr": text}).encode()
    with pytest.raises(Rejected):
        manifests.parse(data, key)


# ---- which root


def test_where_each_era_keeps_its_cache():
    home = {"HOME": "/home/ann"}
    found = roots.candidates(home)
    assert [str(candidate.path) for candidate in found] == [
        "/home/ann/.cache/b12x/compile",
        "/home/ann/.cache/sparkinfer/compile",
        "/home/ann/.cache/sparkinfer/cute_compile",
        "/home/ann/.cache/b12x/cute_compile",
    ]
    assert {candidate.variable for candidate in found} == {"HOME"}
    xdg = roots.candidates({**home, "XDG_CACHE_HOME": "/x"})
    assert [(str(candidate.path), candidate.variable) for candidate in xdg] == [
        (f"/x/{below}", "XDG_CACHE_HOME") for below in ("b12x/compile", "sparkinfer/compile", "sparkinfer/cute_compile", "b12x/cute_compile")
    ]
    dsl = roots.candidates({**home, "XDG_CACHE_HOME": "/x", "CUTE_DSL_CACHE_DIR": "/d"})
    assert [str(candidate.path) for candidate in dsl] == [
        "/x/b12x/compile",
        "/x/sparkinfer/compile",
        "/d/sparkinfer_object_cache",
        "/d/b12x_object_cache",
    ]
    own = {f"{name}_CACHE_DIR": f"/{name}" for name in ("B12X_COMPILE", "SPARKINFER_COMPILE", "SPARKINFER_CUTE_COMPILE", "B12X_CUTE_COMPILE")}
    variables = roots.candidates({**home, "XDG_CACHE_HOME": "/x", "CUTE_DSL_CACHE_DIR": "/d", **own})
    assert [(str(candidate.path), candidate.variable) for candidate in variables] == [(f"/{name.removesuffix('_CACHE_DIR')}", name) for name in own]


def test_as_those_releases_do_an_empty_variable_is_unset_and_a_relative_one_starts_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = roots.candidates({"HOME": "/h", "B12X_COMPILE_CACHE_DIR": "", "SPARKINFER_COMPILE_CACHE_DIR": "rel/~x"})
    assert [str(candidate.path) for candidate in found][:2] == ["/h/.cache/b12x/compile", f"{tmp_path}/rel/~x"]
    one = roots.candidates({"B12X_COMPILE_CACHE_DIR": "/same", "SPARKINFER_COMPILE_CACHE_DIR": "/same", "XDG_CACHE_HOME": "/x"})
    assert [(str(candidate.path), candidate.era) for candidate in one][:1] == [("/same", "b12x 1.1 to 1.5.1")]
    assert len(one) == 3


def test_a_root_is_told_by_what_is_in_it(root, tmp_path):
    home = {"HOME": str(tmp_path)}
    assert adapters.detect(root.path, home) is RootKind.MLACTL
    assert adapters.detect(tmp_path / "absent", home) is RootKind.MLACTL
    assert adapters.detect(tmp_path / ".cache/b12x/compile", home) is RootKind.B12X
    (root.path / "ab").mkdir()
    with pytest.raises(UsageError, match="is no compile cache: found ab, expected v1/"):
        adapters.detect(root.path, home)
    (root.path / "ab" / f"{'ab' * 32}.lock").touch()
    assert adapters.detect(root.path, home) is RootKind.B12X
    (root.path / "v1").mkdir()
    with pytest.raises(UsageError, match="holds both an mlactl cache") as caught:
        adapters.detect(root.path, home)
    assert "--root-kind" in caught.value.hint


@pytest.mark.parametrize("name", [f"{'ab' * 32}.o", f"{'ab' * 32}.json", f"{'ab' * 32}.tmp", ".peer-1", f"{'ab' * 32}.o.quarantined"])
def test_one_file_of_the_format_is_enough(root, name):
    (root.path / "ab").mkdir()
    (root.path / "ab" / name).touch()
    assert adapters.detect(root.path, {}) is RootKind.B12X


def test_preparation_files_alone_make_it_a_b12x_root(root):
    root.prepare("ab" * 32)
    assert adapters.detect(root.path, {}) is RootKind.B12X


def test_opening_by_kind(root, tmp_path, monkeypatch):
    for name in ("B12X_COMPILE_CACHE_DIR", "CUTE_DSL_CACHE_DIR", "XDG_CACHE_HOME", "MLACTL_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    root.add()
    assert adapters.open_cache(str(root.path)).kind is RootKind.B12X
    assert adapters.open_cache(None).paths == (tmp_path / "home/.cache/mlactl",)
    none = adapters.open_cache(None, "b12x")
    assert none.paths == (tmp_path / "home/.cache/b12x/compile",)
    assert "no b12x cache here yet, looked for" in none.remarks[0]
    older = tmp_path / "home/.cache/b12x/cute_compile"
    older.mkdir(parents=True)
    assert adapters.open_cache(None, "b12x").paths == (older,)
    monkeypatch.setenv("B12X_COMPILE_CACHE_DIR", str(root.path))
    newest = adapters.open_cache(None, "b12x")
    assert newest.paths == (root.path,)
    assert newest.remarks == (
        f"{root.path} is looked at (b12x 1.1 to 1.5.1, by B12X_COMPILE_CACHE_DIR)",
        f"{older} is there too (b12x before 1.1, by HOME): --cache-dir {older} looks at it",
    )
    with pytest.raises(UsageError, match="one folder, found a list of 2"):
        adapters.open_cache(f"{root.path}:{older}", "b12x")
    with pytest.raises(UsageError, match="'c3po' is not one of mlactl, b12x, auto"):
        adapters.open_cache(None, "c3po")


def test_last_use_is_the_access_time_where_the_filesystem_keeps_it(root, cache):
    key = root.add()
    os.utime(root.file(key, "o"), (2_000_000_000, 1_900_000_000))
    cache._uses = True
    assert only(cache).last_used == 2_000_000_000
    cache.verify(cache.entries())
    cache.describe(only(cache))
    assert root.file(key, "o").stat().st_atime == 2_000_000_000
    os.utime(root.file(key, "o"), (1_900_000_000, 1_900_000_000))
    assert only(cache).last_used is None
    os.utime(root.file(key, "o"), (2_000_000_000, 1_900_000_000))
    cache._uses = False
    assert only(cache).last_used is None


# ---- why


def explained(cache, key, **options):
    return cache.explain(cache.entry(key), **options)


@pytest.mark.parametrize(
    ("other", "fields", "note"),
    [
        (Made(environment=(*Made().environment, ("B12X_DEBUG", SECRET))), ["environment.B12X_DEBUG"], "every variable"),
        (Made(environment=(("CC", ""), ("CUDA_HOME", "/usr"), ("CUTE_DSL_ARCH", ""))), ["environment.CUDA_HOME"], "every variable"),
        (Made(facts=(*FACTS[:3], ("q", tensor("q", 3)))), ["facts.q.ordinal"], "the CUDA ordinal"),
        (Made(device=("device_uuid", "GPU-7")), ["device.capability", "device.sm_count", "device.uuid"], "the card's UUID"),
        (Made(device=("cuda", (12, 0), 170)), ["device.sm_count"], "another number of SMs"),
        (Made(fingerprint="0b" * 32), ["fingerprint"], "another release of the package"),
        (Made(toolchain=(*Made().toolchain[:3], ("cutlass_dsl", "4.8.1"), Made().toolchain[4])), ["toolchain.cutlass_dsl"], "another compiler"),
        (Made(options=("opt-level=2", "enable-assertions=false")), ["options"], None),
        (Made(version=5), ["version"], None),
        (Made(facts=(*FACTS, ("latent_scale_identity", 1))), ["facts.latent_scale_identity"], None),
        (Made(tag=EXPLICIT[3]), ["format"], "different eras"),
    ],
    ids=["variable", "value", "ordinal", "uuid", "sms", "release", "toolchain", "options", "version", "fact", "era"],
)  # fmt: skip
def test_the_field_that_forks_two_entries_is_named(root, cache, other, fields, note):
    key, sibling = root.add(), root.add(other)
    found = explained(cache, key)
    assert (found.sibling.key, [fork.field for fork in found.forks]) == (sibling, fields)
    assert note is None or any(note in text for text in found.notes)
    assert SECRET not in repr((found.built_from, found.forks, found.notes))
    assert SECRET in repr(explained(cache, key, show_secrets=True).built_from)


def test_two_hidden_values_are_told_apart_without_telling_them(root, cache):
    key = root.add()
    root.add(replace(Made(), environment=(("CC", ""), ("CUDA_HOME", "/usr"), ("CUTE_DSL_ARCH", ""))))
    (fork,) = explained(cache, key).forks
    assert (fork.entry, fork.sibling) == ("hidden, --show-secrets shows it", "another value, hidden, --show-secrets shows it")
    (fork,) = explained(cache, key, show_secrets=True).forks
    assert (fork.entry, fork.sibling) == (SECRET, "/usr")


def test_the_nearest_sibling_has_the_same_semantic_key_then_the_same_facts(root, cache):
    key = root.add()
    root.add(Made(version=5))
    assert explained(cache, key).relation == "same kernel id"
    facts = root.add(Made(device=("cuda", (12, 0), 170)))
    assert (explained(cache, key).sibling.key, explained(cache, key).relation) == (facts, "same kernel id and facts")
    same = root.add(Made(fingerprint="0b" * 32, toolchain=(("torch", "2.8.0"),)))
    assert (explained(cache, key).sibling.key, explained(cache, key).relation) == (same, "same semantic key")


def test_an_entry_without_a_sibling_or_a_manifest(root, cache):
    key = root.add()
    assert explained(cache, key).notes == ("no other entry of this kernel to compare with",)
    bare = root.add(OTHER, manifest=False)
    assert explained(cache, bare).sibling is None
    assert "1.5.1 treats it as a miss" in explained(cache, bare).notes[0]
