"""Measures the card's mma.sync ceiling with the object that mma_peak_kernel.py compiles; needs no compiler."""

from __future__ import annotations

import ctypes
from pathlib import Path

SYMBOL = "mma_peak"
FLOP_PER_MMA = 2 * 16 * 8 * 16
CHAINS, WARPS, BLOCKS_PER_PROCESSOR = 8, 8, 2


def measure_tflops(path: Path, rounds: int = 4096) -> float:
    """TFLOP/s of the microbenchmark on the current device: the best of five launches."""
    import torch
    import tvm_ffi

    from mlactl.kernels.runtime import runtime_library

    ctypes.CDLL(str(runtime_library("cu13")), mode=ctypes.RTLD_GLOBAL)
    function = tvm_ffi.load_module(str(path)).get_function(SYMBOL)
    blocks = BLOCKS_PER_PROCESSOR * torch.cuda.get_device_properties(0).multi_processor_count
    sink = torch.zeros(32 * WARPS, device="cuda")
    best = float("inf")
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function(sink, rounds, blocks)
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) * 1e-3)
    return blocks * WARPS * rounds * CHAINS * FLOP_PER_MMA / best * 1e-12
