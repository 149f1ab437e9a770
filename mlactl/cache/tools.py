"""Where each tool of an inference node keeps what it compiled: its own variables, its own defaults, what counts as an entry.

Read off the tools' own sources: FlashInfer `jit/env.py`, Triton `knobs.py`, torch 2.13 `_inductor/runtime/cache_dir_utils.py`
and `utils/cpp_extension.py`, vLLM `envs.py`, nvidia-cutlass-dsl 4.8.1 `base_dsl/cache_helpers.py`, apache-tvm-ffi
`cpp/extension.py`, the CUDA programming guide for the driver's own. Nothing here imports or runs any of them.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mlactl.cache import roots
from mlactl.cache.adapter import RootKind
from mlactl.cache.foreign.b12x import roots as b12x
from mlactl.errors import MlactlError
from mlactl.printable import shell_word

DEFAULT = "default"
"""Said in place of a variable where none decides."""

Rule = Callable[[tuple[str, ...]], str | None]
"""The entry that a file belongs to, given its path below the root as parts; None for a file of no entry."""


@dataclass(frozen=True, slots=True)
class Place:
    """One folder a tool may keep its cache in.

    `source` is the variable or option that names it, or `default`; `noun` what `rule` counts. `prune` is a command, as it would
    be typed, that shows what pruning it removes; None where mlactl must not: other tools' formats, and read-only layers of ours.
    """

    tool: str
    path: Path
    source: str
    noun: str
    rule: Rule
    prune: str | None = None
    remark: str = ""


def places(environ: Mapping[str, str], cache_dir: str | None = None) -> tuple[Place, ...]:
    """Every place in this environment, tool by tool; `cache_dir` is `--cache-dir`, for our own roots."""
    return (*_ours(environ, cache_dir), *_b12x(environ), *_others(environ))


def _ours(environ: Mapping[str, str], cache_dir: str | None) -> list[Place]:
    try:
        layers = roots.resolve(cache_dir, environ).layers
    except MlactlError:
        return []  # no home folder: there is no root to look at, and commands that need one say so
    source = "--cache-dir" if cache_dir is not None else _first_set(environ, "MLACTL_CACHE_DIR", "XDG_CACHE_HOME")
    return [
        Place(
            "mlactl",
            layer.path,
            source,
            "objects",
            _our_entry,
            _prunes("mlactl", layer.path) if layer.writable else None,
            "" if layer.writable else "read-only layer",
        )
        for layer in layers
    ]


def _b12x(environ: Mapping[str, str]) -> list[Place]:
    return [
        Place(
            "b12x",
            _absolute(item.path),
            DEFAULT if item.variable == "HOME" else item.variable,
            "objects",
            _b12x_entry,
            _prunes("b12x", _absolute(item.path)),
            item.era,
        )
        for item in b12x.candidates(environ)
    ]


def _prunes(kind: str, path: Path) -> str | None:
    """Names kind and root: the environment may lead elsewhere, and of several eras' b12x roots the newest is taken."""
    if ":" in str(path):
        return None  # `--cache-dir` takes it for a list
    # A foreign root has no default selection.
    selector = " --unused-for 30d" if kind == RootKind.B12X else ""
    return f"mlactl cache prune --root-kind {kind} --cache-dir {shell_word(path)}{selector} --dry-run"


def _others(environ: Mapping[str, str]) -> list[Place]:
    home, tmp = home_folder(environ), temporary_folder(environ)
    cache = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")

    def place(tool: str, noun: str, rule: Rule, default: Path, *variables: tuple[str, str], below: str = "") -> Place:
        """The first variable that is set, with its suffix, else the default; `below` names the variable that moved the default."""
        for variable, suffix in variables:
            if environ.get(variable):
                return Place(tool, _absolute(_given(environ, variable) / suffix), variable, noun, rule)
        return Place(tool, _absolute(default), below if below and environ.get(below) else DEFAULT, noun, rule)

    found = [
        place("flashinfer", "kernels", _flashinfer_entry, home / ".cache/flashinfer", ("FLASHINFER_WORKSPACE_BASE", ".cache/flashinfer")),
        place("triton", "kernels", _top_folder, home / ".triton/cache", ("TRITON_CACHE_DIR", ""), ("TRITON_HOME", ".triton/cache")),
        place(
            "torch-inductor",
            "graphs",
            _inductor_entry,
            tmp / f"torchinductor_{_inductor_user(environ)}",
            ("TORCHINDUCTOR_CACHE_DIR", ""),
            below="TMPDIR",
        ),
        place("torch-extensions", "libraries", _library, cache / "torch_extensions", ("TORCH_EXTENSIONS_DIR", ""), below="XDG_CACHE_HOME"),
        place("vllm", "compilations", _vllm_entry, cache / "vllm", ("VLLM_CACHE_ROOT", ""), below="XDG_CACHE_HOME"),
        place("cute-dsl", "modules", _dsl_entry, tmp / _dsl_user(environ) / "cutlass_python_cache", ("CUTE_DSL_CACHE_DIR", ""), below="TMPDIR"),
        place("tvm-ffi", "libraries", _library, home / ".cache/tvm-ffi", ("TVM_FFI_CACHE_DIR", "")),
        place("cuda-driver", "files", _any_file, home / ".nv/ComputeCache", ("CUDA_CACHE_PATH", "")),
    ]
    if environ.get("FLASHINFER_CUBIN_DIR"):
        cubins = Path(environ["FLASHINFER_CUBIN_DIR"])
        found.insert(1, Place("flashinfer", _absolute(cubins), "FLASHINFER_CUBIN_DIR", "kernels", _flashinfer_entry, remark="downloaded kernels"))
    return found


