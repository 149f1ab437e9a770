"""Which of a profile's objects are warm, target by target: what `warmup --check` says, for every profile of the node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlactl import profiles as profile_files
from mlactl.cache.store import Store
from mlactl.doctor.findings import Finding, Severity
from mlactl.doctor.scale_files import file_for
from mlactl.doctor.situation import Situation
from mlactl.errors import MlactlError
from mlactl.printable import counted, shell_word
from mlactl.profiles import BadProfile, Profile
from mlactl.scales.needs import identities_needed
from mlactl.warmup.plan import MISSING, NOT_BUILT, PRESENT, UNTRUSTED, Item, look_up

SHOWN = 3
"""Objects named of each profile and target."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Profiles to look at, by the name or path that leads to each; `asked` is False when they were found by what is warm."""

    profiles: tuple[tuple[str, Profile], ...]
    bad: tuple[MlactlError, ...]
    asked: bool


def choose(situation: Situation, names: Sequence[str]) -> Chosen:
    """The profiles asked for, or those of which at least one object is warm for this node.

    Raises UnknownProfile and CannotRun for a name that leads nowhere and a file that cannot be read; a file that is wrong
    is kept as a finding.
    """
    asked = bool(names)
    warm = {(entry.manifest.spec, entry.manifest.arch) for entry in situation.good if entry.manifest is not None}
    found: list[tuple[str, Profile]] = []
    bad: list[MlactlError] = []
    if not asked:
        try:
            names = profile_files.names()
        except MlactlError as error:
            bad.append(error)
    for name in dict.fromkeys(names):
        try:
            profile = profile_files.load(name)
        except MlactlError as error:
            if asked and not isinstance(error, BadProfile):
                raise
            bad.append(error)
            continue
        if asked or any((spec, arch) in warm for spec in profile.specs() for arch in situation.arches):
            found.append((name, profile))
    return Chosen(tuple(found), tuple(bad), asked)


def check(situation: Situation, chosen: Chosen, scales: Path | None) -> Iterator[Finding]:
    """One finding for each profile and target, and for each profile that cannot be used."""
    for error in chosen.bad:
        severity = Severity.ERROR if chosen.asked else Severity.WARNING
        yield Finding("profiles", severity, "bad-profile", error.message, "a profile that fits together", error.hint or "mlactl profile check")
    if not chosen.profiles and not chosen.bad:
        holds = "holds no object of a known one" + _unjudged(situation)
        what = f"no profile was asked for, and the cache {holds}: coverage was not checked"
        yield Finding("profiles", Severity.NOTICE, "no-profile", what, "", "mlactl doctor --profile NAME; mlactl profile ls")
    if situation.store is None:
        return
    for arch in situation.arches:
        found = [list(_covered(situation, situation.store, name, profile, arch, scales, named=chosen.asked)) for name, profile in chosen.profiles]
        for findings in found if chosen.asked else _begun(found):
            yield from findings


def _begun(found: Sequence[Sequence[Finding]]) -> Iterator[list[Finding]]:
    """Findings of profiles that nobody asked for: deployments share objects, so one that is warm begins others unasked.

    What those miss is a notice beside a profile that is complete, and a warning when none is.
    """
    complete = any(finding.check == "coverage" for findings in found for finding in findings)
    severity = Severity.NOTICE if complete else Severity.WARNING
    for findings in found:
        yield [replace(finding, severity=severity) if finding.check in ("missing-objects", "not-built") else finding for finding in findings]


def _covered(situation: Situation, store: Store, name: str, profile: Profile, arch: str, scales: Path | None, *, named: bool) -> Iterator[Finding]:
    """One profile on one target; `named` names the objects that are missing."""
    file = file_for(situation, profile, scales)
    options = f"--profile {shell_word(name)} --arch {arch}"
    fix = situation.warmup(options + (f" --scales {shell_word(file)}" if file is not None else ""))
    try:
        identities = identities_needed(file, profile) if file is not None else None
    except MlactlError:
        # Told as a finding of the file; which variants it needs is not known, so both have to be there.
        identities, fix = None, situation.warmup(options)
    try:
        items = [look_up(spec, arch, store) for spec in profile.specs(identities)]
    except MlactlError as error:
        what = f"profile {profile.name} for {arch}: {error.message}"
        yield Finding("profiles", situation.missing(), "lookup-failed", what, "one answer for each object", error.hint or fix)
        return
    by_state = {state: [item for item in items if item.state == state] for state in (PRESENT, MISSING, UNTRUSTED, NOT_BUILT)}
    warm = f"profile {profile.name} for {arch}: {len(by_state[PRESENT])} of {len(items)} objects are warm"
    if by_state[UNTRUSTED]:
        refused = by_state[UNTRUSTED]
        severity = Severity.ERROR if situation.build_node else Severity.FATAL
        what = f"{warm}, {len(refused)} are there and refused: {refused[0].reason}"
        yield Finding("profiles", severity, "untrusted-objects", what, "objects that nobody else may write", refused[0].hint or _look(situation))
    if by_state[MISSING]:
        also = f"; {situation.obstacle}" if situation.obstacle is not None else ""
        which = f": {_named(by_state[MISSING])}{also}" if named else ""
        what = f"{warm}, {len(by_state[MISSING])} missing{which}{_unjudged(situation)}"
        first = f"{situation.owner_first()}; then " if situation.unreadable else ""
        yield Finding("profiles", situation.missing(), "missing-objects", what, "all of them, before serving", f"{first}{fix}")
    if by_state[NOT_BUILT]:
        what = (
            f"profile {profile.name} for {arch}: {len(by_state[NOT_BUILT])} objects cannot be built by this release: {by_state[NOT_BUILT][0].reason}"
        )
        yield Finding("profiles", Severity.WARNING, "not-built", what, "kernels of this release", f"mlactl profile show {shell_word(name)}")
    if len(by_state[PRESENT]) == len(items):
        yield Finding("profiles", Severity.OK, "coverage", warm)


def _unjudged(situation: Situation) -> str:
    """What to add where an entry that this user may not read could be the one that is looked for."""
    number = situation.unreadable
    return f"; {counted(number, 'entry', 'entries')} cannot be read by this user and may be among them" if number else ""


def _look(situation: Situation) -> str:
    return "; ".join(f"ls -ld {shell_word(held.layer.path)}" for held in situation.layers)


def _named(items: Sequence[Item]) -> str:
    more = f", and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(item.spec.label() for item in items[:SHOWN]) + more
