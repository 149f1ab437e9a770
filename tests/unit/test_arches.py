"""Which targets the GPUs of a machine need, from a management library made up for the test."""

import pytest

from mlactl.warmup import arches


class Library:
    """The five NVML functions used, over GPUs of the given compute capabilities; a None is a GPU that cannot be asked."""

    def __init__(self, capabilities, failing=()):
        self.capabilities, self.failing, self.open = capabilities, failing, 0

    def nvmlInit_v2(self):
        self.open += 1
        return 9 if "init" in self.failing else 0

    def nvmlShutdown(self):
        self.open -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = len(self.capabilities)
        return 1 if "count" in self.failing else 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle._obj.value = index.value + 1
        return 0 if self.capabilities[index.value] else 1

    def nvmlDeviceGetCudaComputeCapability(self, handle, major, minor):
        major._obj.value, minor._obj.value = self.capabilities[handle.value - 1]
        return 0


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ([], ()),
        ([(12, 0)] * 8, ("sm_120a",)),
        ([(12, 1)], ("sm_121a",)),
        ([(9, 0), (12, 0), (9, 0)], ("sm_90a", "sm_120a")),
        ([(8, 0), (10, 0), (12, 2)], ()),
        ([None, (12, 0)], ("sm_120a",)),
    ],
)
def test_each_capability_has_one_target_and_others_none(monkeypatch, capabilities, expected):
    """An object made for 12.0 does not load on 12.1: there is no nearest target to fall back to."""
    library = Library(capabilities)
    monkeypatch.setattr(arches.ctypes, "CDLL", lambda name: library)
    assert arches.present_arches() == expected
    assert library.open == 0


def test_a_library_without_a_driver_is_no_gpu(monkeypatch):
    for failing in ("init", "count"):
        monkeypatch.setattr(arches.ctypes, "CDLL", lambda name, failing=failing: Library([(12, 0)], (failing,)))
        assert arches.present_arches() == ()


def test_no_library_is_no_gpu(monkeypatch):
    def absent(name):
        raise OSError(name)

    monkeypatch.setattr(arches.ctypes, "CDLL", absent)
    assert arches.present_arches() == ()
