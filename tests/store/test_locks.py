"""Locks: one compile per key, entries in use, and dead processes that stop nobody."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny
from users import NOBODY, as_root

from mlactl.cache import locks
from mlactl.cache.locks import LockBusy, acquire_entry, entry_lock, root_lock
from mlactl.cache.publish import compile_and_publish, prepare
from mlactl.cache.roots import Layer
from mlactl.cache.store import Entry, Store

KEY = "ab" * 32

HOLD = """
import sys, time
from pathlib import Path
from mlactl.cache.locks import acquire_entry
from mlactl.cache.roots import Layer
lease = acquire_entry(Layer(Path(sys.argv[1]), True), sys.argv[2], exclusive=sys.argv[3] == "exclusive", wait_s=5)
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def layer(tmp_path: Path) -> Layer:
    layer = Layer(tmp_path / "cache", True)
    prepare(layer, KEY)
    return layer


@pytest.fixture
def hold(layer: Layer) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a process that holds the lock of KEY (or another) and returns it once it does."""
    running: list[subprocess.Popen[str]] = []

    def start(kind: str, key: str = KEY, root: Path | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", HOLD, str(root or layer.path), key, kind], stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def test_a_lock_file_left_by_a_dead_process_stops_nobody(layer: Layer, hold: Callable[..., subprocess.Popen[str]]) -> None:
    """C5: a lock that was a mere file outlived its process and every later run waited for it."""
    dead = hold("exclusive")
    dead.kill()
    dead.wait()
    left = Path(locks.entry_lock_path(layer, KEY)).read_text()
    assert f'"pid":{dead.pid}' in left
    assert locks.holder_of(layer, KEY) is None
    with entry_lock(layer, KEY, exclusive=True, wait_s=0):
        assert f'"pid":{os.getpid()}' in Path(locks.entry_lock_path(layer, KEY)).read_text()


def test_a_waiter_times_out_naming_the_lock_and_its_holder(layer: Layer, hold: Callable[..., subprocess.Popen[str]]) -> None:
    """C5."""
    alive = hold("exclusive")
    started = time.monotonic()
    with pytest.raises(LockBusy) as raised, entry_lock(layer, KEY, exclusive=True, wait_s=0.3):
        pass
    assert time.monotonic() - started >= 0.3
    path = locks.entry_lock_path(layer, KEY)
    host, moment = re.escape(socket.gethostname()), r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ"
    pattern = rf"{re.escape(path)} is still held by process {alive.pid} on {host} since {moment} after 0\.3 s"
    assert re.fullmatch(pattern, raised.value.message)
    assert raised.value.exit_code == 2
    assert raised.value.holder is not None
    assert raised.value.holder.pid == alive.pid
    assert locks.holder_of(layer, KEY) == raised.value.holder


def test_a_waiter_gets_the_lock_as_soon_as_its_holder_is_killed(layer: Layer, hold: Callable[..., subprocess.Popen[str]]) -> None:
    alive = hold("exclusive")
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD.replace("wait_s=5", "wait_s=60"), str(layer.path), KEY, "exclusive"], stdout=subprocess.PIPE, text=True
    )
    try:
        time.sleep(0.2)
        assert child.poll() is None
        alive.send_signal(signal.SIGKILL)
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
    finally:
        child.kill()
        child.communicate()


def test_a_shared_lock_marks_in_use_until_its_process_ends(layer: Layer, hold: Callable[..., subprocess.Popen[str]]) -> None:
    first, second = hold("shared"), hold("shared")
    pids = sorted((first.pid, second.pid))
    with pytest.raises(LockBusy, match=f"is in use by processes {pids[0]}, {pids[1]}") as raised, entry_lock(layer, KEY, exclusive=True, wait_s=0):
        pass
    assert raised.value.holder is None
    first.kill()
    first.wait()
    with pytest.raises(LockBusy, match=f"is in use by process {second.pid}$"), entry_lock(layer, KEY, exclusive=True, wait_s=0):
        pass
    second.kill()
    second.wait()
    with entry_lock(layer, KEY, exclusive=True, wait_s=0):
        pass


def test_waiting_for_readers_is_given_up_long_before_the_timeout(layer: Layer, hold: Callable[..., subprocess.Popen[str]]) -> None:
    """A server keeps what it loaded marked until it ends: a warmup that waits for it would sit there for ten minutes."""
    hold("shared")
    started = time.monotonic()
    with pytest.raises(LockBusy, match="is in use by"), entry_lock(layer, KEY, exclusive=True, wait_s=600):
        pass
    assert time.monotonic() - started < 60


def test_two_waiters_do_not_take_each_other_for_readers(layer: Layer, hold: Callable[..., subprocess.Popen[str]]) -> None:
    holder = hold("exclusive")
    code = HOLD.replace("wait_s=5", "wait_s=60").replace("time.sleep(600)", "lease.close()")
    waiters = [subprocess.Popen([sys.executable, "-c", code, str(layer.path), KEY, "exclusive"], stdout=subprocess.PIPE, text=True) for _ in range(6)]
    time.sleep(1.0)
    holder.kill()
    assert [(waiter.communicate()[0], waiter.returncode) for waiter in waiters] == [("held\n", 0)] * 6


def test_a_released_lock_names_nobody(layer: Layer) -> None:
    with entry_lock(layer, KEY, exclusive=True, wait_s=0):
        pass
    assert Path(locks.entry_lock_path(layer, KEY)).read_bytes() == b""


def test_a_reader_waits_for_a_writer_and_names_it(layer: Layer, hold: Callable[..., subprocess.Popen[str]]) -> None:
    alive = hold("exclusive")
    with pytest.raises(LockBusy, match=f"still held by process {alive.pid} on"), entry_lock(layer, KEY, exclusive=False, wait_s=0.05):
        pass


def test_a_forked_child_that_ends_leaves_its_parents_lock(layer: Layer, in_child: Callable[..., int]) -> None:
    """A server that forks workers lost its marks when the first worker ended: the child's clean-up unlocked the parent's file."""
    lease = acquire_entry(layer, KEY, exclusive=False, wait_s=0)
    assert in_child(lease.close) == 0
    with pytest.raises(LockBusy), entry_lock(layer, KEY, exclusive=True, wait_s=0):
        pass
    lease.close()
    exclusive = acquire_entry(layer, KEY, exclusive=True, wait_s=0)
    assert in_child(exclusive.close) == 0
    with pytest.raises(LockBusy), entry_lock(layer, KEY, exclusive=False, wait_s=0):
        pass
    exclusive.close()


def test_an_exclusive_lock_is_released_though_a_forked_child_lives(layer: Layer) -> None:
    """A process pool forked during a compile kept the key locked for as long as the pool lived."""
    lease = acquire_entry(layer, KEY, exclusive=True, wait_s=0)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        lease.close()
        with entry_lock(layer, KEY, exclusive=True, wait_s=0):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_lease_ends_with_the_last_reference(layer: Layer) -> None:
    lease = acquire_entry(layer, KEY, exclusive=False, wait_s=0)
    with pytest.raises(LockBusy), entry_lock(layer, KEY, exclusive=True, wait_s=0):
        pass
    del lease
    with entry_lock(layer, KEY, exclusive=True, wait_s=0):
        pass


def test_a_lock_file_unlinked_while_one_waits_is_not_taken_for_the_lock(layer: Layer) -> None:
    """Two processes each held "the" lock of a key, one on the old file and one on the new."""
    path = Path(locks.entry_lock_path(layer, KEY))
    path.touch()
    old = os.open(path, os.O_RDWR)
    fcntl.flock(old, fcntl.LOCK_EX)
    waiter = subprocess.Popen(
        [sys.executable, "-c", HOLD.replace("wait_s=5", "wait_s=60"), str(layer.path), KEY, "exclusive"], stdout=subprocess.PIPE, text=True
    )
    try:
        while not Path(locks.root_lock_path(layer)).exists():
            time.sleep(0.01)
        time.sleep(0.3)
        path.unlink()
        os.close(old)
        assert waiter.stdout is not None
        assert waiter.stdout.readline() == "held\n"
        assert f'"pid":{waiter.pid}' in path.read_text(), "it holds the file that is there now"
        with pytest.raises(LockBusy), entry_lock(layer, KEY, exclusive=True, wait_s=0):
            pass
    finally:
        waiter.kill()
        waiter.communicate()


@pytest.mark.parametrize("kind", ["shared", "exclusive"])
def test_the_root_is_not_locked_while_any_entry_is(layer: Layer, hold: Callable[..., subprocess.Popen[str]], kind: str) -> None:
    holder = hold(kind)
    with pytest.raises(LockBusy, match=r"root\.lock"), root_lock(layer):
        pass
    holder.kill()
    holder.wait()
    with root_lock(layer), pytest.raises(LockBusy, match=r"root\.lock"):
        acquire_entry(layer, KEY, exclusive=False, wait_s=0)
    acquire_entry(layer, KEY, exclusive=False, wait_s=0).close()


def test_lock_files_are_named_and_strangers_are_not(layer: Layer, tmp_path: Path) -> None:
    for key in (KEY, "ab" + "0" * 62):
        acquire_entry(layer, key, exclusive=True, wait_s=0).close()
    bucket = Path(layer.bucket(KEY))
    (bucket / "notes.lock").touch()
    (bucket / f"cd{'0' * 62}.lock").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / f"{'cd' * 32}.lock").touch()
    (layer.path / "v1" / "cd").symlink_to(tmp_path / "elsewhere")
    assert locks.lock_files(layer) == [f"v1/ab/ab{'0' * 62}.lock", f"v1/ab/{KEY}.lock"]


@as_root
@pytest.mark.usefixtures("reachable")
def test_a_lock_that_may_only_be_read_is_still_shared(layer: Layer, in_child: Callable[..., int]) -> None:
    prepare(layer, KEY, shared=True)
    acquire_entry(layer, KEY, exclusive=True, wait_s=0).close()

    def as_nobody() -> None:
        with entry_lock(layer, KEY, exclusive=False, wait_s=0):
            child = os.fork()
            if child == 0:
                try:
                    acquire_entry(layer, KEY, exclusive=True, wait_s=0)
                except PermissionError:
                    os._exit(0)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    assert in_child(as_nobody, uid=NOBODY) == 0


def test_a_lock_file_that_is_a_link_is_refused(layer: Layer, tmp_path: Path) -> None:
    (tmp_path / "target").touch()
    Path(locks.entry_lock_path(layer, KEY)).symlink_to(tmp_path / "target")
    with pytest.raises(locks.NotALockFile, match=f"{KEY}.lock is a symbolic link, expected a lock file"):
        acquire_entry(layer, KEY, exclusive=True, wait_s=0)


@pytest.mark.parametrize("exclusive", [True, False])
@pytest.mark.parametrize("path", [locks.entry_lock_path, lambda layer, _: locks.root_lock_path(layer)])
def test_a_fifo_or_a_folder_in_a_lock_files_place_is_named(layer: Layer, path: Callable[..., str], exclusive: bool) -> None:
    """A FIFO took the lock and then failed with EINVAL or hung a listing; a FIFO for the root's lock was taken in silence."""
    place = Path(path(layer, KEY))
    place.unlink(missing_ok=True)
    os.mkfifo(place)
    assert locks.holder_of(layer, KEY) is None, "and does not hang"
    with pytest.raises(locks.NotALockFile) as raised:
        acquire_entry(layer, KEY, exclusive=exclusive, wait_s=0)
    assert raised.value.message == f"{place} is a FIFO, expected a lock file"
    place.unlink()
    place.mkdir()
    with pytest.raises(locks.NotALockFile, match="is a directory, expected a lock file"):
        acquire_entry(layer, KEY, exclusive=exclusive, wait_s=0)


