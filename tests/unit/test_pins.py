"""The linter that runs before a commit is the linter that CI runs."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def pins(text: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"([A-Za-z0-9_.-]+)==([A-Za-z0-9_.]+)", text):
        found.setdefault(name, set()).add(version)
    return found


def test_pre_commit_uses_the_pins_of_constraints():
    constraints = pins((ROOT / "constraints.txt").read_text())
    hooks = pins((ROOT / ".pre-commit-config.yaml").read_text())
    assert hooks == {"ruff": constraints["ruff"]}


def test_the_compiler_is_pinned_to_one_version_everywhere():
    """Another compiler version gives other machine code, and so other cache keys, on half of the nodes."""
    constraints = pins((ROOT / "constraints.txt").read_text())
    versions = set().union(*(found for name, found in constraints.items() if name.startswith("nvidia-cutlass-dsl")))
    assert versions == {"4.8.1"}
    assert re.search(r'"nvidia-cutlass-dsl\[cu13\]==4\.8\.1"', (ROOT / "pyproject.toml").read_text())
