"""What each outer-scale format must hold, and whether it fits a deployment.

`nvfp4_ds_mla_outer_scale_v1` is a list over all decoder layers, `glm-nvfp4-mla-gscale-v1` a map from full layer names.
Their quantisers differ, so one is never converted into the other. docs/scales.md has the fields.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlactl.scales.findings import Findings, plain
from mlactl.scales.float32 import DENOMINATOR, EXPECTED_SCALE, SMALLEST_NORMAL, fault, float32, text32
from mlactl.scales.strict_json import JsonObject, Number, shown

if TYPE_CHECKING:
    from mlactl.profiles import Profile

FORMAT_V1 = "nvfp4_ds_mla_outer_scale_v1"
FORMAT_V2 = "nvfp4_ds_mla_outer_scale_v2"
SCHEMA_GSCALE = "glm-nvfp4-mla-gscale-v1"
ALGORITHM_GSCALE = "nvfp4-e2m1-e4m3-four-over-six"
RECORD_GSCALE = "glm-zero-rope-288b"

LAYER_IN_NAME = re.compile(r"(?:^|\.)layers\.(\d{1,9})(?=\.|$)")
"""The first `layers.<n>` of a module's name is its zero-based decoder layer."""

LATENT_DIM = 512
"""Elements of the latent in every record that an outer scale is for."""

MAX_INTEGER = 2**31 - 1
"""Far over any model's layers, and what a runtime's C int can hold."""

FIELDS_V1 = ("format", "num_layers", "latent_dim", "denominator", "scales", "max_abs")
FIELDS_OF_FIT = ("measured_max_abs", "headroom")
"""What `mlactl scales fit --headroom` adds, for audit; a loader of the format does not read them."""

_MISSING_EFFECT = "a strict runtime does not start; a lenient one runs the layer with 1.0"
_IDENTITY_EFFECT = (
    "no restoring multiply anywhere; shallow layers' group scales fall under E4M3's range (reported prefill KLD 0.158 to 0.168, not 0.135)"
)
_AMPLITUDE_EFFECT = "the scale cannot be held against its amplitude; a loader that does so refuses the file"
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class LayerScale:
    """One layer of a file: `scale` is float32 and None when the file holds no usable number there."""

    layer: int
    name: str | None
    scale: float | None
    max_abs: float | None

    @property
    def variant(self) -> str | None:
        """Which kernel variant the layer launches: identity for a float32 scale of exactly 1.0, else dynamic."""
        return None if self.scale is None else "identity" if self.scale == 1.0 else "dynamic"


def check_v1(root: JsonObject, findings: Findings) -> tuple[tuple[LayerScale, ...], int | None]:
    """Layers and latent dim of a v1 object; every fault is added to `findings`."""
    count = _integer(root, "num_layers", 1, findings, "the runtime compares it with the model's decoder layers")
    latent_dim = _integer(root, "latent_dim", 1, findings, "the runtime compares it with the model's latent")
    if latent_dim not in (None, LATENT_DIM):
        findings.error("latent-dim", str(latent_dim), str(LATENT_DIM), "the scales were measured on another latent", tensor="latent_dim")
    denominator = root.get("denominator", _ABSENT)
    if not isinstance(denominator, Number) or denominator.value != DENOMINATOR:
        value = "absent" if denominator is _ABSENT else shown(denominator)
        findings.error("denominator", value, "2688.0", "the largest group scale misses the top of E4M3's range by that factor", tensor="denominator")
    scales = _numbers(root, "scales", count, findings)
    amplitudes = _numbers(root, "max_abs", count, findings) if "max_abs" in root else []
    layers = tuple(
        LayerScale(index, None, None if scale is None else float32(scale), amplitudes[index] if index < len(amplitudes) else None)
        for index, scale in enumerate(scales)
    )
    if not _is_reciprocal(layers, findings):
        _check_amplitudes(layers, scales, findings)
    _check_fit_fields(root, layers, findings)
    _check_values(layers, findings)
    _unknown_fields(root, (*FIELDS_V1, *FIELDS_OF_FIT), findings)
    return layers, latent_dim


