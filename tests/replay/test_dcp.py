"""Merging the ranks of a call, in one process and over real ranks."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import msgspec
import pytest
import torch
from calls import dense, finished
from safetensors.torch import load_file

from mlactl.replay import capture as captures
from mlactl.replay import oracle
from mlactl.replay.dcp.groups import find_groups, group_reports, unmerged
from mlactl.replay.dcp.merge import merge_results
from mlactl.replay.dcp.unsharded import global_lengths, held, length_faults, unsharded
from mlactl.replay.errors import BadCapture
from mlactl.replay.header import Parallel
from mlactl.replay.report import Report, report_json
from mlactl.replay.results import Strictness
from mlactl.replay.runner import ReplayOptions, replay

CPU = ReplayOptions(device="cpu")


def shards(lengths, world, rows=1, interleave=1, seed=0, heads=2, wrong_rows=None):
    """The ranks' calls of one unsharded call, each with its right result, and that call.

    `wrong_rows` maps a rank to the visible lengths it uses instead of the right ones.
    """
    whole = dense(lengths=lengths, rows=rows, seed=seed, heads=heads, mode="verify" if rows > 1 else "decode")
    page, table = whole.call.page_size, whole.tensors["page_table"]
    made = []
    for rank in range(world):
        mine = [[t for t in range(length) if (t // interleave) % world == rank] for length in lengths]
        counts = [-(-len(tokens) // page) for tokens in mine]
        kv = torch.zeros(max(1, sum(counts)), page, 576, dtype=torch.bfloat16)
        own_table = torch.full((len(lengths), max([1, *counts])), -1, dtype=torch.int32)
        start = 0
        for request, tokens in enumerate(mine):
            own_table[request, : counts[request]] = torch.arange(start, start + counts[request], dtype=torch.int32)
            for place, token in enumerate(tokens):
                kv[start + place // page, place % page] = whole.tensors["kv_cache"][table[request, token // page], token % page]
            start += counts[request]
        sees = [held(max(0, length - rows + row + 1), rank, world, interleave) for length in lengths for row in range(rows)]
        tensors = {
            **whole.tensors, "kv_cache": kv, "page_ids": torch.arange(len(kv)), "page_table": own_table,
            "cache_seqlens": torch.tensor([len(tokens) for tokens in mine], dtype=torch.int32),
            "query_cache_seqlens": torch.tensor((wrong_rows or {}).get(rank, sees), dtype=torch.int32),
        }  # fmt: skip
        call = msgspec.structs.replace(
            whole.call, parallel=Parallel(dcp_rank=rank, dcp_world=world, interleave=interleave), facts={**whole.call.facts, "lengths": "per_query"}
        )
        made.append(finished(replace(whole, name=f"rank{rank}", call=call, tensors=tensors)))
    return made, whole


def poisoned(made):
    """What an empty rank's memory may hold: NaN where its LSE says that it saw nothing."""
    output = made.output.clone()
    output[torch.isneginf(made.lse)] = math.nan
    return made.with_result(output, made.lse)


def saved(folder, made):
    for item in made:
        captures.save(item, folder, item.name)
    return captures.find([folder])


@pytest.mark.parametrize(("rank", "expected"), [(0, [4, 5, 5]), (1, [4, 4, 5])])
def test_rank_local_lengths_of_verify_rows(rank, expected):
    """Taking the rows' lengths from the rank-local request length gave 3, 4, 5 for rank 1."""
    assert [held(tokens, rank, 2, 1) for tokens in (8, 9, 10)] == expected


