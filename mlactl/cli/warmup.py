"""`mlactl warmup`: compile what a profile can launch and the cache does not hold."""

from __future__ import annotations

import shlex
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlactl.cli import hints, options
from mlactl.errors import CannotRun, Interrupted, MlactlError, UsageError
from mlactl.ui.output import Column, Mode, Output

if TYPE_CHECKING:
    from mlactl.profiles import Profile
    from mlactl.warmup.plan import Item, Plan
    from mlactl.warmup.pool import Outcome, Result


@hints.keeps_root
def warmup(
    profile: options.ProfileOption,
    arch: options.ArchOption = None,
    scales: Annotated[Path | None, typer.Option("--scales", metavar="FILE", help="Outer-scale file: only the variants it needs")] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Compile workers, default one a core")] = None,
    dry_run: options.DryRunOption = False,
    check: Annotated[bool, typer.Option("--check", help="Compile nothing; exit 1 naming what is missing")] = False,
    shared: Annotated[bool, typer.Option("--shared", help="Make the cache readable by other users (0755/0644)")] = False,
    cache_dir: options.CacheDirOption = None,
    output: options.OutputOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Compile every kernel variant a profile can launch into the cache; needs no GPU."""
    out = hints.make_output(output, json, quiet, cache_dir)
    if check and dry_run:
        raise UsageError(
            "--check and --dry-run were both given", hint="--dry-run lists what would be compiled; --check exits 1 when that is not empty"
        )
    if not shared:
        _warn_of_roots(out, cache_dir)
    plan = _plan(out, profile, options.checked_arches(arch), scales, cache_dir)
    if dry_run:
        _list(out, plan)
    elif check:
        _report_check(out, plan, _command(profile, plan, scales))
        if not plan.complete:
            raise typer.Exit(1)
    else:
        try:
            _compile(out, plan, _command(profile, plan, scales), jobs, shared, cache_dir)
        finally:
            if shared:  # whether others reach the root shows when it is there
                _warn_of_roots(out, cache_dir)


def _warn_of_roots(out: Output, cache_dir: str | None) -> None:
    from mlactl.cache.adapters import require_own
    from mlactl.cache.roots import resolve, warnings

    found = resolve(cache_dir)
    require_own(found)
    for text in warnings(found):
        out.warn(text)


def _plan(out: Output, name: str, arches: tuple[str, ...], scales: Path | None, cache_dir: str | None) -> Plan:
    from mlactl.cache.store import Store
    from mlactl.profiles import load
    from mlactl.warmup.plan import make_plan

    profile = load(name)
    identities = _identities(profile, scales)
    return make_plan(profile, arches or _default_arches(out), Store.open(cache_dir), identities)


def _default_arches(out: Output) -> tuple[str, ...]:
    from mlactl.warmup.arches import DEFAULT_ARCH, present_arches

    present = present_arches()
    if present:
        out.note(f"for the GPU of this machine: {', '.join(present)}")
        return present
    out.note(f"no GPU here that objects are made for, so for {DEFAULT_ARCH}; --arch says otherwise")
    return (DEFAULT_ARCH,)


def _identities(profile: Profile, scales: Path | None) -> tuple[int, ...] | None:
    """Latent-scale variants that the scale file given here, else the one named by the profile, makes necessary."""
    file = scales if scales is not None else profile.scales.file if profile.scales is not None else None
    if file is None:
        return None
    from mlactl.scales.needs import identities_needed

    return identities_needed(file, profile)


def _list(out: Output, plan: Plan) -> None:
    # A pipe wants what there is to do; people and JSON see the whole profile.
    rows = plan.of("missing") if out.mode is Mode.QUIET else plan.items
    out.listing("entries", rows, _COLUMNS, key=_key_or_label, as_json=lambda item: item.as_json(), extra=_head(plan))
    out.note(f"{_counted(plan)}; nothing was compiled")
    _hint_at_untrusted(out, plan)


def _report_check(out: Output, plan: Plan, command: str) -> None:
    absent = [item for item in plan.items if item.state != "present"]
    document = {**_head(plan), "complete": plan.complete, "entries": [item.as_json() for item in plan.items]}

    def human() -> None:
        for item in absent:
            out.line(f"{item.state}: {item.spec.label()} for {item.arch}" + (f": {item.reason}" if item.reason else ""))
        out.line(_counted(plan))

    out.document(document, human, lambda: [_key_or_label(item) for item in absent])
    if plan.of("missing"):
        out.hint(command)
    _hint_at_untrusted(out, plan)


def _hint_at_untrusted(out: Output, plan: Plan) -> None:
    for hint in dict.fromkeys(item.hint for item in plan.of("untrusted")):
        out.hint(hint or "ls -ld shows owner and mode")


def _compile(out: Output, plan: Plan, command: str, jobs: int | None, shared: bool, cache_dir: str | None) -> None:
    """Compiles what is missing and says what became of it; exits 1 unless everything is there in the end."""
    from mlactl.warmup.pool import Result, compile_missing, default_jobs

    missing, untrusted = plan.of("missing"), plan.of("untrusted")
    if untrusted:  # compiling again would not change an owner or a mode
        raise CannotRun(untrusted[0].reason or "an entry is not trusted", hint=untrusted[0].hint)
    result = Result((), (), False)
    started = time.monotonic()
    stopped = _Stopped()
    if missing:
        with stopped, out.progress("compiling", len(missing), "kernels") as task:

            def finished(outcome: Outcome) -> None:
                task.advance()

            result = compile_missing(
                missing,
                jobs=jobs or default_jobs(len(missing)),
                cache_dir=cache_dir,
                shared=shared,
                on_start=lambda item: task.describe(f"{item.spec.label()} {item.arch}"),
                on_outcome=finished,
            )
    _report_run(out, plan, result, time.monotonic() - started)
    if result.interrupted:
        done = len(result.of("compiled"))
        error = Interrupted(
            f"{stopped.how}: {done} of {len(missing)} missing objects were compiled and are in the cache",
            hint=f"{command} takes up the rest",
        )
        error.exit_code = stopped.exit_code
        raise error
    failed = result.of("failed")
    if failed and not plan.of("not-built") and all(outcome.exit_code == CannotRun.exit_code for outcome in failed):
        raise typer.Exit(CannotRun.exit_code)  # no kernel is at fault: the root cannot be written, or is locked
    if failed or plan.of("not-built"):
        raise typer.Exit(1)


class _Stopped:
    """While entered, SIGTERM stops the work as Ctrl-C does; afterwards it says which of the two it was."""

    def __init__(self) -> None:
        self.how, self.exit_code = "interrupted", Interrupted.exit_code

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGTERM, self._terminate)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _terminate(self, *_: object) -> None:
        self.how, self.exit_code = "stopped by SIGTERM", 128 + signal.SIGTERM
        raise KeyboardInterrupt


def _report_run(out: Output, plan: Plan, result: Result, elapsed_s: float) -> None:
    by_item = {outcome.item: outcome for outcome in result.outcomes}
    rows = [_run_row(item, by_item.get(item)) for item in plan.items]
    document = {
        **_head(plan),
        "complete": all(row["status"] in ("present", "compiled") for row in rows),
        "interrupted": result.interrupted,
        "entries": rows,
    }
    ready = [row["key"] for row in rows if row["status"] == "compiled"]

    def human() -> None:
        present = len(plan.of("present")) + len(result.of("present"))
        counts = (
            (len(ready), f"compiled in {elapsed_s:.1f} s"),
            (present, "already there"),
            (len(result.of("failed")), "failed"),
            (len(result.unfinished), "not reached"),
            (len(plan.of("not-built")), "not built yet"),
        )
        out.line(", ".join(f"{count} {what}" for count, what in counts if count))

    out.document(document, human, lambda: ready)
    for message, hint in dict.fromkeys((outcome.message, outcome.hint) for outcome in result.of("failed")):
        out.error(MlactlError(message or "the compile failed", hint=hint))
    for item in plan.of("not-built"):
        out.error(MlactlError(f"{item.spec.label()} for {item.arch}: {item.reason}"))


def _run_row(item: Item, outcome: Outcome | None) -> dict[str, Any]:
    if outcome is None:
        return {**item.as_json(), "seconds": None}
    return {**item.as_json(), "key": outcome.key or item.key, "status": outcome.status, "reason": outcome.message, "seconds": outcome.seconds}


def _key_or_label(item: Item) -> str:
    return item.key or f"{item.spec.label()} {item.arch}"


def _head(plan: Plan) -> dict[str, Any]:
    return {"profile": plan.profile.name, "arches": list(plan.arches)}


def _counted(plan: Plan) -> str:
    parts = [f"{len(plan.of('present'))} of {len(plan.items)} objects are there"]
    parts += [f"{len(plan.of('missing'))} missing"] if plan.of("missing") else []
    parts += [f"{len(plan.of('untrusted'))} not trusted"] if plan.of("untrusted") else []
    parts += [f"{len(plan.of('not-built'))} not built yet"] if plan.of("not-built") else []
    return ", ".join(parts)


def _command(profile: str, plan: Plan, scales: Path | None) -> str:
    """What compiles the rest of this plan and nothing else: without the scale file it would be more variants."""
    file = [] if scales is None else ["--scales", shlex.quote(str(scales))]
    return " ".join(["mlactl warmup --profile", shlex.quote(profile), *(f"--arch {arch}" for arch in plan.arches), *file])


_COLUMNS = (
    Column("state", lambda item: item.state),
    Column("arch", lambda item: item.arch),
    Column("key", lambda item: item.key[:12] if item.key else "-"),
    Column("object", lambda item: item.spec.label()),
    Column("why", lambda item: item.reason or ""),
)
