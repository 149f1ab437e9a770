"""The PTX instructions that quantised records add: narrow conversions, f16 products, register transposes, the gather of records. Traced code.

Words are Int32; a "pair" is an f16x2 or bf16x2 word, its lower half first. Addresses are plain integers, as in `ptx`.
"""

from __future__ import annotations

from cutlass import Float32, Int32

from mlactl.kernels.mla.ptx import inline

# ------------------------------------------------------------------ tensor core


def mma_f16(c, a, b0, b1):
    """m16n8k16 f16 product added to the fp32 accumulators `c` (4 values)."""
    return inline(
        [Float32] * 4,
        [*a, b0, b1, *c],
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        effects=False,
    )


def mma_k8(c, a, b, *, kind):
    """m16n8k8 product of `kind` f16 or bf16 added to the fp32 accumulators `c`; `a` has 2 words, `b` is one."""
    return inline(
        [Float32] * 4,
        [*a, b, *c],
        f"mma.sync.aligned.m16n8k8.row.col.f32.{kind}.{kind}.f32 {{$0,$1,$2,$3}}, {{$4,$5}}, {{$6}}, {{$7,$8,$9,$10}};",
        "=f,=f,=f,=f,r,r,r,f,f,f,f",
        effects=False,
    )


def transpose_pairs(word):
    """Transpose of the warp's 8x8 matrix of 16-bit elements: row = lane / 4, two columns a lane."""
    return inline([Int32], [word], "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", effects=True)


# ------------------------------------------------------------------ shared and global memory


def _words(first, count):
    return ", ".join(f"${first + i}" for i in range(count))


def load_shared_words(address, count, offset=0):
    """`count` (1, 2 or 4) 32-bit words, aligned to their total size."""
    if count == 1:
        return [inline([Int32], [address], f"ld.shared.b32 $0, [$1+{offset}];", "=r,r", effects=True)]
    text = f"ld.shared.v{count}.b32 {{{_words(0, count)}}}, [${count}+{offset}];"
    return inline([Int32] * count, [address], text, ",".join(["=r"] * count) + ",r", effects=True)


def load_shared_u8(address, offset=0):
    """One byte, zero-extended."""
    return inline([Int32], [address], f"{{.reg .b16 h; ld.shared.u8 h, [$1+{offset}]; cvt.u32.u16 $0, h;}}", "=r,r", effects=True)


def load_shared_u16(address, offset=0):
    """Two bytes, zero-extended."""
    return inline([Int32], [address], f"{{.reg .b16 h; ld.shared.u16 h, [$1+{offset}]; cvt.u32.u16 $0, h;}}", "=r,r", effects=True)


def load_words(address, count, offset=0):
    """`count` (1, 2 or 4) read-only 32-bit words of global memory, aligned to their total size."""
    if count == 1:
        return [inline([Int32], [address], f"ld.global.nc.b32 $0, [$1+{offset}];", "=r,l", effects=True)]
    text = f"ld.global.nc.v{count}.b32 {{{_words(0, count)}}}, [${count}+{offset}];"
    return inline([Int32] * count, [address], text, ",".join(["=r"] * count) + ",l", effects=True)


def store_f32x4(address, values, offset=0):
    """16 bytes to global memory."""
    inline([], [address, *values], f"st.global.v4.f32 [$0+{offset}], {{$1,$2,$3,$4}};", "l,f,f,f,f", effects=True)


def gather(destination, pitch, count, size, source, mbarrier):
    """Bulk copies of `count` records of `size` bytes to every `pitch` bytes from `destination`, and one arrival at `mbarrier` that expects them.

    source: the address of a record in each of the first `count` lanes. One lane copies; it gets the others' addresses by
    broadcast, which makes them the warp's: an instruction a copy instead of a loop over lanes.
    """
    lines = [
        "{.reg .pred p; .reg .b32 l, h; .reg .b64 a; elect.sync _|p, -1;",
        f"@p mbarrier.arrive.expect_tx.shared.b64 _, [$2], {count * size};",
    ]
    for record in range(count):
        lines += [
            "mov.b64 {l, h}, $1;",
            *(f"shfl.sync.idx.b32 {half}, {half}, {record}, 31, -1;" for half in "lh"),
            "mov.b64 a, {l, h};",
            f"@p cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [$0+{record * pitch}], [a], {size}, [$2];",
        ]
    inline([], [destination, source, mbarrier], " ".join(lines) + "}", "r,l,r,~{memory}", effects=True)


def count_negative(value):
    """How many lanes of the warp hold a negative Int32."""
    text = "{.reg .pred p; .reg .b32 m; setp.lt.s32 p, $1, 0; vote.sync.ballot.b32 m, p, -1; popc.b32 $0, m;}"
    return inline([Int32], [value], text, "=r,r", effects=True)


def from_lane(value, lane):
    """The Int32 that lane number `lane` of the warp holds."""
    return inline([Int32], [value, lane], "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", "=r,r,r", effects=True)


def clear16(address):
    """Zeros 16 bytes of shared memory."""
    inline([], [address], "{.reg .b32 z; mov.b32 z, 0; st.shared.v4.b32 [$0], {z, z, z, z};}", "r,~{memory}", effects=True)


def async_proxy_fence():
    """Orders this thread's stores to shared memory before later asynchronous copies to it."""
    inline([], [], "fence.proxy.async.shared::cta;", "~{memory}", effects=True)


def mbarrier_expect_bytes(address, count):
    """Arrives, and adds `count` (Int32) bytes to what the phase waits for."""
    inline([], [address, count], "mbarrier.arrive.expect_tx.shared.b64 _, [$0], $1;", "r,r,~{memory}", effects=True)


