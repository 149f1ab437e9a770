"""`mlactl cache export`: entries into a portable bundle."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlactl.cli import hints, options
from mlactl.cli.cache import rendering
from mlactl.cli.cache.rendering import counted
from mlactl.errors import CannotRun, Interrupted, NotFound, UsageError
from mlactl.ui.output import Mode, Output, bytes_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlactl.cache.bundle.select import LeftOut, Selection
    from mlactl.cache.bundle.write import Packed
    from mlactl.cache.manifest import Manifest
    from mlactl.cache.store import Store

STANDARD = "-"
"""stdout or stdin in the place of a bundle's name."""


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
    from mlactl.cache.adapters import require_own
    from mlactl.cache.bundle import places, write

    out = hints.make_output(output, json, quiet, cache_dir)
    _check_target(out, target)
    if keys and (profile or arch or kernel):
        raise UsageError("KEYs were given beside --profile, --arch or --kernel", hint="name entries by KEY, or select them, but not both")
    if target != STANDARD:
        places.require_free(target, force=force)
    arches, kernels = options.checked_arches(arch), rendering.checked_kernels(kernel)
    store = rendering.open_store(out, cache_dir)
    require_own(store.roots)
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
        _report_missing(out, target, selection.missing, warmups, rest=True)
        raise typer.Exit(1)
    place = None if target == STANDARD else target
    folder = places.scratch_folder(place)
    try:
        with (
            out.progress("exporting", len(selection.keys), "entries") as task,
            write.pack(store, selection.keys, folder, task.advance, lambda text: out.note(f"waiting: {text}")) as packed,
        ):
            left_out = (*selection.missing, *packed.left_out)
            if left_out and not (partial and packed.entries):
                _report_missing(out, target, left_out, warmups, rest=bool(packed.entries))
                raise typer.Exit(1)
            _write(out, target, packed, force=force)
    except KeyboardInterrupt:
        raise Interrupted("interrupted: no bundle was written") from None
    except BrokenPipeError:
        raise
    except OSError as error:
        raise places.unwritable(place, error) from error
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
    try:
        packed.copy_to(stream)
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CannotRun(f"cannot write the bundle to stdout: {error.strerror or error}", hint="mlactl cache export -o FILE writes a file") from error


def _report_missing(out: hints.RootedOutput, target: str, left_out: Sequence[LeftOut], warmups: Sequence[str], *, rest: bool) -> None:
    """Names what keeps a bundle from being written, and what mends it; `rest`: that there may be others."""
    say = out.note if target == STANDARD else out.line
    document = {"bundle": None, "left_out": [_left_out_row(out, item) for item in left_out]}

    def human() -> None:
        for item in left_out:
            say(f"cannot go in: {_what(item)}: {out.on_root(item.reason)}")
        say(f"{counted(len(left_out))} cannot go into the bundle, nothing was written")

    out.document(document, human, lambda: [item.key or item.label for item in left_out])
    for hint in dict.fromkeys([*warmups, *(item.hint for item in left_out if item.hint)]):
        out.hint(hint)
    if rest:
        out.hint("--partial writes the rest")


def _report_export(out: hints.RootedOutput, target: str, packed: Packed, left_out: Sequence[LeftOut], quarantined: Sequence[str]) -> None:
    from mlactl.cache.bundle.places import shown

    document = {
        "bundle": shown(target),
        "sha256": packed.sha256,
        "bytes": packed.size,
        "listing_sha256": packed.listing_sha256,
        "entries": [entry_row(manifest) for manifest in packed.entries],
        "left_out": [_left_out_row(out, item) for item in left_out],
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
        # Not a hint: those name the root that was exported from, and the node has its own.
        out.note(f"on the node: mlactl cache import {shlex.quote(shown(target))} --sha256 {packed.sha256}")


def entry_row(manifest: Manifest) -> dict[str, Any]:
    """An entry of a bundle in `--json` output."""
    return {
        "key": manifest.key,
        "spec": manifest.spec.as_json(),
        "arch": manifest.arch,
        "host_arch": manifest.host_arch,
        "object_bytes": manifest.object_bytes,
    }


def _left_out_row(out: hints.RootedOutput, item: LeftOut) -> dict[str, Any]:
    return {"key": item.key, "entry": _what(item), "reason": out.on_root(item.reason)}


def _what(item: LeftOut) -> str:
    if item.label:
        return item.label
    if item.manifest is not None:
        return f"{item.manifest.spec.label()} for {item.manifest.arch}"
    return (item.key or "")[: rendering.SHORT_KEY]
