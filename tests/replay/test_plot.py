"""Pictures: what fails is seen to fail, by the rules and tolerances of the report; refused before any work what cannot be drawn."""

import math
import struct
from dataclasses import replace

import pytest
import torch
from calls import dense, finished

from mlactl.errors import CannotRun, UsageError
from mlactl.replay import capture as captures
from mlactl.replay import plot
from mlactl.replay.kernel import KernelResult
from mlactl.replay.results import Strictness
from mlactl.replay.runner import ReplayOptions, Results, compute, replay_capture

CPU = ReplayOptions(device="cpu", kernel=False)


@pytest.mark.parametrize("factor", [1.0, 1.5, 0.0])
def test_a_picture_is_drawn_for_right_and_wrong_outputs(tmp_path, factor):
    pytest.importorskip("matplotlib")
    made = finished(dense())
    path = captures.save(made.with_result(made.output * factor, made.lse), tmp_path, "one")
    plot.draw(tmp_path / "one.png", path, replace(CPU, rows=(1,)))
    data = (tmp_path / "one.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (1992, 744)


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


def figure_of(made, options=CPU):
    """The picture and its figure, as `draw` makes them."""
    pytest.importorskip("matplotlib")
    results = compute(made, options)
    picture = plot.judge(results, options)
    return picture, plot._figure(results, picture, options)


def wrong_lse(made):
    lse = made.lse.clone()
    lse[3, 1] += 0.01
    return made.with_result(made.output, lse)


def test_an_lse_that_is_wrong_alone_is_drawn():
    """A right output with a wrong LSE was one blue picture without a word."""
    picture, figure = figure_of(wrong_lse(finished(dense())))
    assert not bool((picture.output > 1).any())
    assert (picture.lse > 1).nonzero().tolist() == [[3, 1]]
    assert "LSE wrong" in figure.get_suptitle()
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[0].startswith("Output by head and row\nall 16 pass")
    assert titles[1].startswith("LSE by head and row\n1 of 16 fail, worst: row 3, head 1, ")


@pytest.mark.parametrize(
    ("factor", "strictness", "fails"),
    [
        (1.006, Strictness(), 16),
        (1.006, Strictness(rtol=0.02), 0),
        (1.006, Strictness(row=1e-3), 16),
        (1.002, Strictness(), 0),
        (1.002, Strictness(atol=1e-6), 16),
    ],
)
def test_the_picture_gives_the_verdict_of_the_report(factor, strictness, fails):
    """An output 0.6% too large, which fails by its norm, was drawn blue as "rows that pass", and typed tolerances were not asked."""
    made = finished(dense())
    made = made.with_result((made.output.float() * factor).to(torch.bfloat16), made.lse)
    options = replace(CPU, strictness=strictness)
    picture, figure = figure_of(made, options)
    output = replay_capture(made, options).pairs[0].comparisons[0]
    assert int((picture.output > 1).sum()) == output.bad_rows == fails
    labels = [text.get_text() for text in figure.axes[2].get_legend().get_texts()]
    assert ("rows that fail" in labels, "rows that pass" in labels) == (fails > 0, fails == 0)


def test_rows_and_heads_that_were_asked_for_are_drawn_under_their_own_numbers():
    """One head had an axis from -0.5 to 0.5; --rows and --heads were ignored."""
    made = finished(dense())
    output = made.output.clone()
    output[5, 1] *= 1.5
    picture, figure = figure_of(made.with_result(output, made.lse), replace(CPU, rows=(1, 5, 6), heads=(1,)))
    assert (picture.output > 1).tolist() == [[False], [True], [False]]
    axes = figure.axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1"]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["1", "5", "6"]
    assert "1 of 3 fail, worst: row 5, head 1, " in axes.get_title()


@pytest.mark.parametrize("shape", [(3000, 8), (3000, 1), (5, 300), (128, 128), (1, 1)])
def test_no_cell_hides_a_wrong_row(shape):
    """One wrong row of 3,000 fell between the pixels of a picture 550 high."""
    for place in (0, shape[0] * shape[1] // 3, shape[0] * shape[1] - 1):
        factors = torch.full(shape, 0.5)
        factors.view(-1)[place] = 7.0
        shown = plot.cells(factors)
        assert shown.shape == (min(shape[0], 128), min(shape[1], 128))
        assert (shown == 7.0).sum() == 1
        row, head = (shown == 7.0).nonzero()[0].tolist()
        assert abs(row / len(shown) - (place // shape[1]) / shape[0]) < 1 / 64
        assert abs(head / shown.shape[1] - (place % shape[1]) / shape[1]) < 1 / 64


def test_one_wrong_row_of_thousands_is_seen_in_the_pixels(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    call = dense(lengths=(2,) * 750, heads=1, page=2)
    reference = torch.randn(3000, 1, 32, generator=torch.Generator().manual_seed(0)), torch.ones(3000, 1)
    wrong = reference[0].clone()
    wrong[1234, 0, 10] += 1
    red = []
    for name, output in (("right", reference[0]), ("wrong", wrong)):
        results = Results(call, tuple(range(3000)), reference, (output, reference[1]), KernelResult())
        plot._figure(results, plot.judge(results, CPU), CPU).savefig(tmp_path / f"{name}.png")
        pixels = imread(tmp_path / f"{name}.png")[80:680, 90:560, :3]
        red.append(int(((pixels[..., 0] > 0.6) & (pixels[..., 1] < 0.45) & (pixels[..., 2] < 0.3)).any(1).sum()))
    assert red[0] == 0
    assert 3 <= red[1] <= 40


@pytest.mark.parametrize("value", [0.0, 1.0, math.nan, math.inf])
def test_a_reference_that_is_all_zero_is_drawn(tmp_path, value):
    """`--plot` ended in an internal error where every row sees nothing."""
    made = finished(dense(lengths=(0, 0)))
    picture, figure = figure_of(made.with_result(torch.full_like(made.output, value), made.lse))
    assert bool((picture.output > 1).all()) == (value != 0)
    assert not bool(((picture.output > 1) != (picture.output == math.inf)).any())
    figure.savefig(tmp_path / "zero.png")
    assert ("output wrong" in figure.get_suptitle()) == (value != 0)
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert f"the reference is all zero,\nthe largest value is {value:.3g}" in texts


def test_the_result_that_is_further_off_is_drawn():
    """With a right kernel the picture of a wrong captured output was that of the kernel."""
    made = finished(dense())
    results = compute(made.with_result(made.output * 2, made.lse), CPU)
    kernel = KernelResult(output=made.output, lse=made.lse)
    assert plot.judge(replace(results, kernel=kernel), CPU).judged == "captured"
    assert (
        plot.judge(replace(results, captured=(made.output, made.lse), kernel=KernelResult(output=made.output * 2, lse=made.lse)), CPU).judged
        == "kernel"
    )
    with pytest.raises(CannotRun, match="no output to draw"):
        plot.judge(replace(results, captured=(None, None)), CPU)


def test_what_just_fails_does_not_look_like_what_just_passes():
    pytest.importorskip("matplotlib")
    colours = plot._colours()
    passes, fails = colours(127), colours(128)
    assert passes[2] - passes[0] > 0.3  # blue
    assert fails[0] - fails[2] > 0.6  # orange


def test_a_name_is_no_formula(tmp_path):
    made = replace(finished(dense()), name="$x^{")
    figure_of(made)[1].savefig(tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000
