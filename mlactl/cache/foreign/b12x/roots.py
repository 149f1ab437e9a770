"""Where b12x keeps its compile cache, in each era of its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Candidate:
    """One root folder, the variable that names it (`HOME` for the default place) and the era that looks there."""

    path: Path
    variable: str
    era: str


def candidates(environ: Mapping[str, str]) -> tuple[Candidate, ...]:
    """The root of each era in this environment, newest first; each era looks at the first of its places alone."""
    home = Path(environ.get("HOME") or "/")
    xdg, dsl = environ.get("XDG_CACHE_HOME"), environ.get("CUTE_DSL_CACHE_DIR")
    found = []
    for era, variable, name, folder in (
        ("today", "B12X_COMPILE_CACHE_DIR", "b12x", "compile"),
        ("later", "SPARKINFER_COMPILE_CACHE_DIR", "sparkinfer", "compile"),
        ("renamed", "SPARKINFER_CUTE_COMPILE_CACHE_DIR", "sparkinfer", "cute_compile"),
        ("oldest", "B12X_CUTE_COMPILE_CACHE_DIR", "b12x", "cute_compile"),
    ):
        if environ.get(variable):
            found.append(Candidate(Path(environ[variable]), variable, era))
        elif dsl and folder == "cute_compile":
            found.append(Candidate(Path(dsl) / f"{name}_object_cache", "CUTE_DSL_CACHE_DIR", era))
        elif xdg:
            found.append(Candidate(Path(xdg) / name / folder, "XDG_CACHE_HOME", era))
        else:
            found.append(Candidate(home / ".cache" / name / folder, "HOME", era))
    return tuple(found)
