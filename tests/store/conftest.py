"""Objects of a tiny real kernel, and stores that hold them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny

from mlactl.cache.publish import compile_and_publish
from mlactl.cache.store import Entry, Store
from mlactl.kernels import runtime
from mlactl.kernels.spec import CompileSpec


@pytest.fixture(scope="session")
def prebuilt(tmp_path_factory: pytest.TempPathFactory) -> tiny.Prebuilt:
    folder = tmp_path_factory.mktemp("objects")
    ran = subprocess.run([sys.executable, tiny.__file__, str(folder)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return tiny.Prebuilt(folder)


@pytest.fixture(autouse=True)
def _clean_slate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tiny kernel is declared, nothing of the user's environment leaks in, nothing stays loaded."""
    tiny.register()
    for name in ("MLACTL_CACHE_DIR", "MLACTL_TRUST_ROOT", "MLACTL_FROZEN", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    yield
    runtime.configure(None)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store; its root does not exist yet."""
    return Store.open(str(tmp_path / "cache"))


@pytest.fixture
def publish(store: Store, prebuilt: tiny.Prebuilt) -> Callable[..., Entry]:
    """Publishes a variant of the tiny kernel into `store` (or another one), as warmup would."""

    def one(spec: CompileSpec | None = None, arch: str = "sm_120a", *, into: Store | None = None, **options: object) -> Entry:
        return compile_and_publish(into or store, spec or tiny.spec(), arch, compiler=prebuilt.compiler(), **options).entry  # type: ignore[arg-type]

    return one


@pytest.fixture
def reachable(tmp_path: Path) -> None:
    """Lets other users pass through to the test's folder, which pytest makes private."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and "pytest" in str(folder):
            folder.chmod(0o755)


@pytest.fixture
def in_child() -> Callable[..., int]:
    """Runs a function in a forked child, as another user if asked; returns its exit status, negative for a signal."""

    def run(function: Callable[[], object], *, uid: int | None = None) -> int:
        child = os.fork()
        if child == 0:
            status = 99
            try:
                if uid is not None:
                    os.setgroups([])
                    os.setgid(uid)
                    os.setuid(uid)
                function()
                status = 0
            except AssertionError as error:
                os.write(2, f"in the child: {error}\n".encode())
                status = 1
            except BaseException as error:
                os.write(2, f"in the child: {type(error).__name__}: {error}\n".encode())
                status = 2
            finally:
                os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    return run
