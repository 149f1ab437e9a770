"""Loads a microbenchmark that mma_peak_kernel.py put into a file, for a card whose machine has neither cache nor compiler."""

from __future__ import annotations

import ctypes
from pathlib import Path

SYMBOL = "mma_peak"


def load_file(path: Path):
    """The launch function of the file."""
    import tvm_ffi

    from mlactl.kernels.runtime import runtime_library

    ctypes.CDLL(str(runtime_library("cu13")), mode=ctypes.RTLD_GLOBAL)
    return tvm_ffi.load_module(str(path)).get_function(SYMBOL)
