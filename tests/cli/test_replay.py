"""`mlactl replay` as a person runs it."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file, save_file

from mlactl.errors import CannotRun

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


def test_a_launch_that_never_came_back_is_named_in_every_mode(inside, tmp_path):
    """Beside captures that match it was exit 0 and "all that was compared agrees", without a word."""
    folder = example(tmp_path, "dense-right", "sparse-lse-base")
    for path in folder.glob("sparse-lse-base.*"):
        path.rename(folder / path.name.replace("sparse-lse-base", "crashed"))
    (folder / "crashed.out.safetensors").unlink()
    done = {mode: inside("replay", folder, "--no-kernel", "--output", mode) for mode in ("human", "json", "jsonl", "quiet")}
    words = "no output was captured: the launch did not come back, or recording stopped first, and the kernel was not asked for"
    warning = f"warning: crashed was not compared: nothing to compare with the reference: {words}"
    assert {mode: (result.code, warning in result.stderr) for mode, result in done.items()} == dict.fromkeys(done, (0, True))
    assert done["quiet"].lines == ["crashed"]
    assert done["human"].lines[0].startswith("OK: 2 captures: 1 match, 1 nothing compared (exit 0")


def test_captures_of_one_name_in_two_folders_are_told_apart(inside, tmp_path):
    """The second one's saved results replaced the first one's, and no report said which was which."""
    for place in "ab":
        example(tmp_path / place if (tmp_path / place).mkdir() is None else None, "dense-right")
    folders = [tmp_path / place / "captures" for place in "ab"]
    done = inside("replay", *folders, "--save", tmp_path / "saved", "--junit", tmp_path / "report.xml", "--json")
    expected = ["a/captures/dense-right", "b/captures/dense-right"]
    assert done.code == 0
    assert [call["name"] for call in done.json["calls"]] == expected
    found = sorted(str(path.relative_to(tmp_path / "saved")) for path in (tmp_path / "saved").rglob("*.safetensors"))
    assert found == [f"{name}.results.safetensors" for name in expected]
    suite = ElementTree.parse(tmp_path / "report.xml").getroot()[0]
    assert list(dict.fromkeys(case.attrib["classname"] for case in suite)) == expected


def test_names_and_metadata_cannot_forge_lines_of_the_report(inside, tmp_path):
    """A line break in a name was two names to the next program, one in metadata a line of the report."""
    folder = example(tmp_path, "dense-visible-length")
    evil = "a\nOK: 1 capture\x1b[2J b'c\udcff"
    for path in folder.iterdir():
        path.rename(folder / path.name.replace("dense-visible-length", evil))
    spelled = "a\\nOK: 1 capture\\x1b[2J b'c\\udcff"
    done = inside("replay", folder, "--junit", tmp_path / "report.xml")
    assert done.code == 1
    assert [line for line in done.lines if line.startswith("OK")] == []
    assert f"{spelled}: MISMATCH" in done.lines
    command = next(line for line in done.lines if line.startswith("reproduce: "))
    quoted = command.removeprefix("reproduce: mlactl replay ").split(" --rows")[0]
    printed = subprocess.run(["bash", "-c", f"printf %s {quoted}"], capture_output=True, check=True).stdout
    assert printed == os.fsencode(folder / evil)
    assert ElementTree.parse(tmp_path / "report.xml").getroot()[0][0].attrib["classname"] == spelled
    assert inside("replay", folder, "-q").stdout == f"{spelled}\n"


def test_a_profile_in_metadata_is_one_line(inside, tmp_path):
    sys.path.insert(0, str(Path(__file__).parents[1] / "replay"))
    try:
        from calls import dense, finished
    finally:
        sys.path.pop(0)
    from mlactl.replay import capture as captures

    captures.save(finished(dense(profile="p\nreproduce: rm -rf x")), tmp_path / "captures", "one")
    done = inside("replay", tmp_path / "captures")
    assert done.code == 0
    assert "  profile:        p\\nreproduce: rm -rf x" in done.lines


def test_a_failure_that_nobody_foresaw_costs_one_capture(inside, tmp_path, monkeypatch):
    """It ended the run as an internal error, and the reports of all others were lost."""
    from mlactl.replay import runner

    real = runner.oracle.reference

    def reference(capture, *arguments, **options):
        if capture.name == "sparse-lse-base":
            raise RuntimeError("out of\nmemory")
        return real(capture, *arguments, **options)

    monkeypatch.setattr(runner.oracle, "reference", reference)
    done = inside("replay", example(tmp_path, "dense-right", "sparse-lse-base"), "--json")
    assert done.code == 2
    assert {call["name"]: (call["status"], call["message"]) for call in done.json["calls"]} == {
        "dense-right": ("match", None),
        "sparse-lse-base": ("error", "internal error: RuntimeError: out of memory"),
    }


def test_results_that_cannot_be_saved_are_said_after_the_report(inside, tmp_path, monkeypatch):
    from mlactl.replay import storage

    def full(data, target, *, force):
        raise CannotRun(f"{target}: no space left on device")

    monkeypatch.setattr(storage, "write_new_file", full)
    done = inside("replay", EXAMPLES / "dense-right", "--save", tmp_path / "saved")
    assert done.code == 2
    assert done.lines[0].startswith("OK: 1 capture: 1 match")
    assert "error: results were not saved: " in done.stderr
    assert "no space left on device" in done.stderr


def test_a_junit_file_that_fails_late_comes_after_the_report(inside, tmp_path, monkeypatch):
    from mlactl.cli import replay

    monkeypatch.setattr(replay, "require_writable", lambda target, sources: None)
    done = inside("replay", EXAMPLES / "dense-right", "--junit", tmp_path / "absent" / "x.xml")
    assert done.code == 2
    assert done.lines[0].startswith("OK: 1 capture: 1 match")
    assert "absent/x.xml: no such file or directory" in done.stderr


def test_what_is_being_tried_is_said_with_a_count(inside, monkeypatch):
    """A minute of --bisect was silent between 0/1 and 1/1."""
    from mlactl.ui import output

    said = []
    real = output.Output.progress

    @contextlib.contextmanager
    def progress(self, title, total, unit, **options):
        with real(self, title, total, unit, **options) as task:
            yield output.Task(task.advance, lambda text: said.append(f"{title}: {text}"))

    monkeypatch.setattr(output.Output, "progress", progress)
    assert inside("replay", EXAMPLES / "dense-split-dropped", "--bisect", "-q").code == 1
    named = ["reference fp32", "kernel", "comparing", "where the errors are"]
    names = ["lse base", "scale dropped", "visible length", "window length", "dropped split", "altered record"]
    tried = [f"trying explanation {number} of 6, {name}" for number, name in enumerate(names, 1)]
    expected = ["dense-split-dropped", *(f"dense-split-dropped: {text}" for text in (*named, *tried)), "dense-split-dropped"]
    assert said == [f"replaying: {text}" for text in expected]


def test_an_import_names_what_it_refuses_and_the_next_step(inside, tmp_path):
    dump = tmp_path / "dumps" / "call"
    dump.mkdir(parents=True)
    (dump / "metadata.jsonl").write_text('{"function_name": "BatchMLAPagedAttentionWrapper.run", "input_metadata": []}\n')
    save_file({"arg_0": torch.zeros(1)}, dump / "inputs.safetensors")
    done = inside("replay", tmp_path / "dumps", "--import-flashinfer", tmp_path / "captures")
    assert done.code == 2
    assert "warning: call was not imported: " in done.stderr
    assert "input_metadata of metadata.jsonl is a list, expected an object" in done.stderr
    assert "hint: FLASHINFER_LOGLEVEL=10 FLASHINFER_DUMP_SAFETENSORS=1 dumps the call again" in done.stderr
    assert "an empty name was given, expected a folder of FlashInfer dumps" in inside("replay", "", "--import-flashinfer", tmp_path / "x").stderr
    shown = " ".join(inside("replay", "--help").stdout.replace("│", " ").split())
    assert "BatchMLAPagedAttentionWrapper.run" in shown
    assert "trtllm_batch_decode_with_kv_cache_mla" in shown


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
        (("replay", EXAMPLES, "--atol", "nan"), "--atol nan is no tolerance"),
        (("replay", EXAMPLES, "--row-tol", "-1"), "--row-tol -1 is no tolerance"),
        (("replay", EXAMPLES, "--device", "tpu"), "--device tpu is not one of auto, cpu, cuda"),
        (("replay", EXAMPLES, "--rows", "²"), "--rows ² is no list of indices"),
        (("replay", EXAMPLES, "--rows", "0-999999999999"), "--rows 0-999999999999: an index is at most 2,147,483,647"),
        (("replay", EXAMPLES, "--heads", "0-2000000000"), "--heads 0-2000000000: 1,048,576 indices at most can be asked for"),
        (("replay", EXAMPLES, "--rows", "9" * 5000), "an index is at most"),
        (("replay", EXAMPLES, "--repeats", "0"), "--repeats 0: at least 1 is needed"),
        (("replay", EXAMPLES, "--repeats", "-1"), "--repeats -1: at least 1 is needed"),
        (("replay", EXAMPLES, "--smallest", "x"), "--smallest is where --bisect writes"),
        (("replay", ""), "an empty name was given, expected a capture or a folder of them"),
        (("replay", EXAMPLES, "--junit", "/nowhere/x.xml"), "/nowhere/x.xml: there is no folder /nowhere"),
        (("replay", EXAMPLES, "--junit", EXAMPLES), "is a folder, expected a file to write"),
        (("replay", EXAMPLES, "--junit", "/dev/full"), "/dev/full: is a device, expected a file to write"),
        (("replay", EXAMPLES, "--save", "/proc/nope"), "no file can be written there"),
        (("replay", EXAMPLES, "--save", EXAMPLES / "dense-right.in.safetensors"), "dense-right.in.safetensors: file exists"),
        (("replay", EXAMPLES, "--bisect", "--smallest", "/proc/nope"), "no file can be written there"),
        (("replay", EXAMPLES, "--import-flashinfer", "/proc/nope"), "holds no FlashInfer dumps"),
    ],
)
def test_usage_errors_are_exit_2_before_any_work(inside, arguments, message):
    """Several were an error of every capture, an internal error, or the loss of a report that was already computed."""
    done = inside(*arguments)
    assert done.code == 2
    assert message in done.stderr.replace("Missing", "missing")
    assert "\nhint: " in done.stderr
    assert done.stdout == ""
    assert "replaying" not in done.stderr


def test_a_gpu_that_is_not_there_is_exit_3(inside, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = inside("replay", EXAMPLES, "--device", "cuda")
    assert (done.code, done.stdout) == (3, "")
    assert "no CUDA device was found for --device cuda" in done.stderr


def test_help_lists_every_exit_code_and_what_is_drawn(inside):
    shown = " ".join(inside("replay", "--help").stdout.replace("│", " ").split())
    assert "3 no GPU for --device cuda" in shown
    assert "of the first that fails" in shown


@pytest.mark.parametrize("folder", ["new", "new/below", "there"])
def test_a_smallest_capture_that_was_not_made_is_said(inside, tmp_path, folder):
    """An empty folder was left, without a word."""
    (tmp_path / "there").mkdir()
    done = inside("replay", EXAMPLES / "dense-visible-length", "--bisect", "--no-kernel", "--smallest", tmp_path / folder)
    assert done.code == 1
    assert f"warning: nothing was written to {tmp_path / folder}: no kernel ran (the kernel was not asked for)" in done.stderr.splitlines()
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_why_no_smallest_capture_was_written_where_kernels_ran(inside, tmp_path, monkeypatch):
    from mlactl.replay import runner
    from mlactl.replay.kernel import KernelResult

    factors = iter([1.0, 2.0])

    def run(capture, **options):
        output, lse = runner.oracle.reference(capture, "fp32", device="cpu")
        return KernelResult((output * next(factors)).to(torch.bfloat16), lse)

    monkeypatch.setattr(runner, "run_kernel", run)
    said = "where the kernel's result is wrong the captured one is too, and was explained instead"
    for why in ("no result of a kernel is wrong", said):
        done = inside("replay", EXAMPLES / "dense-visible-length", "--bisect", "--smallest", tmp_path / "new")
        assert f"warning: nothing was written to {tmp_path / 'new'}: {why}" in done.stderr.splitlines()
        assert not (tmp_path / "new").exists()


def test_outputs_without_inputs_say_which_is_missing(inside, tmp_path):
    """The hint was to list the very file that is missing."""
    folder = example(tmp_path, "dense-right")
    inputs = folder / "dense-right.in.safetensors"
    inputs.unlink()
    message = f"{inputs} is missing: dense-right.out.safetensors alone is half of a capture"
    hint = f"hint: copy dense-right.in.safetensors there too, or record again; ls -l {folder}"
    for given in (folder / "dense-right.out.safetensors", folder / "dense-right"):
        alone = inside("replay", given)
        assert (alone.code, alone.stderr.splitlines()) == (2, [f"error: {message}", hint])
    inside_folder = inside("replay", folder)
    assert inside_folder.code == 2
    assert f"  {message}" in inside_folder.lines
    assert hint in inside_folder.stderr.splitlines()


def test_a_row_that_is_not_there(inside):
    done = inside("replay", EXAMPLES / "dense-right", "--rows", "8")
    assert done.code == 2
    assert "row 8 was asked for, the capture has rows 0 to 7" in done.stdout
    assert "hint: --rows 0-7" in done.stderr


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


def test_a_picture(inside, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from mlactl.replay import runner

    real, computed = runner.oracle.reference, []
    monkeypatch.setattr(runner.oracle, "reference", lambda capture, *a, **o: (computed.append(capture.name), real(capture, *a, **o))[1])
    done = inside("replay", EXAMPLES, "--plot", tmp_path / "error.png")
    assert done.code == 1
    assert sorted(computed) == NAMES  # what is drawn is not computed again
    assert (tmp_path / "error.png").read_bytes().startswith(b"\x89PNG")
    assert "drew dense-split-dropped" in done.stderr
    assert "drawing: 0/1 picture\n" in done.stderr
    assert "pictures" not in done.stderr


@pytest.mark.parametrize("what", ["in.safetensors", "out.safetensors", "index"])
def test_a_report_never_takes_the_place_of_a_capture(inside, tmp_path, what):
    """`--junit` named a file of the capture that was replayed, and replaced it."""
    folder = example(tmp_path, "dense-right")
    (folder / "index.jsonl").write_text("{}\n")
    target = folder / ("index.jsonl" if what == "index" else f"dense-right.{what}")
    held = {path: path.read_bytes() for path in folder.iterdir()}
    (tmp_path / "link.xml").symlink_to(target)
    for name in (target, tmp_path / "link.xml"):
        for captures in (folder, folder / "dense-right"):
            done = inside("replay", captures, "-q", "--junit", name)
            assert (done.code, f"{name}: is the same file as {target}, which is read" in done.stderr) == (2, True), done.stderr
    assert {path: path.read_bytes() for path in folder.iterdir()} == held


def test_saved_results_are_never_replaced(inside, tmp_path):
    """Results of an earlier run were replaced in silence; so was what stood under that name otherwise."""
    folder = example(tmp_path, "dense-right", "dense-visible-length")
    saved = tmp_path / "saved"
    saved.mkdir()
    older = saved / "dense-visible-length.results.safetensors"
    older.write_bytes(b"older")
    done = inside("replay", folder, "--save", saved)
    assert (done.code, done.stdout) == (2, "")
    assert f"{older}: is there already, nothing was replayed" in done.stderr
    assert "hint: name a new folder: --save DIR" in done.stderr
    assert [(path.name, path.read_bytes()) for path in saved.iterdir()] == [(older.name, b"older")]


def test_folders_of_saved_results_are_compared_pair_by_pair(inside, tmp_path):
    """They "hold no captures", though they are written for `mlactl diff`."""
    folder = example(tmp_path, "dense-right", "dense-visible-length")
    for name in ("one", "two"):
        assert inside("replay", folder, "--save", tmp_path / name, "-q").code == 1
    same = inside("diff", tmp_path / "one", tmp_path / "two", "--json")
    assert (same.code, [(call["name"], call["status"]) for call in same.json["calls"]]) == (
        0, [("dense-right.results.safetensors", "match"), ("dense-visible-length.results.safetensors", "match")],
    )  # fmt: skip
    changed = tmp_path / "two" / "dense-right.results.safetensors"
    other = load_file(changed)
    other["captured.lse"][0, 0] += 1
    save_file(other, changed)
    (tmp_path / "two" / "dense-visible-length.results.safetensors").unlink()
    done = inside("diff", tmp_path / "one", tmp_path / "two", "--json")
    assert (done.code, [(call["name"], call["status"]) for call in done.json["calls"]]) == (
        1, [("dense-right.results.safetensors", "mismatch"), ("dense-visible-length.results.safetensors", "mismatch")],
    )  # fmt: skip
    assert done.json["calls"][1]["findings"] == [f"dense-visible-length.results.safetensors is only in {tmp_path / 'one'}"]
    taken = inside("diff", tmp_path / "one", tmp_path / "two", "--junit", changed)
    assert (taken.code, f"is the same file as {changed}, which is read" in taken.stderr) == (2, True)


def test_the_reproducing_command_judges_as_the_run_did(inside):
    """It left out the tolerances, the reference and --no-kernel: the command that was printed could pass."""
    strict = ("--atol", "0", "--reference", "fp64", "--no-kernel", "--allow-nan", "--device", "cpu")
    done = inside("replay", EXAMPLES / "dense-right", *strict)
    command = next(line for line in done.lines if line.startswith("reproduce: ")).split()[2:]
    assert command[6:] == ["--reference", "fp64", "--device", "cpu", "--no-kernel", "--atol", "0.0", "--allow-nan"]
    assert (done.code, inside(*command).code, inside(*command[:6]).code) == (1, 1, 0)


def test_values_that_the_judged_type_cannot_tell_apart_have_no_ulp_distance(inside):
    """With --atol 0 a mismatch of bf16 against fp32 was "0 ulp apart"."""
    done = inside("replay", EXAMPLES / "dense-right", "--atol", "0", "--no-kernel")
    assert done.code == 1
    assert ", 0 ulp apart" not in done.stdout
    row = next(line for line in done.lines if line.startswith("output  MISMATCH"))
    assert "atol " in row
    assert " none " not in row


def test_a_typed_tolerance_that_leaves_the_lse_alone_says_so(inside):
    """`--atol 100` failed by its LSE, without a word on why the tolerance did not hold for it."""
    note = "the tolerance on the command line is the output's, the LSE keeps its own"
    done = inside("replay", EXAMPLES / "dense-split-dropped", "--atol", "100", "--json")
    output, lse = done.json["calls"][0]["pairs"][0]["outputs"]
    assert (output["status"], lse["status"], lse["tolerance"]["name"], lse["notes"]) == ("match", "mismatch", "lse", [note])
    assert note not in inside("replay", EXAMPLES / "dense-split-dropped").stdout
    for command in ("replay", "diff"):
        assert inside(command, "--help").stdout.count("not of LSE") == 3


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
