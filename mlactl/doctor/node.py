"""What the driver's management library (NVML) says of a node's GPUs; unlike the CUDA driver it makes no context."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mlactl.warmup.arches import arch_of

EXCLUSIVE, PROHIBITED = 3, 2
"""NVML_COMPUTEMODE_EXCLUSIVE_PROCESS and NVML_COMPUTEMODE_PROHIBITED of nvml.h."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `capability` is None when it cannot be asked, and `problem` then says why.

    `uuid` is empty when it is not known. `slices` names the slices of a divided (MIG) GPU, in both spellings that
    CUDA_VISIBLE_DEVICES takes; None when they are not known.
    """

    index: int
    name: str
    capability: tuple[int, int] | None
    mig: bool = False
    compute_mode: int = 0
    problem: str = ""
    uuid: str = ""
    slices: tuple[str, ...] | None = None

    @property
    def usable(self) -> bool:
        """Whether there are objects for it and processes may use it: of a divided one (MIG), a slice."""
        return self.arch is not None and self.compute_mode != PROHIBITED and not (self.mig and self.slices == ())

    @property
    def arch(self) -> str | None:
        """The target of objects for it; None for a capability that no object is made for."""
        return None if self.capability is None else arch_of(self.capability)


@dataclass(frozen=True, slots=True)
class Node:
    """Driver and GPUs. `cuda` is the CUDA version the driver supports, 13010 for 13.1; `problem` says why nothing is known."""

    driver: str | None
    cuda: int | None
    gpus: tuple[Gpu, ...]
    problem: str = ""

    @property
    def arches(self) -> tuple[str, ...]:
        """Targets of the GPUs, without repeats."""
        return tuple(dict.fromkeys(gpu.arch for gpu in self.gpus if gpu.arch is not None))


def ask() -> Node:
    """Asks NVML through nvidia-ml-py; every failure is told in the result, none is raised."""
    try:
        import pynvml
    except ImportError:
        return Node(None, None, (), "nvidia-ml-py is not installed: pip install nvidia-ml-py")
    return ask_through(pynvml)


def ask_through(nvml: Any) -> Node:
    """The same through a module with nvidia-ml-py's functions."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Node(None, None, (), str(error))
    try:
        count = nvml.nvmlDeviceGetCount()
        gpus = tuple(_gpu(nvml, index) for index in range(count))
        return Node(_text(nvml.nvmlSystemGetDriverVersion()), nvml.nvmlSystemGetCudaDriverVersion_v2(), gpus)
    except nvml.NVMLError as error:
        return Node(None, None, (), str(error))
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        name = _text(nvml.nvmlDeviceGetName(handle))
    except nvml.NVMLError as error:
        return Gpu(index, f"GPU {index}", None, problem=str(error))
    # Most cards cannot be divided, and an integrated one has no compute mode either: then NVML answers "not supported".
    mig, mode, uuid = False, 0, ""
    with suppress(nvml.NVMLError):
        mode = int(nvml.nvmlDeviceGetComputeMode(handle))
    with suppress(nvml.NVMLError):
        uuid = _text(nvml.nvmlDeviceGetUUID(handle))
    with suppress(nvml.NVMLError):
        mig = nvml.nvmlDeviceGetMigMode(handle)[0] == 1
    slices = _slices(nvml, handle, uuid) if mig else None
    return Gpu(index, name, (int(major), int(minor)), mig, mode, uuid=uuid, slices=slices)


def _slices(nvml: Any, handle: Any, uuid: str) -> tuple[str, ...] | None:
    """`MIG-<its own UUID>` and, of older drivers, `MIG-<GPU UUID>/<GPU instance>/<compute instance>` of each slice."""
    found: list[str] = []
    try:
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            except nvml.NVMLError as error:
                if error.value == nvml.NVML_ERROR_NOT_FOUND:
                    continue  # the numbers in use have gaps
                raise
            ids = nvml.nvmlDeviceGetGpuInstanceId(part), nvml.nvmlDeviceGetComputeInstanceId(part)
            found += [_text(nvml.nvmlDeviceGetUUID(part)), f"MIG-{uuid}/{ids[0]}/{ids[1]}"]
    except nvml.NVMLError:
        return None
    return tuple(found)


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
