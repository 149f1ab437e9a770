"""FlashInfer's API dumps: what becomes a capture, and what is refused with its reason. Dumps are made as its logging writes them."""

import json
import math

import pytest
import torch
from calls import dense, finished
from safetensors.torch import load_file, save_file

from mlactl.errors import CannotRun
from mlactl.replay import capture as captures
from mlactl.replay import oracle
from mlactl.replay.importers.flashinfer import import_dumps, parameter_names

PLAN = (
    "(self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor, num_heads: int, "
    "head_dim_ckv: int, head_dim_kpe: int, page_size: int, causal: bool, sm_scale: float, q_data_type: torch.dtype, "
    "kv_data_type: torch.dtype, use_profiler: bool = False) -> None"
)
RUN = (
    "(self, q_nope: torch.Tensor, q_pe: torch.Tensor, ckv_cache: torch.Tensor, kpe_cache: torch.Tensor, out: Optional[torch.Tensor] = None, "
    "lse: Optional[torch.Tensor] = None, return_lse: bool = False, profiler_buffer: Optional[torch.Tensor] = None, "
    "return_lse_base_on_e: bool = False) -> Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]"
)
DECODE = (
    "(query: torch.Tensor, kv_cache: torch.Tensor, workspace_buffer: torch.Tensor, qk_nope_head_dim: int, kv_lora_rank: int, "
    "qk_rope_head_dim: int, block_tables: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int, sparse_mla_top_k: int = 0, "
    "out: Optional[torch.Tensor] = None, bmm1_scale: Union[float, torch.Tensor] = 1.0, bmm2_scale: Union[float, torch.Tensor] = 1.0, "
    "sinks: Optional[List[torch.Tensor]] = None) -> torch.Tensor"
)


def dump(root, order, function, signature, positional=(), keywords=None, results=(), object_id=None):
    """One call's folder, as the dump writes it: tensors apart from other arguments, two metadata lines."""
    folder = root / f"20260101_0000{order:02d}_000_pid7_{function}_call0001"
    folder.mkdir(parents=True)
    named = {
        **{f"arg_{place}": value for place, value in enumerate(positional)},
        **{f"kwarg_{name}": value for name, value in (keywords or {}).items()},
    }
    tensors = {name: value.contiguous() for name, value in named.items() if isinstance(value, torch.Tensor)}
    if tensors:
        save_file(tensors, folder / "inputs.safetensors")
    record = {
        "function_name": function,
        "process_id": 7,
        "input_metadata": {name: value for name, value in named.items() if name not in tensors},
        "function_signature": signature,
        "versions": {"torch": "2.9", "python": "3.11 (main)", "flashinfer": "0.6"},
        "execution_status": "inputs_saved",
    }
    if object_id is not None:
        record["self_id"] = object_id
    lines = [record]
    if results:
        names = ["result"] if len(results) == 1 else [f"result_{place}" for place in range(len(results))]
        save_file(dict(zip(names, results, strict=True)), folder / "outputs.safetensors")
        lines.append({**record, "execution_status": "completed"})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


SELF = {"type": "BatchMLAPagedAttentionWrapper", "repr": "<wrapper>"}


def wrapper_dumps(root, made, *, plan=True, results=True, causal=True, base_e=False, cache=None):
    table, lengths = made.tensors["page_table"], made.tensors["cache_seqlens"]
    counts = [int((row >= 0).sum()) for row in table]
    first = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    pages = torch.cat([row[:count] for row, count in zip(table, counts, strict=True)])
    if plan:
        arguments = (SELF, made.tensors["cu_seqlens_q"], first, pages, lengths, made.heads, 512, 64, made.call.page_size, causal, made.call.sm_scale)
        dump(root, 1, "BatchMLAPagedAttentionWrapper.plan", PLAN, arguments, object_id=99)
    kv = made.tensors["kv_cache"] if cache is None else cache
    q = made.tensors["q"]
    keywords = {"return_lse": True, **({"return_lse_base_on_e": True} if base_e else {})}
    lse = made.lse if base_e else made.lse / math.log(2)
    dump(
        root,
        2,
        "BatchMLAPagedAttentionWrapper.run",
        RUN,
        (SELF, q[..., :512], q[..., 512:], kv[..., :512], kv[..., 512:]),
        keywords,
        (made.output, lse) if results else (),
        object_id=99,
    )


