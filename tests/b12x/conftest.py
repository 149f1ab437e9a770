"""Roots of b12x's format."""

import sys
from pathlib import Path

import pytest
from b12x_files import Root

from mlactl.cache.foreign.b12x.adapter import B12xCache

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "store"))  # which user runs the tests


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "b12x"
    folder.mkdir()
    return Root(folder)


@pytest.fixture
def cache(root):
    return B12xCache(root.path)
