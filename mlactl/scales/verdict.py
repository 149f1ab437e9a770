"""One file, one verdict: what kind of scales a path holds, everything wrong with them, and a row for every layer.

Imports numpy only for checkpoints and latents, torch never.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlactl.errors import UsageError
from mlactl.scales import compare, outer
from mlactl.scales.files import first_bytes, sha256_of
from mlactl.scales.findings import Finding, Findings, Severity, plain
from mlactl.scales.outer import Examined, identities_of
from mlactl.scales.shards import INDEX_SUFFIX, is_checkpoint

if TYPE_CHECKING:
    from mlactl.profiles import Profile
    from mlactl.scales.latents import LatentRange
    from mlactl.scales.module_rules import ModuleScales

Progress = Callable[[str, int, str], AbstractContextManager[Callable[[int], None]]]


class Verdict(StrEnum):
    """`valid` has no errors, `warnings` has doubts only, `invalid` must not be used."""

    VALID = "valid"
    WARNINGS = "warnings"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class OuterRow:
    """One decoder layer of an outer-scale file. `underflow_share` needs captured latents: group scales under 2^-6."""

    layer: int
    name: str | None
    scale: float | None
    log2: float | None
    max_abs: float | None
    variant: str | None
    underflow_share: float | None


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """One decoder layer of a checkpoint: its NVFP4 modules' multipliers, KV scales, and its E4M3 block scales.

    `underflow_share` is the share of block scales under 2^-6 among those that are not 0.
    """

    layer: int
    modules: int
    smallest: float | None
    largest: float | None
    log2: float | None
    k_scale: float | None
    v_scale: float | None
    block_bytes: int
    underflow_share: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """Everything `verify-scales` says of one path; `findings` stop at a limit, the counts do not.

    `identities` are the latent_scale_identity variants to have warm, None for a checkpoint; `sha256` is None where the
    whole file was not read; `measured` are the layers with captured latents, None where there was no file of them.
    """

    path: Path
    kind: str
    format: str | None
    verdict: Verdict
    sha256: str | None
    errors: int
    warnings: int
    notes: int
    findings: tuple[Finding, ...]
    layers: tuple[OuterRow, ...] | tuple[CheckpointRow, ...]
    identities: tuple[int, ...] | None
    modules: int | None
    block_bytes: int | None
    against: compare.Comparison | None
    measured: int | None = None

    def exit_code(self, *, strict: bool) -> int:
        """0 for a valid file; 1 for an invalid one, and with `strict` for one with warnings."""
        return int(self.verdict is Verdict.INVALID or (strict and self.verdict is Verdict.WARNINGS))

    def as_json(self, *, layers: bool) -> dict[str, Any]:
        """The row of `--output json`."""
        made: dict[str, Any] = {
            "path": plain(self.path), "kind": self.kind, "format": self.format, "verdict": self.verdict.value, "sha256": self.sha256,
            "errors": self.errors, "warnings": self.warnings, "notes": self.notes, "findings": [finding.as_json() for finding in self.findings],
            "num_layers": len(self.layers), "latent_scale_identity": None if self.identities is None else list(self.identities),
            "modules": self.modules, "block_bytes": self.block_bytes,
        }  # fmt: skip
        if self.against is not None:
            other = self.against
            made["against"] = {
                "path": plain(other.other), "compared": other.compared, "differ": other.differ, "same_bytes": other.same_bytes,
            }  # fmt: skip
        if self.measured is not None:
            made["layers_measured"] = self.measured
        if layers:
            made["layers"] = [asdict(row) for row in self.layers]
        return made


@dataclass(frozen=True, slots=True)
class Request:
    """What to hold a file against: a deployment, another file, a pinned digest, captured latents."""

    profile: Profile | None = None
    against: Path | None = None
    sha256: str | None = None
    latents: Path | None = None


def verify(path: Path, request: Request, progress: Progress | None = None) -> Report:
    """The verdict on one path. Raises CannotRun when it, or what it is held against, cannot be read; UsageError."""
    if request.sha256 is not None and not re.fullmatch(r"(?:sha256:)?[0-9a-fA-F]{64}", request.sha256):
        raise UsageError(f"--sha256 {plain(request.sha256)!r} is not 64 hex digits", hint="sha256sum prints a file's digest")
    if _is_checkpoint(path):
        return _verify_checkpoint(path, request, progress)
    return _verify_outer(path, request)


def _is_checkpoint(path: Path) -> bool:
    return path.is_dir() or is_checkpoint(path, first_bytes(path, 9))


def _pin(digest: str, request: Request, findings: Findings) -> None:
    """Compares a file's digest with --sha256, or else with the one that the profile pins."""
    wanted, source = request.sha256, "--sha256"
    if wanted is None and request.profile is not None and request.profile.scales is not None:
        wanted, source = request.profile.scales.sha256, f"profile {request.profile.name}"
    if wanted is None or wanted.removeprefix("sha256:").lower() == digest:
        return
    effect = "not the file that was pinned: --against says whether its values are the same"
    findings.error("sha256", digest, f"{wanted} of {source}", effect)


