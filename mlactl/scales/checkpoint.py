"""Checkpoint scales: headers, scalars and block scales of safetensors files, without reading a weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from mlactl.scales import group_rules, module_rules
from mlactl.scales.blocks import FLOAT_DTYPES, unflatten
from mlactl.scales.findings import Findings, InvalidScales, Severity
from mlactl.scales.float32 import text32
from mlactl.scales.header import Tensor
from mlactl.scales.inventory import Inventory, layer_of, take_inventory
from mlactl.scales.module_rules import BLOCK_DTYPES, ModuleScales
from mlactl.scales.naming import GLOBALS, INPUTS, WEIGHTS, Role
from mlactl.scales.reading import Progress, Readings, Work, no_progress, read_all
from mlactl.scales.shards import find

if TYPE_CHECKING:
    from mlactl.profiles import Profile

MAX_SCALAR_VALUES = 4096
"""More experts than any model has; a longer tensor in a scalar slot is reported by its shape and never read."""

Modules = Mapping[str, dict[Role, Tensor]]


@dataclass(frozen=True, slots=True)
class CheckpointScales:
    """Every NVFP4 module's and attention module's scales, conventions and spellings resolved.

    `modules` by module name; `kv` float32 by (attention module, role); `block_bytes` were scanned.
    """

    path: Path
    modules: Mapping[str, ModuleScales]
    kv: Mapping[tuple[str, Role], float]
    layers: tuple[int, ...]
    block_bytes: int
    inventory: Inventory

    @property
    def conventions(self) -> str:
        """What the module scales are named after: ModelOpt, compressed-tensors, both, or none where there are none."""
        roles = {module.stored_as for module in self.modules.values()}
        names = [name for role, name in ((Role.MULTIPLIER, "ModelOpt"), (Role.DIVISOR, "compressed-tensors")) if role in roles]
        return " and ".join(names) or ("KV scales" if self.kv else "no NVFP4 scales")

    def by_layer(self) -> dict[int, list[ModuleScales]]:
        """Modules of each decoder layer."""
        made: dict[int, list[ModuleScales]] = {}
        for module in self.modules.values():
            if module.layer is not None:
                made.setdefault(module.layer, []).append(module)
        return made

    def kv_by_layer(self) -> dict[tuple[int, str], float]:
        """KV scales by (decoder layer, role)."""
        return {(layer, role.value): value for (module, role), value in self.kv.items() if (layer := layer_of(module)) is not None}


def load_checkpoint_scales(path: Path, profile: Profile | None = None) -> CheckpointScales:
    """Loads a checkpoint's scales for use. Raises CannotRun, UsageError, and InvalidScales with every finding."""
    found, findings = examine(path, profile)
    errors = tuple(row for row in findings.rows() if row.severity is Severity.ERROR)
    if errors:
        more = f" (and {findings.count(Severity.ERROR) - 1} more)" if len(errors) > 1 else ""
        raise InvalidScales(f"{path}: {errors[0].sentence()}{more}", errors, hint=f"mlactl verify-scales {path}")
    return found


def examine(path: Path, profile: Profile | None = None, progress: Progress = no_progress) -> tuple[CheckpointScales, Findings]:
    """Reads and checks a checkpoint's scales; raises CannotRun or UsageError when there is nothing that can be read."""
    findings = Findings()
    shards = find(path, findings)
    with progress("reading headers", len(shards.files), "files") as on_file:
        inventory = take_inventory(shards, findings, on_file)
    quantised = {module: roles for module, roles in inventory.modules.items() if module_rules.is_nvfp4(roles)}
    for module, roles in quantised.items():
        module_rules.check_layout(module, roles, inventory.partial, findings)
    readings = read_all(inventory.shards.files, _plan(inventory, quantised), progress)
    for file, reason in readings.failures:
        findings.error("unreadable", reason, "the bytes its header promises", "what is behind them was not checked", tensor=file.name)
    modules = {module: _resolve(module, roles, readings, findings) for module, roles in quantised.items()}
    kv = _resolve_kv(inventory, readings, findings)
    _check_fp8(inventory, readings, findings)
    _report_scope(inventory, quantised, kv, findings)
    group_rules.check_fused(modules.values(), findings)
    group_rules.check_use(inventory, findings)
    group_rules.check_kv_layers(inventory, profile, findings)
    if profile is not None:
        group_rules.check_deployment(inventory, profile, findings)
    scanned = sum(counts.elements for counts in readings.blocks.values())
    return CheckpointScales(path, modules, kv, tuple(sorted(inventory.layers)), scanned, inventory), findings


