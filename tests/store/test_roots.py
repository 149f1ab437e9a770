"""Where the cache lives, who may write there, and what a layered cache answers."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from users import NOBODY, as_root

from mlactl.cache import roots as roots_module
from mlactl.cache.publish import compile_and_publish, require_writable
from mlactl.cache.roots import Layer, Roots, resolve, warnings
from mlactl.cache.store import Entry, Hit, Miss, Status, Store
from mlactl.errors import CannotRun, NotFound, UsageError


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# ---- which folders


@pytest.mark.parametrize(
    ("cache_dir", "environ", "expected"),
    [
        (None, {"HOME": "/h"}, ["/h/.cache/mlactl"]),
        (None, {"HOME": "/h", "XDG_CACHE_HOME": "/x"}, ["/x/mlactl"]),
        (None, {"HOME": "/h", "XDG_CACHE_HOME": "relative"}, ["/h/.cache/mlactl"]),
        (None, {"HOME": "/h", "XDG_CACHE_HOME": "/x", "MLACTL_CACHE_DIR": "/rw"}, ["/rw"]),
        (None, {"HOME": "/h", "MLACTL_CACHE_DIR": ""}, ["/h/.cache/mlactl"]),
        (None, {"MLACTL_CACHE_DIR": "/rw:/ro1:/ro2"}, ["/rw", "/ro1", "/ro2"]),
        ("/given", {"MLACTL_CACHE_DIR": "/rw"}, ["/given"]),
        ("/given:/ro", {}, ["/given", "/ro"]),
    ],
)
def test_the_root_comes_from_the_option_then_the_environment_then_home(cache_dir: str | None, environ: dict[str, str], expected: list[str]) -> None:
    found = resolve(cache_dir, environ)
    assert [str(layer.path) for layer in found.layers] == expected
    assert [layer.writable for layer in found.layers] == [True] + [False] * (len(expected) - 1)
    assert found.writable == found.layers[0]


def test_a_list_that_starts_with_nothing_has_no_writable_layer() -> None:
    found = resolve(":/ro", {})
    assert found == Roots((Layer(Path("/ro"), False),))
    assert found.writable is None


def test_relative_paths_and_tildes_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert [layer.path for layer in resolve("here/../cache:~/ro").layers] == [tmp_path / "cache", Path("/home/somebody/ro")]


def test_a_list_without_a_path_is_refused() -> None:
    with pytest.raises(UsageError, match="names no path"):
        resolve("::", {})


def test_an_empty_cache_dir_option_is_refused() -> None:
    """`--cache-dir "$UNSET"` once meant the default root: rm and prune then worked on a cache nobody had named."""
    with pytest.raises(UsageError, match="cache directory list '' names no path"):
        resolve("", {"HOME": "/h", "MLACTL_CACHE_DIR": "/rw"})


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, "HOME is not set and uid 54321 is not in the user database"),
        ({"HOME": ""}, "HOME is not set and uid 54321 is not in the user database"),
        ({"HOME": "h/me"}, "HOME is 'h/me', expected an absolute path"),
        ({"HOME": "h/me", "XDG_CACHE_HOME": "x"}, "HOME is 'h/me', expected an absolute path"),
    ],
)
def test_no_home_folder_is_an_error_that_names_the_way_out(environ: dict[str, str], found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's uid without a name ended in an internal error, and a relative HOME put the cache into the working directory."""
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    for cache_dir in (None, "~/cache"):
        with pytest.raises(CannotRun) as raised:
            resolve(cache_dir, environ)
        assert raised.value.message == f"no home folder to keep the cache in: {found}"
        assert raised.value.hint == "name a root: --cache-dir DIR, or MLACTL_CACHE_DIR=DIR"
    assert resolve("/given", environ).layers == (Layer(Path("/given"), True),)


def test_without_home_the_user_database_says_where_it_is() -> None:
    expected = Path(pwd.getpwuid(os.getuid()).pw_dir, ".cache", "mlactl")
    assert resolve(None, {}).layers == (Layer(expected, True),)


def test_a_network_filesystem_gets_a_warning(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "22 1 0:20 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "30 22 0:40 / /data rw,relatime shared:2 - nfs4 server:/data rw\n"
        "31 22 0:41 / /data/local rw,relatime - xfs /dev/sdb rw\n"
        "32 22 0:42 / /with\\040space rw,relatime - fuse.sshfs host:/ rw\n"
    )
    roots = Roots(
        (Layer(Path("/data/cache"), True), Layer(Path("/data/local/cache"), False), Layer(Path("/with space/x"), False), Layer(Path("/datax"), False))
    )
    found = warnings(roots, table)
    assert [line.split(" is on")[0] for line in found] == ["/data/cache", "/with space/x"]
    assert "nfs4" in found[0]
    assert "MLACTL_CACHE_DIR" in found[0]
    assert roots_module.filesystem(Path("/data/local/cache/v1"), table) == "xfs"
    assert warnings(roots, tmp_path / "missing") == []


