"""`mlactl cache ls --all-roots`: every compile cache of this environment, whichever tool's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlactl.printable import safe
from mlactl.ui.output import Column, Mode, Output, bytes_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlactl.cache.survey import Surveyed


def list_roots(out: Output, cache_dir: str | None, show_all: bool) -> None:
    """Surveys the roots with a count on stderr and lists them; those that do not exist with `show_all` and in JSON only."""
    from mlactl.cache.survey import survey

    with out.progress("counting", None, "files and folders") as task:
        found = survey(cache_dir=cache_dir, on_root=lambda place: task.describe(safe(f"{place.tool} {place.path}")), on_inodes=task.advance)
    present = [one for one in found if one.exists]
    rows = found if show_all or out.mode in (Mode.JSON, Mode.JSONL) else present
    empty = "no compile cache exists in this environment"
    out.listing("roots", rows, _COLUMNS, key=lambda one: str(one.place.path), show_all=show_all, empty=empty, as_json=lambda one: one.as_json())
    for one in present:
        for text in one.problems:
            out.warn(safe(f"{one.place.tool}: {text}"))
    if out.mode is Mode.HUMAN:
        _remarks(out, found, present, show_all)


def _remarks(out: Output, found: Sequence[Surveyed], present: Sequence[Surveyed], show_all: bool) -> None:
    for one in present:
        path = safe(one.place.path)  # one line each, whatever a variable holds
        if one.shared_with:
            out.note(f"{path} is used by {one.place.tool} and {', '.join(one.shared_with)}: its numbers are of all of them")
        elif one.inside is not None:
            out.note(f"{path} lies inside the root of {one.inside}, which counts it too")
        if one.network:
            out.note(f"{path} is on a network filesystem ({one.filesystem}): locks and renames may not hold between machines")
    if not show_all and len(found) > len(present):
        out.note(f"{len(found) - len(present)} places where nothing exists: --all lists them")
    for command in dict.fromkeys(one.place.prune for one in present if one.file_bytes):
        if command is not None:
            out.hint(command)


def _owner(one: Surveyed) -> str:
    return "-" if one.owner is None else f"{one.owner} {one.mode:04o}"


def _filesystem(one: Surveyed) -> str:
    return f"{one.filesystem or '-'}{' (network)' if one.network else ''}"


def _source(one: Surveyed) -> str:
    return f"{one.place.source} ({one.place.remark})" if one.place.remark else one.place.source


def _number(value: int | None, noun: str = "") -> str:
    return "-" if value is None else f"{value} {noun}".rstrip()


_COLUMNS = (
    Column("tool", lambda one: one.place.tool),
    Column("path", lambda one: str(one.place.path) if one.exists else f"{one.place.path} (does not exist)"),
    Column("size", lambda one: bytes_text(one.file_bytes), right=True),
    Column("entries", lambda one: _number(one.entries, one.place.noun), right=True),
    Column("inodes", lambda one: _number(one.inodes), right=True),
    Column("owner", _owner),
    Column("filesystem", _filesystem),
    Column("prunable", lambda one: "yes" if one.place.prune is not None else "no"),
    Column("found by", _source),
)
