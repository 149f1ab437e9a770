"""Toolchain, loading, cache roots, objects and environment: every finding's words, severity and fix, over real folders."""

import importlib.metadata
import os
import re
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from doctor_nodes import PRO_6000, SPARK, hold_to_fixes, node
from fabricated import CU12, HERE, OLDER, b12x_entry, put
from users import ME, as_nobody, as_root, let_through

from mlactl.cache import locks, machine_code, roots, trust
from mlactl.cache import toolchain as toolchains
from mlactl.doctor import cache_roots, compiling, coverage, environment, loading, objects, situation
from mlactl.doctor.findings import Severity
from mlactl.doctor.situation import gather
from mlactl.errors import EnvironmentUnfit
from mlactl.kernels.registry import DENSE_MERGE

MERGE = DENSE_MERGE.spec(groups=1, value_width=512)
MERGES = tuple(DENSE_MERGE.spec(groups=groups, value_width=512) for groups in (1, 4, 8))


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    hold_to_fixes(monkeypatch)
    for name in list(os.environ):
        if name.startswith(("MLACTL_", "CUTE_DSL_", "XDG_CACHE")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(toolchains, "_probe", lambda: HERE)
    monkeypatch.setattr(situation, "linker", lambda: "GNU ld 2.44")
    monkeypatch.setattr(compiling, "linker", lambda: "GNU ld 2.44")


@pytest.fixture
def root(tmp_path):
    return tmp_path / "cache"


def at(root, environ=None, *, build_node=False, of=None, arches=()):
    """The situation of a node with one RTX PRO 6000, or another one, over this root."""
    home = {"HOME": "/nonexistent/home", "MLACTL_FROZEN": "1"}
    return gather({**home, **(environ or {})}, cache_dir=str(root), arches=arches, build_node=build_node, node=of or node(PRO_6000))


def told(findings, *, of=None):
    """(severity, check, what) of everything that is not ok, or of one check."""
    return [
        (finding.severity.value, finding.check, finding.what) for finding in findings if (finding.check == of if of else finding.severity != "ok")
    ]


def fix_of(findings, check):
    return next((finding.expected, finding.fix) for finding in findings if finding.check == check)


# ---- toolchain


def test_a_toolchain_that_made_the_whole_cache_is_fine(root, monkeypatch):
    monkeypatch.setattr(compiling.machine_code, "find_disassembler", lambda: Path("/usr/bin/nvdisasm"))
    put(root, MERGE)
    found = list(compiling.check(at(root)))
    assert told(found) == []
    assert [finding.what for finding in found] == [
        "nvidia-cutlass-dsl 4.8.1 cu13, tvm-ffi 0.1",
        "GNU ld 2.44",
        "nvdisasm: /usr/bin/nvdisasm",
        "1 object in the cache, all made by it",
        "CUDA 13.0 of the driver fits cu13 objects",
    ]


def test_objects_of_another_toolchain_are_told_with_what_differs(root):
    put(root, MERGES[0])
    put(root, MERGES[1], toolchain=OLDER)
    found = list(compiling.check(at(root)))
    words = "1 of 2 objects were made by another toolchain, which a lookup here never finds: 1 by nvidia-cutlass-dsl 4.7.0 cu13, tvm-ffi 0.1"
    assert told(found, of="cache-toolchain") == [("notice", "cache-toolchain", words)]
    fix = "mlactl warmup --profile NAME makes them anew; mlactl cache prune --stale --dry-run shows what is left over"
    assert fix_of(found, "cache-toolchain") == ("objects made by nvidia-cutlass-dsl 4.8.1 cu13, tvm-ffi 0.1", fix)


def test_a_cache_of_another_toolchain_alone_is_a_warning_naming_the_part(root):
    core = replace(HERE, distributions=(("nvidia-cutlass-dsl", "4.8.1"), ("nvidia-cutlass-dsl-libs-base", "4.8.0")))
    put(root, MERGE, toolchain=core)
    ((severity, _, what),) = told(compiling.check(at(root)), of="cache-toolchain")
    assert severity == "warning"
    assert what.endswith("1 by nvidia-cutlass-dsl 4.8.1 cu13, tvm-ffi 0.1 (nvidia-cutlass-dsl-libs-base 4.8.0)")


def test_no_compiler_is_a_notice_where_objects_are_served_and_fatal_where_they_are_made(root, monkeypatch):
    monkeypatch.setattr(toolchains, "_probe", lambda: "nvidia-cutlass-dsl is not installed")
    words = "no compiler here (nvidia-cutlass-dsl is not installed): lookups go by the toolchain that the cache records"
    assert told(compiling.check(at(root)), of="compiler") == [("notice", "compiler", words)]
    found = list(compiling.check(at(root, build_node=True)))
    assert told(found, of="compiler") == [("fatal", "compiler", "nothing can be compiled here: nvidia-cutlass-dsl is not installed")]
    assert fix_of(found, "compiler")[1] == "pip install 'nvidia-cutlass-dsl[cu13]==4.8.1' apache-tvm-ffi"
    put(root, MERGE)
    put(root, MERGE, toolchain=CU12)
    ((severity, _, what),) = told(compiling.check(at(root)), of="cache-toolchain")
    assert (severity, what.partition(":")[0]) == ("warning", "objects of 2 toolchains are in the cache and no compiler here says which is meant")


def test_parts_of_several_versions_are_a_warning(root, monkeypatch):
    mixed = replace(HERE, distributions=(("nvidia-cutlass-dsl", "4.8.1"), ("nvidia-cutlass-dsl-libs-cu13", "4.7.0")))
    monkeypatch.setattr(toolchains, "_probe", lambda: mixed)
    words = "parts of the compiler are of several versions: nvidia-cutlass-dsl 4.8.1, nvidia-cutlass-dsl-libs-cu13 4.7.0"
    assert told(compiling.check(at(root)), of="mixed-compiler") == [("warning", "mixed-compiler", words)]


def test_no_linker(root, monkeypatch):
    monkeypatch.setattr(compiling, "linker", lambda: None)
    words = "no usable ld in PATH: nothing can be compiled"
    assert told(compiling.check(at(root)), of="linker") == [("warning", "linker", words)]
    found = list(compiling.check(at(root, build_node=True)))
    assert told(found, of="linker") == [("fatal", "linker", words)]
    assert fix_of(found, "linker") == ("GNU ld", "apt-get install binutils")


def test_no_disassembler(root, tmp_path, monkeypatch):
    """One in PATH is none: the audit takes that of the package alone, and refused where the doctor had called it fine."""
    (tmp_path / "nvdisasm").write_text("#!/bin/sh\n")
    (tmp_path / "nvdisasm").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    real = importlib.metadata.files

    def files(name):
        if name == "nvidia-cuda-nvdisasm":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "files", files)
    found = list(compiling.check(at(root)))
    words = "no nvdisasm to read machine code with: nvidia-cuda-nvdisasm is not installed; cache audit goes by facts alone"
    assert told(found, of="disassembler") == [("warning", "disassembler", words)]
    with pytest.raises(EnvironmentUnfit) as refused:
        machine_code.find_disassembler()
    assert fix_of(found, "disassembler")[1] == refused.value.hint


