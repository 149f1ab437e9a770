"""Roots filled with entries of the tiny kernel, and a command line that has it declared."""

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

STORE_TESTS = Path(__file__).resolve().parents[2] / "store"
sys.path.insert(0, str(STORE_TESTS))

import stand_ins  # noqa: E402  both live beside the store's tests
import tiny  # noqa: E402

from mlactl.cache.store import Entry, Store  # noqa: E402

DAY = 86_400
LAUNCH = f"import sys; sys.path.insert(0, {str(STORE_TESTS)!r}); import tiny; tiny.register(); from mlactl.cli.app import main; sys.exit(main())"


@pytest.fixture(scope="session")
def prebuilt(tmp_path_factory):
    folder = tmp_path_factory.mktemp("objects")
    ran = subprocess.run([sys.executable, tiny.__file__, str(folder)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return tiny.Prebuilt(folder)


@pytest.fixture
def cache(cli):
    """`mlactl cache …` over the root of `cli`."""
    tiny.register()
    cli.launch = (sys.executable, "-c", LAUNCH)
    return cli


@pytest.fixture
def store(cache):
    return Store.open(str(cache.cache_dir))


@dataclass(frozen=True)
class Filled:
    """Six good entries, by what is special about them."""

    current: Entry
    superseded: Entry
    newer: Entry
    other_sources: Entry
    other_toolchain: Entry
    sm_121a: Entry

    @property
    def all(self) -> list[Entry]:
        return [getattr(self, name) for name in self.__dataclass_fields__]

    @property
    def in_order(self) -> list[Entry]:
        """As a listing shows them: newest version, arch, facts."""
        return sorted(self.all, key=lambda entry: (-entry.manifest.spec.version, entry.manifest.arch, repr(entry.manifest.spec.facts), entry.key))


@pytest.fixture
def filled(store, prebuilt):
    now, old = time.time(), "2020-01-01T00:00:00Z"
    return Filled(
        current=stand_ins.publish(store, prebuilt, tiny.spec(2), last_used=now - 5 * DAY),
        superseded=stand_ins.publish(store, prebuilt, tiny.spec(3), version=0, last_used=now - 40 * DAY),
        newer=stand_ins.publish(store, prebuilt, tiny.spec(5), version=2),
        other_sources=stand_ins.publish(store, prebuilt, tiny.spec(7), sources_digest="ab" * 32, created=old),
        other_toolchain=stand_ins.publish(store, prebuilt, tiny.spec(3), toolchain=stand_ins.older_toolchain(), last_used=now - 20 * DAY),
        sm_121a=stand_ins.publish(store, prebuilt, tiny.spec(2), arch="sm_121a", created=old, last_used=now - 30 * DAY),
    )


AS_NOBODY = f"""
import contextlib, io, os, sys
sys.path[:0] = [{str(STORE_TESTS)!r}]
import tiny; tiny.register()
from mlactl.cli.app import main
key, words = sys.argv[1], sys.argv[2:]
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    # The interpreter may be closed to that user: everything the real run imports is imported here.
    for warm in (["ls"], ["verify"], ["show", key], ["prune", "--dry-run"], ["show", "feedc0de"]):
        main(["cache", *warm, "--json"])
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.exit(main(words))
"""


@pytest.fixture
def as_nobody(cache, filled):
    """The command line as an unprivileged user."""

    def run(*words):
        cache.launch = (sys.executable, "-c", AS_NOBODY, filled.current.key)
        return cache(*words)

    return run
