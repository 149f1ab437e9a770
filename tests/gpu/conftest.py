"""Fixtures of the GPU tests: without a CUDA device every one of them is skipped, with that reason."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def arch() -> str:
    """The object target of the device, with launches served from the cache root that the environment names."""
    from mlactl.opening import open_runtime

    open_runtime()
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}a"


@pytest.fixture(scope="session")
def multiprocessors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count
