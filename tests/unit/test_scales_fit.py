"""Writing outer-scale files from amplitudes, and judging scales with captured latents."""

import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from scale_files import amplitudes, float32, gscale, module, v1, write_json, write_safetensors

from mlactl.errors import CannotRun, UsageError
from mlactl.profiles import load
from mlactl.scales.findings import Findings, InvalidScales, Severity
from mlactl.scales.fit import fit, write
from mlactl.scales.float32 import text32
from mlactl.scales.latents import measure
from mlactl.scales.outer import load_outer_scales
from mlactl.scales.verdict import Request, Verdict, verify


def fitted(tmp_path, document, **options):
    return fit(write_json(tmp_path / "amplitudes.json", document), **options)


@pytest.mark.parametrize(
    "shape",
    [
        lambda values: values,
        lambda values: {"max_abs": values},
        lambda values: {"layers": values},
        lambda values: {str(layer): value for layer, value in enumerate(values)},
        lambda values: {"max_abs": {str(layer): value for layer, value in reversed(list(enumerate(values)))}},
        lambda values: {"layers": {f"model.layers.{layer}.self_attn": {"max_abs": value} for layer, value in enumerate(values)}},
        lambda values: v1(len(values)),
    ],
)
def test_amplitudes_become_scales(tmp_path, shape):
    """Exactly max_abs/2688 as float32, max_abs kept, and verify-scales passes it, also with --strict."""
    values = amplitudes()
    made = fitted(tmp_path, shape(values))
    document = json.loads(made.data)
    assert document["max_abs"] == values
    assert document["scales"] == [float32(value / 2688) for value in values]
    assert list(document) == ["format", "num_layers", "latent_dim", "denominator", "scales", "max_abs"]
    target = tmp_path / "scales.json"
    write(made.data, target, force=False)
    report = verify(target, Request(profile=load("glm-5.2-tp4-dcp4")))
    assert report.verdict is Verdict.VALID
    assert load_outer_scales(target).scales == tuple(document["scales"])


def test_values_that_are_no_float32_numbers(tmp_path):
    made = fitted(tmp_path, [0.1, 1 / 3, 2.7182818284590452, 1e-20])
    write(made.data, tmp_path / "scales.json", force=False)
    assert verify(tmp_path / "scales.json", Request()).exit_code(strict=True) == 0


def test_headroom(tmp_path):
    """The scale must match the file's max_abs, so that holds the raised amplitude; what was measured stays beside it."""
    values = amplitudes()
    made = fitted(tmp_path, values, headroom=1.1)
    document = json.loads(made.data)
    assert document["measured_max_abs"] == values
    assert document["headroom"] == 1.1
    assert document["max_abs"] == [value * 1.1 for value in values]
    assert document["scales"] == [float32(value * 1.1 / 2688) for value in values]
    target = tmp_path / "scales.json"
    write(made.data, target, force=False)
    assert verify(target, Request()).exit_code(strict=True) == 0
    document["measured_max_abs"][7] *= 2
    (found,) = verify(write_json(target, document), Request()).findings
    assert (found.severity, found.check, found.layer) == (Severity.WARNING, "fit-fields", 7)


@pytest.mark.parametrize("headroom", [0.0, 0.9, -1.0, float("nan"), float("inf")])
def test_headroom_that_would_clip(tmp_path, headroom):
    with pytest.raises(UsageError, match="at least 1"):
        fitted(tmp_path, [1.0], headroom=headroom)


