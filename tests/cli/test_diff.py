"""`mlactl diff` as a person runs it: captures, safetensors and .pt files."""

import math
import os
import pickle
import re
import shutil
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import save_file

from mlactl.cli import diff

EXAMPLES = Path(__file__).parents[2] / "examples" / "captures"


def tensors(path, **values):
    save_file({name: value.clone() for name, value in values.items()}, path)
    return path


def test_the_bar_moves_over_pairs_smaller_than_its_unit(monkeypatch):
    """It counted whole MiB of each pair: over pairs of less it stood still."""
    moved = []

    class Bar:
        advance = staticmethod(moved.append)

    class Out:
        @staticmethod
        @contextmanager
        def progress(what, total, unit):
            moved.clear()
            yield Bar

    class Work:
        pairs = ((),) * 5

        @staticmethod
        def pair_bytes(place):
            return 700 << 10

    monkeypatch.setattr(diff, "_SILENT_BYTES", 0)
    with diff._progress(Out, Work) as advance:
        for _ in range(5):
            advance(700 << 10)
    assert moved == [0, 1, 1, 0, 1]


def test_equal_files(cli, tmp_path):
    path = tensors(tmp_path / "a.safetensors", x=torch.arange(6.0).reshape(2, 3), ids=torch.arange(4))
    done = cli.every_mode("diff", path, path, rows="calls")
    outputs = done["json"].json["calls"][0]["pairs"][0]["outputs"]
    assert [(item["name"], item["status"], item["bitwise_equal"]) for item in outputs] == [("ids", "match", True), ("x", "match", True)]
    assert done["human"].lines[0] == "OK: 1 pair: 1 match (exit 0: all that was compared agrees)"
    assert done["quiet"].stdout == ""


@pytest.mark.parametrize(
    ("ours", "theirs", "arguments", "code"),
    [
        (torch.full((4,), 30.0, dtype=torch.bfloat16), torch.full((4,), 30.0625), (), 0),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]), (), 1),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]), ("--allow-nan",), 0),
        (torch.zeros(4, 8), torch.full((4, 8), 1e-6), (), 1),
        (torch.zeros(0, 8), torch.zeros(0, 8), (), 2),
        (torch.zeros(2, 8), torch.zeros(3, 8), (), 2),
        (torch.ones(4), torch.full((4,), 1.05), (), 1),
        (torch.ones(4), torch.full((4,), 1.05), ("--rtol", "0.1"), 0),
    ],
)
def test_exit_codes(inside, tmp_path, ours, theirs, arguments, code):
    """Half an ulp at 30 passes, NaN fails unless allowed, an all-zero output against a tiny reference fails, empty tensors are exit 2."""
    done = inside("diff", tensors(tmp_path / "a.safetensors", x=ours), tensors(tmp_path / "b.safetensors", x=theirs), *arguments)
    assert done.code == code, done.stdout + done.stderr


def test_one_bad_row_in_4096_is_named(inside, tmp_path):
    expected = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))
    wrong = expected.clone()
    wrong[2931, 7] += 1
    done = inside("diff", tensors(tmp_path / "a.safetensors", x=wrong), tensors(tmp_path / "b.safetensors", x=expected))
    assert done.code == 1
    assert "dim0 2931, dim1 7" in done.stdout
    assert "1/262,144" in done.stdout


def test_torch_files_by_name_and_alone(inside, tmp_path):
    value = torch.arange(6.0)
    torch.save({"out": [value, value + 1]}, tmp_path / "a.pt")
    torch.save({"out": [value, value + 2]}, tmp_path / "b.pt")
    done = inside("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--json")
    assert done.code == 1
    assert [(item["name"], item["status"]) for item in done.json["calls"][0]["pairs"][0]["outputs"]] == [("out.0", "match"), ("out.1", "mismatch")]
    torch.save(value, tmp_path / "c.pt")
    assert inside("diff", tmp_path / "c.pt", tensors(tmp_path / "d.safetensors", other=value)).code == 0


