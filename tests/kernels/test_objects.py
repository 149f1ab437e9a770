"""What the compiler makes of the kernels: resources inside SM120's limits, exact source lists, reproducible bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest
from compile_all import built_specs, file_name
from machine_code import embedded_cubin, kernels_of

from mlactl.kernels import registry
from mlactl.kernels.mla.config import SHARED_BYTES_LIMIT, tile_config

SCRIPT = Path(__file__).with_name("compile_all.py")
BUILT = [kernel for kernel in registry.KERNELS.values() if kernel.builder is not None]
SPECS = [spec for kernel in BUILT for spec in built_specs(kernel.kernel_id)]
ARCHES = ("sm_120a", "sm_121a")


def run(*arguments: str, **environment: str) -> str:
    done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Folder of every built variant for an arch, compiled once."""

    @lru_cache
    def folder_of(arch: str) -> Path:
        folder = tmp_path_factory.mktemp(arch)
        run(str(folder), arch)
        return folder

    return folder_of


@pytest.fixture(params=ARCHES)
def objects(request, compiled) -> Path:
    return compiled(request.param)


def test_every_variant_stays_inside_sm120(objects):
    """No local-memory access inside the loop over KV, frame at most 16 bytes (it is 0), shared memory in the budget."""
    for spec in SPECS:
        (code,) = kernels_of(objects / file_name(spec))
        assert code.frame_bytes == 0, spec.label()
        if spec.kernel_id != registry.DENSE_FORWARD.kernel_id:
            continue
        config = tile_config(str(spec.fact("tile")), str(spec.fact("record")), int(spec.fact("width")))
        assert config.shared_bytes <= SHARED_BYTES_LIMIT
        assert code.registers <= 168, "more registers than a block of 384 threads can start with"
        loops = code.loops_over_keys()
        assert loops, spec.label()
        for body in loops:
            assert code.local_accesses(body) == [], spec.label()


def test_rescaling_stays_a_branch(objects):
    """It once became over a hundred predicated multiplications a chunk, which cost compute-bound shapes 15%."""
    for spec in SPECS:
        if spec.kernel_id == registry.DENSE_FORWARD.kernel_id:
            (code,) = kernels_of(objects / file_name(spec))
            innermost = min(code.loops_over_keys(), key=len)
            predicated = [opcode for address, opcode, _ in innermost if opcode.startswith("FMUL") and address in code.predicated]
            assert len(predicated) < 16, spec.label()


@pytest.mark.parametrize("kernel_id", [kernel.kernel_id for kernel in BUILT])
def test_sources_are_exactly_what_a_compile_loads(kernel_id):
    declared = registry.kernel(kernel_id)
    assert json.loads(run("--sources", kernel_id)) == sorted({*declared.sources, *registry.INFRASTRUCTURE})
    for name in registry.INFRASTRUCTURE:
        if name.endswith("__init__.py"):
            assert not (registry.SOURCE_ROOT / name).read_bytes(), f"{name} must stay empty"


def test_objects_are_reproducible_and_free_of_paths(compiled, tmp_path):
    """Another process, home, hash seed and working folder give the same bytes."""
    home = tmp_path / "home"
    home.mkdir()
    environment = {**os.environ, "HOME": str(home), "PYTHONHASHSEED": "77", "TMPDIR": str(home)}
    done = subprocess.run([sys.executable, SCRIPT, str(tmp_path), "sm_120a"], capture_output=True, text=True, cwd=home, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    for spec in SPECS:
        data = (compiled("sm_120a") / file_name(spec)).read_bytes()
        assert (tmp_path / file_name(spec)).read_bytes() == data, spec.label()
        for path in (str(registry.SOURCE_ROOT), str(Path.home()), sys.prefix, "/tmp"):
            assert path.encode() not in data, f"{spec.label()} holds {path}"


def test_exported_symbol_is_the_callers(objects):
    data = (objects / file_name(SPECS[0])).read_bytes()
    assert b"__tvm_ffi_mlactl_0123abcd" in data
    assert embedded_cubin(objects / file_name(SPECS[0])).startswith(b"\x7fELF")