@pytest.mark.parametrize("interleave", [1, 2, 16])
@pytest.mark.parametrize("world", [1, 3, 8])
def test_held_counts_tokens(world, interleave):
    for tokens in range(70):
        for rank in range(world):
            assert held(tokens, rank, world, interleave) == sum((t // interleave) % world == rank for t in range(tokens))


@pytest.mark.parametrize("interleave", [1, 4])
def test_eight_ranks_of_lengths_1_and_5_with_poisoned_empty_shards(tmp_path, interleave):
    """An empty rank's output memory held NaN, and 0 * NaN reached the merged output."""
    made, whole = shards((1, 5), 8, interleave=interleave)
    assert sum(bool(torch.isneginf(item.lse).any()) for item in made) >= 6
    made = [poisoned(item) for item in made]
    (report,) = group_reports(saved(tmp_path, made), CPU)
    assert report.status == "match", report
    merged = merge_results([item.output for item in made], [item.lse for item in made], ["natural"] * 8)
    expected = oracle.reference(whole, "fp64", device="cpu")
    torch.testing.assert_close(merged[0].double(), expected[0], rtol=1e-2, atol=2e-3)
    torch.testing.assert_close(merged[1].double(), expected[1], rtol=1e-5, atol=1e-5)


def test_all_ranks_empty_give_zero():
    made, _ = shards((0, 0), 4)
    made = [poisoned(item) for item in made]
    output, lse = merge_results([item.output for item in made], [item.lse for item in made], ["natural"] * 4)
    assert torch.equal(output, torch.zeros(2, 2, 512))
    assert torch.isneginf(lse).all()


def test_normalisers_2_and_8_weigh_a_fifth_and_four_fifths():
    """Read as base 2, natural LSEs of 2 and 8 weigh .277 and .723: the base is declared or the merge refused."""
    outputs = [torch.ones(1, 1, 4), torch.zeros(1, 1, 4)]
    lses = [torch.tensor([[math.log(2.0)]]), torch.tensor([[math.log(8.0)]])]
    assert float(merge_results(outputs, lses, ["natural"] * 2)[0][0, 0, 0]) == pytest.approx(0.2)
    assert float(merge_results(outputs, lses, ["2"] * 2)[0][0, 0, 0]) == pytest.approx(1 / (1 + 2 ** (math.log(8) - math.log(2))))
    assert float(merge_results(outputs, lses, ["2"] * 2)[0][0, 0, 0]) == pytest.approx(0.277, abs=1e-3)
    base2 = [lse / math.log(2) for lse in lses]
    assert float(merge_results(outputs, [base2[0], lses[1]], ["2", "natural"])[0][0, 0, 0]) == pytest.approx(0.2)
    with pytest.raises(BadCapture, match="must say natural or 2"):
        merge_results(outputs, lses, ["natural", ""])


def test_a_group_is_put_back_together():
    made, whole = shards((37, 5), 3, rows=2, interleave=2)
    again = unsharded(made)
    expected, found = (oracle.reference(item, "fp64", device="cpu") for item in (whole, again))
    assert global_lengths(made) == [37, 5]
    torch.testing.assert_close(found[0], expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-12, atol=1e-12)
    assert again.call.parallel == Parallel()


def test_wrong_rank_local_lengths_are_found_and_named(tmp_path):
    made, _ = shards((10,), 2, rows=3, wrong_rows={1: [3, 4, 5]})
    assert length_faults(made) == [(1, 0, 3, 4)]
    (report,) = group_reports(saved(tmp_path, made), replace(CPU, bisect=True))
    assert report.status == "mismatch"
    assert report.notes == ("rank 1, row 0: sees 3 of its keys, 4 of them are visible",)
    assert report.bisection.hypotheses[0].coordinates == (("rank", 1), ("row", 0), ("shift", -1))
    assert dict(report.pairs[0].comparisons[0].worst.coordinates)["row"] == 0


def test_a_mixed_up_base_of_one_rank_is_named(tmp_path):
    made, _ = shards((40, 61), 4)
    made[2] = made[2].with_result(made[2].output, made[2].lse / math.log(2))
    (report,) = group_reports(saved(tmp_path, made), replace(CPU, bisect=True))
    assert report.status == "mismatch"
    assert report.bisection.verdict == "LSE base: rank 2 wrote its LSE as base 2, natural is declared"


def test_the_rank_with_a_wrong_output_is_inferred(tmp_path):
    made, _ = shards((200,), 4)
    made[3] = made[3].with_result(made[3].output * 1.3, made[3].lse)
    (report,) = group_reports(saved(tmp_path, made), CPU)
    assert report.status == "mismatch"
    assert report.inferred[0].inferred
    assert report.inferred[0].note.startswith("rank 3")


@pytest.mark.parametrize("factor", [0.9, 1.3])
@pytest.mark.parametrize("rank", [0, 1])
def test_of_two_ranks_the_one_that_is_wrong_by_itself_is_named(tmp_path, rank, factor):
    """Both ranks' movements line up with the error alike, and the good one was named."""
    made, _ = shards((37, 60), 2, rows=3)
    made[rank] = made[rank].with_result(made[rank].output * factor, made[rank].lse)
    paths = saved(tmp_path, made)
    report = replay(paths, replace(CPU, kernel=False))
    group = report.calls[-1]
    assert (group.status, [item.note for item in group.inferred]) == ("mismatch", [f"rank {rank}: its own result is wrong"])
    assert [(item.axis, item.indices, item.extent, item.top) for item in group.inferred] == [("rank", 1, 2, ((rank, 0, 0),))]
    (alone,) = group_reports(paths, CPU)
    assert (alone.status, alone.inferred) == ("mismatch", ())


def test_every_rank_that_is_wrong_by_itself_is_named(tmp_path):
    made, _ = shards((200,), 4)
    for rank in (1, 3):
        made[rank] = made[rank].with_result(made[rank].output * 1.3, made[rank].lse)
    group = replay(saved(tmp_path, made), replace(CPU, kernel=False)).calls[-1]
    assert [(item.note, item.indices) for item in group.inferred] == [("ranks 1, 3: their own results are wrong", 2)]


def test_groups_are_counted_apart_from_captures(tmp_path):
    """Two captures of one group were three captures."""
    made, _ = shards((37, 60), 2)
    report = replay(saved(tmp_path, made), replace(CPU, kernel=False))
    assert report.verdict() == "OK: 2 captures, 1 group: 3 match (exit 0: all that was compared agrees)"
    assert (report_json(report)["groups"], report_json(report)["counts"]["match"]) == (1, 3)
    assert Report(report.calls[-1:], command="dcp").verdict().startswith("OK: 1 group: 1 match")
    assert dict(report.calls[0].provenance)["call"] == "decode, 2 requests, 2 rows, 2 heads, bf16 records"


def test_rows_of_wrong_lengths_that_are_not_named_are_counted(tmp_path):
    """Of eight rows four were named, as if there were no more."""
    made, _ = shards((40,), 2, rows=8, wrong_rows={1: [1, 2, 3, 4, 5, 6, 7, 8]})
    (report,) = group_reports(saved(tmp_path, made), replace(CPU, bisect=True))
    assert [note.split(":")[0] for note in report.notes] == [*(f"rank 1, row {row}" for row in range(4)), "and 4 more of such rows"]
    assert report.bisection.verdict == "visible length: rank 1, row 0 sees 1 key, 16 of those it holds are visible; 7 more rows like it"


def test_lengths_that_are_no_sharding_are_refused():
    made, _ = shards((10,), 2)
    tensors = {**made[1].tensors, "cache_seqlens": torch.tensor([3], dtype=torch.int32)}
    with pytest.raises(BadCapture, match="request 0: rank 0 of 2 holds 5 of 8 tokens, interleave 1 gives it 4"):
        unsharded([made[0], replace(made[1], tensors=tensors)])


def test_an_incomplete_group_is_named(tmp_path):
    """The merge of a group with a rank missing was left out without a word, and the run was exit 0."""
    made, _ = shards((10,), 3)
    (report,) = group_reports(saved(tmp_path, made[1:2]), CPU)
    assert (report.name, report.status) == ("DCP group of rank1", "nothing compared")
    assert report.message == "the merge was not judged: ranks 0, 2 of 3 are missing"
    assert report.hint.endswith("mlactl replay RANK0 RANK1 …")


def test_a_group_whose_rank_has_no_output_is_named(tmp_path):
    made, _ = shards((10,), 2)
    paths = saved(tmp_path, [made[0], made[1].with_result(made[1].output, None)])
    (report,) = group_reports(paths, CPU)
    assert report.message == "the merge was not judged: rank 1 of 2 captured no output with its LSE"
    assert [len(found) for found in (find_groups(paths).complete, find_groups(paths, with_results=False).complete)] == [0, 1]


def test_a_call_that_was_recorded_twice_is_two_groups(tmp_path):
    """Two captures of one rank were an error, and no group was merged at all."""
    made, _ = shards((20, 5), 2)
    wrong = [replace(item, name=f"later-{item.name}") for item in made]
    wrong[1] = wrong[1].with_result(wrong[1].output * 3, wrong[1].lse)
    paths = saved(tmp_path / "b", [*made, *wrong])
    found = {report.name: report.status for report in group_reports(paths, CPU)}
    assert found == {"DCP group of later-rank0": "mismatch", "DCP group of rank0": "match"}
    shorter = group_reports(captures.find([tmp_path / "b" / "later-rank0", tmp_path / "b" / "rank0", tmp_path / "b" / "rank1"]), CPU)
    assert [(report.name, report.status, report.message) for report in shorter] == [
        ("DCP group of later-rank0", "match", None),
        ("DCP group of rank0", "nothing compared", "the merge was not judged: rank 1 of 2 is missing"),
    ]


def test_rows_and_heads_restrict_the_merge_too(tmp_path):
    """With --rows or --heads the merge was skipped without a word."""
    made, _ = shards((20, 45), 2, rows=3)
    output = made[1].output.clone()
    output[4] *= 2
    paths = saved(tmp_path, [made[0], made[1].with_result(output, made[1].lse)])
    right, wrong = (replay(paths, replace(CPU, kernel=False, rows=rows, heads=(1,), bisect=True)).calls[-1] for rows in ((0, 5), (2, 4)))
    assert (right.status, right.pairs[0].comparisons[0].shape) == ("match", (2, 1, 512))
    assert wrong.status == "mismatch"
    place = dict(wrong.pairs[0].comparisons[0].worst.coordinates)
    assert (place["request"], place["row"], place["head"]) == (1, 4, 1)
    assert wrong.inferred[0].note == "rank 1: its own result is wrong"
    # It named the shards alone: a command that judges the whole call, by the tolerances of the table.
    named = f"mlactl replay {' '.join(str(path).removesuffix('.in.safetensors') for path in paths)}"
    assert wrong.command == f"{named} --rows 4 --heads 1 --device cpu --no-kernel"
    (strict,) = group_reports(paths, replace(CPU, strictness=Strictness(row=0.001), kernel=False))
    place = dict(strict.pairs[0].comparisons[0].worst.coordinates)
    assert strict.command == f"{named} --rows {place['row']} --heads {place['head']} --device cpu --no-kernel --row-tol 0.001"
    (outside,) = group_reports(paths, replace(CPU, rows=(6,)))
    assert (outside.status, outside.message, outside.hint) == ("error", "row 6 was asked for, the capture has rows 0 to 5", "--rows 0-5")


def test_the_merged_result_is_saved(tmp_path):
    made, _ = shards((20, 45), 2)
    (report,) = group_reports(saved(tmp_path / "captures", made), replace(CPU, save=tmp_path / "saved"))
    assert report.notes == ()
    found = load_file(tmp_path / "saved" / "DCP-group-of-rank0.results.safetensors")
    assert sorted(found) == ["merged.lse", "merged.output", "reference.lse", "reference.output"]
    merged = merge_results([item.output for item in made], [item.lse for item in made], ["natural"] * 2)
    assert torch.equal(found["merged.output"], merged[0])
    assert torch.equal(found["merged.lse"], merged[1])


def test_an_explanation_of_lengths_is_computed(tmp_path):
    """Rank-local lengths were called the reason of any mismatch, with an error of 0 that nobody computed."""
    made, _ = shards((10,), 2, rows=3, wrong_rows={1: [3, 4, 5]})
    (report,) = group_reports(saved(tmp_path / "a", made), replace(CPU, bisect=True))
    assert report.bisection.hypotheses[0].reproduces
    assert 0 < report.bisection.hypotheses[0].factor <= 1
    other = [made[0].with_result(made[0].output * 2, made[0].lse), made[1]]
    (report,) = group_reports(saved(tmp_path / "b", other), replace(CPU, bisect=True))
    lengths = next(item for item in report.bisection.hypotheses if item.name == "visible length")
    assert (lengths.reproduces, lengths.factor > 10) == (False, True)
    assert report.bisection.verdict == "none of 4 explanations makes the merge right"


def test_a_run_that_stopped_early_says_that_nothing_was_merged(tmp_path):
    made, _ = shards((20, 5), 2)
    made[0] = made[0].with_result(made[0].output * 3, made[0].lse)
    found = replay(saved(tmp_path / "group", made), replace(CPU, kernel=False), fail_fast=True)
    assert (found.exit_code, found.skipped) == (1, 1)
    assert [(call.name, call.status) for call in found.calls] == [("rank0", "mismatch"), ("DCP groups", "nothing compared")]
    assert found.calls[1].message == "the merge was not judged: --fail-fast stopped the run before"
    captures.save(finished(dense()), tmp_path / "single", "one")
    assert unmerged(captures.find([tmp_path / "single"])) == ()


def over_ranks(world, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), "-m", "mlactl.replay.dcp"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, env=env, timeout=300)


def test_real_ranks_over_gloo(tmp_path):
    """All-gather of queries whose heads the world does not divide, a shard that is empty, and the merge over processes.

    The ranks judge what was captured: a rank that wrote its LSE in another base was not noticed, because each attended
    with the reference. Where nothing was captured they still do, and say so.
    """
    made, _ = shards((1, 33), 3, rows=2, heads=5)
    again, _ = shards((40, 61), 3, seed=1)
    blind, _ = shards((9, 8), 3, seed=2)
    again[2] = again[2].with_result(again[2].output, again[2].lse / math.log(2))
    blind[1] = blind[1].with_result(None, None)
    for folder, group in (("right", made), ("base", again), ("blind", blind)):
        saved(tmp_path / "captures" / folder, group)
    done = over_ranks(3, tmp_path / "captures", "--device", "cpu", "--json")
    assert done.returncode == 1, done.stderr
    calls = {call["name"]: call for call in json.loads(done.stdout)["calls"]}
    assert {name: call["status"] for name, call in calls.items()} == {
        "DCP group of base/rank0": "mismatch",
        "DCP group of blind/rank0": "match",
        "DCP group of right/rank0": "match",
    }
    right = calls["DCP group of right/rank0"]
    assert right["pairs"][0]["left"] == "3 ranks, gloo"
    assert [output["status"] for output in right["pairs"][0]["outputs"]] == ["match", "match"]
    assert right["provenance"]["partials"] == "rank 0: captured output; rank 1: captured output; rank 2: captured output"
    assert right["notes"] == []
    assert calls["DCP group of base/rank0"]["inferred_clusters"][0]["axis"] == "rank"
    assert calls["DCP group of blind/rank0"]["provenance"]["partials"] == "rank 0: captured output; rank 1: reference; rank 2: captured output"
    assert calls["DCP group of blind/rank0"]["notes"] == [
        "rank 1 captured no result with its LSE and could not run the kernel: the reference stood in, nothing of it was judged"
    ]


def test_ranks_that_do_not_fit_the_group(tmp_path):
    made, _ = shards((10,), 2)
    saved(tmp_path, made)
    done = subprocess.run([sys.executable, "-m", "mlactl.replay.dcp", str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "error: 1 rank was started, the captures hold groups of 2" in done.stderr
    assert "hint: torchrun --nproc-per-node 2" in done.stderr
