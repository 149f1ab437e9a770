"""What scales of a checkpoint must be to each other: fused projections, KV scales over layers, use by some layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mlactl.scales.findings import Findings
from mlactl.scales.float32 import text32
from mlactl.scales.inventory import Inventory, layer_of
from mlactl.scales.module_rules import ModuleScales
from mlactl.scales.naming import KV_ROLES, WEIGHTS, fused_group

if TYPE_CHECKING:
    from mlactl.profiles import Profile


def check_fused(modules: Iterable[ModuleScales], findings: Findings) -> None:
    """Scalars of projections that engines fuse into one matrix, which has one global and one activation scale."""
    groups: dict[str, list[ModuleScales]] = {}
    for module in modules:
        found = fused_group(module.name)
        if found is not None:
            groups.setdefault(found[0], []).append(module)
    for group, members in groups.items():
        _compare_members(group, "global scale", [(member, member.multipliers) for member in members], findings)
        _compare_members(group, "input scale", [(member, member.inputs) for member in members], findings)


def _compare_members(group: str, what: str, members: list[tuple[ModuleScales, tuple[float, ...] | None]], findings: Findings) -> None:
    known = [(member, values) for member, values in members if values is not None]
    if len(known) < 2:
        return
    sizes = {len(values) for _, values in known}
    if len(sizes) > 1:
        return
    for index in range(sizes.pop()):
        values = [values[index] for _, values in known]
        if min(values) == max(values):
            continue
        listed = ", ".join(f"{member.name.rpartition('.')[2]} {text32(value)}" for (member, _), value in zip(known, values, strict=True))
        findings.error(
            "fused-scales",
            f"{what} {listed}: ratio {max(values) / min(values):.4g}",
            "one value for the fused matrix",
            "engines keep one of them: the other projections' weights are off by up to that ratio",
            layer=known[0][0].layer,
            tensor=group,
            index=(index,) if len(known[0][1]) > 1 else None,
        )
        return


def check_use(inventory: Inventory, findings: Findings) -> None:
    """Scale tensors without a weight to scale: a misspelt module, or leftovers of another model."""
    if not inventory.modules and not inventory.kv:
        return
    if not any(role in roles for roles in inventory.modules.values() for role in WEIGHTS):
        findings.note("no-weights", "scale tensors only", "the weights beside them", "shapes, and whether a layer uses each scale, were not checked")
        return
    for roles in inventory.modules.values():
        if not any(role in roles for role in WEIGHTS):
            for located in roles.values():
                _unused(inventory, located.name, findings)
    for (module, _), spellings in inventory.kv.items():
        if module not in inventory.parents:
            for located in spellings:
                _unused(inventory, located.name, findings)


def _unused(inventory: Inventory, name: str, findings: Findings) -> None:
    if inventory.partial:
        findings.note(
            "unused-scale", "no weight in what was read", "its weight beside it", "look at the whole checkpoint", layer=layer_of(name), tensor=name
        )
    else:
        findings.error(
            "unused-scale",
            "no weight of that module",
            "a layer that uses it",
            "never read: some layer runs without it",
            layer=layer_of(name),
            tensor=name,
        )


def check_kv_layers(inventory: Inventory, profile: Profile | None, findings: Findings) -> None:
    """A layer without KV scales among layers that have them would run with 1.0."""
    if inventory.partial:
        return
    for role in KV_ROLES:
        having = {layer for module, known in inventory.kv if known is role and (layer := layer_of(module)) is not None}
        for layer in sorted(inventory.attention_layers - having) if having else ():
            drafts = profile.model.layers if profile is not None and profile.model.layers is not None else max(having) + 1
            # Behind the last layer that has one it is likely a draft layer, which is often left unquantised.
            report = findings.error if layer < drafts else findings.warning
            report(
                "missing-layer",
                "absent",
                f"{role.value}, which {len(having)} other layers have",
                "engines run the layer with 1.0: its cache clips or underflows",
                layer=layer,
                tensor=role.value,
            )


def check_deployment(inventory: Inventory, profile: Profile, findings: Findings) -> None:
    """Layer count, draft layers and latent dim of a whole checkpoint against a profile."""
    model = profile.model
    for layer, norm in sorted(inventory.latent_norms.items()):
        if norm.shape != (model.latent_dim,):
            findings.error(
                "latent-dim",
                f"{list(norm.shape)}",
                f"[{model.latent_dim}], the latent dim of profile {profile.name}",
                "another model",
                layer=layer,
                tensor=norm.name,
            )
    if model.layers is None or inventory.partial or not inventory.layers:
        return
    limit = model.layers + model.draft_layers
    for layer in sorted(set(range(model.layers)) - inventory.layers):
        findings.error("missing-layer", "no tensor of it", f"{model.layers} layers of profile {profile.name}", "the model is cut short", layer=layer)
    for layer in sorted(inventory.layers - set(range(limit))):
        findings.error("extra-layer", "present", f"layers below {limit}, draft layers included", "made for another model", layer=layer)
    missing_drafts = sorted(set(range(model.layers, limit)) - inventory.layers)
    if missing_drafts:
        findings.note(
            "draft-layers", f"draft layers {missing_drafts} are not in it", f"{model.draft_layers} draft layers", "they come from another checkpoint"
        )
