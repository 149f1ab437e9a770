"""Whether a capture's tensors fit what it declares. Everything that later indexes memory is proved here first."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from mlactl.kernels import registry
from mlactl.kernels.errors import PlanError
from mlactl.replay.errors import RECORD_AGAIN, BadCapture
from mlactl.replay.header import DENSE_INPUTS, SELECTED_INPUTS
from mlactl.replay.records import RECORDS, ROPE_ELEMENTS
from mlactl.replay.visible import first_visible, visible_lengths

if TYPE_CHECKING:
    import torch

    from mlactl.replay.capture import Capture

OPTIONAL_INPUTS = ("query_cache_seqlens",)
DENSE_KERNELS = (registry.DENSE_FORWARD.kernel_id,)
SELECTING_KERNELS = (registry.SPARSE_DECODE.kernel_id, registry.SPARSE_PREFILL.kernel_id)
Q_DTYPES = {"bf16": "bfloat16", "e4m3": "float8_e4m3fn"}


def check(capture: Capture, origin: str) -> None:
    """Raises BadCapture for the first thing that does not fit, naming both sides and the next step."""
    try:
        _check_call(capture, origin)
        _check_names(capture, origin)
        _check_records(capture, origin)
        _check_facts(capture, origin)
        if capture.dense:
            _check_lengths(capture, origin)
            _check_table(capture, origin)
        else:
            _check_slots(capture, origin)
        _check_result(capture, origin)
    except BadCapture as error:
        error.hint = error.hint or RECORD_AGAIN
        raise


def _check_call(capture: Capture, origin: str) -> None:
    call = capture.call
    if call.record not in RECORDS:
        raise BadCapture(f"{origin}: record layout {call.record!r} is not one of {', '.join(RECORDS)}")
    layout = capture.layout
    if call.scale_mode != layout.scale_mode:
        raise BadCapture(f"{origin}: scale mode {call.scale_mode!r} declared, {layout.name} records have {layout.scale_mode!r}")
    declared = call.facts.get("record")
    if declared is not None and declared != call.record:
        raise BadCapture(f"{origin}: the kernel spec says record {declared!r}, the capture says {call.record!r}")
    for name, value in (("latent_scale", call.latent_scale), ("kv_scale", call.kv_scale), ("q_scale", call.q_scale), ("sm_scale", call.sm_scale)):
        if not (math.isfinite(value) and value > 0):
            raise BadCapture(f"{origin}: {name} is {value}, expected a finite number above 0")
    if call.latent_scale != 1.0 and not layout.takes_latent_scale:
        raise BadCapture(f"{origin}: latent_scale {call.latent_scale} with {layout.name} records, which take none but 1.0")
    if call.kv_scale != 1.0 and layout.scale_mode != "tensor":
        raise BadCapture(f"{origin}: kv_scale {call.kv_scale} with {layout.name} records, which take none but 1.0")
    wrong = call.parallel.fault()
    if wrong:
        raise BadCapture(f"{origin}: {wrong}")
    bounds = (("page size", call.page_size, 1), ("window", call.window, 1), ("splits", call.splits, 1), ("layer", call.layer, 0))
    for name, number, least in (*bounds, ("kernel version", call.kernel_version, 1)):
        if number is not None and number < least:
            raise BadCapture(f"{origin}: {name} {number}, expected at least {least}")
    kernels = DENSE_KERNELS if capture.dense else SELECTING_KERNELS
    if call.kernel_id not in kernels:
        what = "pages through a table" if capture.dense else "selected slots"
        raise BadCapture(f"{origin}: kernel {call.kernel_id!r} is not one of {', '.join(kernels)}, which attend over {what}")


def _check_names(capture: Capture, origin: str) -> None:
    expected = DENSE_INPUTS if capture.dense else SELECTED_INPUTS
    names = set(capture.tensors)
    if not set(expected) <= names <= set(expected) | set(OPTIONAL_INPUTS if capture.dense else ()):
        raise BadCapture(f"{origin}: holds {sorted(names)}, a call over {'pages' if capture.dense else 'selected slots'} has {sorted(expected)}")
    ranks = {"q": 3, "kv_cache": 3, "page_table": 2, "indices": 2}
    for name, tensor in capture.tensors.items():
        if tensor.ndim != ranks.get(name, 1):
            raise BadCapture(f"{origin}: {name} has {tensor.ndim} dimensions, expected {ranks.get(name, 1)}")
        wanted = None if name in ("q", "kv_cache") else "int64" if name == "page_ids" else "int32"
        found = str(tensor.dtype).removeprefix("torch.")
        if wanted is not None and found != wanted:
            raise BadCapture(f"{origin}: {name} is {found}, expected {wanted}")


def _check_records(capture: Capture, origin: str) -> None:
    layout, call = capture.layout, capture.call
    q, kv, ids = capture.tensors["q"], capture.tensors["kv_cache"], capture.tensors["page_ids"]
    found = str(kv.dtype).removeprefix("torch.")
    if found != layout.dtype:
        raise BadCapture(f"{origin}: kv_cache is {found}, {layout.name} records are {layout.dtype}")
    width = q.shape[2] if layout.dense else layout.record_bytes
    if kv.shape[2] != width:
        what = f"q has {width} elements a head" if layout.dense else f"{layout.name} records have {width} bytes"
        raise BadCapture(f"{origin}: kv_cache records have {kv.shape[2]}, {what}")
    if not layout.dense and q.shape[2] != layout.latent + ROPE_ELEMENTS:
        raise BadCapture(f"{origin}: q has {q.shape[2]} elements a head, {layout.name} keys have {layout.latent + ROPE_ELEMENTS}")
    if layout.dense and q.shape[2] <= ROPE_ELEMENTS:
        raise BadCapture(f"{origin}: q has {q.shape[2]} elements a head, a key has {ROPE_ELEMENTS} RoPE elements besides its latent")
    if kv.shape[1] != call.page_size:
        raise BadCapture(f"{origin}: kv_cache pages hold {kv.shape[1]} tokens, page size {call.page_size} is declared")
    if len(ids) != kv.shape[0]:
        raise BadCapture(f"{origin}: {len(ids)} page ids for {kv.shape[0]} pages")
    if len(ids) and (int(ids.min()) < 0 or len(set(ids.tolist())) != len(ids)):
        raise BadCapture(f"{origin}: page ids must differ and be at least 0, found {_first(ids, lambda value: value < 0) or 'a repeated one'}")


def _check_facts(capture: Capture, origin: str) -> None:
    """The spec's facts: known ones of this release's version, and none that says something else than the call."""
    call, kernel = capture.call, registry.KERNELS[capture.call.kernel_id]
    needed = ("record", "width") if capture.dense else ("record",)
    missing = [name for name in needed if name not in call.facts]
    if missing:
        raise BadCapture(f"{origin}: the kernel spec has no fact {' and '.join(missing)}, a call over {call.record} records has")
    if call.kernel_version == kernel.version:
        # Imports hold only the facts that another tool's dump tells, so that some may be missing; none may be made up.
        allowed = {fact.name: fact for fact in kernel.facts}
        for name, value in sorted(call.facts.items()):
            if name not in allowed:
                raise BadCapture(f"{origin}: the kernel spec has a fact {name!r}, {kernel.kernel_id} {kernel.version} has {', '.join(allowed)}")
            if type(value) is not allowed[name].kind or (name not in needed and value not in allowed[name].allowed):
                raise BadCapture(f"{origin}: the kernel spec says {name}={value!r}, expected one of {list(allowed[name].allowed)}")
    width, query = int(capture.tensors["q"].shape[2]), str(capture.tensors["q"].dtype).removeprefix("torch.")
    if call.facts.get("width", width) != width:
        raise BadCapture(f"{origin}: the kernel spec says width {call.facts['width']!r}, q has {width} elements a head")
    declared = call.facts.get("q_dtype")
    if declared is not None and Q_DTYPES.get(str(declared)) != query:
        raise BadCapture(f"{origin}: the kernel spec says q_dtype={declared}, q is {query}")
    if call.q_scale != 1.0 and query == Q_DTYPES["bf16"]:
        raise BadCapture(f"{origin}: q_scale {call.q_scale} with a bf16 query, which takes none but 1.0")
    if not capture.dense and (call.window is not None or call.sparse is not None):
        raise BadCapture(f"{origin}: a {'window' if call.window is not None else 'sparse policy'} is declared, selected slots have none")
    windowed = call.facts.get("window")
    if windowed is not None and windowed is not (call.window is not None):
        raise BadCapture(f"{origin}: the kernel spec says window={str(windowed).lower()}, the capture has window {call.window}")


def _first(tensor: torch.Tensor, wrong: object) -> str | None:
    assert callable(wrong)
    return next((f"{value} at index {position}" for position, value in enumerate(tensor.tolist()) if wrong(value)), None)


def _check_lengths(capture: Capture, origin: str) -> None:
    starts, lengths = capture.tensors["cu_seqlens_q"], capture.tensors["cache_seqlens"]
    batch = len(lengths)
    if len(starts) != batch + 1 or capture.tensors["page_table"].shape[0] != batch:
        raise BadCapture(
            f"{origin}: {batch} requests, {len(starts)} boundaries (expected {batch + 1}), {capture.tensors['page_table'].shape[0]} table rows"
        )
    ends = starts.tolist()
    if ends[0] != 0 or ends[-1] != capture.rows or any(later < earlier for earlier, later in itertools.pairwise(ends)):
        raise BadCapture(f"{origin}: request boundaries {ends[:8]} do not rise from 0 to the {capture.rows} rows of q")
    negative = _first(lengths, lambda value: value < 0)
    if negative:
        raise BadCapture(f"{origin}: cache length {negative} is negative")
    own = capture.tensors.get("query_cache_seqlens")
    if own is not None:
        if len(own) != capture.rows:
            raise BadCapture(f"{origin}: {len(own)} per-query lengths for {capture.rows} rows")
        negative = _first(own, lambda value: value < 0)
        if negative:
            raise BadCapture(f"{origin}: per-query length {negative} is negative")
    _check_selection(capture, origin)
    per_query = capture.call.facts.get("lengths")
    if per_query is not None and (per_query == "per_query") != (own is not None):
        raise BadCapture(f"{origin}: the kernel spec says lengths={per_query}, the capture has {'' if own is not None else 'no '}per-query lengths")


def _check_selection(capture: Capture, origin: str) -> None:
    selection, sparse = capture.call.facts.get("selection"), capture.call.sparse
    if selection is not None and (selection == "sparse") != (sparse is not None):
        raise BadCapture(f"{origin}: the kernel spec says selection={selection}, the capture has {'a' if sparse is not None else 'no'} sparse policy")
    if sparse is None:
        return
    try:
        sparse.policy()
    except PlanError as error:
        raise BadCapture(f"{origin}: its sparse policy selects nothing sensible: {error.message}") from None
    if sparse.rows < 1:
        raise BadCapture(f"{origin}: sparse policy of {sparse.rows} rows a request, expected at least 1")


def _check_table(capture: Capture, origin: str) -> None:
    table, pages, size = capture.tensors["page_table"], capture.tensors["kv_cache"].shape[0], capture.call.page_size
    visible, ends = visible_lengths(capture), capture.boundaries
    for request, length in enumerate(capture.tensors["cache_seqlens"].tolist()):
        if length > table.shape[1] * size:
            raise BadCapture(f"{origin}: request {request} holds {length} tokens, its table row reaches {table.shape[1]} pages of {size}")
        rows = visible[ends[request] : ends[request + 1]]
        seen = [(first_visible(count, capture.call.window), count) for count in rows if count]
        if not seen:
            continue
        first, last = min(start for start, _ in seen) // size, -(-max(count for _, count in seen) // size)
        entries = table[request, first:last]
        wrong = ((entries < 0) | (entries >= pages)).nonzero()
        if len(wrong):
            column = int(wrong[0]) + first
            raise BadCapture(
                f"{origin}: page table entry {int(table[request, column])} at [{request}, {column}] is in the visible range; {pages} pages are stored"
            )


def _check_slots(capture: Capture, origin: str) -> None:
    indices, lengths = capture.tensors["indices"], capture.tensors["lengths"]
    if indices.shape[0] != capture.rows or len(lengths) != capture.rows:
        raise BadCapture(f"{origin}: {capture.rows} rows of q, {indices.shape[0]} rows of indices, {len(lengths)} lengths")
    wrong = _first(lengths, lambda value: not 0 <= value <= indices.shape[1])
    if wrong:
        raise BadCapture(f"{origin}: length {wrong} is outside 0 to {indices.shape[1]}, the columns of indices")
    slots = capture.tensors["kv_cache"].shape[0] * capture.call.page_size
    bad = ((indices < -1) | (indices >= slots)).nonzero()
    if len(bad):
        row, column = bad[0].tolist()
        raise BadCapture(f"{origin}: slot {int(indices[row, column])} at [{row}, {column}], {slots} slots are stored")


def _check_result(capture: Capture, origin: str) -> None:
    shapes = (("output", capture.output, (capture.rows, capture.heads, capture.values)), ("lse", capture.lse, (capture.rows, capture.heads)))
    for name, tensor, expected in shapes:
        if tensor is not None and tuple(tensor.shape) != expected:
            raise BadCapture(f"{origin}: {name} is {list(tensor.shape)}, the call gives {list(expected)}")
        if tensor is not None and not tensor.is_floating_point():
            raise BadCapture(f"{origin}: {name} is {str(tensor.dtype).removeprefix('torch.')}, expected floating point")
