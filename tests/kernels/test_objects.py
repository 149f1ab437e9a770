"""What the compiler makes of the kernels: resources inside SM120's limits, exact source lists, reproducible bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from compile_all import SAMPLES, SYMBOL, file_name
from machine_code import embedded_cubin, kernels_of

from mlactl.kernels import compiler, registry
from mlactl.kernels.mla.config import SHARED_BYTES_LIMIT, tile_config
from mlactl.kernels.mla.sparse_config import sparse_tile

# The compiler warns of long unrolled loops; it is run in this process here, not in a worker.
pytestmark = pytest.mark.filterwarnings("ignore:This static loop has")

SCRIPT = Path(__file__).with_name("compile_all.py")
BUILT = [kernel for kernel in registry.KERNELS.values() if kernel.builder is not None]
ARCHES = ("sm_120a", "sm_121a")


def is_checked(spec) -> bool:
    """All variants but those that differ from a checked one in what cannot cost the loops registers: an E4M3 query only changes
    how the query is loaded, and wide records have the tile with most room to spare."""
    if spec.kernel_id != registry.DENSE_FORWARD.kernel_id:
        return True
    if spec.fact("q_dtype") == "bf16" and spec.fact("width") == 576:
        return True
    plain = (spec.fact("lengths"), spec.fact("selection"), spec.fact("window")) == ("causal", "exact", False)
    return plain and spec.fact("output") == "split" and spec.fact("tile") != "tok32"


SPECS = [spec for kernel in BUILT for spec in kernel.built_specs() if is_checked(spec)]


def run(*arguments: str, **environment: str) -> str:
    done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="session")
def flavour() -> str:
    return compiler.load_export_libraries()


def check_roles(code, tile) -> None:
    """The roles' registers fit those the launch has, which fit a multiprocessor; a copy is an instruction, not a loop over lanes."""
    compute, copy = tile.role_registers
    launch = code.registers * tile.threads
    assert compute * tile.consumer_threads + copy * (tile.threads - tile.consumer_threads) <= launch <= 65_536, "else the block hangs"
    assert [each.opcode for each in code.instructions if each.opcode.startswith("USETMAXREG")] == [
        "USETMAXREG.DEALLOC.CTAPOOL",
        "USETMAXREG.TRY_ALLOC.CTAPOOL",
    ]
    # A loop over lanes elects one of them in each round: that is how the copies of a chunk with absent tokens go, one after the other.
    counts = Counter(each.opcode.split(".")[0] for each in code.instructions)
    assert (counts["UBLKCP"], counts["ELECT"]) == (tile.copy_records + 1, 2)


# One test a variant, so that each is compiled once however the tests are spread over processes.
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("spec", SPECS, ids=file_name)
def test_every_variant_stays_inside_sm120(spec, arch, flavour, tmp_path):
    """No local-memory access inside the loop over KV, no frame, shared memory in the budget, rescaling a branch."""
    path = tmp_path / "object.o"
    compiler.compile_object(spec, arch, SYMBOL, flavour, path)
    (code,) = kernels_of(path)
    assert f"__tvm_ffi_{SYMBOL}".encode() in path.read_bytes()
    assert embedded_cubin(path).startswith(b"\x7fELF")
    assert code.frame_bytes == 0
    if spec.kernel_id in (registry.SPARSE_DECODE.kernel_id, registry.SPARSE_PREFILL.kernel_id):
        check_roles(code, sparse_tile(str(spec.fact("tile")), str(spec.fact("record"))))
    if spec.kernel_id != registry.DENSE_FORWARD.kernel_id:
        return
    config = tile_config(str(spec.fact("tile")), str(spec.fact("record")), int(spec.fact("width")), str(spec.fact("q_dtype")))
    assert config.shared_bytes <= SHARED_BYTES_LIMIT
    assert code.registers <= 168, "more registers than a block of 384 threads can start with"
    loops = code.loops_over_keys()
    assert loops
    for body in loops:
        assert code.local_accesses(body) == []
    # It once became over a hundred predicated multiplications a chunk, which cost compute-bound shapes 15%.
    predicated = [each for each in min(loops, key=len) if each.opcode.startswith("FMUL") and each.guard]
    assert len(predicated) < 16


@pytest.mark.parametrize("kernel_id", [kernel.kernel_id for kernel in BUILT])
def test_sources_are_exactly_what_a_compile_loads(kernel_id):
    declared = registry.kernel(kernel_id)
    assert json.loads(run("--sources", kernel_id)) == sorted({*declared.sources, *registry.INFRASTRUCTURE})
    for name in registry.INFRASTRUCTURE:
        if name.endswith("__init__.py"):
            assert not (registry.SOURCE_ROOT / name).read_bytes(), f"{name} must stay empty"


def test_objects_are_reproducible_and_free_of_paths(tmp_path):
    """Another process, home, hash seed and working folder give the same bytes."""
    home, first, second = (tmp_path / name for name in ("home", "first", "second"))
    for folder in (home, first, second):
        folder.mkdir()
    run(str(first), "sm_120a")
    environment = {**os.environ, "HOME": str(home), "PYTHONHASHSEED": "77", "TMPDIR": str(home)}
    done = subprocess.run([sys.executable, SCRIPT, str(second), "sm_120a"], capture_output=True, text=True, cwd=home, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    for spec in SAMPLES:
        data = (first / file_name(spec)).read_bytes()
        assert (second / file_name(spec)).read_bytes() == data, spec.label()
        for path in (str(registry.SOURCE_ROOT), str(Path.home()), sys.prefix, "/tmp"):
            assert path.encode() not in data, f"{spec.label()} holds {path}"
