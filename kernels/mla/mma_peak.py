"""A kernel of nothing but bf16 m16n8k16 products on registers: what mma.sync can do on a card. Traced code.

No memory is touched until the sums are written at the end, so that the time is the tensor pipe's alone.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream

from mlactl.kernels.compiler import Traced
from mlactl.kernels.mla import ptx
from mlactl.kernels.mla.arguments import fake_tensor


class MmaPeakKernel:
    """`chains` independent chains of products in each of `warps` warps."""

    def __init__(self, chains: int, warps: int):
        self.chains, self.warps = chains, warps

    @cute.kernel
    def kernel(self, sink: cute.Tensor, rounds: Int32):
        """`rounds` products a chain."""
        thread, _, _ = cute.arch.thread_idx()
        sums = cute.make_rmem_tensor((self.chains * 4,), Float32)
        for i in cutlass.range_constexpr(self.chains * 4):
            sums[i] = Float32(0.0)
        # Bit patterns of small bf16 numbers that differ from thread to thread: constant operands run faster than real ones.
        a = [(thread * (2 * i + 3) & 0x007F007F) | 0x3F003F00 for i in range(4)]
        b = [(thread * (2 * i + 5) & 0x007F007F) | 0xBF003F00 - 0x100000000 for i in range(2)]
        for _ in cutlass.range(rounds, unroll=4):
            for chain in cutlass.range_constexpr(self.chains):
                new = ptx.mma_bf16([sums[chain * 4 + e] for e in range(4)], a, b[0], b[1])
                for e in cutlass.range_constexpr(4):
                    sums[chain * 4 + e] = new[e]
        total = Float32(0.0)
        for i in cutlass.range_constexpr(self.chains * 4):
            total = total + sums[i]
        sink[thread] = total

    @cute.jit
    def __call__(self, sink: cute.Tensor, rounds: Int32, blocks: Int32, stream):
        """Host code: `sink` is fp32 of one block's threads."""
        self.kernel(sink, rounds).launch(grid=[blocks, 1, 1], block=[32 * self.warps, 1, 1], stream=stream)


def build(facts: dict[str, bool | int | str]) -> Traced:
    """The microbenchmark of a validated spec: its entry and fake arguments."""
    arguments = (fake_tensor(Float32, (None,), align=4), Int32(1), Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True))
    return Traced(MmaPeakKernel(int(facts["chains"]), int(facts["warps"])), arguments, 0)
