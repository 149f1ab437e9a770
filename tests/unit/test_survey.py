"""Where each tool's cache is, from its own variables, and what is counted in it."""

import os
import stat
from pathlib import Path

import pytest
from users import as_nobody, as_root, let_through

from mlactl.cache import roots, survey
from mlactl.cache.survey import Surveyed
from mlactl.cache.tools import Place, places

KEY = "ab" + "0" * 62
VLLM = "torch_compile_cache"


def paths(environ, tool, cache_dir=None):
    return [(str(place.path), place.source) for place in places({"HOME": "/home/me", "USER": "me", **environ}, cache_dir) if place.tool == tool]


@pytest.mark.parametrize(
    ("tool", "environ", "expected"),
    [
        ("mlactl", {}, [("/home/me/.cache/mlactl", "default")]),
        ("mlactl", {"XDG_CACHE_HOME": "/x"}, [("/x/mlactl", "XDG_CACHE_HOME")]),
        ("mlactl", {"XDG_CACHE_HOME": "/x", "MLACTL_CACHE_DIR": "/a:/b"}, [("/a", "MLACTL_CACHE_DIR"), ("/b", "MLACTL_CACHE_DIR")]),
        ("flashinfer", {"XDG_CACHE_HOME": "/x"}, [("/home/me/.cache/flashinfer", "default")]),
        ("flashinfer", {"FLASHINFER_WORKSPACE_BASE": "/w"}, [("/w/.cache/flashinfer", "FLASHINFER_WORKSPACE_BASE")]),
        ("flashinfer", {"FLASHINFER_CUBIN_DIR": "/c"}, [("/home/me/.cache/flashinfer", "default"), ("/c", "FLASHINFER_CUBIN_DIR")]),
        ("triton", {}, [("/home/me/.triton/cache", "default")]),
        ("triton", {"TRITON_HOME": "/t"}, [("/t/.triton/cache", "TRITON_HOME")]),
        ("triton", {"TRITON_HOME": "/t", "TRITON_CACHE_DIR": "/c"}, [("/c", "TRITON_CACHE_DIR")]),
        ("torch-inductor", {"TORCHINDUCTOR_CACHE_DIR": "/i"}, [("/i", "TORCHINDUCTOR_CACHE_DIR")]),
        ("torch-extensions", {"XDG_CACHE_HOME": "/x"}, [("/x/torch_extensions", "XDG_CACHE_HOME")]),
        ("torch-extensions", {"XDG_CACHE_HOME": "/x", "TORCH_EXTENSIONS_DIR": "/e"}, [("/e", "TORCH_EXTENSIONS_DIR")]),
        ("vllm", {}, [("/home/me/.cache/vllm", "default")]),
        ("vllm", {"XDG_CACHE_HOME": "/x"}, [("/x/vllm", "XDG_CACHE_HOME")]),
        ("vllm", {"XDG_CACHE_HOME": "/x", "VLLM_CACHE_ROOT": "~/v"}, [("/home/me/v", "VLLM_CACHE_ROOT")]),
        ("triton", {"TRITON_CACHE_DIR": "~/c"}, [(f"{Path.cwd()}/~/c", "TRITON_CACHE_DIR")]),
        ("cute-dsl", {"CUTE_DSL_CACHE_DIR": "/d"}, [("/d", "CUTE_DSL_CACHE_DIR")]),
        ("tvm-ffi", {"TVM_FFI_CACHE_DIR": "/f", "XDG_CACHE_HOME": "/x"}, [("/f", "TVM_FFI_CACHE_DIR")]),
        ("tvm-ffi", {"XDG_CACHE_HOME": "/x"}, [("/home/me/.cache/tvm-ffi", "default")]),
        ("cuda-driver", {}, [("/home/me/.nv/ComputeCache", "default")]),
        ("cuda-driver", {"CUDA_CACHE_PATH": "/n"}, [("/n", "CUDA_CACHE_PATH")]),
    ],
)
def test_roots_come_from_each_tools_own_variables(tool, environ, expected):
    assert paths(environ, tool) == expected


def test_caches_in_the_temporary_folder_follow_tmpdir_and_the_users_name(tmp_path):
    """Inductor asks getpass, which takes LOGNAME first; the DSL takes USER. Slashes cannot stand in Inductor's folder name."""
    environ = {"TMPDIR": str(tmp_path), "LOGNAME": "a/b", "USER": "me"}
    assert paths(environ, "torch-inductor") == [(f"{tmp_path}/torchinductor_a_b", "TMPDIR")]
    assert paths(environ, "cute-dsl") == [(f"{tmp_path}/me/cutlass_python_cache", "TMPDIR")]
    assert paths({"TMPDIR": "/nonexistent/tmp"}, "torch-inductor")[0][0] != "/nonexistent/tmp/torchinductor_me"


