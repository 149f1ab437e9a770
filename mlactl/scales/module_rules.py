"""What the scales of one quantised module must be, in the two conventions checkpoints come in.

ModelOpt keeps a multiplier (`weight_scale_2` = amax/2688, under 1), compressed-tensors a divisor
(`weight_global_scale` = 2688/amax, over 1). Loaded, both are the multiplier. docs/scales.md has the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from mlactl.scales.blocks import FLOAT_DTYPES, BlockCounts, unflatten
from mlactl.scales.findings import Findings
from mlactl.scales.float32 import float32, positive_fault, text32
from mlactl.scales.header import Tensor
from mlactl.scales.inventory import layer_of
from mlactl.scales.naming import GLOBALS, INPUTS, WEIGHTS, Role

GROUP = 16
"""Weights that share one E4M3 block scale."""

BLOCK_DTYPES = ("F8_E4M3", "U8")
"""E4M3 stored as itself or as plain bytes; the scan is the same."""

PACKED_DTYPES = {"U8": 2, "I8": 2, "F4": 1}
"""Weight dtypes that hold E2M1, and values per element of the shape."""

UNDERFLOW_SHARE = 0.01
"""Share of blocks under 2^-6 that is worth a warning: a sound weight has none, its largest block sits at 448."""

_WRONG_NAME = {Role.MULTIPLIER: Role.DIVISOR, Role.DIVISOR: Role.MULTIPLIER}


@dataclass(frozen=True, slots=True)
class ModuleScales:
    """Scales of one NVFP4 module, conventions resolved.

    `multipliers` are float32 factors of the whole tensor (one, or one an expert of a batched weight); `written` are the
    values as stored under `stored_as`; `inputs` are activation scales as stored. None where nothing usable is stored.
    """

    name: str
    layer: int | None
    stored_as: Role | None
    written: tuple[float, ...] | None
    multipliers: tuple[float, ...] | None
    inputs: tuple[float, ...] | None
    blocks: BlockCounts | None


def is_nvfp4(roles: dict[Role, Tensor]) -> bool:
    """Whether a module's weights are E2M1 with E4M3 block scales (and not FP8, int4 or unquantised)."""
    scaled = any(role in roles for role in (Role.BLOCK_SCALE, *GLOBALS))
    weight = next((roles[role] for role in WEIGHTS if role in roles), None)
    if weight is not None and (weight.dtype.startswith("F8") or weight.dtype in ("I32", "I64")):
        return False
    return scaled and (any(role in roles for role in GLOBALS) or (weight is not None and weight.dtype in PACKED_DTYPES) or _has_byte_blocks(roles))


def _has_byte_blocks(roles: dict[Role, Tensor]) -> bool:
    return Role.BLOCK_SCALE in roles and roles[Role.BLOCK_SCALE].dtype in BLOCK_DTYPES


def check_layout(module: str, roles: dict[Role, Tensor], partial: bool, findings: Findings) -> None:
    """Names, dtypes and shapes of an NVFP4 module, from the headers alone; `partial`: some tensors were not seen."""
    report_missing = findings.note if partial else findings.error
    layer = layer_of(module)
    block, weight = roles.get(Role.BLOCK_SCALE), next((roles[role] for role in WEIGHTS if role in roles), None)
    if block is None:
        report_missing(
            "missing-scale", "absent", "E4M3 block scales", "its weights cannot be dequantised", layer=layer, tensor=f"{module}.weight_scale"
        )
    elif block.dtype not in BLOCK_DTYPES:
        effect = "its bytes are not E4M3: every weight would be scaled by another number"
        findings.error("block-dtype", block.dtype, " or ".join(BLOCK_DTYPES), effect, layer=layer, tensor=block.name)
    elif weight is not None:
        _check_block_shape(block, weight, layer, findings)
    given = [role for role in GLOBALS if role in roles]
    if len(given) == 2:
        findings.error(
            "convention",
            "weight_scale_2 and weight_global_scale",
            "one of them",
            "a multiplier and a divisor: which one is used is chance",
            layer=layer,
            tensor=module,
        )
    elif not given:
        name = "weight_global_scale" if Role.PACKED in roles else "weight_scale_2"
        findings.error(
            "missing-scale", "absent", "the tensor's global scale", "its weights are off by that factor", layer=layer, tensor=f"{module}.{name}"
        )
    elif (Role.PACKED in roles and given[0] is Role.MULTIPLIER) or (Role.WEIGHT in roles and given[0] is Role.DIVISOR):
        findings.warning(
            "convention",
            f"{given[0].value} beside {next(role for role in WEIGHTS if role in roles).value}",
            "names of one convention",
            "a loader of either convention misses half of them",
            layer=layer,
            tensor=module,
        )