def _plan(inventory: Inventory, quantised: Modules) -> list[Work]:
    work = [Work() for _ in inventory.shards.files]
    for module, roles in inventory.modules.items():
        for role, located in roles.items():
            if module not in quantised:
                if _is_fp8_scale(roles, role):
                    work[located.shard].floats.append(located)
            elif role is Role.BLOCK_SCALE and located.dtype in BLOCK_DTYPES:
                work[located.shard].blocks.append(located)
            elif role in (*GLOBALS, *INPUTS) and _is_short(located):
                work[located.shard].scalars.append(located)
    for spellings in inventory.kv.values():
        for located in spellings:
            if _is_short(located):
                work[located.shard].scalars.append(located)
    return work


def _is_short(tensor: Tensor) -> bool:
    return tensor.dtype in FLOAT_DTYPES and prod(tensor.shape) <= MAX_SCALAR_VALUES


def _is_fp8_scale(roles: dict[Role, Tensor], role: Role) -> bool:
    weight = roles.get(Role.WEIGHT)
    return (
        weight is not None
        and weight.dtype.startswith("F8")
        and role in (Role.BLOCK_SCALE, Role.FP8_BLOCK_SCALE, Role.INPUT_MULTIPLIER)
        and roles[role].dtype in FLOAT_DTYPES
    )


def _resolve(module: str, roles: dict[Role, Tensor], readings: Readings, findings: Findings) -> ModuleScales:
    """One module's scales as the kernels use them; what cannot be used is a finding and None."""
    weight = next((roles[role] for role in WEIGHTS if role in roles), None)
    batch = weight.shape[0] if weight is not None and len(weight.shape) == 3 else None
    stored_as = next((role for role in GLOBALS if role in roles), None)
    written = None if stored_as is None else _scalar(roles[stored_as], stored_as, batch, readings, findings)
    input_as = module_rules.input_role(roles)
    inputs = None if input_as is None else _scalar(roles[input_as], input_as, batch, readings, findings)
    block = roles.get(Role.BLOCK_SCALE)
    counts = None if block is None else readings.blocks.get(block.name)
    if block is not None and counts is not None:
        module_rules.check_blocks(block, counts, findings)
    factors = None if stored_as is None or written is None else module_rules.multipliers(stored_as, written)
    return ModuleScales(module, layer_of(module), stored_as, written, factors, inputs, counts)


def _scalar(located: Tensor, role: Role, batch: int | None, readings: Readings, findings: Findings) -> tuple[float, ...] | None:
    return module_rules.check_scalar(located, readings.scalars.get(located.name), role, batch, findings)


def _resolve_kv(inventory: Inventory, readings: Readings, findings: Findings) -> dict[tuple[str, Role], float]:
    """One value an attention module and role, whichever way it is spelled; two spellings must agree."""
    made: dict[tuple[str, Role], float] = {}
    for (module, role), spellings in inventory.kv.items():
        values = [(located.name, _scalar(located, role, None, readings, findings)) for located in spellings]
        known = [(name, value[0]) for name, value in values if value is not None]
        if not known:
            continue
        made[module, role] = known[0][1]
        if len(known) > 1:
            names = " and ".join(name for name, _ in known)
            layer, numbers = layer_of(module), [value for _, value in known]
            if min(numbers) != max(numbers):
                listed = ", ".join(f"{name} {text32(value)}" for name, value in known)
                expected = "one value for the attention module"
                findings.error(
                    "kv-spellings", listed, expected, "which one is used depends on the order of loading", layer=layer, tensor=f"{module}.{role}"
                )
            else:
                findings.note("kv-spellings", names, "one spelling", "equal, so both mean the same", layer=layer, tensor=f"{module}.{role}")
    return made


def _check_fp8(inventory: Inventory, readings: Readings, findings: Findings) -> None:
    shapes = {located.name: located.shape for roles in inventory.modules.values() for located in roles.values()} if readings.bad_floats else {}
    for name, (flat, value) in readings.bad_floats.items():
        index = unflatten(flat, shapes[name]) or None
        check = "not-positive" if value <= 0 else "not-finite"
        findings.error(
            check,
            text32(value),
            "finite values above 0",
            "the FP8 weights it scales come out as 0, NaN or negated",
            layer=layer_of(name),
            tensor=name,
            index=index,
        )


def _report_scope(inventory: Inventory, quantised: Modules, kv: Mapping[tuple[str, Role], float], findings: Findings) -> None:
    """What was not checked, and that there was anything to check: an empty verdict must not look like a good one."""
    others = inventory.other_scales
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        findings.note(
            "unknown-scale",
            f"{others[0]}{more}",
            "names of docs/scales.md",
            "not checked: no rule here knows them",
            tensor=others[0],
            layer=layer_of(others[0]),
        )
    scaled = any(_is_fp8_scale(roles, role) for roles in inventory.modules.values() for role in roles)
    if not quantised and not inventory.kv and not scaled and not inventory.damaged:
        findings.error("no-scales", "no quantised module and no KV scale", "NVFP4 weights or KV scales", "there is nothing here to verify")
