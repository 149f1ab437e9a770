"""The record of a benchmark: one JSON document that says what was measured, on what, how, and which way is better."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from mlactl.bench.arms import splits_of, tiles_of
from mlactl.bench.results import ArmResult, Bench, ShapeResult
from mlactl.kernels import registry
from mlactl.kernels.mla.planner import DensePlan
from mlactl.kernels.spec import CompileSpec

DIRECTIONS = {
    "median_us": "lower is better",
    "samples_us": "lower is better",
    "share_of_floor": "larger floor / median, higher is better, 1 is the floor",
    "ratio_to_deployed": "median / median of the deployed arm, lower is better",
}
_DISTRIBUTIONS = ("mlactl", "torch", "nvidia-cutlass-dsl", "apache-tvm-ffi")


def document(bench: Bench, *, command: str, commit: str | None, method: str) -> dict[str, Any]:
    """The whole record, without a schema version (the writer's)."""
    specs = dict.fromkeys(spec for result in bench.shapes for arm in result.arms if arm.planned.plan is not None for spec in arm.planned.plan.specs)
    return {
        "benchmark": "verify-plan",
        "computed": bench.computed,
        **provenance(command, commit, [*specs], with_driver=not bench.computed),
        "card": bench.card,
        "arch": bench.arch,
        "multiprocessors": bench.multiprocessors,
        "method": method,
        "directions": DIRECTIONS,
        "bytes_per_s": bench.rates.bytes_per_s,
        "mma_flop_per_s": bench.rates.flop_per_s,
        "rates_source": bench.rates_source,
        "layout": asdict(bench.layout),
        "shapes": [_shape(result) for result in bench.shapes],
    }


def provenance(command: str, commit: str | None, specs: Sequence[CompileSpec], *, with_driver: bool = True) -> dict[str, Any]:
    """Command, time, commit, digests of the kernels' sources, driver and versions of what ran."""
    kernels = sorted({spec.kernel_id for spec in specs})
    return {
        "command": command,
        "created": f"{datetime.now(UTC).isoformat()[:19]}Z",
        "commit": commit or commit_here(),
        "sources": {kernel: registry.sources_digest(kernel) for kernel in kernels},
        "driver": driver_version() if with_driver else None,
        "versions": versions(),
    }


def _shape(result: ShapeResult) -> dict[str, Any]:
    shape, floors = result.shape, result.floors
    return {
        "shape": shape.name,
        "mode": shape.mode,
        "requests": shape.requests,
        "rows": shape.rows,
        "heads": shape.heads,
        "tokens": shape.tokens,
        "lengths": shape.lengths(),
        "memory_floor_us": floors.memory_us,
        "mma_floor_us": floors.mma_us,
        "bound": floors.bound,
        "arms": [_arm(result, arm) for arm in result.arms],
    }


def _arm(result: ShapeResult, arm: ArmResult) -> dict[str, Any]:
    plan = arm.planned.plan
    return {
        "arm": arm.planned.arm,
        "status": arm.state,
        "reason": arm.reason,
        "plan": None if plan is None else plan_json(plan),
        "specs": [] if plan is None else [spec.as_json() for spec in plan.specs],
        "gate": None if arm.gate is None else dict(arm.gate),
        "median_us": arm.median_us,
        "memory_floor_us": arm.floors.memory_us,
        "mma_floor_us": arm.floors.mma_us,
        "share_of_floor": arm.share_of_floor,
        "ratio_to_deployed": result.ratio_to_deployed(arm),
        "samples_us": list(arm.samples_us),
    }


def plan_json(plan: DensePlan) -> dict[str, Any]:
    """What a plan decided, as far as a reader of a record needs it."""
    return {
        "mode": plan.caps.mode,
        "tile": plan.tile,
        "tiles": tiles_of(plan),
        "blocks": plan.blocks,
        "splits": splits_of(plan),
        "scratch_bytes": plan.scratch_bytes,
    }


def gate_json(verdict: Any) -> Mapping[str, float]:
    """The worst values of a verdict."""
    return {"cosine": verdict.cosine, "norm": verdict.norm, "peak": verdict.peak, "lse": verdict.lse}


def versions() -> dict[str, str]:
    """Versions of Python and of the distributions that shape a launch; what is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def driver_version() -> str:
    """Version of the NVIDIA driver, or unknown."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return (_answer(command, None) or "unknown").splitlines()[0]


def commit_here() -> str:
    """Commit of the checkout this package lies in, with `+` when its files differ from it; unknown for an installed wheel."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "pyproject.toml").is_file():
        return "unknown"
    commit = _answer(["git", "rev-parse", "HEAD"], root)
    if not commit:
        return "unknown"
    return f"{commit}+" if _answer(["git", "status", "--porcelain", "--untracked-files=no"], root) else commit


def _answer(command: Sequence[str], folder: Path | None) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
