"""Outer-scale files: both formats, every fault people met, and what a deployment makes of a file."""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scale_files import LAYERS, amplitudes, float32, gscale, v1, write_json

from mlactl.errors import CannotRun, UsageError
from mlactl.profiles import load
from mlactl.scales.findings import InvalidScales, Severity
from mlactl.scales.needs import identities_needed
from mlactl.scales.outer import examine_bytes, load_outer_scales


def judge(document, profile=None):
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    return examine_bytes(Path("scales.json"), data, profile)


def errors(document, profile=None):
    return [row for row in judge(document, profile).findings.rows() if row.severity is Severity.ERROR]


def warnings(document, profile=None):
    return [row.check for row in judge(document, profile).findings.rows() if row.severity is Severity.WARNING]


def profile(**changes):
    """The shipped GLM-5.2 profile (78 layers, static NVFP4), with parts of it replaced: `model={"layers": 79}`."""
    shipped = load("glm-5.2-tp4-dcp4")
    parts = {name: dataclasses.replace(getattr(shipped, name), **values) for name, values in changes.items()}
    return dataclasses.replace(shipped, **parts)


def with_value(text: str, layer: int = 17) -> bytes:
    """A v1 file without max_abs whose scale of one layer is written as `text`."""
    document = v1(max_abs=None)
    document["scales"][layer] = "@"
    return json.dumps(document).replace('"@"', text).encode()


