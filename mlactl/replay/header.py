"""What a capture says about itself: one canonical JSON value under the metadata key `mlactl` of its files.

One key, because safetensors writes several metadata keys in an order that differs from process to process, and two
captures of one call are byte-identical.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mlactl.kernels.mla import policy
from mlactl.kernels.spec import CompileSpec, FactValue, canonical_json
from mlactl.replay.errors import RECORD_AGAIN, BadCapture

SCHEMA_VERSION = 1
METADATA_KEY = "mlactl"
MODES = ("decode", "verify", "extend", "prefill")
LSE_BASES = ("natural", "2")
DENSE_INPUTS = ("q", "kv_cache", "page_ids", "page_table", "cache_seqlens", "cu_seqlens_q")
MAX_WORLD, MAX_INTERLEAVE = 1 << 20, 1 << 30
SELECTED_INPUTS = ("q", "kv_cache", "page_ids", "indices", "lengths")


class TensorFact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor: as the call had it (shape, strides, storage offset, in elements) and as it is stored."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_offset: int
    stored_shape: tuple[int, ...]
    sha256: str


class Parallel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rank the call ran on. `interleave` tokens in a row belong to one DCP rank."""

    tp_rank: int = 0
    tp_world: int = 1
    dcp_rank: int = 0
    dcp_world: int = 1
    interleave: int = 1

    def fault(self) -> str | None:
        """What no rank can be, in a few words; None where all is well."""
        for kind, rank, world in (("TP", self.tp_rank, self.tp_world), ("DCP", self.dcp_rank, self.dcp_world)):
            if not 0 <= rank < world <= MAX_WORLD:
                return f"{kind} rank {rank} of {world}, expected a rank from 0 to one less than its world, of at most {MAX_WORLD:,}"
        if not 1 <= self.interleave <= MAX_INTERLEAVE:
            return f"interleave {self.interleave}, expected 1 to {MAX_INTERLEAVE:,}"
        return None


class SparsePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The opt-in strided chunk selection (docs/kernels.md); `rows` are the rows a request of the plan, which its refresh goes by."""

    stride: int
    sink_chunks: int
    recent_chunks: int
    min_tokens: int
    refresh_interval: int
    rows: int

    def policy(self) -> policy.SparsePolicy:
        """The kernels' own object of it; raises PlanError for numbers that select nothing sensible."""
        return policy.SparsePolicy(self.stride, self.sink_chunks, self.recent_chunks, self.min_tokens, self.refresh_interval)


class CallHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything about a call but its tensors' values. `splits` and `layer` are None where nobody said."""

    kernel_id: str
    kernel_version: int
    facts: dict[str, FactValue]
    mode: str
    record: str
    scale_mode: str
    page_size: int
    sm_scale: float
    lse_base: str
    latent_scale: float = 1.0
    kv_scale: float = 1.0
    q_scale: float = 1.0
    window: int | None = None
    sparse: SparsePolicy | None = None
    splits: int | None = None
    profile: str | None = None
    layer: int | None = None
    parallel: Parallel = Parallel()

    @property
    def spec(self) -> CompileSpec:
        """The compile spec of the kernel that was called."""
        return CompileSpec.of(self.kernel_id, self.kernel_version, self.facts)


class FileHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The metadata of one file. `role` is inputs or outputs; outputs carry the digest of the inputs they came from."""

    schema_version: int
    role: str
    tensors: dict[str, TensorFact]
    versions: dict[str, str]
    call: CallHeader | None = None
    inputs_sha256: str | None = None


def dump(header: FileHeader) -> str:
    """The canonical spelling."""
    return canonical_json(msgspec.to_builtins(header))


def parse(text: str, origin: str) -> FileHeader:
    """Reads a header; raises BadCapture naming the field and what was expected."""
    try:
        raw = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise BadCapture(f"{origin}: its metadata is not JSON: {error}", hint=RECORD_AGAIN) from None
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != SCHEMA_VERSION:
        raise BadCapture(f"{origin}: capture schema {version!r}, this release reads {SCHEMA_VERSION}", hint="read it with the release that wrote it")
    _require_base(raw, origin)
    try:
        header = msgspec.convert(raw, FileHeader)
    except msgspec.ValidationError as error:
        raise BadCapture(f"{origin}: its metadata does not fit: {error}", hint=RECORD_AGAIN) from None
    if header.role not in ("inputs", "outputs"):
        raise BadCapture(f"{origin}: role {header.role!r} is neither inputs nor outputs", hint=RECORD_AGAIN)
    if header.role == "inputs" and header.call is None:
        raise BadCapture(f"{origin}: an inputs file that describes no call", hint=RECORD_AGAIN)
    if header.call is not None and header.call.mode not in MODES:
        raise BadCapture(f"{origin}: mode {header.call.mode!r} is not one of {', '.join(MODES)}", hint=RECORD_AGAIN)
    return header


def _require_base(raw: dict[str, Any], origin: str) -> None:
    """A log-sum-exp without its base cannot be merged or compared: 2 and 8 weigh .200/.800 in natural log, .277/.723 read as base 2."""
    call = raw.get("call")
    if isinstance(call, dict) and call.get("lse_base") not in LSE_BASES:
        found = "does not declare its LSE base" if call.get("lse_base") is None else f"declares LSE base {call['lse_base']!r}"
        raise BadCapture(f"{origin}: {found}; it must say natural or 2", hint="capture it again, or say which base the kernel wrote")