def _integer(root: JsonObject, name: str, least: int, findings: Findings, effect: str) -> int | None:
    value = root.get(name, _ABSENT)
    number = value.integer() if isinstance(value, Number) else None
    if isinstance(value, Number) and value.integral and value.value > MAX_INTEGER:
        findings.error(name.replace("_", "-"), shown(value), f"an integer of at most {MAX_INTEGER}", effect, tensor=name)
        return None
    if number is None or number < least:
        findings.error(name.replace("_", "-"), "absent" if value is _ABSENT else shown(value), f"an integer of at least {least}", effect, tensor=name)
        return None
    return number


def _numbers(root: JsonObject, name: str, count: int | None, findings: Findings) -> list[float | None]:
    """The values of a per-layer list as doubles, None for each that is no scale."""
    values = root.get(name, _ABSENT)
    if not isinstance(values, list):
        expected = "a list of one number a layer" if count is None else f"a list of {count} numbers"
        effect = "no layer has a scale" if name == "scales" else _AMPLITUDE_EFFECT
        findings.error("not-a-list", "absent" if values is _ABSENT else shown(values), expected, effect, tensor=name)
        if isinstance(values, JsonObject):
            _same_layer_keys(values, findings)
        return []
    if count is not None:
        _check_count(name, len(values), count, findings)
    made: list[float | None] = []
    for index, value in enumerate(values):
        wrong = fault(value)
        if wrong is not None:
            effect = wrong[1] if name == "scales" else _AMPLITUDE_EFFECT
            findings.error(wrong[0], shown(value), EXPECTED_SCALE, effect, layer=index, tensor=name, index=(index,))
        made.append(value.value if wrong is None else None)
    return made


def _check_count(name: str, found: int, expected: int, findings: Findings) -> None:
    if found == expected:
        return
    amplitudes = name == "max_abs"
    first, last = sorted((found, expected))
    which = f"layer {first}" if last - first == 1 else f"layers {first} to {last - 1}"
    if found < expected:
        findings.error(
            "layer-count",
            f"{found} values, none for {which}",
            f"{expected} values",
            _AMPLITUDE_EFFECT if amplitudes else _MISSING_EFFECT,
            layer=first,
            tensor=name,
        )
    else:
        findings.error(
            "layer-count",
            f"{found} values, {which} too many",
            f"{expected} values",
            _AMPLITUDE_EFFECT if amplitudes else "made for another model, or a layer is doubled and all behind it are shifted",
            layer=first,
            tensor=name,
        )


def _is_reciprocal(layers: tuple[LayerScale, ...], findings: Findings) -> bool:
    """Whether every scale is 2688 / max_abs, said once and not of each layer; without max_abs it is only a suspicion."""
    pairs = [(layer.scale, layer.max_abs) for layer in layers if layer.scale is not None and layer.max_abs is not None]
    if pairs:
        turned = all(math.isclose(scale, DENOMINATOR / max_abs, rel_tol=1e-6) for scale, max_abs in pairs)
        if not turned or all(scale == float32(max_abs / DENOMINATOR) for scale, max_abs in pairs):
            return False
        findings.error(
            "reciprocal",
            f"every one of {len(pairs)} scales is 2688 / max_abs",
            "max_abs / 2688",
            "this is the reciprocal: latents under 2688 are scaled down where they must be scaled up, and E4M3's range is missed",
            tensor="scales",
        )
        return True
    known = [layer.scale for layer in layers if layer.scale is not None]
    if known and len(known) == len(layers) and min(known) > 1:
        findings.warning(
            "reciprocal",
            f"every scale is above 1, from {text32(min(known))} to {text32(max(known))}",
            "max_abs / 2688 of each layer",
            "amplitudes above 2688; is this the reciprocal (2688 / max_abs)?",
            tensor="scales",
        )
    return False


def _check_amplitudes(layers: tuple[LayerScale, ...], scales: list[float | None], findings: Findings) -> None:
    for layer, scale in zip(layers, scales, strict=True):
        if scale is None or layer.max_abs is None:
            continue
        # Files written from fp32 differ in double, so both sides are rounded first.
        expected = float32(layer.max_abs / DENOMINATOR)
        if layer.scale != expected:
            smaller = float32(scale) < expected
            effect = (
                "group scales clip at 448: the layer's largest latents are cut"
                if smaller
                else "group scales lie lower than they need to, near E4M3's floor"
            )
            findings.error(
                "not-max-abs",
                repr(scale),
                f"{text32(expected)} = max_abs {layer.max_abs!r} / 2688",
                effect,
                layer=layer.layer,
                tensor="scales",
                index=(layer.layer,),
            )


