"""`mlactl diff` as a person runs it: captures, safetensors and .pt files."""

import math
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

EXAMPLES = Path(__file__).parents[2] / "examples" / "captures"


def tensors(path, **values):
    save_file({name: value.clone() for name, value in values.items()}, path)
    return path


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