# ---- folders of the environment


def _given(environ: Mapping[str, str], variable: str) -> Path:
    """A variable's path as its tool takes it: of these tools vLLM alone makes `~` a home folder."""
    value = environ[variable]
    if variable == "VLLM_CACHE_ROOT" and (value == "~" or value.startswith("~/")):
        return home_folder(environ) / value[2:]
    return Path(value)


def home_folder(environ: Mapping[str, str]) -> Path:
    """HOME, else what the user database says, else /: what the tools' `~` becomes."""
    return _absolute(Path(roots.home_of(environ) or "/"))


def temporary_folder(environ: Mapping[str, str]) -> Path:
    """As tempfile.gettempdir finds it: the first folder of TMPDIR, TEMP, TMP, /tmp, /var/tmp and /usr/tmp that can be written."""
    for name in (*(environ.get(variable, "") for variable in ("TMPDIR", "TEMP", "TMP")), "/tmp", "/var/tmp", "/usr/tmp"):
        if name and os.path.isdir(name) and os.access(name, os.W_OK | os.X_OK):  # noqa: PTH112
            return _absolute(Path(name))
    return Path("/tmp")


def _user(environ: Mapping[str, str], *variables: str) -> str | None:
    named = next((environ[variable] for variable in variables if environ.get(variable)), None)
    if named is not None:
        return named
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return None


def _inductor_user(environ: Mapping[str, str]) -> str:
    """getpass.getuser, with what a file name cannot hold replaced."""
    return re.sub(r'[\\/:*?"<>|]', "_", _user(environ, "LOGNAME", "USER", "LNAME", "USERNAME") or f"uid_{os.getuid()}")


def _dsl_user(environ: Mapping[str, str]) -> str:
    """The DSL's folder of the user in the temporary folder; without a name it uses the temporary folder itself."""
    return _user(environ, "USER", "USERNAME") or ""


def _first_set(environ: Mapping[str, str], *variables: str) -> str:
    return next((variable for variable in variables if environ.get(variable)), DEFAULT)


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100  links stay: the survey says what they lead to


# ---- what counts as an entry

_KEY = re.compile(r"([0-9a-f]{64})\.(so|json|o|quarantined)")


def _our_entry(parts: tuple[str, ...]) -> str | None:
    match = _KEY.fullmatch(parts[-1]) if len(parts) == 3 and parts[0] == roots.LAYOUT else None
    return match[1] if match and match[1].startswith(parts[1]) and match[2] != "o" else None


def _b12x_entry(parts: tuple[str, ...]) -> str | None:
    match = _KEY.fullmatch(parts[-1]) if len(parts) == 2 else None
    return match[1] if match and match[1].startswith(parts[0]) and match[2] in ("o", "json") else None


def _flashinfer_entry(parts: tuple[str, ...]) -> str | None:
    """A kernel library under `cached_ops`, or a downloaded cubin."""
    return "/".join(parts) if parts[-1].endswith(".cubin") or (parts[-1].endswith(".so") and "cached_ops" in parts) else None


def _top_folder(parts: tuple[str, ...]) -> str | None:
    """Triton keeps one folder for each key."""
    return parts[0] if len(parts) > 1 else None


def _inductor_entry(parts: tuple[str, ...]) -> str | None:
    """`fxgraph/<two digits>/<key>/<digest>`: one compiled graph for each key."""
    return parts[2] if len(parts) > 3 and parts[0] == "fxgraph" else None


def _vllm_entry(parts: tuple[str, ...]) -> str | None:
    """`torch_compile_cache/<key>/…` and `torch_compile_cache/torch_aot_compile/<key>/…`."""
    if len(parts) < 3 or parts[0] != "torch_compile_cache":
        return None
    return parts[1] if parts[1] != "torch_aot_compile" else "/".join(parts[1:3]) if len(parts) > 3 else None


def _dsl_entry(parts: tuple[str, ...]) -> str | None:
    return parts[0] if len(parts) == 1 and parts[0].endswith(".mlir") else None


def _library(parts: tuple[str, ...]) -> str | None:
    return "/".join(parts) if parts[-1].endswith(".so") else None


def _any_file(parts: tuple[str, ...]) -> str | None:
    return "/".join(parts)