def _check_fit_fields(root: JsonObject, layers: tuple[LayerScale, ...], findings: Findings) -> None:
    if not set(FIELDS_OF_FIT) & set(root):
        return
    headroom, measured = root.get("headroom"), root.get("measured_max_abs")
    if not isinstance(headroom, Number) or fault(headroom) is not None or not isinstance(measured, list) or len(measured) != len(layers):
        findings.warning(
            "fit-fields", f"headroom {shown(headroom)}", "headroom and measured_max_abs of every layer", "for audit only; no loader reads it"
        )
        return
    for layer, value in zip(layers, measured, strict=True):
        if layer.max_abs is not None and (fault(value) is not None or float32(value.value * headroom.value) != float32(layer.max_abs)):
            findings.warning(
                "fit-fields",
                f"{shown(value)} * {shown(headroom)}",
                f"max_abs {layer.max_abs!r}",
                "for audit only; no loader reads it",
                layer=layer.layer,
                tensor="measured_max_abs",
                index=(layer.layer,),
            )


def _check_values(layers: tuple[LayerScale, ...], findings: Findings) -> None:
    known = [layer for layer in layers if layer.scale is not None]
    for layer in known:
        if layer.scale is not None and layer.scale < SMALLEST_NORMAL:
            findings.warning(
                "subnormal",
                text32(layer.scale),
                "at least 2^-126",
                "code that flushes subnormals to zero divides by 0",
                layer=layer.layer,
                tensor=layer.name or "scales",
                index=None if layer.name else (layer.layer,),
            )
    if known and len(known) == len(layers) and all(layer.scale == 1.0 for layer in known):
        findings.warning("all-identity", f"every one of {len(known)} scales is 1.0", "max_abs / 2688 of each layer", _IDENTITY_EFFECT)


def _unknown_fields(root: JsonObject, known: tuple[str, ...], findings: Findings) -> None:
    for name in root:
        if name not in known:
            findings.note("unknown-field", shown(root[name]), "no such field in this format", "not read", tensor=name)


def check_gscale(root: JsonObject, findings: Findings) -> tuple[LayerScale, ...]:
    """Layers of a gscale object, in layer order; every fault is added to `findings`."""
    for name, expected in (("algorithm", ALGORITHM_GSCALE), ("record_layout", RECORD_GSCALE)):
        if root.get(name) != expected:
            value = shown(root[name]) if name in root else "absent"
            findings.error(name.replace("_", "-"), value, f'"{expected}"', "the scales belong to another quantiser or record", tensor=name)
    _unknown_fields(root, ("schema", "algorithm", "record_layout", "layers"), findings)
    entries = root.get("layers", _ABSENT)
    if not isinstance(entries, JsonObject) or not entries:
        value = "absent" if entries is _ABSENT else shown(entries)
        findings.error("no-layers", value, "an object of full layer names", "no layer has a scale", tensor="layers")
        return ()
    _same_layer_keys(entries, findings)
    found: dict[int, LayerScale] = {}
    for name, entry in entries.items():
        layer = layer_of_key(name)
        scale = _gscale_value(name, layer, entry, findings)
        if layer is None or not _is_canonical(name):
            findings.error(
                "layer-name",
                f'"{plain(name)}"',
                "a module's full name with layers.<n>",
                "no module is called so: its layer counts as missing",
                layer=layer,
                tensor=name,
            )
        elif layer not in found:
            found[layer] = LayerScale(layer, name, scale, None)
    _check_gaps(found, findings)
    layers = tuple(found[layer] for layer in sorted(found))
    _check_values(layers, findings)
    return layers


def _gscale_value(name: str, layer: int | None, entry: Any, findings: Findings) -> float | None:
    if not isinstance(entry, JsonObject) or "latent_scale" not in entry:
        findings.error("not-a-number", shown(entry), 'an object with "latent_scale"', _MISSING_EFFECT, layer=layer, tensor=name)
        return None
    value = entry["latent_scale"]
    wrong = fault(value)
    if wrong is not None:
        findings.error(wrong[0], shown(value), EXPECTED_SCALE, wrong[1], layer=layer, tensor=name)
        return None
    for field in entry:
        if field != "latent_scale":
            findings.note("unknown-field", shown(entry[field]), "no such field in this format", "not read", layer=layer, tensor=f"{name}.{field}")
    return float32(value.value)


