"""`mlactl cache why KEY` of a foreign root: what an entry was built from and what forks it from its nearest sibling."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mlactl.cli.cache import rendering
from mlactl.errors import UsageError
from mlactl.ui.output import Column, Output

if TYPE_CHECKING:
    from mlactl.cache.adapter import CacheAdapter
    from mlactl.cache.foreign.b12x.why import Explanation

MAX_CELL_CHARS = 60


def why(out: Output, cache: CacheAdapter, key: str | None, *, show_secrets: bool) -> None:
    """Explains the entry of a key; raises UsageError without one, since profiles name no foreign kernels."""
    from mlactl.cache.foreign.b12x.adapter import B12xCache

    assert isinstance(cache, B12xCache)
    if key is None:
        raise UsageError(f"--profile names kernels of this project, and {cache.root} is a b12x cache", hint="mlactl cache why KEY")
    found = cache.explain(cache.entry(key), show_secrets=show_secrets)
    document = {
        "entry": {**cache.row(found.entry), "detail": found.entry.detail or None},
        "built_from": dict(found.built_from),
        "sibling": found.sibling.key if found.sibling is not None else None,
        "relation": found.relation or None,
        "forks": [asdict(fork) for fork in found.forks],
        "notes": list(found.notes),
    }
    out.document(document, lambda: _human(out, found), lambda: [found.sibling.key] if found.sibling is not None else [])


def _human(out: Output, found: Explanation) -> None:
    entry = found.entry
    out.line(f"{entry.key}  {entry.status}{f': {entry.detail}' if entry.detail else ''}")
    width = max((len(name) for name, _ in found.built_from), default=0)
    for name, value in found.built_from:
        out.line(f"  {name:<{width}}  {_cell(value)}")
    if found.sibling is not None:
        count = rendering.counted(len(found.forks), "field forks", "fields fork")
        out.line()
        out.line(f"nearest  {found.sibling.key}  ({found.relation}): {count} the two")
        if found.forks:
            out.table(_FORK_COLUMNS, found.forks)
    for note in found.notes:
        out.line(note)


def _cell(value: Any) -> str:
    """A value on one line; long lists are cut, `--json` has them whole."""
    text = "absent" if value is None else "empty" if value == "" else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= MAX_CELL_CHARS else f"{text[: MAX_CELL_CHARS - 1]}…"


_FORK_COLUMNS = (
    Column("field", lambda fork: fork.field),
    Column("this entry", lambda fork: _cell(fork.entry)),
    Column("nearest", lambda fork: _cell(fork.sibling)),
)
