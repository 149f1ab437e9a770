"""What a checkpoint's tensor is by its name: the module it belongs to and the role it plays there.

ModelOpt and compressed-tensors name reciprocals of each other; KV scales have several spellings for one thing.
"""

from __future__ import annotations

import re
from enum import StrEnum


class Role(StrEnum):
    """Role of a tensor in a quantised module; the value is the name it is reported under."""

    WEIGHT = "weight"
    PACKED = "weight_packed"
    BLOCK_SCALE = "weight_scale"
    MULTIPLIER = "weight_scale_2"
    DIVISOR = "weight_global_scale"
    INPUT_MULTIPLIER = "input_scale"
    INPUT_DIVISOR = "input_global_scale"
    FP8_BLOCK_SCALE = "weight_scale_inv"
    K_SCALE = "k_scale"
    V_SCALE = "v_scale"
    KV_SCALE = "kv_scale"


WEIGHTS = (Role.WEIGHT, Role.PACKED)
KV_ROLES = (Role.K_SCALE, Role.V_SCALE, Role.KV_SCALE)
GLOBALS = (Role.MULTIPLIER, Role.DIVISOR)
INPUTS = (Role.INPUT_MULTIPLIER, Role.INPUT_DIVISOR)

_BY_SUFFIX = {role.value: role for role in Role}

_KV_SPELLINGS = (
    (re.compile(r"^(.*)\.(?:k_proj\.(?:k_scale|output_scale)|attn\.k_scale)$"), Role.K_SCALE),
    (re.compile(r"^(.*)\.(?:v_proj\.(?:v_scale|output_scale)|attn\.v_scale)$"), Role.V_SCALE),
)
"""Other spellings of `<attention>.k_scale`; engines map each of them to the attention layer's one scale."""

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Projections that engines fuse into one matrix, which has one global scale; w1 and w3 are gate and up elsewhere."""

ATTENTION_PROJECTIONS = ("k_proj", "kv_a_proj_with_mqa", "kv_b_proj", "qkv_proj", "fused_qkv_a_proj_with_mqa")
"""A layer with one of these fills a KV cache, so KV scales are expected of it when other layers have them."""


def role_of(name: str) -> tuple[str, Role] | None:
    """(module, role) of a tensor, KV spellings mapped to the attention module; None when it plays no part here."""
    for pattern, role in _KV_SPELLINGS:
        found = pattern.match(name)
        if found:
            return found[1], role
    module, _, suffix = name.rpartition(".")
    known = _BY_SUFFIX.get(suffix)
    return None if known is None or not module else (module, known)


def names_a_scale(name: str) -> bool:
    """Whether a tensor that plays no known part calls itself a scale."""
    return "scale" in name.rpartition(".")[2]


def fused_group(module: str) -> tuple[str, tuple[str, ...]] | None:
    """(group, its members' names) when engines fuse this module with others: `….self_attn.q_proj` is of `….self_attn`."""
    parent, _, last = module.rpartition(".")
    for members in FUSED:
        if last in members:
            return f"{parent}.{'/'.join(members)}", tuple(f"{parent}.{member}" for member in members)
    return None
