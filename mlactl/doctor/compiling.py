"""Compiler, linker and disassembler, and how the installed versions fit the driver and what the cache was built with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from mlactl.cache import machine_code
from mlactl.doctor.findings import Finding, Severity
from mlactl.doctor.gpus import cuda_text
from mlactl.doctor.situation import Situation, linker
from mlactl.errors import EnvironmentUnfit
from mlactl.printable import counted

COMPILER_WHEEL = "pip install 'nvidia-cutlass-dsl[cu13]==4.8.1' apache-tvm-ffi"


def check(situation: Situation) -> Iterator[Finding]:
    """What compiles here, and whether lookups and the driver agree with it."""
    yield from _compiler(situation)
    yield from _linker(situation)
    yield _disassembler()
    yield from _against_cache(situation)
    yield from _against_driver(situation)


def _compiler(situation: Situation) -> Iterator[Finding]:
    here = situation.toolchain
    if here is None and situation.build_node:
        what = f"nothing can be compiled here: {situation.absence}"
        yield Finding("toolchain", Severity.FATAL, "compiler", what, "nvidia-cutlass-dsl and apache-tvm-ffi, on a node that compiles", COMPILER_WHEEL)
    elif here is None:
        what = f"no compiler here ({situation.absence}): lookups go by the toolchain that the cache records"
        yield Finding("toolchain", Severity.NOTICE, "compiler", what, "", COMPILER_WHEEL)
    else:
        yield Finding("toolchain", Severity.OK, "compiler", here.label())
        versions = {version for name, version in here.distributions}
        if len(versions) > 1:
            named = ", ".join(f"{name} {version}" for name, version in here.distributions)
            what = f"parts of the compiler are of several versions: {named}"
            yield Finding("toolchain", Severity.WARNING, "mixed-compiler", what, "one version of all of them", COMPILER_WHEEL)


def _linker(situation: Situation) -> Iterator[Finding]:
    found = linker()
    if found is not None:
        yield Finding("toolchain", Severity.OK, "linker", found)
        return
    severity = Severity.FATAL if situation.build_node else Severity.WARNING if situation.toolchain is not None else Severity.NOTICE
    yield Finding("toolchain", severity, "linker", "no usable ld in PATH: nothing can be compiled", "GNU ld", "apt-get install binutils")


def _disassembler() -> Finding:
    """The one that `cache audit` takes, by the same search."""
    try:
        return Finding("toolchain", Severity.OK, "disassembler", f"nvdisasm: {machine_code.find_disassembler()}")
    except EnvironmentUnfit as error:
        what = f"{error.message}; cache audit goes by facts alone"
        return Finding("toolchain", Severity.WARNING, "disassembler", what, "nvdisasm 13 or newer", error.hint or "pip install nvidia-cuda-nvdisasm")


def _against_cache(situation: Situation) -> Iterator[Finding]:
    """Entries of another compiler are misses wherever there is a compiler; without one, several of them make lookups ambiguous."""
    made = Counter(entry.manifest.toolchain for entry in situation.good if entry.manifest is not None)
    here = situation.toolchain
    total = sum(made.values())
    if here is not None and total:
        others = {tool: number for tool, number in made.items() if tool != here}
        if not others:
            yield Finding("toolchain", Severity.OK, "cache-toolchain", f"{counted(total, 'object')} in the cache, all made by it")
            return
        named = "; ".join(f"{number} by {tool.label()}{_parts(tool.distributions, here.distributions)}" for tool, number in others.items())
        what = f"{sum(others.values())} of {total} objects were made by another toolchain, which a lookup here never finds: {named}"
        severity = Severity.WARNING if len(others) == len(made) else Severity.NOTICE
        fix = f"{situation.warmup('--profile NAME')} makes them anew; mlactl cache prune --stale --dry-run shows what is left over"
        yield Finding("toolchain", severity, "cache-toolchain", what, f"objects made by {here.label()}", fix)
    elif len(made) > 1:
        named = "; ".join(f"{number} by {tool.label()}" for tool, number in made.items())
        what = f"objects of {len(made)} toolchains are in the cache and no compiler here says which is meant: {named}"
        yield Finding(
            "toolchain", Severity.WARNING, "cache-toolchain", what, "objects of one toolchain", "mlactl cache stats counts them; mlactl cache rm KEY"
        )


def _parts(theirs: tuple[tuple[str, str], ...], ours: tuple[tuple[str, str], ...]) -> str:
    """The distributions that differ, when their main one does not say it."""
    there, here = dict(theirs), dict(ours)
    if there.get("nvidia-cutlass-dsl") != here.get("nvidia-cutlass-dsl"):
        return ""
    different = [f"{name} {there.get(name, 'absent')}" for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
    return f" ({', '.join(different)})" if different else ""


def _against_driver(situation: Situation) -> Iterator[Finding]:
    """Machine code of a newer toolkit major than the driver's is not promised to load; what no lookup finds is never loaded."""
    cuda = situation.node.cuda
    if situation.build_node or cuda is None:
        return
    wanted = [entry.manifest.toolchain.flavour for entry in situation.loadable if entry.manifest is not None]
    newer = [flavour for flavour in wanted if int(flavour.removeprefix("cu")) > cuda // 1000]
    if newer:
        # These are found, so that nothing would be compiled in their place; a compiler here makes objects of the same flavour.
        severity = Severity.FATAL if len(newer) == len(wanted) else Severity.ERROR
        what = f"the driver supports CUDA up to {cuda_text(cuda)}; {len(newer)} of {len(wanted)} objects found here were made by {max(newer)}"
        fix = f"update the driver, or warm on a machine with this driver's flavour: mlactl warmup --profile NAME --arch {situation.arches[0]}"
        yield Finding("toolchain", severity, "driver-too-old", what, f"a driver for CUDA {max(newer).removeprefix('cu')}", fix)
    elif wanted:
        yield Finding("toolchain", Severity.OK, "driver-fit", f"CUDA {cuda_text(cuda)} of the driver fits {', '.join(sorted(set(wanted)))} objects")
