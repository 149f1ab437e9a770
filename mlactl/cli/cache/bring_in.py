"""`mlactl cache import`: a bundle into the cache, checked before anything of it is published."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from mlactl.cli import hints, options
from mlactl.cli.cache import rendering
from mlactl.cli.cache.export import STANDARD, entry_row
from mlactl.cli.cache.rendering import counted
from mlactl.errors import CannotRun, NotFound, UsageError
from mlactl.printable import shell_word
from mlactl.ui.output import Output, Task, bytes_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlactl.cache.bundle.merge import Imported, Watch


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
    from mlactl.cache.adapters import require_own
    from mlactl.cache.bundle.merge import bring_in
    from mlactl.cache.listing import Filters

    out = hints.make_output(output, json, quiet, cache_dir)
    filters = Filters(rendering.checked_kernels(kernel), options.checked_arches(arch))
    pin = _checked_digest(sha256)
    store = rendering.open_store(out, cache_dir)
    require_own(store.roots)
    with _source(out, bundle) as file, _Phases(out) as phases:
        result = bring_in(store, file, filters=filters, sha256=pin, shared=shared, dry_run=dry_run, watch=phases.watch())
    _report_import(out, bundle, result)
    failed = result.of("failed")
    if failed:
        what = "could not be imported now" if dry_run else "could not be imported"
        raise CannotRun(f"{counted(len(failed))} {what}; {failed[0].reason}", hint="run the same command again afterwards")
    if result.of("quarantined"):
        raise typer.Exit(1)


def _checked_digest(text: str | None) -> str | None:
    from mlactl.cache.manifest import is_sha256

    if text is None:
        return None
    if not is_sha256(text.lower()):
        raise UsageError(
            f"--sha256 {text} is no SHA-256, expected 64 hex digits", hint="cache export printed it where the bundle was made; sha256sum FILE"
        )
    return text.lower()


@contextlib.contextmanager
def _source(out: Output, bundle: str) -> Iterator[BinaryIO]:
    from mlactl.cache.bundle import places

    if bundle != STANDARD:
        with places.source(bundle) as file:
            yield file
        return
    yield places.guarded(out.binary_input("a bundle"), "stdin")


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
            waiting=lambda text: self._out.note(f"waiting: {text}"),
        )

    def _begin(self, title: str, number: int) -> None:
        self.close()
        self._task = self.enter_context(self._out.progress(title, number, "entries")) if number else None

    def _advance(self) -> None:
        if self._task is not None:
            self._task.advance()


def _report_import(out: hints.RootedOutput, bundle: str, result: Imported) -> None:
    from mlactl.cache.bundle import merge, packages, places

    here = result.of(merge.PUBLISHED, merge.REPLACED, merge.PRESENT)
    commands = packages.install_commands(need for need in result.requires if not need.fits)
    rows = [{**entry_row(item.manifest), "outcome": item.outcome, "reason": out.on_root(item.reason) or None} for item in result.outcomes]
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
        named = "-" if bundle == STANDARD else shell_word(places.shown(bundle))
        again = " <FILE" if bundle == STANDARD else ""
        raise NotFound(
            f"nothing to import from {counted(len(result.outcomes))}: {why}",
            hint=f"mlactl cache import {named} --dry-run --json{again} shows what is in it",
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
