"""`mlactl profile`: which deployments are known, what each one makes a kernel see, and whether a file is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mlactl.cli import options
from mlactl.errors import MlactlError
from mlactl.kernels.spec import ARCHES
from mlactl.profile_file import Finding
from mlactl.profiles import BadProfile, Found, Profile, examine, found, load, locate
from mlactl.ui.output import Column, Output

app = typer.Typer(help="List, show and check deployment profiles", no_args_is_help=True, rich_markup_mode=None)


@dataclass(frozen=True, slots=True)
class _Listed:
    """One row of `ls`: the profile, or why it cannot be used."""

    place: Found
    profile: Profile | None
    error: str | None

    @property
    def state(self) -> str:
        """complete, or what is in the way, in a few words."""
        if self.profile is None:
            return "cannot be used"
        missing = self.profile.unbuilt()
        return f"{len(missing)} of {len(self.profile.specs())} not built yet" if missing else "complete"


@dataclass(frozen=True, slots=True)
class _Checked:
    """One name or path of `check`: everything wrong with the file, or why there is nothing to say of it."""

    asked: str
    path: Path | None
    profile: Profile | None
    findings: tuple[Finding, ...]
    error: MlactlError | None

    @property
    def exit_code(self) -> int:
        return int(bool(self.findings)) if self.error is None else self.error.exit_code

    @property
    def shown(self) -> str:
        """The file, or the name that leads to none."""
        return self.asked if self.path is None else str(self.path)


@app.command()
def ls(
    show_all: options.AllOption = False,
    output: options.OutputOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """List profiles: yours, the machine's, the shipped ones."""
    out = options.make_output(output, json, quiet)
    rows = [_listed(place) for place in found()]
    out.listing("profiles", rows, _COLUMNS, key=lambda row: row.place.name, show_all=show_all, as_json=_listed_json)
    for row in rows:
        if row.place.shadows:
            out.note(f"{row.place.name}: the {row.place.origin} file {row.place.path} hides the {' and '.join(row.place.shadows)} one")
        if row.error is not None:
            out.note(f"{row.place.name}: {row.error}")
    if any(row.profile is not None and row.profile.unbuilt() for row in rows):
        out.hint("mlactl profile show NAME says what is not built yet")