@pytest.mark.parametrize("base_e", [False, True])
def test_a_wrapper_call_with_its_plan(tmp_path, base_e):
    made = finished(dense())
    wrapper_dumps(tmp_path / "dumps", made, base_e=base_e)
    dump(tmp_path / "dumps", 3, "rmsnorm", "(x: torch.Tensor) -> torch.Tensor", (torch.zeros(2),))
    found = import_dumps(tmp_path / "dumps", tmp_path / "captures")
    assert (len(found.written), found.refused, found.ignored) == (1, (), 1)
    again = captures.read(found.written[0])
    assert (again.call.lse_base, again.call.mode, again.call.sm_scale) == ("natural" if base_e else "2", "verify", made.call.sm_scale)
    assert torch.equal(again.output, made.output)
    expected = oracle.reference(made, "fp64", device="cpu")
    assert torch.equal(oracle.reference(again, "fp64", device="cpu")[0], expected[0])
    assert again.versions["captured-flashinfer"] == "0.6"


def test_without_the_causal_mask_rows_see_everything(tmp_path):
    wrapper_dumps(tmp_path / "dumps", finished(dense()), causal=False)
    (path,) = import_dumps(tmp_path / "dumps", tmp_path / "captures").written
    assert captures.read(path).tensors["query_cache_seqlens"].tolist() == [20] * 4 + [45] * 4


def test_a_crashed_call_becomes_a_capture_without_output(tmp_path):
    wrapper_dumps(tmp_path / "dumps", finished(dense()), results=False)
    (path,) = import_dumps(tmp_path / "dumps", tmp_path / "captures").written
    assert captures.read(path).output is None


def decode_dump(root, made, **keywords):
    batch = len(made.tensors["cache_seqlens"])
    query = made.tensors["q"].reshape(batch, -1, made.heads, 576)
    given = {
        "query": query,
        "kv_cache": made.tensors["kv_cache"],
        "workspace_buffer": torch.zeros(4, dtype=torch.int8),
        "qk_nope_head_dim": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "block_tables": made.tensors["page_table"].clamp_min(0),
        "seq_lens": made.tensors["cache_seqlens"],
        "max_seq_len": 45,
        "bmm1_scale": made.call.sm_scale,
        **keywords,
    }
    return dump(root, 1, "trtllm_batch_decode_with_kv_cache_mla", DECODE, (), given, (made.output.reshape(*query.shape[:3], 512),))


def test_a_decode_function_call(tmp_path):
    made = finished(dense())
    decode_dump(tmp_path / "dumps", made)
    (path,) = import_dumps(tmp_path / "dumps", tmp_path / "captures").written
    again = captures.read(path)
    assert torch.equal(oracle.reference(again, "fp64", device="cpu")[0], oracle.reference(made, "fp64", device="cpu")[0])
    assert torch.equal(again.output, made.output)
    assert again.lse is None


def test_the_scale_of_an_fp8_cache_is_taken_out_of_bmm1(tmp_path):
    made = finished(dense(record="fp8", kv_scale=0.25))
    decode_dump(tmp_path / "dumps", made, bmm1_scale=made.call.sm_scale * 0.25, bmm2_scale=0.25)
    (path,) = import_dumps(tmp_path / "dumps", tmp_path / "captures").written
    again = captures.read(path)
    assert (again.call.kv_scale, again.call.sm_scale) == (0.25, made.call.sm_scale)


REFUSALS = [
    (lambda root, made: wrapper_dumps(root, made, plan=False), "the plan of this wrapper was not dumped"),
    (lambda root, made: wrapper_dumps(root, made, cache=made.tensors["kv_cache"].to(torch.float8_e4m3fn)), "an FP8 cache with ckv_scale None"),
    (lambda root, made: wrapper_dumps(root, made, cache=made.tensors["kv_cache"].half()), "a cache of torch.float16"),
    (lambda root, made: decode_dump(root, made, sparse_mla_top_k=64), "sparse_mla_top_k 64; only dense calls"),
    (lambda root, made: decode_dump(root, made, bmm1_scale={"type": "Wrapped"}), "bmm1_scale is dict, expected one number"),
    (lambda root, made: decode_dump(root, made, bmm2_scale=2.0), "bmm2_scale 2.0 over a bf16 cache"),
    (lambda root, made: decode_dump(root, made, seq_lens=None), "holds no seq_lens"),
    (lambda root, made: decode_dump(root, made, sinks={"type": "list"}), "sinks was given"),
    (lambda root, made: decode_dump(root, made, block_tables=torch.full((2, 3), 99, dtype=torch.int32)), "page 99 of 5"),
    (lambda root, made: decode_dump(root, made, block_tables=torch.zeros(2, 1, dtype=torch.int32)), "pass the 1 pages of the table"),
    (lambda root, made: (decode_dump(root, made) / "inputs.pt").touch(), "tensors are in torch format"),
    (lambda root, made: (decode_dump(root, made) / "inputs.safetensors").unlink(), "inputs.safetensors is missing"),
    (lambda root, made: (decode_dump(root, made) / "inputs.safetensors").write_bytes(b"12"), "not a whole safetensors file"),
]


