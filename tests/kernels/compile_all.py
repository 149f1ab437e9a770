"""Compiles specs in a process of its own: `compile_all.py OUT_DIR ARCH`, or `compile_all.py --sources KERNEL_ID` to list
the kernel modules that one compile loads. The folder gets `SAMPLES`, of each kernel and decoder one."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from mlactl.kernels import compiler, registry
from mlactl.kernels.spec import CompileSpec


def file_name(spec: CompileSpec) -> str:
    return "-".join([spec.kernel_id, *(str(value) for _, value in spec.facts)]) + ".o"


EXACT = {"output": "split", "q_dtype": "bf16", "width": 576, "lengths": "causal", "selection": "exact", "window": False}
SYMBOL = "mlactl_0123abcd"
SAMPLES = (
    registry.DENSE_FORWARD.spec(tile="tok16", record="bf16", **EXACT),
    registry.DENSE_FORWARD.spec(tile="row64", record="fp8", **{**EXACT, "selection": "sparse", "lengths": "per_query"}),
    registry.DENSE_MERGE.spec(groups=8, value_width=512),
)


def loaded_sources() -> list[str]:
    root = registry.SOURCE_ROOT
    paths = [Path(module.__file__).resolve() for name, module in sys.modules.items() if name.startswith("mlactl.kernels") and module.__file__]
    return sorted(path.relative_to(root).as_posix() for path in paths)


def main() -> None:
    flavour = compiler.load_export_libraries()
    if sys.argv[1] == "--sources":
        with tempfile.TemporaryDirectory() as folder:
            compiler.compile_object(registry.kernel(sys.argv[2]).built_specs()[0], "sm_120a", "mlactl_x", flavour, Path(folder) / "x.o")
        sys.stdout.write(json.dumps(loaded_sources()))
        return
    folder, arch = Path(sys.argv[1]), sys.argv[2]
    for spec in SAMPLES:
        compiler.compile_object(spec, arch, SYMBOL, flavour, folder / file_name(spec))


if __name__ == "__main__":
    main()
