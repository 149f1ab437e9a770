"""FlashInfer's API dumps (FLASHINFER_LOGLEVEL=10, FLASHINFER_DUMP_SAFETENSORS=1) of MLA decode calls.

A dump folder has one folder a call: `metadata.jsonl`, whose last line is the most complete (function name, process and
object ids, the signature, arguments that are no tensors), `inputs.safetensors` and, once the call came back,
`outputs.safetensors`. Tensors are named `arg_<position>`, with a method's object as argument 0, or `kwarg_<name>`; results
`result` or `result_<position>`. Facts from docs.flashinfer.ai/logging.html and flashinfer/api_logging.py.

What becomes a capture: `BatchMLAPagedAttentionWrapper.run` together with the last `plan` of the same object, and
`trtllm_batch_decode_with_kv_cache_mla`. Anything that does not hold enough is refused, naming what is missing.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlactl.errors import CannotRun
from mlactl.kernels import registry
from mlactl.replay import capture as captures
from mlactl.replay import checks, tensors
from mlactl.replay.capture import Capture
from mlactl.replay.errors import BadCapture
from mlactl.replay.header import CallHeader
from mlactl.replay.records import record_layout

if TYPE_CHECKING:
    import torch

WRAPPER = "BatchMLAPagedAttentionWrapper"
TRTLLM = "trtllm_batch_decode_with_kv_cache_mla"
RECORD_OF = {"bfloat16": "bf16", "float8_e4m3fn": "fp8"}


@dataclass(frozen=True, slots=True)
class Dump:
    """One dumped call: every argument by its parameter's name, and its results in order."""

    path: Path
    function: str
    process: object
    object_id: object
    arguments: Mapping[str, Any]
    results: tuple[Any, ...]
    versions: Mapping[str, str]

    def need(self, name: str) -> Any:
        """An argument the capture cannot do without."""
        value = self.arguments.get(name)
        if value is None:
            raise BadCapture(f"{self.path}: the dump of {self.function} holds no {name}", hint="dump the call with FLASHINFER_LOGLEVEL=10")
        return value


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of the dumps: captures written, and (dump, why) of those refused; `ignored` were no MLA decode calls."""

    written: tuple[Path, ...]
    refused: tuple[tuple[str, str], ...]
    ignored: int


def import_dumps(source: Path, target: Path) -> Imported:
    """Turns every MLA decode call under `source` into a capture in `target`; raises CannotRun where there are no dumps at all."""
    folders = sorted(path.parent for path in source.rglob("metadata.jsonl"))
    if not folders:
        raise CannotRun(f"{source} holds no FlashInfer dumps (no metadata.jsonl)", hint="FLASHINFER_LOGLEVEL=10 FLASHINFER_DUMP_SAFETENSORS=1")
    plans: dict[tuple[object, object], Dump] = {}
    written, refused, ignored = [], [], 0
    for folder in folders:
        try:
            function = str(_last_record(folder).get("function_name"))
            if function not in (TRTLLM, f"{WRAPPER}.run", f"{WRAPPER}.plan"):
                ignored += 1
                continue
            dump = read_dump(folder)
            key = (dump.process, dump.object_id)
            if function.endswith(".plan"):
                plans[key] = dump
                continue
            made = from_trtllm(dump) if function == TRTLLM else from_wrapper(dump, plans.get(key))
            checks.check(made, str(folder))
            written.append(captures.save(made, target))
        except BadCapture as error:
            refused.append((folder.name, error.message))
    return Imported(tuple(written), tuple(refused), ignored)


def read_dump(folder: Path) -> Dump:
    """Reads one dumped call; raises BadCapture for a torch-format dump or a damaged one. Nothing is unpickled."""
    record = _last_record(folder)
    if (folder / "inputs.pt").exists():
        raise BadCapture(f"{folder}: tensors are in torch format", hint="dump with FLASHINFER_DUMP_SAFETENSORS=1")
    if not (folder / "inputs.safetensors").exists():
        raise BadCapture(f"{folder}: inputs.safetensors is missing")
    values: dict[str, Any] = {**record.get("input_metadata", {}), **tensors.load(folder / "inputs.safetensors")}
    names = parameter_names(str(record.get("function_signature", "")))
    arguments = {}
    for key, value in values.items():
        kind, _, rest = key.partition("_")
        if kind == "arg" and rest.isdigit():
            if int(rest) >= len(names):
                raise BadCapture(f"{folder}: argument {rest} has no name in the signature {record.get('function_signature')!r}")
            arguments[names[int(rest)]] = value
        elif kind == "kwarg":
            arguments[rest] = value
    results: tuple[Any, ...] = ()
    if (folder / "outputs.safetensors").exists():
        found = tensors.load(folder / "outputs.safetensors")
        results = (found["result"],) if "result" in found else tuple(found[name] for name in sorted(found))
    versions = {f"captured-{name}": str(value).split()[0] for name, value in record.get("versions", {}).items() if value}
    return Dump(folder, str(record.get("function_name")), record.get("process_id"), record.get("self_id"), arguments, results, versions)


def _last_record(folder: Path) -> dict[str, Any]:
    try:
        lines = [line for line in (folder / "metadata.jsonl").read_text(encoding="utf-8").splitlines() if line.strip()]
        record = json.loads(lines[-1]) if lines else None
    except (OSError, ValueError) as error:
        raise BadCapture(f"{folder}: metadata.jsonl cannot be read: {error}") from error
    if not isinstance(record, dict):
        raise BadCapture(f"{folder}: metadata.jsonl is empty")
    return record


def parameter_names(signature: str) -> list[str]:
    """Parameter names of `(self, q: torch.Tensor, lse: Optional[Tensor] = None, *, scale: float = 1.0) -> …`, in order."""
    depth, current, parts = 0, "", []
    for character in signature:
        if character in "([{":
            depth += 1
            if depth == 1:
                continue
        elif character in ")]}":
            depth -= 1
            if depth == 0:
                break
        if character == "," and depth == 1:
            parts.append(current)
            current = ""
        else:
            current += character
    names = [part.split(":")[0].split("=")[0].strip() for part in [*parts, current]]
    return [name for name in names if name and name not in ("*", "/")]


# ---- the two calls


def from_wrapper(run: Dump, plan: Dump | None) -> Capture:
    """A capture from a wrapper's `run` and the plan it ran under; raises BadCapture naming what is missing."""
    import torch

    if plan is None:
        raise BadCapture(f"{run.path}: the plan of this wrapper was not dumped, so its lengths and pages are unknown", hint=f"include {WRAPPER}.plan")
    cache = _joined(run, "ckv_cache", "kpe_cache")
    starts, lengths = plan.need("qo_indptr").to(torch.int32), plan.need("kv_len_arr").to(torch.int32)
    first, pages = plan.need("kv_indptr").tolist(), plan.need("kv_indices")
    table = torch.full((len(lengths), max([1, *(end - start for start, end in itertools.pairwise(first))])), -1, dtype=torch.int32)
    for request, (start, end) in enumerate(itertools.pairwise(first)):
        table[request, : end - start] = pages[start:end].to(torch.int32)
    scales = [run.arguments.get(name) for name in ("ckv_scale", "kpe_scale")]
    record = _record(run, cache)
    if record == "fp8" and (scales[0] is None or scales[0] != scales[1]):
        raise BadCapture(f"{run.path}: an FP8 cache with ckv_scale {scales[0]} and kpe_scale {scales[1]}; one scale for both is needed")
    query = _joined(run, "q_nope", "q_pe")
    own = None
    if not plan.need("causal"):
        # Without the causal mask every row sees all of its request.
        own = lengths.repeat_interleave(starts.diff())
    base = "natural" if run.arguments.get("return_lse_base_on_e") is True else "2"
    return _capture(run, query, cache, table, lengths, starts, own, record, float(plan.need("sm_scale")), base, scales[0])


