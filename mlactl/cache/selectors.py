"""What `cache prune` can be told to select: parsing of each option, and why an entry is or is not selected."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlactl.cache.listing import iso_time, kernel_matches
from mlactl.errors import UsageError
from mlactl.kernels import registry

if TYPE_CHECKING:
    from mlactl.cache.adapter import CacheEntry, SpecView

Judge = Callable[["CacheEntry"], str | None]
"""Why an entry is selected, in a few words; None when it is not."""

COMPARE: dict[str, Callable[[int, int], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    ">=": operator.ge,
    ">": operator.gt,
}
_SPEC = re.compile(r"\s*([A-Za-z0-9_.*-]+?)\s*(<=|>=|==|<|>)\s*([0-9]{1,9})\s*")
_DURATION = re.compile(r"([0-9]{1,9})\s*([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*(B|KiB|MiB|GiB|TiB|kB|KB|MB|GB|TB)?")
_BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_BYTES |= {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True, slots=True)
class SpecRange:
    """Versions of a kernel: `attention.mla.sm120.decode<18`; the kernel may be a dotted start or a pattern."""

    kernel: str
    comparison: str
    version: int

    def matches(self, spec: SpecView) -> bool:
        """Whether a spec is in the range; one without a version is in none."""
        return spec.version >= 0 and kernel_matches(spec.kernel_id, self.kernel) and COMPARE[self.comparison](spec.version, self.version)

    def __str__(self) -> str:
        return f"{self.kernel}{self.comparison}{self.version}"


def parse_spec(text: str) -> SpecRange:
    """`KERNEL<N` with < <= == >= >; raises UsageError."""
    match = _SPEC.fullmatch(text)
    if match is None:
        raise UsageError(
            f"--spec {text!r} is no kernel, comparison and version", hint="quote it: --spec 'attention.dense_mla.forward<5' (< <= == >= >)"
        )
    return SpecRange(match[1], match[2], int(match[3]))


def parse_duration(text: str, option: str) -> int:
    """Seconds of `30d`, `12h`, `90m`, `45s` or `2w`; raises UsageError naming the option."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{option} {text!r} is no duration, expected a whole number and s, m, h, d or w", hint=f"{option} 30d")
    return int(match[1]) * _SECONDS[match[2]]


def parse_size(text: str, option: str) -> int:
    """Bytes of `2GiB`, `500MB` or `1048576`; raises UsageError naming the option."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{option} {text!r} is no size, expected a number and B, KiB, MiB, GiB or TiB", hint=f"{option} 2GiB")
    return int(float(match[1]) * _BYTES[match[2] or "B"])


@dataclass(frozen=True, slots=True)
class Selectors:
    """What to select: different kinds AND, values of one kind OR; with none of them the superseded versions.

    `max_bytes` comes last: of what the others select, least recently used first, until the root is small enough.
    `locks` selects lock files that nobody holds, and no entries. `judges` are further selectors, each as it would be
    typed and with what tells why it selects an entry.
    """

    specs: tuple[SpecRange, ...] = ()
    kernels: tuple[str, ...] = ()
    arches: tuple[str, ...] = ()
    statuses: tuple[str, ...] = ()
    stale: bool = False
    older_than_s: int | None = None
    unused_for_s: int | None = None
    max_bytes: int | None = None
    locks: bool = False
    judges: tuple[tuple[str, Judge], ...] = ()

    @property
    def narrowed(self) -> bool:
        """Whether anything but `max_bytes` and `locks` was asked for."""
        by_name = self.specs or self.kernels or self.arches or self.statuses or self.judges
        return bool(by_name or self.stale or self.older_than_s is not None or self.unused_for_s is not None)

    @property
    def selects_entries(self) -> bool:
        """False when only lock files are asked for."""
        return self.narrowed or self.max_bytes is not None or not self.locks

    def words(self) -> tuple[str, ...]:
        """The selection as it would be typed; `superseded` for the default one."""
        words = [f"--spec {spec}" for spec in self.specs]
        words += [f"--kernel {name}" for name in self.kernels]
        words += [f"--arch {arch}" for arch in self.arches]
        words += [f"--status {status}" for status in self.statuses]
        words += ["--stale"] * self.stale
        words += [f"--older-than {self.older_than_s}s"] * (self.older_than_s is not None)
        words += [f"--unused-for {self.unused_for_s}s"] * (self.unused_for_s is not None)
        words += [text for text, _ in self.judges]
        words += [f"--max-size {self.max_bytes}B"] * (self.max_bytes is not None)
        words += ["--locks"] * self.locks
        return tuple(words) or ("superseded",)

    def judge(self, now: float, stale_reason: Judge) -> Judge:
        """Tells why everything but `max_bytes` selects an entry, in a few words, or None when something does not."""
        if not self.narrowed:
            return _over_size if self.max_bytes is not None else superseded
        tests: list[Judge] = []
        if self.specs:
            tests.append(self._in_range)
        if self.kernels:
            tests.append(self._of_kernel)
        if self.arches:
            tests.append(lambda entry: f"arch {entry.manifest.arch}" if entry.manifest and entry.manifest.arch in self.arches else None)
        if self.statuses:
            tests.append(lambda entry: f"status {entry.status}" if entry.status in self.statuses else None)
        if self.older_than_s is not None:
            tests.append(_older(now - self.older_than_s))
        if self.unused_for_s is not None:
            tests.append(_unused(now, self.unused_for_s))
        if self.stale:
            tests.append(stale_reason)
        tests += [test for _, test in self.judges]

        def all_of(entry: CacheEntry) -> str | None:
            reasons = []
            for test in tests:
                reason = test(entry)
                if reason is None:
                    return None
                reasons.append(reason)
            return ", ".join(reasons)

        return all_of

    def _in_range(self, entry: CacheEntry) -> str | None:
        if entry.manifest is not None:
            for spec in self.specs:
                if spec.matches(entry.manifest.spec):
                    return f"matches {spec}"
        return None

    def _of_kernel(self, entry: CacheEntry) -> str | None:
        if entry.manifest is not None:
            for name in self.kernels:
                if kernel_matches(entry.manifest.spec.kernel_id, name):
                    return f"kernel {name}"
        return None


def _over_size(_entry: CacheEntry) -> str | None:
    return "over --max-size"


def _older(limit: float) -> Judge:
    """Made before `limit`; what has no readable manifest goes by its file's time, and without one is never selected."""
    # Manifests spell times in one way, so that they compare as text.
    limit_text = iso_time(max(0.0, limit)) or ""

    def test(entry: CacheEntry) -> str | None:
        if entry.manifest is not None:
            return f"made {entry.manifest.created[:10]}" if entry.manifest.created < limit_text else None
        return f"made {iso_time(entry.last_used)}" if entry.last_used is not None and entry.last_used < limit else None

    return test


def _unused(now: float, seconds: int) -> Judge:
    """Not used for so long; an unknown last use is never selected."""

    def test(entry: CacheEntry) -> str | None:
        if entry.last_used is None or now - entry.last_used <= seconds:
            return None
        return f"unused for {age_words(now - entry.last_used)}"

    return test


def superseded(entry: CacheEntry) -> str | None:
    """Why an entry's version is out of date: the registry declares a higher one; None when it is not."""
    if entry.manifest is None:
        return None
    spec = entry.manifest.spec
    declared = registry.KERNELS.get(spec.kernel_id)
    if declared is None or spec.version >= declared.version:
        return None
    return f"version {spec.version} superseded by {declared.version}"


def age_words(seconds: float) -> str:
    """41d, 12h, 5m or 30s."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{int(seconds // size)}{unit}"
    return f"{int(seconds)}s"
