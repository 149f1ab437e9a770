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
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlactl.errors import CannotRun, MlactlError
from mlactl.kernels import registry
from mlactl.printable import plain, safe
from mlactl.regular_files import read_bytes, require_writable_folder, unreadable
from mlactl.replay import capture as captures
from mlactl.replay import checks, tensors
from mlactl.replay.capture import Capture
from mlactl.replay.errors import BadCapture
from mlactl.replay.header import CallHeader
from mlactl.replay.records import record_layout

if TYPE_CHECKING:
    import torch

INT32_MAX = (1 << 31) - 1
WRAPPER = "BatchMLAPagedAttentionWrapper"
TRTLLM = "trtllm_batch_decode_with_kv_cache_mla"
DUMP_AGAIN = "FLASHINFER_LOGLEVEL=10 FLASHINFER_DUMP_SAFETENSORS=1 dumps the call again"
CALLS_HINT = "mlactl replay --help names the calls that --import-flashinfer takes"
METADATA_LIMIT_BYTES = 16 << 20
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
            raise BadCapture(f"{self.path}: the dump of {self.function} holds no {name}", hint=DUMP_AGAIN)
        return value


@dataclass(frozen=True, slots=True)
class Refusal:
    """A dump that became no capture, why, and what would make it one."""

    name: str
    path: Path
    why: str
    hint: str | None


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of the dumps: captures in the target, `unchanged` of which an earlier run wrote, and the calls that were refused;
    `ignored` were no MLA decode calls."""

    written: tuple[Path, ...]
    refused: tuple[Refusal, ...]
    ignored: int
    unchanged: int = 0


def import_dumps(source: Path, target: Path, *, on_dump: Callable[[str], object] | None = None) -> Imported:
    """Turns every MLA decode call under `source` into a capture in `target`; one that is there already, byte for byte, counts.

    A dump that cannot be used is refused by name and ends nothing but itself. Raises CannotRun where there are no dumps at
    all, or the target cannot be written. `on_dump` hears of every dump.
    """
    folders = dump_folders(source)
    require_writable_folder(target)
    plans: dict[tuple[object, object], Dump] = {}
    written, refused, ignored, unchanged = [], [], 0, 0
    for folder in folders:
        if on_dump is not None:
            on_dump(safe(folder.name))
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
            there = captures.inputs_path(target / made.name).exists()
            written.append(captures.save(made, target, again=True))
            unchanged += there
        except MlactlError as error:
            refused.append(Refusal(safe(folder.name), folder, safe(error.message), error.hint or CALLS_HINT))
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            # A dump is another program's: whatever of it does not fit, the dumps after it are still read.
            reason = " ".join(str(error).split())
            refused.append(
                Refusal(safe(folder.name), folder, safe(f"{folder}: its arguments do not fit the call: {type(error).__name__}: {reason}"), DUMP_AGAIN)
            )
    return Imported(tuple(written), tuple(refused), ignored, unchanged)


def dump_folders(source: Path) -> list[Path]:
    """The folder of every dump under `source`, in order; raises CannotRun where there is none."""
    if not os.path.lexists(source):
        raise CannotRun(f"{plain(source)} does not exist, expected a folder of FlashInfer dumps", hint=DUMP_AGAIN)

    def closed(error: OSError) -> None:
        raise unreadable(Path(error.filename), error)

    found = sorted(Path(place) for place, _, files in os.walk(source, onerror=closed) if "metadata.jsonl" in files)
    if not found:
        raise CannotRun(f"{plain(source)} holds no FlashInfer dumps (no metadata.jsonl)", hint=DUMP_AGAIN)
    return found


def read_dump(folder: Path) -> Dump:
    """Reads one dumped call; raises BadCapture for a torch-format dump or a damaged one. Nothing is unpickled."""
    record = _last_record(folder)
    if (folder / "inputs.pt").exists():
        raise BadCapture(f"{folder}: tensors are in torch format", hint="dump with FLASHINFER_DUMP_SAFETENSORS=1")
    if not (folder / "inputs.safetensors").exists():
        raise BadCapture(f"{folder}: inputs.safetensors is missing", hint=DUMP_AGAIN)
    plain_values, versions = record.get("input_metadata", {}), record.get("versions", {})
    for name, held in (("input_metadata", plain_values), ("versions", versions)):
        if not isinstance(held, dict):
            raise BadCapture(f"{folder}: {name} of metadata.jsonl is a {type(held).__name__}, expected an object", hint=DUMP_AGAIN)
    values: dict[str, Any] = {**plain_values, **tensors.load(folder / "inputs.safetensors")}
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
    made = {f"captured-{name}": str(value).split()[0] for name, value in versions.items() if str(value or "").strip()}
    return Dump(folder, str(record.get("function_name")), _identity(record, "process_id"), _identity(record, "self_id"), arguments, results, made)


def _identity(record: Mapping[str, Any], name: str) -> object:
    """A process or object id, such as can be looked up by: one that is a list or an object is told apart by its text."""
    value = record.get(name)
    return value if isinstance(value, (int, str, type(None))) else repr(value)


def _last_record(folder: Path) -> dict[str, Any]:
    try:
        data = read_bytes(folder / "metadata.jsonl", METADATA_LIMIT_BYTES, "metadata")
        lines = [line for line in data.decode().splitlines() if line.strip()]
        record = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError) as error:
        raise BadCapture(f"{folder}: metadata.jsonl cannot be read: {error}", hint=DUMP_AGAIN) from error
    if not isinstance(record, dict):
        raise BadCapture(f"{folder}: metadata.jsonl {'is empty' if record is None else 'ends in no object'}", hint=DUMP_AGAIN)
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
    starts, lengths = _integers(plan, "qo_indptr"), _integers(plan, "kv_len_arr")
    first, pages = _integers(plan, "kv_indptr").tolist(), _integers(plan, "kv_indices")
    _require_pages(plan, first, len(pages), len(lengths))
    table = torch.full((len(lengths), max([1, *(end - start for start, end in itertools.pairwise(first))])), -1, dtype=torch.int32)
    for request, (start, end) in enumerate(itertools.pairwise(first)):
        table[request, : end - start] = pages[start:end].to(torch.int32)
    scales = [run.arguments.get(name) for name in ("ckv_scale", "kpe_scale")]
    record = _record(run, cache)
    if record == "fp8" and (not isinstance(scales[0], (int, float)) or scales[0] != scales[1]):
        raise BadCapture(f"{run.path}: an FP8 cache with ckv_scale {scales[0]} and kpe_scale {scales[1]}; one scale for both is needed")
    query = _joined(run, "q_nope", "q_pe")
    own = None
    if not plan.need("causal"):
        # Without the causal mask every row sees all of its request.
        own = lengths.repeat_interleave(starts.diff())
    base = "natural" if run.arguments.get("return_lse_base_on_e") is True else "2"
    return _capture(run, query, cache, table, lengths, starts, own, record, _number(plan, "sm_scale", None), base, scales[0])


def _integers(dump: Dump, name: str) -> torch.Tensor:
    """A vector argument of whole numbers, as int32; raises BadCapture for anything else, and for numbers that int32 does not hold."""
    import torch

    value = dump.need(name)
    if not isinstance(value, torch.Tensor) or value.ndim != 1 or value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        found = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise BadCapture(f"{dump.path}: {name} is {found}, expected a vector of whole numbers", hint=DUMP_AGAIN)
    if value.numel() and (int(value.min()) < 0 or int(value.max()) > INT32_MAX):
        raise BadCapture(f"{dump.path}: {name} holds {int(value.min())} to {int(value.max())}, expected 0 to {INT32_MAX}", hint=DUMP_AGAIN)
    return value.to(torch.int32)


def _require_pages(plan: Dump, first: Sequence[int], pages: int, requests: int) -> None:
    """Raises BadCapture unless kv_indptr cuts kv_indices into the pages of each request."""
    if not requests:
        raise BadCapture(f"{plan.path}: kv_len_arr is empty, so the call has no request", hint=DUMP_AGAIN)
    if len(first) != requests + 1:
        raise BadCapture(f"{plan.path}: kv_indptr has {len(first)} entries for {requests} requests, expected {requests + 1}", hint=DUMP_AGAIN)
    falls = next((index for index, (start, end) in enumerate(itertools.pairwise(first), 1) if end < start), None)
    if falls is not None:
        raise BadCapture(f"{plan.path}: kv_indptr falls from {first[falls - 1]} to {first[falls]} at index {falls}", hint=DUMP_AGAIN)
    if first[-1] > pages:
        raise BadCapture(f"{plan.path}: kv_indptr ends at {first[-1]}, kv_indices holds {pages} pages", hint=DUMP_AGAIN)


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
    if not scales[1] > 0:
        raise BadCapture(f"{call.path}: bmm2_scale is {scales[1]}, expected a number above 0")
    base = "natural" if call.arguments.get("return_lse_base_on_e") is True else "2"
    table = call.need("block_tables").to(torch.int32)
    # bmm1_scale has the cache's scale in it, bmm2_scale is that scale.
    return _capture(call, query.flatten(0, 1), cache, table, lengths, starts, None, record, scales[0] / scales[1], base, scales[1])


def _number(call: Dump, name: str, default: float | None = 1.0) -> float:
    value = call.need(name) if default is None else call.arguments.get(name, default)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if hasattr(value, "numel") and value.numel() == 1:
        return float(value)
    raise BadCapture(f"{call.path}: {name} is {type(value).__name__}, expected one number", hint=DUMP_AGAIN)


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
    outside = wrong[(wrong < 0) | (wrong >= len(cache))]
    if len(outside):
        raise BadCapture(f"{dump.path}: page {int(outside[0])} of {len(cache)} in the visible range")
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
