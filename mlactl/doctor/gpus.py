"""GPUs and driver: is there one that objects are made for, and may a process use it."""

from __future__ import annotations

from collections.abc import Iterator

from mlactl.doctor.findings import Finding, Severity
from mlactl.doctor.node import EXCLUSIVE, PROHIBITED, Gpu, Node
from mlactl.warmup.arches import supported

_NO_GPU_FIX = "install the NVIDIA driver, or start the container with its GPUs (--gpus all); on a node that only compiles: mlactl doctor --no-gpu"


def check(node: Node, *, build_node: bool) -> Iterator[Finding]:
    """What stands between a launch and the GPUs; nothing is asked of them on a build node."""
    if build_node:
        yield Finding("gpu", Severity.OK, "build-node", "no GPU is asked for: this node only compiles")
        return
    if node.problem:
        what = f"no GPU can be asked, so a launch could not work here: {node.problem}"
        yield Finding("gpu", Severity.FATAL, "driver", what, f"a driver, and a GPU of compute capability {supported()}", _NO_GPU_FIX)
        return
    if not node.gpus:
        what = f"driver {node.driver} sees no GPU, so a launch could not work here"
        yield Finding("gpu", Severity.FATAL, "no-gpu", what, f"a GPU of compute capability {supported()}", _NO_GPU_FIX)
        return
    yield Finding("gpu", Severity.OK, "driver", f"driver {node.driver}, supports CUDA up to {cuda_text(node.cuda)}")
    for gpu in node.gpus:
        if gpu.problem:
            fix = f"nvidia-smi -i {gpu.index}; dmesg names the fault (Xid); restart the node if the GPU fell off the bus"
            yield Finding("gpu", Severity.ERROR, "gpu-unreachable", f"GPU {gpu.index} does not answer: {gpu.problem}", "a GPU that answers", fix)
    yield from _models(node)
    yield from _modes(node)


def _models(node: Node) -> Iterator[Finding]:
    models: dict[tuple[str, tuple[int, int]], list[Gpu]] = {}
    for gpu in node.gpus:
        if gpu.capability is not None:
            models.setdefault((gpu.name, gpu.capability), []).append(gpu)
    bad = Severity.WARNING if node.arches else Severity.FATAL
    for (name, (major, minor)), gpus in models.items():
        said = f"{len(gpus)} x {name}" if len(gpus) > 1 else name
        if gpus[0].arch is not None:
            yield Finding("gpu", Severity.OK, "gpu", f"{said}, compute capability {major}.{minor}: objects for {gpus[0].arch}")
            continue
        what = f"{said}, compute capability {major}.{minor}, is not supported by these kernels"
        indices = ",".join(str(gpu.index) for gpu in node.gpus if gpu.arch is not None)
        fix = f"keep servers off it: CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={indices}" if indices else "serve from a node with such a GPU"
        yield Finding("gpu", bad, "unsupported-gpu", what, f"compute capability {supported()}", fix)
    if not models:
        yield Finding("gpu", Severity.FATAL, "no-gpu", "no GPU answers, so a launch could not work here", "at least one that does", "nvidia-smi")


def _modes(node: Node) -> Iterator[Finding]:
    severity = Severity.ERROR if any(gpu.usable for gpu in node.gpus) else Severity.FATAL
    for gpu in node.gpus:
        if gpu.compute_mode == PROHIBITED:
            what = f"GPU {gpu.index} is in compute mode Prohibited: no process may use it"
            yield Finding("gpu", severity, "compute-mode", what, "compute mode Default", f"nvidia-smi -i {gpu.index} -c DEFAULT")
        if gpu.compute_mode == EXCLUSIVE:
            what = f"GPU {gpu.index} is in compute mode Exclusive_Process: a second process on it fails"
            yield Finding("gpu", Severity.NOTICE, "compute-mode", what, "", f"nvidia-smi -i {gpu.index} -c DEFAULT, if that is not meant")
        if gpu.mig and gpu.slices == ():
            what = f"GPU {gpu.index} is divided (MIG) and has no slice: no process can use it"
            fix = f"nvidia-smi mig -i {gpu.index} -cgi PROFILE -C, or nvidia-smi -i {gpu.index} -mig 0"
            yield Finding("gpu", severity, "mig", what, "a GPU instance with a compute instance", fix)
        elif gpu.mig:
            what = f"GPU {gpu.index} is divided (MIG): a launch sees the multiprocessors of its slice, not the card's"
            yield Finding("gpu", Severity.NOTICE, "mig", what, "", f"nvidia-smi -i {gpu.index} -mig 0, if that is not meant")


def cuda_text(version: int | None) -> str:
    """`13.1` for 13010; `unknown` for None."""
    return "unknown" if version is None else f"{version // 1000}.{version % 1000 // 10}"