def test_a_valid_file_loads(tmp_path):
    path = write_json(tmp_path / "scales.json", v1())
    found = load_outer_scales(path)
    assert found.scales == tuple(float32(value / 2688) for value in amplitudes())
    assert (found.record_layout, found.latent_dim, found.identity_layers, found.identities) == ("nvfp4_ds_mla", 512, (), (0,))
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert found.scale_of("model.layers.17.self_attn.attn") == found.scales[17]
    assert found.scale_of("model.layers.78.mtp_block.self_attn.attn") == 1.0  # a draft layer
    with pytest.raises(KeyError):
        found.scale_of("lm_head")
    with pytest.raises(KeyError):
        found.scale_of(-1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.latent_dim = 1


def test_a_valid_gscale_file_loads(tmp_path):
    found = load_outer_scales(write_json(tmp_path / "scales.json", gscale()))
    assert len(found.scales) == LAYERS
    assert found.scales[17] == 18 / 1024
    assert found.record_layout == "glm-zero-rope-288b"


@pytest.mark.parametrize("count", [77, 79])
def test_s1_wrong_layer_count(count):
    """S1: one scale too few was padded with 1.0 elsewhere, one too many shifted every layer behind it."""
    document = v1(max_abs=None)
    document["scales"] = [0.001] * count
    (found,) = errors(document)
    assert (found.check, found.layer, found.tensor) == ("layer-count", min(count, LAYERS), "scales")
    assert str(count) in found.value
    assert found.expected == "78 values"


def test_s1_layer_17_missing_by_name():
    (found,) = errors(gscale(layers=[layer for layer in range(LAYERS) if layer != 17]))
    assert (found.check, found.layer) == ("missing-layer", 17)


@pytest.mark.parametrize(
    ("text", "check"),
    [
        ("0", "not-positive"),
        ("0.0", "not-positive"),
        ("-0.0", "not-positive"),
        ("-0.1", "not-positive"),
        ("1e-46", "not-positive"),
        ("1e999", "not-finite"),
        ("-1e999", "not-finite"),
        ("Infinity", "not-finite"),
        ("-Infinity", "not-finite"),
        ("NaN", "not-finite"),
        ("3.5e38", "not-finite"),
        ("9" * 5000, "not-finite"),
        ("true", "not-a-number"),
        ("false", "not-a-number"),
        ('"0.5"', "not-a-number"),
        ("null", "not-a-number"),
        ("[0.5]", "not-a-number"),
        ("{}", "not-a-number"),
    ],
)
def test_s2_one_value_that_is_no_scale(text, check):
    """S2: loaders elsewhere took true as 1, "0.5" as 0.5, NaN as it came, and clamped 0 to something small."""
    (found,) = errors(with_value(text))
    assert (found.check, found.layer, found.index, found.tensor) == (check, 17, (17,), "scales")
    shown = {"[0.5]": "a list of 1", "{}": "an empty object", "9" * 5000: "99999999999999999999… (5000 digits)"}.get(text, text)
    assert found.value == shown
    named = gscale()
    named["layers"]["model.layers.17.self_attn.attn"]["latent_scale"] = "@"
    (same,) = errors(json.dumps(named).replace('"@"', text).encode())
    assert (same.check, same.layer, same.tensor, same.value) == (check, 17, "model.layers.17.self_attn.attn", shown)


def test_the_decision_is_made_on_float32():
    assert judge(with_value("1.00000001")).layers[17].variant == "identity"
    assert judge(with_value("1.0000001")).layers[17].variant == "dynamic"
    assert judge(with_value("1")).layers[17].variant == "identity"
    assert errors(with_value("1.4e-45")) == []
    assert warnings(with_value("1.4e-45")) == ["subnormal"]


def test_s5_byte_order_mark_is_read_and_said():
    """S5: a file saved by an editor with a byte order mark was "not JSON" to the loader, with no word of why."""
    found = judge(b"\xef\xbb\xbf" + json.dumps(v1()).encode())
    assert [row.check for row in found.findings.rows()] == ["byte-order-mark"]
    assert len(found.layers) == LAYERS


@pytest.mark.parametrize(("key", "text"), [("num_layers", "78"), ("scales", "[]"), ("format", '"nvfp4_ds_mla_outer_scale_v1"')])
def test_s5_duplicate_key(key, text):
    """S5: of two equal keys the last one won in silence, and the file had been edited in the first one."""
    data = json.dumps(v1())[:-1] + f', "{key}": {text}}}'
    assert [(row.check, row.tensor) for row in errors(data.encode()) if row.check == "duplicate-key"] == [("duplicate-key", key)]


def test_s5_duplicate_key_deep_in_the_file():
    text = json.dumps(gscale()).replace('{"latent_scale": 0.017578125}', '{"latent_scale": 0.017578125, "latent_scale": 0.5}')
    (found,) = errors(text.encode())
    assert (found.check, found.tensor) == ("duplicate-key", "layers.model.layers.17.self_attn.attn.latent_scale")


@pytest.mark.parametrize("keys", [("03", "3"), ("model.layers.03.self_attn", "model.layers.3.self_attn"), ("a.layers.3.x", "b.layers.3.y")])
def test_s5_two_keys_for_one_layer(keys):
    """S5: "03" and "3" are two keys to JSON and one layer to whoever calls int() on them."""
    document = gscale(layers=[])
    document["layers"] = {f"model.layers.{layer}.self_attn": {"latent_scale": 0.1} for layer in range(3)}
    document["layers"] |= {key: {"latent_scale": 0.1} for key in keys}
    found = [row for row in errors(document) if row.check == "same-layer"]
    assert [row.layer for row in found] == [3]
    assert all(f'"{key}"' in found[0].value for key in keys)


def test_a_map_of_scales_is_no_list():
    document = v1(max_abs=None, scales={"03": 0.1, "3": 0.2})
    assert {row.check for row in errors(document)} == {"not-a-list", "same-layer"}


def test_a_name_with_a_leading_zero_is_nobodys():
    document = gscale(layers=range(3))
    document["layers"]["model.layers.03.self_attn.attn"] = {"latent_scale": 0.1}
    (found,) = errors(document)
    assert (found.check, found.layer) == ("layer-name", 3)


@pytest.mark.parametrize(
    ("field", "value", "check"),
    [
        ("denominator", 2688.1, "denominator"),
        ("denominator", 6.0, "denominator"),
        ("denominator", "2688", "denominator"),
        ("denominator", True, "denominator"),
        ("denominator", None, "denominator"),
        ("latent_dim", 576, "latent-dim"),
        ("latent_dim", 512.0, "latent-dim"),
        ("latent_dim", None, "latent-dim"),
        ("num_layers", 78.0, "num-layers"),
        ("num_layers", "78", "num-layers"),
        ("num_layers", True, "num-layers"),
        ("num_layers", 0, "num-layers"),
        ("num_layers", None, "num-layers"),
        ("scales", None, "not-a-list"),
        ("scales", 0.5, "not-a-list"),
        ("format", "nvfp4_ds_mla_outer_scale_v3", "unknown-format"),
        ("format", None, "unknown-format"),
        ("max_abs", 3, "not-a-list"),
    ],
)
def test_fields_of_v1(field, value, check):
    assert check in [row.check for row in errors(v1(**{field: value}))]


def test_denominator_may_be_an_integer():
    assert errors(v1(denominator=2688)) == []


def test_a_scale_that_is_not_its_max_abs():
    document = v1()
    document["scales"][40] *= 0.5
    (found,) = errors(document)
    assert (found.check, found.layer, found.index) == ("not-max-abs", 40, (40,))
    assert "clip" in found.effect
    assert repr(document["max_abs"][40]) in found.expected
    document["scales"][40] *= 4
    assert "floor" in errors(document)[0].effect


def test_scales_written_from_fp32_match():
    """A file written from fp32 differs from max_abs/2688 in double and was called wrong."""
    document = v1()
    document["scales"] = [float32(scale) for scale in document["scales"]]
    assert document["scales"] != [value / 2688 for value in document["max_abs"]]
    assert errors(document) == []


def test_max_abs_of_another_length():
    document = v1()
    document["max_abs"].pop()
    (found,) = errors(document)
    assert (found.check, found.layer, found.tensor) == ("layer-count", 77, "max_abs")


@pytest.mark.parametrize(
    "max_abs",
    [None, [1.0] * (LAYERS - 1), [1.0] * (LAYERS + 1), [*[1.0] * (LAYERS - 1), None], "1.0"],
)
def test_what_a_wrong_max_abs_does(max_abs):
    """A missing amplitude was said to make the runtime run the layer with 1.0, or to divide by it; it does neither."""
    document = v1(scales=[1 / 2688] * LAYERS)
    document["max_abs"] = max_abs
    (found,) = errors(document)
    assert found.tensor == "max_abs"
    assert found.effect == "the scale cannot be held against its amplitude; a loader that does so refuses the file"


def test_an_integer_out_of_all_range():
    """`num_layers: 10**30` was told to be "an integer of at least 1", which it is."""
    for digits, shown in (("1" + "0" * 30, "1000000000"), (str(2**31), str(2**31))):
        found = errors(json.dumps(v1(num_layers="@")).replace('"@"', digits).encode())
        assert [(row.check, row.expected) for row in found] == [("num-layers", "an integer of at most 2147483647")]
        assert found[0].value.startswith(shown)


@pytest.mark.parametrize("as_float32", [False, True])
def test_the_reciprocal_is_called_one(as_float32):
    """78 single errors over wrong values hid the one mistake: 2688 / max_abs instead of max_abs / 2688."""
    turned = [2688 / value for value in amplitudes()]
    document = v1(scales=[float32(scale) for scale in turned] if as_float32 else turned)
    (found,) = errors(document)
    assert (found.check, found.value, found.expected) == ("reciprocal", "every one of 78 scales is 2688 / max_abs", "max_abs / 2688")
    assert found.effect.startswith("this is the reciprocal: ")
    document["scales"][5] *= 1.5
    found = errors(document)
    assert {row.check for row in found} == {"not-max-abs"}
    assert len(found) == 78


def test_amplitudes_at_which_a_scale_is_its_own_reciprocal_are_right():
    assert errors(v1(scales=[1.0] * LAYERS, max_abs=[2688.0] * LAYERS)) == []


def test_a_file_of_reciprocals_alone_is_suspected():
    """Without max_abs a file of 2688 / max_abs passed as valid, and its model answered nonsense."""
    document = v1(scales=[2688 / value for value in amplitudes()], max_abs=None)
    (found,) = judge(document).findings.rows()
    assert (found.severity, found.check) == (Severity.WARNING, "reciprocal")
    assert found.value.startswith("every scale is above 1, from ")
    assert found.effect == "amplitudes above 2688; is this the reciprocal (2688 / max_abs)?"
    document["scales"][0] = 1.0
    assert judge(document).findings.rows() == ()
    assert warnings(v1(scales=[2.0] * LAYERS, max_abs=[2 * 2688] * LAYERS)) == []


def test_every_scale_one_is_a_warning():
    document = v1(scales=[1.0] * LAYERS, max_abs=None)
    found = judge(document)
    assert [(row.severity, row.check) for row in found.findings.rows()] == [(Severity.WARNING, "all-identity")]
    document["scales"][3] = 0.5
    assert judge(document).findings.rows() == ()


def test_an_unknown_field_is_a_note():
    (found,) = judge(v1(comment="made by hand")).findings.rows()
    assert (found.severity, found.tensor) == (Severity.NOTE, "comment")


@pytest.mark.parametrize(("field", "value"), [("algorithm", "nvfp4"), ("record_layout", "nvfp4_ds_mla"), ("algorithm", None)])
def test_fields_of_gscale(field, value):
    (found,) = errors(gscale(**{field: value}))
    assert found.tensor == field


@pytest.mark.parametrize("layers", [{}, [], None, 3])
def test_gscale_without_layers(layers):
    assert [row.check for row in errors(gscale(layers=[]) | {"layers": layers})] == ["no-layers"]


def test_gscale_with_a_huge_index_is_one_finding():
    document = gscale(layers=[0, 999_999_999])
    assert [row.check for row in errors(document)] == ["missing-layer"]


@pytest.mark.parametrize("field", ["format", "schema"])
def test_v2_is_known_and_unsupported(field):
    """Its fields are not public: nothing else in it may be judged."""
    (found,) = errors({field: "nvfp4_ds_mla_outer_scale_v2", "scales": "whatever", "num_layers": -1})
    assert found.check == "unsupported-format"
    assert "not public" in found.effect


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "empty"),
        (b" \n", "white space"),
        (b"\xff\xfe{\x00}\x00", "byte 0 is not UTF-8"),
        (b"{", "line 1 column 2"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"format": 1} x', "extra data"),
        (b"\xef\xbb\xbf", "white space"),
        (b'{"a": \x00}', "line 1"),
    ],
)
def test_malformed(data, said):
    (found,) = errors(data)
    assert found.check == "malformed-json"
    assert said in found.value


