"""Latent amplitudes by layer out of captures: what an outer scale is made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlactl.printable import plain
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


def measure(folder: Path, *, on_capture: Callable[[], None] | None = None) -> Amplitudes:
    """Measures the latents of the keys that captured calls saw; `on_capture` is called after each capture.

    Raises BadCapture for a capture that names no layer, for packed NVFP4 records, whose largest values were already
    clipped by the scale that is sought, for latents that are not finite, for layers that no capture has, and for those
    whose latents are all zero.
    """
    largest: dict[int, float] = {}
    paths, tokens = captures.find([folder]), 0
    for path in paths:
        found, count = _capture(path)
        tokens += count
        if found is not None:
            largest[found[0]] = max(largest.get(found[0], 0.0), found[1])
        if on_capture is not None:
            on_capture()
    missing = sorted(set(range(max(largest, default=-1) + 1)) - set(largest))
    if missing or not largest:
        raise BadCapture(
            f"{plain(folder)}: no capture with tokens of layer {', '.join(map(str, missing[:8])) or '0'}", hint="record one whole pass of the model"
        )
    silent = [layer for layer in sorted(largest) if largest[layer] == 0]
    if silent:
        raise BadCapture(
            f"{plain(folder)}: every latent of layer {', '.join(map(str, silent[:8]))} is 0, which no scale can be made from",
            hint="record a pass over real requests, not a warm-up over an empty cache",
        )
    return Amplitudes(tuple(largest[layer] for layer in sorted(largest)), len(paths), tokens)


def _capture(path: Path) -> tuple[tuple[int, float] | None, int]:
    """(layer, largest |latent|) of one capture, None where it saw no key, and how many keys it saw."""
    import torch

    capture = captures.read(path)
    layer = capture.call.layer
    if layer is None:
        raise BadCapture(f"{plain(path)}: names no layer, so its amplitude belongs to none", hint="record with mlactl.capture(…, layers=N)")
    if capture.layout.latent_type == "e2m1":
        raise BadCapture(f"{plain(path)}: {capture.call.record} latents are quantised already", hint="measure from bf16, fp8 or fp8_ds_mla caches")
    size = capture.call.page_size
    views = [view for row in range(capture.rows) if (view := seen(capture, row)) is not None]
    slots = torch.unique(torch.cat([view.pages * size + view.offsets for view in views])) if views else torch.zeros(0, dtype=torch.long)
    if not len(slots):
        return None, 0
    records = capture.tensors["kv_cache"].flatten(0, 1)[slots]
    latents = decode(records, capture.layout, kv_scale=capture.call.kv_scale, dtype=torch.float32)[:, : capture.values]
    wrong = (~latents.isfinite()).nonzero()
    if len(wrong):
        # max() of Python and of a comparison skips NaN: the scale of the layer would be made of the other latents alone.
        token, element = wrong[0].tolist()
        page, offset = int(capture.tensors["page_ids"][slots[token] // size]), int(slots[token] % size)
        raise BadCapture(
            f"{plain(path)}: {len(wrong):,} latents of {len(torch.unique(wrong[:, 0])):,} tokens are not finite, the first "
            f"{float(latents[token, element])} at element {element} of offset {offset} of page {page}",
            hint=f"mlactl replay {plain(captures.stem(path))} shows what attention made of them; record again without them",
        )
    return (layer, float(latents.abs().max())), len(slots)
