"""The one function that gives the kernels' runtime its objects: opens the store and injects it."""

from __future__ import annotations

import os

from mlactl.cache.load import StoreSource
from mlactl.cache.store import Store
from mlactl.kernels import runtime


def open_runtime(cache_dir: str | None = None, *, frozen: bool | None = None) -> Store:
    """Opens the store and lets launches in this process load from it; a miss compiles unless `frozen`.

    `frozen` defaults to MLACTL_FROZEN=1: a serving process that never compiles. With MLACTL_CAPTURE_DIR calls are recorded there.
    """
    store = Store.open(cache_dir)
    recorder = None
    if os.environ.get("MLACTL_CAPTURE_DIR"):
        from mlactl.replay.recorder import from_environment

        recorder = from_environment()
    runtime.configure(StoreSource(store), recorder, frozen=os.environ.get("MLACTL_FROZEN") == "1" if frozen is None else frozen)
    return store