def _verify_outer(path: Path, request: Request) -> Report:
    found = outer.examine(path, request.profile)
    findings = found.findings
    _pin(found.sha256, request, findings)
    against = None
    if request.against is not None:
        if _is_checkpoint(request.against):
            raise UsageError(f"{path} is an outer-scale file and {request.against} a checkpoint", hint="compare two of one kind")
        against = compare.compare_outer(found, outer.examine(request.against), findings)
    ranges = _latent_ranges(found, request, findings)
    rows = tuple(_outer_row(found, position, ranges) for position in range(len(found.layers)))
    draft = request.profile.model.draft_layers if request.profile is not None else 0
    identities = identities_of(found.layers, draft)
    measured = None if request.latents is None else sum(each.groups > 0 for each in ranges.values())
    return _report(path, "outer", found.format, found.sha256, findings, rows, identities=identities, against=against, measured=measured)


def _latent_ranges(found: Examined, request: Request, findings: Findings) -> dict[int, LatentRange]:
    if request.latents is None:
        return {}
    from mlactl.scales.latents import measure

    return measure(request.latents, {row.layer: row.scale for row in found.layers if row.scale is not None}, findings)


def _outer_row(found: Examined, position: int, ranges: dict[int, LatentRange]) -> OuterRow:
    row = found.layers[position]
    share = ranges[row.layer].underflow_share if row.layer in ranges else None
    name = None if row.name is None else plain(row.name)
    return OuterRow(row.layer, name, row.scale, None if row.scale is None else math.log2(row.scale), row.max_abs, row.variant, share)


def _verify_checkpoint(path: Path, request: Request, progress: Progress | None) -> Report:
    from mlactl.scales import checkpoint
    from mlactl.scales.reading import no_progress

    digest = None
    if request.latents is not None:
        raise UsageError(f"--latents is for outer-scale files, {path} is a checkpoint", hint="mlactl verify-scales FILE.json --latents LATENTS")
    if request.sha256 is not None:
        if path.is_dir() or path.name.endswith(INDEX_SUFFIX):
            raise UsageError(f"--sha256 pins one file, {path} is several", hint="pin each shard by its own name")
        digest = sha256_of(path)
    found, findings = checkpoint.examine(path, request.profile, progress or no_progress)
    if digest is not None:
        _pin(digest, request, findings)
    against = None
    if request.against is not None:
        if not _is_checkpoint(request.against):
            raise UsageError(f"{path} is a checkpoint and {request.against} an outer-scale file", hint="compare two of one kind")
        other, _ = checkpoint.examine(request.against, None, progress or no_progress)
        against = compare.compare_checkpoints(found, other, findings)
    by_layer, kv = found.by_layer(), found.kv_by_layer()
    rows = tuple(_checkpoint_row(layer, by_layer.get(layer, []), kv) for layer in found.layers)
    return _report(
        path, "checkpoint", found.conventions, digest, findings, rows, modules=len(found.modules), block_bytes=found.block_bytes, against=against
    )


def _checkpoint_row(layer: int, modules: list[ModuleScales], kv: dict[tuple[int, str], float]) -> CheckpointRow:
    factors = [factor for module in modules for factor in module.multipliers or ()]
    blocks = [module.blocks for module in modules if module.blocks is not None]
    live = sum(counts.elements - counts.zeros for counts in blocks)
    largest = max(factors, default=None)
    return CheckpointRow(
        layer, len(modules), min(factors, default=None), largest, None if largest is None else math.log2(largest),
        kv.get((layer, "k_scale")), kv.get((layer, "v_scale")),
        sum(counts.elements for counts in blocks), sum(counts.subnormals for counts in blocks) / live if live else None,
    )  # fmt: skip


def _report(
    path: Path, kind: str, name: str | None, digest: str | None, findings: Findings, rows: tuple[OuterRow, ...] | tuple[CheckpointRow, ...], *,
    identities: tuple[int, ...] | None = None, modules: int | None = None, block_bytes: int | None = None, against: compare.Comparison | None = None,
    measured: int | None = None,
) -> Report:  # fmt: skip
    errors, warnings, notes = (findings.count(severity) for severity in (Severity.ERROR, Severity.WARNING, Severity.NOTE))
    verdict = Verdict.INVALID if errors else Verdict.WARNINGS if warnings else Verdict.VALID
    found = findings.rows()
    return Report(path, kind, name, verdict, digest, errors, warnings, notes, found, rows, identities, modules, block_bytes, against, measured)
