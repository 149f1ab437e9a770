"""The compare engine against brute force, and the faults that other tools average away."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlactl.errors import UsageError
from mlactl.replay import tally as engine
from mlactl.replay import tolerances
from mlactl.replay.compare import Axes, compare, ulp_distance

BF16 = tolerances.for_output("bf16", "decode")
AXES = Axes(("row", "head", "dim"), "request", (0, 0, 1, 1))


def pair(seed=0, rows=4, heads=3, dims=64):
    generator = torch.Generator().manual_seed(seed)
    expected = torch.randn(rows, heads, dims, generator=generator)
    return expected.to(torch.bfloat16), expected


def test_half_a_bf16_ulp_at_magnitude_30_passes():
    """An absolute tolerance of 1e-2, fine near 1, failed outputs near 30 where bf16 itself steps by 0.125."""
    actual = torch.full((4, 8), 30.0, dtype=torch.bfloat16)
    found = compare(actual, actual.float() + 0.0625, tolerances.for_dtype("bfloat16"), name="x")
    assert found.matches
    assert found.max_abs == 0.0625
    assert compare(actual, actual.float() + 0.13, tolerances.for_dtype("bfloat16"), name="x").status == "mismatch"


def test_nan_on_both_sides_fails_unless_allowed():
    """NaN against NaN passed in a tool that compared with equal_nan by default, and hid an uninitialised output."""
    value = torch.tensor([[1.0, math.nan], [2.0, 3.0]])
    found = compare(value, value.clone(), tolerances.for_dtype("float32"), name="x")
    assert (found.status, found.mismatches, found.bad_rows, found.nan_actual, found.nan_expected) == ("mismatch", 1, 1, 1, 1)
    assert found.needed is None
    assert found.first.index == (0, 1)
    assert math.isnan(found.first.actual)
    assert found.first.ulp is None
    allowed = compare(value, value.clone(), tolerances.for_dtype("float32"), name="x", allow_nan=True)
    assert allowed.matches
    assert "allowed" in allowed.notes[0]


@pytest.mark.parametrize(
    ("ours", "theirs"), [(math.nan, 1.0), (1.0, math.nan), (math.inf, -math.inf), (math.inf, 1.0), (1.0, math.inf), (-math.inf, 0.0)]
)
def test_what_is_not_finite_must_agree_by_position(ours, theirs):
    actual, expected = torch.ones(3, 4), torch.ones(3, 4)
    actual[1, 2], expected[1, 2] = ours, theirs
    found = compare(actual, expected, tolerances.for_dtype("float32"), name="x", allow_nan=True)
    assert (found.status, found.mismatches, found.first.index, found.needed) == ("mismatch", 1, (1, 2), None)


def test_equal_infinities_agree_and_are_left_out_of_values():
    """LSE of rows that see nothing is -inf on both sides; -inf less -inf is NaN and failed a right kernel."""
    lse = torch.tensor([[-math.inf, 2.0], [3.0, -math.inf]])
    found = compare(lse, lse.clone(), tolerances.for_lse(), name="lse")
    assert (found.status, found.infinite, found.max_abs, found.bitwise) == ("match", 2, 0.0, True)


def test_one_bad_row_in_4096_fails_and_is_named():
    """A mean over the batch let one wrong row of 4,096 pass."""
    actual, expected = pair(1, rows=4096, heads=1, dims=512)
    actual[2931] = actual[2931] * 1.02
    found = compare(actual, expected, BF16, name="output", axes=Axes(("row", "head", "dim")))
    assert (found.status, found.bad_rows, found.rows) == ("mismatch", 1, 4096)
    assert dict(found.first.coordinates)["row"] == 2931
    assert found.worst_row.coordinates == (("row", 2931), ("head", 0))
    assert found.worst_row.norm_ratio == pytest.approx(1.02, abs=2e-3)
    row = next(cluster for cluster in found.clusters if cluster.axis == "row")
    assert (row.indices, row.extent, row.top[0][0]) == (1, 4096, 2931)


def test_all_zero_against_a_tiny_reference_fails():
    """An all-zero output passed an absolute tolerance of 1e-5 because the reference was 1e-6."""
    found = compare(torch.zeros(4, 8), torch.full((4, 8), 1e-6), tolerances.for_dtype("float32"), name="x")
    assert found.status == "mismatch"
    assert "all zero" in found.notes[0]
    loose = tolerances.overridden(tolerances.for_dtype("float32"), atol=1e-3)
    assert compare(torch.zeros(4, 8), torch.full((4, 8), 1e-6), loose, name="x").status == "mismatch"


def test_empty_tensors_are_nothing_to_compare():
    with pytest.raises(UsageError, match="nothing to compare"):
        compare(torch.zeros(0, 4), torch.zeros(0, 4), BF16, name="x")


def test_shapes_that_differ_name_both():
    with pytest.raises(UsageError, match=r"\[2, 3\] against \[3, 2\]"):
        compare(torch.zeros(2, 3), torch.zeros(3, 2), BF16, name="x")


@pytest.mark.parametrize("factor", [1.02, 0.37, 0.9])
def test_a_scaled_output_is_refused_though_its_cosine_is_1(factor):
    """A dropped scale of 0.9 has cosine 0.9999955; only the norm sees that the output is 11% too large."""
    _, expected = pair(2, dims=512)
    found = compare(expected * factor, expected, BF16, name="output", axes=AXES)
    assert found.cosine > 0.99999
    assert found.status == "mismatch"
    assert found.bad_rows == found.rows == 12
    assert found.norm_deviation == pytest.approx(abs(factor - 1), rel=1e-4)


def test_a_row_can_fail_by_its_norm_alone():
    expected = torch.ones(2, 1, 512)
    actual = expected * 1.008
    found = compare(actual, expected, BF16, name="output", axes=Axes(("row", "head", "dim")))
    assert (found.status, found.mismatches, found.bad_rows) == ("mismatch", 0, 2)
    assert found.worst is not None


def test_first_and_worst_are_those_of_brute_force():
    actual, expected = pair(3, rows=4, dims=128)
    actual[1, 2, 7] += 0.5
    actual[3, 0, 100] -= 2.0
    actual[3, 0, 101] += 1.0
    found = compare(actual, expected, BF16, name="output", axes=AXES)
    allowed = expected.abs().amax(2, keepdim=True) * BF16.row
    ratio = (actual.double() - expected.double()).abs() / allowed.double()
    wrong = (ratio > 1).flatten().nonzero()[:, 0]
    assert found.mismatches == len(wrong) == 3
    assert found.first.index == (1, 2, 7)
    assert found.first.coordinates == (("request", 0), ("row", 1), ("head", 2), ("dim", 7))
    assert found.worst.index == (3, 0, 100)
    assert dict(found.worst.coordinates) == {"request": 1, "row": 3, "head": 0, "dim": 100}
    assert found.worst.actual == float(actual[3, 0, 100])
    assert found.worst.expected == float(expected[3, 0, 100])
    assert found.needed.row == pytest.approx(float(ratio.max()) * BF16.row, rel=1e-6)
    clusters = {cluster.axis: cluster for cluster in found.clusters}
    assert clusters["request"].top == ((1, 2, 768), (0, 1, 768))
    assert clusters["row"].top == ((3, 2, 384), (1, 1, 384))
    assert clusters["head"].top == ((0, 2, 512), (2, 1, 512))
    assert clusters["dim"].indices == 3


@given(seed=st.integers(0, 1000), scale=st.floats(1e-4, 1.0), rtol=st.sampled_from([0.0, 1e-3, 0.01]))
def test_the_smallest_tolerance_passes_and_anything_less_does_not(seed, scale, rtol):
    generator = torch.Generator().manual_seed(seed)
    expected = torch.randn(5, 33, generator=generator)
    actual = expected + scale * torch.randn(5, 33, generator=generator)
    used = tolerances.overridden(BF16, rtol=rtol, row=0.01)
    found = compare(actual, expected, used, name="x")
    assert compare(actual, expected, found.needed.scaled(1 + 1e-5), name="x").matches
    assert not compare(actual, expected, found.needed.scaled(1 - 1e-5), name="x").matches


@pytest.mark.parametrize("block", [1, 100, 4096])
def test_the_size_of_blocks_changes_nothing(monkeypatch, block):
    actual, expected = pair(4, rows=16, dims=64)
    actual[7, 1] *= 1.5
    actual[11, 2, 5] = math.nan
    axes = Axes(("row", "head", "dim"))
    whole = compare(actual, expected, BF16, name="x", axes=axes)
    monkeypatch.setattr(engine, "BLOCK_ELEMENTS", block)
    cut = compare(actual, expected, BF16, name="x", axes=axes)
    for name in ("status", "mismatches", "bad_rows", "max_abs", "max_rel", "first", "nan_actual", "clusters", "notes"):
        assert str(getattr(cut, name)) == str(getattr(whole, name)), name
    assert cut.cosine == pytest.approx(whole.cosine, abs=1e-6)


def test_very_long_rows_are_judged_in_pieces():
    expected = torch.randn(300_000, generator=torch.Generator().manual_seed(0))
    actual = expected.clone()
    actual[123_456] += 1
    found = compare(actual, expected, tolerances.for_dtype("float32"), name="x")
    assert (found.mismatches, found.first.index, found.worst.index) == (1, (123_456,), (123_456,))


def test_integers_and_bytes_are_exact():
    actual = torch.arange(12).reshape(3, 4)
    exact = tolerances.for_dtype("int64")
    assert compare(actual, actual.clone(), exact, name="x").matches
    changed = actual.clone()
    changed[2, 1] += 1
    found = compare(actual, changed, exact, name="x")
    assert (found.mismatches, found.first.index, found.needed) == (1, (2, 1), None)
    big = torch.tensor([[2**53, 1]])
    assert not compare(big, big - 1, exact, name="x").matches


@pytest.mark.parametrize(
    ("left", "right", "dtype", "distance"),
    [
        (30.0, 30.125, torch.bfloat16, 1),
        (0.0, -0.0, torch.float32, 0),
        (1.0, 1.0 + 2**-23, torch.float32, 1),
        (-(2.0**-149), 2.0**-149, torch.float32, 2),
        (448.0, 416.0, torch.float8_e4m3fn, 1),
        (math.inf, 65504.0, torch.float16, 1),
        (math.nan, 1.0, torch.float32, None),
        (1.0, 2.0, torch.int32, None),
    ],
)
def test_ulp_distance(left, right, dtype, distance):
    assert ulp_distance(left, right, dtype) == distance


def test_overflowing_norms_are_not_taken_for_wrong_rows():
    """Squares of 1e25 overflow fp32: the row is judged in fp64."""
    expected = torch.full((2, 64), 1e25)
    assert compare(expected, expected.clone(), tolerances.for_dtype("float32"), name="x").matches


def test_a_slice_names_coordinates_of_the_whole():
    actual, expected = pair(5, rows=2, heads=1, dims=16)
    actual[1, 0, 3] += 1
    axes = Axes(("row", "head", "dim"), "request", (0, 3), ((4, 9), (2,)))
    found = compare(actual, expected, BF16, name="x", axes=axes)
    assert dict(found.worst.coordinates) == {"request": 3, "row": 9, "head": 2, "dim": 3}
    assert [cluster.top[0][0] for cluster in found.clusters] == [3, 9, 2, 3]
