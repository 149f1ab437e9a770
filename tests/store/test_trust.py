"""Loading an object runs its code: nothing that somebody else could have written is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from users import ME, NOBODY, as_root

from mlactl.cache.load import StoreSource
from mlactl.cache.publish import compile_and_publish
from mlactl.cache.store import Entry, Hit, Store
from mlactl.cache.trust import Untrusted
from mlactl.kernels.runtime import VerifiedObject

OTHER = 12_345


def fetch(store: Store) -> VerifiedObject | None:
    return StoreSource(store).fetch(tiny.spec(), "sm_120a")


PARTS: dict[str, Callable[[Entry], Path]] = {
    "object": lambda entry: entry.object_path,
    "manifest": lambda entry: entry.manifest_path or Path(),
    "bucket": lambda entry: entry.object_path.parent,
    "v1": lambda entry: entry.layer.path / "v1",
    "root": lambda entry: entry.layer.path,
    "ancestor": lambda entry: entry.layer.path.parent,
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("bit", [0o020, 0o002], ids=["group", "others"])
def test_what_others_may_write_is_not_loaded(store: Store, publish: Callable[..., Entry], part: str, bit: int) -> None:
    entry = publish()
    path = PARTS[part](entry)
    assert fetch(store) is not None
    path.chmod(path.stat().st_mode & 0o777 | bit)
    with pytest.raises(Untrusted) as raised:
        fetch(store)
    assert f"{path} is not trusted: owner {ME}, mode {path.stat().st_mode & 0o7777:04o}" in raised.value.message
    assert raised.value.exit_code == 2
    assert f"chmod go-w {path}" in (raised.value.hint or "")
    with pytest.raises(Untrusted):
        store.lookup(tiny.spec(), "sm_120a")


@as_root
@pytest.mark.parametrize("part", PARTS)
def test_another_owners_files_are_not_loaded(store: Store, publish: Callable[..., Entry], part: str) -> None:
    path = PARTS[part](publish())
    os.chown(path, OTHER, -1)
    with pytest.raises(Untrusted, match=rf"{path} is not trusted: owner uid {OTHER}, mode 0[67]00; expected it to be owned by root"):
        fetch(store)


@as_root
@pytest.mark.usefixtures("reachable")
@pytest.mark.parametrize("part", PARTS)
def test_roots_files_are_trusted_by_everybody_and_a_third_users_by_nobody(
    store: Store, publish: Callable[..., Entry], in_child: Callable[..., int], part: str
) -> None:
    entry = publish(shared=True)

    def loads() -> None:
        assert fetch(store) is not None

    def refuses() -> None:
        with pytest.raises(Untrusted, match=f"owner uid {OTHER}"):
            fetch(store)

    assert in_child(loads, uid=NOBODY) == 0
    os.chown(PARTS[part](entry), OTHER, -1)
    assert in_child(refuses, uid=NOBODY) == 0
    os.chown(PARTS[part](entry), NOBODY, -1)
    assert in_child(loads, uid=NOBODY) == 0


def test_a_sticky_folder_above_is_fine(store: Store, publish: Callable[..., Entry]) -> None:
    publish()
    store.roots.layers[0].path.parent.chmod(0o1777)
    assert fetch(store) is not None
    store.roots.layers[0].path.chmod(0o1777)
    with pytest.raises(Untrusted, match="mode 1777"):
        fetch(store)


def test_a_root_reached_through_a_link_is_judged_by_every_step(store: Store, publish: Callable[..., Entry], tmp_path: Path) -> None:
    publish()
    (tmp_path / "hop").mkdir(0o755)
    (tmp_path / "hop" / "link").symlink_to("../cache")
    linked = Store.open(str(tmp_path / "hop" / "link"))
    assert fetch(linked) is not None
    (tmp_path / "hop").chmod(0o777)
    with pytest.raises(Untrusted, match="hop is not trusted"):
        fetch(linked)
    (tmp_path / "hop").chmod(0o755)
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(Untrusted, match="cache is not trusted"):
        fetch(linked)


def test_a_link_in_a_circle_is_no_endless_walk(tmp_path: Path) -> None:
    from mlactl.cache.trust import check_folders

    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(Untrusted, match="too many symbolic links"):
        check_folders(str(tmp_path / "a" / "v1" / "00"), str(tmp_path / "a"))


def test_a_trusted_root_is_trusted_all_the_same(store: Store, publish: Callable[..., Entry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = publish()
    for find in PARTS.values():
        path = find(entry)
        path.chmod(path.stat().st_mode & 0o777 | 0o022)
    monkeypatch.setenv("MLACTL_TRUST_ROOT", f"{tmp_path}/cach:{tmp_path}/cache/v1:relative/cache")
    with pytest.raises(Untrusted):
        fetch(store)
    monkeypatch.setenv("MLACTL_TRUST_ROOT", f"/somewhere/else:{tmp_path}/cache")
    assert fetch(store) is not None
    monkeypatch.setenv("MLACTL_TRUST_ROOT", str(tmp_path))
    assert fetch(store) is not None


def test_a_trusted_root_still_has_its_objects_checked(
    store: Store, publish: Callable[..., Entry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = publish()
    monkeypatch.setenv("MLACTL_TRUST_ROOT", str(tmp_path))
    entry.object_path.write_bytes(entry.object_path.read_bytes()[:-1] + b"\1")
    assert fetch(store) is None


def test_nothing_is_published_where_it_would_not_be_loaded(store: Store, publish: Callable[..., Entry], prebuilt: tiny.Prebuilt) -> None:
    publish()
    store.roots.layers[0].path.chmod(0o770)
    compiled: list[str] = []
    with pytest.raises(Untrusted, match="mode 0770"):
        compile_and_publish(store, tiny.spec(3), "sm_120a", compiler=prebuilt.compiler(compiled.append))
    assert compiled == []
    assert len(list(store.entries())) == 1


def test_another_layer_answers_for_an_untrusted_one(tmp_path: Path, publish: Callable[..., Entry]) -> None:
    publish(into=Store.open(str(tmp_path / "bad")))
    publish(into=Store.open(str(tmp_path / "good")))
    (tmp_path / "bad").chmod(0o777)
    both = Store.open(f"{tmp_path}/bad:{tmp_path}/good")
    found = both.lookup(tiny.spec(), "sm_120a")
    assert isinstance(found, Hit)
    assert found.entry.layer.path == tmp_path / "good"


def test_links_and_fifos_in_an_entrys_place_are_neither_followed_nor_waited_for(store: Store, publish: Callable[..., Entry], tmp_path: Path) -> None:
    entry = publish()
    outside = tmp_path / "outside.so"
    entry.object_path.rename(outside)
    entry.object_path.symlink_to(outside)
    assert fetch(store) is None
    assert [found.status for found in store.entries()] == ["no-object"]
    entry.object_path.unlink()
    os.mkfifo(entry.object_path, 0o600)
    assert fetch(store) is None
    assert [found.status for found in store.entries()] == ["no-object"]
    entry.object_path.unlink()
    outside.rename(entry.object_path)
    assert fetch(store) is not None
    assert entry.manifest_path is not None
    entry.manifest_path.rename(tmp_path / "outside.json")
    entry.manifest_path.symlink_to(tmp_path / "outside.json")
    assert [(found.status, found.detail) for found in store.entries()] == [
        ("bad-manifest", "not a regular file but a symbolic link, which is never followed")
    ]
    assert fetch(store) is None
