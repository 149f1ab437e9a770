"""How much of a layer's captured latents falls under E4M3's normal range with the layer's outer scale.

A scale file alone cannot tell; latents can. A latents file is a safetensors file with one `[tokens, latent_dim]` float
tensor a layer, the normed `kv_c` of some prompt, `layers.<n>` in its name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mlactl.scales.blocks import FLOAT_DTYPES, Truncated, read_floats
from mlactl.scales.files import open_regular
from mlactl.scales.findings import Findings
from mlactl.scales.header import BadHeader, Tensor, tensors
from mlactl.scales.inventory import layer_of

GROUP = 16
TOKENS_A_STEP = 512
MAX_WIDTH = 8192
"""Far over any latent; bounds what a step reads."""

UNDERFLOW_SHARE = 0.01
"""Share of a layer's group scales under 2^-6 that is worth a warning."""

_NORMAL = 2.0**-6
_TO_ZERO = 2.0**-10
"""Half of the smallest subnormal: round to even takes this and less to 0."""


@dataclass(frozen=True, slots=True)
class LatentRange:
    """Group scales of one layer's captured latents: shares of the groups that are not all zero.

    `underflow_share` lie under 2^-6 (subnormal or zero), `zero_share` become 0, so that the group is stored as zeros.
    """

    layer: int
    groups: int
    max_abs: float
    underflow_share: float
    zero_share: float


def measure(path: Path, scales: Mapping[int, float], findings: Findings) -> dict[int, LatentRange]:
    """Reads a latents file and judges each layer with its scale; raises CannotRun when the file cannot be read."""
    made: dict[int, LatentRange] = {}
    intact = True
    with open_regular(path) as (descriptor, size):
        try:
            for tensor in tensors(descriptor, size):
                layer = layer_of(tensor.name)
                if layer is None or not _is_latent(tensor):
                    found = f"{tensor.dtype} {list(tensor.shape)}"
                    findings.warning("latents", found, "[tokens, latent_dim] of floats, layers.<n> in its name", "not measured", tensor=tensor.name)
                elif layer in scales and layer not in made:
                    made[layer] = _measure(descriptor, tensor, layer, scales[layer], findings)
        except (BadHeader, Truncated, OSError) as error:
            intact = False
            findings.error("latents", str(error), f"{path.name} to be an intact safetensors file", "the share under 2^-6 is not known")
    if intact and scales and not any(found.groups or math.isnan(found.max_abs) for found in made.values()):
        expected = f"latents that are not all zero, of at least one of layers {min(scales)} to {max(scales)}"
        findings.warning("latents-none", f"{path.name} has none for any layer of this file", expected, "nothing was measured")
    for layer in sorted(set(scales) - set(made)):
        findings.note("latents", "no latents", f"a tensor of the layer in {path.name}", "its share under 2^-6 is not known", layer=layer)
    return made


def _is_latent(tensor: Tensor) -> bool:
    shape = tensor.shape
    return len(shape) == 2 and tensor.dtype in FLOAT_DTYPES and 0 not in shape and shape[1] % GROUP == 0 and shape[1] <= MAX_WIDTH


def _measure(descriptor: int, tensor: Tensor, layer: int, scale: float, findings: Findings) -> LatentRange:
    tokens, width = tensor.shape
    groups = under = zero = 0
    largest = 0.0
    for token in range(0, tokens, TOKENS_A_STEP):
        values = np.abs(read_floats(descriptor, tensor, token * width, TOKENS_A_STEP * width))
        if not np.isfinite(values).all():
            findings.error("latents", "NaN or infinity", "finite latents", "the capture is of no use for this layer", layer=layer, tensor=tensor.name)
            return LatentRange(layer, 0, float("nan"), 0.0, 0.0)
        amplitudes = values.reshape(-1, GROUP).max(axis=1)
        live = amplitudes[amplitudes > 0]
        group_scales = _group_scales(live, scale)
        groups += int(live.size)
        under += int(np.count_nonzero(group_scales < _NORMAL - 2.0**-10))
        zero += int(np.count_nonzero(group_scales <= _TO_ZERO))
        largest = max(largest, float(amplitudes.max(initial=0.0)))
    found = LatentRange(layer, groups, largest, under / max(groups, 1), zero / max(groups, 1))
    if found.underflow_share > UNDERFLOW_SHARE:
        findings.warning(
            "latent-underflow",
            f"{found.underflow_share:.1%} of {groups} group scales under 2^-6, {found.zero_share:.1%} become 0",
            f"at most {UNDERFLOW_SHARE:.0%}",
            "they keep 1 to 3 bits or none: small latents are lost",
            layer=layer,
            tensor=tensor.name,
        )
    return found


def _group_scales(amplitudes: npt.NDArray[np.float32], scale: float) -> npt.NDArray[np.float32]:
    """What the writer rounds to E4M3: amax16 of kv_c / s_l over 6, in fp32 as the writer has it."""
    with np.errstate(over="ignore", under="ignore"):
        return (amplitudes / np.float32(scale)) / np.float32(6)