def test_a_driver_older_than_the_objects_toolkit(root, monkeypatch):
    monkeypatch.setattr(toolchains, "_probe", lambda: "nvidia-cutlass-dsl is not installed")
    put(root, MERGES[0])
    old = node(PRO_6000, cuda=12080)
    found = list(compiling.check(at(root, of=old)))
    words = "the driver supports CUDA up to 12.8; 1 of 1 objects found here were made by cu13"
    assert told(found, of="driver-too-old") == [("fatal", "driver-too-old", words)]
    assert fix_of(found, "driver-too-old")[0] == "a driver for CUDA 13"
    put(root, MERGES[1], toolchain=CU12)
    assert told(compiling.check(at(root, of=old)), of="driver-too-old")[0][0] == "error"
    assert told(compiling.check(at(root, of=old, build_node=True)), of="driver-too-old") == []


def test_a_driver_older_than_objects_that_no_lookup_finds_is_no_fault(root, monkeypatch):
    """Driver 12.8 over a cache warmed as cu13: lookups ask for cu12 and a miss compiles it, and a launch was called impossible."""
    put(root, MERGES[0])
    monkeypatch.setattr(toolchains, "_probe", lambda: CU12)
    found = at(root, {"MLACTL_FROZEN": ""}, of=node(PRO_6000, cuda=12080))
    rows = [*compiling.check(found), *loading.check(found), *objects.check(found)]
    assert [row[:2] for row in told(rows) if row[0] in ("fatal", "error")] == [("error", "not-found")]
    assert told(rows, of="driver-too-old") == []
    frozen = at(root, of=node(PRO_6000, cuda=12080))
    assert [row[:2] for row in told(objects.check(frozen))] == [("fatal", "not-found")]


# ---- loading


def test_what_a_load_needs_is_here(root):
    put(root, MERGE)
    found = list(loading.check(at(root)))
    assert told(found) == []
    assert found[0].what.startswith("runtime library of cu13: /")
    assert found[-1].what == f"objects load through {tempfile.gettempdir()}"


def test_a_missing_runtime_library_or_tvm_ffi_is_fatal(root, monkeypatch):
    monkeypatch.setattr(loading, "find_spec", lambda name: None if name == "tvm_ffi" else find_spec(name))
    monkeypatch.setattr(toolchains, "_probe", lambda: "nvidia-cutlass-dsl is not installed")
    import mlactl.kernels.runtime as runtime

    monkeypatch.setattr(runtime, "find_spec", lambda name: None)
    put(root, MERGES[0])
    found = list(loading.check(at(root)))
    assert told(found) == [
        ("fatal", "tvm-ffi", "apache-tvm-ffi is not installed: no object can be loaded, and none compiled"),
        ("fatal", "runtime-library", "libcute_dsl_runtime.so of flavour cu13 was not found: objects of cu13 cannot be loaded"),
    ]
    # With the packages installed and their files gone, the hint of the loader itself.
    assert fix_of(found, "runtime-library")[1] == "pip install --no-deps nvidia-cutlass-dsl-libs-cu13==4.8.1"
    assert fix_of(found, "tvm-ffi")[1] == "pip install apache-tvm-ffi"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """On a node without the compiler: installs a version of a package, as its metadata alone."""
    monkeypatch.setattr(toolchains, "_probe", lambda: "nvidia-cutlass-dsl is not installed")
    monkeypatch.syspath_prepend(tmp_path / "site")

    def write(name, version):
        folder = tmp_path / "site" / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        importlib.invalidate_caches()

    return write


def test_objects_of_another_tvm_ffi_abi_are_fatal_where_nothing_compiles(root, install):
    """The doctor saw that a tvm-ffi is there, and called a node fine on which no object links."""
    put(root, MERGES[0])
    assert told(loading.check(at(root))) == []
    install("apache-tvm-ffi", "0.2.1")
    found = list(loading.check(at(root)))
    words = "apache-tvm-ffi 0.2.1 is installed, and objects for this node (1) call it by ABI 0.1: they cannot be loaded"
    assert told(found) == [("fatal", "tvm-ffi-abi", words)]
    assert fix_of(found, "tvm-ffi-abi") == ("apache-tvm-ffi>=0.1.15.post2,<0.2", "pip install 'apache-tvm-ffi>=0.1.15.post2,<0.2'")
    assert told(loading.check(at(root, build_node=True)))[0][0] == "error"
    put(root, MERGES[1], toolchain=replace(HERE, tvm_ffi_abi="0.2"))
    assert [row[:2] for row in told(loading.check(at(root)))] == [("error", "tvm-ffi-abi")], "the other one can be loaded"


