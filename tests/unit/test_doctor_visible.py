"""CUDA_VISIBLE_DEVICES against the GPUs of a node: what a launch sees, and what the doctor makes of it."""

import pytest
from doctor_nodes import B200, PRO_6000, SPARK, hold_to_fixes, node, uuid

from mlactl.doctor import environment
from mlactl.doctor.node import Gpu, Node
from mlactl.doctor.situation import gather
from mlactl.doctor.visible import visible

TWO = node(PRO_6000, PRO_6000)
PCI = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
CLOSED = Node("580", 13000, (Gpu(0, *PRO_6000, compute_mode=2, uuid=uuid(0)), Gpu(1, *PRO_6000, uuid=uuid(1))))
DIVIDED = Node("580", 13000, (Gpu(0, *PRO_6000, mig=True, uuid=uuid(0), slices=("MIG-11", f"MIG-{uuid(0)}/3/0")), Gpu(1, *PRO_6000, uuid=uuid(1))))


@pytest.fixture(autouse=True)
def _fixes(monkeypatch):
    hold_to_fixes(monkeypatch)


def seen(value, of=TWO, **environ):
    found = visible({"CUDA_VISIBLE_DEVICES": value, **environ}, of)
    return None if found.gpus is None else [gpu.index for gpu in found.gpus], found.ended


@pytest.mark.parametrize(
    ("value", "indices", "ended"),
    [
        ("0", [0], ""),
        ("1,0", [1, 0], ""),
        (" 1 , 0", [1, 0], ""),
        ("7", [], "7 ends the list: there is no such GPU, the last is 1"),
        ("0,7,1", [0], "7 ends the list: there is no such GPU, the last is 1"),
        ("0,-1,1", [0], ""),
        ("-2", [], "-2 ends the list: it is no index"),
        ("0,", [0], ""),
        ("0,,1", [0], "an empty entry ends the list: it is no index"),
        ("1x", [1], ""),
        ("all", [], "an entry that is neither index nor UUID ends the list: it is no index"),
        ("0,GPU-1", [0], "GPU-1 ends the list: it is no index"),
        ("1,1", [], "GPU 1 stands in it twice, which hides all"),
        (uuid(1), [1], ""),
        ("GPU-1,GPU-0", [1, 0], ""),
        ("GPU-", [], "GPU- ends the list: 2 GPUs fit it"),
        ("GPU-7", [], "GPU-7 ends the list: no GPU has that UUID"),
        ("GPU-1,0", [1], "0 ends the list: no GPU has that UUID"),
        (f"GPU-1,{uuid(1)}", [], "GPU 1 stands in it twice, which hides all"),
        ("MIG-11", [], "MIG-11 is no slice of this node: no GPU is divided (MIG)"),
    ],
)  # fmt: skip
def test_a_list_is_resolved_as_the_driver_does(value, indices, ended):
    """Source: CUDA programming guide, environment variables; duplicates as PyTorch counts devices."""
    assert seen(value) == (indices, ended)


def test_without_the_variable_all_are_seen():
    assert visible({}, TWO).gpus == TWO.gpus


def test_slices_by_either_name_and_of_several_the_first():
    assert seen("MIG-11", DIVIDED) == ([0], "")
    assert seen(f"MIG-{uuid(0)}/3/0,MIG-99", DIVIDED) == ([0], "")
    assert seen("MIG-99,MIG-11", DIVIDED) == ([], "MIG-99 is no slice of this node: its divided GPUs have others")
    assert seen("MIG-99", node(PRO_6000, mig=True)) == (None, ""), "NVML did not tell the slices"


def test_a_card_that_did_not_tell_its_uuid_may_be_the_one_meant():
    lost = Node("580", 13000, (Gpu(0, *PRO_6000, uuid=uuid(0)), Gpu(1, "GPU 1", None, problem="GPU is lost")))
    assert seen("GPU-0", lost) == ([0], "")
    assert seen("GPU-7", lost) == (None, "")


def test_indices_of_unlike_cards_mean_what_the_driver_orders_first():
    """FASTEST_FIRST, the default, is not the order of nvidia-smi."""
    mixed = node(B200, PRO_6000)
    assert seen("0", mixed) == (None, "")
    assert seen("0", mixed, **PCI) == ([0], "")
    assert seen("0,1", mixed) == ([0, 1], "")
    assert visible({"CUDA_VISIBLE_DEVICES": "0"}, mixed).doubt
    assert visible({"CUDA_VISIBLE_DEVICES": "0"}, node(SPARK, PRO_6000)).doubt == "", "either could be used"


