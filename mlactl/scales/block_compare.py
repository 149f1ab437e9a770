"""Byte-by-byte comparison of the block scales of two checkpoints, a buffer at a time."""

from __future__ import annotations

import os
from contextlib import ExitStack

import numpy as np

from mlactl.scales.blocks import BUFFER_BYTES, unflatten
from mlactl.scales.files import open_regular
from mlactl.scales.header import Tensor
from mlactl.scales.inventory import Inventory, layer_of
from mlactl.scales.module_rules import BLOCK_DTYPES
from mlactl.scales.naming import Role

Difference = tuple[str, int | None, tuple[int, ...], int, int]
"""Tensor, layer, index of the first differing byte, and that byte in both."""


def differing_blocks(mine: Inventory, other: Inventory) -> tuple[int, list[Difference]]:
    """How many E4M3 tensors both checkpoints have with one shape, and the first difference of each that differs.

    Modules that only one of them has are the scalars' comparison to report. Raises CannotRun for a shard that is gone.
    """
    compared, different = 0, list[Difference]()
    with ExitStack() as stack:
        left, right = ([stack.enter_context(open_regular(path))[0] for path in side.shards.files] for side in (mine, other))
        for module, roles in mine.modules.items():
            one, two = roles.get(Role.BLOCK_SCALE), other.modules.get(module, {}).get(Role.BLOCK_SCALE)
            if one is None or two is None or one.dtype not in BLOCK_DTYPES or two.dtype not in BLOCK_DTYPES:
                continue
            compared += 1
            found = _first_difference(left[one.shard], one, right[two.shard], two)
            if found is not None:
                flat, left_byte, right_byte = found
                different.append((one.name, layer_of(module), unflatten(flat, one.shape), left_byte, right_byte))
    return compared, different


def _first_difference(left: int, one: Tensor, right: int, two: Tensor) -> tuple[int, int, int] | None:
    if one.shape != two.shape:
        return 0, _bytes(left, one, 0)[0] if one.size_bytes else 0, _bytes(right, two, 0)[0] if two.size_bytes else 0
    for done in range(0, one.size_bytes, BUFFER_BYTES):
        mine, theirs = _bytes(left, one, done), _bytes(right, two, done)
        if mine != theirs:
            count = min(len(mine), len(theirs))
            where = np.frombuffer(mine, np.uint8, count) != np.frombuffer(theirs, np.uint8, count)
            at = int(np.argmax(where))
            return done + at, mine[at], theirs[at]
    return None


def _bytes(descriptor: int, tensor: Tensor, done: int) -> bytes:
    return os.pread(descriptor, min(BUFFER_BYTES, tensor.size_bytes - done), tensor.begin + done)