class Bomb:
    """What a pickle can do when it is read: this one makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_that_runs_code_is_refused_and_not_run(inside, tmp_path):
    marker = tmp_path / "ran"
    torch.save({"x": torch.zeros(2), "bomb": Bomb(marker)}, tmp_path / "a.pt")
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Bomb(marker)))
    for name in ("a.pt", "raw.pt"):
        done = inside("diff", tmp_path / name, tmp_path / name)
        assert done.code == 2
        assert "it was not executed" in done.stderr
        assert not marker.exists()


def test_nothing_in_common_is_exit_2(inside, tmp_path):
    value = torch.ones(2)
    done = inside("diff", tensors(tmp_path / "a.safetensors", x=value, y=value), tensors(tmp_path / "b.safetensors", z=value))
    assert done.code == 2
    assert "only in A: x" in done.stderr


def test_a_tensor_only_one_side_has_is_a_finding(inside, tmp_path):
    value = torch.ones(2)
    done = inside("diff", tensors(tmp_path / "a.safetensors", x=value, y=value), tensors(tmp_path / "b.safetensors", x=value))
    assert done.code == 1
    assert "finding: only in A: y" in done.stdout


def test_captures(inside):
    done = inside("diff", EXAMPLES / "dense-right", EXAMPLES / "dense-split-dropped", "--json")
    assert done.code == 1
    output, lse = done.json["calls"][0]["pairs"][0]["outputs"]
    assert (output["worst"]["coordinates"]["request"], lse["mismatches"]) == (1, 8)
    assert inside("diff", EXAMPLES / "dense-right", EXAMPLES / "dense-right", "-q").code == 0


def test_captures_of_different_calls_say_which_inputs_differ(inside):
    done = inside("diff", EXAMPLES / "dense-right", EXAMPLES / "sparse-lse-base")
    assert done.code == 2
    assert "shapes differ" in done.stderr


def test_folders_by_name(inside, tmp_path):
    for name in ("dense-right", "dense-visible-length"):
        for path in EXAMPLES.glob(f"{name}.*"):
            (tmp_path / "a").mkdir(exist_ok=True)
            shutil.copy(path, tmp_path / "a")
    done = inside("diff", tmp_path / "a", EXAMPLES, "--json")
    assert done.code == 1
    assert done.json["counts"] == {"match": 2, "mismatch": 4, "nothing_compared": 0, "error": 0}
    assert sum("is only in" in finding for call in done.json["calls"] for finding in call["findings"]) == 4


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ("absent.safetensors", "absent.safetensors", "does not exist"),
        (EXAMPLES, "absent.pt", "absent.pt does not exist"),
        (EXAMPLES, "x.npy", "a folder and a file"),
        ("x.npy", "x.npy", "not a capture"),
    ],
)
def test_what_cannot_be_compared(inside, tmp_path, a, b, message):
    (tmp_path / "x.npy").write_bytes(b"1")
    done = inside("diff", tmp_path / a, tmp_path / b)
    assert done.code == 2
    assert message in done.stderr


def copied(target, source=EXAMPLES, names=("dense-right", "dense-visible-length", "sparse-lse-base")):
    target.mkdir()
    for name in names:
        for path in source.glob(f"{name}.*.safetensors"):
            shutil.copy(path, target)
    return target


def test_a_folder_with_pairs_that_cannot_be_compared_reports_the_others(inside, tmp_path):
    """One cut file or one other shape was exit 2 without a word about the rest, and the shapes named no capture."""
    ours, theirs = copied(tmp_path / "a"), copied(tmp_path / "b")
    for suffix in ("in", "out"):
        shutil.copy(EXAMPLES / f"sparse-lse-base.{suffix}.safetensors", theirs / f"dense-right.{suffix}.safetensors")
    cut = theirs / "dense-visible-length.out.safetensors"
    cut.write_bytes(cut.read_bytes()[:900])
    done = {mode: inside("diff", ours, theirs, "--output", mode) for mode in ("json", "quiet", "human")}
    assert [item.code for item in done.values()] == [2, 2, 2]
    calls = {call["name"]: call for call in done["json"].json["calls"]}
    assert {name: call["status"] for name, call in calls.items()} == {
        "dense-right": "error", "dense-visible-length": "error", "sparse-lse-base": "match",
    }  # fmt: skip
    assert "dense-right.in.safetensors: output: shapes differ, [8, 2, 512] against [3, 4, 512]" in calls["dense-right"]["message"]
    assert "dense-visible-length.out.safetensors" in calls["dense-visible-length"]["message"]
    assert done["quiet"].lines == ["dense-right", "dense-visible-length"]
    assert done["human"].lines[0] == "ERROR: 3 pairs: 1 match, 2 error (exit 2: something could not be compared)"


def test_a_tensor_that_cannot_be_compared_leaves_the_others(inside, tmp_path):
    ours = tensors(tmp_path / "a.safetensors", x=torch.ones(2, 3), y=torch.ones(4), z=torch.ones(5))
    theirs = tensors(tmp_path / "b.safetensors", x=torch.ones(3, 2), y=torch.ones(4), z=torch.zeros(5))
    done = inside("diff", ours, theirs, "--json", "--junit", tmp_path / "report.xml")
    assert done.code == 2
    (call,) = done.json["calls"]
    assert (call["status"], call["message"]) == ("error", "x: shapes differ, [2, 3] against [3, 2]")
    assert [(item["name"], item["status"]) for item in call["pairs"][0]["outputs"]] == [("y", "match"), ("z", "mismatch")]
    suite = ElementTree.parse(tmp_path / "report.xml").getroot()[0]
    assert [suite.attrib[key] for key in ("tests", "failures", "errors")] == ["3", "1", "1"]


def test_junit_fails_where_only_one_side_has_a_tensor(inside, tmp_path):
    """The exit code was 1 and the JUnit green: a CI that reads the latter saw nothing."""
    value = torch.ones(2)
    ours = tensors(tmp_path / "a\x1b[1m.safetensors", x=value, y=value)
    done = inside("diff", ours, tensors(tmp_path / "b.safetensors", x=value), "--junit", tmp_path / "report.xml", "-q")
    assert (done.code, done.lines) == (1, [r"a\x1b[1m.safetensors against b.safetensors"])
    suite = ElementTree.parse(tmp_path / "report.xml").getroot()[0]
    assert [(case.attrib["name"], case.find("failure") is not None) for case in suite] == [
        (r"a\x1b[1m.safetensors against b.safetensors: x", False),
        ("only in A: y", True),
    ]


def test_a_report_never_takes_the_place_of_what_is_read(inside, tmp_path):
    """`--junit` replaced a file of a capture, where A and B were captures or folders of them."""
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        for path in EXAMPLES.glob("dense-right.*"):
            shutil.copy(path, folder)
    for path in EXAMPLES.glob("dense-visible-length.*"):
        shutil.copy(path, folders[0])  # only one side has it
    held = {path: path.read_bytes() for folder in folders for path in folder.iterdir()}
    for target in held:
        both = [folders] if target.name.startswith("dense-visible") else [folders, [folder / "dense-right" for folder in folders]]
        for sides in both:
            done = inside("diff", *sides, "--junit", target)
            assert (done.code, f"is the same file as {target}, which is read" in done.stderr) == (2, True), done.stderr
    assert {path: path.read_bytes() for folder in folders for path in folder.iterdir()} == held


def test_the_worst_of_integers(inside, tmp_path):
    """It was the first mismatch: over a limit of 0 every error is infinite."""
    ours, theirs = (
        tensors(tmp_path / f"{name}.safetensors", x=torch.tensor(value)) for name, value in (("a", [1, 5, 7]), ("b", [2, 100, 7]))
    )  # fmt: skip
    assert "worst     dim0 1: 5, expected 100" in inside("diff", ours, theirs).stdout


def test_integers_of_64_bits(inside, tmp_path):
    ours, theirs = (tensors(tmp_path / f"{name}.safetensors", x=torch.tensor([2**53 + step])) for name, step in (("a", 1), ("b", 0)))
    done = inside("diff", ours, theirs)
    assert done.code == 1
    assert "dim0 0: 9007199254740993, expected 9007199254740992" in done.stdout
    assert inside("diff", ours, theirs, "--atol", "1").code == 0


@pytest.mark.parametrize("value", [{"a.b": 1, "a": {"b": 2}}, {1: 1, "1": 2}, {"x": [1], "x.0": 2}], ids=["dot", "number", "list"])
def test_two_tensors_of_one_name_are_refused(inside, tmp_path, value):
    """One of them was dropped, and the other compared with itself."""

    def filled(item):
        if isinstance(item, dict):
            return {key: filled(part) for key, part in item.items()}
        return [filled(part) for part in item] if isinstance(item, list) else torch.full((2,), float(item))

    torch.save(filled(value), tmp_path / "a.pt")
    done = inside("diff", tmp_path / "a.pt", tmp_path / "a.pt")
    assert done.code == 2
    name = {"a.b": "a.b", 1: "1", "x": "x.0"}[next(iter(value))]
    assert f"two tensors are called '{name}'" in done.stderr


def test_what_is_no_tensor_is_said_not_to_be_compared(inside, tmp_path):
    for name, step in (("a", 3), ("b", 4)):
        torch.save({"x": torch.ones(2), "step": step, "name": name}, tmp_path / f"{name}.pt")
    done = inside("diff", tmp_path / "a.pt", tmp_path / "b.pt")
    assert done.code == 0
    assert "note: no tensors, not compared: step (int), name (str)" in done.lines


def test_lists_that_hold_themselves_or_never_end(inside, tmp_path):
    loop, wide = [torch.ones(2)], [torch.ones(2)]
    loop.append(loop)
    for _ in range(60):
        wide = [wide, wide]
    torch.save(loop, tmp_path / "loop.pt")
    torch.save(wide, tmp_path / "wide.pt")
    for name, said in (("loop", "1 holds itself"), ("wide", "nested more than 64 deep, or more than 131,072 values")):
        done = inside("diff", tmp_path / f"{name}.pt", tmp_path / f"{name}.pt")
        assert (done.code, said in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize("data", [b"hello world\n", b'{"a": 1}', b"", b"garbage_in", b"PK\x03\x04 cut"], ids=["text", "json", "empty", "word", "zip"])
def test_what_is_no_torch_file(inside, tmp_path, data):
    """A text file with that name was an internal KeyError."""
    (tmp_path / "x.pt").write_bytes(data)
    done = inside("diff", tmp_path / "x.pt", tmp_path / "x.pt")
    assert done.code == 2
    assert "x.pt: is no torch file, or a damaged one; it was not executed" in done.stderr
    assert "weights_only" not in done.stderr


class Maker:
    """As Bomb, by one function that every pickle protocol names alike."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_refused_pickle_names_what_it_would_have_run(inside, tmp_path, protocol):
    """The message was torch's, which advises to load the file again and run what it holds."""
    marker = tmp_path / "ran"
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Maker(marker), protocol))
    torch.save({"x": Maker(marker)}, tmp_path / "saved.pt")
    for name in ("raw", "saved"):
        done = inside("diff", tmp_path / f"{name}.pt", tmp_path / f"{name}.pt")
        assert f"{name}.pt: holds {os.mkdir.__module__}.mkdir, which is no tensor; it was not executed" in done.stderr
        assert (done.code, "weights_only" in done.stderr, marker.exists()) == (2, False, False)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: os.mkfifo(path), "is a pipe, expected a file"),
        (lambda path: path.mkdir(), "a folder and a file"),
        (lambda path: path.symlink_to(path.with_name("gone")), "no such file or directory"),
        (lambda path: path.write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{"), "not a whole safetensors file"),
    ],
    ids=["pipe", "folder", "link", "cut"],
)
def test_what_is_no_file(inside, tmp_path, make, said):
    """A pipe in a file's place was waited for without end."""
    make(tmp_path / "x.safetensors")
    whole = tensors(tmp_path / "y.safetensors", x=torch.ones(2))
    for pair in ((tmp_path / "x.safetensors", whole), (whole, tmp_path / "x.safetensors")):
        done = inside("diff", *pair)
        assert (done.code, said in done.stderr) == (2, True), done.stderr
        assert "hint: " in done.stderr


