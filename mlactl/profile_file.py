"""The profile file format: which keys a TOML profile has, what type each one takes, and what a misfit is told.

Only shape is judged here; what the numbers mean together (heads that do not divide, records that no kernel reads) is
`mlactl.profiles`' business.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mlactl.regular_files import read_bytes

MAX_FILE_BYTES = 2**20
"""Far over any profile."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing wrong with a profile: the key it is about ("" for the whole file) and what was found and expected."""

    key: str
    message: str

    def text(self) -> str:
        """`model.heads: …`, or the message alone."""
        return f"{self.key}: {self.message}" if self.key else self.message


@dataclass(frozen=True, slots=True)
class _Kind:
    """A type of value: what to call it, and whether a value is one."""

    expected: str
    fits: Callable[[Any], bool]


def _is_int(value: Any, least: int) -> bool:
    return type(value) is int and value >= least  # type(): TOML's true is a bool, which Python also calls an int


def _is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and bool(value) and all(fits(item) for item in value) and len(set(value)) == len(value)


_TEXT = _Kind("a string that is not empty", lambda value: isinstance(value, str) and bool(value))
_NAME = _Kind(
    "a name of letters, digits, '.', '_' and '-'",
    lambda value: isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value) is not None,
)
_COUNT = _Kind("a whole number of at least 1", lambda value: _is_int(value, 1))
_SIZE = _Kind("a whole number of at least 0", lambda value: _is_int(value, 0))
_COUNTS = _Kind("a list of different whole numbers of at least 1", lambda value: _is_list(value, lambda item: _is_int(item, 1)))
_TEXTS = _Kind("a list of different strings", lambda value: _is_list(value, lambda item: isinstance(item, str)))
_SHA256 = _Kind("64 lower-case hex digits", lambda value: isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None)

_REQUIRED = object()
Values = dict[str, Any]

_SPARSE_POLICY: Mapping[str, tuple[_Kind, Any]] = {
    "stride": (_COUNT, _REQUIRED),
    "sink_chunks": (_SIZE, _REQUIRED),
    "recent_chunks": (_COUNT, _REQUIRED),
    "min_tokens": (_SIZE, 0),
    "refresh_interval": (_SIZE, 0),
}

# section -> key -> (type, default); a section is optional when it is in _OPTIONAL_SECTIONS.
_SECTIONS: Mapping[str, Mapping[str, tuple[_Kind, Any]]] = {
    "model": {
        "heads": (_COUNT, _REQUIRED),
        "layers": (_COUNT, None),
        "latent_dim": (_COUNT, _REQUIRED),
        "rope_dim": (_COUNT, _REQUIRED),
        "draft_layers": (_SIZE, 0),
    },
    "parallel": {"tp": (_COUNT, _REQUIRED), "dcp": (_COUNT, 1), "interleave": (_COUNT, 1)},
    "kv": {"record": (_TEXT, _REQUIRED), "page_size": (_COUNT, _REQUIRED), "kv_dtype": (_TEXT, _REQUIRED), "q_dtype": (_TEXT, _REQUIRED)},
    "serving": {
        "modes": (_TEXTS, _REQUIRED),
        "draft_rows": (_COUNTS, ()),
        "max_sequences": (_COUNT, None),
        "max_context": (_COUNT, None),
        "top_k": (_COUNT, None),
        "graph_captures": (_COUNTS, ()),
    },
    "scales": {"file": (_TEXT, _REQUIRED), "sha256": (_SHA256, None)},
}
_OPTIONAL_SECTIONS = ("scales",)


def read_file(path: Path) -> tuple[Values, list[Finding]]:
    """The file's values with defaults filled in, as `{"name", "model": {…}, …}`, and everything wrong with its shape.

    With findings the values are incomplete and not to be used. Raises CannotRun when the file cannot be read, is no regular
    file or is far too large for a profile.
    """
    import tomli

    data = read_bytes(path, MAX_FILE_BYTES, "TOML", "mlactl profile ls")
    if data.startswith(b"\xef\xbb\xbf"):
        return {}, [Finding("", "begins with a byte order mark (EF BB BF), expected plain UTF-8: save it without one")]
    try:
        document = tomli.loads(data.decode())
    except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
        return {}, [Finding("", f"not a TOML file: {error}")]
    except RecursionError:
        return {}, [Finding("", "not a TOML file: nested too deep")]
    return _read_document(document)


def _read_document(document: Values) -> tuple[Values, list[Finding]]:
    findings = _unknown(document, ["name", *_SECTIONS], "")
    values: Values = {"name": _value(document, "name", "", _NAME, _REQUIRED, findings)}
    for section, keys in _SECTIONS.items():
        if section not in document and section in _OPTIONAL_SECTIONS:
            values[section] = None
            continue
        table = _table(document, section, "", findings)
        if table is None:
            continue
        extra = ["sparse_policy"] if section == "serving" else []
        findings += _unknown(table, [*keys, *extra], f"{section}.")
        values[section] = {key: _value(table, key, f"{section}.", kind, default, findings) for key, (kind, default) in keys.items()}
        if extra:
            values[section]["sparse_policy"] = _sparse_policy(table, findings)
    return values, findings


def _sparse_policy(serving: Values, findings: list[Finding]) -> Values | None:
    if "sparse_policy" not in serving:
        return None
    table = _table(serving, "sparse_policy", "serving.", findings)
    if table is None:
        return None
    prefix = "serving.sparse_policy."
    findings += _unknown(table, list(_SPARSE_POLICY), prefix)
    return {key: _value(table, key, prefix, kind, default, findings) for key, (kind, default) in _SPARSE_POLICY.items()}


def _unknown(table: Values, known: list[str], prefix: str) -> list[Finding]:
    return [
        Finding(prefix + key, f"unknown key, the nearest known one is {prefix}{get_close_matches(key, known, 1, cutoff=0.0)[0]}")
        for key in table
        if key not in known
    ]


def _table(parent: Values, key: str, prefix: str, findings: list[Finding]) -> Values | None:
    found = parent.get(key)
    if isinstance(found, dict):
        return found
    wrong = "is missing" if found is None else f"{_plain(found)} is not a table"
    findings.append(Finding(prefix + key, f"{wrong}, expected a table [{prefix}{key}]"))
    return None


def _value(table: Values, key: str, prefix: str, kind: _Kind, default: Any, findings: list[Finding]) -> Any:
    if key not in table:
        if default is _REQUIRED:
            findings.append(Finding(prefix + key, f"is missing, expected {kind.expected}"))
        return None if default is _REQUIRED else default
    value = table[key]
    if not kind.fits(value):
        findings.append(Finding(prefix + key, f"{_plain(value)} is not {kind.expected}"))
        return None
    return tuple(value) if isinstance(value, list) else value


def _plain(value: Any) -> str:
    """A TOML value as it would be typed, cut short when it is long."""
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