def test_an_older_tvm_ffi_of_the_same_abi_is_a_warning(root, install):
    put(root, MERGE)
    install("apache-tvm-ffi", "0.1.3")
    words = "apache-tvm-ffi 0.1.3 is installed, older than any that objects of ABI 0.1 were tried with"
    assert told(loading.check(at(root))) == [("warning", "tvm-ffi-old", words)]


def test_a_runtime_library_of_another_version_is_an_error(root, install):
    put(root, MERGES[0], toolchain=OLDER)
    put(root, MERGES[1], sources_digest="ab" * 32)
    found = list(loading.check(at(root)))
    words = "nvidia-cutlass-dsl-libs-cu13 4.8.1 is installed, and objects for this node (1) were made with 4.7.0"
    assert told(found) == [("error", "runtime-version", words)]
    assert fix_of(found, "runtime-version")[1] == "pip install --no-deps nvidia-cutlass-dsl-libs-cu13==4.7.0"
    install("nvidia-cutlass-dsl-libs-cu13", "4.7.0")
    assert told(loading.check(at(root))) == [], "what no lookup finds needs nothing"


def test_where_there_is_a_compiler_objects_of_others_need_nothing(root):
    put(root, MERGES[0], toolchain=OLDER)
    put(root, MERGES[1], toolchain=replace(HERE, tvm_ffi_abi="0.2"))
    assert told(loading.check(at(root))) == []


def test_a_temporary_folder_that_executes_nothing_is_fatal(root, tmp_path, monkeypatch):
    """The loader maps a checked object from a private folder there, wherever the cache itself lies."""
    monkeypatch.setattr(loading, "mount_flags", lambda path: os.ST_NOEXEC)
    found = list(loading.check(at(root, {"TMPDIR": str(tmp_path)})))
    words = f"{tmp_path} is mounted noexec: an object is loaded through a private folder there, and would not load"
    assert told(found) == [("fatal", "temporary-noexec", words)]
    assert fix_of(found, "temporary-noexec")[1] == "TMPDIR=DIR, a folder that this user may write, on a filesystem mounted without noexec"


def test_no_temporary_folder_is_fatal(root, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "temporary_folder", lambda environ: tmp_path / "absent")
    ((severity, check, what),) = told(loading.check(at(root)))
    assert (severity, check) == ("fatal", "temporary-folder")
    assert what.startswith(f"{tmp_path}/absent (in {tmp_path}: owner {ME}, mode 0700) cannot be written")


# ---- cache roots


def test_a_good_root_is_one_line(root):
    put(root, MERGE)
    (found,) = cache_roots.check(at(root))
    kind = roots.filesystem(root)
    assert (found.severity, found.check) == (Severity.OK, "root")
    assert found.what == f"{root} (owner {ME}, mode 0700): 1 entry, 0.0 MiB, on {kind}"


def test_absent_roots(root, tmp_path):
    found = list(cache_roots.check(at(f"{root}:{tmp_path}/layer")))
    assert told(found) == [
        ("notice", "root-absent", f"{root} does not exist yet"),
        ("warning", "layer-absent", f"the read-only layer {tmp_path}/layer does not exist"),
    ]
    assert fix_of(found, "root-absent")[1] == "mlactl warmup --profile NAME makes it"
    assert fix_of(found, "layer-absent")[1] == "mount it, or take it out of MLACTL_CACHE_DIR"


def test_a_file_in_the_place_of_a_root(root):
    """Nothing can be loaded from it and nothing compiled into it: as fatal as a root that is read-only."""
    root.write_text("x")
    for environ, build_node in (({}, False), ({"MLACTL_FROZEN": ""}, False), ({}, True)):
        found = list(cache_roots.check(at(root, environ, build_node=build_node)))
        words = f"{root} (owner {ME}, mode 0644) is no folder that can be entered"
        assert told(found) == [("fatal", "root-unreadable", words)]
        fix = f"name a folder instead: MLACTL_CACHE_DIR=DIR, or --cache-dir DIR; ls -ld {root} shows what is there"
        assert fix_of(found, "root-unreadable") == ("a folder", fix)
    below = list(cache_roots.check(at(root / "below", build_node=True)))
    assert [row[:2] for row in told(below)] == [("fatal", "root-unwritable")]
    assert fix_of(below, "root-unwritable")[1] == "name another root: --cache-dir DIR or MLACTL_CACHE_DIR"


def test_a_root_that_is_no_folder_beside_a_layer_with_objects_is_an_error(root, tmp_path):
    put(root, MERGE)
    (tmp_path / "file").write_text("x")
    assert told(cache_roots.check(at(f"{tmp_path}/file:{root}")))[0][:2] == ("error", "root-unreadable")


@pytest.mark.parametrize("kind", ["file", "no-root", "b12x", "read-only"])
def test_no_fix_is_a_warmup_that_would_refuse_the_root(root, kind):
    """`mlactl warmup` was the fix beside a root in which nothing can be made."""
    if kind == "file":
        root.write_text("x")
    if kind == "b12x":
        b12x_entry(root, "attention.mla.sm120.decode", 53, {"latent_scale_identity": 1})
    listed = {"no-root": "", "read-only": f":{root}"}.get(kind, str(root))
    found = gather({"HOME": "/nonexistent/home"}, cache_dir=listed, arches=(), build_node=True, node=node(PRO_6000))
    chosen = coverage.choose(found, ("ci-small",))
    rows = [*compiling.check(found), *cache_roots.check(found), *objects.check(found), *coverage.check(found, chosen, None)]
    commands = [command for row in rows for command in re.findall("mlactl warmup[^;]*", row.fix)]
    assert commands[0] == "mlactl warmup --cache-dir DIR --profile NAME --arch sm_120a"
    assert all(command.startswith("mlactl warmup --cache-dir DIR ") for command in commands)


