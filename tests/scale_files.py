"""Makes scale files for tests: outer-scale documents, and safetensors files written byte by byte so that they can be wrong."""

import json
import struct
from math import prod
from pathlib import Path

LAYERS = 78


def float32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def amplitudes(layers: int = LAYERS) -> list[float]:
    """max_abs as float32 numbers from 0.02 up to 5.2, as a real model spans them."""
    return [float32(0.02 * 260 ** (layer / max(layers - 1, 1))) for layer in range(layers)]


def v1(layers: int = LAYERS, **changes) -> dict:
    """A valid nvfp4_ds_mla_outer_scale_v1 document with max_abs; `changes` replace fields, None leaves one out."""
    measured = amplitudes(layers)
    document = {
        "format": "nvfp4_ds_mla_outer_scale_v1", "num_layers": layers, "latent_dim": 512, "denominator": 2688.0,
        "scales": [value / 2688 for value in measured], "max_abs": measured, **changes,
    }  # fmt: skip
    return {name: value for name, value in document.items() if value is not None}


def gscale(layers=range(LAYERS), **changes) -> dict:
    """A valid glm-nvfp4-mla-gscale-v1 document."""
    entries = {f"model.layers.{layer}.self_attn.attn": {"latent_scale": (layer + 1) / 1024} for layer in layers}
    return {
        "schema": "glm-nvfp4-mla-gscale-v1", "algorithm": "nvfp4-e2m1-e4m3-four-over-six", "record_layout": "glm-zero-rope-288b",
        "layers": entries, **changes,
    }  # fmt: skip


def write_json(path: Path, document) -> Path:
    path.write_text(json.dumps(document))
    return path


BITS = {"U8": 8, "F8_E4M3": 8, "F8_E8M0": 8, "BF16": 16, "F16": 16, "F32": 32, "I32": 32}


def scalar(value: float, dtype: str = "F32", shape=()) -> tuple:
    packed = struct.pack("<f", value)
    data = {"F32": packed, "BF16": packed[2:]}[dtype]
    return dtype, list(shape), data * prod(shape)


def vector(values, shape=None) -> tuple:
    return "F32", list(shape or (len(values),)), struct.pack(f"<{len(values)}f", *values)


def blank(dtype: str, shape, byte: int = 0x38) -> tuple:
    return dtype, list(shape), bytes([byte]) * (prod(shape) * BITS[dtype] // 8)


def module(
    name: str, rows: int = 8, columns: int = 64, scale: float = 1 / 3584, convention: str = "modelopt", dtype="F8_E4M3", blocks: bytes | None = None
) -> dict:
    """Tensors of one NVFP4 linear layer [rows, columns] in either convention; `scale` is the multiplier."""
    shape = [rows, columns // 16]
    block = (dtype, shape, blocks) if blocks is not None else blank(dtype, shape)
    if convention == "modelopt":
        return {f"{name}.weight": blank("U8", [rows, columns // 2]), f"{name}.weight_scale": block, f"{name}.weight_scale_2": scalar(scale)}
    return {
        f"{name}.weight_packed": blank("U8", [rows, columns // 2]), f"{name}.weight_scale": block,
        f"{name}.weight_global_scale": scalar(1 / scale, shape=(1,)),
    }  # fmt: skip


def header_of(tensors: dict) -> tuple[dict, bytes]:
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return header, data


def pack(header, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_safetensors(path: Path, tensors: dict) -> Path:
    path.write_bytes(pack(*header_of(tensors)))
    return path


def write_sharded(folder: Path, shards: list[dict]) -> Path:
    """A checkpoint folder with an index; returns the folder."""
    folder.mkdir(exist_ok=True)
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_safetensors(folder / name, tensors)
        weight_map.update(dict.fromkeys(tensors, name))
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return folder
