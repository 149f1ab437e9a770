"""Is there an object for this node's GPUs that a lookup here finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from mlactl.cache import key as keys
from mlactl.cache.store import Entry
from mlactl.doctor.findings import Finding, Severity
from mlactl.doctor.situation import Situation
from mlactl.kernels import registry
from mlactl.printable import counted


def check(situation: Situation) -> Iterator[Finding]:
    """One finding for each target of this node."""
    for arch in situation.arches:
        yield _of(situation, arch)


def _of(situation: Situation, arch: str) -> Finding:
    warm = situation.warmup(f"--profile NAME --arch {arch}")
    good = situation.good
    here = [entry for entry in good if entry.manifest is not None and entry.manifest.arch == arch]
    if not here:
        others = sorted({entry.manifest.arch for entry in good if entry.manifest is not None})
        if others:
            what = f"no object for {arch}; there are objects for {', '.join(others)}, which never load on it"
        else:
            what = f"no object for {arch}: {_nothing(situation)}"
        if situation.build_node:
            severity = Severity.ERROR if others else Severity.WARNING
            return Finding("objects", severity, "no-object", what + ("" if others else ", nothing is warmed yet"), f"objects for {arch}", warm)
        then = f"and {situation.obstacle}" if situation.obstacle is not None else "so every first launch would compile"
        return Finding("objects", _severity(situation, arch), "no-object", f"{what}, {then}", f"objects for {arch}", warm)
    found = [entry for entry in here if situation.findable(entry)]
    if found:
        rest = len(here) - len(found)
        also = f", and {rest} that it does not (mlactl cache prune --dry-run, --stale)" if rest else ""
        return Finding("objects", Severity.OK, "objects", f"{counted(len(found), 'object')} for {arch} that a lookup here finds{also}")
    reasons = Counter(reason for entry in here for reason in _reasons(situation, entry))
    named = ", ".join(reason for reason, _ in reasons.most_common(3))
    also = f"; {situation.obstacle}" if situation.obstacle is not None else ""
    what = f"{counted(len(here), 'object')} for {arch}, none of which a lookup here finds: {named}{also}"
    return Finding(
        "objects",
        _severity(situation, arch),
        "not-found",
        what,
        "objects of this release and toolchain",
        f"{warm}; mlactl cache why {here[0].key[:12]}",
    )


def _nothing(situation: Situation) -> str:
    """Why no object of any target can be seen."""
    if situation.unreadable:
        return f"nothing in the cache can be judged, {counted(situation.unreadable, 'entry', 'entries')} cannot be read by this user"
    if any(held.problem is not None or held.passed_over for held in situation.layers):
        return "what the cache holds could not be read, or not all of it"
    foreign = next((held.foreign for held in situation.layers if held.foreign is not None), None)
    return "the cache is empty" if foreign is None else foreign.message


def _severity(situation: Situation, arch: str) -> Severity:
    """As bad as a miss here; with objects for another of its cards, the node can launch on that one."""
    elsewhere = any(entry.manifest is not None and entry.manifest.arch != arch for entry in situation.loadable)
    return Severity.ERROR if elsewhere else situation.missing()


def _reasons(situation: Situation, entry: Entry) -> list[str]:
    """Which part of the key is another one here."""
    manifest = entry.manifest
    assert manifest is not None
    declared = registry.KERNELS.get(manifest.spec.kernel_id)
    if declared is None:
        return [f"this release has no kernel {manifest.spec.kernel_id}"]
    if declared.version != manifest.spec.version:
        return [f"{manifest.spec.kernel_id} is version {declared.version} here"]
    inputs = situation.inputs_here(manifest)
    if isinstance(inputs, str):
        return [inputs]
    return [f"another {name}" for name, _, _ in keys.differences(manifest.key_inputs(), inputs)]
