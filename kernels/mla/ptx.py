"""The PTX instructions the traced code uses, one Python function each; addresses are plain integers (shared: Int32, global: Int64).

Block barriers, warp barriers and shuffles go through `cute.arch` and LLVM's intrinsics: inline assembly lacks LLVM's convergent
flag, without which a barrier may be duplicated or moved into divergent code.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

UNSET = -1.0e30
"""Start of a running maximum, and the score of a key that a row does not see."""


def _value(x):
    return x.ir_value() if hasattr(x, "ir_value") else x


def inline(outs, args, text, constraints, *, effects):
    """Emits one inline-assembly statement; returns None, one value or a list of values, as `outs` says."""
    values = [_value(a) for a in args]
    options = {"has_side_effects": effects, "is_align_stack": False, "asm_dialect": llvm.AsmDialect.AD_ATT}
    if not outs:
        llvm.inline_asm(None, values, text, constraints, **options)
        return None
    if len(outs) == 1:
        return outs[0](llvm.inline_asm(outs[0].mlir_type, values, text, constraints, **options))
    kind = llvm.StructType.get_literal([o.mlir_type for o in outs])
    packed = llvm.inline_asm(kind, values, text, constraints, **options)
    return [o(llvm.extractvalue(o.mlir_type, packed, [i])) for i, o in enumerate(outs)]


def _registers(first, count):
    return ", ".join(f"${first + i}" for i in range(count))


# ------------------------------------------------------------------ tensor core


def mma_bf16(c, a, b0, b1):
    """m16n8k16 bf16 product added to the fp32 accumulators `c` (4 values)."""
    return inline(
        [Float32] * 4,
        [*a, b0, b1, *c],
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        effects=False,
    )


def ldmatrix4(address, offset=0, *, transpose=False):
    """Four 8x8 b16 matrices from shared memory; `offset` is a compile-time byte offset."""
    mode = ".trans" if transpose else ""
    return inline(
        [Int32] * 4, [address], f"ldmatrix.sync.aligned.m8n8.x4{mode}.shared.b16 {{$0,$1,$2,$3}}, [$4+{offset}];", "=r,=r,=r,=r,r", effects=True
    )


def ldmatrix2(address, offset=0, *, transpose=False):
    """Two 8x8 b16 matrices, from the addresses of lanes 0 to 15."""
    mode = ".trans" if transpose else ""
    return inline([Int32] * 2, [address], f"ldmatrix.sync.aligned.m8n8.x2{mode}.shared.b16 {{$0,$1}}, [$2+{offset}];", "=r,=r,r", effects=True)


# ------------------------------------------------------------------ shared memory


def store_shared_f32(address, values, offset=0):
    """Stores 1, 2 or 4 consecutive fp32."""
    n = len(values)
    if n == 1:
        inline([], [address, values[0]], f"st.shared.f32 [$0+{offset}], $1;", "r,f", effects=True)
    else:
        inline([], [address, *values], f"st.shared.v{n}.f32 [$0+{offset}], {{{_registers(1, n)}}};", "r" + ",f" * n, effects=True)


def store_shared_f32_if_zero(test, address, value):
    """Stores where `test` is 0, as one predicated instruction."""
    inline([], [test, address, value], "{.reg .pred p; setp.eq.s32 p, $0, 0; @p st.shared.f32 [$1], $2;}", "r,r,f", effects=True)


def store_shared_b32(address, value, offset=0):
    """Stores one 32-bit word."""
    inline([], [address, value], f"st.shared.b32 [$0+{offset}], $1;", "r,r", effects=True)


def load_shared_f32(address, count=1, offset=0):
    """Loads `count` (1, 2 or 4) consecutive fp32, as a list."""
    if count == 1:
        return [inline([Float32], [address], f"ld.shared.f32 $0, [$1+{offset}];", "=f,r", effects=True)]
    text = f"ld.shared.v{count}.f32 {{{_registers(0, count)}}}, [${count}+{offset}];"
    return inline([Float32] * count, [address], text, ",".join(["=f"] * count) + ",r", effects=True)


def load_shared_i32(address, offset=0):
    """Loads one Int32."""
    return inline([Int32], [address], f"ld.shared.b32 $0, [$1+{offset}];", "=r,r", effects=True)


# ------------------------------------------------------------------ global memory


def load_i32(address):
    """A read-only 32-bit load."""
    return inline([Int32], [address], "ld.global.nc.b32 $0, [$1];", "=r,l", effects=True)


def load_i32x4(address):
    """Four Int32 in one load."""
    return inline([Int32] * 4, [address], "ld.global.v4.b32 {$0,$1,$2,$3}, [$4];", "=r,=r,=r,=r,l", effects=True)


def load_f32(address):
    """One fp32, not through the read-only path: another kernel wrote it."""
    return inline([Float32], [address], "ld.global.f32 $0, [$1];", "=f,l", effects=True)


def load_f32x4(address):
    """Four fp32 in one load, likewise."""
    return inline([Float32] * 4, [address], "ld.global.v4.f32 {$0,$1,$2,$3}, [$4];", "=f,=f,=f,=f,l", effects=True)


def store_f32(address, value):
    """Stores one fp32."""
    inline([], [address, value], "st.global.f32 [$0], $1;", "l,f", effects=True)


def store_f32x2(address, a, b, offset=0):
    """Stores two fp32 at a compile-time byte offset."""
    inline([], [address, a, b], f"st.global.v2.f32 [$0+{offset}], {{$1,$2}};", "l,f,f", effects=True)


def store_b32(address, values, offset=0):
    """Stores 1, 2 or 4 consecutive 32-bit words at a compile-time byte offset."""
    n = len(values)
    if n == 1:
        inline([], [address, values[0]], f"st.global.b32 [$0+{offset}], $1;", "l,r", effects=True)
    else:
        inline([], [address, *values], f"st.global.v{n}.b32 [$0+{offset}], {{{_registers(1, n)}}};", "l" + ",r" * n, effects=True)


def prefetch_l2(address):
    """Asks the L2 for the line of an address."""
    inline([], [address], "prefetch.global.L2 [$0];", "l", effects=True)


# ------------------------------------------------------------------ asynchronous copies


def copy16_async(destination, source, destination_offset=0, source_offset=0):
    """16 bytes, global to shared, in the thread's current cp.async group."""
    text = f"cp.async.cg.shared.global.L2::128B [$0+{destination_offset}], [$1+{source_offset}], 16;"
    inline([], [destination, source], text, "r,l", effects=True)


