"""An installed wheel: what lands in site-packages, and that it works away from the checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command, **options):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of the sources without touching the network or the checkout."""
    base = tmp_path_factory.mktemp("wheel")
    source = base / "source"
    source.mkdir()
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("mlactl", "kernels", "profiles"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", base, source)
    (built,) = base.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A fresh environment with the wheel in it; its dependencies are those of this one."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(home), "platbase": str(home)}))
    run(sys.executable, "-m", "pip", "--python", home / "bin" / "python", "install", "--no-deps", "--no-index", wheel)
    installed_names = {path.name for path in site.iterdir()}
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home, site, installed_names


def environment(home):
    return {"HOME": str(home), "PATH": os.environ["PATH"], "MLACTL_CACHE_DIR": str(home / "cache")}


def test_nothing_but_mlactl_lands_at_top_level(installed):
    """Another package named `kernels` is on most nodes, and installing over it broke that one."""
    _, _, names = installed
    assert {name for name in names if not name.endswith(".dist-info")} == {"mlactl"}


def test_kernels_and_profiles_are_inside(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = {path.name for path in (ROOT / "profiles").glob("*.toml")}
    assert {name.removeprefix("mlactl/_profiles/") for name in names if name.endswith(".toml") and "_profiles/" in name} == shipped
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "kernels").rglob("*.py")}
    assert {f"mlactl/{name}" for name in sources} <= names
    assert "mlactl/advisories.toml" in names


def test_the_installed_command_lists_profiles(installed, tmp_path):
    home, _, _ = installed
    listed = run(home / "bin" / "mlactl", "profile", "ls", "-q", cwd=tmp_path, env=environment(home))
    assert listed.splitlines() == sorted(path.stem for path in (ROOT / "profiles").glob("*.toml"))


def test_the_installed_package_plans_a_warmup(installed, tmp_path):
    home, site, _ = installed
    code = "import mlactl.profiles as p; print(p.__file__); print(len(p.load('ci-small').specs()))"
    where, count = run(home / "bin" / "python", "-c", code, cwd=tmp_path, env=environment(home)).splitlines()
    assert where == str(site / "mlactl" / "profiles.py")
    assert int(count) == 6
    run(home / "bin" / "mlactl", "warmup", "--profile", "ci-small", "--dry-run", cwd=tmp_path, env=environment(home))


def test_the_installed_command_knows_its_cards(installed, tmp_path):
    home, _, _ = installed
    command = ("bench", "verify-plan", "--card", "dgx-spark", "--arms", "tiled", "--shapes", "1x4xH8x64", "-q")
    assert run(home / "bin" / "mlactl", *command, cwd=tmp_path, env=environment(home)).split()[:2] == ["1x4xH8x64", "tiled"]


def test_the_same_sources_digest_as_in_the_checkout(installed, tmp_path):
    """Keys made by an installed package and by the checkout it was built from must agree."""
    from mlactl.kernels.registry import KERNELS, sources_digest

    home, _, _ = installed
    code = "from mlactl.kernels.registry import KERNELS, sources_digest; print(*(sources_digest(name) for name in sorted(KERNELS)))"
    assert run(home / "bin" / "python", "-c", code, cwd=tmp_path, env=environment(home)).split() == [
        sources_digest(name)
        for name in sorted(KERNELS)
        if KERNELS[name].sources  # other tests register a kernel without any
    ]
