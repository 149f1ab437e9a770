"""Finds the smallest input for which a kernel still fails: fewer requests, rows, heads, pages and keys, one after the other.

Works on any function from a capture to a verdict, so that it is tested with planted faults on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import torch

from mlactl.printable import counted
from mlactl.replay.capture import Capture
from mlactl.replay.visible import seen

Fails = Callable[[Capture], bool]
OnStep = Callable[[str], None]
MAX_RUNS = 300
"""Kernel runs spent on one capture."""


class _Budget:
    """Counts runs; when they are spent nothing fails any more, and what was found so far stands."""

    def __init__(self, fails: Fails, on_step: OnStep | None = None) -> None:
        self._fails, self._on_step, self.runs = fails, on_step, 0
        self.cutting = ""

    def __call__(self, capture: Capture) -> bool:
        if self.runs >= MAX_RUNS:
            return False
        self.runs += 1
        if self._on_step is not None:
            self._on_step(f"fewer {self.cutting}, run {self.runs} of at most {MAX_RUNS}")
        return self._fails(capture)


def shrink(capture: Capture, fails: Fails, *, on_step: OnStep | None = None) -> tuple[Capture, tuple[str, ...]]:
    """The smallest capture found that still fails, without a result, and what each step took away; `on_step` hears of each run."""
    budget = _Budget(fails, on_step)
    steps: list[str] = []
    found = capture.with_result(None, None)
    for name, parts, cut in (
        ("requests", lambda item: len(item.boundaries) - 1, keep_requests),
        ("rows", lambda item: item.rows, keep_rows),
        ("heads", lambda item: item.heads, keep_heads),
        ("pages", _page_count, keep_pages),
        ("keys", _key_count, keep_keys),
    ):
        budget.cutting, before = name, parts(found)
        if name in ("pages", "keys") and found.rows != 1:
            steps.append(f"{name}: left as they are, no single row fails")
            continue
        found = _reduce(found, before, cut, budget)
        steps.append(f"{name}: {before} to {parts(found)}")
    steps.append(counted(budget.runs, "run"))
    return found, tuple(steps)


def _reduce(capture: Capture, count: int, cut: Callable[[Capture, Sequence[int]], Capture], fails: Fails) -> Capture:
    """Delta debugging: keeps ever smaller subsets of `count` parts as long as what is left still fails."""
    kept = list(range(count))
    best = capture
    pieces = 2
    while len(kept) > 1:
        size = max(1, -(-len(kept) // pieces))
        chunks = [kept[start : start + size] for start in range(0, len(kept), size)]
        tries = chunks if pieces == 2 else chunks + [[part for part in kept if part not in chunk] for chunk in chunks]
        smaller = next(((subset, made) for subset in tries if len(subset) < len(kept) and fails(made := cut(capture, subset))), None)
        if smaller is not None:
            kept, best = smaller
            pieces = 2
        elif size == 1:
            break
        else:
            pieces = min(len(kept), pieces * 2)
    return best


def _page_count(capture: Capture) -> int:
    found = seen(capture, 0)
    return 0 if found is None else len(torch.unique(found.pages))


def _key_count(capture: Capture) -> int:
    found = seen(capture, 0)
    return 0 if found is None else len(found.pages)


# ---- cuts: the same call over less; captures stay such as a kernel accepts


def keep_requests(capture: Capture, requests: Sequence[int]) -> Capture:
    """Only those requests, in order; of selected slots, where each row is one, those rows."""
    if not capture.dense:
        return keep_rows(capture, requests)
    ends = capture.boundaries
    rows = [row for request in requests for row in range(ends[request], ends[request + 1])]
    counts = [ends[request + 1] - ends[request] for request in requests]
    tensors = dict(capture.tensors)
    tensors |= {
        "q": tensors["q"][rows],
        "page_table": tensors["page_table"][list(requests)],
        "cache_seqlens": tensors["cache_seqlens"][list(requests)],
        "cu_seqlens_q": torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
    }
    if "query_cache_seqlens" in tensors:
        tensors["query_cache_seqlens"] = tensors["query_cache_seqlens"][rows]
    return _compact(_with(capture, tensors))


def keep_rows(capture: Capture, rows: Sequence[int]) -> Capture:
    """Only those rows. A row of several becomes a request of its own, as long as what it saw, so that it sees the same keys."""
    tensors = dict(capture.tensors)
    if not capture.dense:
        return _compact(_with(capture, tensors | {name: tensors[name][list(rows)] for name in ("q", "indices", "lengths")}))
    if len(rows) == capture.rows:
        return capture
    from mlactl.replay.visible import visible_lengths

    visible, requests = visible_lengths(capture), capture.requests
    tensors.pop("query_cache_seqlens", None)
    tensors |= {
        "q": tensors["q"][list(rows)],
        "page_table": tensors["page_table"][[requests[row] for row in rows]],
        "cache_seqlens": torch.tensor([visible[row] for row in rows], dtype=torch.int32),
        "cu_seqlens_q": torch.arange(len(rows) + 1, dtype=torch.int32),
    }
    facts = {**capture.call.facts, "lengths": "causal"} if "lengths" in capture.call.facts else capture.call.facts
    mode = "decode" if capture.call.mode == "verify" else capture.call.mode
    return _compact(replace(_with(capture, tensors), call=msgspec.structs.replace(capture.call, facts=facts, mode=mode)))


def keep_heads(capture: Capture, heads: Sequence[int]) -> Capture:
    """Only those heads."""
    return _with(capture, {**capture.tensors, "q": capture.tensors["q"][:, list(heads)].contiguous()})


def keep_pages(capture: Capture, pages: Sequence[int]) -> Capture:
    """Of a one-row capture, only the keys in the n-th pages of those it sees."""
    found = seen(capture, 0)
    assert found is not None
    order = list(dict.fromkeys(found.pages.tolist()))
    chosen = {order[place] for place in pages}
    return _keep(capture, torch.tensor([page in chosen for page in found.pages.tolist()]))


def keep_keys(capture: Capture, keys: Sequence[int]) -> Capture:
    """Of a one-row capture, only the n-th keys of those it sees."""
    found = seen(capture, 0)
    assert found is not None
    mask = torch.zeros(len(found.pages), dtype=torch.bool)
    mask[list(keys)] = True
    return _keep(capture, mask)


def _keep(capture: Capture, mask: torch.Tensor) -> Capture:
    """The keys of the mask, as a call of the same kind: over pages they are packed anew, from selected slots the others become -1."""
    found = seen(capture, 0)
    assert found is not None
    tensors = dict(capture.tensors)
    if not capture.dense:
        indices = torch.full_like(tensors["indices"], -1)
        columns = found.positions[mask]
        indices[0, columns] = tensors["indices"][0, columns]
        return _compact(_with(capture, tensors | {"indices": indices}))
    size, count = capture.call.page_size, int(mask.sum())
    whole = -(-count // size)
    kv = tensors["kv_cache"].new_zeros((max(1, whole), size, tensors["kv_cache"].shape[2]))
    kv.flatten(0, 1)[:count] = tensors["kv_cache"][found.pages[mask], found.offsets[mask]]
    # Whole pages keep their ids; packed ones are new pages.
    first = tensors["page_ids"][found.pages[mask][::size]] if count else tensors["page_ids"][:0]
    ids = first if len(first) == len(kv) and len(torch.unique(first)) == len(first) else torch.arange(len(kv))
    tensors |= {
        "kv_cache": kv,
        "page_ids": ids.long(),
        "page_table": torch.arange(len(kv), dtype=torch.int32)[None],
        "cache_seqlens": torch.tensor([count], dtype=torch.int32),
    }
    return _with(capture, tensors)


def _with(capture: Capture, tensors: dict[str, torch.Tensor]) -> Capture:
    return replace(capture, tensors=tensors, facts={}, output=None, lse=None)


def _compact(capture: Capture) -> Capture:
    """Leaves out the pages that no row sees any more."""
    tensors = dict(capture.tensors)
    views = [item for row in range(capture.rows) if (item := seen(capture, row)) is not None]
    used = torch.unique(torch.cat([item.pages for item in views])) if views else torch.zeros(0, dtype=torch.long)
    if len(used) == 0:
        return capture
    size = capture.call.page_size
    place = torch.full((len(tensors["kv_cache"]),), -1, dtype=torch.long)
    place[used] = torch.arange(len(used))
    if capture.dense:
        table = tensors["page_table"].long()
        tensors["page_table"] = torch.where(table >= 0, place[table.clamp_min(0)], -1).to(torch.int32)
    else:
        slots = tensors["indices"].long()
        moved = place[slots.clamp_min(0) // size]
        tensors["indices"] = torch.where((slots >= 0) & (moved >= 0), moved * size + slots % size, -1).to(torch.int32)
    tensors |= {"kv_cache": tensors["kv_cache"][used], "page_ids": tensors["page_ids"][used]}
    return _with(capture, tensors)