def layer_of_key(name: str) -> int | None:
    """The layer that a JSON key means: the first `layers.<n>` of a module's name, or a bare number."""
    found = LAYER_IN_NAME.search(name)
    return int(found[1]) if found else int(name) if re.fullmatch(r"[0-9]{1,9}", name) else None


def _is_canonical(name: str) -> bool:
    found = LAYER_IN_NAME.search(name)
    return found is not None and str(int(found[1])) == found[1]


def _same_layer_keys(entries: JsonObject, findings: Findings) -> None:
    first: dict[int, str] = {}
    for name in entries:
        layer = layer_of_key(name)
        if layer is not None and first.setdefault(layer, name) != name:
            findings.error(
                "same-layer",
                f'"{plain(first[layer])}" and "{plain(name)}"',
                f"one key for layer {layer}",
                "which one a loader takes is chance",
                layer=layer,
                tensor=name,
            )


def _check_gaps(found: dict[int, LayerScale], findings: Findings) -> None:
    # A huge index must not make a finding for every number below it.
    last = max(found, default=-1)
    missing = last + 1 - len(found)
    if missing > 10 * max(len(found), 10):
        findings.error(
            "missing-layer", f"{missing} layers below {last} are absent", "every layer by name", _MISSING_EFFECT, layer=last, tensor="layers"
        )
        return
    for layer in range(last):
        if layer not in found:
            findings.error("missing-layer", "absent", "every layer by name", _MISSING_EFFECT, layer=layer, tensor="layers")


def check_v1_deployment(layers: tuple[LayerScale, ...], latent_dim: int | None, profile: Profile, findings: Findings) -> None:
    """Whether a v1 file serves the profile's model: layer count, latent dim, record and draft layers."""
    from mlactl.profiles import STATIC_NVFP4

    model, record = profile.model, profile.kv.record
    if record not in STATIC_NVFP4:
        effect = "the file stays unread: those records have no outer scale, and their kernels refuse any but 1.0"
        findings.error("record-layout", f"profile {profile.name} stores {record}", " or ".join(STATIC_NVFP4), effect, tensor="format")
    if latent_dim is not None and latent_dim != model.latent_dim:
        findings.error(
            "latent-dim", str(latent_dim), f"{model.latent_dim} of profile {profile.name}", "measured on another model", tensor="latent_dim"
        )
    if model.layers is None:
        findings.warning(
            "layer-count", f"{len(layers)} scales", f"model.layers in profile {profile.name}", "nothing says how many layers the model has"
        )
    elif layers:
        _check_count(f"scales against profile {profile.name}", len(layers), model.layers, findings)
    if model.draft_layers and model.layers is not None:
        first, last = model.layers, model.layers + model.draft_layers - 1
        which = f"layer {first}" if first == last else f"layers {first} to {last}"
        findings.note(
            "draft-layers",
            f"draft {which} not in the file",
            "1.0, by convention of the format",
            "they launch the identity variant, which must be warm beside the dynamic one",
            layer=first,
        )


def check_gscale_deployment(layers: tuple[LayerScale, ...], profile: Profile, findings: Findings) -> None:
    """Whether a gscale file serves the profile's model. It never does: no kernel here reads its record."""
    findings.error(
        "record-layout",
        RECORD_GSCALE,
        f"{profile.kv.record} of profile {profile.name}",
        "no kernel reads this layout: the file is for another engine",
        tensor="record_layout",
    )
    if profile.model.layers is None:
        return
    found = {layer.layer for layer in layers}
    for layer in range(max(found, default=-1) + 1, profile.model.layers):
        findings.error(
            "missing-layer", "absent", f"all {profile.model.layers} layers of profile {profile.name}", _MISSING_EFFECT, layer=layer, tensor="layers"
        )
    for layer in sorted(found):
        if layer >= profile.model.layers + profile.model.draft_layers:
            findings.error(
                "extra-layer",
                "present",
                f"layers below {profile.model.layers + profile.model.draft_layers}",
                "made for another model",
                layer=layer,
                tensor="layers",
            )
