"""Which targets the GPUs of this machine need, asked of the driver's management library and not of torch."""

from __future__ import annotations

import ctypes

DEFAULT_ARCH = "sm_120a"
"""What is warmed on a machine without a GPU when nobody says otherwise: the cards this project is for."""

_BY_CAPABILITY = {(12, 0): "sm_120a", (12, 1): "sm_121a", (9, 0): "sm_90a"}
"""Objects run on exactly the compute capability they were made for."""


def present_arches() -> tuple[str, ...]:
    """Targets of the GPUs in this machine that objects can be made for, without repeats; empty without a driver or a GPU."""
    return tuple(dict.fromkeys(_BY_CAPABILITY[capability] for capability in _capabilities() if capability in _BY_CAPABILITY))


def arch_of(capability: tuple[int, int]) -> str | None:
    """Target for one compute capability, None for one that no object is made for."""
    return _BY_CAPABILITY.get(capability)


def supported() -> str:
    """The capabilities there are objects for, in words: `12.0 (sm_120a), …`."""
    return ", ".join(f"{major}.{minor} ({arch})" for (major, minor), arch in _BY_CAPABILITY.items())


def _capabilities() -> list[tuple[int, int]]:
    """Compute capability of each GPU, through NVML (nvml.h): unlike the CUDA driver it makes no context."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2() != 0:
        return []
    try:
        return _read_capabilities(nvml)
    finally:
        nvml.nvmlShutdown()


def _read_capabilities(nvml: ctypes.CDLL) -> list[tuple[int, int]]:
    count = ctypes.c_uint(0)
    found = []
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return []
    for index in range(count.value):
        device, major, minor = ctypes.c_void_p(), ctypes.c_int(0), ctypes.c_int(0)
        if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) != 0:
            continue
        if nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)) == 0:
            found.append((major.value, minor.value))
    return found
