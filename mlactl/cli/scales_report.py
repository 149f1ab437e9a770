"""How the verdicts on scale files look to a person: headline, findings, layers, a bar plot of log2 scale by layer."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence

from mlactl.printable import counted
from mlactl.scales.findings import MAX_FINDINGS, Finding, plain
from mlactl.scales.float32 import text32
from mlactl.scales.verdict import CheckpointRow, OuterRow, Report, Verdict
from mlactl.ui.output import ROW_LIMIT, Column, Output, bytes_text

BAR_ROWS = 8
_BLOCKS = " ▁▂▃▄▅▆▇█"

FINDING_COLUMNS = (
    Column("severity", lambda row: row.severity.value),
    Column("layer", lambda row: "-" if row.layer is None else str(row.layer), right=True),
    Column("tensor", lambda row: row.tensor or "-"),
    Column("index", lambda row: "-" if row.index is None else str(list(row.index))),
    Column("value", lambda row: row.value),
    Column("expected", lambda row: row.expected),
    Column("effect on the model", lambda row: row.effect),
)

OUTER_COLUMNS = (
    Column("layer", lambda row: str(row.layer), right=True),
    Column("scale", lambda row: text32(row.scale), right=True),
    Column("log2", lambda row: _decimals(row.log2), right=True),
    Column("max_abs", lambda row: "-" if row.max_abs is None else f"{row.max_abs:.6g}", right=True),
    Column("variant", lambda row: row.variant or "-"),
)
NAME_COLUMN = Column("name", lambda row: row.name or "-")
LATENT_COLUMN = Column("groups under 2^-6", lambda row: _share(row.underflow_share), right=True)

CHECKPOINT_COLUMNS = (
    Column("layer", lambda row: str(row.layer), right=True),
    Column("modules", lambda row: str(row.modules), right=True),
    Column("smallest scale", lambda row: text32(row.smallest), right=True),
    Column("largest scale", lambda row: text32(row.largest), right=True),
    Column("log2", lambda row: _decimals(row.log2), right=True),
    Column("k_scale", lambda row: text32(row.k_scale), right=True),
    Column("v_scale", lambda row: text32(row.v_scale), right=True),
    Column("block scales", lambda row: bytes_text(row.block_bytes), right=True),
    Column("blocks under 2^-6", lambda row: _share(row.underflow_share), right=True),
)


def show(out: Output, report: Report, *, layers: bool, strict: bool) -> None:
    """Writes one report on stdout; remarks go to stderr."""
    out.line(f"{plain(report.path)}: {headline(report, strict=strict)}")
    out.line(f"  {'; '.join(_facts(report))}")
    if report.findings:
        out.line()
        out.table(FINDING_COLUMNS, report.findings[:ROW_LIMIT])
        total = report.errors + report.warnings + report.notes
        if total > ROW_LIMIT:
            kept = f"; --json has {'all' if total <= MAX_FINDINGS else f'the first {MAX_FINDINGS}'}"
            out.note(f"{total} findings, {ROW_LIMIT} shown{kept}")
    if layers and report.layers:
        out.line()
        out.table(_layer_columns(report.layers), report.layers)
    values = [row.log2 for row in report.layers]
    if any(value is not None for value in values):
        out.line()
        what = "log2 scale by layer" if report.kind == "outer" else "log2 of the largest weight scale by layer"
        for line in bars(what, [(row.layer, row.log2) for row in report.layers], _width(), ascii_only=not _can_draw(out)):
            out.line(line)


def headline(report: Report, *, strict: bool) -> str:
    """`valid`, `valid with 1 warning`, `invalid, 2 errors and 1 warning`."""
    counts = [_count(report.errors, "error"), _count(report.warnings, "warning")]
    said = " and ".join(text for text in counts if text)
    blind = "; nothing was measured against the latents" if report.measured == 0 else ""
    if report.verdict is Verdict.INVALID:
        return f"invalid, {said}{blind}"
    if report.verdict is Verdict.WARNINGS:
        return f"{said}, which --strict does not allow{blind}" if strict else f"valid with {said}{blind}"
    return "valid"


def _facts(report: Report) -> list[str]:
    facts = [report.format or "unknown format"]
    if report.kind == "outer":
        identity = sum(isinstance(row, OuterRow) and row.variant == "identity" for row in report.layers)
        dynamic = sum(isinstance(row, OuterRow) and row.variant == "dynamic" for row in report.layers)
        facts.append(f"{_count(len(report.layers), 'layer') or 'no layers'}, {dynamic} dynamic and {identity} identity")
        if report.identities and report.verdict is not Verdict.INVALID:
            facts.append(f"needs latent_scale_identity={' and '.join(map(str, report.identities))}")
    else:
        facts += [_count(len(report.layers), "layer") or "no layers", f"{_count(report.modules or 0, 'NVFP4 module') or 'no NVFP4 modules'}"]
        facts.append(f"{bytes_text(report.block_bytes)} of block scales scanned")
    if report.sha256:
        facts.append(f"sha256 {report.sha256}")
    if report.measured:
        facts.append(f"latents of {counted(report.measured, 'layer')} measured")
    if report.against is not None:
        facts.append(f"against {plain(report.against.other)}: {report.against.text()}")
    return facts


def _layer_columns(rows: Sequence[OuterRow] | Sequence[CheckpointRow]) -> tuple[Column, ...]:
    if isinstance(rows[0], CheckpointRow):
        return CHECKPOINT_COLUMNS
    outer = [row for row in rows if isinstance(row, OuterRow)]
    named = (NAME_COLUMN,) if any(row.name for row in outer) else ()
    measured = (LATENT_COLUMN,) if any(row.underflow_share is not None for row in outer) else ()
    return (*OUTER_COLUMNS, *measured, *named)


def bars(title: str, points: Sequence[tuple[int, float | None]], width: int, *, ascii_only: bool) -> list[str]:
    """A column for every layer, `BAR_ROWS` lines high, in panels of what fits `width`; `x` where there is no value."""
    known = [value for _, value in points if value is not None]
    low, high = math.floor(min(known)) - 1, max(math.ceil(max(known)), math.floor(min(known)) + 1)
    labels = {0: f"{high:g}", BAR_ROWS - 1: f"{low:g}", BAR_ROWS // 2: f"{high - (high - low) * (BAR_ROWS // 2) / BAR_ROWS:g}"}
    gutter = max(map(len, labels.values()))
    room = max(10, (width - gutter - 3) // 10 * 10)
    lines = [title]
    for start in range(0, len(points), room):
        panel = points[start : start + room]
        for line in range(BAR_ROWS):
            cells = "".join(_cell(value, low, high, BAR_ROWS - 1 - line, ascii_only=ascii_only) for _, value in panel)
            lines.append(f"{labels.get(line, ''):>{gutter}} {'|' if ascii_only else '│'}{cells}".rstrip())
        ticks = "".join(f"{layer:<10}" for layer, _ in panel[::10])
        lines.append(f"{'':>{gutter}}  {ticks}".rstrip())
    return lines


def _cell(value: float | None, low: float, high: float, row: int, *, ascii_only: bool) -> str:
    if value is None:
        return "x" if row == 0 else " "
    eighths = round((value - low) / (high - low) * BAR_ROWS * 8) - row * 8
    if ascii_only:
        return "#" if eighths >= 4 else " "
    return _BLOCKS[max(0, min(8, eighths))]


def _can_draw(out: Output) -> bool:
    try:
        _BLOCKS.encode(getattr(out.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _width() -> int:
    return shutil.get_terminal_size((100, 24)).columns


def _count(number: int, noun: str) -> str:
    return counted(number, noun) if number else ""


def _decimals(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """Findings as plain lines, for an error that is not a report."""
    return [f"{row.severity.value}: {row.sentence()}" for row in findings]