def told(value, of, *, build_node=False, **environ):
    values = {"MLACTL_FROZEN": "1", "CUDA_VISIBLE_DEVICES": value, **environ}
    situation = gather(values, cache_dir="/nonexistent/cache", arches=(), build_node=build_node, node=of)
    rows = [finding for finding in environment.check(situation) if finding.check == "visible-devices"]
    return [(finding.severity.value, finding.what.removeprefix("CUDA_VISIBLE_DEVICES "), finding.fix) for finding in rows]


NOT_ONE = "leaves no GPU that a launch could use: "
NARROWED = ("notice", "narrows what a launch sees; the GPUs above are all of the node's", "unset CUDA_VISIBLE_DEVICES, if not meant")


@pytest.mark.parametrize(
    ("value", "of", "left", "fix"),
    [
        ("7", node(PRO_6000), "7 ends the list: there is no such GPU, the last is 0", "0"),
        ("GPU-7", TWO, "GPU-7 ends the list: no GPU has that UUID", "0,1"),
        ("MIG-11", TWO, "MIG-11 is no slice of this node: no GPU is divided (MIG)", "0,1"),
        ("0", CLOSED, "GPU 0 is in compute mode Prohibited", "1"),
        ("0", Node("580", 13000, (Gpu(0, *PRO_6000, mig=True, slices=()), Gpu(1, *PRO_6000))), "GPU 0 is divided (MIG) and has no slice", "1"),
        ("GPU-0", node(B200, PRO_6000), "GPU 0 (NVIDIA B200) has compute capability 10.0, which is not supported", "1"),
        ("0,7", CLOSED, "7 ends the list: there is no such GPU, the last is 1; GPU 0 is in compute mode Prohibited", "1"),
    ],
    ids=["index", "uuid", "slice", "prohibited", "no-slice", "unsupported", "ended"],
)
def test_a_list_that_leaves_no_usable_gpu_is_fatal(value, of, left, fix):
    """It was a notice, and the launch behind it could not work."""
    assert told(value, of) == [("fatal", f"{NOT_ONE}{left}", f"CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={fix}")]
    assert told(value, of, build_node=True) == []


def test_where_no_gpu_could_be_used_anyway_the_variable_is_unset():
    assert told("0", node(B200))[0][::2] == ("fatal", "unset CUDA_VISIBLE_DEVICES")


def test_a_list_that_may_or_does_leave_some_is_less_than_fatal():
    fix = "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=1"
    doubt = "its indices go by the driver's order, fastest first, while CUDA_DEVICE_ORDER is not PCI_BUS_ID"
    assert told("1", node(B200, PRO_6000)) == [("warning", f"may leave no GPU that a launch could use: {doubt}", fix)]
    assert told("1", node(B200, PRO_6000), **PCI) == [NARROWED]
    ended = "leaves fewer GPUs than it names: 7 ends the list: there is no such GPU, the last is 1"
    assert told("1,7,0", TWO) == [("warning", ended, "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0,1")]
    assert told("MIG-99", node(PRO_6000, mig=True)) == [NARROWED]


@pytest.mark.parametrize("of", [node(), Node(None, None, (), "NVML Shared Library Not Found")], ids=["none", "no-driver"])
def test_on_a_node_without_gpus_it_says_what_it_said(of):
    assert told("7", of) == told("GPU-7", of) == [NARROWED]
    hides = "CUDA_VISIBLE_DEVICES='' hides every GPU: a launch in this environment could not work"
    assert told("", of) == [("fatal", hides, "unset CUDA_VISIBLE_DEVICES")]


def test_what_a_launch_does_not_see_needs_no_objects():
    """Objects of a hidden card were asked for, and their absence called fatal."""

    def arches(value):
        return gather(
            {"CUDA_VISIBLE_DEVICES": value, **PCI}, cache_dir="/nonexistent", arches=(), build_node=False, node=node(SPARK, PRO_6000)
        ).arches

    assert arches("1") == ("sm_120a",)
    assert arches("1,0") == ("sm_120a", "sm_121a")
    assert arches("7") == ("sm_121a", "sm_120a"), "a finding says so; what to warm is that of the node"