@pytest.mark.parametrize("root", [[], "text", 3, None, True])
def test_no_object(root):
    (found,) = errors(json.dumps(root).encode())
    assert found.check == "malformed-json"


def test_untrusted_text_is_safe_to_print():
    """An escape sequence or a lone surrogate in a name reached the terminal, or stopped the JSON output."""
    document = gscale(layers=[])
    document["layers"] = {"layers.0.\ud800\x1b[31m": {"latent_scale": "\x1b[0m\udfff"}}
    for row in errors(document):
        for text in (row.tensor, row.value, row.expected, row.effect):
            assert text is None or text.isprintable()
            assert text is None or text.encode()


def test_a_hostile_file_does_not_fill_the_memory():
    found = judge(v1(num_layers=50_000, scales=["x"] * 50_000, max_abs=None)).findings
    assert found.count(Severity.ERROR) == 50_000
    assert len(found.rows()) == 1000


def test_profile_checks_layers_latent_record_and_drafts():
    glm = profile()
    drafts = glm.model.draft_layers
    assert (glm.model.layers, drafts > 0) == (78, True)
    assert [row.check for row in judge(v1(), glm).findings.rows()] == ["draft-layers"]
    (found,) = errors(v1(77), glm)
    assert (found.check, found.layer) == ("layer-count", 77)
    (found,) = errors(v1(79), glm)
    assert (found.check, found.layer) == ("layer-count", 78)
    (found,) = errors(v1(), profile(model={"latent_dim": 256}))
    assert (found.check, found.value) == ("latent-dim", "512")
    (found,) = errors(v1(), profile(kv={"record": "fp8_ds_mla"}))
    assert found.check == "record-layout"
    assert "fp8_ds_mla" in found.value
    assert errors(v1(), profile(kv={"record": "nvfp4_ds_mla_368"})) == []
    assert errors(v1(), profile(kv={"record": "nvfp4_ds_mla_368_per_token"}))[0].check == "record-layout"
    assert warnings(v1(), profile(model={"layers": None})) == ["layer-count"]


