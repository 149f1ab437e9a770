"""`mlactl cache export` and `import`: portable bundles for nodes without the compiler."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from mlactl.cli import hints, options
from mlactl.cli.cache import rendering
from mlactl.cli.cache.rendering import counted
from mlactl.errors import CannotRun, Interrupted, NotFound, UsageError
from mlactl.ui.output import Mode, Output, Task, bytes_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mlactl.cache.bundle.merge import Imported, Watch
    from mlactl.cache.bundle.select import LeftOut, Selection
    from mlactl.cache.bundle.write import Packed
    from mlactl.cache.manifest import Manifest
    from mlactl.cache.store import Store

STANDARD = "-"


@hints.keeps_root
def export(
    keys: options.OptionalKeysArgument = None,
    target: Annotated[str, typer.Option("-o", "--to", metavar="FILE|URL|-", help="Where to write the bundle, - for stdout")] = "",
    profile: Annotated[
        list[str] | None,
        typer.Option("--profile", metavar="NAME|PATH", help="What launches of it load; repeatable", autocompletion=options.complete_profile),
    ] = None,
    arch: options.ArchOption = None,
    kernel: rendering.KernelFilter = None,
    partial: Annotated[bool, typer.Option("--partial", help="Go ahead without what is missing or damaged")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a bundle that is there")] = False,
    cache_dir: options.CacheDirOption = None,
    output: options.OutputOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Write entries into a bundle, by default all of them; every one is checked in full."""
    from mlactl.cache.bundle import places, write

    out = hints.make_output(output, json, quiet, cache_dir)
    _check_target(out, target)
    if keys and (profile or arch or kernel):
        raise UsageError("KEYs were given beside --profile, --arch or --kernel", hint="name entries by KEY, or select them, but not both")
    if target != STANDARD:
        places.require_free(target, force=force)
    arches, kernels = options.checked_arches(arch), rendering.checked_kernels(kernel)
    store = rendering.open_store(out, cache_dir)
    warmups: tuple[str, ...] = ()
    if profile:
        arches = arches or _default_arches(out)
        words = [word for each in arches for word in ("--arch", each)]
        warmups = tuple(shlex.join(["mlactl", "warmup", "--profile", name, *words]) for name in profile)
    selection = _select(out, store, keys, profile, arches, kernels)
    if not selection.keys and not selection.missing:
        aside = f", {counted(len(selection.quarantined))} set aside" if selection.quarantined else ""
        raise NotFound(f"nothing to export: no entry matches{aside}", hint="mlactl cache ls shows what there is")
    if selection.missing and not partial:
        _report_missing(out, target, selection.missing, warmups)
        raise typer.Exit(1)
    folder = None if target == STANDARD else places.scratch_folder(target)
    try:
        with out.progress("exporting", len(selection.keys), "entries") as task, write.pack(store, selection.keys, folder, task.advance) as packed:
            left_out = (*selection.missing, *packed.left_out)
            if left_out and not partial:
                _report_missing(out, target, left_out, warmups)
                raise typer.Exit(1)
            if not packed.entries:
                raise NotFound("nothing to export: no entry that was asked for is usable", hint="mlactl cache verify says what is wrong")
            _write(out, target, packed, force=force)
    except KeyboardInterrupt:
        raise Interrupted("interrupted: no bundle was written") from None
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CannotRun(f"cannot write the bundle: {error.strerror or error}", hint="df -h; TMPDIR names where temporaries go") from error
    _report_export(out, target, packed, left_out, selection.quarantined)


def _check_target(out: Output, target: str) -> None:
    if not target:
        raise UsageError("where to write the bundle was not said", hint="mlactl cache export -o FILE")
    if target == STANDARD:
        out.binary("a bundle")
        if out.mode is not Mode.HUMAN:
            raise UsageError(f"stdout cannot hold both the bundle and --output {out.mode}", hint="-o FILE keeps them apart")


def _default_arches(out: Output) -> tuple[str, ...]:
    from mlactl.warmup.arches import DEFAULT_ARCH, present_arches

    present = present_arches()
    out.note(f"for the GPU of this machine: {', '.join(present)}" if present else f"for {DEFAULT_ARCH}; --arch says otherwise")
    return present or (DEFAULT_ARCH,)