def test_a_shared_root_below_a_private_folder_gets_a_warning(tmp_path: Path) -> None:
    """`warmup --shared` into one's own ~/.cache changed nothing for the server's user, and said nothing."""
    root = tmp_path / "private" / "between" / "cache"
    root.mkdir(parents=True, mode=0o700)
    for folder in (tmp_path, *tmp_path.parents):
        if "pytest" in str(folder):
            folder.chmod(0o755)
    roots = Roots((Layer(root, True),))
    root.chmod(0o755)
    (tmp_path / "private").chmod(0o700)
    (tmp_path / "private" / "between").chmod(0o755)
    assert warnings(roots) == [f"{root} is shared, but {tmp_path}/private above it lets no other user through; share a root elsewhere"]
    (tmp_path / "private").chmod(0o711)
    assert warnings(roots) == []
    root.chmod(0o700)
    (tmp_path / "private").chmod(0o700)
    assert warnings(roots) == []


# ---- modes


def test_a_new_root_is_private_whatever_the_umask(store: Store, publish: Callable[..., Entry]) -> None:
    before = os.umask(0o000)
    try:
        entry = publish()
    finally:
        os.umask(before)
    root = store.roots.layers[0].path
    assert [mode(path) for path in (root, root / "v1", entry.object_path.parent)] == [0o700] * 3
    assert {mode(path) for path in entry.object_path.parent.iterdir()} == {0o600}
    assert mode(root / "v1" / "root.lock") == 0o600


def test_a_shared_root_is_readable_whatever_the_umask(store: Store, publish: Callable[..., Entry]) -> None:
    before = os.umask(0o077)
    try:
        entry = publish(shared=True)
    finally:
        os.umask(before)
    root = store.roots.layers[0].path
    assert [mode(path) for path in (root, root / "v1", entry.object_path.parent)] == [0o755] * 3
    assert sorted(path.suffix for path in entry.object_path.parent.iterdir()) == [".json", ".lock", ".so"]
    assert {mode(path) for path in entry.object_path.parent.iterdir()} == {0o644}


def test_sharing_a_private_root_opens_what_is_in_it_and_leaves_strangers_files(store: Store, publish: Callable[..., Entry]) -> None:
    first = publish()
    stranger = first.object_path.parent / "notes.txt"
    stranger.touch(0o600)
    publish(tiny.spec(3), shared=True)
    assert mode(store.roots.layers[0].path) == 0o755
    assert {mode(path) for path in store.roots.layers[0].path.glob("v1/*/*") if path != stranger} == {0o644}
    assert mode(stranger) == 0o600


def test_an_unshared_publish_keeps_a_shared_root_shared(store: Store, publish: Callable[..., Entry]) -> None:
    """A later plain warmup left files that the server's user could not read."""
    publish(shared=True)
    entry = publish(tiny.spec(3))
    assert mode(entry.object_path) == 0o644
    assert mode(entry.object_path.parent) == 0o755


@as_root
@pytest.mark.usefixtures("reachable")
def test_another_user_reads_a_shared_root_and_cannot_write_it(store: Store, publish: Callable[..., Entry], in_child: Callable[..., int]) -> None:
    from mlactl.cache.load import StoreSource

    entry = publish(shared=True)

    def as_nobody() -> None:
        found = Store(store.roots)
        assert [each.status for each in found.entries()] == [Status.OK]
        assert isinstance(found.lookup(tiny.spec(), "sm_120a"), Hit)
        loaded = StoreSource(found).fetch(tiny.spec(), "sm_120a")
        assert loaded is not None
        assert loaded.lease is not None, "a reader of a shared root takes a shared lock too"
        with pytest.raises(CannotRun, match=r"cannot write .*owner root \(uid 0\), mode 0755\)") as raised:
            compile_and_publish(found, tiny.spec(3), "sm_120a", compiler=lambda *_: None)
        assert raised.value.exit_code == 2

    os.utime(entry.manifest_path, (1_700_000_000, 1_700_000_000))
    assert in_child(as_nobody, uid=NOBODY) == 0
    assert entry.manifest_path.stat().st_mtime == 1_700_000_000, "another owner's last use cannot be set, which is no error"


