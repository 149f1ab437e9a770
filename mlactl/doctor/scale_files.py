"""The scale files a server would read: valid, and their kernel variants warm, in our own roots and in b12x's."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlactl.cache.adapter import CacheEntry, RootKind
from mlactl.cache.adapters import open_cache
from mlactl.cache.advisories import takes_outer_scale
from mlactl.cache.foreign.b12x import roots as b12x
from mlactl.cache.store import Status
from mlactl.cache.trust import describe
from mlactl.doctor.cache_roots import gone
from mlactl.doctor.findings import Finding, Severity
from mlactl.doctor.situation import Situation, as_owner, owners_of_closed
from mlactl.errors import CannotRun, MlactlError
from mlactl.printable import counted, shell_word
from mlactl.profiles import STATIC_NVFP4, Profile
from mlactl.scales.findings import InvalidScales
from mlactl.scales.outer import OuterScales, examine, load_outer_scales

VARIABLE = "VLLM_NVFP4_MLA_SCALES_FILE"
"""What a server takes its outer-scale file from."""

IDENTITY_FACT = "latent_scale_identity"


@dataclass(frozen=True, slots=True)
class Named:
    """A scale file and who names it: `--scales`, the variable or a profile."""

    path: Path
    by: str


@dataclass(frozen=True, slots=True)
class Variants:
    """Entries of one kernel, version and target over static NVFP4 records, by the variant that their fact states."""

    kernel_id: str
    version: int
    arch: str
    identity: int
    dynamic: int


def split_variants(entries: Iterable[CacheEntry], kind: RootKind) -> tuple[Variants, ...]:
    """Counts usable entries that restore an outer scale, in a cache of that kind.

    Entries without the fact count as neither: which variant they are is not known from facts, and `cache audit` judges them.
    """
    counts: dict[tuple[str, int, str], list[int]] = {}
    for entry in entries:
        manifest = entry.manifest
        if entry.status != Status.OK or entry.residue or manifest is None:
            continue
        facts = dict(manifest.spec.facts)
        if IDENTITY_FACT in facts and takes_outer_scale(manifest.spec, kind):
            count = counts.setdefault((manifest.spec.kernel_id, manifest.spec.version, manifest.arch), [0, 0])
            count[0 if facts[IDENTITY_FACT] == 1 else 1] += 1
    return tuple(Variants(*kind, *count) for kind, count in sorted(counts.items()))


def named_files(situation: Situation, scales: Path | None, profiles: Sequence[Profile]) -> tuple[Named, ...]:
    """Each file once, the one given by `--scales` first, then the environment's, then the profiles'."""
    found = [Named(scales, "--scales")] if scales is not None else []
    if situation.environ.get(VARIABLE):
        found.append(Named(Path(situation.environ[VARIABLE]), VARIABLE))
    found += [Named(profile.scales.file, f"profile {profile.name}") for profile in profiles if profile.scales is not None]
    return tuple({os.path.realpath(one.path): one for one in reversed(found)}.values())[::-1]


def file_for(situation: Situation, profile: Profile, scales: Path | None) -> Path | None:
    """The scale file that decides which variants a profile launches; None where both have to be there."""
    if scales is not None:
        return scales
    if situation.environ.get(VARIABLE) and profile.kv.record in STATIC_NVFP4:
        return Path(situation.environ[VARIABLE])  # what a server in this environment reads, whatever its profile says
    return profile.scales.file if profile.scales is not None else None


def check(situation: Situation, scales: Path | None, profiles: Sequence[Profile]) -> Iterator[Finding]:
    """Every scale file that is named anywhere, and the roots that would have to hold its variants."""
    files = named_files(situation, scales, profiles)
    if not files:
        yield Finding("scales", Severity.OK, "no-scale-file", f"no scale file is named by {VARIABLE}, --scales or a profile")
        return
    yield from _disagreements(situation, profiles)
    dynamic: list[Named] = []
    for one in files:
        loaded = yield from _valid(one, profiles)
        if loaded is not None and 0 in loaded.identities:
            dynamic.append(one)
    if dynamic:
        yield from _own_roots(situation, dynamic[0], profiles)
        yield from _b12x_roots(situation, dynamic[0])


def _disagreements(situation: Situation, profiles: Sequence[Profile]) -> Iterator[Finding]:
    """A profile that names another file than the environment, or whose records have no outer scale."""
    file = situation.environ.get(VARIABLE)
    for profile in profiles if file else ():
        if profile.kv.record not in STATIC_NVFP4:
            what = f"{VARIABLE} is set, and the {profile.kv.record} records of profile {profile.name} have no outer scale: it does nothing there"
            yield Finding("scales", Severity.NOTICE, "inert-scale-file", what, "", f"unset {VARIABLE}, if not meant")
        elif profile.scales is not None and file and os.path.realpath(profile.scales.file) != os.path.realpath(file):
            what = f"{VARIABLE}={file}, and profile {profile.name} names {profile.scales.file}"
            fix = f"mlactl verify-scales {shell_word(file)} --against {shell_word(profile.scales.file)}"
            yield Finding("scales", Severity.WARNING, "two-scale-files", what, "one file", fix)


def _valid(one: Named, profiles: Sequence[Profile]) -> Generator[Finding, None, OuterScales | None]:
    """Whether a file can be used with the profiles that would read it; returns it when it can."""
    fitting = [profile for profile in profiles if profile.kv.record in STATIC_NVFP4]
    fix = f"mlactl verify-scales {shell_word(one.path)}"
    loaded: OuterScales | None = None
    try:
        for profile in fitting or (None,):
            loaded = load_outer_scales(one.path, profile)
    except InvalidScales as error:
        # The hint lists every fault; what mends them is another file.
        mend = f"{error.hint or fix} lists every fault; then name a valid file by {one.by}, which mlactl scales fit writes from amplitudes"
        yield Finding("scales", Severity.ERROR, "invalid-scale-file", f"{error.message} (named by {one.by})", "a valid scale file", mend)
        return None
    except MlactlError as error:
        what = f"{error.message} (named by {one.by})"
        mend = error.hint or f"name another file by {one.by}, or let this user read it: ls -l {shell_word(one.path)}"
        yield Finding("scales", Severity.ERROR, "unreadable-scale-file", what, "a scale file that this user may read", mend)
        return None
    assert loaded is not None
    doubts = [row for row in examine(one.path).findings.rows() if row.severity == "warning"]
    if doubts:
        what = f"{one.path}: {doubts[0].sentence()}" + (f" (and {len(doubts) - 1} more)" if len(doubts) > 1 else "")
        yield Finding("scales", Severity.WARNING, "doubtful-scale-file", what, "no doubts", fix)
    variants = " and ".join("dynamic" if identity == 0 else "identity" for identity in loaded.identities)
    what = f"{one.path} (named by {one.by}): {len(loaded.layers)} layers, needs the {variants} variant{'s' * (len(loaded.identities) > 1)}"
    yield Finding("scales", Severity.OK, "scale-file", what)
    return loaded


def _own_roots(situation: Situation, file: Named, profiles: Sequence[Profile]) -> Iterator[Finding]:
    """Without a profile that says which objects to look up: roots that hold identity variants alone."""
    if any(profile.kv.record in STATIC_NVFP4 for profile in profiles):
        return  # those profiles' coverage looks each variant up
    for layer in situation.layers:
        if layer.unreadable:
            what = f"{_unjudged(layer.layer.path, len(layer.unreadable))} {file.path}, which needs the dynamic ones: this user may not read them"
            yield Finding("scales", Severity.WARNING, "unjudged", what, "entries that this user may read", as_owner(layer.owners))
    for held in split_variants(situation.good, RootKind.MLACTL):
        if held.dynamic == 0 and held.arch in situation.arches:
            what = f"only identity objects of {held.kernel_id} for {held.arch}; {file.path} needs dynamic ones"
            fix = situation.warmup(f"--profile NAME --arch {held.arch} --scales {shell_word(file.path)}")
            yield Finding("scales", situation.missing(), "identity-only", what, f"objects with {IDENTITY_FACT}=0", fix)


def _unjudged(root: Path, number: int, noun: str = "entry", plural: str = "entries") -> str:
    return f"{root}: {counted(number, noun, plural)} could not be judged for the variants of"


def _b12x_roots(situation: Situation, file: Named) -> Iterator[Finding]:
    """From facts alone: b12x up to 1.5.1 plans with a scale and lands on the identity entry."""
    for root in b12x.candidates(situation.environ):
        if gone(root.path):
            continue
        passed_over: list[str] = []
        try:
            if not os.path.isdir(root.path):  # noqa: PTH112  Path.is_dir raises below a folder that may not be entered
                raise CannotRun(f"{describe(root.path)} is no folder that can be entered")
            entries = open_cache(str(root.path), RootKind.B12X).entries(on_problem=passed_over.append)
        except MlactlError as error:
            what = f"the b12x cache {root.path} could not be looked at: {error.message}"
            fix = f"run mlactl doctor in this environment as its owner, or as root; ls -ld {shell_word(root.path)}"
            yield Finding("scales", Severity.WARNING, "b12x-unreadable", what, "a root that can be read", fix)
            continue
        unjudged = [entry for entry in entries if not entry.residue and entry.status not in _TOLD]
        yield from _b12x_unjudged(root.path, file, unjudged, passed_over)
        yield from _b12x_variants(situation, root.path, file, split_variants(entries, RootKind.B12X), complete=not unjudged and not passed_over)


_TOLD = (Status.OK, Status.NO_OBJECT, Status.QUARANTINED, Status.TEMP)
"""What a b12x entry's facts are known of, or what no release loads."""