def commit_copies():
    """Closes the current cp.async group."""
    inline([], [], "cp.async.commit_group;", "", effects=True)


def wait_copies():
    """Waits for all of the thread's cp.async groups."""
    inline([], [], "cp.async.wait_group 0;", "~{memory}", effects=True)


def bulk_copy(destination, source, count, mbarrier):
    """`count` bytes, global to shared, completing on `mbarrier`; addresses and count multiples of 16.

    The shared::cta form: with shared::cluster ptxas ignores setmaxnreg on sm_120a and spills hundreds of bytes.
    """
    text = f"cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [$0], [$1], {count}, [$2];"
    inline([], [destination, source, mbarrier], text, "r,l,r", effects=True)


def mbarrier_init(address, count):
    """Sets up an mbarrier for `count` arrivals."""
    inline([], [address], f"mbarrier.init.shared.b64 [$0], {count};", "r", effects=True)


def mbarrier_init_fence():
    """Makes initialised mbarriers visible to asynchronous copies."""
    inline([], [], "fence.mbarrier_init.release.cluster;", "~{memory}", effects=True)


def mbarrier_invalidate(address):
    """Gives an mbarrier's memory back for other use; nobody may still wait on it."""
    inline([], [address], "mbarrier.inval.shared.b64 [$0];", "r,~{memory}", effects=True)


def mbarrier_arrive(address):
    """Arrives at an mbarrier."""
    inline([], [address], "mbarrier.arrive.shared.b64 _, [$0];", "r,~{memory}", effects=True)


def mbarrier_expect(address, count):
    """Arrives, and adds `count` bytes to what the phase waits for."""
    inline([], [address], f"mbarrier.arrive.expect_tx.shared.b64 _, [$0], {count};", "r,~{memory}", effects=True)


def mbarrier_wait(address, phase):
    """Waits until the phase of that parity has completed."""
    text = "{.reg .pred p; WAIT: mbarrier.try_wait.parity.shared.b64 p, [$0], $1; @p bra DONE; bra WAIT; DONE: }"
    inline([], [address, phase], text, "r,r,~{memory}", effects=True)


# ------------------------------------------------------------------ control


def barrier(index, threads):
    """Named barrier of `threads` threads."""
    cute.arch.barrier(barrier_id=index, number_of_threads=threads)


def barrier_any(index, threads, flag):
    """Named barrier; returns 1 in every thread when `flag` (Int32) is nonzero in any of them, else 0."""
    # nvvm.barrier reduces on barrier 0 only; the intrinsic is the same instruction, and convergent too.
    arguments = [Int32(index).ir_value(), Int32(threads).ir_value(), (flag != 0).ir_value()]
    found = llvm.call_intrinsic(T.bool(), "llvm.nvvm.barrier.cta.red.or.aligned.count", arguments, [], [])
    # Opaque, so that a loop over it stays a loop: known to be 0 or 1 it becomes a condition, and that becomes predicates.
    return rematerialise(Int32(Boolean(found)))


