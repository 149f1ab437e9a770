"""The compare engine against brute force, and the faults that other tools average away."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlactl.errors import UsageError
from mlactl.replay import tally as engine
from mlactl.replay import tolerances
from mlactl.replay.compare import Axes, compare, ulp_distance
from mlactl.replay.gates import lse_factors, output_factors

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
    assert cut.worst_row.not_finite == whole.worst_row.not_finite == 1


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


EXACT = tolerances.for_dtype("int64")


@pytest.mark.parametrize(
    ("left", "right", "types"),
    [
        (2**53 + 1, 2**53, ("int64", "int64")),
        (-(2**63), -(2**63) + 1, ("int64", "int64")),
        (2**63 - 1, -(2**63), ("int64", "int64")),
        (2**64 - 1, 2**64 - 2, ("uint64", "uint64")),
        (2**64 - 1, -1, ("uint64", "int64")),
        (2**53 + 1, float(2**53), ("int64", "float64")),
        (2**31, 2**31 - 1, ("uint32", "int32")),
    ],
)
def test_integers_are_equal_or_they_are_not(left, right, types):
    """int64 was compared in fp64, where 2^53 + 1 is 2^53: unequal tensors passed."""
    actual = torch.tensor([[7, left]], dtype=getattr(torch, types[0]))
    expected = torch.tensor([[7, right]], dtype=getattr(torch, types[1]))
    found = compare(actual, expected, EXACT, name="x")
    assert (found.status, found.mismatches, found.first.index, found.needed) == ("mismatch", 1, (0, 1), None)
    assert (found.first.actual, found.first.expected) == (left, right)
    assert compare(actual, actual.clone(), EXACT, name="x").bitwise
    off = abs(left - int(right))
    assert compare(actual, expected, tolerances.overridden(EXACT, atol=off * 1.01), name="x").matches
    assert not compare(actual, expected, tolerances.overridden(EXACT, atol=off * 0.99), name="x").matches


@pytest.mark.parametrize(("left", "right"), [(-1e-8, 0), (1e-8, 0), (-1.0000001, -1), (1.0000001, 1), (-(2.0**40) - 2.0**-12, -(2**40))])
def test_fractions_are_no_integers(left, right):
    """A negative fraction was split into halves of other signs, which rounded it away: it matched the integer."""
    actual, expected = torch.tensor([[7, left]], dtype=torch.float64), torch.tensor([[7, right]])
    found = compare(actual, expected, EXACT, name="x")
    assert (found.status, found.first.index, found.max_abs) == ("mismatch", (0, 1), abs(left - right))


def test_views_of_the_negative_bit_are_compared():
    """`.conj().imag` carries its minus sign as a bit of the tensor, which survives a .pt file, and words cannot be taken of it."""
    one = torch.tensor([1 + 2j]).conj().imag
    assert one.is_neg()
    assert compare(one, torch.tensor([-2.0]), BF16, name="x").bitwise
    assert not compare(one, torch.tensor([2.0]), BF16, name="x").matches
    two = torch.tensor([1 + 2j, 3 + 4j]).conj().imag
    assert compare(two, torch.tensor([-2.0, -4.0]), BF16, name="x").bitwise


def test_a_single_element_of_a_strided_tensor_is_compared():
    assert compare(torch.tensor([1.0, 2.0])[::2], torch.tensor([1.0]), BF16, name="x").bitwise


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-3, 3)), min_size=1, max_size=20))
def test_differences_of_integers_are_those_of_python(pairs):
    right = [value for value, _ in pairs]
    left = [min(max(value + step, -(2**63)), 2**63 - 1) for value, step in pairs]
    found = compare(torch.tensor([left]), torch.tensor([right]), tolerances.overridden(EXACT, atol=1.0), name="x")
    errors = [abs(ours - theirs) for ours, theirs in zip(left, right, strict=True)]
    assert (found.mismatches, found.max_abs) == (sum(error > 1 for error in errors), max(errors))


@pytest.mark.parametrize("length", [65536, 65537, 65539, 100_003, 131_071])
def test_the_length_of_a_row_does_not_decide(length):
    """A row of prime length was judged element by element: an error of 2e-6 failed in 65,537 elements and passed in 65,536."""
    expected = torch.randn(length, generator=torch.Generator().manual_seed(length))
    found = compare(expected + 2e-6, expected, tolerances.for_dtype("float32"), name="x")
    assert (found.status, found.rows) == ("match", -(-length // 65536))
    assert 3e-7 < found.needed.row < 7e-7
    wrong = expected.clone()
    wrong[length - 1] += 1
    wrong[length // 2] += 2
    found = compare(wrong, expected, tolerances.for_dtype("float32"), name="x")
    assert (found.mismatches, found.first.index, found.worst.index) == (2, (length // 2,), (length // 2,))


def test_long_rows_of_several_dimensions_keep_their_places():
    expected = torch.randn(3, 2, 65_537, generator=torch.Generator().manual_seed(0))
    actual = expected.clone()
    actual[1, 1, 65_536] += 1
    actual[2, 0, 40_000] += 2
    found = compare(actual, expected, tolerances.for_dtype("float32"), name="x", axes=Axes(("row", "head", "dim")))
    assert (found.rows, found.bad_rows, found.first.index, found.worst.index) == (12, 2, (1, 1, 65_536), (2, 0, 40_000))
    assert found.worst_row.coordinates == (("row", 2), ("head", 0))
    assert {cluster.axis: cluster.top for cluster in found.clusters} == {
        "row": ((1, 1, 131_074), (2, 1, 131_074)),
        "head": ((0, 1, 196_611), (1, 1, 196_611)),
    }


def test_tensors_without_dimensions():
    """Two scalars that differ were an IndexError."""
    found = compare(torch.tensor(1.0), torch.tensor(1.5), tolerances.for_dtype("float32"), name="x")
    assert (found.status, found.mismatches, found.first.where(), found.clusters, found.worst_row) == ("mismatch", 1, "the only element", (), None)
    assert compare(torch.tensor(3), torch.tensor(3), EXACT, name="x").bitwise


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.ones(3).to_sparse(), "sparse_coo tensors are not compared"),
        (torch.ones(3, device="meta"), "meta tensors, which hold no values, are not compared"),
        (torch.ones(3, dtype=torch.complex64), "complex tensors are not compared"),
        (torch.zeros(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "float4_e2m1fn_x2 tensors are not compared"),
    ],
    ids=["sparse", "meta", "complex", "packed"],
)
def test_what_is_no_plain_tensor_is_refused(tensor, said):
    with pytest.raises(UsageError, match=said) as refused:
        compare(tensor, tensor, BF16, name="x")
    assert refused.value.hint.startswith("save ")


def test_rows_that_are_not_finite_are_never_perfect():
    """8,192 NaN of 8,192 had "max abs 0, cosine 1.0000000" and a worst row with an error of 0%: they were zeroed before the statistics."""
    actual, expected = pair(6, rows=4, heads=2, dims=64)
    actual[1, 1, 5:8] = math.nan
    found = compare(actual, expected, BF16, name="x", axes=AXES)
    assert (found.status, found.not_finite, found.failing.not_finite, found.mismatches) == ("mismatch", 3, 1, 3)
    assert all(math.isnan(value) for value in (found.max_abs, found.max_rel, found.cosine, found.norm_deviation))
    assert (found.needed, found.needed_factor) == (None, math.inf)
    row = found.worst_row
    assert (row.coordinates, row.not_finite) == ((("request", 0), ("row", 1), ("head", 1)), 3)
    assert all(math.isnan(value) for value in (row.cosine, row.norm_ratio, row.largest_error, row.largest_error_share))
    rest = compare(actual[2:], expected[2:], BF16, name="x")
    assert rest.matches
    assert found.notes[-1].startswith("not finite: 3 of 512 elements in 1 of 8 rows; the other rows are off by at most 0.0")
    everything = compare(torch.full_like(expected, math.nan), expected, BF16, name="x")
    assert (everything.mismatches, everything.notes) == (
        512, ("NaN: 512 in the output, 0 in the reference", "not finite: 512 of 512 elements in 8 of 8 rows"),
    )  # fmt: skip
    assert everything.nan_actual == 512
    assert math.isnan(everything.cosine)


def test_nan_that_is_allowed_leaves_the_rest_of_its_row_to_be_judged():
    actual, expected = pair(7)
    actual[0, 0, 0] = expected[0, 0, 0] = math.nan
    actual[0, 0, 9] += 1
    found = compare(actual, expected, BF16, name="x", axes=AXES, allow_nan=True)
    assert (found.not_finite, found.mismatches, found.first.index) == (0, 1, (0, 0, 9))
    assert found.max_abs == pytest.approx(1.0, abs=0.01)
    assert found.cosine < 0.9999


def test_where_elements_must_be_equal_the_worst_has_the_largest_error(monkeypatch):
    """Worst element and row were the first ones that differ, and no smallest tolerance was named though `--atol 1` passes."""
    exact = tolerances.overridden(BF16, atol=0.0)
    expected = torch.ones(6, 4)
    expected[1], expected[2] = 0, 0
    actual = expected.clone()
    actual[0, 1] += 2**-10
    actual[1, 1] += 2**-10
    actual[2, 2] += 2**-5
    actual[4, 3] -= 1
    actual[5, 0] += 2**-3
    for elements in (1 << 19, 4):  # in one block, and a row a block
        monkeypatch.setattr(engine, "BLOCK_ELEMENTS", elements)
        found = compare(actual, expected, exact, name="x")
        assert (found.first.index, found.worst.index, found.worst_row.coordinates) == ((0, 1), (4, 3), (("dim0", 4),))
        assert (found.needed.atol, found.needed.rtol, found.needed.row, found.needed_factor) == (1.0, 0.0, 0.0, math.inf)
        assert compare(actual, expected, found.needed, name="x").matches
        lost = actual.clone()
        lost[3, 2] = math.nan
        found = compare(lost, expected, exact, name="x")
        assert (found.worst.index, found.worst_row.coordinates, found.needed) == ((3, 2), (("dim0", 3),), None)
    found = compare((actual * 2**20).int(), (expected * 2**20).int(), EXACT, name="x")
    assert (found.worst.index, found.worst_row.coordinates, found.needed) == ((4, 3), (("dim0", 4),), None)


def test_a_difference_that_the_judged_type_cannot_tell_has_no_ulp_distance():
    actual, expected = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16), torch.tensor([[1.0001, 2.25]])
    found = compare(actual, expected, tolerances.overridden(BF16, atol=0.0), name="x")
    assert (found.first.index, found.first.ulp, found.worst.index, found.worst.ulp) == ((0, 0), None, (0, 1), 16)


def test_a_row_of_zeros_has_no_norm_to_compare_with():
    """Against an expected row of zeros the report had a norm of 150 digits and a percentage as long."""
    expected = torch.zeros(2, 1, 64)
    expected[0] = 1
    actual = expected.clone()
    actual[1, 0, 3] = 0.25
    found = compare(actual, expected, BF16, name="x", axes=Axes(("row", "head", "dim")))
    row = found.worst_row
    assert (row.cosine, row.norm_ratio, row.largest_error, row.largest_error_share) == (0.0, math.inf, 0.25, math.inf)
    assert (found.bad_rows, found.max_rel, found.needed) == (1, math.inf, None)


def test_a_row_that_fails_by_its_norm_says_what_limit_would_pass():
    """The smallest tolerance was "row 0.008" under the used 0.01, and yet it failed: norms were never mentioned."""
    expected = torch.ones(4, 2, 512)
    actual = expected.clone()
    actual[1, 0] *= 1.008
    actual[3] *= 1.006
    found = compare(actual, expected, BF16, name="x", axes=AXES)
    assert (found.mismatches, found.bad_rows, found.failing.norm, found.failing.cosine, found.failing.element) == (0, 3, 3, 0, 0)
    assert found.needed.norm == pytest.approx(0.008, rel=1e-4)
    assert found.needed.row == pytest.approx(0.008, rel=1e-4)
    assert found.needed_factor == pytest.approx(0.008 / 0.005, rel=1e-4)
    assert compare(actual, expected, replace(found.needed.scaled(1.001), norm=found.needed.norm * 1.001), name="x").matches
    assert not compare(actual, expected, replace(found.needed.scaled(1.001), norm=found.needed.norm * 0.999), name="x").matches
    clusters = {cluster.axis: (cluster.unit, cluster.top) for cluster in found.clusters}
    assert clusters == {
        "request": ("rows", ((1, 2, 4), (0, 1, 4))),
        "row": ("rows", ((3, 2, 2), (1, 1, 2))),
        "head": ("rows", ((0, 2, 4), (1, 1, 4))),
    }


def test_a_row_that_fails_by_its_cosine_says_so():
    generator = torch.Generator().manual_seed(8)
    expected = torch.randn(2, 1, 512, generator=generator)
    noise = torch.randn(512, generator=generator)
    noise *= 0.02 * expected[1, 0].norm() / noise.norm()
    actual = expected.clone()
    actual[1, 0] += noise
    loose = tolerances.Tolerance("t", "r", row=1.0, cosine=0.9999, norm=0.5)
    found = compare(actual, expected, loose, name="x", axes=Axes(("row", "head", "dim")))
    assert (found.mismatches, found.failing.cosine, found.failing.norm) == (0, 1, 0)
    assert found.needed.cosine == found.cosine == pytest.approx(1 - 0.02**2 / 2, abs=5e-5)
    assert compare(actual, expected, replace(loose, cosine=found.cosine - 1e-7), name="x").matches


def test_no_tolerance_lets_an_all_zero_output_pass():
    loose = tolerances.overridden(BF16, atol=1.0)
    found = compare(torch.zeros(2, 8), torch.full((2, 8), 1e-6), loose, name="x")
    assert (found.status, found.needed, found.needed_factor) == ("mismatch", None, math.inf)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1e-25), (torch.float32, 1e-40), (torch.float64, 1e-200), (torch.float64, 1e200)])
def test_norms_of_very_small_and_large_values_are_held_to_the_same(dtype, scale):
    """Squares of 1e-25 vanish in fp32 and those of 1e200 in fp64: norms 0.8% apart counted as equal."""
    expected = (torch.rand(2, 512, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1).mul(scale).to(dtype)
    found = compare((expected.double() * 1.008).to(dtype), expected, BF16, name="x")
    assert (found.mismatches, found.bad_rows) == (0, 2)
    assert found.norm_deviation == pytest.approx(0.008, rel=0.01)
    assert compare((expected.double() * 1.002).to(dtype), expected, BF16, name="x").matches


def test_denominators_of_requests_that_differ_in_length():
    """1 row of one request and 3 of another were both called 2 rows: "3,021 of 2,048"."""
    expected = torch.ones(4, 2, 8)
    axes = Axes(("row", "head", "dim"), "request", (0, 1, 1, 1))
    found = compare(expected * 2, expected, BF16, name="x", axes=axes)
    assert found.clusters[0].top == ((1, 48, 48), (0, 16, 16))
    assert found.clusters[0].extent == 2


def test_only_equal_bits_are_bitwise_equal():
    zero = torch.zeros(2, 4)
    assert compare(zero, zero.clone(), tolerances.for_dtype("float32"), name="x").bitwise
    found = compare(-zero, zero, tolerances.for_dtype("float32"), name="x")
    assert (found.status, found.max_abs, found.bitwise) == ("match", 0.0, False)
    nan = torch.tensor([[math.nan, 1.0]])
    assert compare(nan, nan.clone(), tolerances.for_dtype("float32"), name="x", allow_nan=True).bitwise


@given(seed=st.integers(0, 10_000), fault=st.sampled_from(["none", "scale", "element", "nan", "inf", "zero", "both", "noise"]), allow=st.booleans())
def test_gates_give_the_verdict_of_the_comparison(seed, fault, allow):
    """Pictures and explanations judge rows by gates: they must agree with the report on every one."""
    generator = torch.Generator().manual_seed(seed)
    expected = torch.randn(3, 2, 32, generator=generator)
    actual = expected * (1 + 1e-4 * torch.randn(3, 2, 32, generator=generator))
    place = (seed % 3, seed % 2)
    if fault == "scale":
        actual[place] *= 1 + (seed % 20) / 1000
    elif fault == "element":
        actual[(*place, 5)] += 0.05 * (seed % 3)
    elif fault == "nan":
        actual[(*place, 5)] = math.nan
    elif fault == "inf":
        actual[(*place, 5)] = expected[(*place, 5)] = math.inf
    elif fault == "zero":
        expected[place] = 0
    elif fault == "both":
        actual[(*place, 5)] = expected[(*place, 5)] = math.nan
    elif fault == "noise":
        actual[place] += 0.02 * torch.randn(32, generator=generator)
    factors = output_factors(actual, expected, BF16, allow_nan=allow)
    assert factors.shape == (3, 2)
    for row in range(3):
        for head in range(2):
            found = compare(actual[row, head][None], expected[row, head][None], BF16, name="x", allow_nan=allow)
            assert found.matches == (float(factors[row, head]) <= 1), (row, head, factors)
            assert found.needed_factor == pytest.approx(float(factors[row, head]), rel=1e-3, abs=2e-3)
    lse = lse_factors(actual[..., 0], expected[..., 0], tolerances.for_lse(), allow_nan=allow)
    for row in range(3):
        found = compare(actual[row, :, 0][None], expected[row, :, 0][None], tolerances.for_lse(), name="lse", allow_nan=allow)
        assert found.matches == bool((lse[row] <= 1).all())