def _b12x_unjudged(root: Path, file: Named, entries: Sequence[CacheEntry], passed_over: Sequence[str]) -> Iterator[Finding]:
    """Entries whose facts cannot be had: any of them may be the identity entry that a server lands on."""
    inspect = f"--root-kind b12x --cache-dir {shell_word(root)}"
    if entries:
        # The detail of an unreadable entry names its file; what many share is why it was refused.
        reasons = Counter(
            f"{entry.status} ({entry.detail.rpartition(': ')[2] if entry.status == 'unreadable' else entry.detail})" for entry in entries
        )
        named = ", ".join(f"{number} {reason}" for reason, number in reasons.most_common(2)) + (", …" if len(reasons) > 2 else "")
        owners = [owner for entry in entries for owner in owners_of_closed([entry.object_path.with_suffix(".json")])]
        fixes = [as_owner(owners)] if owners else []
        if len(owners) < len(entries):
            fixes.append(f"mlactl cache audit {inspect} judges what it can, mlactl cache ls {inspect} names them")
        what = f"{_unjudged(root, len(entries))} {file.path}, which needs the dynamic ones: {named}"
        yield Finding("scales", Severity.WARNING, "b12x-unjudged", what, "entries whose facts can be read", "; ".join(fixes))
    if passed_over:
        more = f" (and {len(passed_over) - 1} more)" if len(passed_over) > 1 else ""
        what = f"{_unjudged(root, len(passed_over), 'folder', 'folders')} {file.path}, which needs the dynamic ones: {passed_over[0]}{more}"
        fix = f"run mlactl doctor in this environment as the owner, or as root; ls -l {shell_word(root)}"
        yield Finding("scales", Severity.WARNING, "b12x-unjudged", what, "folders that can be read", fix)


def _b12x_variants(situation: Situation, root: Path, file: Named, held: Sequence[Variants], *, complete: bool) -> Iterator[Finding]:
    """What the facts that can be read say; `complete` when they are those of every entry."""
    lacking = [kind for kind in held if kind.dynamic == 0]
    for kind in lacking:
        for_arch = f" for {kind.arch}" if kind.arch else ""
        what = (
            f"{root} holds only identity entries of {kind.kernel_id} {kind.version}{for_arch}{'' if complete else ', as far as it can be read'}: "
            f"a server that sets {file.path} and runs them serves without the restore"
        )
        ours = f"serve from mlactl's objects: {situation.warmup(f'--profile NAME --scales {shell_word(file.path)}')}"
        fix = f"{ours}; or unset {VARIABLE} where the KV cache is written without one"
        yield Finding("scales", Severity.ERROR, "b12x-identity-only", what, f"entries with {IDENTITY_FACT}=0 beside them", fix)
    if held and not lacking and complete:
        yield Finding("scales", Severity.OK, "b12x-variants", f"{root} holds dynamic entries of every kernel that has identity ones")