@pytest.mark.parametrize(
    ("document", "check", "layer"),
    [
        ([1.0, 0], "not-positive", 1),
        ([1.0, -2.0], "not-positive", 1),
        ([1.0, True], "not-a-number", 1),
        (["1.0"], "not-a-number", 0),
        ([None], "not-a-number", 0),
        ([], "amplitudes", None),
        ({}, "amplitudes", None),
        (3, "amplitudes", None),
        ({"max_abs": 3}, "amplitudes", None),
        ({"0": 1.0, "2": 1.0}, "missing-layer", 1),
        ({"0": 1.0, "00": 1.0}, "same-layer", 0),
        ({"0": 1.0, "last": 1.0}, "layer-name", None),
        ({"0": {"amax": 1.0}}, "not-a-number", 0),
        ({"999999999": 1.0}, "missing-layer", 0),
        ([1e-46], "not-positive", 0),
        ([1e-42], "not-positive", 0),
        ([1e300], "not-finite", 0),
    ],
)
def test_amplitudes_that_cannot_be_fitted(tmp_path, document, check, layer):
    """A missing or zero amplitude must not become a made-up scale."""
    with pytest.raises(InvalidScales) as caught:
        fitted(tmp_path, document)
    first = caught.value.findings[0]
    assert (first.check, first.layer) == (check, layer)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("data", [b"", b"{", b"[1.0, NaN]", b'{"0": 1, "0": 2}', b"\xff"])
def test_amplitudes_that_are_not_strict_json(tmp_path, data):
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(InvalidScales):
        fit(tmp_path / "a.json")


def test_fit_for_a_profile_counts_layers(tmp_path):
    with pytest.raises(InvalidScales, match="77 values, none for layer 77"):
        fitted(tmp_path, amplitudes(77), profile=load("glm-5.2-tp4-dcp4"))
    assert len(fitted(tmp_path, amplitudes(78), profile=load("glm-5.2-tp4-dcp4")).layers) == 78


def test_write_never_replaces_without_force(tmp_path):
    target = tmp_path / "scales.json"
    target.write_text("precious")
    with pytest.raises(UsageError, match="is there already") as caught:
        write(b"new", target, force=False)
    assert caught.value.hint == "--force replaces it"
    assert target.read_text() == "precious"
    write(b"new", target, force=True)
    assert target.read_text() == "new"
    dangling = tmp_path / "link.json"
    dangling.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="is there already"):
        write(b"new", dangling, force=False)
    with pytest.raises(UsageError, match="is a folder"):
        write(b"new", tmp_path, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "scales.json"]


def test_a_file_made_meanwhile_is_not_replaced(tmp_path, monkeypatch):
    target = tmp_path / "scales.json"
    monkeypatch.setattr(os.path, "lexists", lambda path: target.write_text("theirs") == 0)
    with pytest.raises(UsageError, match="is there already"):
        write(b"new", target, force=False)
    assert target.read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["scales.json"]


