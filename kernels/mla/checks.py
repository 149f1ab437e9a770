"""What a binding checks of its tensors without touching a device value. Everything raises BindError naming the argument and both values."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mlactl.kernels.errors import BindError

ALIGNMENT_BYTES = 16
"""Alignment of the base of every tensor that is read or written in 16-byte pieces."""


def expect(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int | None, ...], device: torch.device) -> None:
    """dtype, rank, extents (None: any) and device."""
    if tensor.dtype != dtype:
        raise BindError(f"{name} has dtype {tensor.dtype}, expected {dtype}")
    if tensor.dim() != len(shape):
        raise BindError(f"{name} has rank {tensor.dim()}, expected {len(shape)}")
    for index, extent in enumerate(shape):
        if extent is not None and tensor.shape[index] != extent:
            raise BindError(f"{name}.shape[{index}] is {tensor.shape[index]}, expected {extent}")
    if tensor.device != device:
        raise BindError(f"{name} is on {tensor.device}, q is on {device}")


def expect_rows(name: str, tensor: torch.Tensor, multiple: int) -> None:
    """Last dimension contiguous, other strides multiples of `multiple` elements, base aligned, no two elements in one place."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise BindError(f"{name}.stride({tensor.dim() - 1}) is {tensor.stride(-1)}, the last dimension must be contiguous")
    for index in range(tensor.dim() - 1):
        if tensor.shape[index] > 1 and tensor.stride(index) % multiple:
            raise BindError(f"{name}.stride({index}) is {tensor.stride(index)} elements, expected a multiple of {multiple}")
    if multiple > 1:
        expect_aligned(name, tensor)
    reach = 1
    for index in sorted(range(tensor.dim()), key=tensor.stride):
        if tensor.shape[index] > 1:
            if tensor.stride(index) < reach:
                raise BindError(f"{name}.stride({index}) is {tensor.stride(index)}: elements overlap, expected at least {reach}")
            reach += tensor.stride(index) * (tensor.shape[index] - 1)


def expect_aligned(name: str, tensor: torch.Tensor) -> None:
    """Base address a multiple of `ALIGNMENT_BYTES`."""
    if tensor.data_ptr() % ALIGNMENT_BYTES:
        raise BindError(f"{name} starts at {tensor.data_ptr():#x}, expected a multiple of {ALIGNMENT_BYTES} bytes")


def expect_apart(named: Mapping[str, torch.Tensor], written: tuple[str, ...]) -> None:
    """Nothing that is written may share memory with anything else."""
    spans = {name: _span(tensor) for name, tensor in named.items() if tensor.numel()}
    for name in written:
        for other, span in spans.items():
            if name in spans and other != name and spans[name][0] < span[1] and span[0] < spans[name][1]:
                raise BindError(f"{name} shares memory with {other}: {name} is written while {other} is in use")


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    reach = sum(stride * (extent - 1) for stride, extent in zip(tensor.stride(), tensor.shape, strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()