def test_the_option_names_our_roots_and_no_other():
    assert paths({"MLACTL_CACHE_DIR": "/a"}, "mlactl", "/o:/ro") == [("/o", "--cache-dir"), ("/ro", "--cache-dir")]
    prunable = {place.tool for place in places({"HOME": "/home/me"}, "/o:/ro") if place.prune is not None}
    assert prunable == {"mlactl", "b12x"}
    commands = [place.prune for place in places({"HOME": "/home/me", "B12X_COMPILE_CACHE_DIR": "/with space"}, "/o:/ro")]
    assert commands[:3] == [
        "mlactl cache prune --root-kind mlactl --cache-dir /o --dry-run",
        None,
        "mlactl cache prune --root-kind b12x --cache-dir '/with space' --unused-for 30d --dry-run",
    ]
    # A colon would be read as a list of roots, so that there is no command to give.
    assert places({"HOME": "/home/me", "B12X_COMPILE_CACHE_DIR": "/a:b"}, "/o")[1].prune is None


def look(environ, tool, cache_dir="/nonexistent/cache", **options) -> Surveyed:
    found = survey.survey({"HOME": "/nonexistent/home", **environ}, cache_dir, **options)
    return next(one for one in found if one.place.tool == tool and (one.exists or tool != "b12x"))


def fill(folder, *files):
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"0123456789")
    return folder


@pytest.mark.parametrize(
    ("tool", "variable", "files", "entries", "noun"),
    [
        ("triton", "TRITON_CACHE_DIR", ("K1/a.cubin", "K1/a.json", "K2/b.cubin", "stray"), 2, "kernels"),
        ("torch-inductor", "TORCHINDUCTOR_CACHE_DIR", ("fxgraph/ab/fab1/x", "fxgraph/ab/fab1/y", "fxgraph/cd/fcd1/x", "ab/cab.py"), 2, "graphs"),
        ("vllm", "VLLM_CACHE_ROOT", (f"{VLLM}/h1/rank_0_0/a.py", f"{VLLM}/torch_aot_compile/h2/rank_0_0/m", "modelinfos/x.json"), 2, "compilations"),
        ("flashinfer", "FLASHINFER_CUBIN_DIR", ("a/b.cubin", "a/c.cubin", "checksums.txt"), 2, "kernels"),
        ("cute-dsl", "CUTE_DSL_CACHE_DIR", ("cute_dsl_k.mlir", "pyir_class_facts/1.facts"), 1, "modules"),
        ("torch-extensions", "TORCH_EXTENSIONS_DIR", ("py311_cu130/ext/ext.so", "py311_cu130/ext/ext.o"), 1, "libraries"),
        ("tvm-ffi", "TVM_FFI_CACHE_DIR", ("a/lib.so", "a/build.ninja"), 1, "libraries"),
        ("cuda-driver", "CUDA_CACHE_PATH", ("a/b", "index"), 2, "files"),
        ("b12x", "B12X_COMPILE_CACHE_DIR", (f"ab/{KEY}.o", f"ab/{KEY}.json", f"ab/{KEY}.lock", f"cd/{KEY}.o", "preparation/x.json"), 1, "objects"),
    ],
)  # fmt: skip
def test_entries_are_counted_by_the_tools_own_layout(tmp_path, tool, variable, files, entries, noun):
    folder = fill(tmp_path / "root", *files)
    if tool == "flashinfer":
        found = next(one for one in survey.survey({"HOME": "/nonexistent", variable: str(folder)}, "/nonexistent/c") if one.place.source == variable)
    else:
        found = look({variable: str(folder)}, tool)
    assert (found.entries, found.place.noun, found.file_bytes) == (entries, noun, 10 * len(files))
    assert found.inodes == 1 + sum(1 for _ in folder.rglob("*"))
    assert (found.complete, found.problems) == (True, ())


