"""The compile pool without a compiler: stand-in workers that answer, and a Ctrl-C at an awkward moment."""

import sys
import textwrap
import time

import pytest

from mlactl.kernels.spec import CompileSpec
from mlactl.warmup import pool
from mlactl.warmup.plan import MISSING, Item

WORKER = textwrap.dedent("""
    import json, sys
    sys.stdin.readline()
    for line in sys.stdin:
        task = json.loads(line)
        print(json.dumps({"status": "compiled", "key": task["spec"]["facts"]["name"], "seconds": 0.5}), flush=True)
""")


@pytest.fixture
def items(monkeypatch):
    monkeypatch.setattr(pool, "WORKER_COMMAND", (sys.executable, "-c", WORKER))
    monkeypatch.setattr(pool, "_require_compiler", lambda: None)
    return [Item(CompileSpec.of("test", 1, {"name": f"k{number}"}), "sm_120a", None, MISSING, None) for number in range(5)]


def compile_missing(items, **options):
    return pool.compile_missing(items, **{"jobs": 2, "cache_dir": "/nonexistent/cache", "shared": False, **options})


def test_every_item_is_answered_once(items):
    started = []
    result = compile_missing(items, on_start=started.append)
    assert started == items
    assert sorted(outcome.key for outcome in result.outcomes) == ["k0", "k1", "k2", "k3", "k4"]
    assert {outcome.item for outcome in result.of("compiled")} == set(items)
    assert (result.unfinished, result.interrupted) == ((), False)


def test_an_interrupt_while_an_outcome_is_reported_counts_that_outcome_once(items):
    """The object whose outcome was being drawn was counted again when its worker was stopped."""
    seen = []

    def report(outcome):
        seen.append(outcome.item)
        if len(seen) == 2:
            raise KeyboardInterrupt

    result = compile_missing(items, jobs=1, on_outcome=report)
    assert result.interrupted is True
    assert [outcome.item for outcome in result.outcomes] == items[:2]
    assert result.unfinished == tuple(items[2:])


def test_what_a_stopped_worker_had_answered_counts(items, monkeypatch, tmp_path):
    """The interrupt comes with the first answer, when the second is in its pipe and not read yet."""
    said = WORKER + f"    open({str(tmp_path)!r} + '/' + task['spec']['facts']['name'], 'w').close()\n"
    monkeypatch.setattr(pool, "WORKER_COMMAND", (sys.executable, "-c", said))

    def report(outcome):
        if not interrupted:
            interrupted.append(outcome)
            deadline = time.monotonic() + 60
            while len(list(tmp_path.iterdir())) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            raise KeyboardInterrupt

    interrupted = []
    result = compile_missing(items[:2], on_outcome=report)
    assert result.interrupted is True
    assert {outcome.item for outcome in result.outcomes} == set(items[:2])
    assert result.unfinished == ()


def test_a_worker_that_exits_by_itself_fails_the_object_it_was_at(items, monkeypatch):
    monkeypatch.setattr(
        pool, "WORKER_COMMAND", (sys.executable, "-c", "import sys; sys.stdin.readline(); sys.stdin.readline(); sys.exit('out of luck')")
    )
    result = compile_missing(items[:2], jobs=1)
    assert [outcome.message for outcome in result.of("failed")] == [
        f"test 1 name={name} for sm_120a: the compile worker ended with exit code 1; it last said: out of luck" for name in ("k0", "k1")
    ]


def test_jobs_default_to_the_cores_and_never_exceed_the_work(monkeypatch):
    monkeypatch.setattr(pool.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert [pool.default_jobs(missing) for missing in (0, 1, 3, 4, 9)] == [1, 1, 3, 4, 4]