def test_another_tools_root_is_a_finding_that_names_it(root):
    """It was `ok`, with 0 entries, and a fix that would have made it a cache of both tools."""
    b12x_entry(root, "attention.mla.sm120.decode", 53, {"latent_scale_identity": 1})
    for node_at, severity in ((at(root), "fatal"), (at(root, {"MLACTL_FROZEN": ""}), "error"), (at(root, build_node=True), "fatal")):
        found = list(cache_roots.check(node_at))
        words = f"{root} is a b12x cache, expected one of mlactl's own"
        assert [(finding.severity.value, finding.check, finding.what) for finding in found] == [(severity, "foreign-root", words)]
        assert fix_of(found, "foreign-root")[1].endswith(f"; of this one: mlactl cache ls --root-kind b12x --cache-dir {root}")
        (found,) = objects.check(node_at)
        assert found.what.startswith(f"no object for sm_120a: {words}")
        assert found.fix == "in a root of mlactl's own: mlactl warmup --cache-dir DIR --profile NAME --arch sm_120a"
    layered = at(f"{root.parent}/own:{root}")
    assert [row[:2] for row in told(cache_roots.check(layered))] == [("notice", "root-absent"), ("error", "foreign-root")]


@as_root
def test_a_root_whose_way_cannot_be_checked_has_a_fix(root, monkeypatch):
    """lstat refused on the way there is an error without a hint of its own."""
    put(root, MERGE)

    def refuse(bucket, path):
        raise trust.Untrusted(f"{path} cannot be checked: Permission denied")

    monkeypatch.setattr(cache_roots.trust, "check_folders", refuse)
    ((_, check, what),) = told(cache_roots.check(at(root, {"MLACTL_FROZEN": ""})))
    assert (check, what) == ("untrusted-root", f"{root} cannot be checked: Permission denied")


@as_root
def test_entries_that_this_user_may_not_read_are_told_and_no_hit(root, tmp_path):
    """A lookup cannot read them either: they were objects that a lookup finds, or damaged."""
    keys = [put(root, spec) for spec in MERGES]
    for folder in (root, root / "v1", *(root / "v1").iterdir()):
        folder.chmod(0o755)
    let_through(tmp_path)
    bucket = [root / "v1" / key[:2] / key for key in keys]
    bucket[0].with_suffix(".so").chmod(0o600)
    bucket[1].with_suffix(".json").chmod(0o600)

    def look():
        found = at(root)
        rows = [*cache_roots.check(found), *objects.check(found)]
        return [(row.severity.value, row.check, row.what, row.fix) for row in rows if row.check not in ("root-unwritable", "closed-above")]

    owner = "run mlactl doctor in this environment as the owner, root (uid 0), or as root"
    unreadable = f"{root}: 2 entries could not be judged, this user may not read them: each is a miss at launch"
    assert as_nobody(look) == repr([
        ("error", "entries-unreadable", unreadable, f"{owner}; for this user to load them: chmod -R a+rX {root}"),
        ("ok", "objects", "1 object for sm_120a that a lookup here finds", ""),
    ])  # fmt: skip
    bucket[2].with_suffix(".json").chmod(0o600)
    words = "no object for sm_120a: nothing in the cache can be judged, 3 entries cannot be read by this user, and MLACTL_FROZEN=1 forbids compiling"
    assert f"('fatal', 'no-object', '{words} at launch'" in as_nobody(look)
    assert told(cache_roots.check(at(root)), of="entries-unreadable") == [], "root reads them all"