def test_write_leaves_nothing_behind_when_it_fails(tmp_path):
    with pytest.raises(CannotRun, match="no such file or directory"):
        write(b"new", tmp_path / "absent" / "scales.json", force=False)
    # As an unprivileged user in a folder of somebody else's; the runner's own is closed to other users.
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    code = f"""
import os
from pathlib import Path
from mlactl.errors import CannotRun
from mlactl.scales.fit import write
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
else:
    os.chmod({str(folder)!r}, 0o555)
try:
    write(b'new', Path({str(folder)!r}) / 'scales.json', force=False)
except CannotRun as error:
    print(error.message)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{folder}/scales.json: permission denied\n"
    assert list(folder.iterdir()) == []
    folder.rmdir()


# ---- latents


def latents(path: Path, layers: dict[int, np.ndarray], dtype: str = "F32") -> Path:
    tensors = {}
    for layer, values in layers.items():
        raw = values.astype("<f4")
        data = (raw.view("<u4") >> 16).astype("<u2").tobytes() if dtype == "BF16" else raw.astype({"F32": "<f4", "F16": "<f2"}[dtype]).tobytes()
        tensors[f"model.layers.{layer}.self_attn.kv_c"] = (dtype, list(values.shape), data)
    return write_safetensors(path, tensors)


GRID = [mantissa * 2.0**-9 for mantissa in range(8)] + [(1 + mantissa / 8) * 2.0**exponent for exponent in range(-6, 9) for mantissa in range(8)][:-1]
"""Every E4M3 value from 0 to 448, at the index that is its byte."""


def e4m3(value: float) -> float:
    """Round to nearest, ties to even, by trying every value: the slow truth."""
    return GRID[min(range(len(GRID)), key=lambda code: (abs(GRID[code] - value), code % 2))]


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_share_of_group_scales_under_the_normal_range(tmp_path, dtype):
    rng = np.random.default_rng(0)
    values = np.exp(rng.normal(-4, 3, (40, 512))).clip(1e-6, 60) * rng.choice([-1, 1], (40, 512))
    values[3, :64] = 0  # four groups that are all zero do not count
    path = latents(tmp_path / "latents.safetensors", {7: values.astype(np.float32)}, dtype)
    findings = Findings()
    found = measure(path, {7: 0.02}, findings)[7]
    if dtype == "F32":
        stored = values.astype(np.float32)
    elif dtype == "F16":
        stored = values.astype(np.float16).astype(np.float32)
    else:
        stored = ((values.astype("<f4").view("<u4") >> 16) << 16).astype("<u4").view("<f4")
    groups = [
        float(np.float32(np.float32(group.max()) / np.float32(0.02)) / np.float32(6)) for group in np.abs(stored).reshape(-1, 16) if group.max() > 0
    ]
    rounded = [e4m3(min(scale, 448.0)) for scale in groups]
    assert found.groups == len(groups) == 40 * 32 - 4
    assert found.underflow_share == sum(scale < 2**-6 for scale in rounded) / len(groups)
    assert found.zero_share == sum(scale == 0 for scale in rounded) / len(groups)
    assert found.max_abs == np.abs(stored).max()


@pytest.mark.parametrize(
    ("group_scale", "under", "zero"),
    [(2**-6, 0, 0), (2**-6 - 2**-10, 0, 0), (2**-6 - 2**-9, 1, 0), (2**-9, 1, 0), (2**-10, 1, 1), (1.1 * 2**-10, 1, 0)],
)
def test_rounding_decides_what_is_under(tmp_path, group_scale, under, zero):
    """Ties go to even: 7.5 * 2^-9 becomes the smallest normal, half of the smallest subnormal becomes 0."""
    path = latents(tmp_path / "latents.safetensors", {0: np.full((1, 512), 6 * group_scale, np.float32)})
    found = measure(path, {0: 1.0}, Findings())[0]
    assert (found.underflow_share, found.zero_share) == (under, zero)


def test_identity_scales_are_told_from_calibrated_ones(tmp_path):
    """A scale file alone cannot tell: with 1.0 everywhere the shallow layers' group scales underflow."""
    rng = np.random.default_rng(1)
    shallow = (rng.normal(0, 0.005, (64, 512))).astype(np.float32)
    path = latents(tmp_path / "latents.safetensors", {0: shallow, 1: shallow * 200})
    good = write_json(
        tmp_path / "good.json", v1(2, scales=[float(np.abs(shallow).max()) / 2688, float(np.abs(shallow).max()) * 200 / 2688], max_abs=None)
    )
    identity = write_json(tmp_path / "identity.json", v1(2, scales=[1.0, 1.0], max_abs=None))
    assert verify(good, Request(latents=path)).findings == ()
    assert [row.underflow_share for row in verify(good, Request(latents=path)).layers] == [0.0, 0.0]
    found = {(row.check, row.layer) for row in verify(identity, Request(latents=path)).findings}
    assert found == {("all-identity", None), ("latent-underflow", 0)}


@pytest.mark.parametrize("layers", [{7: np.ones((2, 512))}, {0: np.zeros((2, 512)), 1: np.zeros((2, 512))}])
def test_latents_of_no_layer_are_not_a_clean_verdict(tmp_path, layers):
    """The file was `valid`, with a note a layer: nobody saw that nothing had been measured."""
    scales = write_json(tmp_path / "scales.json", v1(2))
    report = verify(scales, Request(latents=latents(tmp_path / "latents.safetensors", layers)))
    assert (report.verdict, report.measured, report.exit_code(strict=True)) == (Verdict.WARNINGS, 0, 1)
    assert report.as_json(layers=False)["layers_measured"] == 0
    (found,) = [row for row in report.findings if row.severity is Severity.WARNING]
    assert (found.check, found.value, found.effect) == (
        "latents-none",
        "latents.safetensors has none for any layer of this file",
        "nothing was measured",
    )
    some = verify(scales, Request(latents=latents(tmp_path / "some.safetensors", {1: np.full((2, 512), amplitudes(2)[1])})))
    assert (some.verdict, some.measured) == (Verdict.VALID, 1)
    assert verify(scales, Request()).measured is None