def _select(
    out: Output, store: Store, keys: Sequence[str] | None, profiles: Sequence[str] | None, arches: tuple[str, ...], kernels: tuple[str, ...]
) -> Selection:
    from mlactl.cache.bundle import select
    from mlactl.cache.listing import Filters

    if keys:
        return select.by_keys(store, keys)
    if profiles:
        from mlactl.profiles import load

        specs = [spec for name in profiles for spec in load(name).specs()]
        return select.by_lookups(store, specs, arches, kernels=kernels)
    return select.by_filters(store, Filters(kernels, arches), out.warn)


def _write(out: Output, target: str, packed: Packed, *, force: bool) -> None:
    from mlactl.cache.bundle import places

    if target != STANDARD:
        places.deliver(target, packed.copy_to, force=force)
        return
    stream = out.binary("a bundle")
    packed.copy_to(stream)
    stream.flush()


def _report_missing(out: Output, target: str, left_out: Sequence[LeftOut], warmups: Sequence[str]) -> None:
    """Names what keeps a bundle from being written, and what mends it."""
    say = out.note if target == STANDARD else out.line
    document = {"bundle": None, "left_out": [_left_out_row(item) for item in left_out]}

    def human() -> None:
        for item in left_out:
            say(f"cannot go in: {_what(item)}: {item.reason}")
        say(f"{counted(len(left_out))} cannot go into the bundle, nothing was written")

    out.document(document, human, lambda: [item.key or item.label for item in left_out])
    for hint in dict.fromkeys([*warmups, *(item.hint for item in left_out if item.hint)]):
        out.hint(hint)
    out.hint("--partial writes the rest")


def _report_export(out: Output, target: str, packed: Packed, left_out: Sequence[LeftOut], quarantined: Sequence[str]) -> None:
    from mlactl.cache.bundle.places import shown

    document = {
        "bundle": shown(target),
        "sha256": packed.sha256,
        "bytes": packed.size,
        "listing_sha256": packed.listing_sha256,
        "entries": [_entry_row(manifest) for manifest in packed.entries],
        "left_out": [_left_out_row(item) for item in left_out],
        "quarantined": list(quarantined),
        "requires": [{"name": item.name, "version": item.version} for item in packed.requires],
    }
    say = out.note if target == STANDARD else out.line

    def human() -> None:
        object_bytes = sum(manifest.object_bytes for manifest in packed.entries)
        where = "stdout" if target == STANDARD else shown(target)
        say(f"exported {counted(len(packed.entries))} ({bytes_text(object_bytes)}) to {where}: {bytes_text(packed.size)}")
        say(f"sha256 {packed.sha256}")

    out.document(document, human, lambda: [manifest.key for manifest in packed.entries])
    for item in left_out:
        out.warn(f"left out: {_what(item)}: {item.reason}")
    if quarantined:
        out.note(f"left out: {counted(len(quarantined))} set aside: {', '.join(key[: rendering.SHORT_KEY] for key in quarantined[:5])}")
    if target != STANDARD:
        out.hint(f"mlactl cache import {shlex.quote(shown(target))} --sha256 {packed.sha256} on the node")


def _entry_row(manifest: Manifest) -> dict[str, Any]:
    return {
        "key": manifest.key,
        "spec": manifest.spec.as_json(),
        "arch": manifest.arch,
        "host_arch": manifest.host_arch,
        "object_bytes": manifest.object_bytes,
    }


def _left_out_row(item: LeftOut) -> dict[str, Any]:
    return {"key": item.key, "entry": _what(item), "reason": item.reason}


def _what(item: LeftOut) -> str:
    if item.label:
        return item.label
    if item.manifest is not None:
        return f"{item.manifest.spec.label()} for {item.manifest.arch}"
    return (item.key or "")[: rendering.SHORT_KEY]


