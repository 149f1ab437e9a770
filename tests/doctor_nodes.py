"""Nodes made up for tests: what NVML would say of cards that are not here, and a module with its functions."""

from types import SimpleNamespace

from mlactl.doctor.findings import Finding, Severity
from mlactl.doctor.node import Gpu, Node

PRO_6000 = ("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0))
SPARK = ("NVIDIA GB10", (12, 1))
B200 = ("NVIDIA B200", (10, 0))


def node(*cards, cuda=13000, **options) -> Node:
    """A node of these cards, each (name, capability)."""
    gpus = (Gpu(index, name, capability, **{"uuid": uuid(index), **options}) for index, (name, capability) in enumerate(cards))
    return Node("580.95.05", cuda, tuple(gpus))


def uuid(index) -> str:
    """Of GPU 1: GPU-1a0e…"""
    return f"GPU-{index}a0e0f6c-1a0c-4c51-9a3c-0123456789ab"


def hold_to_fixes(monkeypatch):
    """From now on every finding that is made must say what mends it, unless nothing is wrong, and what was expected where it counts."""
    make = Finding.__init__

    def held(self, *arguments, **options):
        make(self, *arguments, **options)
        assert self.fix.strip() or self.severity is Severity.OK, f"{self.check} has no fix: {self.what}"
        assert self.expected or not self.counts, f"{self.check} does not say what was expected: {self.what}"

    monkeypatch.setattr(Finding, "__init__", held)


class NVMLError(Exception):
    def __init__(self, message="", value=3):
        super().__init__(message)
        self.value = value


def nvml(cards, *, failing=(), modes=(), mig=(), slices=(), driver="580.95.05", cuda=13000):
    """nvidia-ml-py over these cards; `failing` names functions, or (function, index), that raise; a None card does not answer.

    `slices` has (card, number, UUID, GPU instance, compute instance) of each slice of the `mig` cards.
    """
    state = SimpleNamespace(open=0)

    def called(name, index=None):
        if name in failing or (name, index) in failing:
            raise NVMLError(f"{name} failed")

    def init():
        called("nvmlInit")
        state.open += 1

    def shutdown():
        state.open -= 1

    def handle(index):
        called("handle", index)
        if cards[index] is None:
            raise NVMLError("GPU is lost")
        return index

    def compute_mode(index):
        called("mode", index)
        return dict(modes).get(index, 0)

    def mig_mode(index):
        if index not in mig:
            raise NVMLError("Not Supported")
        return [1, 1]

    def system(name, value):
        called(name)
        return value

    def slice_handle(index, number):
        called("slices", index)
        if (index, number) not in [one[:2] for one in slices]:
            raise NVMLError("Not Found", 6)
        return index, number

    def slice_of(handle):
        return next(one for one in slices if one[:2] == handle)

    def uuid_of(handle):
        called("uuid", handle)
        return slice_of(handle)[2] if isinstance(handle, tuple) else uuid(handle)

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_ERROR_NOT_FOUND=6,
        nvmlDeviceGetUUID=uuid_of,
        nvmlDeviceGetMaxMigDeviceCount=lambda index: 7,
        nvmlDeviceGetMigDeviceHandleByIndex=slice_handle,
        nvmlDeviceGetGpuInstanceId=lambda handle: slice_of(handle)[3],
        nvmlDeviceGetComputeInstanceId=lambda handle: slice_of(handle)[4],
        state=state,
        nvmlInit=init,
        nvmlShutdown=shutdown,
        nvmlDeviceGetCount=lambda: system("count", len(cards)),
        nvmlSystemGetDriverVersion=lambda: system("driver", driver),
        nvmlSystemGetCudaDriverVersion_v2=lambda: system("cuda", cuda),
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetCudaComputeCapability=lambda index: cards[index][1],
        nvmlDeviceGetName=lambda index: cards[index][0],
        nvmlDeviceGetComputeMode=compute_mode,
        nvmlDeviceGetMigMode=mig_mode,
    )
