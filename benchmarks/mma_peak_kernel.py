"""Compiles the mma.sync microbenchmark into a file instead of the cache; needs no GPU.

python benchmarks/mma_peak_kernel.py OBJECT.so --arch sm_90a
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

from mma_peak import SYMBOL

from mlactl.bench.objects import peak_spec
from mlactl.kernels import compiler


def compile_object(path: Path, arch: str) -> None:
    """Compiles and links the microbenchmark for `arch`."""
    relocatable = path.with_suffix(".o")
    compiler.compile_object(peak_spec(), arch, SYMBOL, compiler.load_export_libraries(), relocatable)
    subprocess.run(["ld", "-shared", "--build-id=none", "--hash-style=gnu", "-o", path, relocatable], check=True)
    relocatable.unlink()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("object", type=Path)
    parser.add_argument("--arch", required=True)
    options = parser.parse_args()
    compile_object(options.object, options.arch)
