"""The capture file: round trips, the same bytes every time, and every refusal naming both sides."""

import json
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

from mlactl.errors import CannotRun, UsageError
from mlactl.replay import capture as captures
from mlactl.replay import checks, header, storage
from mlactl.replay.errors import BadCapture

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
