"""Outer-scale files: the one loader that the command, warmup and the kernels' callers share.

Formats and their fields are those of docs/scales.md. Imports neither torch nor numpy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlactl.errors import UsageError
from mlactl.scales import outer_rules
from mlactl.scales.files import read_bytes
from mlactl.scales.findings import Findings, InvalidScales, Severity
from mlactl.scales.float32 import DENOMINATOR
from mlactl.scales.outer_rules import FORMAT_V1, FORMAT_V2, LAYER_IN_NAME, SCHEMA_GSCALE, LayerScale
from mlactl.scales.strict_json import Document, JsonObject, MalformedJson, parse, shown

if TYPE_CHECKING:
    from mlactl.profiles import Profile

RECORD_V1 = "nvfp4_ds_mla"
RECORD_GSCALE = "glm-zero-rope-288b"


@dataclass(frozen=True, slots=True)
class OuterScales:
    """A valid outer-scale file.

    `layers` are in layer order, `sha256` is of the file's bytes. `identities` are the `latent_scale_identity` values of
    every kernel variant a deployment of this file launches: 1 where a layer's float32 scale is 1.0 or a draft layer
    runs, 0 for every other scale.
    """

    path: Path
    format: str
    record_layout: str
    latent_dim: int | None
    sha256: str
    layers: tuple[LayerScale, ...]
    draft_layers: int

    @property
    def scales(self) -> tuple[float, ...]:
        """The float32 scale of each decoder layer."""
        return tuple(layer.scale for layer in self.layers if layer.scale is not None)

    @property
    def identity_layers(self) -> tuple[int, ...]:
        """Decoder layers whose float32 scale is exactly 1.0."""
        return tuple(layer.layer for layer in self.layers if layer.scale == 1.0)

    @property
    def identities(self) -> tuple[int, ...]:
        """Values of `latent_scale_identity` to have compiled, in ascending order."""
        return identities_of(self.layers, self.draft_layers)

    def scale_of(self, module: str | int) -> float:
        """The float32 scale of a layer index or of a module's full name; draft layers, at and past the last, run with 1.0."""
        if isinstance(module, str):
            found = LAYER_IN_NAME.search(module)
            if found is None:
                raise KeyError(f"no layers.<n> in {module!r}")
            module = int(found[1])
        if module < 0:
            raise KeyError(f"layer {module}")
        return self.scales[module] if module < len(self.layers) else 1.0

    def dump(self) -> bytes:
        """The file again, in its own format; what it holds loads to equal scales."""
        if self.format == FORMAT_V1:
            return dump_v1(self.layers, self.latent_dim or 512)
        return _as_bytes(
            {
                "schema": SCHEMA_GSCALE,
                "algorithm": outer_rules.ALGORITHM_GSCALE,
                "record_layout": RECORD_GSCALE,
                "layers": {layer.name: {"latent_scale": layer.scale} for layer in self.layers},
            }
        )


@dataclass(frozen=True, slots=True)
class Examined:
    """An outer-scale file with whatever is wrong with it: `layers` holds what could be read, in layer order."""

    path: Path
    format: str | None
    record_layout: str | None
    latent_dim: int | None
    sha256: str
    layers: tuple[LayerScale, ...]
    findings: Findings


def identities_of(layers: tuple[LayerScale, ...], draft_layers: int) -> tuple[int, ...]:
    """`latent_scale_identity` values that these layers and that many draft layers (which run with 1.0) launch."""
    needed = {int(layer.scale == 1.0) for layer in layers if layer.scale is not None}
    return tuple(sorted(needed | ({1} if draft_layers else set())))


def load_outer_scales(path: Path, profile: Profile | None = None) -> OuterScales:
    """Loads an outer-scale file for use; with a profile it must also fit that deployment.

    Raises CannotRun when the file cannot be read, InvalidScales, with every finding, when it must not be used, and UsageError
    for a profile's name in place of the profile.
    """
    found = examine(path, profile)
    errors = [row for row in found.findings.rows() if row.severity is Severity.ERROR]
    if errors or found.format is None or found.record_layout is None:
        count = found.findings.count(Severity.ERROR)
        more = f" (and {count - 1} more)" if count > 1 else ""
        option = f" --profile {profile.name}" if profile is not None else ""
        raise InvalidScales(f"{path}: {errors[0].sentence()}{more}", tuple(errors), hint=f"mlactl verify-scales {path}{option}")
    draft = profile.model.draft_layers if profile is not None else 0
    return OuterScales(path, found.format, found.record_layout, found.latent_dim, found.sha256, found.layers, draft)


