"""Fake tensor arguments that kernels are traced with."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor


def fake_tensor(dtype, shape, *, align=16, divisibility=1):
    """A tensor of any extents (None: any) whose last dimension is contiguous; other strides are multiples of `divisibility`."""
    extents = tuple(cute.sym_int() if extent is None else extent for extent in shape)
    strides = tuple(cute.sym_int64(divisibility=divisibility) for _ in shape[1:])
    return make_fake_tensor(dtype, extents, (*strides, 1), assumed_align=align)
