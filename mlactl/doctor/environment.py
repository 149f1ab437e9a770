"""Variables that move or fork a cache, or change code or behaviour where nobody looks for it.

Values of other tools' variables are never told, only that they are set: an environment holds secrets.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from mlactl.cache.foreign.b12x import roots as b12x
from mlactl.doctor import visible
from mlactl.doctor.findings import Finding, Severity
from mlactl.doctor.node import PROHIBITED, Gpu
from mlactl.doctor.situation import Situation
from mlactl.kernels.compiler import CODE_VARIABLES
from mlactl.printable import shell_word

OURS = (
    *("MLACTL_CACHE_DIR", "MLACTL_TRUST_ROOT", "MLACTL_FROZEN", "MLACTL_DEBUG", "MLACTL_CAPTURE_DIR", "MLACTL_CAPTURE_INCLUDE"),
    *("MLACTL_CAPTURE_EXCLUDE", "MLACTL_CAPTURE_MAX_BYTES", "MLACTL_CAPTURE_MAX_COUNT", "MLACTL_CAPTURE_PROFILE", "MLACTL_CAPTURE_PARALLEL"),
    "MLACTL_CAPTURE_LAYERS",
)
"""Every variable that this release reads."""

_DSL_REMARKS = {
    "CUTE_DSL_ARCH": "loses to the target that each object is compiled for",
    "CUTE_DSL_ENABLE_TVM_FFI": "loses to the options that each object is compiled with",
    "CUTE_DSL_CACHE_DIR": "moves the DSL's own file cache, which objects here bypass, and the b12x cache of older releases",
}

_MOVES = {
    "FLASHINFER_WORKSPACE_BASE": "FlashInfer's cache",
    "FLASHINFER_CUBIN_DIR": "FlashInfer's downloaded kernels",
    "TRITON_CACHE_DIR": "Triton's cache",
    "TRITON_HOME": "Triton's cache",
    "TORCHINDUCTOR_CACHE_DIR": "torch inductor's cache",
    "TORCH_EXTENSIONS_DIR": "torch extensions",
    "VLLM_CACHE_ROOT": "vLLM's cache",
    "TVM_FFI_CACHE_DIR": "tvm-ffi's cache",
    "CUDA_CACHE_PATH": "the CUDA driver's cache",
}


def check(situation: Situation) -> Iterator[Finding]:
    """Every variable that is set and matters; an `ok` when none does."""
    found = [
        *_ours(situation),
        *_capture(situation.environ),
        *_trust_root(situation.environ),
        *_xdg(situation.environ),
        *_compiler(situation),
        *_b12x(situation.environ),
        *_devices(situation),
        *_others(situation.environ),
    ]
    yield from found or [Finding("environment", Severity.OK, "environment", "no variable forks, moves or changes anything")]


def _notice(check: str, what: str, fix: str) -> Finding:
    return Finding("environment", Severity.NOTICE, check, what, "", fix)


def _warning(check: str, what: str, expected: str, fix: str) -> Finding:
    return Finding("environment", Severity.WARNING, check, what, expected, fix)


def _ours(situation: Situation) -> Iterator[Finding]:
    environ = situation.environ
    listed = environ.get("MLACTL_CACHE_DIR")
    if situation.cache_dir is not None and listed != situation.cache_dir:
        where = f"MLACTL_CACHE_DIR={listed}" if listed else "the default root"
        yield _notice(
            "cache-dir-option",
            f"--cache-dir {situation.cache_dir} was looked at; a server in this environment uses {where}",
            "export MLACTL_CACHE_DIR, if it is meant to use that one",
        )
    elif listed:
        yield _notice("cache-dir", f"MLACTL_CACHE_DIR={listed} is where the cache is", "unset MLACTL_CACHE_DIR, if not meant")
    frozen = environ.get("MLACTL_FROZEN", "")
    if frozen not in ("", "0", "1"):
        yield _warning("frozen", f"MLACTL_FROZEN={frozen} freezes nothing: a miss would compile inside a request", "1", "MLACTL_FROZEN=1")
    elif frozen != "1" and not situation.build_node:
        fix = "MLACTL_FROZEN=1 in the serving environment"
        yield _notice("frozen", "MLACTL_FROZEN is not 1: a miss compiles inside a request instead of naming what to warm", fix)
    if environ.get("MLACTL_DEBUG") == "1":
        yield _notice("debug", "MLACTL_DEBUG=1 prints tracebacks", "unset MLACTL_DEBUG")
    for name in sorted(environ):
        if name.startswith("MLACTL_") and name not in OURS:
            near = get_close_matches(name, OURS, 1)
            fix = f"did you mean {near[0]}? else unset {name}" if near else f"unset {shell_word(name)}"
            yield _warning("unknown-variable", f"{name} is set and read by nothing here", f"one of {', '.join(OURS[:5])}", fix)


def _capture(environ: Mapping[str, str]) -> Iterator[Finding]:
    folder = environ.get("MLACTL_CAPTURE_DIR")
    if folder:
        what = f"MLACTL_CAPTURE_DIR={folder}: every process records attention calls there, which takes time and disk in production"
        yield _warning("capture", what, "unset outside a debugging session", "unset MLACTL_CAPTURE_DIR")


def _trust_root(environ: Mapping[str, str]) -> Iterator[Finding]:
    for listed in filter(None, environ.get("MLACTL_TRUST_ROOT", "").split(":")):
        real = os.path.realpath(listed)
        if not listed.startswith("/"):
            yield _warning("trust-root", f"MLACTL_TRUST_ROOT names {listed}, which is ignored", "absolute paths", "MLACTL_TRUST_ROOT=/path/of/root")
        elif real in ("/", "/tmp", "/var/tmp", "/home", "/dev/shm"):
            what = f"MLACTL_TRUST_ROOT names {listed}: whatever anybody puts below it is loaded, and loading runs its code"
            yield _warning("trust-root", what, "the cache root alone", "MLACTL_TRUST_ROOT=/path/of/root")
        elif not os.path.isdir(real):  # noqa: PTH112
            yield _warning("trust-root", f"MLACTL_TRUST_ROOT names {listed}, which is no folder", "a cache root", "unset MLACTL_TRUST_ROOT")
        else:
            yield _notice(
                "trust-root", f"MLACTL_TRUST_ROOT={listed}: owners and modes below it are not checked", "unset MLACTL_TRUST_ROOT, if not meant"
            )


def _xdg(environ: Mapping[str, str]) -> Iterator[Finding]:
    folder = environ.get("XDG_CACHE_HOME")
    if folder and not folder.startswith("/"):
        what = "XDG_CACHE_HOME is a relative path: this tool ignores it as the specification says, others make a cache in every working directory"
        yield _warning("xdg-cache-home", what, "an absolute path", "XDG_CACHE_HOME=$HOME/.cache")
    elif folder:
        ours = "" if environ.get("MLACTL_CACHE_DIR") else "this cache, "
        yield _notice("xdg-cache-home", f"XDG_CACHE_HOME moves {ours}b12x's, vLLM's and torch extensions'", "unset XDG_CACHE_HOME, if not meant")


def _compiler(situation: Situation) -> Iterator[Finding]:
    environ = situation.environ
    for name in CODE_VARIABLES:
        if environ.get(name):
            what = f"{name} is set: it would change the machine code without changing its key, so nothing is compiled"
            severity = Severity.FATAL if situation.build_node else Severity.ERROR
            yield Finding("environment", severity, "code-variable", what, "unset", f"unset {name}")
    if environ.get("CUTE_DSL_LIBS"):
        what = "CUTE_DSL_LIBS is set: it replaces the compiler's libraries; one of another flavour than the key expects is refused"
        yield _warning("compiler-libraries", what, "unset", "unset CUTE_DSL_LIBS")
    for name in sorted(environ):
        if name in CODE_VARIABLES or name == "CUTE_DSL_LIBS" or not environ[name]:
            continue
        if name.startswith("CUTE_DSL_"):
            yield _notice("compiler-variable", f"{name} is set: {_DSL_REMARKS.get(name, 'it changes no object of this cache')}", f"unset {name}")
        elif name == "CUDA_TOOLKIT_PATH":
            what = "CUDA_TOOLKIT_PATH is set: it is part of b12x's cache keys and forks that cache, not this one"
            yield _notice("toolkit-path", what, "unset CUDA_TOOLKIT_PATH, if not meant")


def _b12x(environ: Mapping[str, str]) -> Iterator[Finding]:
    named = {item.variable: item.era for item in b12x.candidates(environ) if item.variable.startswith(("B12X_", "SPARKINFER_"))}
    if len(named) > 1:
        what = f"{' and '.join(named)} are both set: releases of b12x read one or the other, each with a cache of its own"
        yield _warning("b12x-variables", what, "the one that the installed release reads", f"unset all but {next(iter(named))}")
    elif named:
        yield _notice("b12x-variables", f"{next(iter(named))} moves b12x's cache", f"unset {next(iter(named))}, if not meant")


def _devices(situation: Situation) -> Iterator[Finding]:
    environ = situation.environ
    if situation.build_node:
        return
    if visible.VARIABLE in environ:
        yield _visible(situation, environ[visible.VARIABLE])
    if environ.get("NVIDIA_VISIBLE_DEVICES") in ("void", "none"):
        what = f"NVIDIA_VISIBLE_DEVICES={environ['NVIDIA_VISIBLE_DEVICES']} gives a container no GPU"
        yield _notice("container-devices", what, "NVIDIA_VISIBLE_DEVICES=all, or the indices meant")


def _visible(situation: Situation, value: str) -> Finding:
    """What CUDA_VISIBLE_DEVICES leaves of the node's GPUs; where there are none, only whether it hides them all."""
    gpus, seen = situation.node.gpus, situation.visible
    indices = ",".join(str(gpu.index) for gpu in gpus if gpu.usable)
    fix = f"{visible.ORDER}=PCI_BUS_ID {visible.VARIABLE}={indices}" if indices else f"unset {visible.VARIABLE}"
    wanted = "indices or UUIDs of GPUs that objects are made for"
    if not value.strip() or value.strip().startswith("-1"):
        what = f"{visible.VARIABLE}={value.strip()[:2]!r} hides every GPU: a launch in this environment could not work"
        return Finding("environment", Severity.FATAL, "visible-devices", what, wanted, f"unset {visible.VARIABLE}")
    if gpus and seen.gpus is not None and not any(gpu.usable for gpu in seen.gpus):
        left = "; ".join(filter(None, [seen.ended, *(f"GPU {gpu.index} {_unusable(gpu)}" for gpu in seen.gpus)]))
        what = f"{visible.VARIABLE} leaves no GPU that a launch could use: {left}"
        return Finding("environment", Severity.FATAL, "visible-devices", what, wanted, fix)
    if gpus and seen.doubt:
        what = f"{visible.VARIABLE} may leave no GPU that a launch could use: {seen.doubt}"
        return _warning("visible-devices", what, "indices that mean what nvidia-smi shows, or UUIDs", fix)
    if gpus and seen.ended:
        return _warning("visible-devices", f"{visible.VARIABLE} leaves fewer GPUs than it names: {seen.ended}", wanted, fix)
    what = f"{visible.VARIABLE} narrows what a launch sees; the GPUs above are all of the node's"
    return _notice("visible-devices", what, f"unset {visible.VARIABLE}, if not meant")


def _unusable(gpu: Gpu) -> str:
    if gpu.capability is None:
        return f"does not answer: {gpu.problem}"
    if gpu.arch is None:
        return f"({gpu.name}) has compute capability {gpu.capability[0]}.{gpu.capability[1]}, which is not supported"
    return "is in compute mode Prohibited" if gpu.compute_mode == PROHIBITED else "is divided (MIG) and has no slice"


def _others(environ: Mapping[str, str]) -> Iterator[Finding]:
    moved = [f"{name} moves {what}" for name, what in _MOVES.items() if environ.get(name)]
    if moved:
        yield _notice("moved-caches", "; ".join(moved), "mlactl cache ls --all-roots shows where they are")
    if environ.get("LD_PRELOAD"):
        yield _notice("preload", "LD_PRELOAD is set: its libraries are in every process, a server's too", "unset LD_PRELOAD, if not meant")
