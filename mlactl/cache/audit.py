"""Holds entries to account: advisories by their facts, and their machine code against what their facts claim.

The one thing that machine code is asked is whether it reads the parameter of a scalar that a kernel exists in two
variants for. A dynamic kernel must, an identity kernel of ours must not. For our own entries the parameter's position comes
from the registry, for those of another tool from data beside the advisories, never from the entry's manifest.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from mlactl.cache import machine_code
from mlactl.cache.adapter import CacheAdapter, CacheEntry, RootKind, SpecView
from mlactl.cache.advisories import Advisories, Advisory, Hit, hits, parameter_of
from mlactl.cache.elf import BadElf, device_code
from mlactl.cache.machine_code import Reading
from mlactl.cache.parameters import kernel_parameters
from mlactl.errors import CannotRun, Interrupted
from mlactl.kernels import registry

OnDone = Callable[[int], None]

SCALAR_BYTES = 4
"""Scalars of ours are float32."""

IDENTITY = "_identity"
"""A fact with this ending says whether the code reads the scalar that it is named after (0) or was made for 1.0 (1)."""


def _ignore(_steps: int) -> None:
    pass


UNKNOWN_CAUSE = (
    "nothing this release knows speaks against it: what it was set aside for is not recorded, and may be an advisory of a file (--advisories FILE)"
)
"""Of an entry that is quarantined and acquitted."""


class Verdict(StrEnum):
    """What an audit says of an entry, the worst last."""

    CLEAN = "clean"
    NOTICE = "notice"
    UNTOLD = "cannot tell"
    DAMAGED = "damaged"
    SUSPECT = "suspect"
    CONVICTED = "convicted"


_ORDER = tuple(Verdict)


@dataclass(frozen=True, slots=True)
class CodeEvidence:
    """What machine code does with one parameter: `offset` is its first byte in constant bank 0, `instructions` those behind
    the answer, `operands` how many constant operands were looked at."""

    kernel: str
    parameter: str
    ordinal: int
    offset: int
    size_bytes: int
    reading: Reading
    instructions: tuple[str, ...]
    operands: int

    def text(self) -> str:
        """One line: which kernel, which parameter, where, and what was found."""
        found = f"{len(self.instructions)} of {self.operands} constant operands {'reach' if len(self.instructions) != 1 else 'reaches'} it"
        place = f"parameter {self.ordinal} ({self.parameter}, {self.size_bytes} bytes at c[0x0][{self.offset:#x}])"
        shown = f": {self.instructions[0]}" if self.instructions else ""
        return f"{self.kernel if len(self.kernel) <= 60 else f'{self.kernel[:59]}…'}: {place}: {self.reading}, {found}{shown}"


@dataclass(frozen=True, slots=True)
class Result:
    """One entry's verdict and why. `entry` has the status of the full check; `quarantined` says that nothing loads it any more: it is
    set aside, or its very object is in another layer."""

    entry: CacheEntry
    verdict: Verdict
    reasons: tuple[str, ...]
    advisories: tuple[Advisory, ...] = ()
    code: CodeEvidence | None = None
    quarantined: bool = False

    @property
    def guilty(self) -> bool:
        """Whether anything is wrong with it or unknown, wherever it is."""
        return self.verdict not in (Verdict.CLEAN, Verdict.NOTICE)

    @property
    def failing(self) -> bool:
        """Whether it is guilty and could still be loaded."""
        return self.guilty and not self.quarantined


@dataclass(frozen=True, slots=True)
class Report:
    """Audited entries in the order they were given."""

    results: tuple[Result, ...]

    @property
    def failing(self) -> tuple[Result, ...]:
        """Those that make an audit fail."""
        return tuple(result for result in self.results if result.failing)

    @property
    def convicted(self) -> tuple[Result, ...]:
        """Those that quarantine sets aside."""
        return tuple(result for result in self.results if result.verdict is Verdict.CONVICTED and not result.quarantined)


@dataclass(frozen=True, slots=True)
class Moved:
    """An entry that was to be set aside or put back: whether it was, and why not, or what was found of it."""

    entry: CacheEntry
    done: bool
    reason: str


# ---- claims


@dataclass(frozen=True, slots=True)
class Claim:
    """What facts say of a scalar: `value` 0 reads it, 1 does not, None when they are silent. `ordinal` is None where it is not known."""

    scalar: str
    fact: str
    value: object
    ordinal: int | None
    size_bytes: int = SCALAR_BYTES


def claims_of(spec: SpecView, kind: RootKind, advisories: Advisories) -> tuple[Claim, ...]:
    """What the facts of an entry claim of its machine code, with where to look."""
    place = parameter_of(advisories.parameters, spec, kind) if kind is not RootKind.MLACTL else None
    if place is not None:
        return (Claim(place.name, place.fact, dict(spec.facts).get(place.fact), place.ordinal, place.size_bytes),)
    declared = registry.KERNELS.get(spec.kernel_id) if kind is RootKind.MLACTL else None
    current = declared.scalars if declared is not None and declared.version == spec.version else ()
    ordinals = {scalar.name: scalar.ordinal for scalar in current if scalar.treatment == "identity-split"}
    named = ((fact.removesuffix(IDENTITY), fact, value) for fact, value in spec.facts if fact.endswith(IDENTITY))
    return tuple(Claim(scalar, fact, value, ordinals.get(scalar)) for scalar, fact, value in named)


# ---- audit


def default_jobs() -> int:
    """Disassemblers at a time: each takes a core for about a second."""
    return min(4, os.cpu_count() or 1)


def audit(
    adapter: CacheAdapter,
    entries: Iterable[CacheEntry],
    advisories: Advisories,
    *,
    facts_only: bool = False,
    jobs: int | None = None,
    on_done: OnDone = _ignore,
) -> Report:
    """Judges each entry; temporaries are no entries and are left out. `facts_only` reads no machine code.

    Raises EnvironmentUnfit when machine code is to be read and nvdisasm is not installed, before anything is looked at,
    and Interrupted on Ctrl-C. Nothing is changed.
    """
    chosen = [entry for entry in entries if not entry.residue]
    claims = (claim for entry in chosen if entry.manifest is not None for claim in claims_of(entry.manifest.spec, adapter.kind, advisories))
    to_read = not facts_only and any(claim.ordinal is not None for claim in claims)
    auditor = _Auditor(adapter, advisories, facts_only, machine_code.find_disassembler() if to_read else None)
    results: list[Result] = []
    pool = ThreadPoolExecutor(jobs or default_jobs(), thread_name_prefix="audit")
    try:
        for result in pool.map(auditor.judge, chosen):
            results.append(result)
            on_done(1)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted: {len(results)} of {len(chosen)} entries were audited", hint="name keys to audit fewer") from None
    finally:
        pool.shutdown(cancel_futures=True)
    return Report(tuple(results))


@dataclass(slots=True)
class _Findings:
    """What is gathered about one entry; the worst verdict counts."""

    verdict: Verdict = Verdict.CLEAN
    reasons: list[str] = field(default_factory=list)
    advisories: list[Advisory] = field(default_factory=list)
    code: CodeEvidence | None = None

    def add(self, verdict: Verdict, reason: str) -> None:
        self.verdict = max(self.verdict, verdict, key=_ORDER.index)
        self.reasons.append(reason)


@dataclass(frozen=True, slots=True)
class _Auditor:
    adapter: CacheAdapter
    advisories: Advisories
    facts_only: bool
    tool: Path | None

    def judge(self, entry: CacheEntry) -> Result:
        found = self._judge(entry)
        return replace(found, quarantined=True) if found.failing and self.adapter.masked(entry) else found

    def _judge(self, entry: CacheEntry) -> Result:
        aside = entry.status == "quarantined"
        checked = self._checked(entry, aside)
        if checked is None:
            return Result(entry, Verdict.CLEAN, ("removed while it was audited",))
        manifest = checked.manifest
        if manifest is None or checked.status not in ("ok", "quarantined"):
            return Result(entry if aside else checked, *self._unfit(checked), quarantined=aside)
        found = _Findings()
        concerned = list(hits(self.advisories.advisories, manifest.spec, self.adapter.kind))
        claims = claims_of(manifest.spec, self.adapter.kind, self.advisories)
        for claim in claims:
            self._check(checked, claim, concerned, found)
        for hit in concerned:
            found.advisories.append(hit.advisory)
            found.add(_verdict_of(hit), f"{hit.advisory.id}: {hit.advisory.title}; {hit.reason}")
        if not found.reasons:
            found.add(Verdict.CLEAN, "no claim to check: its facts say of no scalar whether the code reads it, and no advisory concerns it")
        return Result(entry if aside else checked, found.verdict, tuple(found.reasons), tuple(found.advisories), found.code, aside)

    def _checked(self, entry: CacheEntry, aside: bool) -> CacheEntry | None:
        """The entry with the status of the full check, which looks twice at what seems bad; None when it is gone by now."""
        if aside:
            return self.adapter.in_place(entry)
        return next(iter(self.adapter.verify([entry])), None)

    def _check(self, entry: CacheEntry, claim: Claim, concerned: list[Hit], found: _Findings) -> None:
        """Compares one claim with the machine code; an advisory that the code disproves leaves `concerned`."""
        said = f"facts say {claim.fact}={claim.value}" if claim.value is not None else f"facts do not have {claim.fact}"
        if self.facts_only:
            found.add(Verdict.CLEAN, f"{said}; machine code was not read, by facts alone nothing speaks against it")
            return
        if claim.ordinal is None or self.tool is None:
            unknown = f"{said}; which parameter {claim.scalar} is in this version is not known to this release"
            if self.adapter.kind is RootKind.MLACTL:
                found.add(Verdict.UNTOLD, unknown)
            else:  # of another tool's kernels few are known, and nobody claims to have checked the others
                found.add(Verdict.CLEAN, f"{unknown}; by facts alone nothing speaks against it")
            return
        try:
            found.code = read_code(self.adapter, entry, claim, self.tool)
        except _Untold as untold:
            # An advisory speaks by itself; a bare claim that cannot be checked is an open question.
            if claim.value is not None:
                found.add(Verdict.UNTOLD, f"{said}; {untold}")
            return
        reading = found.code.reading
        evidence = f"{said}, the code {_ANSWERS[reading]} {claim.scalar}"
        if self.adapter.kind is RootKind.MLACTL:
            right = {0: Reading.READ, 1: Reading.NOT_READ}.get(claim.value) if type(claim.value) is int else None
            verdict = Verdict.UNTOLD if right is None or reading is Reading.CANNOT_TELL else Verdict.CLEAN if reading is right else Verdict.CONVICTED
        else:
            verdict = _foreign(claim, reading)
            if reading is Reading.READ:
                evidence += "; it is right for every scale that it is given"
                acquitted = [hit for hit in concerned if hit.advisory.acquitted_by == claim.scalar]
                evidence += "".join(f": acquitted of {hit.advisory.id}" for hit in acquitted)
                concerned[:] = [hit for hit in concerned if hit not in acquitted]
        found.add(verdict, evidence)
        found.reasons.append(found.code.text())

    def _unfit(self, entry: CacheEntry) -> tuple[Verdict, tuple[str, ...]]:
        """An entry whose code is not looked at: damaged, being written, not readable, or without anything that says what it is."""
        said = f"{entry.status}: {entry.detail or 'nothing more is known'}"
        if entry.status == "locked":
            return Verdict.UNTOLD, (f"{said}; run the audit again when that is done",)
        if entry.status == "unreadable":
            return Verdict.UNTOLD, (f"{said}; what cannot be read is not judged",)
        if self.adapter.kind is RootKind.B12X and entry.status == "no-manifest":
            return Verdict.UNTOLD, (f"{said}; nothing says what it is, and releases before manifests load it all the same",)
        return Verdict.DAMAGED, (said,)


_ANSWERS = {Reading.READ: "reads", Reading.NOT_READ: "never reads", Reading.CANNOT_TELL: "may or may not read"}


def _foreign(claim: Claim, reading: Reading) -> Verdict:
    """Another tool's identity kernel may read the scale; one that says it is dynamic must."""
    if reading is Reading.CANNOT_TELL:
        return Verdict.CLEAN if claim.value is None else Verdict.UNTOLD
    return Verdict.CONVICTED if reading is Reading.NOT_READ and claim.value == 0 else Verdict.CLEAN


