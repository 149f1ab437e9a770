"""Whether two scale files hold the same values, whatever their bytes: written by another tool, they differ in digest.

Values are compared as float32, and a checkpoint's scalars as what they stand for, so that the two conventions of one
model compare equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlactl.scales.findings import Findings
from mlactl.scales.float32 import text32
from mlactl.scales.outer import Examined

if TYPE_CHECKING:
    from mlactl.scales.checkpoint import CheckpointScales
    from mlactl.scales.module_rules import ModuleScales


RECIPROCAL_TOLERANCE = 2.0**-22
"""A divisor and a multiplier of one amax are each rounded to float32 once, so their product is 1 within this."""

_OTHER = "another model, or another calibration"


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many of the values differ; `same_bytes` is None where digests were not taken."""

    other: Path
    compared: int
    differ: int
    same_bytes: bool | None

    def text(self) -> str:
        """`0 of 78 differ, though the digests do`."""
        though = ", though the digests do" if self.same_bytes is False and not self.differ else ""
        same = ", byte for byte the same file" if self.same_bytes else ""
        return f"{self.differ} of {self.compared} differ{though}{same}"


def compare_outer(mine: Examined, other: Examined, findings: Findings) -> Comparison | None:
    """Compares two outer-scale files layer by layer; None, with a finding, when their schemas are not comparable."""
    if mine.record_layout is None or other.record_layout is None or not other.layers:
        findings.error("against", f"{other.path.name} has no scales to compare with", "a scale file of the same format", "nothing was compared")
        return None
    if mine.record_layout != other.record_layout:
        findings.error("against", f"{other.format}", f"{mine.format}", "the schemas' quantisers differ: their scales mean different things")
        return None
    left, right = ({row.layer: row.scale for row in side.layers} for side in (mine, other))
    layers = sorted(set(left) | set(right))
    differ = 0
    for layer in layers:
        one, two = left.get(layer), right.get(layer)
        if one is None or two is None or one != two:
            differ += 1
            _report(layer, None, _one(one), _one(two), other.path, findings)
    return Comparison(other.path, len(layers), differ, mine.sha256 == other.sha256)


def compare_checkpoints(mine: CheckpointScales, other: CheckpointScales, findings: Findings) -> Comparison:
    """Compares every scalar and every E4M3 tensor of two checkpoints by module name."""
    from mlactl.scales.block_compare import differing_blocks
    from mlactl.scales.inventory import layer_of

    names = sorted(set(mine.modules) | set(other.modules))
    differ = compared = 0
    for name, one, two in _pairs(mine.modules, other.modules, names):
        compared += 1
        if not _same_module(one, two):
            differ += 1
            layer = layer_of(name)
            _report(layer, name, _factor(one), _factor(two), other.path, findings)
    for key in sorted(set(mine.kv) | set(other.kv)):
        compared += 1
        left, right = mine.kv.get(key), other.kv.get(key)
        if left is None or right is None or left != right:
            differ += 1
            _report(layer_of(key[0]), ".".join(key), _one(left), _one(right), other.path, findings)
    blocks, different = differing_blocks(mine.inventory, other.inventory)
    for name, layer, index, left_byte, right_byte in different:
        findings.error(
            "differs",
            f"0x{left_byte:02X}",
            f"0x{right_byte:02X} in {other.path.name}",
            "another checkpoint, or another calibration",
            layer=layer,
            tensor=name,
            index=index,
        )
    return Comparison(other.path, compared + blocks, differ + len(different), None)


def _pairs(
    mine: Mapping[str, ModuleScales], other: Mapping[str, ModuleScales], names: list[str]
) -> Iterator[tuple[str, ModuleScales | None, ModuleScales | None]]:
    for name in names:
        yield name, mine.get(name), other.get(name)


def _same_module(one: ModuleScales | None, two: ModuleScales | None) -> bool:
    if one is None or two is None or one.multipliers is None or two.multipliers is None or len(one.multipliers) != len(two.multipliers):
        return False
    if one.stored_as is two.stored_as:
        return one.written == two.written
    written = zip(one.written or (), two.written or (), strict=True)
    return all(abs(left * right - 1) <= RECIPROCAL_TOLERANCE for left, right in written)


def _report(layer: int | None, tensor: str | None, mine: str, theirs: str, other: Path, findings: Findings) -> None:
    findings.error("differs", mine, f"{theirs} in {other.name}", _OTHER, layer=layer, tensor=tensor)


def _factor(module: ModuleScales | None) -> str:
    return "absent" if module is None or not module.multipliers else text32(module.multipliers[0])


def _one(value: float | None) -> str:
    return "absent" if value is None else text32(value)
