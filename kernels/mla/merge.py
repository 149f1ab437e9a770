"""LSE-weighted merge of split partials. Traced code.

The forward kernel leaves a directory entry a packed row: first slot, slots from split to split, number of splits. Rows with
one split, or none, were written by the forward kernel itself and are left alone.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from mlactl.kernels.compiler import Traced
from mlactl.kernels.mla import ptx
from mlactl.kernels.mla.arguments import fake_tensor

THREADS = 256
SHARED_BYTES = THREADS * 24
LOG2E = 1.0 / math.log(2.0)
LN2 = math.log(2.0)
_IN_FLIGHT = 8
"""Splits a thread loads before it uses the first."""


class MergeKernel:
    """`groups` groups of threads take every `groups`-th split of the same columns, 4 columns a thread."""

    def __init__(self, groups: int, latent: int):
        self.groups, self.latent = groups, latent
        self.columns = THREADS // groups
        self.quads = latent // 4

    @cute.kernel
    def kernel(
        self,
        output: cute.Tensor,
        lse: cute.Tensor,
        partial: cute.Tensor,
        partial_lse: cute.Tensor,
        directory: cute.Tensor,
    ):
        """Device code: output [rows, H, latent] and lse [rows, H] of every row that has more than one split."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        group = thread // self.columns
        quad = block * self.columns + thread % self.columns
        row = quad // self.quads
        column = quad % self.quads * 4
        heads = output.shape[1]
        token = ptx.divide(row, heads)
        target = output.iterator.toint() + Int64(token) * Int64(output.stride[0]) * 2 + Int64(row - token * heads) * Int64(output.stride[1]) * 2
        target = target + Int64(column) * 2
        lse_target = lse.iterator.toint() + Int64(row) * 4
        shared = SmemAllocator().allocate(SHARED_BYTES, 16).toint()
        ptx.wait_for_prerequisites()
        if row < output.shape[0] * heads:
            first, step, splits, _ = ptx.load_i32x4(directory.iterator.toint() + Int64(row) * 16)
            if splits > 1:
                sums = self.reduce(partial.iterator.toint(), partial_lse.iterator.toint(), first, step, splits, column, group)
                self.combine(sums, shared, thread, group)
                if group == 0:
                    inverse = ptx.reciprocal_or_zero(sums[4])
                    halves = [ptx.pack_bf16(sums[i] * inverse, sums[i + 1] * inverse) for i in (0, 2)]
                    ptx.store_b32(target, halves)
                    if column == 0:
                        value = Float32(-math.inf)
                        if sums[4] > Float32(0.0):
                            value = sums[5] + ptx.log2(sums[4]) * Float32(LN2)
                        ptx.store_f32(lse_target, value)

    @cute.jit
    def reduce(self, partial: Int64, partial_lse: Int64, first: Int32, step: Int32, splits: Int32, column: Int32, group: Int32):
        """This thread's share of the splits: [4 weighted columns, weight, LSE they are weighted against], in one pass.

        A batch of loads is in flight before the first is used; a batch's tail repeats the last split with weight 0.
        """
        sums = cute.make_rmem_tensor((6,), Float32)
        for i in cutlass.range_constexpr(5):
            sums[i] = Float32(0.0)
        sums[5] = Float32(ptx.UNSET)
        for start in cutlass.range(group, splits, self.groups * _IN_FLIGHT, unroll=1):
            slots = [Int64(first + cutlass.min(start + i * self.groups, splits - 1) * step) for i in range(_IN_FLIGHT)]
            values = [ptx.load_f32x4(partial + (slot * self.latent + Int64(column)) * 4) for slot in slots]
            weights = [ptx.load_f32(partial_lse + slot * 4) for slot in slots]
            weights = [ptx.where_below(start + i * self.groups, splits, x, Float32(-math.inf)) for i, x in enumerate(weights)]
            self.add(sums, [value + [Float32(1.0)] for value in values], weights)
        return sums

    def add(self, sums, terms, lse):
        """Adds terms [4 columns, weight], each with its LSE, to the running sums."""
        peak = ptx.largest([sums[5], *lse])
        factor = ptx.exp2((sums[5] - peak) * Float32(LOG2E))
        scaled = [ptx.exp2((x - peak) * Float32(LOG2E)) for x in lse]
        for i in range(5):
            sums[i] = sums[i] * factor + ptx.total([weight * term[i] for weight, term in zip(scaled, terms, strict=True)])
        sums[5] = peak

    @cute.jit
    def combine(self, sums: cute.Tensor, shared: Int32, thread: Int32, group: Int32):
        """Adds the groups' sums into group 0's, in a fixed order."""
        if cutlass.const_expr(self.groups > 1):
            rest = shared + THREADS * 16
            ptx.store_shared_f32(shared + thread * 16, [sums[i] for i in range(4)])
            ptx.store_shared_f32(rest + thread * 8, [sums[4], sums[5]])
            cute.arch.sync_threads()
            if group == 0:
                places = [thread + other * self.columns for other in range(1, self.groups)]
                statistics = [ptx.load_shared_f32(rest + at * 8, 2) for at in places]
                terms = [ptx.load_shared_f32(shared + at * 16, 4) + [x[0]] for at, x in zip(places, statistics, strict=True)]
                self.add(sums, terms, [x[1] for x in statistics])

    @cute.jit
    def __call__(
        self,
        output: cute.Tensor,
        lse: cute.Tensor,
        partial: cute.Tensor,
        partial_lse: cute.Tensor,
        directory: cute.Tensor,
        stream,
    ):
        """Host code: launches over the rows of `output`."""
        quads = output.shape[0] * output.shape[1] * self.quads
        self.kernel(output, lse, partial, partial_lse, directory).launch(
            grid=[(quads + self.columns - 1) // self.columns, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True
        )


def build(facts: dict[str, bool | int | str]) -> Traced:
    """The merge kernel of a validated, built spec: its entry and fake arguments."""
    latent = int(facts["value_width"])
    arguments = (
        fake_tensor(BFloat16, (None, None, latent), divisibility=8),
        fake_tensor(Float32, (None, None), align=4),
        fake_tensor(Float32, (None, latent)),
        fake_tensor(Float32, (None,)),
        fake_tensor(Int32, (None, 4)),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    return Traced(MergeKernel(int(facts["groups"]), latent), arguments, SHARED_BYTES)
