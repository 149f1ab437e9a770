"""Benchmarks are run by hand, seldom: here it is seen that each still finds what it imports."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = sorted(FOLDER.glob("*.py"))


def test_there_are_benchmarks():
    assert {"dense_mla", "sparse_mla", "warmup", "compare"} <= {path.stem for path in SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_finds_what_it_imports(script, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    assert runpy.run_path(str(script), run_name="imported")["__doc__"]