@as_root
@pytest.mark.usefixtures("reachable")
def test_a_root_that_cannot_be_read_is_named_with_owner_and_mode(store: Store, publish: Callable[..., Entry], in_child: Callable[..., int]) -> None:
    entry = publish()

    def as_nobody() -> None:
        with pytest.raises(CannotRun, match=r"cannot be read: Permission denied") as raised:
            list(Store(store.roots).entries())
        assert "owner root (uid 0), mode 0700" in raised.value.message
        miss = Store(store.roots).lookup(tiny.spec(), "sm_120a")
        assert isinstance(miss, Miss)
        assert "mode 0700), which cannot be read" in miss.reason

    assert in_child(as_nobody, uid=NOBODY) == 0
    assert entry.object_path.exists()


@as_root
@pytest.mark.usefixtures("reachable")
def test_a_bucket_that_cannot_be_read_is_passed_over_and_told(store: Store, publish: Callable[..., Entry], in_child: Callable[..., int]) -> None:
    closed, open_ = publish(shared=True), publish(tiny.spec(3))
    assert closed.key[:2] != open_.key[:2]
    closed.object_path.parent.chmod(0o700)

    def as_nobody() -> None:
        told: list[str] = []
        assert [entry.key for entry in Store(store.roots).entries(on_problem=told.append)] == [open_.key]
        assert len(told) == 1
        assert f"v1/{closed.key[:2]} (owner root (uid 0), mode 0700) cannot be read" in told[0]

    assert in_child(as_nobody, uid=NOBODY) == 0


@as_root
@pytest.mark.usefixtures("reachable")
def test_a_root_that_cannot_be_written_is_known_before_anything_is_compiled(tmp_path: Path, in_child: Callable[..., int]) -> None:
    """A warmup started all its workers, which imported the compiler for seconds, to say the same thing each."""
    (tmp_path / "closed").mkdir(mode=0o755)

    def as_nobody() -> None:
        for root in (tmp_path / "closed", tmp_path / "closed" / "deeper" / "root"):
            with pytest.raises(CannotRun, match=r"cannot write .*/closed \(owner root.*Permission denied"):
                require_writable(Store.open(str(root)))
        assert not list((tmp_path / "closed").iterdir())

    assert in_child(as_nobody, uid=NOBODY) == 0
    require_writable(Store.open(str(tmp_path / "closed" / "new")))


def test_links_below_the_root_are_misses_and_not_published_through(
    store: Store, publish: Callable[..., Entry], prebuilt: tiny.Prebuilt, tmp_path: Path
) -> None:
    """A bucket or `v1` that was a link was loaded from and published into, and no other command saw what was there."""
    entry = publish()
    for folder in (entry.object_path.parent, entry.object_path.parent.parent):
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
        found = store.lookup(tiny.spec(), "sm_120a")
        assert isinstance(found, Miss)
        assert found.reason.startswith(f"{folder} is a symbolic link, which is never followed")
        with pytest.raises(CannotRun, match="is a symbolic link, expected a folder"):
            compile_and_publish(store, tiny.spec(), "sm_120a", compiler=prebuilt.compiler())
        folder.unlink()
        (tmp_path / "elsewhere").rename(folder)
    root = entry.layer.path
    root.rename(tmp_path / "moved")
    root.symlink_to(tmp_path / "moved")
    assert isinstance(store.lookup(tiny.spec(), "sm_120a"), Hit), "the root itself may be a link"


def test_a_file_in_the_roots_place_is_named(tmp_path: Path, prebuilt: tiny.Prebuilt) -> None:
    (tmp_path / "cache").write_text("not a folder")
    store = Store.open(str(tmp_path / "cache"))
    with pytest.raises(CannotRun, match=r"cache/v1.* cannot be read: Not a directory"):
        list(store.entries())
    with pytest.raises(CannotRun, match=r"cannot write .*cache"):
        compile_and_publish(store, tiny.spec(), "sm_120a", compiler=prebuilt.compiler())


# ---- layers


@pytest.fixture
def layered(tmp_path: Path, publish: Callable[..., Entry]) -> tuple[Store, Store, Store]:
    """(rw:ro together, rw alone, ro alone); the read-only layer holds (factor 2, f32)."""
    read_only = Store.open(str(tmp_path / "ro"))
    publish(into=read_only)
    return Store.open(f"{tmp_path}/rw:{tmp_path}/ro"), Store.open(str(tmp_path / "rw")), read_only