def test_no_kernel_reads_the_gscale_layout():
    (found,) = errors(gscale(), profile())
    assert (found.check, found.value) == ("record-layout", "glm-zero-rope-288b")
    assert "no kernel reads this layout" in found.effect
    beyond = [row.layer for row in errors(gscale(layers=range(81)), profile()) if row.check == "extra-layer"]
    assert beyond == list(range(78 + profile().model.draft_layers, 81))
    assert [row.layer for row in errors(gscale(layers=range(77)), profile()) if row.check == "missing-layer"] == [77]


def test_identities_needed(tmp_path):
    """Warmup compiled the dynamic variant alone, and the draft layer's launch missed."""
    path = write_json(tmp_path / "scales.json", v1())
    assert identities_needed(path, profile()) == (0, 1)
    assert identities_needed(path, profile(model={"draft_layers": 0})) == (0,)
    one = v1(max_abs=None)
    one["scales"][5] = 1.0
    write_json(path, one)
    assert identities_needed(path, profile(model={"draft_layers": 0})) == (0, 1)
    write_json(path, v1(scales=[1.0] * LAYERS, max_abs=None))
    assert identities_needed(path, profile(model={"draft_layers": 0})) == (1,)
    write_json(path, v1(77))
    with pytest.raises(InvalidScales, match="layer 77") as caught:
        identities_needed(path, profile())
    assert caught.value.exit_code == 1
    assert caught.value.hint == f"mlactl verify-scales {path} --profile glm-5.2-tp4-dcp4"


