"""A test-only kernel and its objects, compiled once a session by the real compiler in a process of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from mlactl.cache.key import KeyInputs, inputs_for, symbol_for
from mlactl.cache.locks import entry_lock
from mlactl.cache.publish import Build, prepare, publish_object
from mlactl.cache.roots import Layer
from mlactl.cache.store import Entry, Store
from mlactl.kernels import registry
from mlactl.kernels.registry import Bump, Fact, Kernel
from mlactl.kernels.spec import CompileSpec

HERE = Path(__file__).resolve().parent

TINY = Kernel(
    kernel_id="test.tiny",
    version=1,
    facts=(Fact("factor", int, "what it multiplies by", (2, 3, 5, 7)), Fact("dtype", str, "element type", ("f32", "i32"))),
    scalars=(),
    history=(Bump(1, "first"),),
    builder="tiny_kernel:build",
)


def register() -> None:
    """Declares the kernel in this process and makes its builder importable."""
    registry.KERNELS = {**registry.KERNELS, TINY.kernel_id: TINY}
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))


def spec(factor: int = 2, dtype: str = "f32") -> CompileSpec:
    if TINY.kernel_id not in registry.KERNELS:
        register()
    return registry.kernel(TINY.kernel_id).spec(factor=factor, dtype=dtype)


ALL = [(factor, dtype) for factor in (2, 3, 5, 7) for dtype in ("f32", "i32")]


class Prebuilt:
    """Objects of every variant for sm_120a and of factor 2 for sm_121a; one for sm_100a under an sm_120a symbol."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, symbol: str) -> Path:
        return self.folder / f"{symbol}.o"

    def compiler(self, on_compile: Callable[[str], None] = lambda _: None) -> Callable[[CompileSpec, str, str, str, Path], None]:
        """What stands in for the compiler: copies the object that the real one made."""

        def copy(spec: CompileSpec, arch: str, symbol: str, flavour: str, out: Path) -> None:
            on_compile(symbol)
            shutil.copyfile(self.path(symbol), out)

        return copy

    @property
    def impostor(self) -> Path:
        """The i32 code exported under the symbol of (factor 2, f32) for sm_120a."""
        return self.folder / "impostor.o"

    @property
    def sm_100a(self) -> Path:
        """An object whose embedded ELF says sm_100a; its symbol is that of (factor 2, f32) for sm_120a."""
        return self.folder / "sm_100a.o"


def build(folder: Path) -> None:
    """Compiles them all; runs in a process of its own, so that the test process stays without the compiler."""
    register()
    import cutlass.cute as cute
    import tiny_kernel

    from mlactl.kernels.compiler import compile_object, load_export_libraries

    flavour = load_export_libraries()
    for arch, variants in (("sm_120a", ALL), ("sm_121a", ALL[:2])):
        for factor, dtype in variants:
            wanted = spec(factor, dtype)
            symbol = symbol_for(inputs_for(wanted, arch).key())
            compile_object(wanted, arch, symbol, flavour, folder / f"{symbol}.o")
    symbol = symbol_for(inputs_for(spec(), "sm_120a").key())
    compile_object(spec(2, "i32"), "sm_120a", symbol, flavour, folder / "impostor.o")
    traced = tiny_kernel.build({"factor": 2, "dtype": "f32"})
    foreign = cute.compile(traced.entry, *traced.arguments, options="--gpu-arch sm_100a --enable-tvm-ffi")
    foreign.export_to_c(str(folder / "sm_100a.o"), function_name=symbol)


def copying(path: Path) -> Callable[[CompileSpec, str, str, str, Path], None]:
    """A compiler whose export is always this file."""
    return lambda spec, arch, symbol, flavour, out: shutil.copyfile(path, out) and None


def relabelled(entry: Entry, inputs: KeyInputs) -> Entry:
    """Publishes an entry's machine code once more, as made from other inputs (keys are of one length, so bytes can be swapped)."""
    return _publish(entry.layer, inputs, entry.object_path.read_bytes().replace(entry.key.encode(), inputs.key().encode()))


def published(store: Store, inputs: KeyInputs, data: bytes) -> Entry:
    """Publishes a linked object's bytes as made from these inputs."""
    assert store.roots.writable is not None
    return _publish(store.roots.writable, inputs, data)


def _publish(layer: Layer, inputs: KeyInputs, data: bytes) -> Entry:
    mode = prepare(layer, inputs.key())
    with entry_lock(layer, inputs.key(), exclusive=True, wait_s=5):
        return publish_object(layer, inputs, data, Build("00" * 32, "GNU ld 2.40", 0.1), mode=mode)


def run_python(code: str, *arguments: str, check: bool = True, **options: object) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter that can import this module."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(HERE)!r})\n{code}", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    assert not check or ran.returncode == 0, ran.stderr
    return ran


if __name__ == "__main__":
    build(Path(sys.argv[1]))
