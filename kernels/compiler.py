"""Turns one compile spec into an object file with the installed nvidia-cutlass-dsl; the only importer of the compiler.

Runs in warmup's worker processes and, where a serving process may compile, in that process. Needs no GPU and no driver.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlactl.kernels import registry
from mlactl.kernels.errors import CompileFailed, EnvironmentUnfit
from mlactl.kernels.spec import ARCHES, CompileSpec

CODE_VARIABLES = (
    "CUTE_DSL_AUTO_M2S",
    "CUTE_DSL_COMPILER_BACKEND",
    "CUTE_DSL_COMPILER_OPT",
    "CUTE_DSL_DEBUG",
    "CUTE_DSL_DRYRUN",
    "CUTE_DSL_ENABLE_ASSERTIONS",
    "CUTE_DSL_ENABLE_PYIR",
    "CUTE_DSL_LINEINFO",
    "CUTE_DSL_LOC_TRACEBACKS",
    "CUTE_DSL_TOLERATE_M2M",
)
"""Variables that change what nvidia-cutlass-dsl 4.8.1 compiles and that no explicit option overrides.

Source: the fields marked `affects_compile` in its `base_dsl/env_manager.py`; CUTE_DSL_ARCH and CUTE_DSL_ENABLE_TVM_FFI
lose to `compile_options`, CUTE_DSL_LIBS is held to the key's flavour.
"""


@dataclass(frozen=True, slots=True)
class Traced:
    """What a kernel's builder returns: the jit-able entry and its fake arguments, the stream last.

    `dynamic_smem_bytes` is the shared memory that the launch asks for, a number that no ELF holds; None when not said.
    """

    entry: Callable[..., Any]
    arguments: tuple[Any, ...]
    dynamic_smem_bytes: int | None = None


def compile_options(arch: str) -> tuple[str, ...]:
    """Options handed to `cute.compile` for one target; they are part of the cache key."""
    if arch not in ARCHES:
        raise EnvironmentUnfit(f"arch {arch!r} is not supported; objects are made for {', '.join(ARCHES)}")
    return (f"--gpu-arch {arch}", "--enable-tvm-ffi")


def load_export_libraries() -> str:
    """Loads the runtime libraries that export resolves its symbols against; returns the compiler's flavour, cu12 or cu13."""
    from cutlass.runtime import find_runtime_libraries

    flavour = ""
    for library in find_runtime_libraries(enable_tvm_ffi=True):
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        flavour = next((part for part in Path(library).parts if part in ("cu12", "cu13")), flavour)
    if not flavour:
        raise EnvironmentUnfit(
            "nvidia-cutlass-dsl's runtime library is in neither a cu12 nor a cu13 folder", hint="pip install 'nvidia-cutlass-dsl[cu13]==4.8.1'"
        )
    return flavour


def refuse_code_variables() -> None:
    """Raises EnvironmentUnfit when the environment would change the machine code behind the cache key's back."""
    found = [f"{name}={os.environ[name]}" for name in CODE_VARIABLES if os.environ.get(name)]
    if found:
        raise EnvironmentUnfit(
            f"{', '.join(found)} would change the machine code without changing its key", hint=f"unset {found[0].partition('=')[0]}"
        )


def compile_object(spec: CompileSpec, arch: str, symbol: str, flavour: str, out: Path) -> int | None:
    """Compiles `spec` for `arch` and writes the relocatable object to `out`, its function exported as `symbol`.

    Returns the dynamic shared memory of its launch in bytes, when the kernel says it.

    `flavour` is what the cache key was computed with; a compiler of the other flavour gives different machine code, so
    that mismatch raises EnvironmentUnfit, as do variables that change the code. Raises NotBuiltYet for a declared kernel
    without code and CompileFailed, with the compiler's own words, for anything else that goes wrong, an export that
    writes nothing included.
    """
    declared = registry.require_built(spec)
    assert declared.builder is not None
    options = compile_options(arch)
    refuse_code_variables()
    actual = load_export_libraries()
    if actual != flavour:
        raise EnvironmentUnfit(
            f"the compiler loaded its {actual} libraries where the cache key expects {flavour}",
            hint="run mlactl cache why --profile NAME on this machine, or install the one flavour the driver needs",
        )
    import cutlass.cute as cute

    module_name, _, function_name = declared.builder.partition(":")
    try:
        traced: Traced = getattr(importlib.import_module(module_name), function_name)(dict(spec.facts))
        compiled = cute.compile(traced.entry, *traced.arguments, options=" ".join(options))
        compiled.export_to_c(os.fspath(out), function_name=symbol)
    except Exception as error:
        raise CompileFailed(f"{spec.label()} for {arch}: {type(error).__name__}: {error}") from error
    if not out.is_file() or out.stat().st_size == 0:
        raise CompileFailed(f"{spec.label()} for {arch}: the export reported success and wrote nothing to {out.name}")
    return traced.dynamic_smem_bytes
