"""Every kernel this project compiles: ids, versions, facts, runtime scalars, sources and the history of its bumps.

A kernel cannot be compiled with a fact this file does not declare, nor without one it does: a fact left out of a
compile key is how wrong kernels get replayed in silence. Importing this module imports neither torch nor the compiler.
Versions are this project's own numbering; those of other tools' caches are never judged by it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mlactl.kernels.errors import NotBuiltYet, SpecError
from mlactl.kernels.spec import CompileSpec, FactValue

SOURCE_ROOT = Path(__file__).resolve().parent
"""Folder that `Kernel.sources` are relative to."""

Treatment = Literal["runtime", "static", "identity-split"]


@dataclass(frozen=True, slots=True)
class Fact:
    """One compile fact: its JSON type, what it changes in the code, and every value it may take."""

    name: str
    kind: type
    meaning: str
    allowed: tuple[FactValue, ...]


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number the caller passes at launch and how the code treats it.

    `runtime`: always an argument. `static`: a fact. `identity-split`: two variants, one without the arithmetic for the
    value 1.0 and one that reads the argument; `ordinal` is its position among the device kernel's parameters, which the
    audit of the machine code relies on (None while the kernel is not built); moving it is a bump of the version.
    """

    name: str
    treatment: Treatment
    meaning: str
    ordinal: int | None = None


