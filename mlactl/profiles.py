"""Deployment profiles: what is served, sharded how, and the compile specs that cover it.

A profile is found by name in the user's folder, then the machine's, then among the shipped ones, or by path. It keeps
capacities for people and planners; what forks code leaves it as envelopes. Imports neither torch nor the compiler.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mlactl.errors import CannotRun, MlactlError, UsageError
from mlactl.kernels.envelope import DenseEnvelope, Envelope, SparseEnvelope, enumerate_specs
from mlactl.kernels.registry import DENSE_FORWARD, SPARSE_DECODE, Kernel, not_built
from mlactl.kernels.spec import CompileSpec, FactValue
from mlactl.profile_file import Finding, Values, read_file
from mlactl.regular_files import sha256_of

SHIPPED = Path(__file__).resolve().parent / "_profiles"
MACHINE = Path("/etc/mlactl/profiles")


def _allowed(kernel: Kernel, name: str) -> tuple[FactValue, ...]:
    return next(fact.allowed for fact in kernel.facts if fact.name == name)


DENSE_RECORDS = _allowed(DENSE_FORWARD, "record")
SPARSE_RECORDS = _allowed(SPARSE_DECODE, "record")
STATIC_NVFP4 = ("nvfp4_ds_mla_432", "nvfp4_ds_mla_368")
"""Records whose latents are divided by an outer scale on write: the only ones with a dynamic kernel variant."""

_DENSE_MODES = ("decode", "verify", "extend")
_SPARSE_MODES = ("decode", "verify", "prefill")
_SPARSE_DIMS = (512, 64)  # the record layouts fix latent and RoPE dims
_KV_DTYPES = {"bf16": "bf16", "fp8": "e4m3"}  # every other record is bytes with a layout of its own


class BadProfile(MlactlError):
    """A profile file that cannot be used; `findings` has everything wrong with it, the message the first."""

    def __init__(self, path: Path, findings: tuple[Finding, ...]) -> None:
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        super().__init__(f"{path}: {findings[0].text()}{more}", hint=f"mlactl profile check {path}")
        self.path, self.findings = path, findings


class UnknownProfile(UsageError):
    """No profile of that name."""


@dataclass(frozen=True, slots=True)
class Model:
    """What attention sees of the model. `heads` is before sharding; draft layers come on top of `layers`."""

    heads: int
    latent_dim: int
    rope_dim: int
    layers: int | None
    draft_layers: int


@dataclass(frozen=True, slots=True)
class Parallel:
    """Tensor-parallel and decode-context-parallel ranks; `interleave` tokens in a row stay on one DCP rank."""

    tp: int
    dcp: int
    interleave: int


@dataclass(frozen=True, slots=True)
class KvCache:
    """How one token is stored, `page_size` in tokens, and the element types of pages and queries."""

    record: str
    page_size: int
    kv_dtype: str
    q_dtype: str


@dataclass(frozen=True, slots=True)
class SparsePolicy:
    """The opt-in chunk selection of dense MLA; chunks are 64 tokens."""

    stride: int
    sink_chunks: int
    recent_chunks: int
    min_tokens: int
    refresh_interval: int


@dataclass(frozen=True, slots=True)
class Serving:
    """What is launched. `draft_rows` are speculative rows a request (K), a verify launch has K+1; sizes fork no code."""

    modes: tuple[str, ...]
    draft_rows: tuple[int, ...]
    max_sequences: int | None
    max_context: int | None
    top_k: int | None
    graph_captures: tuple[int, ...]
    sparse_policy: SparsePolicy | None


@dataclass(frozen=True, slots=True)
class ScaleFile:
    """The outer-scale file of the deployment; `file` is absolute (a relative one is next to the profile)."""

    file: Path
    sha256: str | None


@dataclass(frozen=True, slots=True)
class Profile:
    """One deployment. Built by `load`, which has checked that everything in it fits together."""

    name: str
    model: Model
    parallel: Parallel
    kv: KvCache
    serving: Serving
    scales: ScaleFile | None
    path: Path

    @property
    def local_heads(self) -> int:
        """Query heads of one tensor-parallel rank."""
        return self.model.heads // self.parallel.tp

    @property
    def kernel_heads(self) -> int:
        """Query heads a kernel sees: queries are gathered across the DCP group, which shards tokens and not heads."""
        return self.local_heads * self.parallel.dcp

    @property
    def local_shard_tokens(self) -> int | None:
        """Most tokens of one request that a rank holds; None when the profile gives no `serving.max_context`."""
        if self.serving.max_context is None:
            return None
        interleave = self.parallel.interleave
        return -(-self.serving.max_context // (self.parallel.dcp * interleave)) * interleave

    @property
    def sparse(self) -> bool:
        """True when attention reads selected slots (sparse MLA) and not whole pages."""
        return self.kv.record in SPARSE_RECORDS

    def identities(self) -> tuple[int, ...]:
        """Latent-scale variants needed when no scale file says better: both wherever a launch could carry either.

        Draft layers always run with 1.0 and decoder layers with their outer scale; a record without an outer scale has
        the identity variant only.
        """
        return (0, 1) if self.kv.record in STATIC_NVFP4 else (1,)

    def envelopes(self, identities: tuple[int, ...] | None = None) -> tuple[Envelope, ...]:
        """What the deployment can launch; `identities` narrows the latent-scale variants to what its scale file needs."""
        modes, verify_rows = self.serving.modes, tuple(rows + 1 for rows in self.serving.draft_rows)
        if self.sparse:
            wanted = self.identities() if identities is None else identities
            return (SparseEnvelope(modes=modes, heads=self.kernel_heads, record=self.kv.record, q_dtype=self.kv.q_dtype, identities=wanted),)
        policy = self.serving.sparse_policy
        return (
            DenseEnvelope(
                modes=modes,
                heads=self.kernel_heads,
                verify_rows=verify_rows,
                record=self.kv.record,
                q_dtype=self.kv.q_dtype,
                width=self.model.latent_dim + self.model.rope_dim,
                # On a shard of the tokens a verify row's visible length does not follow from its place in the request.
                per_query=self.parallel.dcp > 1,
                window=False,
                sparse=policy is not None and policy.stride > 1,
            ),
        )

    def specs(self, identities: tuple[int, ...] | None = None) -> tuple[CompileSpec, ...]:
        """Every compile spec the deployment can launch, without repeats, in a fixed order."""
        found = [spec for envelope in self.envelopes(identities) for spec in enumerate_specs(envelope)]
        return tuple(dict.fromkeys(found))

    def unbuilt(self, identities: tuple[int, ...] | None = None) -> tuple[tuple[CompileSpec, str], ...]:
        """The specs this release declares and cannot compile yet, each with the reason."""
        return tuple((spec, reason) for spec in self.specs(identities) if (reason := not_built(spec)) is not None)

    def as_json(self) -> dict[str, Any]:
        """The profile with its computed numbers, JSON-able."""
        document = asdict(self)
        document["path"] = str(self.path)
        if self.scales is not None:
            document["scales"]["file"] = str(self.scales.file)
        computed = {"local_heads": self.local_heads, "kernel_heads": self.kernel_heads, "local_shard_tokens": self.local_shard_tokens}
        return {**document, "computed": computed}


@dataclass(frozen=True, slots=True)
class Found:
    """A profile file in one of the folders: `origin` is user, machine or shipped; `shadows` the origins it hides."""

    name: str
    path: Path
    origin: str
    shadows: tuple[str, ...]


def folders() -> tuple[tuple[str, Path], ...]:
    """(origin, folder) in search order; a user without a home directory has no folder of their own."""
    config = _at_home(os.environ.get("XDG_CONFIG_HOME") or "~/.config")
    own = () if config.parts[:1] == ("~",) else (("user", config / "mlactl" / "profiles"),)
    return (*own, ("machine", MACHINE), ("shipped", SHIPPED))


def _at_home(path: str | Path) -> Path:
    """The path with a leading `~` replaced; as it is where there is no home directory (Path's own method raises)."""
    return Path(os.path.expanduser(path))  # noqa: PTH111


def found() -> tuple[Found, ...]:
    """Every profile that a name leads to, by name; raises CannotRun for a folder that is there and cannot be listed."""
    places: dict[str, list[tuple[str, Path]]] = {}
    for origin, folder in folders():
        for path in _toml_files(folder):
            places.setdefault(path.stem, []).append((origin, path))
    return tuple(Found(name, hits[0][1], hits[0][0], tuple(origin for origin, _ in hits[1:])) for name, hits in sorted(places.items()))


def names() -> tuple[str, ...]:
    """Names of every profile that can be asked for."""
    return tuple(item.name for item in found())


def locate(name_or_path: str) -> Path:
    """The file of a profile name or path; raises UnknownProfile naming the nearest name."""
    if "/" in name_or_path or name_or_path.endswith(".toml"):
        return _at_home(name_or_path).absolute()
    for item in found():
        if item.name == name_or_path:
            return item.path
    known = names()
    near = get_close_matches(name_or_path, known, 1)
    close = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    raise UnknownProfile(f"no profile named {name_or_path!r}, {close}", hint="mlactl profile ls; a path needs a '/' or ends in .toml")


def load(name_or_path: str) -> Profile:
    """The profile of that name or path; raises UnknownProfile, BadProfile or CannotRun."""
    path = locate(name_or_path)
    profile, findings = examine(path)
    if profile is None or findings:
        raise BadProfile(path, findings)
    return profile


def examine(path: Path) -> tuple[Profile | None, tuple[Finding, ...]]:
    """The profile in a file, None when it has the wrong shape, and everything wrong with it; CannotRun if unreadable."""
    values, findings = read_file(path)
    if findings:
        return None, tuple(findings)
    profile = _build(values, path)
    if path.parent in [folder for _, folder in folders()] and profile.name != path.stem:
        findings.append(Finding("name", f"{profile.name!r} is not the file's name {path.stem!r}, by which it is found"))
    return profile, (*findings, *_misfits(profile), *_scale_file_misfits(profile))


def _build(values: Values, path: Path) -> Profile:
    serving = dict(values["serving"])
    policy = serving.pop("sparse_policy")
    scales = values["scales"]
    return Profile(
        name=values["name"],
        model=Model(**values["model"]),
        parallel=Parallel(**values["parallel"]),
        kv=KvCache(**values["kv"]),
        serving=Serving(**serving, sparse_policy=None if policy is None else SparsePolicy(**policy)),
        scales=None if scales is None else ScaleFile((path.parent / _at_home(scales["file"])).absolute(), scales["sha256"]),
        path=path,
    )


def _misfits(profile: Profile) -> Iterator[Finding]:
    """What does not fit together, each naming both numbers or values."""
    model, parallel, kv, serving = profile.model, profile.parallel, profile.kv, profile.serving
    if model.heads % parallel.tp:
        yield Finding("model.heads", f"{model.heads} heads do not divide over parallel.tp = {parallel.tp} ranks")
    if parallel.tp % parallel.dcp:
        yield Finding("parallel.dcp", f"groups of {parallel.dcp} do not divide parallel.tp = {parallel.tp} ranks")
    if kv.page_size != 1 and kv.page_size % 16:
        yield Finding("kv.page_size", f"{kv.page_size} is neither 1 nor a multiple of 16")
    if kv.record not in DENSE_RECORDS + SPARSE_RECORDS:
        yield Finding("kv.record", f"{kv.record!r} is not one of {', '.join(map(str, DENSE_RECORDS + SPARSE_RECORDS))}")
        return
    dtype = _KV_DTYPES.get(kv.record, "uint8")
    if kv.kv_dtype != dtype:
        yield Finding("kv.kv_dtype", f"{kv.kv_dtype!r} pages do not hold {kv.record} records, which are {dtype}")
    q_dtypes = _allowed(SPARSE_DECODE if profile.sparse else DENSE_FORWARD, "q_dtype")
    if kv.q_dtype not in q_dtypes:
        yield Finding("kv.q_dtype", f"{kv.q_dtype!r} is not one of {', '.join(map(str, q_dtypes))}, which kernels over {kv.record} records take")
    modes = _SPARSE_MODES if profile.sparse else _DENSE_MODES
    for mode in serving.modes:
        if mode not in modes:
            yield Finding("serving.modes", f"{mode!r} is not one of {', '.join(modes)}, which kernels over {kv.record} records have")
    if ("verify" in serving.modes) != bool(serving.draft_rows):
        rows = list(serving.draft_rows)
        yield Finding("serving.draft_rows", f"{rows} does not fit serving.modes = {list(serving.modes)}: draft rows and mode verify come together")
    yield from _sparse_misfits(profile) if profile.sparse else _dense_misfits(profile)


def _sparse_misfits(profile: Profile) -> Iterator[Finding]:
    dims = (profile.model.latent_dim, profile.model.rope_dim)
    if dims != _SPARSE_DIMS:
        yield Finding(
            "model.latent_dim", f"dims {dims[0]} + {dims[1]} are not the {_SPARSE_DIMS[0]} + {_SPARSE_DIMS[1]} of {profile.kv.record} records"
        )
    if profile.serving.top_k is None:
        yield Finding("serving.top_k", f"is missing, {profile.kv.record} records are read by selected slots")
    if profile.serving.sparse_policy is not None:
        yield Finding("serving.sparse_policy", f"selects chunks of dense pages, {profile.kv.record} records are read by selected slots")


def _dense_misfits(profile: Profile) -> Iterator[Finding]:
    width, widths = profile.model.latent_dim + profile.model.rope_dim, _allowed(DENSE_FORWARD, "width")
    if width not in widths:
        yield Finding(
            "model.latent_dim", f"{profile.model.latent_dim} + {profile.model.rope_dim} = {width} elements is none of {', '.join(map(str, widths))}"
        )
    if profile.kv.q_dtype == "e4m3" and profile.kv.record != "fp8":
        yield Finding("kv.q_dtype", f"'e4m3' queries are taken over fp8 records, kv.record is {profile.kv.record!r}")
    if profile.serving.top_k is not None:
        yield Finding("serving.top_k", f"{profile.serving.top_k} selects slots, {profile.kv.record} records are read page by page")
    if profile.scales is not None:
        yield Finding("scales.file", f"{profile.kv.record} records have no outer scale")


def _scale_file_misfits(profile: Profile) -> Iterator[Finding]:
    if profile.scales is None:
        return
    try:
        digest = sha256_of(profile.scales.file)
    except CannotRun as error:
        yield Finding("scales.file", error.message)
        return
    if profile.scales.sha256 not in (None, digest):
        yield Finding("scales.sha256", f"{profile.scales.sha256} is not the digest of {profile.scales.file}, which is {digest}")


def _toml_files(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".toml")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CannotRun(f"{folder}: {error.strerror}", hint=f"ls -ld {folder}") from error
