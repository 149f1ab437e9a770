"""`mlactl doctor` as a process of its own: every output mode and exit code, real objects, cards that are made up."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from command_line import Cli
from fabricated import b12x_entry
from scale_files import v1, write_json

HERE = Path(__file__).resolve().parent
LAUNCH = f"""
import os, sys
sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent)!r}]
import doctor_nodes, tiny_warmup
tiny_warmup.patch()
import mlactl.doctor.examination as examination
if "TEST_CARDS" in os.environ:
    cards = [getattr(doctor_nodes, name) for name in os.environ["TEST_CARDS"].split()]
    examination.ask = lambda: doctor_nodes.node(*cards)
from mlactl.cli.app import main
sys.exit(main())
"""
WARMUP = ("warmup", "--profile", "ci-small", "--arch", "sm_120a")


def prepared(cli):
    """Profiles of three tiny kernels; a node with one RTX PRO 6000, frozen as a server is."""
    cli.launch = (sys.executable, "-c", LAUNCH)
    cli.env |= {"TINY_COUNT": "3", "TEST_CARDS": "PRO_6000", "MLACTL_FROZEN": "1"}
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "LD_PRELOAD", "VLLM_NVFP4_MLA_SCALES_FILE"):
        cli.env.pop(name, None)
    return cli


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    cli = Cli(tmp_path_factory.mktemp("warmed"))
    cli.launch = (sys.executable, str(HERE / "tiny_warmup.py"))
    assert cli(*WARMUP).code == 0
    return cli.cache_dir


@pytest.fixture
def doctor(cli):
    return prepared(cli)


@pytest.fixture
def warm(doctor, warmed):
    """The same with everything warm for sm_120a."""
    shutil.copytree(warmed, doctor.cache_dir)
    return doctor


def findings(done, severity=None):
    return [(row["severity"], row["area"], row["check"]) for row in done.json["findings"] if severity is None or row["severity"] == severity]


def test_a_warm_node_is_fine_in_every_mode(warm):
    done = warm.every_mode("doctor", "--profile", "ci-small", rows="findings")
    document = done["json"].json
    assert (document["verdict"], document["exit_code"], document["arches"], document["build_node"]) == ("fine", 0, ["sm_120a"], False)
    assert (document["driver"], document["driver_cuda"]) == ("580.95.05", 13000)
    assert document["gpus"] == [{"index": 0, "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition", "capability": "12.0", "arch": "sm_120a"}]
    assert {row["severity"] for row in document["findings"]} <= {"ok", "notice"}
    assert ("ok", "profiles", "coverage") in findings(done["json"])
    assert done["quiet"].stdout == ""
    lines = done["human"].lines
    assert [line for line in lines if not line.startswith(" ")][:-1] == [
        "gpu", "toolchain", "loading", "cache", "objects", "environment", "scales", "profiles",
    ]  # fmt: skip
    assert "  ok       profile ci-small for sm_120a: 3 of 3 objects are warm" in lines
    assert "  ok       3 objects for sm_120a that a lookup here finds" in lines
    assert lines[-1].startswith("this node is fine: 1 notice, ")


def test_without_a_profile_those_begun_are_covered(warm):
    entry = next((warm.cache_dir / "v1").glob("*/*.json"))
    entry.unlink()
    done = warm("doctor", "--json")
    assert done.code == 1
    begun = [(row["severity"], row["what"]) for row in done.json["findings"] if row["check"] == "missing-objects"]
    assert {severity for severity, _ in begun} == {"warning"}
    assert any(what.startswith("profile ci-small for sm_120a: 2 of 3 objects are warm, 1 missing") for _, what in begun)
    done = warm("doctor", "--profile", "ci-small", "--json")
    assert (done.code, findings(done, "fatal")) == (3, [("fatal", "profiles", "missing-objects")]), "a frozen server of it would fail"
    done = warm("doctor", "--profile", "ci-small", "--json", env={"MLACTL_FROZEN": None})
    assert (done.code, findings(done, "error")) == (1, [("error", "cache", "damaged"), ("error", "profiles", "missing-objects")])


def test_a_device_of_another_capability_finds_no_object(warm):
    """C11: device 12.1 with a cache for sm_120a alone; exit 3 only where the first launch could not compile it."""
    done = warm("doctor", "--json", env={"TEST_CARDS": "SPARK", "MLACTL_FROZEN": None})
    assert (done.code, findings(done, "error")) == (1, [("error", "objects", "no-object")])
    done = warm("doctor", env={"TEST_CARDS": "SPARK"})
    assert done.code == 3
    words = "no object for sm_121a; there are objects for sm_120a, which never load on it"
    at = done.lines.index(f"  fatal    {words}, and MLACTL_FROZEN=1 forbids compiling at launch")
    assert done.lines[at + 1 : at + 3] == [
        "           expected: objects for sm_121a",
        "           fix: mlactl warmup --profile NAME --arch sm_121a",
    ]
    assert done.lines[-1].startswith("a launch could not work here: 1 fatal, ")


def test_an_environment_that_hides_the_only_gpu_is_exit_3(warm):
    """Index 7 of a node with one GPU was a notice and exit 0."""
    done = warm("doctor", "-q", env={"CUDA_VISIBLE_DEVICES": "7"})
    assert (done.code, done.lines) == (3, ["fatal environment visible-devices"])


def test_a_node_without_a_gpu_says_so_and_is_checked_all_the_same(warm):
    """No card is made up here: NVML itself is asked, which a machine without a driver does not have."""
    import ctypes

    try:
        ctypes.CDLL("libnvidia-ml.so.1")
        pytest.skip("this machine has a driver")
    except OSError:
        pass
    done = warm("doctor", "--profile", "ci-small", "--json", env={"TEST_CARDS": None})
    assert (done.code, done.json["verdict"], findings(done, "fatal")) == (3, "unfit", [("fatal", "gpu", "driver")])
    assert done.json["findings"][0]["what"].startswith("no GPU can be asked, so a launch could not work here: ")
    assert ("ok", "profiles", "coverage") in findings(done)
    for option in ("--no-gpu", "--build-node"):
        done = warm("doctor", option, "--profile", "ci-small", "--json", env={"TEST_CARDS": None})
        assert (done.code, done.json["build_node"]) == (0, True)


def test_findings_are_exit_1_and_named_when_quiet(warm, tmp_path):
    done = warm.every_mode("doctor", env={"MLACTL_CAPTURE_DIR": str(tmp_path)}, code=1, rows="findings")
    assert done["quiet"].lines == ["warning environment capture"]
    assert done["human"].lines[-1].startswith("there is something to mend: 1 warning, ")


def test_fixes_name_the_root_that_was_asked_about(doctor, tmp_path):
    root = tmp_path / "other root"
    done = doctor("doctor", "--profile", "ci-small", "--cache-dir", root, "--json")
    (fix,) = [row["fix"] for row in done.json["findings"] if row["check"] == "missing-objects"]
    assert fix == f"mlactl warmup --cache-dir '{root}' --profile ci-small --arch sm_120a"
    assert f"fix: {fix}" in doctor("doctor", "--profile", "ci-small", "--cache-dir", root).stdout
    assert not root.exists(), "looking makes nothing"


@pytest.mark.parametrize("variable", ["MLACTL_CACHE_DIR", "MLACTL_CAPTURE_DIR", "MLACTL_FROZEN", "MLACTL_TRUST_ROOT", "VLLM_NVFP4_MLA_SCALES_FILE"])
def test_a_line_break_in_a_value_makes_no_line_of_its_own(warm, variable):
    """A value could add a finding, or a fix, that nobody made; ESC was escaped and this was not."""
    forged = f"{warm.home}/x\n  ok       this node is fine\x1b[2K"
    done = warm("doctor", env={variable: forged})
    lines = [line for line in done.lines if "this node is fine" in line]
    assert any(r"/x\n  ok       this node is fine\x1b[2K" in line for line in lines), done.stdout
    assert not [line for line in done.lines if line.startswith("  ok       this node")]
    assert "\x1b" not in done.stdout
    if variable == "MLACTL_CACHE_DIR":
        rows = warm("doctor", "--json", env={variable: forged}).json["findings"]
        assert any(forged in row["what"] for row in rows), "JSON has the value itself"


def test_a_root_that_is_no_folder_is_exit_3_on_a_build_node_too(doctor):
    """`::` and a read-only root were, and a file was an error with a warmup for a fix."""
    for listed in ("/etc/passwd", "/etc/passwd/below", "::"):
        done = doctor("doctor", "--no-gpu", "--json", env={"MLACTL_CACHE_DIR": listed, "MLACTL_FROZEN": None})
        assert (done.code, done.json["verdict"]) == (3, "unfit"), listed
        assert {check for severity, area, check in findings(done, "fatal") if area == "cache"} <= {"no-root", "root-unreadable", "root-unwritable"}
        assert not [row for row in done.json["findings"] if "mlactl warmup --profile" in (row["fix"] or "")]


def test_another_tools_root_by_option_is_named_and_never_warmed_into(doctor, tmp_path):
    root = tmp_path / "b12x root"
    b12x_entry(root, "attention.mla.sm120.decode", 53, {"latent_scale_identity": 1})
    done = doctor("doctor", "--profile", "ci-small", "--cache-dir", root, "--json")
    (found,) = [row for row in done.json["findings"] if row["check"] == "foreign-root"]
    assert (done.code, found["severity"], found["what"]) == (3, "fatal", f"{root} is a b12x cache, expected one of mlactl's own")
    fixes = [row["fix"] for row in done.json["findings"] if "warmup" in (row["fix"] or "")]
    assert fixes
    assert all("mlactl warmup --cache-dir DIR " in fix and str(root) not in fix for fix in fixes)


def test_a_scale_file_of_the_environment_and_of_the_option(warm, tmp_path):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    write_json(good, v1())
    write_json(bad, v1(layers=77))
    done = warm("doctor", "--profile", "glm-5.2-tp4-dcp4", "--json", env={"VLLM_NVFP4_MLA_SCALES_FILE": str(bad)})
    assert (done.code, findings(done, "error")) == (1, [("error", "scales", "invalid-scale-file")])
    done = warm("doctor", "--profile", "glm-5.2-tp4-dcp4", "--scales", good, "--json")
    assert (done.code, ("ok", "scales", "scale-file") in findings(done)) == (0, True)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--profile", "ci-smal"), "no profile named 'ci-smal', did you mean ci-small?"),
        (("--profile", "/nonexistent/x.toml"), "/nonexistent/x.toml: no such file or directory"),
        (("--arch", "sm_100a"), "--arch sm_100a is not supported, objects are made for sm_120a, sm_121a, sm_90a"),
    ],
    ids=["profile", "path", "arch"],
)
def test_what_was_typed_wrong_is_exit_2(doctor, words, error):
    done = doctor("doctor", *words)
    assert (done.code, done.stdout) == (2, "")
    assert f"error: {error}\n" in done.stderr


def test_no_home_and_no_root_is_a_finding(doctor):
    done = doctor("doctor", "--json", env={"MLACTL_CACHE_DIR": None, "HOME": "relative"})
    assert (done.code, ("fatal", "cache", "no-root") in findings(done)) == (3, True)


def test_it_changes_nothing_and_imports_no_compiler(warm):
    before = {path: path.stat().st_mtime_ns for path in sorted(warm.cache_dir.rglob("*"))}
    warm.launch = (
        sys.executable, "-c", f"{LAUNCH.replace('sys.exit(main())', '')}main(); "
        "import json; print(json.dumps(sorted(sys.modules.keys() & {'torch', 'cutlass', 'numpy', 'tvm_ffi'})))",
    )  # fmt: skip
    done = warm("doctor", "-q", "--profile", "ci-small", "--profile", "glm-5.2-tp4-dcp4")
    assert json.loads(done.lines[-1]) == []
    assert {path: path.stat().st_mtime_ns for path in sorted(warm.cache_dir.rglob("*"))} == before
