"""Makes a v1 outer-scale file from measured latent amplitudes: `scale = max_abs * headroom / 2688` as float32.

Only v1 is written. The two schemas' quantisers differ, so there is no conversion from one into the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlactl.errors import UsageError
from mlactl.regular_files import write_file
from mlactl.scales.files import read_bytes
from mlactl.scales.findings import Findings, InvalidScales, Severity, plain
from mlactl.scales.float32 import DENOMINATOR, fault, float32
from mlactl.scales.outer import dump_v1, examine_bytes, report_document
from mlactl.scales.outer_rules import LATENT_DIM, LayerScale, layer_of_key
from mlactl.scales.strict_json import JsonObject, MalformedJson, parse, shown

if TYPE_CHECKING:
    from mlactl.profiles import Profile

SHAPES = 'a list of max_abs by layer, or an object of layers, or either under "max_abs" or "layers"'


@dataclass(frozen=True, slots=True)
class Fitted:
    """A v1 file ready to be written, and its layers."""

    data: bytes
    layers: tuple[LayerScale, ...]


def fit(path: Path, headroom: float = 1.0, profile: Profile | None = None, *, measured: Sequence[float] | None = None) -> Fitted:
    """Reads per-layer amplitudes and computes the file; raises CannotRun, UsageError, and InvalidScales naming each fault.

    `measured` holds the amplitudes by layer where they came from elsewhere (captures); `path` is then only named in messages.
    With a profile the file must also fit that deployment. With a head room over 1 the file's `max_abs` is the amplitude
    that the scale is for, as the format wants, and `measured_max_abs` and `headroom` keep what was measured.
    """
    if not (math.isfinite(headroom) and headroom >= 1):
        raise UsageError(
            f"a head room of {headroom}, expected a factor of at least 1", hint="1.1 leaves room for latents a tenth larger than measured"
        )
    measured = _amplitudes(path) if measured is None else list(measured)
    layers = []
    for layer, amplitude in enumerate(measured):
        max_abs = amplitude * headroom
        layers.append(LayerScale(layer, None, float32(max_abs / DENOMINATOR), max_abs))
    extra = {"measured_max_abs": measured, "headroom": headroom} if headroom != 1 else None
    found = tuple(layers)
    # A scale may still leave float32's range; the file is judged by the loader before it exists.
    data = dump_v1(found, LATENT_DIM, extra) if all(math.isfinite(row.max_abs or 0) and math.isfinite(row.scale or 0) for row in found) else b""
    judged = examine_bytes(path, data, profile).findings if data else _out_of_range(found)
    _raise_if_invalid(path, judged, f"mlactl profile show {profile.name}" if profile is not None else "measure the amplitudes again")
    return Fitted(data, found)


def write(data: bytes, target: Path, *, force: bool, source: Path | None = None) -> None:
    """Writes a file that is complete whenever it is there, never over the amplitudes in `source`.

    Raises UsageError for an existing file without `force` and for what is no regular file at all, CannotRun.
    """
    write_file(data, target, force=force, sources=() if source is None else (source,))


def _amplitudes(path: Path) -> list[float]:
    findings = Findings()
    try:
        document = parse(read_bytes(path))
    except MalformedJson as error:
        findings.error("malformed-json", str(error), SHAPES, "nothing to fit")
        _raise_if_invalid(path, findings)
        raise AssertionError("unreachable") from error
    report_document(document, findings)
    values = _by_layer(document.root, findings)
    made = []
    for layer, value in enumerate(values):
        wrong = fault(value)
        if wrong is not None:
            findings.error(
                wrong[0], shown(value), "a finite max_abs above 0", "a scale must not be made up", layer=layer, tensor="max_abs", index=(layer,)
            )
        else:
            made.append(value.value)
    _raise_if_invalid(path, findings)
    return made


def _by_layer(root: Any, findings: Findings) -> list[Any]:
    """One JSON value a layer, in layer order; gaps and strangers are findings."""
    if isinstance(root, JsonObject):
        root = root.get("max_abs", root.get("layers", root))
    if isinstance(root, list) and root:
        return root
    if not isinstance(root, JsonObject) or not root:
        findings.error("amplitudes", shown(root), SHAPES, "nothing to fit")
        return []
    found: dict[int, Any] = {}
    for name, value in root.items():
        layer = layer_of_key(name)
        if layer is None:
            findings.error("layer-name", f'"{plain(name)}"', "a layer's number or a name with layers.<n>", "it belongs to no layer", tensor=name)
        elif layer in found:
            findings.error("same-layer", f'"{plain(name)}"', f"one key for layer {layer}", "which one counts is chance", layer=layer, tensor=name)
        else:
            found[layer] = value.get("max_abs") if isinstance(value, JsonObject) else value
    missing = sorted(set(range(min(max(found, default=-1) + 1, 10 * len(found) + 10))) - set(found))
    for layer in missing:
        findings.error("missing-layer", "absent", "every layer from 0", "a scale must not be made up", layer=layer, tensor="max_abs")
    return [] if missing else [found[layer] for layer in sorted(found)]


def _out_of_range(layers: tuple[LayerScale, ...]) -> Findings:
    findings = Findings()
    for row in layers:
        if not math.isfinite(row.max_abs or 0) or not math.isfinite(row.scale or 0):
            findings.error("not-finite", f"max_abs {row.max_abs}", "an amplitude of float32's range", "its scale is infinite", layer=row.layer)
    return findings


def _raise_if_invalid(path: Path, findings: Findings, hint: str = f"AMPLITUDES.json is {SHAPES}") -> None:
    errors = tuple(row for row in findings.rows() if row.severity is Severity.ERROR)
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise InvalidScales(f"{path}: {errors[0].sentence()}{more}", errors, hint=hint)
