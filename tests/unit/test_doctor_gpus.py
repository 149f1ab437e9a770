"""What NVML says of a node, and what the doctor makes of it; the cards are made up, the module has nvidia-ml-py's functions."""

import pytest
from doctor_nodes import B200, PRO_6000, SPARK, hold_to_fixes, node, nvml, uuid

from mlactl.doctor import gpus
from mlactl.doctor.findings import Finding, Severity, exit_code
from mlactl.doctor.node import Gpu, Node, ask, ask_through

SUPPORTED = "compute capability 12.0 (sm_120a), 12.1 (sm_121a), 9.0 (sm_90a)"


@pytest.fixture(autouse=True)
def _fixes(monkeypatch):
    hold_to_fixes(monkeypatch)


def check(found, build_node=False):
    return list(gpus.check(found, build_node=build_node))


def bad(found):
    return [(finding.severity.value, finding.check, finding.what) for finding in check(found) if finding.severity is not Severity.OK]


def test_what_nvml_says_is_read_and_nvml_closed_again():
    library = nvml([PRO_6000, SPARK], modes=((0, 3),), mig=(1,), driver=b"580.95.05")
    first = Gpu(0, PRO_6000[0], (12, 0), compute_mode=3, uuid=uuid(0))
    assert ask_through(library) == Node("580.95.05", 13000, (first, Gpu(1, SPARK[0], (12, 1), mig=True, uuid=uuid(1), slices=())), "")
    assert library.state.open == 0
    assert ask_through(library).arches == ("sm_120a", "sm_121a")


@pytest.mark.parametrize("function", ["nvmlInit", "count", "driver", "cuda"])
def test_a_library_that_fails_is_told_and_not_raised(function):
    library = nvml([PRO_6000], failing=(function,))
    assert ask_through(library) == Node(None, None, (), f"{function} failed")
    assert library.state.open == 0


def test_a_lost_gpu_does_not_hide_the_others():
    found = ask_through(nvml([None, PRO_6000]))
    assert [gpu.problem for gpu in found.gpus] == ["GPU is lost", ""]
    assert bad(found) == [("error", "gpu-unreachable", "GPU 0 does not answer: GPU is lost")]
    fix = "nvidia-smi -i 0; dmesg names the fault (Xid); restart the node if the GPU fell off the bus"
    assert next(finding.fix for finding in check(found) if finding.check == "gpu-unreachable") == fix
    assert bad(ask_through(nvml([None])))[1] == ("fatal", "no-gpu", "no GPU answers, so a launch could not work here")


def test_a_card_that_has_no_compute_mode_is_a_card():
    """Integrated GPUs answer "not supported" to what discrete ones have."""
    assert ask_through(nvml([SPARK], failing=(("mode", 0),))).gpus == (Gpu(0, SPARK[0], (12, 1), uuid=uuid(0)),)


def test_slices_of_a_divided_card_are_read_in_both_spellings():
    """Their numbers have gaps; what NVML refuses to tell is not known, which is not the same as none."""
    library = nvml([PRO_6000], mig=(0,), slices=((0, 1, "MIG-11", 3, 0), (0, 4, "MIG-22", 5, 1)))
    assert ask_through(library).gpus[0].slices == ("MIG-11", f"MIG-{uuid(0)}/3/0", "MIG-22", f"MIG-{uuid(0)}/5/1")
    (gpu,) = ask_through(nvml([PRO_6000], mig=(0,), failing=(("slices", 0), ("uuid", 0)))).gpus
    assert (gpu.slices, gpu.uuid) == (None, "")


def test_this_machine_is_asked_without_an_error():
    """The real library, or its absence: either way an answer."""
    found = ask()
    assert bool(found.problem) == (found.driver is None)


def test_good_cards_are_told_with_their_target():
    assert check(node(PRO_6000, PRO_6000, SPARK)) == [
        Finding("gpu", Severity.OK, "driver", "driver 580.95.05, supports CUDA up to 13.0"),
        Finding("gpu", Severity.OK, "gpu", f"2 x {PRO_6000[0]}, compute capability 12.0: objects for sm_120a"),
        Finding("gpu", Severity.OK, "gpu", f"{SPARK[0]}, compute capability 12.1: objects for sm_121a"),
    ]


def test_no_driver_and_no_gpu_are_fatal_unless_the_node_only_compiles():
    absent = Node(None, None, (), "NVML Shared Library Not Found")
    (found,) = check(absent)
    assert (found.severity, found.check) == (Severity.FATAL, "driver")
    assert found.what == "no GPU can be asked, so a launch could not work here: NVML Shared Library Not Found"
    assert found.expected == f"a driver, and a GPU of {SUPPORTED}"
    assert "mlactl doctor --no-gpu" in found.fix
    (found,) = check(node())
    assert (found.severity, found.what) == (Severity.FATAL, "driver 580.95.05 sees no GPU, so a launch could not work here")
    for one in (absent, node(), node(B200)):
        assert check(one, build_node=True) == [Finding("gpu", Severity.OK, "build-node", "no GPU is asked for: this node only compiles")]


def test_a_card_without_kernels_is_fatal_alone_and_a_warning_beside_another():
    words = f"{B200[0]}, compute capability 10.0, is not supported by these kernels"
    assert bad(node(B200)) == [("fatal", "unsupported-gpu", words)]
    assert bad(node(B200, PRO_6000)) == [("warning", "unsupported-gpu", words)]
    found = check(node(B200, PRO_6000))[1]
    assert (found.expected, found.fix) == (SUPPORTED, "keep servers off it: CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=1")


def test_compute_modes_and_divided_cards():
    prohibited = "GPU 0 is in compute mode Prohibited: no process may use it"
    assert bad(node(PRO_6000, compute_mode=2)) == [("fatal", "compute-mode", prohibited)]
    mixed = Node("580", 13000, (Gpu(0, *PRO_6000, compute_mode=2), Gpu(1, *PRO_6000)))
    assert bad(mixed) == [("error", "compute-mode", prohibited)]
    # A card that there are no objects for is no help.
    none = Node("580", 13000, (Gpu(0, *PRO_6000, compute_mode=2), Gpu(1, *B200)))
    assert [row[:2] for row in bad(none)] == [("warning", "unsupported-gpu"), ("fatal", "compute-mode")]
    empty = "GPU 0 is divided (MIG) and has no slice: no process can use it"
    assert bad(node(PRO_6000, mig=True, slices=())) == [("fatal", "mig", empty)]
    assert check(mixed)[-1].fix == "nvidia-smi -i 0 -c DEFAULT"
    assert bad(node(PRO_6000, compute_mode=3)) == [
        ("notice", "compute-mode", "GPU 0 is in compute mode Exclusive_Process: a second process on it fails")
    ]
    assert bad(node(PRO_6000, mig=True)) == [
        ("notice", "mig", "GPU 0 is divided (MIG): a launch sees the multiprocessors of its slice, not the card's")
    ]


@pytest.mark.parametrize(
    ("severities", "code"),
    [((), 0), (("ok", "notice"), 0), (("ok", "warning"), 1), (("error", "notice"), 1), (("warning", "fatal", "error"), 3)],
    ids=["nothing", "notice", "warning", "error", "fatal"],
)
def test_the_worst_finding_is_the_exit_code(severities, code):
    assert exit_code(Finding("gpu", Severity(severity), "x", "x", "y", "z") for severity in severities) == code
