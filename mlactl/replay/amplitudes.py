"""Latent amplitudes by layer out of captures: what an outer scale is made from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlactl.replay import capture as captures
from mlactl.replay.errors import BadCapture
from mlactl.replay.records import decode
from mlactl.replay.visible import seen


@dataclass(frozen=True, slots=True)
class Amplitudes:
    """The largest |latent| of every layer from 0, over `tokens` tokens of `captures` captures."""

    max_abs: tuple[float, ...]
    captures: int
    tokens: int


def measure(folder: Path) -> Amplitudes:
    """Measures the latents of the keys that captured calls saw.

    Raises BadCapture for a capture that names no layer, for packed NVFP4 records, whose largest values were already
    clipped by the scale that is sought, and for layers that no capture has.
    """
    import torch

    largest: dict[int, float] = {}
    paths, tokens = captures.find([folder]), 0
    for path in paths:
        capture = captures.read(path)
        layer = capture.call.layer
        if layer is None:
            raise BadCapture(f"{path}: names no layer, so its amplitude belongs to none", hint="record with mlactl.capture(…, layers=N)")
        if capture.layout.latent_type == "e2m1":
            raise BadCapture(f"{path}: {capture.call.record} latents are quantised already; measure from bf16, fp8 or fp8_ds_mla caches")
        views = [view for row in range(capture.rows) if (view := seen(capture, row)) is not None]
        size = capture.call.page_size
        slots = torch.unique(torch.cat([view.pages * size + view.offsets for view in views]))
        records = capture.tensors["kv_cache"].flatten(0, 1)[slots]
        keys = decode(records, capture.layout, kv_scale=capture.call.kv_scale, dtype=torch.float32)
        tokens += len(keys)
        if len(keys):
            largest[layer] = max(largest.get(layer, 0.0), float(keys[:, : capture.values].abs().max()))
    missing = sorted(set(range(max(largest, default=-1) + 1)) - set(largest))
    if missing or not largest:
        raise BadCapture(
            f"{folder}: no capture with tokens of layer {', '.join(map(str, missing[:8])) or '0'}", hint="record one whole pass of the model"
        )
    return Amplitudes(tuple(largest[layer] for layer in sorted(largest)), len(paths), tokens)