def test_a_read_only_layer_answers_and_is_not_copied(layered: tuple[Store, Store, Store], publish: Callable[..., Entry]) -> None:
    both, writable, _ = layered
    found = both.lookup(tiny.spec(), "sm_120a")
    assert isinstance(found, Hit)
    assert found.entry.layer == both.roots.layers[1]
    assert publish(into=both).layer == both.roots.layers[1]
    assert list(writable.entries()) == []


def test_new_objects_go_to_the_writable_layer(layered: tuple[Store, Store, Store], publish: Callable[..., Entry]) -> None:
    both, writable, read_only = layered
    entry = publish(tiny.spec(3), into=both)
    assert entry.layer == both.roots.layers[0]
    assert [found.key for found in writable.entries()] == [entry.key]
    assert len(list(read_only.entries())) == 1
    assert {found.key for found in both.entries()} == {entry.key, next(read_only.entries()).key}


def test_a_bad_entry_in_the_first_layer_lets_the_second_answer(layered: tuple[Store, Store, Store], publish: Callable[..., Entry]) -> None:
    both, writable, _ = layered
    mine = publish(into=writable)
    assert both.lookup(tiny.spec(), "sm_120a").entry.layer == both.roots.layers[0]  # type: ignore[union-attr]
    mine.object_path.write_bytes(b"x" * mine.object_bytes)
    found = both.lookup(tiny.spec(), "sm_120a")
    assert isinstance(found, Hit)
    assert found.entry.layer == both.roots.layers[1]


def test_a_layer_list_without_a_writable_one_cannot_publish(layered: tuple[Store, Store, Store], prebuilt: tiny.Prebuilt, tmp_path: Path) -> None:
    frozen = Store.open(f":{tmp_path}/ro")
    assert isinstance(frozen.lookup(tiny.spec(), "sm_120a"), Hit)
    with pytest.raises(CannotRun, match="every layer is read-only"):
        compile_and_publish(frozen, tiny.spec(3), "sm_120a", compiler=prebuilt.compiler())


def test_last_use_is_not_set_on_a_read_only_layer(layered: tuple[Store, Store, Store]) -> None:
    both, _, _ = layered
    entry = both.lookup(tiny.spec(), "sm_120a").entry  # type: ignore[union-attr]
    os.utime(entry.manifest_path, (1_700_000_000, 1_700_000_000))
    both.touch(entry)
    assert entry.manifest_path.stat().st_mtime == 1_700_000_000


def test_a_moved_root_hits_as_before(store: Store, publish: Callable[..., Entry], tmp_path: Path) -> None:
    """C2: paths inside entries tied a cache to the folder it was made in."""
    entry = publish()
    (tmp_path / "cache").rename(tmp_path / "elsewhere")
    assert isinstance(store.lookup(tiny.spec(), "sm_120a"), Miss)
    found = Store.open(str(tmp_path / "elsewhere")).lookup(tiny.spec(), "sm_120a")
    assert isinstance(found, Hit)
    assert found.entry.key == entry.key
    assert str(tmp_path).encode() not in found.entry.object_path.read_bytes() + found.entry.manifest_path.read_bytes()


# ---- naming one entry


def test_an_entry_is_found_by_any_unique_prefix(store: Store, publish: Callable[..., Entry]) -> None:
    entries = [publish(tiny.spec(factor, dtype)) for factor, dtype in tiny.ALL]
    for entry in entries:
        assert store.entry(entry.key) == entry
        others = [other.key for other in entries if other.key != entry.key]
        length = next(n for n in range(1, 65) if not any(key.startswith(entry.key[:n]) for key in others))
        assert store.entry(entry.key[:length]).key == entry.key


@pytest.mark.parametrize("prefix", ["zz", "../..", "A", "0" * 65, "f" * 64])
def test_an_unknown_key_is_not_found(store: Store, publish: Callable[..., Entry], prefix: str) -> None:
    publish()
    with pytest.raises(NotFound) as raised:
        store.entry(prefix)
    assert raised.value.exit_code == 1


def test_no_key_at_all_is_a_usage_error(store: Store) -> None:
    """An unset shell variable as KEY once read as a key that is not there."""
    with pytest.raises(UsageError):
        store.entry("")


def test_an_ambiguous_prefix_is_a_usage_error(store: Store, publish: Callable[..., Entry]) -> None:
    first = publish()
    twin = first.key[:10] + ("0" if first.key[10] != "0" else "1") * 54
    Path(first.layer.bucket(twin), f"{twin}.so").write_bytes(b"x")
    with pytest.raises(UsageError, match="fits 2 keys"):
        store.entry(first.key[:10])
    assert store.entry(first.key[:11]).key == first.key