@app.command()
def show(
    profile: options.ProfileArgument,
    output: options.OutputOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Show one profile, what kernels see of it, its objects."""
    out = options.make_output(output, json, quiet)
    loaded = load(profile)
    specs, reasons = loaded.specs(), dict(loaded.unbuilt())
    rows: list[dict[str, Any]] = [{**spec.as_json(), "label": spec.label(), "not_built": reasons.get(spec)} for spec in specs]
    document = {"profile": loaded.as_json(), "arches": list(ARCHES), "complete": not reasons, "specs": rows}
    out.document(document, lambda: _show_human(out, loaded, rows), lambda: [row["label"] for row in rows])


@app.command()
def check(
    profiles: Annotated[list[str], typer.Argument(metavar="NAME|PATH...", help="Profile names or files", autocompletion=options.complete_profile)],
    output: options.OutputOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> int:
    """Check profile files; the worst result is the exit code.

    Each one is judged. Exit codes: 0 all are right; 1 something was found; 2 an unknown name, or a file that cannot be read.
    """
    out = options.make_output(output, json, quiet)
    results = [_checked(name) for name in profiles]
    document = {"profiles": [_checked_json(result) for result in results]}
    out.document(document, lambda: _check_human(out, results), lambda: [result.shown for result in results if result.exit_code])
    for result in results:
        if result.error is not None:
            out.error(result.error)
    return max(result.exit_code for result in results)


def _checked(name: str) -> _Checked:
    path = None
    try:
        path = locate(name)
        return _Checked(name, path, *examine(path), None)
    except MlactlError as error:
        # The others are judged all the same.
        return _Checked(name, path, None, (), error)


def _checked_json(result: _Checked) -> dict[str, Any]:
    return {
        "path": None if result.path is None else str(result.path),
        "name": result.profile.name if result.profile is not None else result.asked if result.path is None else None,
        "ok": not result.exit_code,
        "findings": [_finding_json(item) for item in result.findings],
        "error": None if result.error is None else result.error.message,
    }


def _listed(place: Found) -> _Listed:
    try:
        return _Listed(place, load(place.name), None)
    except BadProfile as error:
        return _Listed(place, None, error.findings[0].text())
    except MlactlError as error:
        return _Listed(place, None, error.message)


def _sharding(row: _Listed) -> str:
    return "-" if row.profile is None else f"TP{row.profile.parallel.tp} DCP{row.profile.parallel.dcp}"


_COLUMNS = (
    Column("name", lambda row: row.place.name),
    Column("sharding", _sharding),
    Column("heads", lambda row: "-" if row.profile is None else str(row.profile.kernel_heads), right=True),
    Column("record", lambda row: "-" if row.profile is None else row.profile.kv.record),
    Column("modes", lambda row: "-" if row.profile is None else ", ".join(row.profile.serving.modes)),
    Column("objects", lambda row: "-" if row.profile is None else str(len(row.profile.specs())), right=True),
    Column("state", lambda row: row.state),
    Column("from", lambda row: row.place.origin),
)


def _listed_json(row: _Listed) -> dict[str, Any]:
    document: dict[str, Any] = {"name": row.place.name, "path": str(row.place.path), "origin": row.place.origin, "shadows": list(row.place.shadows)}
    if row.profile is None:
        return {**document, "error": row.error}
    profile = row.profile
    missing = profile.unbuilt()
    return {
        **document,
        "error": None,
        "tp": profile.parallel.tp,
        "dcp": profile.parallel.dcp,
        "kernel_heads": profile.kernel_heads,
        "record": profile.kv.record,
        "modes": list(profile.serving.modes),
        "objects_per_arch": len(profile.specs()),
        "complete": not missing,
        "not_built": [{"spec": spec.as_json(), "reason": reason} for spec, reason in missing],
    }


def _finding_json(finding: Finding) -> dict[str, str]:
    return {"key": finding.key, "message": finding.message}


def _show_human(out: Output, profile: Profile, rows: Sequence[dict[str, Any]]) -> None:
    model, parallel, kv, serving = profile.model, profile.parallel, profile.kv, profile.serving
    tokens = profile.local_shard_tokens
    policy = serving.sparse_policy
    pairs = (
        ("name", profile.name),
        ("file", str(profile.path)),
        ("heads", str(model.heads)),
        ("latent + RoPE", f"{model.latent_dim} + {model.rope_dim}"),
        ("layers", f"{_optional(model.layers, '')}, {model.draft_layers} draft layers on top"),
        ("parallel", f"TP {parallel.tp}, DCP {parallel.dcp}, interleave {parallel.interleave}"),
        ("heads a rank", str(profile.local_heads)),
        ("heads a kernel sees", f"{profile.kernel_heads} ({profile.local_heads} x {parallel.dcp} after the DCP gather)"),
        ("tokens a shard holds", "not known without serving.max_context" if tokens is None else f"{tokens} of {serving.max_context}"),
        ("kv", f"{kv.record} records in {kv.kv_dtype} pages of {kv.page_size}, {kv.q_dtype} queries"),
        ("modes", ", ".join(serving.modes)),
        ("draft rows", ", ".join(map(str, serving.draft_rows)) or "none"),
        ("max sequences", _optional(serving.max_sequences, "")),
        ("top-k", _optional(serving.top_k, "")),
        ("graph captures", ", ".join(map(str, serving.graph_captures)) or "none given"),
        (
            "sparse policy",
            "off"
            if policy is None
            else f"stride {policy.stride}, sink {policy.sink_chunks}, recent {policy.recent_chunks}, above {policy.min_tokens} tokens",
        ),
        ("scale file", "none" if profile.scales is None else str(profile.scales.file)),
    )
    width = max(len(name) for name, _ in pairs)
    for name, text in pairs:
        out.line(f"{name:<{width}}  {text}")
    out.line()
    columns = (Column("object", lambda row: row["label"]), Column("state", lambda row: row["not_built"] or "can be compiled"))
    out.table(columns, rows, title=f"{len(rows)} objects for each of {', '.join(ARCHES)}")
    out.hint(f"mlactl warmup --profile {profile.name} --dry-run")


def _optional(value: int | None, unit: str) -> str:
    return f"{unit} not given".strip() if value is None else f"{value} {unit}".strip()


def _check_human(out: Output, results: Sequence[_Checked]) -> None:
    for result in results:
        for finding in result.findings:
            out.line(f"{result.path}: {finding.text()}")
        if not result.findings and result.profile is not None:
            out.line(f"{result.path}: ok, {len(result.profile.specs())} objects an arch")
