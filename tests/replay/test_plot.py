"""Pictures: drawn where they can be, refused before any work where not."""

import struct
from dataclasses import replace

import pytest
from calls import dense, finished

from mlactl.errors import CannotRun, UsageError
from mlactl.replay import capture as captures
from mlactl.replay import plot
from mlactl.replay.runner import ReplayOptions

CPU = ReplayOptions(device="cpu", kernel=False)


@pytest.mark.parametrize("factor", [1.0, 1.5, 0.0])
def test_a_picture_is_drawn_for_right_and_wrong_outputs(tmp_path, factor):
    pytest.importorskip("matplotlib")
    made = finished(dense())
    path = captures.save(made.with_result(made.output * factor, made.lse), tmp_path, "one")
    plot.draw(tmp_path / "one.png", path, replace(CPU, rows=(1,)))
    data = (tmp_path / "one.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (1560, 672)


def test_rows_that_see_nothing_are_drawn_too(tmp_path):
    pytest.importorskip("matplotlib")
    plot.draw(tmp_path / "one.png", captures.save(finished(dense(lengths=(0, 2))), tmp_path, "one"), CPU)
    assert (tmp_path / "one.png").stat().st_size > 10_000


def test_only_png_names(tmp_path):
    with pytest.raises(UsageError, match=r"ends in \.png"):
        plot.require(tmp_path / "error.pdf")


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CannotRun) as refused:
        plot.require(tmp_path / "error.png")
    assert refused.value.hint == "pip install 'mlactl[plot]'"
