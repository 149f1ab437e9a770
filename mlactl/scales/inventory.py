"""What a checkpoint holds, from its headers alone: quantised modules, KV scales, and which layers there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mlactl.scales.files import open_regular
from mlactl.scales.findings import Findings, plain
from mlactl.scales.header import BadHeader, Tensor, tensors
from mlactl.scales.naming import ATTENTION_PROJECTIONS, KV_ROLES, WEIGHTS, Role, names_a_scale, role_of
from mlactl.scales.outer_rules import LAYER_IN_NAME
from mlactl.scales.shards import Shards


@dataclass(slots=True)
class Inventory:
    """Tensors that matter here, by module. Filled by `take_inventory`, read by everything else.

    `kv` holds every spelling found for one attention module's scale; `latent_norms` are the widths of the norm after
    the down projection, one a layer, which is the latent dim.
    """

    shards: Shards
    modules: dict[str, dict[Role, Tensor]] = field(default_factory=dict)
    kv: dict[tuple[str, Role], list[Tensor]] = field(default_factory=dict)
    parents: set[str] = field(default_factory=set)
    layers: set[int] = field(default_factory=set)
    attention_layers: set[int] = field(default_factory=set)
    latent_norms: dict[int, Tensor] = field(default_factory=dict)
    other_scales: list[str] = field(default_factory=list)
    damaged: int = 0

    @property
    def partial(self) -> bool:
        """True when tensors of the checkpoint were not seen: one shard was named, one is missing or one is damaged."""
        return self.shards.partial or self.damaged > 0


def layer_of(name: str) -> int | None:
    """The decoder layer in a tensor's name, None outside the layers."""
    found = LAYER_IN_NAME.search(name)
    return int(found[1]) if found else None


def take_inventory(shards: Shards, findings: Findings, on_file: Callable[[int], None] = lambda _: None) -> Inventory:
    """Reads every shard's header; a damaged one is a finding and the others are still read. Raises CannotRun.

    Takes tensors out of `shards.weight_map` as it meets them: for a large model that map is most of the memory.
    """
    made = Inventory(shards)
    expected = shards.weight_map
    seen: set[str] = set()
    for number, path in enumerate(shards.files):
        try:
            with open_regular(path) as (descriptor, size):
                # All of them first: a header is good only at its end, and half of one would look like missing scales.
                found = tensors(descriptor, size, number)
            for tensor in found:
                _check_place(tensor.name, path, expected, seen, findings)
                _add(made, tensor)
        except BadHeader as error:
            made.damaged += 1
            where = f"{path.name}: {error.tensor}" if error.tensor else path.name
            findings.error("bad-header", error.found, error.expected, "no tensor of this file can be trusted", tensor=where)
        except OSError as error:
            made.damaged += 1
            findings.error("unreadable", error.strerror or "read error", "a file that can be read", "its tensors were not checked", tensor=path.name)
        on_file(1)
    if expected and not made.damaged:
        _report_absent(expected, {path.name for path in shards.files}, findings)
    return made


def _check_place(name: str, path: Path, expected: dict[str, str] | None, seen: set[str], findings: Findings) -> None:
    if expected is None:
        if name in seen:
            findings.error(
                "duplicate-tensor",
                f"again in {plain(path.name)}",
                "one file a tensor",
                "which one is loaded is chance",
                tensor=name,
                layer=layer_of(name),
            )
        seen.add(name)
        return
    shard = expected.pop(name, None)
    if shard is None:
        findings.error(
            "index",
            f"in {plain(path.name)}",
            "named by the index, once",
            "engines that follow the index do not load it",
            tensor=name,
            layer=layer_of(name),
        )
    elif shard != path.name:
        findings.error(
            "index", f"in {plain(path.name)}", f"in {plain(shard)}, as the index says", "it will not load", tensor=name, layer=layer_of(name)
        )


def _report_absent(expected: dict[str, str], read: set[str], findings: Findings) -> None:
    for name, shard in expected.items():
        if shard in read:
            findings.error("index", "absent", f"in {plain(shard)}, as the index says", "it will not load", tensor=name, layer=layer_of(name))


def _add(made: Inventory, tensor: Tensor) -> None:
    layer = layer_of(tensor.name)
    if layer is not None:
        made.layers.add(layer)
    found = role_of(tensor.name)
    if found is None:
        if names_a_scale(tensor.name):
            made.other_scales.append(tensor.name)
        return
    module, role = found
    if role in KV_ROLES:
        made.kv.setdefault((module, role), []).append(tensor)
        return
    parent, _, last = module.rpartition(".")
    if role in WEIGHTS:
        made.parents.add(parent)
        if layer is not None and last in ATTENTION_PROJECTIONS:
            made.attention_layers.add(layer)
        if layer is not None and last == "kv_a_layernorm":
            made.latent_norms[layer] = tensor
    made.modules.setdefault(module, {}).setdefault(role, tensor)
