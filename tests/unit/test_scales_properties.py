"""Properties of the loaders: whatever the bytes, a verdict; valid stays valid; one changed value is found and named."""

import json
import struct
import tempfile
from pathlib import Path

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scale_files import BITS, float32, gscale, header_of, module, pack, scalar, v1

from mlactl.profiles import load
from mlactl.scales import header as header_module
from mlactl.scales import verdict
from mlactl.scales.findings import Severity
from mlactl.scales.outer import examine_bytes, load_outer_scales
from mlactl.scales.verdict import Request, Verdict, verify

GLM = load("glm-5.2-tp4-dcp4")

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    max_leaves=20,
)
near_scales = st.dictionaries(
    st.sampled_from(
        ["format", "schema", "num_layers", "latent_dim", "denominator", "scales", "max_abs", "layers", "algorithm", "record_layout", "headroom"]
    ),
    json_values
    | st.sampled_from(["nvfp4_ds_mla_outer_scale_v1", "nvfp4_ds_mla_outer_scale_v2", "glm-nvfp4-mla-gscale-v1", 78, 512, 2688.0])
    | st.lists(st.floats() | st.booleans() | st.none(), max_size=4)
    | st.dictionaries(
        st.sampled_from(["3", "03", "layers.3.x", "layers.03.x", "layers.999999999"]),
        json_values | st.builds(lambda v: {"latent_scale": v}, json_values),
    ),
)


