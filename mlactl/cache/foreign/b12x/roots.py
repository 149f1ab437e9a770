"""Where the releases of b12x keep their cache, by the variables each era of them read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlactl.cache.roots import home_of


@dataclass(frozen=True, slots=True)
class Candidate:
    """Where releases of one era keep their cache in an environment; `variable` is what says so, `HOME` for the default place."""

    path: Path
    variable: str
    era: str


@dataclass(frozen=True, slots=True)
class _Era:
    """One lookup order: a variable of its own, then places below CUTE_DSL_CACHE_DIR, XDG_CACHE_HOME and ~/.cache."""

    name: str
    variable: str
    below_dsl: str | None
    below_cache: str


# Newest first; the order within an era is that of the fields.
_ERAS = (
    _Era("b12x 1.1 to 1.5.1", "B12X_COMPILE_CACHE_DIR", None, "b12x/compile"),
    _Era("sparkinfer, later", "SPARKINFER_COMPILE_CACHE_DIR", None, "sparkinfer/compile"),
    _Era("sparkinfer", "SPARKINFER_CUTE_COMPILE_CACHE_DIR", "sparkinfer_object_cache", "sparkinfer/cute_compile"),
    _Era("b12x before 1.1", "B12X_CUTE_COMPILE_CACHE_DIR", "b12x_object_cache", "b12x/cute_compile"),
)


def candidates(environ: Mapping[str, str]) -> tuple[Candidate, ...]:
    """The root that each era's releases use in this environment, newest era first, existing or not.

    As those releases do, an empty variable counts as unset, a relative path starts at the working directory and `~` in
    a variable is no home folder. An era that finds nothing (no home folder) has no root.
    """
    found = [candidate for era in _ERAS if (candidate := _root_of(era, environ)) is not None]
    return tuple({candidate.path: candidate for candidate in reversed(found)}[path] for path in dict.fromkeys(item.path for item in found))


def _root_of(era: _Era, environ: Mapping[str, str]) -> Candidate | None:
    steps = [(era.variable, ""), *([("CUTE_DSL_CACHE_DIR", era.below_dsl)] if era.below_dsl else []), ("XDG_CACHE_HOME", era.below_cache)]
    for variable, below in steps:
        if environ.get(variable):
            return Candidate(_absolute(Path(environ[variable]) / below), variable, era.name)
    home = home_of(environ)
    return None if home is None else Candidate(_absolute(Path(home) / ".cache" / era.below_cache), "HOME", era.name)


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100  links stay as they are
