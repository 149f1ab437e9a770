"""The key: complete, and blind to everything that must not matter."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from mlactl.cache import key as keys
from mlactl.cache import toolchain as toolchains
from mlactl.cache.key import KeyInputs, canonical_bytes, differences, inputs_for
from mlactl.cache.toolchain import Toolchain, pick_flavour
from mlactl.errors import EnvironmentUnfit
from mlactl.kernels import registry
from mlactl.kernels.spec import CompileSpec, canonical_json

TOOLS = Toolchain((("nvidia-cutlass-dsl", "4.8.1"), ("nvidia-cutlass-dsl-libs-cu13", "4.8.1")), "cu13", "0.1")
SPEC = CompileSpec.of("attention.dense_mla.merge", 5, {"groups": 4, "value_width": 512})
INPUTS = KeyInputs(1, SPEC, "sm_120a", "x86_64", "ab" * 32, TOOLS, ("--gpu-arch sm_120a", "--enable-tvm-ffi"))

PERTURBED = {
    "format": replace(INPUTS, format=2),
    "spec.kernel_id": replace(INPUTS, spec=replace(SPEC, kernel_id="attention.dense_mla.forward")),
    "spec.version": replace(INPUTS, spec=replace(SPEC, version=6)),
    "spec.facts.groups": replace(INPUTS, spec=CompileSpec.of(SPEC.kernel_id, 5, {"groups": 8, "value_width": 512})),
    "spec.facts.value_width": replace(INPUTS, spec=CompileSpec.of(SPEC.kernel_id, 5, {"groups": 4, "value_width": 1024})),
    "spec.facts.identity": replace(INPUTS, spec=CompileSpec.of(SPEC.kernel_id, 5, {"groups": 4, "value_width": 512, "identity": 1})),
    "arch": replace(INPUTS, arch="sm_121a"),
    "host_arch": replace(INPUTS, host_arch="aarch64"),
    "sources_digest": replace(INPUTS, sources_digest="ac" * 32),
    "toolchain.distributions.nvidia-cutlass-dsl": replace(
        INPUTS, toolchain=replace(TOOLS, distributions=(("nvidia-cutlass-dsl", "4.8.2"), TOOLS.distributions[1]))
    ),
    "toolchain.distributions.nvidia-cutlass-dsl-libs-cu13": replace(INPUTS, toolchain=replace(TOOLS, distributions=TOOLS.distributions[:1])),
    "toolchain.flavour": replace(INPUTS, toolchain=replace(TOOLS, flavour="cu12")),
    "toolchain.tvm_ffi_abi": replace(INPUTS, toolchain=replace(TOOLS, tvm_ffi_abi="0.2")),
    "options": replace(INPUTS, options=("--gpu-arch sm_120a", "--enable-tvm-ffi", "--opt-level 2")),
}


@pytest.mark.parametrize("field", PERTURBED)
def test_each_field_alone_changes_the_key(field: str) -> None:
    """A key that leaves a fact out replays wrong kernels in silence: elsewhere it was whether a scale was exactly 1.0."""
    assert PERTURBED[field].key() != INPUTS.key()
    assert [name for name, _, _ in differences(INPUTS, PERTURBED[field])] == [field]


def test_every_field_has_a_perturbation() -> None:
    perturbed = {name.split(".")[0] for name in PERTURBED}
    assert perturbed == {field.name for field in fields(KeyInputs)}
    assert {name.split(".")[1] for name in PERTURBED if name.startswith("toolchain.")} == {field.name for field in fields(Toolchain)}
    assert {name.split(".")[1] for name in PERTURBED if name.startswith("spec.")} == {field.name for field in fields(CompileSpec)}
    assert len({inputs.key() for inputs in PERTURBED.values()}) == len(PERTURBED)


def test_a_fact_of_another_type_is_another_key() -> None:
    """True equals 1 in Python and would hash alike without its JSON spelling."""
    one, true = (replace(INPUTS, spec=CompileSpec.of("k", 1, {"window": value})) for value in (1, True))
    assert one.key() != true.key()
    assert [name for name, _, _ in differences(one, true)] == ["spec.facts.window"]


def test_the_order_of_facts_does_not_matter() -> None:
    turned = CompileSpec.of(SPEC.kernel_id, 5, {"value_width": 512, "groups": 4})
    assert replace(INPUTS, spec=turned).key() == INPUTS.key()


def test_the_key_is_the_digest_of_the_canonical_json() -> None:
    spelled = canonical_json(INPUTS.as_json())
    assert json.loads(spelled)["toolchain"]["flavour"] == "cu13"
    assert INPUTS.key() == hashlib.sha256(spelled.encode()).hexdigest()


JSON = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)


@given(JSON)
def test_the_fast_spelling_is_the_canonical_one(value: object) -> None:
    assert canonical_bytes(value) == canonical_json(value).encode()


@given(st.text(st.characters(max_codepoint=0x7F)))
def test_the_fast_spelling_of_ascii_is_the_canonical_one(text: str) -> None:
    assert canonical_bytes({text: text}) == canonical_json({text: text}).encode()


KEYS_SCRIPT = """
import json, sys, tiny
from mlactl.cache.key import inputs_for
from mlactl.kernels import registry
specs = [tiny.spec(), registry.DENSE_MERGE.spec(groups=4, value_width=512)]
print(json.dumps([inputs_for(spec, arch).key() for spec in specs for arch in ("sm_120a", "sm_121a", "sm_90a")]))
print(json.dumps([name for name in ("cutlass", "tvm_ffi", "torch", "numpy") if name in sys.modules]))
"""


def test_the_key_is_the_same_wherever_it_is_computed(tmp_path: Path) -> None:
    """C2, C7: pods of one deployment differ in all of this, and each missed what the other had warmed."""
    home = tmp_path / "other home"
    home.mkdir()
    base = {name: value for name, value in os.environ.items() if name not in ("HOME", "PYTHONHASHSEED")}
    one = tiny.run_python(KEYS_SCRIPT, env={**base, "HOME": "/root", "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": "0"})
    pod = {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "POD_NAME": "decode-3",
        "HOSTNAME": "decode-3",
        "RANK": "3",
        "LOCAL_RANK": "3",
        "CUTE_DSL_ARCH": "sm_90a",
    }
    other_environment = {**base, **pod, "HOME": str(home), "PYTHONHASHSEED": "4711", "CUDA_VISIBLE_DEVICES": "3", "TZ": "Asia/Tokyo", "LC_ALL": "C"}
    other = tiny.run_python(KEYS_SCRIPT, env=other_environment, cwd=home)
    assert len(set(json.loads(one.stdout.splitlines()[0]))) == 6
    assert other.stdout == one.stdout


def test_computing_a_key_imports_neither_compiler_nor_torch() -> None:
    assert json.loads(tiny.run_python(KEYS_SCRIPT).stdout.splitlines()[1]) == []


def _with_sources(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    source = folder / "kernel.py"
    source.write_text("x = 1\n")
    monkeypatch.setattr(registry, "SOURCE_ROOT", folder)
    monkeypatch.setattr(registry, "KERNELS", {**registry.KERNELS, "test.tiny": replace(tiny.TINY, sources=("kernel.py",))})
    return source


def test_source_bytes_count_and_modification_times_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C6: a restored file had new bytes under an old time and the stale object was used; a fresh checkout missed everything."""
    source = _with_sources(monkeypatch, tmp_path)
    spec = tiny.TINY.spec(factor=2, dtype="f32")
    before = inputs_for(spec, "sm_120a").key()
    os.utime(source, (2_000_000_000, 2_000_000_000))
    assert inputs_for(spec, "sm_120a").key() == before
    old = source.stat()
    source.write_text("x = 2\n")
    os.utime(source, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert source.stat().st_mtime_ns == old.st_mtime_ns
    assert inputs_for(spec, "sm_120a").key() != before


def test_an_unsupported_arch_is_refused_by_name() -> None:
    with pytest.raises(EnvironmentUnfit, match=r"sm_100a.*sm_120a, sm_121a, sm_90a"):
        inputs_for(tiny.spec(), "sm_100a")


def test_without_a_compiler_a_toolchain_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchains, "_probe", lambda: "nvidia-cutlass-dsl is not installed")
    with pytest.raises(EnvironmentUnfit, match="no compiler here: nvidia-cutlass-dsl is not installed") as raised:
        inputs_for(tiny.spec(), "sm_120a")
    assert raised.value.exit_code == 3
    assert inputs_for(tiny.spec(), "sm_120a", TOOLS).toolchain == TOOLS