@as_root
def test_coverage_says_that_missing_objects_may_be_unreadable_ones(root, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    put(root, MERGE)
    files = [path for path in root.rglob("*") if path.is_file()]
    for folder in (root, root / "v1", *(root / "v1").iterdir()):
        folder.chmod(0o755)
    let_through(tmp_path)
    for path in files:
        path.chmod(0o600)

    def look(*names):
        found = at(root)
        return [(row.check, row.what, row.fix) for row in coverage.check(found, coverage.choose(found, names), None)]

    added = "; 1 entry cannot be read by this user and may be among them"
    owner = "run mlactl doctor in this environment as the owner, root (uid 0), or as root"
    nothing = "no profile was asked for, and the cache holds no object of a known one"
    assert as_nobody(look).startswith(f"[('no-profile', '{nothing}{added}: coverage was not checked'")
    asked = as_nobody(lambda: look("ci-small"))
    assert f"{added}', '{owner}; then " in asked


def test_no_home_folder_is_fatal():
    found = gather({}, cache_dir="", arches=(), build_node=False, node=node(PRO_6000))
    ((severity, check, what),) = told(cache_roots.check(found))
    assert (severity, check, what) == ("fatal", "no-root", "cache directory list '' names no path")


def test_a_root_that_others_may_write_is_fatal_and_a_layer_an_error(root, tmp_path):
    put(root, MERGE)
    root.chmod(0o770)
    found = list(cache_roots.check(at(root)))
    ((severity, check, what),) = told(found)
    assert (severity, check) == ("fatal", "untrusted-root")
    assert what.startswith(f"{root} is not trusted: owner {ME}, mode 0770; expected that nobody but its owner may write it")
    assert fix_of(found, "untrusted-root")[1].startswith(f"chmod go-w {root}, or name the root in MLACTL_TRUST_ROOT")
    own = tmp_path / "own"
    put(own, MERGE)
    assert [row[:2] for row in told(cache_roots.check(at(f"{own}:{root}")))] == [("error", "untrusted-root")]
    # Either way round: what decides is whether another layer has objects, or a miss can compile.
    assert [row[:2] for row in told(cache_roots.check(at(f"{root}:{own}")))] == [("error", "untrusted-root")]
    assert [row[:2] for row in told(cache_roots.check(at(f":{root}")))] == [("fatal", "untrusted-root")]
    empty = at(f"{tmp_path}/empty:{root}", {"MLACTL_FROZEN": ""})
    assert [row[:2] for row in told(cache_roots.check(empty))] == [("notice", "root-absent"), ("error", "untrusted-root")]


def test_an_exempt_root_is_told(root, monkeypatch):
    put(root, MERGE)
    root.chmod(0o770)
    monkeypatch.setenv("MLACTL_TRUST_ROOT", str(root))
    words = f"{root} is trusted whatever its owner ({ME}), by MLACTL_TRUST_ROOT"
    assert told(cache_roots.check(at(root))) == [("notice", "trust-exempt", words)]


@as_root
def test_another_users_root_and_entries(root):
    key = put(root, MERGES[0])
    put(root, MERGES[1])
    os.chown(root / "v1" / key[:2] / f"{key}.so", 12_345, -1)
    ((severity, check, what),) = told(cache_roots.check(at(root)))
    assert (severity, check) == ("error", "untrusted-entry")
    assert what.startswith(f"{root}/v1/{key[:2]}/{key}.so is not trusted: owner uid 12345, mode 0644")
    os.chown(root, 12_345, -1)
    ((severity, check, what),) = told(cache_roots.check(at(root)))
    assert (severity, check) == ("fatal", "untrusted-root")
    assert what.startswith(f"{root} is not trusted: owner uid 12345, mode 0700; expected it to be owned by root or by {ME}")


@as_root
def test_a_root_that_cannot_be_read_or_written(root, tmp_path):
    put(root, MERGE)
    let_through(tmp_path)
    unknown = "no object for sm_120a: what the cache holds could not be read, or not all of it, and MLACTL_FROZEN=1 forbids compiling at launch"
    assert as_nobody(lambda: told(objects.check(at(root)))) == repr([("fatal", "no-object", unknown)])
    private = as_nobody(lambda: [(f.severity.value, f.check, f.what, f.fix) for f in cache_roots.check(at(root)) if f.counts])
    assert f"('error', 'root-unreadable', '{root}/v1 (in {root}: owner root (uid 0), mode 0700) cannot be read: Permission denied" in private
    for folder, _, files in os.walk(root):
        Path(folder).chmod(0o755)
        for name in files:
            Path(folder, name).chmod(0o644)
    shared = as_nobody(lambda: told(cache_roots.check(at(root))))
    words = f"cannot write {root}/v1 (owner root (uid 0), mode 0755): Permission denied"
    assert shared == repr([("notice", "root-unwritable", f"{words}: nothing needs to, with MLACTL_FROZEN=1")])
    compiling_server = as_nobody(
        lambda: [(f.severity.value, f.check, f.what, f.fix) for f in cache_roots.check(at(root, {"MLACTL_FROZEN": ""})) if f.counts]
    )
    assert f"('warning', 'root-unwritable', '{words}'" in compiling_server
    assert f"to only read it: MLACTL_CACHE_DIR=:{root} MLACTL_FROZEN=1" in compiling_server
    assert "('fatal', 'root-unwritable'" in as_nobody(lambda: told(cache_roots.check(at(root, build_node=True))))


@as_root
def test_roots_below_a_folder_that_may_not_be_entered(root, tmp_path):
    """Path.is_dir raises there: a doctor that crashes on a permission problem is none."""
    let_through(tmp_path)
    closed = tmp_path / "closed"
    (closed / "cache").mkdir(parents=True)
    closed.chmod(0o700)
    home = {"HOME": str(closed), "MLACTL_FROZEN": "1"}

    def whole(environ=home):
        from mlactl.doctor.examination import Request, diagnose

        report = diagnose(Request(cache_dir=f"{closed}/cache:{closed}/layer"), environ, node=node(PRO_6000))
        return [(f.severity.value, f.check, f.what) for f in report.findings if f.check == "root-unreadable"]

    words = f"{closed}/cache (in {closed}: owner root (uid 0), mode 0700) is no folder that can be entered"
    assert as_nobody(whole) == repr([("fatal", "root-unreadable", words), ("fatal", "root-unreadable", words.replace("/cache (", "/layer ("))])


def test_a_bucket_that_cannot_be_looked_at(root, tmp_path):
    key = put(root, MERGE)
    bucket = root / "v1" / key[:2]
    bucket.rename(tmp_path / "moved")
    bucket.symlink_to(tmp_path / "moved")
    ((severity, check, what),) = told(cache_roots.check(at(root)))
    assert (severity, check) == ("error", "folder-unreadable")
    assert what.startswith(f"{bucket} is a symbolic link, which is never followed below the root")


def test_network_filesystems_and_closed_folders(root, tmp_path, monkeypatch):
    put(root, MERGE)
    root.chmod(0o755)
    tmp_path.chmod(0o700)
    monkeypatch.setattr(roots, "filesystem", lambda path: "nfs4")
    found = list(cache_roots.check(at(root)))
    assert told(found) == [
        ("warning", "network", f"{root} is on a network filesystem (nfs4): locks and renames may not hold between machines"),
        ("warning", "closed-above", f"{root} is shared, but {tmp_path} above it lets no other user through"),
    ]
    assert fix_of(found, "network")[1] == "MLACTL_CACHE_DIR=/local/cache:SHARED reads the shared one as a layer"
    assert fix_of(found, "closed-above")[1] == f"chmod o+x {tmp_path}, or share a root elsewhere"


@pytest.mark.parametrize(
    ("space", "severity", "check", "what", "expected"),
    [
        ((100 << 20, None), "warning", "space", "100 MiB are free", "at least 256 MiB"),
        ((3 << 20, None), "error", "space", "3 MiB are free", "at least 256 MiB"),
        ((1 << 40, 9_000), "warning", "inodes", "9000 inodes are free, an entry takes 3", "at least 10000"),
        ((1 << 40, 12), "error", "inodes", "12 inodes are free, an entry takes 3", "at least 10000"),
    ],
    ids=["low", "full", "few-inodes", "no-inodes"],
)
def test_room(root, monkeypatch, space, severity, check, what, expected):
    put(root, MERGE)
    monkeypatch.setattr(cache_roots, "space_of", lambda path: cache_roots.Space(*space))
    found = list(cache_roots.check(at(root)))
    assert told(found) == [(severity, check, f"{root}: {what}")]
    assert fix_of(found, check)[0] == expected


def test_room_of_a_real_filesystem(tmp_path):
    state = os.statvfs(tmp_path)
    found = cache_roots.space_of(tmp_path)
    assert abs(found.free_bytes - state.f_bavail * state.f_frsize) < 1 << 30
    assert (found.inodes is None) == (state.f_files == 0)


def test_damage_quarantine_and_residue(root):
    keys = [put(root, spec) for spec in MERGES]
    files = [root / "v1" / key[:2] / key for key in keys]
    files[0].with_suffix(".so").unlink()
    files[1].with_suffix(".so").write_bytes(b"longer than it was")
    files[2].with_suffix(".json").rename(files[2].with_suffix(".quarantined"))
    files[2].with_name(f"{keys[2]}.4711-0badcafe.tmp").write_bytes(b"x")
    found = list(cache_roots.check(at(root)))
    aside = "1 quarantined entry, which no launch loads; a warmup puts another object in its place, never the same one"
    assert told(found) == [
        ("error", "damaged", f"{root}: damaged entries, each a miss at launch: 1 no-object, 1 size"),
        ("warning", "quarantined", f"{root}: {aside}"),
        ("notice", "residue", f"{root}: 1 temporary of writers that did not finish"),
    ]
    assert [row[1] for row in told(cache_roots.check(at(f":{root}")))] == ["damaged", "quarantined", "residue"]
    assert fix_of(cache_roots.check(at(f":{root}")), "residue")[1] == f"mlactl cache prune --cache-dir {root} --status temp"
    fix = "mlactl warmup --profile NAME; mlactl cache verify --repair; mlactl cache prune --status no-object --status size --dry-run"
    assert fix_of(found, "damaged") == ("entries with status ok", fix)
    assert fix_of(found, "residue")[1] == "mlactl cache prune --status temp"


def test_what_a_killed_import_left_is_named_with_its_size(root):
    """It may be as large as the bundle, and no listing showed it."""
    put(root, MERGE)
    spool = root / "v1" / "import.spool"
    spool.mkdir()
    for number in range(3):
        (spool / f"{number}.so").write_bytes(bytes(1 << 20))
    found = list(cache_roots.check(at(root)))
    assert told(found) == [("notice", "import-spool", f"{spool}: 3.0 MiB in 3 files of an import that did not finish")]
    assert fix_of(found, "import-spool")[1] == "mlactl cache prune --status temp; the next import removes it too"
    assert fix_of(cache_roots.check(at(f":{root}")), "import-spool")[1].startswith(f"mlactl cache prune --cache-dir {root} --status temp")


def test_the_spool_of_an_import_at_work_is_no_finding(root):
    put(root, MERGE)
    (root / "v1" / "import.spool").mkdir()
    layer = at(root).layers[0].layer
    with locks.import_lock(layer, wait_s=0.0, on_wait=lambda _: None):
        assert told(cache_roots.check(at(root))) == []
    assert [row[1] for row in told(cache_roots.check(at(root)))] == ["import-spool"]


def test_something_else_in_the_place_of_the_spool_stops_imports(root):
    put(root, MERGE)
    spool = root / "v1" / "import.spool"
    spool.symlink_to(root)
    words = f"{spool} is a symbolic link: no import into this root is possible"
    assert told(cache_roots.check(at(root))) == [("warning", "import-spool", words)]


def test_b12x_caches_of_several_eras(root, tmp_path, monkeypatch):
    put(root, MERGE)
    for name in ("b12x", "sparkinfer"):
        (tmp_path / ".cache" / name / "compile").mkdir(parents=True)
    found = list(cache_roots.check(at(root, {"HOME": str(tmp_path)})))
    ((severity, check, what),) = told(found)
    assert (severity, check) == ("notice", "several-eras")
    assert f"{tmp_path}/.cache/b12x/compile" in what
    assert f"{tmp_path}/.cache/sparkinfer/compile" in what
    assert (
        fix_of(cache_roots.check(at(root, {"HOME": str(tmp_path)})), "several-eras")[1]
        == "mlactl cache ls --all-roots names the command that prunes each"
    )
    monkeypatch.setattr(roots, "filesystem", lambda path: "nfs" if ".cache/b12x" in str(path) else "ext4")
    assert told(cache_roots.check(at(root, {"HOME": str(tmp_path)})))[0] == (
        "warning", "network", f"the b12x cache {tmp_path}/.cache/b12x/compile is on a network filesystem (nfs)",
    )  # fmt: skip


# ---- objects


def test_objects_that_a_lookup_finds(root):
    put(root, MERGES[0])
    put(root, MERGES[1], toolchain=OLDER)
    (found,) = objects.check(at(root))
    assert found.severity is Severity.OK
    assert found.what == "1 object for sm_120a that a lookup here finds, and 1 that it does not (mlactl cache prune --dry-run, --stale)"


def test_a_cache_for_another_card_is_as_bad_as_compiling_is_impossible(root):
    """C11: a device of 12.1 over a cache for sm_120a: no object, and the command that makes it.

    It was fatal where the first launch would compile, too.
    """
    put(root, MERGE)
    (found,) = objects.check(at(root, {"MLACTL_FROZEN": ""}, of=node(SPARK)))
    assert (found.severity, found.check) == (Severity.ERROR, "no-object")
    words = "no object for sm_121a; there are objects for sm_120a, which never load on it"
    assert found.what == f"{words}, so every first launch would compile"
    (found,) = objects.check(at(root, of=node(SPARK)))
    assert (found.severity, found.what) == (Severity.FATAL, f"{words}, and MLACTL_FROZEN=1 forbids compiling at launch")
    assert (found.expected, found.fix) == ("objects for sm_121a", "mlactl warmup --profile NAME --arch sm_121a")
    (found,) = objects.check(at(root, build_node=True, arches=("sm_121a",)))
    assert found.severity is Severity.ERROR
    assert [finding.severity.value for finding in objects.check(at(root, of=node(PRO_6000, SPARK)))] == ["ok", "error"]


def test_an_empty_cache_is_as_bad_as_compiling_is_impossible(root, monkeypatch):
    (found,) = objects.check(at(root, {"MLACTL_FROZEN": ""}))
    assert (found.severity, found.what) == (Severity.ERROR, "no object for sm_120a: the cache is empty, so every first launch would compile")
    (found,) = objects.check(at(root))
    assert (found.severity, found.what) == (
        Severity.FATAL, "no object for sm_120a: the cache is empty, and MLACTL_FROZEN=1 forbids compiling at launch",
    )  # fmt: skip
    (found,) = objects.check(at(root, build_node=True))
    assert (found.severity, found.what) == (Severity.WARNING, "no object for sm_120a: the cache is empty, nothing is warmed yet")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sources_digest": "ab" * 32}, "another sources_digest"),
        ({"host_arch": "riscv64"}, "another host_arch"),
        ({"toolchain": OLDER}, "another toolchain.distributions.nvidia-cutlass-dsl"),
        ({"spec": replace(MERGE, version=4)}, "attention.dense_mla.merge is version 5 here"),
        ({"spec": replace(MERGE, kernel_id="attention.gone")}, "this release has no kernel attention.gone"),
    ],
    ids=["sources", "host", "toolchain", "version", "kernel"],
)
def test_objects_that_no_lookup_finds_say_which_part_of_the_key_differs(root, changes, reason):
    key = put(root, MERGE, **changes)
    (found,) = objects.check(at(root))
    assert (found.severity, found.check) == (Severity.FATAL, "not-found")
    assert found.what.startswith(f"1 object for sm_120a, none of which a lookup here finds: {reason}")
    assert found.what.endswith("; MLACTL_FROZEN=1 forbids compiling at launch")
    assert found.fix == f"mlactl warmup --profile NAME --arch sm_120a; mlactl cache why {key[:12]}"
    (found,) = objects.check(at(root, {"MLACTL_FROZEN": ""}))
    assert found.severity is Severity.ERROR


