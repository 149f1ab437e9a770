"""C13: kill -9 at every step of a publish leaves a valid cache, and the next run mends it."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

from mlactl.cache.entry import examine
from mlactl.cache.key import inputs_for
from mlactl.cache.publish import compile_and_publish
from mlactl.cache.store import Entry, Hit, Status, Store

KEY = inputs_for(tiny.spec(), "sm_120a").key()
CALLS = [(os, name) for name in ("open", "write", "fsync", "rename", "unlink", "mkdir", "chmod", "fchmod", "ftruncate", "close")] + [(fcntl, "flock")]


def dies_at(step: int, *, after: bool) -> None:
    """From now on this process kills itself before (or after) its `step`th call that could change a file; half a write is done."""
    count = 0

    def deadly(real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == step and not after:
                if name == "write":
                    real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            mine = count
            try:
                return real(*arguments, **options)
            finally:
                if mine == step:
                    os.kill(os.getpid(), signal.SIGKILL)

        return call

    for module, name in CALLS:
        setattr(module, name, deadly(getattr(module, name), name))


def corrupt(entry: Entry) -> None:
    data = bytearray(entry.object_path.read_bytes())
    data[len(data) // 2] ^= 1
    entry.object_path.write_bytes(data)


@pytest.mark.parametrize("replacing", [False, True], ids=["empty-root", "over-a-damaged-entry"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_kill_at_every_step_of_a_publish(
    store: Store, publish: Callable[..., Entry], prebuilt: tiny.Prebuilt, in_child: Callable[..., int], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, after: bool, replacing: bool,
) -> None:  # fmt: skip
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    publish(into=Store.open(str(tmp_path / "other")))  # asks the linker for its version, once a process
    seen: set[tuple[str, ...]] = set()
    for step in range(1, 200):
        root = tmp_path / f"cache{step}"
        one = Store.open(str(root))
        if replacing:
            corrupt(publish(into=one))

        def work(step: int = step, one: Store = one) -> None:
            dies_at(step, after=after)
            compile_and_publish(one, tiny.spec(), "sm_120a", compiler=prebuilt.compiler())

        status = in_child(work)
        left = list(one.entries())
        answer = one.lookup(tiny.spec(), "sm_120a")
        seen.add(tuple(str(examine(entry).status) for entry in left))
        temporaries = [entry for entry in left if entry.residue]
        assert len(temporaries) <= 1
        assert {entry.key for entry in left} <= {KEY}
        assert {str(examine(entry).status) for entry in left} <= {"ok", "no-manifest", "temp", "digest"}
        assert isinstance(answer, Hit) == any(examine(entry).status is Status.OK for entry in left)
        again = compile_and_publish(one, tiny.spec(), "sm_120a", compiler=prebuilt.compiler())
        assert again.compiled != isinstance(answer, Hit)
        mended = [entry for entry in one.entries() if not entry.residue]
        assert [examine(entry).status for entry in mended] == [Status.OK]
        if again.compiled:
            assert list(one.entries()) == mended, "the next publisher of the key clears what was left"
        if status == 0:
            break
        assert status == -signal.SIGKILL
    else:
        raise AssertionError("the publish never finished")
    assert step > 25, "every step was tried"
    # Each window was really hit: nothing yet, a temporary, an object without a manifest, with the manifest's temporary, done.
    windows = {("digest",), ("digest", "temp")} if replacing else {(), ("temp",)}
    assert windows <= seen
    assert {("no-manifest",), ("no-manifest", "temp"), ("ok",)} <= seen