def test_tensors_without_dimensions_and_sparse_ones(inside, tmp_path):
    done = inside("diff", tensors(tmp_path / "a.safetensors", x=torch.tensor(1.0)), tensors(tmp_path / "b.safetensors", x=torch.tensor(2.0)))
    assert done.code == 1
    assert "the only element: 1, expected 2" in done.stdout
    torch.save(torch.eye(3).to_sparse(), tmp_path / "s.pt")
    done = inside("diff", tmp_path / "s.pt", tmp_path / "s.pt")
    assert (done.code, "sparse_coo tensors are not compared" in done.stderr, "hint: save tensor.to_dense()" in done.stderr) == (2, True, True)


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (("--atol", "nan"), "--atol nan is no tolerance", "--atol 1e-3"),
        (("--row-tol", "-1"), "--row-tol -1 is no tolerance", "--row-tol 0.01"),
        (("--rtol", "inf"), "--rtol inf is no tolerance", "--rtol 1e-3"),
        (("--junit", "{folder}/none/report.xml"), "there is no folder", "mkdir -p "),
        (("--junit", "{folder}"), "is a folder, expected a file to write", "name a file in it"),
        (("--junit", "{folder}/a.safetensors"), "is the same file as", "name a new file"),
    ],
    ids=["nan", "negative", "infinite", "nofolder", "folder", "same"],
)
def test_options_are_refused_before_any_work(inside, tmp_path, arguments, message, hint):
    """`--row-tol -1` was reported as `--row`, and a report that could not be written took the whole comparison with it."""
    path = tensors(tmp_path / "a.safetensors", x=torch.ones(2))
    done = inside("diff", path, path, *(argument.format(folder=tmp_path) for argument in arguments))
    assert (done.code, done.stdout) == (2, "")
    assert message in done.stderr
    assert f"hint: {hint}" in done.stderr


