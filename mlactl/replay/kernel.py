"""Runs a captured call on the kernel from the cache, where a GPU of a supported arch is present."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlactl.kernels.errors import MlactlError

if TYPE_CHECKING:
    import torch

    from mlactl.replay.capture import Capture

ARCH_OF = {(12, 0): "sm_120a", (12, 1): "sm_121a", (9, 0): "sm_90a"}
"""Arch of the objects that a compute capability loads."""

_opened: set[str | None] = set()


@dataclass(frozen=True, slots=True)
class KernelResult:
    """What the kernel gave (natural LSE), or the reason why it did not run; `determinism` compares repeated runs."""

    output: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    reason: str | None = None
    determinism: str | None = None

    @property
    def result(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Output and LSE."""
        return self.output, self.lse


def run_kernel(capture: Capture, *, cache_dir: str | None = None, opener: Callable[..., object] | None = None, repeats: int = 3) -> KernelResult:
    """Runs the call `repeats` times over poisoned outputs; says why it did not run where it cannot: no GPU, no object, not built.

    Objects come from the cache and are never compiled here. A launch that fails raises what the launch raised.
    """
    import torch

    if not torch.cuda.is_available():
        return KernelResult(reason="no GPU is here to run the kernel")
    capability = torch.cuda.get_device_capability()
    arch = ARCH_OF.get(capability)
    if arch is None:
        return KernelResult(reason=f"this GPU has compute capability {capability[0]}.{capability[1]}, which no object is made for")
    if opener is not None and cache_dir not in _opened:
        opener(cache_dir, frozen=True)
        _opened.add(cache_dir)
    try:
        binding = _bind(capture, arch)
        binding.preload()
    except MlactlError as error:
        return KernelResult(reason=f"the kernel cannot run: {error.message}")
    return _repeat(binding, repeats)


def _bind(capture: Capture, arch: str) -> Any:
    from mlactl.replay.bindings import bind

    return bind(capture, arch)


def _repeat(binding: Any, repeats: int) -> KernelResult:
    import torch

    results = []
    for _ in range(max(1, repeats)):
        # What the kernel does not write must be seen.
        binding.tensors.output.fill_(float("nan"))
        binding.tensors.lse.fill_(float("nan"))
        output, lse = binding.run()
        torch.cuda.synchronize()
        results.append((output.cpu(), lse.cpu()))
    first = results[0]
    same = [all(torch.equal(one.view(torch.uint8), two.view(torch.uint8)) for one, two in zip(first, other, strict=True)) for other in results[1:]]
    word = (
        None
        if not same
        else f"bitwise equal over {len(results)} runs"
        if all(same)
        else f"{same.count(False) + 1} of {len(results)} runs differ in their bits"
    )
    return KernelResult(first[0], first[1], determinism=word)
