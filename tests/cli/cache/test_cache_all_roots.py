"""`cache ls --all-roots`: other tools' caches beside ours, in every output mode."""

import os
import re
import shlex
import subprocess

import pytest


@pytest.fixture
def node(cache, filled):
    """Our cache, a b12x one, Triton's, and vLLM's inside a folder that Triton's variable names; nothing else exists."""
    home = cache.home
    files = {
        ".cache/b12x/compile/ab": (f"ab{'0' * 62}.o", f"ab{'0' * 62}.json"),
        "jit/KEY1": ("kernel.cubin", "kernel.json"),
        "jit/vllm/torch_compile_cache/hash/rank_0_0": ("graph.py",),
    }
    for folder, names in files.items():
        (home / folder).mkdir(parents=True)
        for name in names:
            (home / folder / name).write_bytes(b"0123456789")
    cache.env = {name: value for name, value in cache.env.items() if not name.startswith(("TRITON_", "TORCH", "FLASHINFER_", "VLLM_", "B12X_"))}
    (home / "tmp").mkdir()
    cache.env |= {"TRITON_CACHE_DIR": str(home / "jit"), "VLLM_CACHE_ROOT": str(home / "jit/vllm"), "TMPDIR": str(home / "tmp")}
    return cache


def test_every_root_in_every_mode(node):
    done = node.every_mode("cache", "ls", "--all-roots", rows="roots")
    rows = {row["tool"]: row for row in done["json"].json["roots"] if row["exists"]}
    home = node.home
    assert list(rows) == ["mlactl", "b12x", "triton", "vllm"]
    assert [row["path"] for row in rows.values()] == [
        str(path) for path in (node.cache_dir, home / ".cache/b12x/compile", home / "jit", home / "jit/vllm")
    ]
    assert [(row["entries"], row["counted"]) for row in rows.values()] == [(6, "objects"), (1, "objects"), (2, "kernels"), (1, "compilations")]
    assert [row["prunable"] for row in rows.values()] == [True, True, False, False]
    assert [row["source"] for row in rows.values()] == ["MLACTL_CACHE_DIR", "default", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT"]
    assert (rows["triton"]["bytes"], rows["triton"]["inodes"]) == (30, 9)
    assert (rows["vllm"]["inside"], rows["triton"]["inside"], rows["vllm"]["shared_with"]) == ("triton", None, [])
    assert rows["mlactl"]["bytes"] == sum(path.stat().st_size for path in node.cache_dir.rglob("*") if path.is_file())
    assert (rows["mlactl"]["mode"], rows["mlactl"]["uid"], rows["mlactl"]["network"]) == ("0700", os.getuid(), False)
    absent = [row for row in done["json"].json["roots"] if not row["exists"]]
    assert {row["tool"] for row in absent} >= {"b12x", "flashinfer", "torch-inductor", "cute-dsl"}
    assert all(row["entries"] is None and row["bytes"] is None for row in absent)
    assert done["quiet"].lines == [row["path"] for row in rows.values()]


def test_people_see_what_exists_and_what_prunes_it(node):
    done = node("cache", "ls", "--all-roots")
    head, *rows = [re.sub(r" {2,}", "  ", line) for line in done.lines]
    assert head == "tool  path  size  entries  inodes  owner  filesystem  prunable  found by"
    assert [row.split("  ")[0] for row in rows] == ["mlactl", "b12x", "triton", "vllm"]
    assert rows[2].startswith(f"triton  {node.home}/jit  30 B  2 kernels  9  ")
    assert rows[2].endswith("  no  TRITON_CACHE_DIR")
    assert f"{node.home}/jit/vllm lies inside the root of triton, which counts it too\n" in done.stderr
    assert re.search(r"\n\d+ places where nothing exists: --all lists them\n", done.stderr)
    ours = f"hint: mlactl cache prune --root-kind mlactl --cache-dir {node.cache_dir} --dry-run\n"
    theirs = f"hint: mlactl cache prune --root-kind b12x --cache-dir {node.home}/.cache/b12x/compile --unused-for 30d --dry-run\n"
    assert done.stderr.endswith(ours + theirs)
    everything = node("cache", "ls", "--all-roots", "--all").lines
    assert f"flashinfer  {node.home}/.cache/flashinfer (does not exist)" in [line.partition("  -")[0] for line in everything]


def test_each_hint_works_as_it_is_typed(node, tmp_path):
    """One hint for all of b12x's roots exited 2, for want of a selector, and looked at the newest era's alone."""
    old, space = node.home / ".cache/sparkinfer/cute_compile/cd", tmp_path / "with space"
    for folder in (old, space / "cd", node.home / ".cache/sparkinfer/compile"):
        folder.mkdir(parents=True)
    for folder in (old, space / "cd"):
        (folder / f"cd{'0' * 62}.o").write_bytes(b"0123456789")
    done = node("cache", "ls", "--all-roots", "--cache-dir", node.cache_dir, env={"B12X_CUTE_COMPILE_CACHE_DIR": str(space)})
    commands = [shlex.split(line.removeprefix("hint: ")) for line in done.stderr.splitlines() if line.startswith("hint: ")]
    roots = [str(node.cache_dir), f"{node.home}/.cache/b12x/compile", str(old.parent), str(space)]
    assert [words[words.index("--cache-dir") + 1] for words in commands] == roots, "and none for a root that holds nothing"
    for words, root in zip(commands, roots, strict=True):
        ran = node(*words[1:], "--json")
        assert (words[0], ran.code, ran.json["root"]) == ("mlactl", 0, root)


def test_the_option_is_for_our_roots_and_its_layers_are_not_pruned(node, tmp_path):
    done = node("cache", "ls", "--all-roots", "--cache-dir", f"{tmp_path / 'own'}:{node.cache_dir}", "--json")
    ours = [row for row in done.json["roots"] if row["tool"] == "mlactl"]
    assert [(row["exists"], row["prunable"], row["remark"], row["source"]) for row in ours] == [
        (False, True, None, "--cache-dir"),
        (True, False, "read-only layer", "--cache-dir"),
    ]


def test_filters_of_entries_do_not_go_with_it(node):
    done = node("cache", "ls", "--all-roots", "--kernel", "test.tiny")
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --all-roots lists roots, which --kernel, --arch and --status do not filter\n")


def test_it_is_about_roots_of_every_kind(node):
    """--root-kind was taken and ignored."""
    for kind in ("b12x", "mlactl"):
        done = node("cache", "ls", "--all-roots", "--root-kind", kind)
        assert (done.code, done.stdout) == (2, "")
        assert done.stderr == "error: --all-roots lists roots of every kind\nhint: mlactl cache ls --all-roots, without --root-kind\n"
    assert node("cache", "ls", "--all-roots", "--root-kind", "auto").code == 0


def test_a_line_break_in_a_path_stays_on_its_line(node):
    """It was printed as it is, so that a folder's name could look like a warning or a command."""
    odd = node.home / "odd\nhint rm -rf x"
    (odd / "v1" / "ab").mkdir(parents=True)
    (odd / "v1" / "ab" / f"ab{'0' * 62}.so").write_bytes(b"0123456789")
    (odd / "jit").mkdir()
    done = node("cache", "ls", "--all-roots", env={"MLACTL_CACHE_DIR": str(odd), "TRITON_CACHE_DIR": str(odd / "jit")})
    assert (done.code, "\nhint rm" in done.stdout + done.stderr) == (0, False)
    assert f"{node.home}/odd\\nhint rm -rf x/jit lies inside the root of mlactl, which counts it too\n" in done.stderr
    (command,) = [line.removeprefix("hint: ") for line in done.stderr.splitlines() if "--root-kind mlactl" in line]
    told = subprocess.run(
        ["bash", "-c", f"printf %s {command.partition('--cache-dir ')[2].rpartition(' --dry-run')[0]}"], capture_output=True, check=True
    )
    assert told.stdout.decode() == str(odd), "and the command names it as a shell takes it"


def test_nothing_anywhere_is_clean(cache):
    cache.env = {name: value for name, value in cache.env.items() if not name.startswith(("TRITON_", "TORCH", "FLASHINFER_", "VLLM_", "B12X_"))}
    (cache.home / "tmp").mkdir()
    done = cache("cache", "ls", "--all-roots", env={"TMPDIR": str(cache.home / "tmp")})
    assert (done.code, done.stdout) == (0, "")
    assert "no compile cache exists in this environment\n" in done.stderr