@hints.keeps_root
def import_(
    bundle: Annotated[str, typer.Argument(metavar="FILE|URL|-", help="The bundle, - for stdin")],
    arch: options.ArchOption = None,
    kernel: rendering.KernelFilter = None,
    sha256: Annotated[str | None, typer.Option("--sha256", metavar="DIGEST", help="Refuse a bundle with another SHA-256")] = None,
    shared: Annotated[bool, typer.Option("--shared", help="Make the cache readable by other users (0755/0644)")] = False,
    dry_run: options.DryRunOption = False,
    cache_dir: options.CacheDirOption = None,
    output: options.OutputOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Check a bundle to its last byte, then publish its entries; needs no compiler."""
    from mlactl.cache.bundle.merge import bring_in
    from mlactl.cache.listing import Filters

    out = hints.make_output(output, json, quiet, cache_dir)
    filters = Filters(rendering.checked_kernels(kernel), options.checked_arches(arch))
    pin = _checked_digest(sha256)
    store = rendering.open_store(out, cache_dir)
    with _source(bundle) as file, _Phases(out) as phases:
        result = bring_in(store, file, filters=filters, sha256=pin, shared=shared, dry_run=dry_run, watch=phases.watch())
    _report_import(out, bundle, result)
    failed = result.of("failed")
    if failed:
        raise CannotRun(f"{counted(len(failed))} could not be imported; {failed[0].reason}", hint="run the same command again afterwards")
    if result.of("quarantined"):
        raise typer.Exit(1)


def _checked_digest(text: str | None) -> str | None:
    from mlactl.cache.manifest import is_sha256

    if text is None:
        return None
    if not is_sha256(text.lower()):
        raise UsageError(f"--sha256 {text} is no SHA-256, expected 64 hex digits", hint="mlactl cache export prints it; sha256sum FILE")
    return text.lower()


@contextlib.contextmanager
def _source(bundle: str) -> Iterator[BinaryIO]:
    from mlactl.cache.bundle import places

    if bundle != STANDARD:
        with places.source(bundle) as file:
            yield file
        return
    if sys.stdin.isatty():
        raise UsageError("stdin is a terminal, expected a bundle", hint="mlactl cache import FILE, or mlactl cache import - <FILE")
    yield places.guarded(sys.stdin.buffer, "stdin")


class _Phases(contextlib.ExitStack):
    """The bars of an import: checking, then publishing."""

    def __init__(self, out: Output) -> None:
        super().__init__()
        self._out = out
        self._task: Task | None = None

    def watch(self) -> Watch:
        """Callbacks that move them."""
        from mlactl.cache.bundle.merge import Watch

        return Watch(
            listed=lambda number: self._begin("checking", number),
            checked=self._advance,
            publishing=lambda number: self._begin("publishing", number),
            published=self._advance,
            waiting=lambda text: self._out.note(f"another import is under way: {text}"),
        )

    def _begin(self, title: str, number: int) -> None:
        self.close()
        self._task = self.enter_context(self._out.progress(title, number, "entries")) if number else None

    def _advance(self) -> None:
        if self._task is not None:
            self._task.advance()


def _report_import(out: Output, bundle: str, result: Imported) -> None:
    from mlactl.cache.bundle import merge, packages, places

    here = result.of(merge.PUBLISHED, merge.REPLACED, merge.PRESENT)
    commands = packages.install_commands(need for need in result.requires if not need.fits)
    rows = [{**_entry_row(item.manifest), "outcome": item.outcome, "reason": item.reason or None} for item in result.outcomes]
    document = {
        "bundle": places.shown(bundle),
        "sha256": result.sha256,
        "bytes": result.bundle_bytes,
        "listing_sha256": result.listing_sha256,
        "root": result.root,
        "dry_run": result.dry_run,
        "entries": rows,
        "requires": [asdict(need) for need in result.requires],
        "install": list(commands),
    }
    new = result.of(merge.PUBLISHED, merge.REPLACED)
    out.document(document, lambda: _import_human(out, result), lambda: [item.manifest.key for item in new])
    for item in result.outcomes:
        if item.reason and item.outcome != merge.OTHER_HOST:
            out.warn(f"{item.manifest.key[: rendering.SHORT_KEY]} {item.outcome}: {item.reason}")
    other_host = result.of(merge.OTHER_HOST)
    if other_host:
        out.warn(f"{counted(len(other_host))} skipped: {other_host[0].reason}")
    for reason, number in merge.unanswered(here).items():
        out.warn(f"launches of this install never load {counted(number)}: {reason}")
    if not here and not result.of(merge.QUARANTINED, merge.FAILED):
        why = other_host[0].reason if other_host else "none passes --arch and --kernel"
        raise NotFound(
            f"nothing to import from {counted(len(result.outcomes))}: {why}", hint="mlactl cache import --dry-run --json shows what is in it"
        )
    if commands:
        out.note("loading these objects takes packages that are not installed here:")
    for command in commands:
        out.hint(command)
    if result.dry_run:
        out.note("dry run: nothing was written")


def _import_human(out: Output, result: Imported) -> None:
    counts = Counter(item.outcome for item in result.outcomes)
    words = ", ".join(f"{number} {word}" for word, number in counts.items())
    object_bytes = sum(item.manifest.object_bytes for item in result.outcomes)
    would = "would import" if result.dry_run else "imported"
    out.line(f"{would} into {result.root}: {words}; {counted(len(result.outcomes))} ({bytes_text(object_bytes)}) checked")