@dataclass(frozen=True, slots=True)
class Bump:
    """Why a version exists."""

    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Fact values that are each allowed and never together; a spec with all of them is refused."""

    facts: Mapping[str, FactValue]
    reason: str

    def covers(self, facts: Mapping[str, FactValue]) -> bool:
        """Whether a spec of these facts is refused."""
        return self.facts.items() <= facts.items()


@dataclass(frozen=True, slots=True)
class Kernel:
    """A declared kernel. `builder` is "module:function" of the traced code, None while the code is not written.

    `built` narrows facts to the values that today's code handles; a declared value outside it compiles to nothing but
    the words "not built yet".
    """

    kernel_id: str
    version: int
    facts: tuple[Fact, ...]
    scalars: tuple[Scalar, ...]
    history: tuple[Bump, ...]
    sources: tuple[str, ...] = ()
    builder: str | None = None
    built: Mapping[str, tuple[FactValue, ...]] = field(default_factory=dict)
    exclusions: tuple[Exclusion, ...] = ()

    def spec(self, **facts: FactValue) -> CompileSpec:
        """A validated spec of the current version."""
        spec = CompileSpec.of(self.kernel_id, self.version, facts)
        validate(spec)
        return spec

    def built_specs(self) -> list[CompileSpec]:
        """Every spec of the current version that can be compiled; none while the code is not written."""
        if self.builder is None:
            return []
        values = [self.built.get(fact.name, fact.allowed) for fact in self.facts]
        chosen = [dict(zip((fact.name for fact in self.facts), each, strict=True)) for each in itertools.product(*values)]
        return [self.spec(**facts) for facts in chosen if not any(exclusion.covers(facts) for exclusion in self.exclusions)]


INFRASTRUCTURE = ("__init__.py", "mla/__init__.py", "compiler.py", "errors.py", "registry.py", "spec.py")
"""Kernel modules that a compiling process loads but that do not shape the code: they are in no kernel's `sources`. Of what
they decide, the spec and the compile options are in the key by themselves."""

_FORWARD_SOURCES = tuple(
    f"mla/{name}.py"
    for name in (
        *("arguments", "config", "epilogue", "forward", "loaders", "mma", "ptx", "ptx_narrow", "records", "schedule", "softmax"),
        "visibility",
    )
)
_MERGE_SOURCES = tuple(f"mla/{name}.py" for name in ("arguments", "merge", "ptx"))

_OUTPUT = Fact("output", str, "split writes fp32 partials and LSE for the merge; direct writes the bf16 output", ("split", "direct"))
_TILE = Fact(
    "tile",
    str,
    "how packed (query row, head) pairs fill the MMA tile: tok tiles share 16 or 32 rows between two groups that take "
    "alternate chunks, row64 gives each group 32 rows of every chunk",
    ("tok16", "tok32", "row64"),
)

_SPARSE_NUMBERS = ("stride", "sink_chunks", "recent_chunks", "min_tokens", "refresh_interval")

_DENSE_EXCLUSIONS = (
    Exclusion({"q_dtype": "e4m3", "record": "bf16"}, "an E4M3 query is taken over E4M3 records"),
    *(Exclusion({"width": 1088, "tile": tile}, "the output does not fit the registers: width 1088 is tok16's") for tile in ("tok32", "row64")),
    *(Exclusion({"output": "direct", "tile": tile}, "tok tiles have one variant, split, that also writes directly") for tile in ("tok16", "tok32")),
    Exclusion({"output": "direct", "lengths": "per_query"}, "per-query lengths belong to verify, which has one variant, split"),
    Exclusion({"output": "direct", "selection": "sparse"}, "the selection has one variant, split, that also writes directly"),
    Exclusion({"output": "direct", "window": True}, "windows have one variant, split, that also writes directly"),
    Exclusion({"selection": "sparse", "window": True}, "a window already bounds what is read"),
    Exclusion({"lengths": "per_query", "window": True}, "the last keys of a shard are not the last keys of the sequence"),
)

DENSE_FORWARD = Kernel(
    kernel_id="attention.dense_mla.forward",
    version=5,
    facts=(
        _TILE,
        _OUTPUT,
        Fact("q_dtype", str, "query element type", ("bf16", "e4m3")),
        Fact("record", str, "KV record, docs/nvfp4.md has the layouts", ("bf16", "fp8")),
        Fact("width", int, "elements of one KV record: latent plus RoPE", (576, 1088)),
        Fact(
            "lengths", str, "causal: right-aligned from the request's cache length; per_query: each row's own visible length", ("causal", "per_query")
        ),
        Fact("selection", str, "exact: every visible chunk; sparse: the opt-in strided selection", ("exact", "sparse")),
        Fact("window", bool, "only the last `window` visible keys count", (False, True)),
    ),
    scalars=(
        Scalar("sm_scale", "runtime", "softmax scale"),
        Scalar("kv_scale", "runtime", "scalar scale of E4M3 KV"),
        Scalar("q_scale", "runtime", "scalar scale of an E4M3 query"),
        Scalar("window", "runtime", "keys a row sees at most, read where the fact window is true"),
        *(Scalar(name, "runtime", "number of the sparse policy, read where the fact selection is sparse") for name in _SPARSE_NUMBERS),
    ),
    history=(
        Bump(1, "first layout: one request a block, sizes compiled in"),
        Bump(3, "active splits became a runtime argument"),
        Bump(4, "widths 576 and 1088, windows"),
        Bump(5, "per-query cache lengths and the sparse policy became facts"),
    ),
    sources=_FORWARD_SOURCES,
    builder="mlactl.kernels.mla.forward:build",
    exclusions=_DENSE_EXCLUSIONS,
)

DENSE_MERGE = Kernel(
    kernel_id="attention.dense_mla.merge",
    version=5,
    facts=(
        Fact("groups", int, "groups of splits one block reduces side by side", (1, 4, 8)),
        Fact("value_width", int, "elements of one output row", (512, 1024)),
    ),
    scalars=(),
    history=(
        Bump(3, "first layout of fp32 partials"),
        Bump(4, "active splits became a runtime argument"),
        Bump(5, "split bounds follow the live length of each request; empty splits are never read"),
    ),
    sources=_MERGE_SOURCES,
    builder="mlactl.kernels.mla.merge:build",
)

_SPARSE_RECORDS = ("nvfp4_ds_mla_432", "nvfp4_ds_mla_368", "nvfp4_ds_mla_368_per_token", "fp8_ds_mla")
_SPARSE_FACTS = (
    Fact("tile", str, "heads of one query row that share a gathered chunk", ("heads16", "heads32")),
    _OUTPUT,
    Fact("q_dtype", str, "query element type", ("bf16",)),
    Fact("record", str, "KV record, docs/nvfp4.md has the layouts", _SPARSE_RECORDS),
    Fact("latent_scale_identity", int, "1: no restoring multiply in the code; 0: the scale is an argument the code reads", (0, 1)),
)
_SPARSE_SCALARS = (
    Scalar("sm_scale", "runtime", "softmax scale"),
    Scalar("latent_scale", "identity-split", "outer scale of static NVFP4 latents; float32, finite and above 0", ordinal=22),
)
_SPARSE_SOURCES = tuple(
    f"mla/{name}.py"
    for name in (
        "arguments",
        "nvfp4",
        "ptx",
        "ptx_narrow",
        "sparse_config",
        "sparse_epilogue",
        "sparse_forward",
        "sparse_loader",
        "sparse_records",
        "sparse_softmax",
    )
)
_SPARSE_EXCLUSIONS = tuple(
    Exclusion({"record": record, "latent_scale_identity": 0}, "records that carry their own scales have the identity variant only")
    for record in ("nvfp4_ds_mla_368_per_token", "fp8_ds_mla")
)

SPARSE_DECODE = Kernel(
    kernel_id="attention.mla.sm120.decode",
    version=18,
    facts=_SPARSE_FACTS,
    scalars=_SPARSE_SCALARS,
    history=(
        Bump(15, "432-byte NVFP4 records"),
        Bump(17, "368-byte records with FP8 RoPE"),
        Bump(18, "latent_scale_identity became a fact: identity code was replayed for real scales without it"),
    ),
    sources=_SPARSE_SOURCES,
    builder="mlactl.kernels.mla.sparse_forward:build",
    built={"output": ("split",)},
    exclusions=_SPARSE_EXCLUSIONS,
)

SPARSE_PREFILL = Kernel(
    kernel_id="attention.mla.sm120.prefill_mg",
    version=4,
    facts=_SPARSE_FACTS,
    scalars=_SPARSE_SCALARS,
    history=(
        Bump(1, "432-byte NVFP4 records"),
        Bump(3, "368-byte records with FP8 RoPE"),
        Bump(4, "latent_scale_identity became a fact: identity code was replayed for real scales without it"),
    ),
    sources=_SPARSE_SOURCES,
    builder="mlactl.kernels.mla.sparse_forward:build",
    built={"output": ("direct",)},
    exclusions=_SPARSE_EXCLUSIONS,
)

MMA_PEAK = Kernel(
    kernel_id="bench.mma_peak",
    version=1,
    facts=(
        Fact("chains", int, "independent chains of products a warp", (8,)),
        Fact("warps", int, "warps a block", (8,)),
    ),
    scalars=(),
    history=(Bump(1, "bf16 m16n8k16 products on registers, the ceiling that mlactl bench compares with"),),
    sources=("mla/arguments.py", "mla/mma_peak.py", "mla/ptx.py"),
    builder="mlactl.kernels.mla.mma_peak:build",
)
"""No attention: what a card's mma.sync can do. A kernel like the others, so that a node without a compiler can have it too."""