def _verdict_of(hit: Hit) -> Verdict:
    if hit.advisory.severity == "notice":
        return Verdict.NOTICE
    return Verdict.SUSPECT if hit.suspect else Verdict.CONVICTED


class _Untold(Exception):
    pass


def read_code(adapter: CacheAdapter, entry: CacheEntry, claim: Claim, tool: Path) -> CodeEvidence:
    """What an entry's code does with the parameter of a claim whose ordinal is known; raises _Untold when that cannot be read."""
    assert claim.ordinal is not None
    try:
        data = adapter.read_object(entry)
        digest = hashlib.sha256(data).hexdigest()
        if entry.manifest is None or digest != entry.manifest.object_sha256:
            raise _Untold(f"its object changed while it was audited: its SHA-256 is {digest} now")
        cubin = device_code(data)
        kernels = kernel_parameters(cubin)
        if len(kernels) != 1:
            raise _Untold(f"its cubin has {len(kernels)} kernels, expected the one that the facts are about")
        kernel, place = kernels[0], kernels[0].parameter(claim.ordinal)
        if place is None or place.size_bytes != claim.size_bytes:
            found = f"{place.size_bytes} bytes" if place is not None else "not there"
            raise _Untold(f"parameter {claim.ordinal} ({claim.scalar}) of {kernel.kernel[:60]} is {found}, expected {claim.size_bytes} bytes")
        reads = machine_code.reads_of(machine_code.disassemble(cubin, tool), kernel.base, place.first, place.size_bytes)
    except OSError as error:
        raise _Untold(f"{entry.object_path} cannot be read: {error.strerror}") from None
    except (BadElf, machine_code.Disassembly) as error:
        raise _Untold(f"its machine code cannot be read: {error.reason}") from None
    return CodeEvidence(kernel.kernel, claim.scalar, claim.ordinal, place.first, place.size_bytes, reads.reading, reads.instructions, reads.operands)


