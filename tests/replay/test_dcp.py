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

from mlactl.replay import capture as captures
from mlactl.replay import oracle
from mlactl.replay.dcp.groups import find_groups, group_reports
from mlactl.replay.dcp.merge import merge_results
from mlactl.replay.dcp.unsharded import global_lengths, held, length_faults, unsharded
from mlactl.replay.errors import BadCapture
from mlactl.replay.header import Parallel
from mlactl.replay.runner import ReplayOptions

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


def test_lengths_that_are_no_sharding_are_refused():
    made, _ = shards((10,), 2)
    tensors = {**made[1].tensors, "cache_seqlens": torch.tensor([3], dtype=torch.int32)}
    with pytest.raises(BadCapture, match="request 0: rank 0 of 2 holds 5 of 8 tokens, interleave 1 gives it 4"):
        unsharded([made[0], replace(made[1], tensors=tensors)])


def test_incomplete_groups_and_repeated_ranks(tmp_path):
    made, _ = shards((10,), 2)
    assert find_groups(saved(tmp_path / "half", made[:1])) == ()
    both = saved(tmp_path / "twice", [*made, replace(made[0], name="rank0-again")])
    with pytest.raises(BadCapture, match="both DCP rank 0"):
        find_groups(both)


@pytest.mark.parametrize("world", [2, 3])
def test_real_ranks_over_gloo(tmp_path, world):
    """All-gather of queries whose heads the world does not divide, a shard that is empty, and the merge over processes."""
    made, _ = shards((1, 33), world, rows=2, heads=5)
    saved(tmp_path / "captures", made)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), "-m", "mlactl.replay.dcp"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, str(tmp_path / "captures"), "--device", "cpu", "--json"], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    (call,) = json.loads(done.stdout)["calls"]
    assert call["pairs"][0]["left"] == f"{world} ranks, gloo"
    assert [output["status"] for output in call["pairs"][0]["outputs"]] == ["match", "match"]


def test_ranks_that_do_not_fit_the_group(tmp_path):
    made, _ = shards((10,), 2)
    saved(tmp_path, made)
    done = subprocess.run([sys.executable, "-m", "mlactl.replay.dcp", str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "error: 1 ranks were started, the groups have [2]" in done.stderr
    assert "hint: torchrun --nproc-per-node 2" in done.stderr
