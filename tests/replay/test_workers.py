"""Worker processes: results in order, and a worker that is killed costs its own item only."""

import os
import signal
from pathlib import Path

import pytest

from mlactl.replay import runner
from mlactl.replay.workers import in_order


def square(item):
    if item < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return item * item


def lost(item):
    return f"lost {item}"


@pytest.mark.parametrize(
    ("items", "expected"),
    [([3, 1, 2], [9, 1, 4]), ([5, -1, 6, 7, -2, 8], [25, "lost -1", 36, 49, "lost -2", 64]), ([-1, 2], ["lost -1", 4])],
)
def test_a_killed_worker_loses_only_its_item(items, expected):
    """One worker that ran out of memory broke the pool, and the results of all were lost."""
    assert list(in_order(square, items, 2, lost)) == expected


def test_what_is_not_asked_for_any_more_is_not_waited_for():
    found = in_order(square, [1, 2, 3, 4], 2, lost)
    assert next(found) == 1
    found.close()


def test_the_report_of_a_killed_worker():
    found = runner._killed((Path("/d/a b.in.safetensors"), "a b"))
    assert (found.name, found.status, found.provenance) == ("a b", "error", (("capture", "/d/a b.in.safetensors"),))
    assert found.message == "the process that replayed it was killed, most often for its memory"
    assert found.hint == "mlactl replay '/d/a b.in.safetensors', and watch free -g"