# ---- toolchain


def test_the_toolchain_is_what_the_compiler_turns_out_to_be() -> None:
    """The DSL picks one of two compiler libraries at import; a key computed with the other one names other machine code."""
    script = """
from mlactl.cache.toolchain import current
found = current()
import sys
assert "cutlass" not in sys.modules and "tvm_ffi" not in sys.modules
from importlib.metadata import distributions, version
from mlactl.kernels.compiler import load_export_libraries
names = {d.metadata["Name"]: d.version for d in distributions() if d.metadata["Name"].startswith("nvidia-cutlass-dsl")}
assert dict(found.distributions) == names, (found, names)
assert found.flavour == load_export_libraries(), found
assert version("apache-tvm-ffi").startswith(found.tvm_ffi_abi + ".")
"""
    tiny.run_python(script)


@pytest.mark.parametrize(
    ("installed", "driver", "picked"),
    [
        ({12, 13}, None, 13),
        ({12}, None, 12),
        ({12, 13}, 13010, 13),
        ({12, 13}, 12090, 12),
        ({12, 13}, 14000, 13),
        ({13}, 12090, None),
        (set(), None, None),
    ],
)
def test_the_flavour_follows_the_driver_or_is_the_newest(installed: set[int], driver: int | None, picked: int | None) -> None:
    assert pick_flavour(installed, driver) == picked