def test_targets_are_the_options_then_the_gpus_then_what_is_warm(root):
    assert at(root, of=node()).arches == ("sm_120a",)
    put(root, MERGE, arch="sm_90a")
    assert at(root, of=node()).arches == ("sm_90a",)
    assert at(root, build_node=True).arches == ("sm_90a",)
    assert at(root, of=node(SPARK, PRO_6000)).arches == ("sm_121a", "sm_120a")
    assert at(root, arches=("sm_121a",)).arches == ("sm_121a",)


@pytest.mark.parametrize(
    ("environ", "patched", "words"),
    [
        ({"MLACTL_FROZEN": "1"}, None, "MLACTL_FROZEN=1 forbids compiling at launch"),
        ({}, "nvidia-cutlass-dsl is not installed", "no compiler here: nvidia-cutlass-dsl is not installed"),
        ({"CUTE_DSL_LINEINFO": "1"}, None, "CUTE_DSL_LINEINFO is set, with which nothing is compiled"),
    ],
    ids=["frozen", "compiler", "variable"],
)
def test_why_a_miss_could_not_compile(root, monkeypatch, environ, patched, words):
    if patched:
        monkeypatch.setattr(toolchains, "_probe", lambda: patched)
    assert at(root, {"MLACTL_FROZEN": "", **environ}).obstacle == words