def exit_if(condition):
    """Ends the thread where `condition` (Boolean) holds; must be uniform over the block."""
    inline([], [Int32(condition)], "{.reg .pred p; setp.ne.s32 p, $0, 0; @p exit;}", "r,~{memory}", effects=True)


def rematerialise(x):
    """The same Int32, opaque to the optimiser: sums built on it are formed where they are used, not kept in registers over a loop."""
    return inline([Int32], [x], "mov.b32 $0, $1;", "=r,r", effects=True)


def launch_dependents():
    """Lets the next kernel of the stream start its blocks, if it was launched to overlap."""
    cute.arch.griddepcontrol_launch_dependents()


def wait_for_prerequisites():
    """Waits until the kernels before are complete and their writes visible."""
    cute.arch.griddepcontrol_wait()


def warp_sum(x):
    """Sum of an Int32 over the warp, in every lane."""
    return inline([Int32], [x], "redux.sync.add.s32 $0, $1, -1;", "=r,r", effects=True)


def warp_max(x):
    """Maximum of an Int32 over the warp, in every lane."""
    return inline([Int32], [x], "redux.sync.max.s32 $0, $1, -1;", "=r,r", effects=True)


def shuffle_up_or_zero(x, delta):
    """The Int32 of the lane `delta` below, 0 in the first `delta` lanes."""
    return inline(
        [Int32], [x], f"{{.reg .pred p; .reg .b32 v; shfl.sync.up.b32 v|p, $1, {delta}, 0, -1; selp.b32 $0, v, 0, p;}}", "=r,r", effects=True
    )


def shuffle_xor(x, mask):
    """The Float32 of the lane whose index differs by `mask`."""
    return inline([Float32], [x], f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, -1;", "=f,f", effects=True)


# ------------------------------------------------------------------ arithmetic


def pack_bf16(low, high):
    """Two fp32 rounded to one bf16x2 word."""
    return inline([Int32], [high, low], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", effects=False)


def exp2(x):
    """2 to the x, approximate, 0 far below."""
    return inline([Float32], [x], "ex2.approx.ftz.f32 $0, $1;", "=f,f", effects=False)


def log2(x):
    """Base-2 logarithm, approximate."""
    return inline([Float32], [x], "lg2.approx.ftz.f32 $0, $1;", "=f,f", effects=False)


def maximum(a, b):
    """The larger of two Float32."""
    return inline([Float32], [a, b], "max.f32 $0, $1, $2;", "=f,f,f", effects=False)


def multiply_add(a, b, c):
    """a * b + c, rounded once."""
    return inline([Float32], [a, b, c], "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", effects=False)


def reciprocal_or_zero(x):
    """1/x for positive x, else 0: the normaliser of a row that saw nothing."""
    text = "{.reg .pred p; .reg .f32 t; rcp.approx.ftz.f32 t, $1; setp.gt.f32 p, $1, 0f00000000; selp.f32 $0, t, 0f00000000, p;}"
    return inline([Float32], [x], text, "=f,f", effects=False)


def where_below(i, n, x, other):
    """x where i < n (Int32), else other (Float32)."""
    return inline([Float32], [i, n, x, other], "{.reg .pred p; setp.lt.s32 p, $1, $2; selp.f32 $0, $3, $4, p;}", "=f,r,r,f,f", effects=False)


def where_greater(a, b, x, y):
    """x where a > b, else y (all Float32)."""
    return inline([Float32], [a, b, x, y], "{.reg .pred p; setp.gt.f32 p, $1, $2; selp.f32 $0, $3, $4, p;}", "=f,f,f,f,f", effects=False)


def is_greater(a, b):
    """1 where a > b (Float32), else 0."""
    return inline([Int32], [a, b], "{.reg .pred p; setp.gt.f32 p, $1, $2; selp.b32 $0, 1, 0, p;}", "=r,f,f", effects=False)


def divide(a, b):
    """Quotient of two non-negative Int32; b > 0."""
    return inline([Int32], [a, b], "div.u32 $0, $1, $2;", "=r,r,r", effects=False)


def remainder(a, b):
    """Remainder of two non-negative Int32; b > 0."""
    return inline([Int32], [a, b], "rem.u32 $0, $1, $2;", "=r,r,r", effects=False)


def unset_to_zero(x):
    """x, or 0 where it is still the running maximum's start value -1e30."""
    return inline([Float32], [x], "{.reg .pred p; setp.le.f32 p, $1, 0fF149F2CA; selp.f32 $0, 0f00000000, $1, p;}", "=f,f", effects=False)


def total(values):
    """Sum of a list, left to right."""
    result = values[0]
    for value in values[1:]:
        result = result + value
    return result


def largest(values):
    """Maximum of a list."""
    result = values[0]
    for value in values[1:]:
        result = maximum(result, value)
    return result
