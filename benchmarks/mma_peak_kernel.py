"""Compiles the mma.sync microbenchmark: a kernel of nothing but bf16 m16n8k16 products on registers; needs no GPU.

python benchmarks/mma_peak_kernel.py OBJECT.so --arch sm_90a
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream
from mma_peak import CHAINS, SYMBOL, WARPS

from mlactl.kernels import compiler
from mlactl.kernels.mla import ptx
from mlactl.kernels.mla.arguments import fake_tensor


class Peak:
    """Independent chains of products in every warp."""

    @cute.kernel
    def kernel(self, sink: cute.Tensor, rounds: Int32):
        thread, _, _ = cute.arch.thread_idx()
        sums = cute.make_rmem_tensor((CHAINS * 4,), Float32)
        for i in cutlass.range_constexpr(CHAINS * 4):
            sums[i] = Float32(0.0)
        # Bit patterns of small bf16 numbers that differ from thread to thread: constant operands run faster than real ones.
        a = [(thread * (2 * i + 3) & 0x007F007F) | 0x3F003F00 for i in range(4)]
        b = [(thread * (2 * i + 5) & 0x007F007F) | 0xBF003F00 - 0x100000000 for i in range(2)]
        for _ in cutlass.range(rounds, unroll=4):
            for chain in cutlass.range_constexpr(CHAINS):
                new = ptx.mma_bf16([sums[chain * 4 + e] for e in range(4)], a, b[0], b[1])
                for e in cutlass.range_constexpr(4):
                    sums[chain * 4 + e] = new[e]
        total = Float32(0.0)
        for i in cutlass.range_constexpr(CHAINS * 4):
            total = total + sums[i]
        sink[thread] = total

    @cute.jit
    def __call__(self, sink: cute.Tensor, rounds: Int32, blocks: Int32, stream):
        self.kernel(sink, rounds).launch(grid=[blocks, 1, 1], block=[32 * WARPS, 1, 1], stream=stream)


def compile_object(path: Path, arch: str) -> None:
    """Compiles and links the microbenchmark for `arch`."""
    compiler.load_export_libraries()
    arguments = (fake_tensor(Float32, (None,), align=4), Int32(1), Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True))
    compiled = cute.compile(Peak(), *arguments, options=" ".join(compiler.compile_options(arch)))
    relocatable = path.with_suffix(".o")
    compiled.export_to_c(str(relocatable), function_name=SYMBOL)
    subprocess.run(["ld", "-shared", "--build-id=none", "--hash-style=gnu", "-o", path, relocatable], check=True)
    relocatable.unlink()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("object", type=Path)
    parser.add_argument("--arch", required=True)
    options = parser.parse_args()
    compile_object(options.object, options.arch)
