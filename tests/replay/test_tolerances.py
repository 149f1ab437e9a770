"""The tolerance table: complete, with reasons, and changed only by what a person typed."""

import pytest
import tomli

from mlactl.errors import UsageError
from mlactl.replay import tolerances
from mlactl.replay.records import RECORDS


def walk(table, path=()):
    if any(not isinstance(value, dict) for value in table.values()):
        yield path, table
    for name, value in table.items():
        if isinstance(value, dict):
            yield from walk(value, (*path, name))


def test_every_entry_has_a_reason():
    entries = list(walk(tomli.loads(tolerances.TABLE.read_text())))
    assert len(entries) > 12
    assert all(len(entry.get("reason", "")) > 20 for _, entry in entries), [path for path, entry in entries if not entry.get("reason")]


@pytest.mark.parametrize("record", RECORDS)
def test_every_record_holds_the_gate(record):
    """Cosine, norm and largest error as the measuring rules ask: 0.9999 (0.9995 for quantised KV), 0.5%, 1% of the row's maximum."""
    found = tolerances.for_output(record, "decode")
    assert found.cosine == (0.9999 if record == "bf16" else 0.9995)
    assert (found.norm, found.row, found.rtol, found.atol) == (0.005, 0.01, 0.0, 0.0)
    assert found.name == f"output.{record}"


def test_a_mode_may_have_its_own(monkeypatch):
    table = {"output": {"any": {"row": 0.1, "reason": "r"}, "bf16": {"row": 0.01, "reason": "r", "prefill": {"row": 0.02, "reason": "own"}}}}
    monkeypatch.setattr(tolerances, "_table", lambda: table)
    assert tolerances.for_output("bf16", "decode").row == 0.01
    assert tolerances.for_output("bf16", "prefill") == tolerances.Tolerance("output.bf16.prefill", "own", row=0.02)
    assert tolerances.for_output("unknown", "decode").name == "output.any"


def test_typed_values_replace_the_table():
    base = tolerances.for_output("bf16", "decode")
    assert tolerances.overridden(base) is base
    typed = tolerances.overridden(base, rtol=0.5)
    assert (typed.rtol, typed.row, typed.cosine, typed.norm) == (0.5, 0.0, None, None)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_no_tolerance_is_refused(value):
    with pytest.raises(UsageError, match="no tolerance"):
        tolerances.overridden(tolerances.for_lse(), atol=value)