def test_a_lease_that_outlives_the_modules_ends_in_silence(layer: Layer) -> None:
    """A lease held until the interpreter ended printed `AttributeError: 'NoneType' object has no attribute 'getpid'`."""
    code = f"""
from pathlib import Path
from mlactl.cache import locks
from mlactl.cache.roots import Layer
lease = locks.acquire_entry(Layer(Path({str(layer.path)!r}), True), {KEY!r}, exclusive=True, wait_s=0)
locks.os = locks.fcntl = None  # what interpreter shutdown leaves of them
"""
    assert tiny.run_python(code).stderr == ""


def test_publishing_an_entry_in_use_says_so(
    store: Store, publish: Callable[..., Entry], prebuilt: tiny.Prebuilt, hold: Callable[..., subprocess.Popen[str]]
) -> None:
    """C12: what a reader has loaded is not rebuilt under it, and nobody waits for a server to end."""
    entry = publish()
    reader = hold("shared", entry.key, entry.layer.path)
    entry.object_path.write_bytes(b"damaged")
    with pytest.raises(LockBusy, match=f"in use by process {reader.pid}$"):
        compile_and_publish(store, tiny.spec(), "sm_120a", compiler=prebuilt.compiler())
    assert entry.object_path.read_bytes() == b"damaged"


def test_a_publisher_is_shown_as_locked(store: Store, publish: Callable[..., Entry], hold: Callable[..., subprocess.Popen[str]]) -> None:
    entry = publish()
    assert entry.manifest_path is not None
    entry.manifest_path.unlink()
    writer = hold("exclusive", entry.key, entry.layer.path)
    temporary = entry.object_path.with_name(f"{entry.key}.{writer.pid}-00000000.tmp")
    temporary.write_bytes(b"part")
    rows = list(store.entries())
    assert [(row.status, row.residue) for row in rows] == [("locked", ""), ("locked", temporary.name)]
    assert f"being written by process {writer.pid} on" in rows[0].detail
    assert rows[1].manifest_path is None
    assert rows[1].object_path == temporary
    writer.kill()
    writer.wait()
    assert [(row.status, row.object_bytes) for row in store.entries()] == [("no-manifest", entry.object_bytes), ("temp", 4)]