def edited(root, place, edit):
    """The dump's last metadata line changed: what another version of the tool, or a crash, may leave."""
    path = next(root.glob(f"*_0000{place:02d}_*")) / "metadata.jsonl"
    record = json.loads(path.read_text().splitlines()[-1])
    edit(record)
    path.write_text(json.dumps(record) + "\n")


def planned(**changed):
    """The wrapper's dumps with tensors of its plan replaced: qo_indptr 1, kv_indptr 2, kv_indices 3, kv_len_arr 4."""

    def make(root, made):
        wrapper_dumps(root, made)
        path = next(root.glob("*.plan_*")) / "inputs.safetensors"
        save_file({**load_file(path), **changed}, path)

    return make


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def with_metadata(place, edit):
    def make(root, made):
        wrapper_dumps(root, made)
        edited(root, place, edit)

    return make


REFUSALS += [
    (planned(arg_2=ints(0, 4, 2)), "kv_indptr falls from 4 to 2 at index 2"),
    (planned(arg_2=ints(0, 2, 99)), "kv_indptr ends at 99, kv_indices holds 5 pages"),
    (planned(arg_2=ints(0, 2)), "kv_indptr has 2 entries for 2 requests, expected 3"),
    (planned(arg_2=ints(-1, 2, 5)), "kv_indptr holds -1 to 5, expected 0 to 2147483647"),
    (planned(arg_4=ints()), "kv_len_arr is empty"),
    (planned(arg_4=torch.tensor([20.0, 45.0])), "kv_len_arr is torch.float32 [2], expected a vector of whole numbers"),
    (planned(arg_1=ints(0, 4)), "2 requests, 2 boundaries (expected 3)"),
    (with_metadata(1, lambda record: record["input_metadata"].update(arg_10="0.07")), "sm_scale is str, expected one number"),
    (with_metadata(2, lambda record: record.update(input_metadata=[1])), "input_metadata of metadata.jsonl is a list, expected an object"),
    (with_metadata(2, lambda record: record.update(versions="1")), "versions of metadata.jsonl is a str, expected an object"),
    (
        lambda root, made: decode_dump(root, finished(dense(record="fp8", kv_scale=0.25)), bmm2_scale=0.0),
        "bmm2_scale is 0.0, expected a number above 0",
    ),
    (lambda root, made: decode_dump(root, made, query={"type": "list"}), "its arguments do not fit the call: AttributeError"),
]


@pytest.mark.parametrize(("make", "message"), REFUSALS)
def test_what_does_not_hold_enough_is_refused_naming_it(tmp_path, make, message):
    make(tmp_path / "dumps", finished(dense()))
    found = import_dumps(tmp_path / "dumps", tmp_path / "captures")
    assert found.written == ()
    assert message in found.refused[0].why


def test_a_folder_without_dumps(tmp_path):
    with pytest.raises(CannotRun, match=r"no metadata\.jsonl"):
        import_dumps(tmp_path, tmp_path / "captures")
    with pytest.raises(CannotRun, match="absent does not exist, expected a folder of FlashInfer dumps"):
        import_dumps(tmp_path / "absent", tmp_path / "captures")


def test_parameter_names_of_nested_annotations():
    assert parameter_names(RUN)[:6] == ["self", "q_nope", "q_pe", "ckv_cache", "kpe_cache", "out"]
    assert parameter_names("(a: Dict[str, Tuple[int, int]] = {'x': (1, 2)}, *, b: int = 3) -> None") == ["a", "b"]
    assert parameter_names("()") == []


def test_a_dump_that_does_not_fit_ends_nothing_but_itself(tmp_path):
    """Arguments that were no tensors raised out of the import, and the dumps after them were not read."""
    planned(arg_2=ints(0, 4, 2))(tmp_path / "dumps" / "a", finished(dense()))
    wrapper_dumps(tmp_path / "dumps" / "b", finished(dense(seed=1)))
    seen = []
    found = import_dumps(tmp_path / "dumps", tmp_path / "captures", on_dump=seen.append)
    assert (len(found.written), len(found.refused), len(seen)) == (1, 1, 4)
    assert found.refused[0].hint == "FLASHINFER_LOGLEVEL=10 FLASHINFER_DUMP_SAFETENSORS=1 dumps the call again"