def mbarrier_arrive_if_zero(test, address):
    """Arrives at an mbarrier where `test` is 0, as one predicated instruction."""
    text = "{.reg .pred p; setp.eq.s32 p, $0, 0; @p mbarrier.arrive.shared.b64 _, [$1];}"
    inline([], [test, address], text, "r,r,~{memory}", effects=True)


# ------------------------------------------------------------------ conversions


def permute(a, b, selector):
    """Bytes picked from the 8 bytes of (a, b) by the four nibbles of `selector`."""
    return inline([Int32], [a, b], f"prmt.b32 $0, $1, $2, 0x{selector:04x};", "=r,r,r", effects=False)


def where_equal(a, b, x, y):
    """x where a == b, else y (all Int32)."""
    return inline([Int32], [a, b, x, y], "{.reg .pred p; setp.eq.s32 p, $1, $2; selp.b32 $0, $3, $4, p;}", "=r,r,r,r,r", effects=False)


def inside_or_none(index, count):
    """`index` where it is in [0, count), else -1 (all Int32)."""
    return inline([Int32], [index, count], "{.reg .pred p; setp.lo.u32 p, $1, $2; selp.b32 $0, $1, -1, p;}", "=r,r,r", effects=False)


def where_valid(slot, x, other):
    """x where `slot` (Int32) is not negative, else other (Float32)."""
    return inline([Float32], [slot, x, other], "{.reg .pred p; setp.ge.s32 p, $1, 0; selp.f32 $0, $2, $3, p;}", "=f,r,f,f", effects=False)


def reciprocal(x):
    """1/x, approximately."""
    return inline([Float32], [x], "rcp.approx.ftz.f32 $0, $1;", "=f,f", effects=False)


def bf16_pair_to_f16(word):
    """A bf16 pair as an f16 pair: exact from 2^-14 up, infinite past 65,504."""
    text = "{.reg .b32 a, b; .reg .f32 f, g; shl.b32 a, $1, 16; and.b32 b, $1, 0xffff0000; mov.b32 f, a; mov.b32 g, b; cvt.rn.f16x2.f32 $0, g, f;}"
    return inline([Int32], [word], text, "=r,r", effects=False)


def scale_bf16_pair(word, power):
    """A bf16 pair times 2^power, exact short of under- and overflow."""
    half = (127 + power) << 7
    return inline([Int32], [word], f"{{.reg .b32 c; mov.b32 c, 0x{half:04x}{half:04x}; mul.rn.bf16x2 $0, $1, c;}}", "=r,r", effects=False)


def pack_f16(low, high):
    """Two fp32 rounded to an f16 pair."""
    return inline([Int32], [high, low], "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", effects=False)


def e4m3_pair(word):
    """The two lower E4M3 bytes of a word as an f16 pair, exact."""
    return inline([Int32], [word], "{.reg .b16 l, h; mov.b32 {l,h}, $1; cvt.rn.f16x2.e4m3x2 $0, l;}", "=r,r", effects=False)


def e4m3_quad(word):
    """Four E4M3 bytes as two f16 pairs, exact."""
    text = "{.reg .b16 l, h; mov.b32 {l,h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h;}"
    return inline([Int32] * 2, [word], text, "=&r,=&r,r", effects=False)


def e4m3_twice(byte):
    """The lowest E4M3 byte of a word in both halves of an f16 pair, exact."""
    return e4m3_pair(permute(byte, byte, 0x0000))


def f16_pair_to_bf16(pair, factor):
    """An f16 pair times an fp32 factor, rounded once, as a bf16 pair."""
    text = (
        "{.reg .b16 l, h; .reg .f32 f, g; mov.b32 {l,h}, $1; cvt.f32.f16 f, l; cvt.f32.f16 g, h; "
        "mul.rn.f32 f, f, $2; mul.rn.f32 g, g, $2; cvt.rn.bf16x2.f32 $0, g, f;}"
    )
    return inline([Int32], [pair, factor], text, "=r,r,f", effects=False)


E2M1_PAIRS = ((0, 2), (4, 6), (1, 3), (5, 7))
"""Which nibbles of a word `e2m1_octet` returns together."""


def e2m1_octet(word, scale):
    """Eight packed E2M1 as four f16 pairs in the order of `E2M1_PAIRS`, times 2^-6 and times the f16 pair `scale`.

    Even and odd nibbles are widened to E4M3 bytes: sign to the top, the three magnitude bits under the lowest exponent
    bits, which reads as the value times 2^-6, subnormals included. Times an E4M3 scale that is exact in f16: multiples of
    2^-16 of at most 42.
    """
    mask = "0x1C1C1C1C"
    text = (
        "{.reg .b32 a, b, e, d, x; .reg .b16 l, h; "
        f"shl.b32 a, $4, 4; shl.b32 b, $4, 2; and.b32 b, b, {mask}; lop3.b32 e, a, 0x80808080, b, 0xEA; "
        f"shr.u32 b, $4, 2; and.b32 b, b, {mask}; lop3.b32 d, $4, 0x80808080, b, 0xEA; "
        "mov.b32 {l,h}, e; cvt.rn.f16x2.e4m3x2 x, l; mul.rn.f16x2 $0, x, $5; cvt.rn.f16x2.e4m3x2 x, h; mul.rn.f16x2 $1, x, $5; "
        "mov.b32 {l,h}, d; cvt.rn.f16x2.e4m3x2 x, l; mul.rn.f16x2 $2, x, $5; cvt.rn.f16x2.e4m3x2 x, h; mul.rn.f16x2 $3, x, $5;}"
    )
    return inline([Int32] * 4, [word, scale], text, "=&r,=&r,=&r,=&r,r,r", effects=False)
