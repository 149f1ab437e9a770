"""A node without the compiler: its packages and nothing else on the path, a bundle, a lookup, and the object loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path

import pytest
import stand_ins
import test_bundle
import tiny

from mlactl.cache.store import Entry, Store

REPOSITORY = Path(__file__).resolve().parents[2]
LIGHT = (
    "typer",
    "rich",
    "msgspec",
    "pyelftools",
    "zstandard",
    "fsspec",
    "tomli",
    "typing_extensions",
    "click",
    "shellingham",
    "markdown_it_py",
    "mdurl",
)
LIGHT += ("pygments", "annotated_doc")

SCRIPT = """
import json, sys
sys.path[:] = [path for path in sys.path if "site-packages" not in path] + sys.argv[1:4]
import tiny
tiny.register()
from mlactl.cache import toolchain
from mlactl.cache.bundle.merge import bring_in
from mlactl.cache.store import Store
from mlactl.kernels import runtime
from mlactl.opening import open_runtime
root, bundle = sys.argv[4:6]
said = {"absence": toolchain.absence()}
with open(bundle, "rb") as file:
    imported = bring_in(Store.open(root), file)
said["outcomes"] = [outcome.outcome for outcome in imported.outcomes]
said["fits"] = {need.name: [need.installed, need.fits] for need in imported.requires}
found = Store.open(root).lookup(tiny.spec(), "sm_120a")
said["hit"] = getattr(getattr(found, "entry", None), "key", None)
open_runtime(root, frozen=True)
try:
    said["function"] = type(runtime.launch(tiny.spec(), "sm_120a")).__name__
except Exception as error:
    said["function"] = f"{type(error).__name__}: {error}; {getattr(error, 'hint', None)}"
said["imported"] = sorted({"torch", "cutlass", "numpy"} & sys.modules.keys())
print(json.dumps(said))
"""


def wheel_alone(name: str, folder: Path) -> None:
    """What `pip install --no-deps --target` leaves, as links: the files that the distribution's record lists."""
    found = distribution(name)
    for file in found.files or ():
        if ".." not in file.parts and "__pycache__" not in file.parts:
            target = folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(found.locate_file(file))


def on_a_node(node: Path, packages: Path, bundle: Path) -> dict:
    command = [sys.executable, "-S", "-E", "-c", SCRIPT, str(REPOSITORY), str(Path(tiny.__file__).parent), str(packages), str(node), str(bundle)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    folder = tmp_path / "packages"
    for name in LIGHT:
        wheel_alone(name, folder)
    return folder


@pytest.fixture
def bundle(store: Store, publish: Callable[..., Entry], tmp_path: Path) -> Path:
    publish()
    path = tmp_path / "bundle.tar.zst"
    path.write_bytes(test_bundle.bundle_of(store))
    return path


def test_with_the_two_packages_a_bundled_object_is_found_and_loaded(bundle: Path, packages: Path, store: Store, tmp_path: Path) -> None:
    entry = next(store.entries())
    library = f"nvidia-cutlass-dsl-libs-{entry.manifest.toolchain.flavour}"
    wheel_alone("apache-tvm-ffi", packages)
    wheel_alone(library, packages)
    said = on_a_node(tmp_path / "node", packages, bundle)
    assert said["absence"] == "nvidia-cutlass-dsl is installed without a compiler library", "the wheel alone is no compiler"
    assert said["outcomes"] == ["published"]
    assert said["fits"] == {"apache-tvm-ffi": [distribution("apache-tvm-ffi").version, True], library: ["4.8.1", True]}
    assert said["hit"] == entry.key
    assert said["function"] == "Function", "loaded, as far as that goes without a GPU"
    assert said["imported"] == []


def test_without_them_import_and_lookup_work_and_the_load_names_the_wheel(bundle: Path, packages: Path, store: Store, tmp_path: Path) -> None:
    entry = next(store.entries())
    library = f"nvidia-cutlass-dsl-libs-{entry.manifest.toolchain.flavour}"
    said = on_a_node(tmp_path / "node", packages, bundle)
    assert said["absence"] == "nvidia-cutlass-dsl is not installed"
    assert said["hit"] == entry.key
    assert said["fits"] == {"apache-tvm-ffi": [None, False], library: [None, False]}
    assert said["function"].startswith("EnvironmentUnfit: libcute_dsl_runtime.so of flavour")
    assert f"pip install --no-deps {library}==4.8.1" in said["function"]


def test_two_toolchains_in_one_bundle_are_named_by_the_lookup(
    store: Store, publish: Callable[..., Entry], prebuilt: tiny.Prebuilt, packages: Path, tmp_path: Path
) -> None:
    publish()
    stand_ins.publish(store, prebuilt, tiny.spec(), toolchain=stand_ins.older_toolchain())
    path = tmp_path / "bundle.tar.zst"
    path.write_bytes(test_bundle.bundle_of(store))
    command = [
        sys.executable,
        "-S",
        "-E",
        "-c",
        SCRIPT,
        str(REPOSITORY),
        str(Path(tiny.__file__).parent),
        str(packages),
        str(tmp_path / "node"),
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "objects of 2 toolchains fit and no compiler here says which is meant" in done.stderr
