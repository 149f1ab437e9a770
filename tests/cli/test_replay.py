"""`mlactl replay` as a person runs it."""

import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "captures"
NAMES = sorted(path.name.removesuffix(".in.safetensors") for path in EXAMPLES.glob("*.in.safetensors"))


def example(tmp_path, *names):
    folder = tmp_path / "captures"
    folder.mkdir(exist_ok=True)
    for name in names:
        for path in EXAMPLES.glob(f"{name}.*"):
            shutil.copy(path, folder)
    return folder


def test_every_output_mode_of_the_example_folder(cli):
    done = cli.every_mode("replay", EXAMPLES, "--bisect", code=1, rows="calls")
    document = done["json"].json
    assert document["counts"] == {"match": 1, "mismatch": 5, "nothing_compared": 0, "error": 0}
    assert [call["name"] for call in document["calls"]] == NAMES
    assert done["quiet"].lines == [name for name in NAMES if name != "dense-right"]
    verdicts = {call["name"]: call["bisection"]["verdict"].split(":")[0] for call in document["calls"] if call["bisection"]}
    assert verdicts == {
        "dense-split-dropped": "dropped split",
        "dense-visible-length": "visible length",
        "sparse-identity-scale": "identity scale",
        "sparse-lse-base": "LSE base",
        "sparse-record-flipped": "altered record",
    }


def test_the_report_is_in_the_order_that_is_promised(inside):
    done = inside("replay", EXAMPLES / "dense-split-dropped", "--bisect")
    assert done.code == 1
    expected = [
        "FAIL: 1 capture: 1 mismatch (exit 1: a result is wrong)",
        "dense-split-dropped: MISMATCH",
        "  kernel: ",
        "captured against reference fp32: MISMATCH",
        "output  status",
        "  first     request 1, row 4, head 0, dim 0: ",
        "  worst     request 1, ",
        "  request   1 of 2 hold mismatches: 1 (",
        "  row       4 of 8 hold mismatches: ",
        "  head      all 2 hold mismatches: ",
        "  dim       ",
        "LSE (natural)",
        "bisect: dropped split: tokens 16 to 31 of request 1 (split 1 of 3) are missing",
        "reproduce: mlactl replay ",
    ]
    places = [next((place for place, line in enumerate(done.lines) if line.startswith(text)), None) for text in expected]
    assert None not in places, dict(zip(expected, places, strict=True))
    assert places == sorted(places)
    assert " ulp apart" in done.lines[places[5]]


def test_the_reproducing_command_shows_the_slice(inside):
    done = inside("replay", EXAMPLES / "dense-visible-length")
    command = next(line for line in done.lines if line.startswith("reproduce: ")).split()[2:]
    again = inside(*command)
    assert again.code == 1
    assert "0/" not in next(line for line in again.lines if line.startswith("output  MISMATCH"))
    assert "1/1" in next(line for line in again.lines if line.startswith("output  MISMATCH"))
    assert "row 6, head" in again.stdout


def test_a_right_capture_is_clean(inside):
    done = inside("replay", EXAMPLES / "dense-right", "--reference", "fp64")
    assert done.code == 0
    assert done.lines[0] == "OK: 1 capture: 1 match (exit 0: all that was compared agrees)"
    assert any("fp64 on cpu" in line for line in done.lines)


def test_junit_has_a_case_for_every_output(inside, tmp_path):
    done = inside("replay", EXAMPLES, "--junit", tmp_path / "report.xml", "-q")
    assert done.code == 1
    suite = ElementTree.parse(tmp_path / "report.xml").getroot()[0]
    assert suite.attrib == {"name": "mlactl.replay", "tests": "12", "failures": "9", "errors": "0", "skipped": "0"}
    failing = [case for case in suite if case.find("failure") is not None]
    assert failing[0].attrib["classname"] == "dense-split-dropped"
    assert "worst at request 1, row" in failing[0].find("failure").attrib["message"]


def test_a_malformed_capture_is_exit_2_and_the_others_are_replayed(cli, tmp_path):
    folder = example(tmp_path, "dense-right", "sparse-lse-base")
    path = folder / "sparse-lse-base.in.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    done = cli.every_mode("replay", folder, code=2, rows="calls")
    assert done["json"].json["counts"] == {"match": 1, "mismatch": 0, "nothing_compared": 0, "error": 1}
    assert "not a whole safetensors file" in done["human"].stdout