def test_a_miss_cannot_compile_without_a_linker_or_a_root_to_write(root, monkeypatch):
    assert at(root, {"MLACTL_FROZEN": ""}).obstacle is None
    assert at(f":{root}", {"MLACTL_FROZEN": ""}).obstacle == f"every layer is read-only: {root}"
    monkeypatch.setattr(situation, "linker", lambda: None)
    assert at(root, {"MLACTL_FROZEN": ""}).obstacle == "no linker here to compile with"


# ---- environment


def test_a_plain_environment_is_fine(root, monkeypatch):
    found = gather({"MLACTL_FROZEN": "1"}, cache_dir=None, arches=(), build_node=False, node=node(PRO_6000))
    assert [(finding.severity.value, finding.what) for finding in environment.check(found)] == [
        ("ok", "no variable forks, moves or changes anything")
    ]


NOT_FROZEN = "MLACTL_FROZEN is not 1: a miss compiles inside a request instead of naming what to warm"
HIDDEN = "CUDA_VISIBLE_DEVICES='' hides every GPU: a launch in this environment could not work"
ENVIRONMENTS = {
    "frozen-word": ({"MLACTL_FROZEN": "true"}, "warning", "frozen", "MLACTL_FROZEN=true freezes nothing: a miss would compile inside a request"),
    "not-frozen": ({"MLACTL_FROZEN": ""}, "notice", "frozen", NOT_FROZEN),
    "debug": ({"MLACTL_DEBUG": "1"}, "notice", "debug", "MLACTL_DEBUG=1 prints tracebacks"),
    "misspelt": ({"MLACTL_CACHEDIR": "/x"}, "warning", "unknown-variable", "MLACTL_CACHEDIR is set and read by nothing here"),
    "capture": (
        {"MLACTL_CAPTURE_DIR": "/c"}, "warning", "capture",
        "MLACTL_CAPTURE_DIR=/c: every process records attention calls there, which takes time and disk in production",
    ),
    "trust-everything": (
        {"MLACTL_TRUST_ROOT": "/tmp"}, "warning", "trust-root",
        "MLACTL_TRUST_ROOT names /tmp: whatever anybody puts below it is loaded, and loading runs its code",
    ),
    "trust-relative": ({"MLACTL_TRUST_ROOT": "cache"}, "warning", "trust-root", "MLACTL_TRUST_ROOT names cache, which is ignored"),
    "trust-absent": ({"MLACTL_TRUST_ROOT": "/nonexistent/x"}, "warning", "trust-root", "MLACTL_TRUST_ROOT names /nonexistent/x, which is no folder"),
    "trust": ({"MLACTL_TRUST_ROOT": "/usr/lib"}, "notice", "trust-root", "MLACTL_TRUST_ROOT=/usr/lib: owners and modes below it are not checked"),
    "xdg": ({"XDG_CACHE_HOME": "/x"}, "notice", "xdg-cache-home", "XDG_CACHE_HOME moves this cache, b12x's, vLLM's and torch extensions'"),
    "xdg-relative": (
        {"XDG_CACHE_HOME": "x"}, "warning", "xdg-cache-home",
        "XDG_CACHE_HOME is a relative path: this tool ignores it as the specification says, others make a cache in every working directory",
    ),
    "libraries": (
        {"CUTE_DSL_LIBS": "/l"}, "warning", "compiler-libraries",
        "CUTE_DSL_LIBS is set: it replaces the compiler's libraries; one of another flavour than the key expects is refused",
    ),
    "dsl-arch": (
        {"CUTE_DSL_ARCH": "sm_100a"}, "notice", "compiler-variable", "CUTE_DSL_ARCH is set: loses to the target that each object is compiled for",
    ),
    "dsl-other": ({"CUTE_DSL_LOG_LEVEL": "1"}, "notice", "compiler-variable", "CUTE_DSL_LOG_LEVEL is set: it changes no object of this cache"),
    "toolkit": (
        {"CUDA_TOOLKIT_PATH": "/usr/local/cuda"}, "notice", "toolkit-path",
        "CUDA_TOOLKIT_PATH is set: it is part of b12x's cache keys and forks that cache, not this one",
    ),
    "b12x": ({"B12X_COMPILE_CACHE_DIR": "/b"}, "notice", "b12x-variables", "B12X_COMPILE_CACHE_DIR moves b12x's cache"),
    "hidden": (
        {"CUDA_VISIBLE_DEVICES": ""}, "fatal", "visible-devices", HIDDEN,
    ),
    "narrowed": (
        {"CUDA_VISIBLE_DEVICES": "GPU-0"}, "notice", "visible-devices",
        "CUDA_VISIBLE_DEVICES narrows what a launch sees; the GPUs above are all of the node's",
    ),
    "container": ({"NVIDIA_VISIBLE_DEVICES": "void"}, "notice", "container-devices", "NVIDIA_VISIBLE_DEVICES=void gives a container no GPU"),
    "moved": (
        {"TRITON_CACHE_DIR": "/t", "VLLM_CACHE_ROOT": "/v"}, "notice", "moved-caches",
        "TRITON_CACHE_DIR moves Triton's cache; VLLM_CACHE_ROOT moves vLLM's cache",
    ),
    "preload": ({"LD_PRELOAD": "/x.so"}, "notice", "preload", "LD_PRELOAD is set: its libraries are in every process, a server's too"),
}  # fmt: skip