def test_unreadable_files(tmp_path):
    with pytest.raises(CannotRun, match="no such file"):
        load_outer_scales(tmp_path / "absent.json")
    with pytest.raises(CannotRun, match="is a folder"):
        load_outer_scales(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CannotRun, match="is a pipe"):  # and does not wait for a writer
        load_outer_scales(tmp_path / "pipe")
    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate(65 * 2**20)
    with pytest.raises(CannotRun, match="68157440 bytes"):
        load_outer_scales(tmp_path / "huge.json")


@pytest.mark.parametrize("use", [load_outer_scales, identities_needed])
@pytest.mark.parametrize("name", ["glm-5.2-tp4-dcp4", Path("mine.toml")])
def test_a_profile_by_name_is_refused(tmp_path, use, name):
    """It was an AttributeError: 'str' object has no attribute 'model'."""
    with pytest.raises(UsageError) as refused:
        use(write_json(tmp_path / "scales.json", v1()), name)
    assert (refused.value.message, refused.value.hint) == (
        f"profile is '{name}', expected a Profile",
        f"mlactl.profiles.load('{name}') loads one",
    )


def snippet(document, start):
    """The first Python example behind `start` in a page of docs."""
    text = (Path(__file__).parents[2] / "docs" / document).read_text().partition(start)[2]
    return text.partition("```python\n")[2].partition("```")[0]


def test_the_example_in_the_docs_runs(tmp_path, monkeypatch):
    write_json(tmp_path / "scales.json", v1())
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(snippet("scales.md", "## In code"), names)
    assert names["scales"].scale_of(3) == float32(amplitudes()[3] / 2688)
    assert names["identities_needed"](Path("scales.json"), names["profile"]) == (0, 1)


def test_a_loaded_file_becomes_what_a_launcher_uses(tmp_path, monkeypatch):
    """Two classes have one name; nothing said how a file's scales get to a launch."""
    write_json(tmp_path / "scales.json", v1())
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(snippet("nvfp4.md", "Two classes are called `OuterScales`"), names)
    loaded = load_outer_scales(Path("scales.json"), load("glm-5.2-tp4-dcp4"))
    assert names["latent_scale"] == float32(amplitudes()[3] / 2688)
    assert [names["scales"].for_layer(layer) for layer in range(80)] == [loaded.scale_of(layer) for layer in range(80)]
    assert names["scales"].identities("nvfp4_ds_mla_432", draft_layers=1) == loaded.identities == (0, 1)


def test_loading_imports_neither_torch_nor_numpy(tmp_path):
    path = write_json(tmp_path / "scales.json", v1())
    code = (
        "import sys; from pathlib import Path; from mlactl.profiles import load; from mlactl.scales.outer import load_outer_scales;"
        f"load_outer_scales(Path({str(path)!r}), load('glm-5.2-tp4-dcp4'));"
        "print([name for name in ('torch', 'numpy', 'cutlass', 'rich', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
