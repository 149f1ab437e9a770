"""The smallest real kernel: multiplies a vector by a compile-time factor. Compiles in a fraction of a second."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from mlactl.kernels.compiler import Traced


class Multiply:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: Any):
        self.device(x, y).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def device(self, x: cute.Tensor, y: cute.Tensor):
        lane, _, _ = cute.arch.thread_idx()
        if lane < x.shape[0]:
            y[lane] = x[lane] * self.factor


def build(facts: dict[str, Any]) -> Traced:
    dtype = {"f32": cutlass.Float32, "i32": cutlass.Int32}[facts["dtype"]]
    tensor = make_fake_compact_tensor(dtype, (cute.sym_int(),))
    return Traced(
        Multiply(facts["factor"]), (tensor, make_fake_compact_tensor(dtype, (cute.sym_int(),)), make_fake_stream(use_tvm_ffi_env_stream=True))
    )