@pytest.mark.parametrize(("environ", "severity", "check", "what"), ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_each_variable_that_matters(environ, severity, check, what):
    found = gather({"MLACTL_FROZEN": "1", **environ}, cache_dir=None, arches=(), build_node=False, node=node(PRO_6000))
    (finding,) = environment.check(found)
    assert (finding.severity.value, finding.check, finding.what) == (severity, check, what)
    assert finding.fix


@pytest.mark.parametrize("name", environment.CODE_VARIABLES)
def test_variables_that_change_code_are_errors_and_stop_a_build_node(root, name):
    words = f"{name} is set: it would change the machine code without changing its key, so nothing is compiled"
    assert told(environment.check(at(root, {name: "1"})), of="code-variable") == [("error", "code-variable", words)]
    found = list(environment.check(at(root, {name: "1"}, build_node=True)))
    assert told(found, of="code-variable")[0][0] == "fatal"
    assert fix_of(found, "code-variable") == ("unset", f"unset {name}")


def test_two_b12x_variables_disagree(root):
    both = {"B12X_COMPILE_CACHE_DIR": "/a", "SPARKINFER_COMPILE_CACHE_DIR": "/b"}
    ((severity, _, what),) = told(environment.check(at(root, both)), of="b12x-variables")
    assert severity == "warning"
    assert what.startswith("B12X_COMPILE_CACHE_DIR and SPARKINFER_COMPILE_CACHE_DIR are both set")


def test_the_option_and_the_environment_name_two_roots(root):
    """A doctor told of one root by an option must not calm anybody about a server that uses another."""
    assert told(environment.check(at(root, {"MLACTL_CACHE_DIR": "/x"}))) == [
        ("notice", "cache-dir-option", f"--cache-dir {root} was looked at; a server in this environment uses MLACTL_CACHE_DIR=/x")
    ]
    assert told(environment.check(at(root, {"MLACTL_CACHE_DIR": str(root)}))) == [
        ("notice", "cache-dir", f"MLACTL_CACHE_DIR={root} is where the cache is")
    ]


def test_values_of_other_tools_variables_are_never_told(root):
    secret = "hunter2"
    names = ("CUTE_DSL_LINEINFO", "CUTE_DSL_ARCH", "CUTE_DSL_LIBS", "CUDA_TOOLKIT_PATH", "TRITON_CACHE_DIR", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES")
    found = environment.check(at(root, {**dict.fromkeys(names, secret), "MLACTL_FROZEN": "1"}))
    assert all(secret not in f"{finding.what}{finding.expected}{finding.fix}" for finding in found)


def test_every_variable_that_the_code_reads_is_known():
    """A new MLACTL_ variable must not be called unknown by the doctor."""
    package = Path(environment.__file__).resolve().parents[1]
    read = {name for path in package.rglob("*.py") for name in re.findall(r'"(MLACTL_[A-Z_]*[A-Z])"', path.read_text())}
    assert read - set(environment.OURS) == set()