def judged(data: bytes, suffix: str) -> verdict.Report:
    """The verdict on bytes in a file of their own, encoded as the command line encodes it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"file{suffix}"
        path.write_bytes(data)
        report = verify(path, Request(profile=GLM))
        msgspec.json.encode(report.as_json(layers=True))
        assert (report.verdict is Verdict.INVALID) == (report.errors > 0)
        assert all(text.isprintable() for row in report.findings for text in (row.value, row.expected, row.effect, row.tensor or ""))
        return report


@given(st.binary(max_size=400), st.sampled_from([".json", ".safetensors", ".safetensors.index.json", ""]))
@example(b'{"format":' + b"[" * 100_000, ".json")
@example(b'{"schema": "glm-nvfp4-mla-gscale-v1", "layers": {"layers.0": {"latent_scale": 1e-400}}}', ".json")
@example(b'{"\\ud800": {"\\udfff": NaN}}', ".json")
def test_any_bytes_give_a_verdict(data, suffix):
    assert judged(data, suffix).verdict is Verdict.INVALID


@given(json_values | near_scales, st.sampled_from([".json", ".safetensors.index.json"]))
def test_any_json_gives_a_verdict(document, suffix):
    assert judged(json.dumps(document).encode(), suffix).verdict is Verdict.INVALID


entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*BITS, "F4", "nonsense"]),
        "shape": st.lists(st.integers(-1, 300), max_size=3),
        "data_offsets": st.lists(st.integers(-1, 300), max_size=3),
    }
)
names = st.sampled_from(
    [
        "weight",
        "weight_packed",
        "weight_scale",
        "weight_scale_2",
        "weight_global_scale",
        "input_scale",
        "k_proj.k_scale",
        "k_scale",
        "weight_scale_inv",
        "x_scale",
    ]
)


@given(
    st.dictionaries(names.map("model.layers.0.self_attn.q_proj.{}".format) | st.just("__metadata__"), entries | json_values, max_size=4),
    st.binary(max_size=300),
)
def test_any_header_gives_a_verdict(header, data):
    judged(pack(header, data), ".safetensors")


tensors = st.dictionaries(
    st.tuples(st.sampled_from(["self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "self_attn"]), names).map(
        lambda pair: f"model.layers.1.{pair[0]}.{pair[1]}"
    ),
    st.tuples(st.sampled_from(["U8", "F8_E4M3", "F32", "BF16"]), st.lists(st.integers(0, 5), max_size=3)).flatmap(
        lambda kind: st.binary(min_size=_size(*kind), max_size=_size(*kind)).map(lambda data: (kind[0], kind[1], data))
    ),
    max_size=6,
)


def _size(dtype: str, shape: list[int]) -> int:
    size = BITS[dtype] // 8
    for length in shape:
        size *= length
    return size


@given(tensors)
def test_any_intact_file_gives_a_verdict(made):
    """Whatever tensors an intact file holds, under whichever names and dtypes."""
    report = judged(pack(*header_of(made)), ".safetensors")
    assert "bad-header" not in {row.check for row in report.findings}


@given(st.data())
def test_a_cut_or_changed_checkpoint_gives_a_verdict(data):
    good = pack(*header_of(module("model.layers.0.self_attn.q_proj") | {"model.layers.0.self_attn.k_scale": scalar(0.5)}))
    position = data.draw(st.integers(0, len(good) - 1))
    if data.draw(st.booleans()):
        assert judged(good[:position], ".safetensors").verdict is Verdict.INVALID
    else:
        judged(good[:position] + bytes([data.draw(st.integers(0, 255))]) + good[position + 1 :], ".safetensors")


def both_ways(header: bytes, data_bytes: int):
    """What the fast and the slow reader of one header say: a list of tensors each, None for a refusal."""
    fast = header_module._fast(header, 8 + len(header), data_bytes, 0)
    try:
        return fast, header_module._slow(header, 8 + len(header), data_bytes, 0)
    except header_module.BadHeader:
        return fast, None


@given(st.data())
def test_the_fast_header_reader_accepts_nothing_that_the_slow_one_refuses(data):
    """Two readers of one format: what one takes and the other would not is how a lying header gets in."""
    header, body = header_of(module("a.b") | {"c": scalar(0.5)})
    text = json.dumps(header).encode()
    assert both_ways(text, len(body)) == (both_ways(text, len(body))[1],) * 2
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(1, len(text) - 1))  # byte 0 is looked at before either
        piece = data.draw(
            st.sampled_from(
                [b"", b"0", b"1", b"-", b" ", b'"', b"{", b"}", b",", b".0", b"e0", b"\\", b'"data_offsets":[0,0],', b'"dtype":"U8",', b"\xff"]
            )
        )
        text = text[:at] + piece + text[at + data.draw(st.integers(0, 2)) :]
    fast, slow = both_ways(text, len(body))
    assert fast is None or fast == slow


positive = st.floats(min_value=1e-30, max_value=1e30)


@given(st.lists(positive, min_size=1, max_size=90), st.booleans())
def test_valid_stays_valid(amplitudes, with_max_abs):
    """Load, dump, load: the same scales, and nothing to say about either file."""
    document = v1(len(amplitudes), scales=[value / 2688 for value in amplitudes], max_abs=amplitudes if with_max_abs else None)
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder) / "first.json", Path(folder) / "second.json"
        first.write_text(json.dumps(document))
        loaded = load_outer_scales(first)
        second.write_bytes(loaded.dump())
        again = load_outer_scales(second)
        assert again.scales == loaded.scales == tuple(float32(value / 2688) for value in amplitudes)
        assert [row.max_abs for row in again.layers] == (amplitudes if with_max_abs else [None] * len(amplitudes))
        third = Path(folder) / "third.json"
        third.write_bytes(again.dump())
        assert third.read_bytes() == second.read_bytes()


@given(st.lists(positive, min_size=1, max_size=90))
def test_valid_gscale_stays_valid(scales):
    document = gscale(layers=range(len(scales)))
    for name, value in zip(document["layers"], scales, strict=True):
        document["layers"][name]["latent_scale"] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scales.json"
        path.write_text(json.dumps(document))
        loaded = load_outer_scales(path)
        path.write_bytes(loaded.dump())
        assert load_outer_scales(path).layers == loaded.layers


other_values = (
    st.floats(allow_nan=True, allow_infinity=True)
    | st.booleans()
    | st.none()
    | st.text(max_size=4)
    | st.integers(-(10**400), 10**400)
    | st.lists(st.floats(), max_size=2)
)


@settings(max_examples=400)
@given(st.integers(0, 77), st.sampled_from(["scales", "max_abs"]), other_values)
def test_one_changed_value_of_a_layer_is_found_and_named(layer, field, value):
    document = v1()
    before = document[field][layer]
    # max_abs may change by less than the scale's own float32 step: that is the same calibration, and no fault.
    if type(value) in (int, float) and abs(value) < 1e300 and abs(value - before) <= before * 2.0**-22:
        return
    document[field][layer] = value
    found = [row for row in examine_bytes(Path("x"), json.dumps(document).encode()).findings.rows() if row.severity is Severity.ERROR]
    assert found, (field, layer, value)
    assert {row.layer for row in found} == {layer}


@given(st.integers(0, 77), st.integers(1, 3), st.sampled_from([-1, 1]))
def test_one_float32_step_of_a_scale_is_found(layer, steps, direction):
    document = v1()
    bits = struct.unpack("<I", struct.pack("<f", document["scales"][layer]))[0]
    document["scales"][layer] = struct.unpack("<f", struct.pack("<I", bits + direction * steps))[0]
    (found,) = examine_bytes(Path("x"), json.dumps(document).encode()).findings.rows()
    assert (found.check, found.layer) == ("not-max-abs", layer)


@given(st.sampled_from(["format", "num_layers", "latent_dim", "denominator", "scales", "max_abs"]), other_values)
def test_one_changed_field_is_found_and_named(field, value):
    document = v1()
    if type(value) is type(document[field]) and value == document[field]:
        return
    if field == "denominator" and value == 2688:
        return
    document[field] = value
    found = [row for row in examine_bytes(Path("x"), json.dumps(document).encode()).findings.rows() if row.severity is Severity.ERROR]
    blamed = {row.tensor for row in found}
    # A changed count is told as layers too few or too many of each list.
    assert field in blamed or (field == "num_layers" and blamed == {"scales", "max_abs"})
