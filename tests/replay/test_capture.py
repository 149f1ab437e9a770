"""The capture file: round trips, the same bytes every time, and every refusal naming both sides."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from calls import dense, finished
from safetensors import safe_open
from safetensors.torch import save
from users import as_root

from mlactl.errors import CannotRun, UsageError
from mlactl.replay import capture as captures
from mlactl.replay import checks, header, storage
from mlactl.replay.errors import BadCapture
from mlactl.replay.tensors import load

HERE = Path(__file__).parent


def change(made, **fields):
    return replace(made, call=msgspec.structs.replace(made.call, **fields))


def tensors(made, **changed):
    return replace(made, tensors={**made.tensors, **changed})


def sparse():
    sys.path.insert(0, str(HERE.parent.parent / "scripts"))
    try:
        from make_example_captures import sparse_call
    finally:
        sys.path.pop(0)
    return sparse_call()


@pytest.mark.parametrize("made", [dense(), dense(own=[17, 18, 19, 20, 42, 43, 44, 45]), dense(lengths=(0, 3)), sparse()])
def test_what_is_written_is_read(tmp_path, made):
    made = finished(made)
    captures.save(made, tmp_path, "one")
    found = captures.read(tmp_path / "one")
    assert found.call == made.call
    assert set(found.tensors) == set(made.tensors)
    assert all(torch.equal(found.tensors[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)) for name, tensor in made.tensors.items())
    assert torch.equal(found.output, made.output)
    assert torch.equal(found.lse, made.lse)


def test_two_processes_write_the_same_bytes(tmp_path):
    """safetensors orders several metadata keys differently from process to process, and files of one call differed."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; from calls import *; from mlactl.replay import capture; "
    code += "capture.save(finished(dense()), Path(sys.argv[2]), 'x')"
    for place, seed in (("a", "1"), ("b", "77")):
        subprocess.run(
            [sys.executable, "-c", code, str(HERE), str(tmp_path / place)], check=True, env={**__import__("os").environ, "PYTHONHASHSEED": seed}
        )
    for name in ("x.in.safetensors", "x.out.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_there_is_one_metadata_key_and_no_time_in_the_files(tmp_path):
    captures.save(finished(dense()), tmp_path, "one")
    for name in ("one.in.safetensors", "one.out.safetensors"):
        with safe_open(tmp_path / name, framework="pt") as file:
            assert list(file.metadata()) == ["mlactl"]
            assert "time" not in file.metadata()["mlactl"]
            assert header.dump(header.parse(file.metadata()["mlactl"], "x")) == file.metadata()["mlactl"]
    (line,) = (tmp_path / "index.jsonl").read_text().splitlines()
    entry = json.loads(line)
    assert (entry["id"], entry["status"]) == ("one", "complete")
    assert entry["bytes"] == sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert entry["time"].endswith("+00:00")


def test_tensors_that_share_memory_are_written(tmp_path):
    """safetensors refuses views of one another, and a call whose query and cache came out of one buffer could not be recorded."""
    made = dense()
    buffer = torch.cat([made.tensors["q"].flatten(), made.tensors["kv_cache"].flatten()])
    parts = buffer[: made.tensors["q"].numel()].view_as(made.tensors["q"]), buffer[made.tensors["q"].numel() :].view_as(made.tensors["kv_cache"])
    captures.save(tensors(made, q=parts[0], kv_cache=parts[1]), tmp_path, "one")
    assert torch.equal(captures.read(tmp_path / "one").tensors["kv_cache"], made.tensors["kv_cache"])


def test_facts_keep_what_safetensors_loses():
    whole = torch.zeros(6, 4, 700)
    view = whole[1:5, :, 8:584]
    fact = storage.fact(view.contiguous(), view)
    assert (fact.shape, fact.strides, fact.storage_offset, fact.stored_shape) == ((4, 4, 576), (2800, 700, 1), 2808, (4, 4, 576))


# ---- refusals


CALL_MISFITS = [
    (lambda made: change(made, record="nvfp4"), "record layout 'nvfp4' is not one of bf16, fp8"),
    (lambda made: change(made, scale_mode="static"), "scale mode 'static' declared, bf16 records have 'none'"),
    (lambda made: change(made, record="fp8", scale_mode="tensor"), "kernel spec says record 'bf16', the capture says 'fp8'"),
    (lambda made: change(made, latent_scale=0.5), "latent_scale 0.5 with bf16 records, which take none but 1.0"),
    (lambda made: change(made, sm_scale=0.0), "sm_scale is 0.0, expected a finite number above 0"),
    (lambda made: change(made, page_size=32), "pages hold 16 tokens, page size 32 is declared"),
    (lambda made: change(made, parallel=header.Parallel(dcp_rank=4, dcp_world=4)), "DCP rank 4 of 4"),
    (lambda made: change(made, parallel=header.Parallel(interleave=0)), "interleave 0, expected 1 to 1,073,741,824"),
    (lambda made: change(made, parallel=header.Parallel(dcp_world=1 << 62)), "DCP rank 0 of 4611686018427387904, expected"),
    (lambda made: change(made, page_size=0), "page size 0, expected at least 1"),
    (lambda made: change(made, window=-5), "window -5, expected at least 1"),
    (lambda made: change(made, splits=0), "splits 0, expected at least 1"),
    (lambda made: change(made, splits=-5), "splits -5, expected at least 1"),
    (lambda made: change(made, layer=-1), "layer -1, expected at least 0"),
    (lambda made: change(made, kernel_version=-1), "kernel version -1, expected at least 1"),
    (lambda made: change(made, kv_scale=3.0), "kv_scale 3.0 with bf16 records, which take none but 1.0"),
    (lambda made: change(made, q_scale=3.0), "q_scale 3.0 with a bf16 query, which takes none but 1.0"),
    (lambda made: change(made, window=5), "the kernel spec says window=false, the capture has window 5"),
    (lambda made: change(made, facts={**made.call.facts, "window": True}), "the kernel spec says window=true, the capture has window None"),
    (lambda made: change(made, facts={**made.call.facts, "width": 12}), "the kernel spec says width 12, q has 576 elements a head"),
    (
        lambda made: change(made, facts={**made.call.facts, "foo": "bar"}),
        "the kernel spec has a fact 'foo', attention.dense_mla.forward 5 has tile, ",
    ),
    (lambda made: change(made, facts={**made.call.facts, "tile": "tok64"}), "the kernel spec says tile='tok64', expected one of"),
    (lambda made: change(made, facts={**made.call.facts, "window": 0}), "the kernel spec says window=0, expected one of"),
    (lambda made: change(made, facts={**made.call.facts, "q_dtype": "e4m3"}), "the kernel spec says q_dtype=e4m3, q is bfloat16"),
    (lambda made: change(made, facts={}), "the kernel spec has no fact record and width"),
    (lambda made: change(made, kernel_id="attention.mla.sm120.decode"), "is not one of attention.dense_mla.forward, which attend over pages"),
    (lambda made: change(made, kernel_id="attention.other"), "kernel 'attention.other' is not one of"),
    (
        lambda made: change(made, facts={**made.call.facts, "lengths": "per_query"}),
        "spec says lengths=per_query, the capture has no per-query lengths",
    ),
    (lambda made: change(made, window=0), "window 0"),
]

TENSOR_MISFITS = [
    (lambda made: tensors(made, kv_cache=made.tensors["kv_cache"].float()), "kv_cache is float32, bf16 records are bfloat16"),
    (lambda made: tensors(made, kv_cache=made.tensors["kv_cache"][..., :560].contiguous()), "records have 560, q has 576"),
    (lambda made: tensors(made, page_ids=made.tensors["page_ids"][:-1]), "4 page ids for 5 pages"),
    (lambda made: tensors(made, page_ids=torch.tensor([7, 17, 27, 7, 47])), "must differ"),
    (lambda made: tensors(made, page_ids=torch.tensor([7, 17, -2, 37, 47])), "-2 at index 2"),
    (
        lambda made: tensors(made, page_table=torch.tensor([[0, 5, -1], [2, 3, 4]], dtype=torch.int32)),
        r"entry 5 at \[0, 1\] is in the visible range; 5 pages",
    ),
    (lambda made: tensors(made, page_table=torch.tensor([[0, -1, -1], [2, 3, 4]], dtype=torch.int32)), r"entry -1 at \[0, 1\]"),
    (
        lambda made: tensors(made, cache_seqlens=torch.tensor([20, 49], dtype=torch.int32)),
        "request 1 holds 49 tokens, its table row reaches 3 pages of 16",
    ),
    (lambda made: tensors(made, cache_seqlens=torch.tensor([-1, 45], dtype=torch.int32)), "-1 at index 0 is negative"),
    (lambda made: tensors(made, cu_seqlens_q=torch.tensor([0, 4, 7], dtype=torch.int32)), r"boundaries \[0, 4, 7\] do not rise from 0 to the 8 rows"),
    (lambda made: tensors(made, cu_seqlens_q=torch.tensor([0, 9, 8], dtype=torch.int32)), "do not rise"),
    (lambda made: tensors(made, cu_seqlens_q=torch.tensor([0, 4], dtype=torch.int32)), r"2 requests, 2 boundaries \(expected 3\)"),
    (lambda made: tensors(made, cache_seqlens=made.tensors["cache_seqlens"].long()), "cache_seqlens is int64, expected int32"),
    (lambda made: tensors(made, extra=torch.zeros(1)), "'extra'"),
    (lambda made: made.with_result(torch.zeros(8, 2, 511), None), r"output is \[8, 2, 511\], the call gives \[8, 2, 512\]"),
    (lambda made: made.with_result(None, torch.zeros(8, 3)), r"lse is \[8, 3\], the call gives \[8, 2\]"),
    (lambda made: made.with_result(torch.zeros(8, 2, 512, dtype=torch.int32), None), "output is int32, expected floating point"),
]

SPARSE_MISFITS = [
    (lambda made: change(made, record="nvfp4_ds_mla_368", facts={}), "records have 432, nvfp4_ds_mla_368 records have 368 bytes"),
    (lambda made: change(made, latent_scale=float("inf")), "latent_scale is inf"),
    (lambda made: change(made, kernel_id="attention.dense_mla.forward"), "which attend over selected slots"),
    (lambda made: change(made, window=5), "a window is declared, selected slots have none"),
    (lambda made: change(made, kv_scale=0.5), "kv_scale 0.5 with nvfp4_ds_mla_432 records"),
    (lambda made: tensors(made, lengths=torch.tensor([65, 0, 0], dtype=torch.int32)), "length 65 at index 0 is outside 0 to 64"),
    (lambda made: tensors(made, indices=made.tensors["indices"].clone().fill_(96)), r"slot 96 at \[0, 0\], 96 slots are stored"),
    (lambda made: tensors(made, indices=made.tensors["indices"].clone().fill_(-2)), "slot -2"),
    (lambda made: tensors(made, indices=made.tensors["indices"][:2]), "3 rows of q, 2 rows of indices"),
    (lambda made: tensors(made, q=made.tensors["q"][..., :512].contiguous()), "q has 512 elements a head, nvfp4_ds_mla_432 keys have 576"),
]


@pytest.mark.parametrize(("misfit", "message"), [*CALL_MISFITS, *TENSOR_MISFITS])
def test_a_misfit_is_refused_naming_both_sides(tmp_path, misfit, message):
    """Page ids and lengths of a damaged capture indexed past the pool: everything is proved before anything is read."""
    captures.save(misfit(dense()), tmp_path, "one")
    with pytest.raises(BadCapture, match=message):
        captures.read(tmp_path / "one")


def test_every_refusal_has_a_next_step():
    with pytest.raises(BadCapture) as refused:
        checks.check(change(dense(), splits=0), "here")
    assert refused.value.hint.startswith("MLACTL_CAPTURE_DIR=DIR records the call again")


def test_a_capture_of_another_release_may_have_other_facts():
    """Their names are judged by the release that declares them; that an import holds few of them is no fault."""
    checks.check(change(dense(), kernel_version=4, facts={"record": "bf16", "width": 576, "old": 1}), "here")
    checks.check(change(dense(), facts={"record": "bf16", "width": 576}), "here")


@pytest.mark.parametrize(("misfit", "message"), SPARSE_MISFITS)
def test_a_misfit_of_selected_slots_is_refused(misfit, message):
    with pytest.raises(BadCapture, match=message):
        checks.check(misfit(sparse()), "here")


def test_a_table_tail_that_is_not_reached_is_allowed():
    made = dense(lengths=(20, 45))
    table = made.tensors["page_table"].clone()
    table[0, 2] = 12345
    checks.check(tensors(made, page_table=table), "here")


def rewritten(path, edit):
    """The file with its header edited and everything else as it was."""
    with safe_open(path, framework="pt") as file:
        raw = json.loads(file.metadata()["mlactl"])
        kept = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping
    edit(raw)
    path.write_bytes(save(kept, {"mlactl": json.dumps(raw)}))


HEADER_MISFITS = [
    (lambda raw: raw["call"].pop("lse_base"), "does not declare its LSE base"),
    (lambda raw: raw["call"].update(lse_base=None), "does not declare its LSE base"),
    (lambda raw: raw["call"].update(lse_base="10"), "declares LSE base '10'; it must say natural or 2"),
    (lambda raw: raw.update(schema_version=2), "capture schema 2, this release reads 1"),
    (lambda raw: raw["call"].update(surprise=1), "surprise"),
    (lambda raw: raw["call"].update(mode="guess"), "mode 'guess' is not one of"),
    (lambda raw: raw.update(role="both"), "role 'both'"),
    (lambda raw: raw["tensors"].pop("q"), "declares"),
    (lambda raw: raw["tensors"]["q"].update(dtype="float16"), "q is bfloat16, declared as float16"),
    (lambda raw: raw["tensors"]["q"].update(stored_shape=[8, 2, 577]), r"q is \[8, 2, 576\], declared as \[8, 2, 577\]"),
    (lambda raw: raw["tensors"]["kv_cache"].update(sha256="0" * 64), "kv_cache has digest"),
    (lambda raw: raw["tensors"]["q"].update(strides=[1152, -576, 1]), "one stride a dimension, none of them below 0"),
    (lambda raw: raw["tensors"]["q"].update(storage_offset=-1), "one stride a dimension, none of them below 0"),
]


@pytest.mark.parametrize(("edit", "message"), HEADER_MISFITS)
def test_a_header_that_does_not_fit_is_refused(tmp_path, edit, message):
    captures.save(dense(), tmp_path, "one")
    rewritten(tmp_path / "one.in.safetensors", edit)
    with pytest.raises(BadCapture, match=message):
        captures.read(tmp_path / "one")


@pytest.mark.parametrize("keep", [0, 7, 100, 20_000])
def test_a_truncated_file_is_refused(tmp_path, keep):
    captures.save(dense(), tmp_path, "one")
    path = tmp_path / "one.in.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BadCapture, match="not a whole safetensors file"):
        captures.read(path)


def test_plain_safetensors_are_no_capture(tmp_path):
    path = tmp_path / "one.in.safetensors"
    path.write_bytes(save({"q": torch.zeros(1)}))
    with pytest.raises(BadCapture, match="no metadata key 'mlactl'"):
        captures.read(path)


def test_outputs_of_another_call_are_refused(tmp_path):
    captures.save(finished(dense(seed=1)), tmp_path, "one")
    captures.save(finished(dense(seed=2)), tmp_path, "two")
    (tmp_path / "two.out.safetensors").replace(tmp_path / "one.out.safetensors")
    with pytest.raises(BadCapture, match="outputs of inputs"):
        captures.read(tmp_path / "one")


def test_an_existing_name_is_never_overwritten(tmp_path):
    captures.save(dense(), tmp_path, "one")
    before = (tmp_path / "one.in.safetensors").read_bytes()
    with pytest.raises(UsageError, match="exists already"):
        captures.save(dense(seed=3), tmp_path, "one")
    assert (tmp_path / "one.in.safetensors").read_bytes() == before
    assert not list(tmp_path.glob(".*.tmp"))


def test_finding_captures(tmp_path):
    for name in ("b", "a"):
        captures.save(dense(), tmp_path / "deep", name)
    paths = [tmp_path / "deep" / f"{name}.in.safetensors" for name in ("a", "b")]
    assert captures.find([tmp_path]) == tuple(paths)
    assert captures.find([tmp_path / "deep" / "b", tmp_path]) == (paths[1], paths[0])
    with pytest.raises(CannotRun, match="does not exist"):
        captures.find([tmp_path / "c"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no captures"):
        captures.find([tmp_path / "empty"])


@as_root
@pytest.mark.parametrize("mode", [0o000, 0o711])
def test_a_closed_subfolder_is_an_error(tmp_path, mode):
    """It was skipped, and a run over what was left said that all agrees."""
    captures.save(dense(), tmp_path / "open", "a")
    captures.save(dense(), tmp_path / "closed", "b")
    (tmp_path / "closed").chmod(mode)
    try:
        done = as_nobody(tmp_path, "find", tmp_path)
        named = as_nobody(tmp_path, "find", tmp_path / "closed" / "b")
    finally:
        (tmp_path / "closed").chmod(0o755)
    assert done == f"CannotRun: {tmp_path}/closed: permission denied | ls -ld {tmp_path}/closed"
    expected = f"CannotRun: {tmp_path}/closed/b.in.safetensors: permission denied" if mode == 0 else "ok"
    assert named.split(" | ")[0].replace("closed/b:", "closed/b.in.safetensors:") == expected


@as_root
def test_a_file_without_read_permission_says_so(tmp_path):
    """It was said not to exist."""
    captures.save(dense(), tmp_path, "a")
    (tmp_path / "a.in.safetensors").chmod(0o000)
    assert as_nobody(tmp_path, "read", tmp_path / "a").startswith(f"CannotRun: {tmp_path}/a.in.safetensors: permission denied | ls -ld")


def as_nobody(folder, function, path):
    """What a function of mlactl.replay.capture says as a user who owns nothing."""
    for place in (folder, *folder.parents):
        if place.stat().st_uid == 0 and place.is_relative_to("/tmp") and place != Path("/tmp"):
            place.chmod(0o755)
    code = (
        "import os, sys; from pathlib import Path; from mlactl.replay import capture; from mlactl.errors import MlactlError\n"
        "if sys.argv[1] == 'read': import torch\n"
        "os.setgid(65534); os.setuid(65534); path = Path(sys.argv[2])\n"
        "try:\n    capture.find([path]) if sys.argv[1] == 'find' else capture.read(path)\n    print('ok')\n"
        "except MlactlError as error: print(f'{type(error).__name__}: {error.message} | {error.hint}')"
    )
    return subprocess.run([sys.executable, "-c", code, function, str(path)], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("suffix", [".in.safetensors", ".out.safetensors"])
@pytest.mark.parametrize(
    ("place", "words"),
    [
        (lambda path: os.mkfifo(path), "is a pipe, expected a file"),
        (lambda path: path.mkdir(), "is a folder, expected a file"),
        (lambda path: path.symlink_to("/nowhere"), "no such file or directory"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device, expected a file"),
    ],
    ids=["pipe", "folder", "dangling", "device"],
)
def test_what_stands_in_a_files_place_is_named(tmp_path, suffix, place, words):
    """A pipe was waited on for ever, and outputs behind a link to nothing counted as a call that never came back."""
    captures.save(finished(dense()), tmp_path, "one")
    path = tmp_path / f"one{suffix}"
    path.unlink()
    place(path)
    (found,) = captures.find([tmp_path])
    with pytest.raises(CannotRun) as refused:
        captures.read(found)
    assert (refused.value.message, refused.value.hint) == (f"{path}: {words}", f"ls -ld {path}")


def test_outputs_without_inputs_are_not_passed_over(tmp_path):
    captures.save(finished(dense()), tmp_path, "one")
    (tmp_path / "one.in.safetensors").unlink()
    (path,) = captures.find([tmp_path])
    with pytest.raises(CannotRun, match=r"one\.in\.safetensors is missing"):
        captures.read(path)


def test_a_sparse_file_of_terabytes_is_an_error_of_its_own(tmp_path):
    path = tmp_path / "huge.in.safetensors"
    with path.open("wb") as file:
        file.truncate(4 << 40)
    with pytest.raises((BadCapture, CannotRun), match=r"huge\.in\.safetensors"):
        captures.read(path)


def test_roles_that_are_mixed_up_say_what_to_do(tmp_path):
    captures.save(finished(dense()), tmp_path, "one")
    (tmp_path / "one.out.safetensors").replace(tmp_path / "one.in.safetensors")
    with pytest.raises(BadCapture, match="holds outputs, expected inputs") as refused:
        captures.read(tmp_path / "one")
    assert refused.value.hint.startswith("inputs are NAME.in.safetensors")


def test_names_of_any_bytes_are_read(tmp_path):
    captures.save(finished(dense()), tmp_path, "one")
    for path in tmp_path.glob("one.*"):
        path.rename(tmp_path / f"a\udcff\nb{path.name[3:]}")
    (path,) = captures.find([tmp_path])
    assert captures.read(path).rows == 8
    assert captures.display_names([path]) == ("a\\udcff\\nb",)


def test_one_folder_under_two_names_is_one(tmp_path):
    captures.save(dense(), tmp_path / "real", "a")
    (tmp_path / "link").symlink_to("real")
    assert captures.find([tmp_path / "real", tmp_path / "link", tmp_path / "real" / "a"]) == (tmp_path / "real" / "a.in.safetensors",)


def test_names_that_repeat_carry_their_folders(tmp_path):
    paths = [tmp_path / place for place in ("x/one.in.safetensors", "x/y/one.in.safetensors", "x/two.in.safetensors")]
    assert captures.display_names(paths) == ("one", "y/one", "two")
    assert captures.display_names(paths[1:]) == ("one", "two")


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("", "no output was captured: the launch did not come back, or recording stopped first"),
        ('{"id":"two","status":"complete"}\nnot json\n[]\n', "no output was captured: the launch did not come back, or recording stopped first"),
        ('{"id":"one","status":"inputs"}\n', "no output was captured: it was written as inputs alone"),
        ('{"id":"one","status":"complete"}\n', "no output is here, though index.jsonl says it was captured: one.out.safetensors was lost"),
    ],
)
def test_why_there_is_no_output(tmp_path, index, words):
    (tmp_path / "index.jsonl").write_text(index)
    assert captures.why_no_output(tmp_path / "one") == words


def test_the_very_same_capture_can_be_written_again(tmp_path):
    made = finished(dense())
    for _ in range(2):
        captures.save(made, tmp_path, "one", again=True)
    assert len((tmp_path / "index.jsonl").read_text().splitlines()) == 1
    (tmp_path / "one.out.safetensors").unlink()
    captures.save(made, tmp_path, "one", again=True)
    assert torch.equal(captures.read(tmp_path / "one").output, made.output)
    with pytest.raises(UsageError, match="exists already and holds something else"):
        captures.save(finished(dense(seed=2)), tmp_path, "one", again=True)


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_tensors_behind_a_pipe_are_refused_and_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(CannotRun, match="is a pipe, expected a file"):
        load(tmp_path / name)
