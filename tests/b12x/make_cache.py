"""Has the released b12x package write a cache for SM120 on a machine without a GPU, then answers which keys its own loader takes.

    python make_cache.py ROOT

Prints {"keys": […], "stray": […], "sparse": […], "variable": [name, value]} once ROOT is filled: the keys of a dense forward and
merge, of the merge compiled once more with a variable set that b12x counts as a compile setting, and of what a plan over NVFP4
records with a latent scale compiles. Then, for every line
{"root": …, "keys": […]} on standard input, prints {key: what loading it gave}: "loaded", or "miss".
"""

import ctypes
import json
import multiprocessing
import os
import sys
from dataclasses import replace
from pathlib import Path

# torch asks for triton when its dynamo is imported, and must not find the stand-in that b12x gets.
import torch
import torch._dynamo

STUBS = Path(__file__).resolve().parent / "stubs"
STRAY = ("B12X_STRAY_SETTING", "hunter2-is-no-setting")
SETTINGS = {"CUDA_VISIBLE_DEVICES": "", "B12X_COMPILE_MEMORY_CACHE": "0"}


def describe_target():
    """What a compile worker of the package is told of the card that it compiles for."""
    from b12x._lib import compile_pool

    counter = multiprocessing.get_context("spawn").Array("q", (0, 0))
    uuid, name = "GPU-00000000-0000-0000-0000-000000000120", "a card with 188 SMs"
    compile_pool._initialize_worker(0, (12, 0), uuid, name, 188, 101_376, 102_400, counter)


def compile_dense():
    """A dense decode of twelve heads: its forward and its merge."""
    from b12x.attention import dense_mla
    from b12x.attention.dense_mla import _preparation as preparation
    from b12x.attention.dense_mla import _tuning as tuning

    caps = dense_mla.Caps(
        device="cuda:0",
        mode="decode",
        kv_dtype=torch.bfloat16,
        num_q_heads=12,
        page_size=256,
        max_total_q=4,
        max_batch=4,
        max_cache_tokens=16_384,
        max_page_table_width=64,
        num_cache_pages=256,
        use_cuda_graph=True,
    )
    query = preparation._query(caps, preparation._abi(preparation._canonical_invocation(caps)))
    wanted = tuning.TUNING.encode_query(replace(query, exhaustive=False))
    preparation.compile_dense_mla(wanted, tuning.TUNING.encode_config(tuning.DenseMlaConfig(max_splits=8)), 0)


def compile_sparse():
    """A sparse decode over 432-byte NVFP4 records, planned with a latent scale that is not 1."""
    from b12x.attention.sparse_mla._preparation import compile_sparse_mla
    from b12x.attention.sparse_mla._scratch import B12XSparseMLAScratchCaps

    caps = B12XSparseMLAScratchCaps(
        device="cuda:0",
        num_q_heads=16,
        max_q_rows=4,
        max_width=512,
        softmax_scale=0.07,
        kv_dtype=torch.uint8,
        scale_format=2,
        page_size=64,
        latent_scale=0.37,
        max_page_table_width=64,
        max_batch=4,
    )
    compile_sparse_mla(caps, 0, False)


def forget_merge_and_settings():
    """So that the next compile makes the merge once more: the package reads its settings, and compiles a shape, once a process."""
    from b12x._lib import compiler
    from b12x.attention.dense_mla import _kernel

    compiler._compile_environment_key.cache_clear()
    compiler._static_compile_cache_context.cache_clear()
    compiler._DEVICE_COMPILE_CACHE_CONTEXTS.clear()
    _kernel._MERGE_CACHE.clear()


def keys_in(root):
    return sorted(path.stem for path in Path(root).glob("??/*.json"))


def loads(root, key):
    """Whether the package's own loader, which checks what it reads, takes an entry."""
    from b12x._lib import compiler

    os.environ["B12X_COMPILE_CACHE_DIR"] = root
    return "miss" if compiler._load_cute_compile_from_disk(key) is None else "loaded"


def main():
    root = sys.argv[1]
    os.environ.update(SETTINGS, B12X_COMPILE_CACHE_DIR=root)
    sys.path.insert(0, str(STUBS))
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever the package prints
    describe_target()
    compile_dense()
    keys = keys_in(root)
    compile_sparse()
    sparse = sorted(set(keys_in(root)) - set(keys))
    os.environ.update([STRAY])
    forget_merge_and_settings()
    compile_dense()
    made = {"keys": keys, "stray": sorted(set(keys_in(root)) - set(keys) - set(sparse)), "sparse": sparse, "variable": STRAY}
    print(json.dumps(made), file=answers, flush=True)
    from cutlass.runtime import find_runtime_libraries

    held = [ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL) for path in find_runtime_libraries(enable_tvm_ffi=False)]
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps({key: loads(asked["root"], key) for key in asked["keys"]}), file=answers, flush=True)
    del held


if __name__ == "__main__":
    main()
