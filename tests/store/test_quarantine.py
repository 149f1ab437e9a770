"""Setting entries aside and putting them back: one rename, under the lock, and never over what is not ours."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import stand_ins
import tiny
from users import ME, NOBODY, as_root

from mlactl.cache import locks, quarantine
from mlactl.cache.entry import read_entry
from mlactl.cache.key import inputs_for
from mlactl.cache.publish import compile_and_publish
from mlactl.cache.roots import Layer
from mlactl.cache.store import Entry, Hit, Miss, Status, Store
from mlactl.errors import CannotRun

Publish = Callable[..., Entry]


def status(store: Store) -> Status:
    return next(iter(store.entries())).status


def test_there_and_back(store: Store, publish: Publish) -> None:
    entry = publish()
    names = sorted(os.listdir(entry.object_path.parent))
    data = entry.object_path.read_bytes()
    quarantine.set_aside(entry)
    assert status(store) is Status.QUARANTINED
    missed = store.lookup(tiny.spec(), "sm_120a")
    assert isinstance(missed, Miss)
    assert "quarantined" in missed.reason
    assert entry.object_path.read_bytes() == data
    with pytest.raises(CannotRun, match="is not the entry that was looked at: it is quarantined"):
        quarantine.set_aside(entry)
    aside = store.entry(entry.key)
    quarantine.put_back(aside)
    assert sorted(os.listdir(entry.object_path.parent)) == names
    assert isinstance(store.lookup(tiny.spec(), "sm_120a"), Hit)
    with pytest.raises(CannotRun, match="is not quarantined: it is ok"):
        quarantine.put_back(aside)
    entry.manifest_path.unlink()
    entry.object_path.unlink()
    with pytest.raises(CannotRun, match="is not quarantined: it is gone"):
        quarantine.put_back(aside)


def test_an_entry_that_was_replaced_since_is_left(store: Store, publish: Publish) -> None:
    entry = publish()
    stand_ins.rewrite_manifest(entry, created="2027-01-01T00:00:00Z")
    with pytest.raises(CannotRun, match="another one by now"):
        quarantine.set_aside(entry)
    assert status(store) is Status.OK


def test_another_entry_than_the_acquitted_one_is_not_put_back(store: Store, publish: Publish) -> None:
    """Restoring judges for seconds; what was forgotten, compiled again and convicted meanwhile is another object."""
    entry = publish()
    quarantine.set_aside(entry)
    acquitted = store.entry(entry.key)
    quarantine.put_back(acquitted)
    stand_ins.rewrite_manifest(entry, created="2027-01-01T00:00:00Z")
    quarantine.set_aside(store.entry(entry.key))
    with pytest.raises(CannotRun, match="is not the entry that was looked at: it is another one by now"):
        quarantine.put_back(acquitted)
    assert status(store) is Status.QUARANTINED


def test_damaged_ones_are_set_aside_and_do_not_come_back(store: Store, publish: Publish) -> None:
    entry = publish()
    stand_ins.flip_bit(entry)
    quarantine.set_aside(entry)
    with pytest.raises(CannotRun, match="stays quarantined: its object is not intact: digest: SHA-256") as refused:
        quarantine.put_back(store.entry(entry.key))
    assert refused.value.hint == f"mlactl warmup --profile PROFILE compiles it again; mlactl cache rm {entry.key} forgets it"
    assert status(store) is Status.QUARANTINED


READER = """
import sys, tiny
from mlactl.cache import locks
from mlactl.cache.store import Store
store = Store.open(sys.argv[1])
lease = locks.acquire_entry(store.roots.layers[0], sys.argv[2], exclusive=sys.argv[3] == "writer", wait_s=0)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("kind", "said"), [("reader", "is in use by process"), ("writer", "is still held by process")])
def test_what_is_in_use_is_left_and_its_holder_named(store: Store, publish: Publish, kind: str, said: str) -> None:
    entry = publish()
    code = f"import sys; sys.path.insert(0, {str(tiny.HERE)!r})\n{READER}"
    command = [sys.executable, "-c", code, str(entry.root), entry.key, kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(locks.LockBusy, match=f"{said} {holder.pid}"):
            quarantine.set_aside(entry)
        assert status(store) is Status.OK
        holder.communicate("")
    quarantine.set_aside(entry)
    assert status(store) is Status.QUARANTINED


def test_a_read_only_layer_is_left(store: Store, publish: Publish) -> None:
    entry = publish()
    (below,) = [found for found in Store.open(f"{entry.root}/other:{entry.root}").entries() if found.key == entry.key]
    with pytest.raises(CannotRun, match=f"{entry.key} is in the read-only layer {entry.root}"):
        quarantine.set_aside(below)
    assert status(store) is Status.OK


def test_links_are_not_followed(store: Store, publish: Publish, tmp_path: Path) -> None:
    entry = publish()
    bucket = entry.object_path.parent
    bucket.rename(tmp_path / "elsewhere")
    bucket.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CannotRun, match="behind a link, which is never followed"):
        quarantine.set_aside(entry)
    assert (tmp_path / "elsewhere" / f"{entry.key}.json").exists()


def test_a_link_in_the_manifests_place_is_left(store: Store, publish: Publish, tmp_path: Path) -> None:
    entry = publish()
    entry.manifest_path.rename(tmp_path / "manifest")
    entry.manifest_path.symlink_to(tmp_path / "manifest")
    with pytest.raises(CannotRun, match="it is bad-manifest"):
        quarantine.set_aside(entry)
    assert entry.manifest_path.is_symlink()


