"""What a scale is once a kernel has it: float32, with no numpy, and why one must be refused.

The kernels decide on float32(scale): 1.00000001 is identity, 1e-46 is zero and refused (docs/scales.md).
"""

from __future__ import annotations

import math
import struct
from typing import Any

from mlactl.scales.strict_json import Number

SMALLEST_NORMAL = 2.0**-126
DENOMINATOR = 2688.0
"""6 * 448: the largest E2M1 value times the largest E4M3 scale of a group."""

EXPECTED_SCALE = "a finite JSON number above 0"

_FLOAT = struct.Struct("<f")


def float32(value: float) -> float:
    """`value` rounded to float32, as a Python float; what is too large becomes inf of its sign."""
    try:
        return float(_FLOAT.unpack(_FLOAT.pack(value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def fault(value: Any) -> tuple[str, str] | None:
    """Why a JSON value is no scale: (check, what it would do to the model). None when it is one."""
    if not isinstance(value, Number):
        return "not-a-number", "a loader that converts or defaults it would run the layer with a scale nobody measured"
    if value.literal or math.isnan(value.value):
        return "not-finite", "every attention output of the layer becomes NaN"
    return positive_fault(value.value)


def positive_fault(value: float) -> tuple[str, str] | None:
    """Why a double is no scale once it is float32: (check, effect). None when it is finite and above 0 there."""
    if math.isnan(value):
        return "not-finite", "every value it multiplies becomes NaN"
    if math.isinf(float32(value)):
        return "not-finite", "in float32 it is infinite: what is divided by it becomes 0, what it multiplies inf or NaN"
    if value == 0:
        return "not-positive", "dividing by it fills the cache with inf and NaN"
    if value < 0:
        return "not-positive", "no amplitude is negative: the kernels refuse it at launch"
    if float32(value) == 0:
        return "not-positive", "in float32 it is 0: dividing by it fills the cache with inf and NaN"
    return None


def text32(value: float | None) -> str:
    """A float32 for people, in the fewest digits that tell it from its neighbours."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    for digits in range(1, 10):
        made = f"{value:.{digits}g}"
        if float32(float(made)) == float32(value):
            return made
    return repr(value)
