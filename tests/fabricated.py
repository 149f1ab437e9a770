"""Entries whose manifest is real and whose object is only bytes of the right length: enough for everything that does not open objects."""

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from mlactl.cache.key import inputs_for, symbol_for
from mlactl.cache.manifest import SCHEMA_VERSION, Manifest, dump
from mlactl.cache.toolchain import Toolchain
from mlactl.kernels.spec import CompileSpec

HERE = Toolchain((("nvidia-cutlass-dsl", "4.8.1"), ("nvidia-cutlass-dsl-libs-base", "4.8.1")), "cu13", "0.1")
OLDER = replace(HERE, distributions=tuple((name, "4.7.0") for name, _ in HERE.distributions))
CU12 = replace(HERE, flavour="cu12")


def put(root: Path, spec: CompileSpec, /, arch: str = "sm_120a", toolchain: Toolchain = HERE, **changes: object) -> str:
    """Writes an entry into a private root and returns its key; `changes` replace parts of what the key is made from."""
    inputs = replace(inputs_for(spec, arch, toolchain), **changes)  # type: ignore[arg-type]
    key, data = inputs.key(), b"no object"
    bucket = root / "v1" / key[:2]
    for folder in (root, bucket.parent, bucket):
        folder.mkdir(exist_ok=True, mode=0o700)
    manifest = Manifest(
        schema_version=SCHEMA_VERSION, key=key, spec=inputs.spec, arch=inputs.arch, host_arch=inputs.host_arch, sources_digest=inputs.sources_digest,
        toolchain=inputs.toolchain, python="3.11", options=inputs.options, linker="GNU ld 2.44", object_sha256=sha256(data).hexdigest(),
        object_bytes=len(data), code_sha256=sha256(data).hexdigest(), symbol=symbol_for(key), signature="f(x: Tensor)", resources=(),
        created="2026-01-02T03:04:05Z", compile_s=0.5,
    )  # fmt: skip
    (bucket / f"{key}.so").write_bytes(data)
    (bucket / f"{key}.json").write_bytes(dump(manifest))
    return key


def b12x_entry(root: Path, kernel: str, version: int, facts: dict[str, object], data: bytes = b"an object") -> str:
    """Writes an entry as b12x 1.5.1 does (schema `b12x._lib.compile_manifest.v3`, format v7) and returns its key."""
    spec = json.dumps({"facts": [[name, value] for name, value in facts.items()], "kernel": kernel, "version": version}, separators=(",", ":"))
    spec_hash, kwargs_hash = sha256(spec.encode()).hexdigest(), sha256(b"{}").hexdigest()
    module, name = "b12x.attention._shared.mla.kernel", "UnifiedDecodeKernel.call_pertok"
    target = ("method", (module, name, "b12x:" + "98" * 32))
    toolchain = (("python", "cpython", (3, 11, 7)), ("torch", "2.13.0"), ("cutlass_dsl", "4.8.1"))
    options, environment = ("--enable-tvm-ffi",), (("CUTE_DSL_ARCH", ""),)
    payload = (
        "b12x_cute_compile_cache_v7_explicit_spec", target, "98" * 32, toolchain, ("cuda", (12, 0), 188),
        spec_hash, spec, kwargs_hash, "{}", options, environment,
    )  # fmt: skip
    key = sha256(repr(payload).encode()).hexdigest()
    launch = {"source": "cutlass-final-llvm-launch-config-field-2", "status": "exact", "launch_dynamic_smem_bytes": {"kernel": [79232]}}
    manifest = {
        "schema": "b12x._lib.compile_manifest.v3", "cache_key": key, "cache_format": payload[0], "cache_payload": payload,
        "cache_payload_repr": repr(payload), "object_sha256": sha256(data).hexdigest(), "object_bytes": len(data),
        "semantic_key": sha256(spec.encode()).hexdigest(), "semantic_payload": {}, "target": f"{module}.{name}",
        "target_identity": {"kind": "method", "module": module, "qualname": name},
        "package_fingerprint": "98" * 32, "toolchain": toolchain, "compile_options": options, "compile_environment": environment,
        "launch_metadata": launch, "artifact_evidence_sha256": "00" * 32,
        "compile_spec_hash": spec_hash, "compile_spec_json": spec, "compile_kwargs_hash": kwargs_hash, "compile_kwargs_json": "{}",
        "kernel_id": kernel, "compile_spec_version": version,
    }  # fmt: skip
    folder = root / key[:2]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{key}.o").write_bytes(data)
    (folder / f"{key}.json").write_text(json.dumps(manifest, sort_keys=True, separators=(",", ":")))
    return key