@as_root
def test_another_owners_root_is_named_with_its_mode(publish: Publish, in_child: Callable[..., int], reachable: None) -> None:
    entry = publish(shared=True)

    def as_nobody() -> None:
        with pytest.raises(CannotRun) as refused:
            quarantine.set_aside(entry)
        assert f"owner {ME}, mode 0644" in refused.value.message or f"owner {ME}, mode 0755" in refused.value.message, refused.value.message

    assert in_child(as_nobody, uid=NOBODY) == 0
    assert entry.manifest_path.exists()


# ---- compiling a quarantined key


def test_the_object_that_was_set_aside_is_not_compiled_back(store: Store, publish: Publish, prebuilt: tiny.Prebuilt) -> None:
    """The same sources give the same code: publishing it again would undo the quarantine in silence."""
    entry = publish()
    quarantine.set_aside(entry)
    compiled: list[str] = []
    with pytest.raises(
        CannotRun, match=f"{entry.key} is quarantined, and this is the very object that was set aside: sha256 [0-9a-f]{{64}}"
    ) as refused:
        compile_and_publish(store, tiny.spec(), "sm_120a", compiler=prebuilt.compiler(compiled.append))
    assert len(compiled) == 1, "only the compiled object tells"
    assert refused.value.hint == f"mlactl cache show {entry.key} says why it was set aside; mlactl cache rm {entry.key} forgets it"
    assert status(store) is Status.QUARANTINED


def test_another_object_takes_the_place_of_what_was_set_aside(store: Store, publish: Publish, prebuilt: tiny.Prebuilt) -> None:
    """A mislabelled object was not made by this compiler: warmup builds the right one under the same key."""
    wrong = tiny.published(store, inputs_for(tiny.spec(), "sm_120a"), stand_ins.link(prebuilt.impostor.read_bytes()))
    quarantine.set_aside(wrong)
    made = compile_and_publish(store, tiny.spec(), "sm_120a", compiler=prebuilt.compiler())
    assert (made.compiled, made.entry.key, made.entry.status) == (True, wrong.key, Status.OK)
    assert made.entry.manifest is not None
    assert wrong.manifest is not None
    assert made.entry.manifest.object_sha256 != wrong.manifest.object_sha256
    assert sorted(path.suffix for path in made.entry.object_path.parent.iterdir()) == [".json", ".lock", ".so"]


def test_a_quarantine_that_cannot_be_read_stays(store: Store, publish: Publish, prebuilt: tiny.Prebuilt) -> None:
    entry = publish()
    quarantine.set_aside(entry)
    aside = entry.manifest_path.with_suffix(".quarantined")
    aside.write_bytes(b"?")
    with pytest.raises(CannotRun, match="nothing says which object was convicted"):
        compile_and_publish(store, tiny.spec(), "sm_120a", compiler=prebuilt.compiler())
    assert aside.read_bytes() == b"?"
    found = read_entry(entry.layer, entry.key)
    assert found is not None
    assert quarantine.in_place(found).status is Status.BAD_MANIFEST


def test_a_manifest_beside_the_quarantined_one_is_not_overwritten(store: Store, publish: Publish) -> None:
    entry = publish()
    text = entry.manifest_path.read_bytes()
    quarantine.set_aside(entry)
    entry.manifest_path.write_bytes(text)
    with pytest.raises(CannotRun, match="has a manifest in its place already"):
        quarantine.put_back(store.entry(entry.key))


def test_a_root_that_is_gone(publish: Publish, tmp_path: Path) -> None:
    entry = replace_layer(publish(), Layer(tmp_path / "absent", True))
    with pytest.raises(CannotRun, match="No such file or directory"):
        quarantine.set_aside(entry)


# ---- layers


@pytest.mark.parametrize("aside_in", ["above", "below"])
def test_an_object_set_aside_in_one_layer_answers_from_none(publish: Publish, prebuilt: tiny.Prebuilt, tmp_path: Path, aside_in: str) -> None:
    roots = {name: tmp_path / name for name in ("above", "below")}
    entries = {name: publish(into=Store.open(str(root))) for name, root in roots.items()}
    both = Store.open(f"{roots['above']}:{roots['below']}")
    assert isinstance(both.lookup(tiny.spec(), "sm_120a"), Hit)
    quarantine.set_aside(entries[aside_in])
    missed = both.lookup(tiny.spec(), "sm_120a")
    assert isinstance(missed, Miss)
    assert f"this very object is set aside in {roots[aside_in]}" in missed.reason
    assert [entry.status for entry in both.everywhere(entries["above"].key)] == [Status.QUARANTINED] * 2
    with pytest.raises(CannotRun, match="this is the very object that was set aside"):
        compile_and_publish(both, tiny.spec(), "sm_120a", compiler=prebuilt.compiler())


def test_another_object_of_the_key_in_another_layer_answers(publish: Publish, prebuilt: tiny.Prebuilt, tmp_path: Path) -> None:
    above, below = Store.open(str(tmp_path / "above")), Store.open(str(tmp_path / "below"))
    good = publish(into=below)
    wrong = tiny.published(above, inputs_for(tiny.spec(), "sm_120a"), stand_ins.link(prebuilt.impostor.read_bytes()))
    assert wrong.key == good.key
    quarantine.set_aside(wrong)
    both = Store.open(f"{tmp_path / 'above'}:{tmp_path / 'below'}")
    found = both.lookup(tiny.spec(), "sm_120a")
    assert isinstance(found, Hit)
    assert found.entry.root == tmp_path / "below"
    (tmp_path / "above" / "v1" / wrong.key[:2] / f"{wrong.key}.quarantined").write_bytes(b"?")
    missed = both.lookup(tiny.spec(), "sm_120a")
    assert isinstance(missed, Miss)
    assert "with a manifest that cannot be read, so nothing says which object was convicted" in missed.reason


def replace_layer(entry: Entry, layer: Layer) -> Entry:
    import msgspec

    return msgspec.structs.replace(entry, layer=replace(layer))
