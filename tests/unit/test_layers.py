"""Who may import whom, who may write, and what modules are called."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "mlactl"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_the_import_contracts_hold():
    tool = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


def test_the_contracts_cover_every_service():
    """A new service that no contract names could import what it likes."""
    import tomli

    tool = tomli.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(contract for contract in tool["contracts"] if contract["type"] == "layers")["layers"]
    named = {part.strip().removeprefix("mlactl.") for layer in layers for part in layer.replace("|", ":").split(":")}
    present = {path.stem for path in PACKAGE.iterdir() if path.name not in ("__init__.py", "__pycache__") and path.suffix in ("", ".py")}
    assert present - named == {"_profiles", "errors", "ui"}


def writes(source: str) -> list[str]:
    """What in a module prints, asks, exits or touches a standard stream."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("print", "input", "exit", "quit"):
            found.append(f"line {node.lineno}: {node.func.id}()")
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "sys" and node.attr in STREAMS:
            found.append(f"line {node.lineno}: sys.{node.attr}")
    return found


STREAMS = ("stdout", "stderr", "stdin", "exit")


def test_only_the_command_line_and_its_renderer_write():
    """A service that prints cannot be used from a server, and a JSON document with a stray line in it is none."""
    # app.py reports what escaped every renderer; start.py speaks before there is a renderer; the worker's stdout is its
    # protocol with the pool; torchrun starts a command.
    allowed = ("cli/app.py", "cli/start.py", "warmup/worker.py", "replay/dcp/__main__.py")
    found = {name_of(path): writes(path.read_text()) for path in MODULES if path.parent.name != "ui" and name_of(path) not in allowed}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_the_check_above_sees_what_writes():
    assert sorted(writes("import sys\nsys.stdout.write('x')\nprint(1)\n")) == ["line 2: sys.stdout", "line 3: print()"]


def has_code(source: str) -> bool:
    """Whether a module holds more than a docstring."""
    return any(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in ast.parse(source).body)


def test_init_files_are_empty():
    """Importing a submodule runs its package's __init__: code there would be part of every start-up and of no key."""
    filled = [name_of(path) for path in MODULES if path.name == "__init__.py" and has_code(path.read_text())]
    # The package looks `capture` up on demand; a command module in parts puts its group together.
    assert filled == ["__init__.py", "cli/cache/__init__.py"]


def test_no_module_is_a_drawer_for_everything():
    assert [name_of(path) for path in MODULES if path.stem.strip("_") in ("utils", "util", "common", "helpers", "helper", "misc")] == []
