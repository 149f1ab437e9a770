"""Nodes made up for tests: what NVML would say of cards that are not here, and a module with its functions."""

from types import SimpleNamespace

from mlactl.doctor.node import Gpu, Node

PRO_6000 = ("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0))
SPARK = ("NVIDIA GB10", (12, 1))
B200 = ("NVIDIA B200", (10, 0))


def node(*cards, cuda=13000, **options) -> Node:
    """A node of these cards, each (name, capability)."""
    return Node("580.95.05", cuda, tuple(Gpu(index, name, capability, **options) for index, (name, capability) in enumerate(cards)))


class NVMLError(Exception):
    pass


def nvml(cards, *, failing=(), modes=(), mig=(), driver="580.95.05", cuda=13000):
    """nvidia-ml-py over these cards; `failing` names functions, or (function, index), that raise; a None card does not answer."""
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

    return SimpleNamespace(
        NVMLError=NVMLError,
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