def test_an_empty_name_is_not_the_working_directory(inside):
    done = inside("diff", "", EXAMPLES)
    assert (done.code, "A is an empty name" in done.stderr) == (2, True)


def test_the_coarser_type_decides_whichever_side_has_it(inside, tmp_path):
    """bf16 against fp16: of two types of one size the first one decided."""
    value = torch.linspace(0.5, 1, 64)
    fine = tensors(tmp_path / "fine.safetensors", x=value.half())
    coarse = tensors(tmp_path / "coarse.safetensors", x=value.bfloat16())
    assert inside("diff", fine, coarse).code == inside("diff", coarse, fine).code == 0


def test_numbers_of_rows_that_are_not_finite(inside, tmp_path):
    ours, theirs = torch.ones(4, 8), torch.ones(4, 8)
    ours[2, 5] = math.nan
    pair = tensors(tmp_path / "a.safetensors", x=ours), tensors(tmp_path / "b.safetensors", x=theirs)
    done = {mode: inside("diff", *pair, "--output", mode) for mode in ("json", "human")}
    (output,) = done["json"].json["calls"][0]["pairs"][0]["outputs"]
    assert (output["max_abs"], output["cosine"], output["not_finite"]) == (None, None, 1)
    assert re.search(r"^x +MISMATCH +1/32 +1/4 +nan +nan +nan +nan +none ", done["human"].stdout, re.MULTILINE)
    assert "  x: worst row dim0 2: not finite in 1 element, so it has no cosine and no norm" in done["human"].lines
