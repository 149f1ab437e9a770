"""Everything the doctor looks at, in order, and the verdict; reads only, makes no CUDA context, imports no compiler."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mlactl.doctor import cache_roots, compiling, coverage, environment, gpus, loading, objects, scale_files
from mlactl.doctor.findings import Finding, Severity, exit_code
from mlactl.doctor.node import Node, ask
from mlactl.doctor.situation import gather


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked: profiles by name or path, a scale file, targets; `build_node` for a node that never launches."""

    profiles: tuple[str, ...] = ()
    scales: Path | None = None
    cache_dir: str | None = None
    arches: tuple[str, ...] = ()
    build_node: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """Findings in the order of the checks, and what they are about."""

    node: Node
    arches: tuple[str, ...]
    build_node: bool
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """0 fine, 1 findings, 3 a launch could not work."""
        return exit_code(self.findings)

    def count(self, severity: Severity) -> int:
        """Findings of that severity."""
        return sum(finding.severity is severity for finding in self.findings)


def diagnose(
    request: Request,
    environ: Mapping[str, str] = os.environ,
    *,
    node: Node | None = None,
    on_entry: Callable[[], None] = lambda: None,
    on_check: Callable[[str], None] = lambda _: None,
) -> Report:
    """Runs every check; `node` stands in for what NVML would say.

    Raises UnknownProfile and CannotRun for a profile that was asked for and cannot be found or read; all else that is
    wrong is a finding.
    """
    on_check("asking the driver")
    asked = node if node is not None else Node(None, None, (), "not asked") if request.build_node else ask()
    on_check("reading the cache")
    situation = gather(environ, cache_dir=request.cache_dir, arches=request.arches, build_node=request.build_node, node=asked, on_entry=on_entry)
    chosen = coverage.choose(situation, request.profiles)
    loaded = [profile for _, profile in chosen.profiles]
    checks: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
        ("GPUs", lambda: gpus.check(asked, build_node=request.build_node)),
        ("toolchain", lambda: compiling.check(situation)),
        ("loading", lambda: loading.check(situation)),
        ("cache roots", lambda: cache_roots.check(situation)),
        ("objects", lambda: objects.check(situation)),
        ("environment", lambda: environment.check(situation)),
        ("scale files", lambda: scale_files.check(situation, request.scales, loaded)),
        ("profiles", lambda: coverage.check(situation, chosen, request.scales)),
    )
    found: list[Finding] = []
    for title, run in checks:
        on_check(title)
        found += run()
    return Report(asked, situation.arches, request.build_node, tuple(found))