def test_flashinfer_and_our_own_layout(tmp_path):
    fill(
        tmp_path / ".cache/flashinfer", "0.6.8/120a/cached_ops/k1/k1.so", "0.6.8/120a/cached_ops/k1/k1.o", "90/cached_ops/k2/k2.so", "cubins/x.cubin"
    )
    assert look({"FLASHINFER_WORKSPACE_BASE": str(tmp_path)}, "flashinfer").entries == 3
    ours = fill(
        tmp_path / "ours", f"v1/ab/{KEY}.so", f"v1/ab/{KEY}.json", f"v1/ab/{KEY}.lock", f"v1/ab/{'ab' * 32}.quarantined", "v1/root.lock", "v1/cd/x.so"
    )
    found = look({}, "mlactl", str(ours))
    assert (found.entries, found.inodes, found.owner) == (2, 10, survey.trust.user_name(os.getuid()))
    assert found.mode == stat.S_IMODE(ours.stat().st_mode)


def test_links_are_not_followed_and_hard_links_count_once(tmp_path):
    outside = fill(tmp_path / "outside", "big")
    root = fill(tmp_path / "root", "K1/a")
    (root / "away").symlink_to(outside)
    (root / "K1/link").symlink_to(outside / "big")
    os.link(root / "K1/a", root / "K1/again")
    found = look({"TRITON_CACHE_DIR": str(root)}, "triton")
    assert (found.file_bytes, found.inodes, found.entries) == (10, 5, 1)
    # The root itself may be a link: whoever set the variable chose it.
    (tmp_path / "link").symlink_to(root)
    assert look({"TRITON_CACHE_DIR": str(tmp_path / "link")}, "triton").file_bytes == 10


def test_what_is_absent_or_no_folder(tmp_path):
    assert look({"TRITON_CACHE_DIR": str(tmp_path / "absent")}, "triton") == Surveyed(
        next(place for place in places({"TRITON_CACHE_DIR": str(tmp_path / "absent")}) if place.tool == "triton"), False
    )
    file = tmp_path / "file"
    file.write_text("x")
    found = look({"TRITON_CACHE_DIR": str(file)}, "triton")
    assert (found.exists, found.complete, found.problems, found.entries) == (True, False, (f"{file} is not a folder",), None)


def test_a_walk_ends_and_says_so(tmp_path):
    root = fill(tmp_path / "root", *(f"K{number}/a" for number in range(20)))
    counted = []
    found = look({"TRITON_CACHE_DIR": str(root)}, "triton", max_inodes=15)
    assert (found.complete, found.inodes) == (False, 15)
    assert found.problems == (f"counting stopped at 15 files and folders: is {root} a cache?",)
    whole = look({"TRITON_CACHE_DIR": str(root)}, "triton", on_inodes=counted.append)
    assert sum(counted) >= whole.inodes == 41


def test_roots_that_share_a_folder_or_lie_in_another(tmp_path):
    root = fill(tmp_path / "jit", "K1/a")
    (tmp_path / "other").symlink_to(root)
    inner = fill(root / "inductor", "fxgraph/ab/k/x")
    environ = {"TRITON_CACHE_DIR": str(root), "CUDA_CACHE_PATH": str(tmp_path / "other"), "TORCHINDUCTOR_CACHE_DIR": str(inner)}
    assert look(environ, "triton").shared_with == ("cuda-driver",)
    assert look(environ, "cuda-driver").shared_with == ("triton",)
    assert (look(environ, "torch-inductor").inside, look(environ, "triton").inside) == ("triton", None)


def test_network_filesystems_are_flagged(tmp_path, monkeypatch):
    monkeypatch.setattr(roots, "filesystem", lambda path: "nfs4" if "shared" in str(path) else "ext4")
    assert (look({"TRITON_CACHE_DIR": str(fill(tmp_path / "shared", "a/b"))}, "triton").network) is True
    assert (look({"TRITON_CACHE_DIR": str(fill(tmp_path / "mine", "a/b"))}, "triton").network) is False


@pytest.mark.skipif(not Path("/dev/shm").is_mount(), reason="needs a mount below a folder")
def test_another_filesystem_is_told_and_not_entered():
    place = Place("triton", Path("/dev"), "TRITON_CACHE_DIR", "files", lambda parts: None)
    found = survey._look(place, lambda _: None, 100_000)
    assert any(problem.endswith(" is another filesystem, which was not entered") for problem in found.problems)


@as_root
def test_a_folder_that_cannot_be_read_is_told_and_the_rest_counted(tmp_path):
    root = fill(tmp_path / "root", "K1/a", "K2/a", "K3/a")
    let_through(tmp_path)
    (root / "K2").chmod(0o700)

    def look_there():
        found = look({"TRITON_CACHE_DIR": str(root)}, "triton")
        return found.entries, found.complete, found.problems[0]

    assert as_nobody(look_there) == repr((2, False, f"{root}/K2 (owner root (uid 0), mode 0700) cannot be read: permission denied"))