def test_latents_that_cannot_be_used(tmp_path):
    scales = write_json(tmp_path / "scales.json", v1(3))
    path = latents(tmp_path / "latents.safetensors", {0: np.full((2, 512), np.nan, np.float32), 1: np.ones((2, 511), np.float32)})
    found = {(row.severity.value, row.check, row.layer) for row in verify(scales, Request(latents=path)).findings}
    assert found == {("error", "latents", 0), ("warning", "latents", None), ("note", "latents", 1), ("note", "latents", 2)}
    path.write_bytes(path.read_bytes()[:-1])
    assert any(row.check == "latents" and row.severity is Severity.ERROR for row in verify(scales, Request(latents=path)).findings)
    with pytest.raises(CannotRun):
        verify(scales, Request(latents=tmp_path / "absent"))
    with pytest.raises(UsageError, match="for outer-scale files"):
        verify(path, Request(latents=path))


# ---- what a file is held against


def test_against_compares_values_and_not_bytes(tmp_path):
    """Two nodes' files had different digests and equal scales, and a day went into finding that out."""
    a = write_json(tmp_path / "a.json", v1())
    b = tmp_path / "b.json"
    b.write_bytes(load_outer_scales(a).dump())
    report = verify(a, Request(against=b))
    assert report.against.text() == "0 of 78 differ, though the digests do"
    assert report.verdict is Verdict.VALID
    b.write_bytes(a.read_bytes())
    assert verify(a, Request(against=b)).against.text() == "0 of 78 differ, byte for byte the same file"
    changed = v1(max_abs=None)
    changed["scales"][17] = 0.25
    write_json(b, changed)
    report = verify(a, Request(against=b))
    assert (report.against.differ, report.verdict) == (1, Verdict.INVALID)
    (found,) = report.findings
    assert (found.check, found.layer, found.expected) == ("differs", 17, "0.25 in b.json")
    assert verify(a, Request(against=write_json(b, v1(76)))).against.differ == 77  # all but layer 0


def test_against_what_cannot_be_compared(tmp_path):
    a = write_json(tmp_path / "a.json", v1())
    other = write_json(tmp_path / "g.json", gscale())
    (found,) = verify(a, Request(against=other)).findings
    assert (found.check, "quantisers differ" in found.effect) == ("against", True)
    (found,) = verify(a, Request(against=write_json(other, {}))).findings
    assert found.check == "against"
    with pytest.raises(UsageError, match="a checkpoint"):
        verify(a, Request(against=write_safetensors(tmp_path / "m.safetensors", module("a.b"))))
    with pytest.raises(CannotRun):
        verify(a, Request(against=tmp_path / "absent"))


def test_pinned_digest(tmp_path):
    a = write_json(tmp_path / "a.json", v1())
    digest = load_outer_scales(a).sha256
    for pin in (digest, digest.upper(), f"sha256:{digest}"):
        assert verify(a, Request(sha256=pin)).verdict is Verdict.VALID
    (found,) = verify(a, Request(sha256="0" * 64)).findings
    assert (found.check, found.value) == ("sha256", digest)
    with pytest.raises(UsageError, match="64 hex digits"):
        verify(a, Request(sha256="abc"))
    model = write_safetensors(tmp_path / "m.safetensors", module("model.layers.0.x"))
    assert [row.check for row in verify(model, Request(sha256=digest)).findings] == ["sha256"]
    with pytest.raises(UsageError, match="pins one file"):
        verify(tmp_path, Request(sha256=digest))


def test_float32_text_is_short_and_exact():
    for value in (1 / 3584, 0.1, 1.0, 3e38, 1.4e-45, 2688 / 7):
        assert float32(float(text32(float32(value)))) == float32(value)
    assert text32(float32(0.1)) == "0.1"
    assert struct.pack("<f", float(text32(float32(1 / 3584)))) == struct.pack("<f", 1 / 3584)