def examine(path: Path, profile: Profile | None = None) -> Examined:
    """Reads and checks an outer-scale file; raises CannotRun only when its bytes cannot be read, UsageError for a profile's name."""
    if isinstance(profile, (str, Path)):
        raise UsageError(f"profile is {str(profile)!r}, expected a Profile", hint=f"mlactl.profiles.load({str(profile)!r}) loads one")
    return examine_bytes(path, read_bytes(path), profile)


def examine_bytes(path: Path, data: bytes, profile: Profile | None = None) -> Examined:
    """Checks the bytes of an outer-scale file; `path` is only recorded."""
    findings, digest = Findings(), hashlib.sha256(data).hexdigest()
    try:
        document = parse(data)
    except MalformedJson as error:
        findings.error("malformed-json", str(error), "one JSON object in UTF-8", "nothing can be loaded")
        return Examined(path, None, None, None, digest, (), findings)
    report_document(document, findings)
    if not isinstance(document.root, JsonObject):
        findings.error("malformed-json", shown(document.root), "a JSON object", "nothing can be loaded")
        return Examined(path, None, None, None, digest, (), findings)
    return _examine_object(path, document.root, digest, findings, profile)


def report_document(document: Document, findings: Findings) -> None:
    """What the JSON itself has against it, whatever it means."""
    report_mark(document.byte_order_mark, findings)
    for path in document.duplicates:
        report_duplicate(path, findings)


def report_mark(marked: bool, findings: Findings) -> None:
    """Says that a byte order mark was there; it is read all the same."""
    if marked:
        effect = "read here all the same; loaders that use Python's json refuse the file"
        findings.warning("byte-order-mark", "the file begins with EF BB BF", "plain UTF-8", effect)


def report_duplicate(path: str, findings: Findings) -> None:
    """Says that a key, by its path in the document, comes more than once."""
    findings.error("duplicate-key", "the key comes more than once", "one value a key", "loaders keep the last value in silence", tensor=path)


def _examine_object(path: Path, root: JsonObject, digest: str, findings: Findings, profile: Profile | None) -> Examined:
    name = root.get("format", root.get("schema"))
    layers: tuple[LayerScale, ...] = ()
    latent_dim: int | None = None
    record: str | None = None
    if root.get("format") == FORMAT_V1:
        record = RECORD_V1
        layers, latent_dim = outer_rules.check_v1(root, findings)
        if profile is not None:
            outer_rules.check_v1_deployment(layers, latent_dim, profile, findings)
    elif root.get("schema") == SCHEMA_GSCALE:
        record = RECORD_GSCALE
        layers = outer_rules.check_gscale(root, findings)
        if profile is not None:
            outer_rules.check_gscale_deployment(layers, profile, findings)
    elif FORMAT_V2 in (root.get("format"), root.get("schema")):
        findings.error(
            "unsupported-format",
            FORMAT_V2,
            f"{FORMAT_V1} or {SCHEMA_GSCALE}",
            "known, but its fields are not public: nothing in it was checked, and no kernel here may use it",
            tensor="format",
        )
    else:
        findings.error(
            "unknown-format",
            "absent" if name is None else shown(name),
            f'"format": "{FORMAT_V1}" or "schema": "{SCHEMA_GSCALE}"',
            "nothing says what the numbers mean",
            tensor="format" if "format" in root or "schema" not in root else "schema",
        )
    known = name if isinstance(name, str) and (record is not None or name == FORMAT_V2) else None
    return Examined(path, known, record, latent_dim, digest, layers, findings)


def dump_v1(layers: tuple[LayerScale, ...], latent_dim: int, extra: Mapping[str, Any] | None = None) -> bytes:
    """A v1 file of these layers, `max_abs` kept where every layer has one; `extra` fields come last."""
    document: dict[str, Any] = {"format": FORMAT_V1, "num_layers": len(layers), "latent_dim": latent_dim, "denominator": DENOMINATOR}
    document["scales"] = [layer.scale for layer in layers]
    if layers and all(layer.max_abs is not None for layer in layers):
        document["max_abs"] = [layer.max_abs for layer in layers]
    return _as_bytes({**document, **(extra or {})})


def _as_bytes(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, allow_nan=False) + "\n").encode()
