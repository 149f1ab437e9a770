"""`mlactl verify-scales` and `mlactl scales`: verdicts on scale files, and writing one from amplitudes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mlactl.cli import options
from mlactl.cli.scales_report import finding_lines, show
from mlactl.errors import MlactlError, UsageError
from mlactl.printable import counted
from mlactl.profiles import Profile, examine, load, locate
from mlactl.regular_files import require_writable
from mlactl.scales.findings import InvalidScales, plain
from mlactl.scales.verdict import OuterRow, Report, Request, verify
from mlactl.ui.output import Mode, Output

scales_app = typer.Typer(help="Write outer-scale files", no_args_is_help=True, rich_markup_mode=None)

# Paths are `readable=False`: typer would stop at the first file it may not read, and the others would go unjudged.

_MIB = 2**20
_SILENT_BYTES = 32 * _MIB
_SILENT_FILES = 16
"""Less is over before a bar could be read."""


@dataclass(frozen=True, slots=True)
class _Judged:
    """One path of the command line: its report, or why there is none."""

    path: Path
    report: Report | None
    error: MlactlError | None

    def exit_code(self, *, strict: bool) -> int:
        if self.report is not None:
            return self.report.exit_code(strict=strict)
        return self.error.exit_code if self.error is not None else 0

    def as_json(self, *, layers: bool) -> dict[str, Any]:
        if self.report is not None:
            return self.report.as_json(layers=layers or self.report.kind == "outer")
        message = self.error.message if self.error is not None else ""
        return {"path": plain(self.path), "verdict": "unreadable", "error": message}


def verify_scales(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE...",
            readable=False,
            help="Outer-scale JSON, *.safetensors, an index, or a checkpoint's folder; default: the profile's scale file",
        ),
    ] = None,
    profile: options.OptionalProfileOption = None,
    against: Annotated[
        Path | None, typer.Option("--against", metavar="OTHER", readable=False, help="Compare values with another file; a difference is an error")
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="A row for every layer")] = False,
    sha256: Annotated[str | None, typer.Option("--sha256", metavar="DIGEST", help="Refuse a file with another digest")] = None,
    latents: Annotated[
        Path | None,
        typer.Option(
            "--latents", metavar="FILE", readable=False, help="Captured latents, safetensors [tokens, latent_dim] a layer: measure underflow"
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", readable=False, help="Draw log2 scale by layer (needs the extra mlactl[plot])")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings fail too")] = False,
    output: options.OutputOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> int:
    """Load and validate NVFP4 scale files and checkpoint scales.

    Quiet output is the paths that fail, one a line. Exit codes: 0 valid, warnings included; 1 invalid or malformed, and
    warnings with --strict; 2 a file that cannot be read. Of several files the worst code counts.
    """
    out = options.make_output(output, json, quiet)
    loaded = _profile(profile) if profile is not None else None
    paths = _paths(files, loaded)
    if sha256 is not None and len(paths) > 1:
        raise UsageError(f"--sha256 pins one file, {len(paths)} were named", hint="run it once for each file")
    request = Request(loaded, against, sha256, latents)
    if plot is not None:
        from mlactl.scales.plot import require

        require(plot, _read(paths, request))
    judged = []
    for path in paths:
        judged.append(_judge(out, path, request))
        if out.mode is Mode.HUMAN:
            _show(out, judged[-1], layers=layers, strict=strict, first=len(judged) == 1)
    if plot is not None:
        _plot(out, plot, judged, _read(paths, request))
    _render(out, judged, layers=layers, strict=strict)
    if loaded is not None and len(paths) == 1 and judged[0].exit_code(strict=strict) == 0 and judged[0].report and judged[0].report.kind == "outer":
        out.hint(f"mlactl warmup --profile {profile} --scales {plain(paths[0])} compiles the variants that this file needs")
    return max(item.exit_code(strict=strict) for item in judged)


def _profile(name: str) -> Profile:
    """The profile, also when all that is wrong with it is its scale file: judging that is this command's work."""
    found, findings = examine(locate(name))
    if found is None or any(finding.key not in ("scales.file", "scales.sha256") for finding in findings):
        return load(name)
    return found


def _paths(files: Sequence[Path] | None, profile: Profile | None) -> list[Path]:
    if files:
        return list(files)
    if profile is None:
        raise UsageError("no file was named", hint="mlactl verify-scales FILE, or --profile with a profile that names its scale file")
    if profile.scales is None:
        raise UsageError(f"profile {profile.name} names no scale file", hint=f"mlactl verify-scales FILE --profile {profile.name}")
    return [profile.scales.file]


def _judge(out: Output, path: Path, request: Request) -> _Judged:
    try:
        return _Judged(path, verify(path, request, lambda title, total, unit: _progress(out, title, total, unit)), None)
    except MlactlError as error:
        # The other files are judged all the same; the worst exit code is the command's.
        return _Judged(path, None, error)