def test_nothing_to_compare_is_exit_2(inside, tmp_path):
    folder = example(tmp_path, "dense-right")
    (folder / "dense-right.out.safetensors").unlink()
    done = inside("replay", folder)
    assert done.code == 2
    assert done.lines[0] == "ERROR: 1 capture: 1 nothing compared (exit 2: nothing was compared)"
    assert "no GPU is here to run the kernel" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("replay",), "missing argument"),
        (("replay", "nowhere"), "nowhere.in.safetensors does not exist"),
        (("replay", EXAMPLES, "--reference", "fp16"), "--reference fp16 is not one of fp32, fp64"),
        (("replay", EXAMPLES, "--jobs", "0"), "--jobs 0"),
        (("replay", EXAMPLES, "--rows", "3-1"), "--rows 3-1 is no list of indices"),
        (("replay", EXAMPLES, "--plot", "x.pdf"), "expected a name that ends in .png"),
        (("replay", EXAMPLES, "--atol", "-1"), "no tolerance"),
        (("replay", EXAMPLES, "--device", "tpu"), "--device tpu is not one of auto, cpu, cuda"),
    ],
)
def test_usage_errors_are_exit_2(inside, arguments, message):
    done = inside(*arguments)
    assert done.code == 2
    assert message in (done.stderr + done.stdout).replace("Missing", "missing")


def test_a_row_that_is_not_there(inside):
    done = inside("replay", EXAMPLES / "dense-right", "--rows", "8")
    assert done.code == 2
    assert "row 8 was asked for, the capture has rows 0 to 7" in done.stdout


def test_fail_fast_says_what_was_not_run(inside):
    done = inside("replay", EXAMPLES, "--fail-fast")
    assert done.code == 1
    assert done.lines[0] == "FAIL: 2 captures: 1 match, 1 mismatch, 4 not run (exit 1: a result is wrong)"


def test_jobs_give_the_same_report(cli):
    one, two = (cli("replay", EXAMPLES, "--jobs", jobs, "--json").json for jobs in (1, 2))
    assert one == two


def test_saved_results_can_be_compared(inside, tmp_path):
    folder = example(tmp_path, "dense-right")
    assert inside("replay", folder, "--save", tmp_path / "saved", "-q").code == 0
    results = tmp_path / "saved" / "dense-right.results.safetensors"
    assert inside("diff", results, results, "-q").code == 0
    from safetensors import safe_open

    with safe_open(results, framework="pt") as file:
        assert sorted(file.keys()) == ["captured.lse", "captured.output", "reference.lse", "reference.output"]


def test_a_picture(inside, tmp_path):
    pytest.importorskip("matplotlib")
    done = inside("replay", EXAMPLES, "--plot", tmp_path / "error.png")
    assert done.code == 1
    assert (tmp_path / "error.png").read_bytes().startswith(b"\x89PNG")
    assert "drew dense-split-dropped" in done.stderr


def test_a_tolerance_typed_by_a_person(inside):
    done = inside("replay", EXAMPLES / "dense-visible-length", "--row-tol", "1", "--json")
    output, lse = done.json["calls"][0]["pairs"][0]["outputs"]
    assert (output["status"], output["tolerance"]["name"], lse["status"]) == ("match", "command line", "mismatch")


def test_fit_takes_captures(inside, tmp_path):
    """Amplitudes of a bf16 cache by layer; the examples name no layer and are refused."""
    refused = inside("scales", "fit", EXAMPLES, "-o", tmp_path / "scales.json")
    assert refused.code == 2
    assert "names no layer" in refused.stderr
    import sys

    sys.path.insert(0, str(Path(__file__).parents[1] / "replay"))
    try:
        from calls import dense, finished
    finally:
        sys.path.pop(0)
    from mlactl.replay import capture as captures

    expected = []
    for layer in range(3):
        made = finished(dense(seed=layer, layer=layer))
        captures.save(made, tmp_path / "layers", f"layer{layer}")
        table = made.tensors["page_table"]
        tokens = [made.tensors["kv_cache"][table[request, t // 16], t % 16, :512] for request, length in enumerate((20, 45)) for t in range(length)]
        expected.append(max(float(token.abs().max()) for token in tokens))
    done = inside("scales", "fit", tmp_path / "layers", "-o", tmp_path / "scales.json")
    assert done.code == 0, done.stderr
    assert json.loads((tmp_path / "scales.json").read_text())["max_abs"] == expected