def _fake_site(folder: Path, *names: str) -> None:
    libraries = folder / "cutlass" / "_mlir" / "_mlir_libs"
    libraries.mkdir(parents=True)
    for name in names:
        (folder / name).mkdir() if name.endswith(".dist-info") else (libraries / name).touch()


@pytest.mark.parametrize(
    ("names", "driver", "expected"),
    [
        ((), None, "nvidia-cutlass-dsl is not installed"),
        (("nvidia_cutlass_dsl-4.8.1.dist-info",), None, "without a compiler library"),
        (("nvidia_cutlass_dsl-4.8.1.dist-info", "_cutlass_ir.cu13.cpython-311-x86_64-linux-gnu.so"), None, "apache-tvm-ffi is not installed"),
        (
            ("nvidia_cutlass_dsl-4.8.1.dist-info", "_cutlass_ir.cu13.cpython-311-x86_64-linux-gnu.so", "apache_tvm_ffi-0.1.15.post2.dist-info"),
            12090,
            "the CUDA driver supports up to CUDA 12, the installed compiler libraries are cu13",
        ),
    ],
)
def test_what_is_missing_for_a_compiler_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], driver: int | None, expected: str
) -> None:
    _fake_site(tmp_path, *names)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "cutlass", raising=False)  # an imported one would be found in place of the folder's
    monkeypatch.setattr(toolchains, "_driver_version", lambda: driver)
    found = toolchains._probe.__wrapped__()
    assert isinstance(found, str)
    assert expected in found


def test_a_site_with_two_flavours_gives_the_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"nvidia_cutlass_dsl{part}-4.9.0.dist-info" for part in ("", "_libs_cu12", "_libs_cu13")]
    _fake_site(tmp_path, *names, "apache_tvm_ffi-0.1.15.post2.dist-info", "_cutlass_ir.cu12.x.so", "_cutlass_ir.cu13.x.so", "_cutlass_ir.cu14.pyi")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "cutlass", raising=False)  # an imported one would be found in place of the folder's
    monkeypatch.setattr(toolchains, "_driver_version", lambda: 12080)
    assert toolchains._probe.__wrapped__() == Toolchain(
        (("nvidia-cutlass-dsl", "4.9.0"), ("nvidia-cutlass-dsl-libs-cu12", "4.9.0"), ("nvidia-cutlass-dsl-libs-cu13", "4.9.0")), "cu12", "0.1"
    )


def test_the_exported_symbol_is_the_keys() -> None:
    assert keys.symbol_for("ab") == "mlactl_ab"