def from_trtllm(call: Dump) -> Capture:
    """A capture from `trtllm_batch_decode_with_kv_cache_mla`; raises BadCapture for sparse calls and scales that are not plain numbers."""
    import torch

    if call.arguments.get("sparse_mla_top_k"):
        raise BadCapture(f"{call.path}: sparse_mla_top_k {call.arguments['sparse_mla_top_k']}; only dense calls are imported")
    for name in ("sinks", "cum_seq_lens_q", "skip_softmax_threshold_scale_factor"):
        if call.arguments.get(name) is not None:
            raise BadCapture(f"{call.path}: {name} was given, captures do not hold it")
    scales = [_number(call, name) for name in ("bmm1_scale", "bmm2_scale")]
    query, cache = call.need("query"), call.need("kv_cache")
    if query.ndim != 4:
        raise BadCapture(f"{call.path}: query is {list(query.shape)}, expected [batch, rows, heads, elements]")
    cache = cache.squeeze(1) if cache.ndim == 4 else cache
    lengths = call.need("seq_lens").to(torch.int32)
    batch, rows = query.shape[:2]
    starts = torch.arange(batch + 1, dtype=torch.int32) * rows
    record = _record(call, cache)
    if record == "bf16" and scales[1] != 1.0:
        raise BadCapture(f"{call.path}: bmm2_scale {scales[1]} over a bf16 cache, which has no scale")
    base = "natural" if call.arguments.get("return_lse_base_on_e") is True else "2"
    table = call.need("block_tables").to(torch.int32)
    # bmm1_scale has the cache's scale in it, bmm2_scale is that scale.
    return _capture(call, query.flatten(0, 1), cache, table, lengths, starts, None, record, scales[0] / scales[1], base, scales[1])