@contextmanager
def _progress(out: Output, title: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """A bar for long work: whole MiB for bytes, and none for what is over before it could be read."""
    step, label, least = (_MIB, "MiB", _SILENT_BYTES) if unit == "bytes" else (1, unit, _SILENT_FILES)
    if total < least:
        yield lambda _: None
        return
    with out.progress(title, total // step, label) as task:
        done = told = 0

        def on_done(count: int) -> None:
            nonlocal done, told
            done += count
            if done // step > told:
                task.advance(done // step - told)
                told = done // step

        yield on_done


def _show(out: Output, item: _Judged, *, layers: bool, strict: bool, first: bool) -> None:
    if not first:
        out.line()
    if item.report is not None:
        show(out, item.report, layers=layers, strict=strict)
    else:
        out.line(f"{plain(item.path)}: unreadable")


def _render(out: Output, judged: Sequence[_Judged], *, layers: bool, strict: bool) -> None:
    if out.mode is Mode.QUIET:
        for item in judged:
            if item.exit_code(strict=strict):
                out.line(plain(item.path))
    elif out.mode is not Mode.HUMAN:
        out.listing("files", judged, (), key=lambda item: plain(item.path), as_json=lambda item: item.as_json(layers=layers))
    for item in judged:
        if item.error is not None:
            out.error(item.error)


def _read(paths: Sequence[Path], request: Request) -> list[Path]:
    """Every file that is read, over which no picture may be drawn."""
    profile = [request.profile.path] if request.profile is not None else []
    return [*paths, *profile, *(path for path in (request.against, request.latents) if path is not None)]


def _plot(out: Output, target: Path, judged: Sequence[_Judged], sources: Sequence[Path]) -> None:
    from mlactl.scales.plot import Series, write_png

    series = [Series(plain(item.path), points) for item in judged if item.report is not None and (points := _points(item.report))]
    if not series:
        out.warn(f"{target} was not drawn: no file has a scale")
        return
    write_png(target, series, sources)
    out.note(f"drew {target}")


def _points(report: Report) -> list[tuple[int, float, float]]:
    from math import log2

    made = []
    for row in report.layers:
        low, high = (row.scale, row.scale) if isinstance(row, OuterRow) else (row.smallest, row.largest)
        if low is not None and high is not None:
            made.append((row.layer, log2(low), log2(high)))
    return made


@scales_app.callback()
def _scales() -> None:
    """Write outer-scale files."""


def _measured(out: Output, source: Path, target: Path, *, force: bool) -> list[float] | None:
    """Amplitudes by layer measured from captures; None where the source is a file of amplitudes."""
    from mlactl.replay.capture import inputs_path

    if not source.is_dir():
        if source.name.endswith(".safetensors") or inputs_path(source).exists():
            raise UsageError(
                f"{plain(source)}: is one capture, expected a folder with captures of every layer",
                hint=f"mlactl scales fit {plain(source.parent)} -o FILE",
            )
        return None
    # Measuring takes minutes: what cannot be written in the end is refused now.
    require_writable(target)
    if not force and os.path.lexists(target):
        raise UsageError(f"{plain(target)}: is there already, nothing was measured", hint="--force replaces it")
    from mlactl.replay.amplitudes import measure
    from mlactl.replay.capture import find

    with out.progress("measuring", len(find([source])), "captures") as task:
        found = measure(source, on_capture=task.advance)
    out.note(f"measured {counted(len(found.max_abs), 'layer')} from {counted(found.captures, 'capture')}, {found.tokens:,} tokens")
    return list(found.max_abs)


@scales_app.command("fit")
def fit_command(
    amplitudes: Annotated[
        Path,
        typer.Argument(
            metavar="AMPLITUDES.json|CAPTURES", readable=False, help="max_abs of every layer's normed latent, or a folder of captures to measure"
        ),
    ],
    target: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", readable=False, help="The nvfp4_ds_mla_outer_scale_v1 file to write")],
    headroom: Annotated[float, typer.Option("--headroom", help="Factor on every max_abs, for latents larger than measured")] = 1.0,
    profile: options.OptionalProfileOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE when it is there")] = False,
    output: options.OutputOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> int:
    """Write an outer-scale file from layer amplitudes.

    A layer's scale is max_abs * headroom / 2688.
    """
    from mlactl.scales.fit import fit, write

    out = options.make_output(output, json, quiet)
    loaded = _profile(profile) if profile is not None else None
    try:
        fitted = fit(amplitudes, headroom, loaded, measured=_measured(out, amplitudes, target, force=force))
    except InvalidScales as error:
        for line in finding_lines(error.findings[1:20]):
            out.note(line)
        raise
    require_writable(target, [amplitudes])
    write(fitted.data, target, force=force, source=amplitudes)
    report = verify(target, Request(loaded))
    document = {
        "path": plain(target),
        "num_layers": len(report.layers),
        "sha256": report.sha256,
        "headroom": headroom,
        "verdict": report.verdict.value,
    }

    def human() -> None:
        out.line(f"wrote {plain(target)}: {counted(len(report.layers), 'layer')}, sha256 {report.sha256}")
        out.hint(f"mlactl verify-scales {plain(target)} --layers")

    out.document(document, human, lambda: [plain(target)])
    return report.exit_code(strict=False)