def test_a_second_import_takes_what_is_there(tmp_path):
    """It stopped at the first capture that existed already."""
    wrapper_dumps(tmp_path / "dumps", finished(dense()))
    first, second = (import_dumps(tmp_path / "dumps", tmp_path / "captures") for _ in range(2))
    assert (first.written, first.unchanged) == (second.written, 0)
    assert (second.unchanged, second.refused) == (1, ())
    wrapper_dumps(tmp_path / "other", finished(dense(seed=1)))
    third = import_dumps(tmp_path / "other", tmp_path / "captures")
    assert (third.written, third.refused[0].why) == ((), f"{first.written[0]} exists already and holds something else")


def test_the_hint_of_a_refusal_is_kept(tmp_path):
    wrapper_dumps(tmp_path / "dumps", finished(dense()), plan=False)
    (refused,) = import_dumps(tmp_path / "dumps", tmp_path / "captures").refused
    assert refused.hint == "include BatchMLAPagedAttentionWrapper.plan"


@pytest.fixture
def imported(tmp_path, monkeypatch, capsys):
    """`imported(dumps, ...)` is (exit code, JSON or None, stderr) of `mlactl replay ... --import-flashinfer`."""
    from mlactl.cli.app import main

    monkeypatch.setenv("MLACTL_CACHE_DIR", str(tmp_path / "cache"))

    def run(*dumps, target=tmp_path / "captures", output="json"):
        code = main(["replay", *map(str, dumps), "--import-flashinfer", str(target), "--no-kernel", "--output", output])
        found = capsys.readouterr()
        return code, json.loads(found.out) if output == "json" and found.out else found.out, found.err

    return run


def test_a_refused_dump_is_in_the_report_and_makes_it_exit_2(tmp_path, imported):
    """A truncated dump beside a good one left "OK ... all that was compared agrees" and exit 0."""
    wrapper_dumps(tmp_path / "dumps" / "a", finished(dense()))
    code, document, _ = imported(tmp_path / "dumps")
    assert (code, document["counts"]) == (0, {"match": 1, "mismatch": 0, "nothing_compared": 0, "error": 0})
    dump(tmp_path / "dumps", 3, "rmsnorm", "(x: torch.Tensor) -> torch.Tensor", (torch.zeros(2),))
    told = imported(tmp_path / "dumps", output="human")[2]
    assert "dumps: 1 capture written to " in told
    assert "captures (1 there already), 0 refused, 1 other call\n" in told
    broken = decode_dump(tmp_path / "dumps" / "b", finished(dense()))
    data = (broken / "inputs.safetensors").read_bytes()
    (broken / "inputs.safetensors").write_bytes(data[: len(data) // 2])
    code, document, _ = imported(tmp_path / "dumps")
    assert (code, document["exit_code"], document["verdict"]) == (2, 2, "error")
    assert document["counts"] == {"match": 1, "mismatch": 0, "nothing_compared": 0, "error": 1}
    (refused,) = [call for call in document["calls"] if call["status"] == "error"]
    assert (refused["name"], refused["provenance"]) == (broken.name, {"dump": str(broken)})


def test_a_second_dump_of_the_same_folder_name_is_not_passed_over(tmp_path, imported):
    wrapper_dumps(tmp_path / "a", finished(dense()))
    wrapper_dumps(tmp_path / "b", finished(dense(seed=1)))
    code, document, _ = imported(tmp_path / "a", tmp_path / "b")
    assert (code, document["counts"]["match"], document["counts"]["error"]) == (2, 1, 1)
    (refused,) = [call for call in document["calls"] if call["status"] == "error"]
    assert refused["provenance"]["dump"].startswith(str(tmp_path / "b"))
    assert "exists already and holds something else" in refused["message"]


def test_no_folder_is_made_for_an_import_of_nothing(tmp_path, imported):
    """The target was made first: as its own source it then "holds no FlashInfer dumps"."""
    code, document, told = imported(tmp_path / "nope", target=tmp_path / "nope")
    assert (code, document) == (2, "")
    assert "nope does not exist, expected a folder of FlashInfer dumps" in told
    (tmp_path / "empty").mkdir()
    assert imported(tmp_path / "empty", target=tmp_path / "made")[0] == 2
    assert not (tmp_path / "nope").exists()
    assert not (tmp_path / "made").exists()


def test_a_target_that_cannot_be_written(tmp_path, imported):
    wrapper_dumps(tmp_path / "dumps", finished(dense()))
    code, _, told = imported(tmp_path / "dumps", target="/proc/nope")
    assert code == 2
    assert "no file can be written there" in told