def _number(call: Dump, name: str) -> float:
    value = call.arguments.get(name, 1.0)
    if isinstance(value, (int, float)):
        return float(value)
    if hasattr(value, "numel") and value.numel() == 1:
        return float(value)
    raise BadCapture(f"{call.path}: {name} is {type(value).__name__}, expected one number")


def _joined(run: Dump, latent: str, rope: str) -> torch.Tensor:
    import torch

    parts = [run.need(latent), run.need(rope)]
    parts = [part.squeeze(2) if part.ndim == 4 else part for part in parts]
    if parts[0].dtype != parts[1].dtype:
        raise BadCapture(f"{run.path}: {latent} is {parts[0].dtype}, {rope} is {parts[1].dtype}")
    raw = torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)
    return raw.view(parts[0].dtype)


def _record(dump: Dump, cache: torch.Tensor) -> str:
    name = RECORD_OF.get(str(cache.dtype).removeprefix("torch."))
    if name is None:
        raise BadCapture(f"{dump.path}: a cache of {cache.dtype}; records are {', '.join(RECORD_OF)}")
    return name


def _capture(
    dump: Dump,
    query: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    own: torch.Tensor | None,
    record: str,
    sm_scale: float,
    base: str,
    kv_scale: Any,
) -> Capture:
    import torch

    from mlactl.replay.trim import pages_of

    rows = starts.diff().tolist()
    mode = "decode" if set(rows) <= {1} else "verify" if len(set(rows)) == 1 else "extend"
    size = int(cache.shape[1])
    reach = -(-lengths.long() // size)
    if bool((reach > table.shape[1]).any()):
        raise BadCapture(f"{dump.path}: lengths {lengths.tolist()} pass the {table.shape[1]} pages of the table")
    touched = torch.arange(table.shape[1])[None, :] < reach[:, None]
    wrong = table[touched]
    if len(wrong) and not (int(wrong.min()) >= 0 and int(wrong.max()) < len(cache)):
        raise BadCapture(f"{dump.path}: page {int(wrong.max())} of {len(cache)} in the visible range")
    stored = {"q": query.contiguous(), "cache_seqlens": lengths, "cu_seqlens_q": starts, **pages_of(cache, table, touched, int(cache.shape[2]))}
    if own is not None:
        stored["query_cache_seqlens"] = own.to(torch.int32)
    header = CallHeader(
        kernel_id=registry.DENSE_FORWARD.kernel_id,
        kernel_version=registry.DENSE_FORWARD.version,
        # Only what the dump tells: another kernel made the output, and its tiles are not ours.
        facts={"record": record, "width": int(query.shape[2])},
        mode=mode,
        record=record,
        scale_mode=record_layout(record).scale_mode,
        page_size=size,
        sm_scale=sm_scale,
        lse_base=base,
        kv_scale=float(kv_scale) if kv_scale is not None else 1.0,
    )
    output, lse = _results(dump, query)
    return Capture(f"flashinfer-{dump.path.name}", header, stored, {}, output, lse, None, dump.versions)


def _results(dump: Dump, query: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    rows, heads = int(query.shape[0]), int(query.shape[1])
    found: Sequence[Any] = dump.results
    output = found[0].reshape(rows, heads, -1) if found else None
    lse = found[1].reshape(rows, heads) if len(found) > 1 and found[1].numel() == rows * heads else None
    return output, lse
