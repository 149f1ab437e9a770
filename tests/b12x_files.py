"""Caches as each era of b12x left them on nodes, written by the format page: payload tuples of every tag, manifests, objects."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECRET = "hunter2-and-a-licence-key"
TOOLCHAIN = (
    ("python", "cpython", (3, 12, 3)),
    ("torch", "2.9.0"),
    ("torch_cuda", "12.9"),
    ("cutlass_dsl", "4.3.0"),
    ("b12x_runtime_patches", (("memory_debug", True),)),
)
CUDA = ("cuda", (12, 0), 188)
OPTIONS = ("opt-level=3", "enable-assertions=false")
TARGET = ("callable_instance", "b12x.attention.dense_mla._forward", "Forward", ("b12x.attention.dense_mla._forward", "Forward.__call__", "b12x:aa"))
ENVIRONMENT = (("CC", ""), ("CUDA_HOME", SECRET), ("CUTE_DSL_ARCH", ""))
KERNEL = "attention.dense_mla.forward"
SCHEMAS = (
    "b12x.cute.compile_manifest.v3",
    "sparkinfer.cute.compile_manifest.v3",
    "sparkinfer._lib.compile_manifest.v3",
    "b12x._lib.compile_manifest.v3",
)

EXPLICIT = [f"b12x_cute_compile_cache_v{number}_explicit_spec" for number in (3, 4, 5, 6, 7)]
PLAIN = [f"b12x_cute_compile_cache_v{number}" for number in (1, 2, 3, 4)]
V7 = EXPLICIT[-1]


def tensor(name: str, ordinal: int = 0) -> list[Any]:
    dims = [["dim", "dynamic", None], ["dim", "exact", 96], ["dim", "exact", 576]]
    strides = [["dim", "exact", 55_296], ["dim", "exact", 576], ["dim", "exact", 1]]
    return ["tensor", name, "torch.bfloat16", 3, dims, strides, ["cuda", ordinal], None, None]


FACTS: tuple[tuple[str, Any], ...] = (("dtype", "bf16"), ("heads", 96), ("window_size", None), ("q", tensor("q")))


def spec_json(kernel: str = KERNEL, version: int = 4, facts: Any = FACTS) -> str:
    return json.dumps({"facts": facts, "kernel": kernel, "version": version}, sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True)
class Made:
    """What one entry is built from; `payload` is the tuple of its tag."""

    tag: str = V7
    kernel: str = KERNEL
    version: int = 4
    facts: Any = FACTS
    device: Any = CUDA
    environment: Any = ENVIRONMENT
    toolchain: Any = TOOLCHAIN
    options: Any = OPTIONS
    fingerprint: str = "f1" * 32
    target: Any = TARGET
    package: str = "b12x"
    schema: str = SCHEMAS[-1]
    arch: str = "sm_120a"
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def payload(self) -> tuple[Any, ...]:
        number, explicit = int(self.tag.partition("_v")[2][0]), self.tag.endswith("_explicit_spec")
        text = spec_json(self.kernel, self.version, self.facts)
        digest = hashlib.sha256(text.encode()).hexdigest()
        start = (self.tag, self.target, self.fingerprint)
        args, kwargs = (("tensor", (8, 96)),), ()
        variables = dict(self.environment)
        if number == 1:
            return (*start, args, kwargs, self.options, variables.get("CUTE_DSL_ARCH", ""), variables.get("CUDA_TOOLKIT_PATH", SECRET))
        start = (*start, self.toolchain)
        end = (self.options, self.environment)
        if explicit and number <= 4:
            fields = tuple(("field", name, value) for name, value in self.facts)
            return (*start, ("kernel_spec", self.kernel, self.version, fields), (), *end)
        if explicit:
            device = (self.device,) if number >= 6 else ()
            return (*start, *device, digest, text, "", "", *end)
        return (*start, *((self.device,) if number >= 3 else ()), args, kwargs, *end)

    @property
    def text(self) -> str:
        return repr(self.payload)

    @property
    def key(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def object(self) -> bytes:
        return object_file(f"{self.package}_cute_{self.key}", self.arch)

    def manifest(self, **changed: Any) -> dict[str, Any]:
        """The manifest's JSON; a field given as None is left out."""
        semantic = repr((self.tag, self.target, self.device, self.facts, self.version, self.options, self.environment))
        found = {
            "schema": self.schema,
            "cache_key": self.key,
            "cache_format": self.tag,
            "cache_payload_repr": self.text,
            "cache_payload": json.loads(json.dumps(self.payload)),
            "object_sha256": hashlib.sha256(self.object).hexdigest(),
            "object_bytes": len(self.object),
            "semantic_key": hashlib.sha256(semantic.encode()).hexdigest(),
            "semantic_payload": {"compile_environment": self.environment},
            "target": "b12x.attention.dense_mla._forward.Forward",
            "package_fingerprint": self.fingerprint,
            "compile_options": self.options,
            "compile_environment": self.environment,
            "launch_metadata": {"status": "exact", "launch_dynamic_smem_bytes": {"kernel_0": [1024, 2048]}},
            **self.extra,
        }
        if "v1" not in self.tag:
            found["toolchain"] = self.toolchain
        if self.tag in EXPLICIT[2:]:
            text = spec_json(self.kernel, self.version, self.facts)
            found |= {"compile_spec_json": text, "kernel_id": self.kernel, "compile_spec_version": self.version}
        return {name: value for name, value in {**found, **changed}.items() if value is not None}