def _check_block_shape(block: Tensor, weight: Tensor, layer: int | None, findings: Findings) -> None:
    values = PACKED_DTYPES.get(weight.dtype)
    if values is None:
        findings.error(
            "weight-dtype", weight.dtype, "packed E2M1 in U8", "the weights are not quantised, yet have block scales", layer=layer, tensor=weight.name
        )
        return
    if not weight.shape or weight.shape[-1] * values % GROUP:
        findings.error(
            "weight-shape",
            f"{list(weight.shape)}",
            f"rows of a multiple of {GROUP} weights",
            "the last group has no scale",
            layer=layer,
            tensor=weight.name,
        )
        return
    expected = (*weight.shape[:-1], weight.shape[-1] * values // GROUP)
    if block.shape != expected:
        what, effect = _shape_name(block.shape, expected)
        findings.error("block-shape", f"{list(block.shape)}{what}", f"{list(expected)} = [out, in/{GROUP}]", effect, layer=layer, tensor=block.name)


def _shape_name(found: tuple[int, ...], expected: tuple[int, ...]) -> tuple[str, str]:
    """What a wrong block-scale shape is, in words, and what loading it would do."""
    if len(expected) >= 2:
        rows, columns, batch = expected[-2], expected[-1], expected[:-2]
        padded = (*batch, -(-rows // 128) * 128, -(-columns // 4) * 4)
        if found == padded:
            return ", padded to 128 rows and 4 columns", "padding rows would be read as scales of the rows behind them"
        if prod(found) in (prod(padded), prod(expected)) and len(found) != len(expected) and min(found, default=0) > 0:
            return ", swizzled for the tensor core", "a loader that expects rows scales every weight by another block's scale"
        if found == (*batch, columns, rows):
            return ", transposed", "every weight is scaled by another block's scale"
        if found == (*batch, rows, columns // 2) and columns % 2 == 0:
            return ", groups of 32: an MXFP4 scale", "E8M0 exponents read as E4M3"
    return "", "weights are scaled by another block's scale, or the load fails"


def check_scalar(tensor: Tensor, values: list[float] | None, role: Role, batch: int | None, findings: Findings) -> tuple[float, ...] | None:
    """Values of a tensor in a scalar slot as float32, None when they cannot be used; `batch` experts may have one each.

    `values` are those read from the file, None when the dtype is no float's or there are too many.
    """
    layer, elements = layer_of(tensor.name), prod(tensor.shape)
    if tensor.dtype not in FLOAT_DTYPES:
        findings.error("scalar-dtype", tensor.dtype, "F32", "read as another type it is another number", layer=layer, tensor=tensor.name)
        return None
    if elements != 1 and elements != batch:
        slot = "one value" if batch is None else f"one value, or one for each of {batch} experts"
        what = f"{elements} values, shape {list(tensor.shape)}" + (": a per-head or per-channel vector" if elements > 1 else "")
        findings.error("vector-in-scalar-slot", what, slot, "engines take the first value or fail to load", layer=layer, tensor=tensor.name)
        return None
    if tensor.dtype != "F32" and role in GLOBALS:
        findings.warning("scalar-dtype", tensor.dtype, "F32", "the factor of every weight is rounded to a few bits", layer=layer, tensor=tensor.name)
    if values is None or len(values) != elements:
        return None
    good = True
    for index, value in enumerate(values):
        good &= _check_value(tensor, role, value, (index,) if elements > 1 else None, findings)
    return tuple(float32(value) for value in values) if good else None


def _check_value(tensor: Tensor, role: Role, value: float, index: tuple[int, ...] | None, findings: Findings) -> bool:
    layer, wrong = layer_of(tensor.name), positive_fault(value)
    if wrong is not None:
        findings.error(wrong[0], text32(value), "a finite value above 0", wrong[1], layer=layer, tensor=tensor.name, index=index)
        return False
    # Only these two give themselves away: activation and KV scales over 1 are legal.
    if (role is Role.MULTIPLIER and value > 1) or (role is Role.DIVISOR and value < 1):
        other, factor = _WRONG_NAME[role], max(value * value, 1 / (value * value))
        findings.error(
            "convention",
            text32(value),
            f"{text32(float32(1 / value))}: this is a {other.value} under the wrong name",
            f"every weight is off by a factor of {factor:.3g}",
            layer=layer,
            tensor=tensor.name,
            index=index,
        )
        return False
    return True


def multipliers(role: Role, values: tuple[float, ...]) -> tuple[float, ...]:
    """Float32 factors that values stored under `weight_scale_2` or `weight_global_scale` stand for."""
    return values if role is Role.MULTIPLIER else tuple(float32(1 / value) for value in values)


def check_blocks(tensor: Tensor, counts: BlockCounts, findings: Findings) -> None:
    """What the scan of one E4M3 tensor found."""
    layer = layer_of(tensor.name)
    for check, hits, expected, effect in (
        ("block-nan", counts.nan, "at most 0x7E (448)", f"the {GROUP} weights of each such block become NaN, and the layer's output with them"),
        ("block-sign", counts.negative, "no sign bit", f"the {GROUP} weights of each such block change sign"),
    ):
        if hits is not None:
            many = f", {hits.count} such bytes" if hits.count > 1 else ", 1 such byte"
            index = unflatten(hits.first_index, tensor.shape)
            findings.error(check, f"0x{hits.first_byte:02X}{many}", expected, effect, layer=layer, tensor=tensor.name, index=index)
    if counts.elements and counts.zeros == counts.elements:
        findings.warning("block-underflow", "every block scale is 0", "scales up to 448", "the whole weight is 0", layer=layer, tensor=tensor.name)
    elif counts.underflow_share > UNDERFLOW_SHARE:
        findings.warning(
            "block-underflow",
            f"{counts.underflow_share:.1%} of block scales under 2^-6",
            "the largest near 448",
            "they have 1 to 3 bits left: the global scale is too large",
            layer=layer,
            tensor=tensor.name,
        )


def input_role(roles: dict[Role, Tensor]) -> Role | None:
    """The role under which a module's activation scale is stored."""
    return next((role for role in INPUTS if role in roles), None)