KERNELS: Mapping[str, Kernel] = {kernel.kernel_id: kernel for kernel in (DENSE_FORWARD, DENSE_MERGE, SPARSE_DECODE, SPARSE_PREFILL, MMA_PEAK)}


def kernel(kernel_id: str) -> Kernel:
    """The declared kernel of that id; raises SpecError naming the ids there are."""
    found = KERNELS.get(kernel_id)
    if found is None:
        raise SpecError(f"unknown kernel id {kernel_id!r}; this release declares {', '.join(sorted(KERNELS))}")
    return found


def validate(spec: CompileSpec) -> Kernel:
    """Checks id, version, fact names, types and values against the declaration; raises SpecError naming the first misfit."""
    declared = kernel(spec.kernel_id)
    if spec.version != declared.version:
        raise SpecError(f"{spec.kernel_id}: version {spec.version} asked for, this release builds version {declared.version}")
    names = [name for name, _ in spec.facts]
    expected = sorted(fact.name for fact in declared.facts)
    if names != expected:
        missing, extra = sorted(set(expected) - set(names)), sorted(set(names) - set(expected))
        parts = [f"missing {', '.join(missing)}"] * bool(missing) + [f"undeclared {', '.join(extra)}"] * bool(extra)
        raise SpecError(f"{spec.kernel_id} {spec.version}: facts do not match the declaration: {'; '.join(parts) or 'a fact is repeated'}")
    for fact in declared.facts:
        value = spec.fact(fact.name)
        # type() and not isinstance: True is an int to Python and would hash as another fact than 1.
        if type(value) is not fact.kind or value not in fact.allowed:
            raise SpecError(f"{spec.kernel_id} {spec.version}: {fact.name}={value!r} is not one of {list(fact.allowed)}")
    for exclusion in declared.exclusions:
        if exclusion.covers(dict(spec.facts)):
            pairs = " and ".join(f"{name}={value}" for name, value in exclusion.facts.items())
            raise SpecError(f"{spec.kernel_id} {spec.version}: {pairs}: {exclusion.reason}")
    return declared


def not_built(spec: CompileSpec) -> str | None:
    """Why a declared spec has no code in this release, in a few words; None when it can be compiled."""
    declared = validate(spec)
    if declared.builder is None:
        return "not built yet"
    for name, values in declared.built.items():
        if spec.fact(name) not in values:
            return f"not built yet with {name}={spec.fact(name)}"
    return None


def require_built(spec: CompileSpec) -> Kernel:
    """The declaration of a spec that can be compiled; raises NotBuiltYet otherwise."""
    reason = not_built(spec)
    if reason is not None:
        raise NotBuiltYet(f"{spec.label()}: {reason}", hint="mlactl profile ls shows which profiles are complete")
    return kernel(spec.kernel_id)


def sources_digest(kernel_id: str) -> str:
    """SHA-256 over the names and bytes of the kernel's source files, in the declared order (modification times do not count)."""
    digest = hashlib.sha256()
    for name in kernel(kernel_id).sources:
        data = (SOURCE_ROOT / name).read_bytes()
        digest.update(f"{name}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()
