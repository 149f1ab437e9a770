"""Sparse decode code of both variants, to publish under the facts it was compiled for or under others'.

Compiled by the real compiler in a process of its own; as a script: `scale_bodies.py FOLDER ARCH:IDENTITY ...`.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

PLACEHOLDER = "0" * 64
RECORD = "nvfp4_ds_mla_432"


def spec_of(identity: int, record: str = RECORD):
    from mlactl.kernels.mla import sparse_policy

    return sparse_policy.forward_spec("decode", "heads16", "bf16", record, identity)


class Bodies:
    """`bodies["sm_120a", 0]` is the exported object of the dynamic variant, its symbol the placeholder's."""

    def __init__(self, folder: Path, wanted: list[tuple[str, int]]) -> None:
        names = [f"{arch}:{identity}" for arch, identity in wanted]
        ran = subprocess.run([sys.executable, __file__, folder, *names], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr[-3000:]
        self.data = {(arch, identity): (folder / f"{arch}-{identity}.o").read_bytes() for arch, identity in wanted}

    def __getitem__(self, wanted: tuple[str, int]) -> bytes:
        return self.data[wanted]


def publish(store, body: bytes, arch: str, identity: int, *, record: str = RECORD, version: int | None = None, facts: dict | None = None):
    """Publishes code as if it had been compiled for these facts: the manifest fits it in every other respect.

    `facts` replaces all of them, in an older registry's way.
    """
    import tiny
    from stand_ins import link

    from mlactl.cache.key import inputs_for
    from mlactl.kernels.spec import CompileSpec

    spec = spec_of(identity, record)
    inputs = inputs_for(spec, arch)
    if facts is not None or version is not None:
        changed = CompileSpec.of(spec.kernel_id, spec.version if version is None else version, dict(spec.facts) if facts is None else facts)
        inputs = replace(inputs, spec=changed)
    return tiny.published(store, inputs, link(body.replace(PLACEHOLDER.encode(), inputs.key().encode())))


def main() -> None:
    import warnings

    from mlactl.cache.key import symbol_for
    from mlactl.kernels.compiler import compile_object, load_export_libraries

    warnings.simplefilter("ignore")
    folder, flavour = Path(sys.argv[1]), load_export_libraries()
    for name in sys.argv[2:]:
        arch, _, identity = name.partition(":")
        compile_object(spec_of(int(identity)), arch, symbol_for(PLACEHOLDER), flavour, folder / f"{arch}-{identity}.o")


if __name__ == "__main__":
    main()
