"""How a benchmark looks: tables for people, lines for pipes, the record on disk; and the run of `--warm`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlactl.bench.arms import Planned, splits_of, tiles_of
from mlactl.bench.objects import ObjectRow, object_rows, specs_of
from mlactl.bench.results import GATE, ArmResult, Bench, ShapeResult
from mlactl.cache.store import Store
from mlactl.errors import CannotRun, Interrupted, MlactlError
from mlactl.ui.output import SCHEMA_VERSION, Column, Output, bytes_text

if TYPE_CHECKING:
    from mlactl.warmup.pool import Outcome

Pair = tuple[ShapeResult, ArmResult]


def _planned(cell: Any) -> Any:
    """A cell about the plan; `-` where there is none."""
    return lambda pair: "-" if pair[1].planned.plan is None else cell(pair[1].planned.plan)


_PLAN_COLUMNS = (
    Column("shape", lambda pair: pair[0].shape.name),
    Column("arm", lambda pair: pair[1].planned.arm),
    Column("tile", _planned(lambda plan: plan.tile)),
    Column("tiles", _planned(lambda plan: str(tiles_of(plan))), right=True),
    Column("splits", _planned(lambda plan: str(splits_of(plan))), right=True),
    Column("blocks", _planned(lambda plan: str(plan.blocks)), right=True),
    Column("memory floor us", lambda pair: f"{pair[1].floors.memory_us:.1f}", right=True),
    Column("mma floor us", lambda pair: f"{pair[1].floors.mma_us:.1f}", right=True),
)
_COMPUTED_COLUMNS = (
    *_PLAN_COLUMNS,
    Column("bound by", lambda pair: pair[1].floors.bound),
    Column("scratch", _planned(lambda plan: bytes_text(plan.scratch_bytes)), right=True),
    Column("state", lambda pair: pair[1].state),
)
_MEASURED_COLUMNS = (
    *_PLAN_COLUMNS,
    Column("median us", lambda pair: _number(pair[1].median_us, 1), right=True),
    Column("share of floor", lambda pair: _number(pair[1].share_of_floor, 2), right=True),
    Column("x deployed", lambda pair: _number(pair[0].ratio_to_deployed(pair[1]), 2), right=True),
    Column("cosine", lambda pair: "-" if pair[1].gate is None else f"{pair[1].gate['cosine']:.7f}", right=True),
    Column("state", lambda pair: pair[1].state),
)
_OBJECT_COLUMNS = (
    Column("state", lambda row: row.item.state),
    Column("key", lambda row: row.item.key[:12] if row.item.key else "-"),
    Column("registers", lambda row: _each(row, "registers"), right=True),
    Column("frame B", lambda row: _each(row, "frame_bytes"), right=True),
    Column("static B", lambda row: _each(row, "static_smem_bytes"), right=True),
    Column("dynamic B", lambda row: _each(row, "dynamic_smem_bytes"), right=True),
    Column("object", lambda row: row.item.spec.label()),
)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _each(row: ObjectRow, field: str) -> str:
    values = [getattr(kernel, field) for kernel in row.kernels]
    return ",".join("-" if value is None else f"{value:,}" for value in values) or "-"


def show(out: Output, bench: Bench, rows: Sequence[ObjectRow]) -> None:
    """Both tables, and what each arm without a time was refused for."""
    how = "computed, nothing was run" if bench.computed else "measured"
    rates = f"{bench.rates.bytes_per_s / 1e9:,.0f} GB/s, {bench.rates.flop_per_s / 1e12:,.1f} TFLOP/s bf16"
    out.line(f"{bench.card}, {bench.arch}, {bench.multiprocessors} SMs: {how}; floors from {rates} ({bench.rates_source})")
    pairs = [(result, arm) for result in bench.shapes for arm in result.arms]
    out.line()
    out.table(_COMPUTED_COLUMNS if bench.computed else _MEASURED_COLUMNS, pairs)
    if not bench.computed:
        out.note("share of floor: larger floor / median, higher is better; x deployed: median / that of deployed, lower is better")
    out.line()
    out.table(_OBJECT_COLUMNS, rows)
    for result, arm in pairs:
        if arm.state == GATE:
            out.error(MlactlError(f"{result.shape.name} {arm.planned.arm}: not timed, the gate refused it: {arm.reason}"))
    untimed = [(result, arm) for result, arm in pairs if arm.reason is not None and arm.state != GATE]
    for name, reason in dict.fromkeys((arm.planned.arm, arm.reason) for _, arm in untimed):
        shapes = [result.shape.name for result, arm in untimed if (arm.planned.arm, arm.reason) == (name, reason)]
        out.note(f"{name}: {reason} ({', '.join(shapes)})")


def quiet_lines(bench: Bench) -> list[str]:
    """`SHAPE ARM MICROSECONDS` a line: medians, or the larger floor where nothing was run."""
    lines = []
    for result in bench.shapes:
        for arm in result.arms:
            value = arm.floors.larger_us if bench.computed else arm.median_us
            if value is not None:
                lines.append(f"{result.shape.name} {arm.planned.arm} {value:.2f}")
    return lines


def write_record(path: Path, whole: dict[str, Any]) -> None:
    """The record as indented JSON; raises CannotRun."""
    import msgspec

    data = msgspec.json.format(msgspec.json.encode({"schema_version": SCHEMA_VERSION, **whole}), indent=1)
    try:
        path.write_bytes(data + b"\n")
    except OSError as error:
        raise CannotRun(f"{path}: {error.strerror}", hint="-o FILE in a folder that can be written") from error


def warm(out: Output, arms: Sequence[Planned], arch: str, cache_dir: str | None) -> int:
    """Compiles what these arms launch and the cache lacks; 1 when a compile failed."""
    from mlactl.warmup.pool import compile_missing, default_jobs

    store = Store.open(cache_dir)
    specs = specs_of(arms)
    missing = [row.item for row in object_rows(specs, arch, store) if row.item.state == "missing"]
    started, failed = time.monotonic(), []
    if missing:
        with out.progress("compiling", len(missing), "kernels") as task:

            def finished(outcome: Outcome) -> None:
                task.advance()

            result = compile_missing(
                missing,
                jobs=default_jobs(len(missing)),
                cache_dir=cache_dir,
                shared=False,
                on_start=lambda item: task.describe(item.spec.label()),
                on_outcome=finished,
            )
        if result.interrupted:
            raise Interrupted(f"interrupted: {len(result.of('compiled'))} of {len(missing)} missing objects are in the cache")
        failed = list(result.of("failed"))
    rows = object_rows(specs, arch, store)

    def human() -> None:
        out.table(_OBJECT_COLUMNS, rows)
        compiled = len(missing) - len(failed)
        out.note(f"{compiled} compiled in {time.monotonic() - started:.1f} s, {len(rows) - len(missing)} already there, for {arch}")

    keys = [row.item.key for row in rows if row.item.state == "present" and row.item.key]
    out.document({"arch": arch, "objects": [row.as_json() for row in rows]}, human, lambda: keys)
    for outcome in failed:
        out.error(MlactlError(outcome.message or "the compile failed", hint=outcome.hint))
    return 1 if failed else 0