# ---- quarantine


def set_convicted_aside(adapter: CacheAdapter, report: Report, on_done: OnDone = _ignore) -> tuple[Moved, ...]:
    """Quarantines what was convicted; what is in use or cannot be written is left and says why. Raises Interrupted on Ctrl-C."""

    def move(entry: CacheEntry) -> Moved:
        moved = _move(adapter.set_aside, entry)
        if not moved.done and adapter.masked(entry):
            return Moved(entry, True, f"{entry.root} still has it, and no lookup here answers with an object that another layer has set aside")
        return moved

    return _each([result.entry for result in report.convicted], move, on_done, "set aside")


def restore(
    adapter: CacheAdapter, entries: Sequence[CacheEntry], advisories: Advisories, *, force: bool = False, on_done: OnDone = _ignore
) -> tuple[Moved, ...]:
    """Puts quarantined entries back that are intact and that a fresh audit finds nothing against, or any intact one with `force`.

    Raises what `audit` does.
    """
    aside = [entry for entry in entries if entry.status == "quarantined"]
    verdicts = {id(entry): result for entry, result in zip(aside, audit(adapter, aside, advisories).results, strict=True)}

    def put_back(entry: CacheEntry) -> Moved:
        result = verdicts.get(id(entry))
        if result is None:
            return Moved(entry, False, f"it is not quarantined: {entry.status}")
        if result.guilty and not force:
            return Moved(entry, False, f"the audit says {result.verdict}: {result.reasons[0]}")
        moved = _move(adapter.put_back, entry)
        if not moved.done:
            return moved
        return Moved(entry, True, f"in spite of {result.verdict}: {result.reasons[0]}" if result.guilty else UNKNOWN_CAUSE)

    return _each(entries, put_back, on_done, "put back")


def _move(move: Callable[[Iterable[CacheEntry]], Sequence[str]], entry: CacheEntry) -> Moved:
    try:
        done = entry.key in move([entry])
    except CannotRun as error:
        return Moved(entry, False, error.message)
    return Moved(entry, done, "" if done else "it was left as it is")


def _each(entries: Sequence[CacheEntry], move: Callable[[CacheEntry], Moved], on_done: OnDone, what: str) -> tuple[Moved, ...]:
    moved: list[Moved] = []
    try:
        for entry in entries:
            moved.append(move(entry))
            on_done(1)
    except KeyboardInterrupt:
        count = sum(item.done for item in moved)
        raise Interrupted(
            f"interrupted: {count} of {len(entries)} entries were {what}; the cache is valid", hint="run it again for the rest"
        ) from None
    return tuple(moved)