class Root:
    """A root that tests fill."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def file(self, key: str, suffix: str) -> Path:
        return self.path / key[:2] / f"{key}.{suffix}"

    def add(self, made: Made | None = None, *, manifest: bool = True, obj: bool = True, lock: bool = True, **changed: Any) -> str:
        """Writes an entry and returns its key; `changed` replaces fields of the manifest."""
        made = made or Made()
        self.file(made.key, "o").parent.mkdir(parents=True, exist_ok=True)
        if obj:
            self.file(made.key, "o").write_bytes(made.object)
        if manifest:
            self.file(made.key, "json").write_text(json.dumps(made.manifest(**changed), sort_keys=True, separators=(",", ":")) + "\n")
        if lock:
            self.file(made.key, "lock").touch()
        return made.key

    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.path)) for path in self.path.rglob("*") if path.is_file())

    def prepare(self, *keys: str) -> str:
        """A preparation file whose one record names these keys; returns its name."""
        identity = {"schema_version": 6, "tuning_cache_version": 1}
        record = {"assignment": {}, "config": {}, "coverage": {}, "programs": [["cute", key] for key in keys] + [["triton", "ab"]]}
        name = f"{hashlib.sha256(repr(keys).encode()).hexdigest()}.json"
        (self.path / "preparation").mkdir(parents=True, exist_ok=True)
        (self.path / "preparation" / name).write_text(json.dumps({"identity": identity, "records": {"choice": record}}))
        return name


# ---- objects: the smallest relocatable ELF with a symbol and a device ELF inside

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")


def object_file(symbol: str, arch: str = "sm_120a") -> bytes:
    """An x86-64 .o that defines `symbol` and parts of it, with a cubin for `arch` in its data."""
    names = [f"{symbol}_cuda_init", f"{symbol}_args_spec", f"_mlir_{symbol}_cuda_init"]
    strings, symbols = b"\0", _SYMBOL.pack(0, 0, 0, 0, 0, 0)
    for name in names:
        symbols += _SYMBOL.pack(len(strings), 0x12, 0, 1, 0, 0)
        strings += name.encode() + b"\0"
    return _elf(62, 0, 0, [(".rodata", 1, _cubin(arch)), (".strtab", 3, strings), (".symtab", 2, symbols)])


def _cubin(arch: str) -> bytes:
    number = int(arch.removeprefix("sm_").rstrip("af"))
    return _elf(190, number << 8, 8, [(".note.nv.tkinfo", 7, f"ptxas -arch {arch} \0".encode())])


def _elf(machine: int, flags: int, abi: int, sections: list[tuple[str, int, bytes]]) -> bytes:
    names = b"\0" + b"\0".join(name.encode() for name, _, _ in sections) + b"\0.shstrtab\0"
    body, table, at = b"", _SECTION.pack(*[0] * 10), _HEADER.size
    linked = next((place for place, (name, _, _) in enumerate(sections, 1) if name == ".strtab"), 0)
    for name, kind, data in [*sections, (".shstrtab", 3, names)]:
        entry = _SYMBOL.size if kind == 2 else 0
        table += _SECTION.pack(names.index(name.encode()), kind, 0, 0, at + len(body), len(data), linked if kind == 2 else 0, 0, 1, entry)
        body += data
    count = len(sections) + 2
    ident = b"\x7fELF\x02\x01\x01" + bytes([0, abi]) + bytes(7)
    return _HEADER.pack(ident, 1, machine, 1, 0, 0, at + len(body), flags, _HEADER.size, 0, 0, _SECTION.size, count, count - 1) + body + table
