"""`mlactl bench`: how fast the verify plan is on this card, and what it could be on one that is not here."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlactl.bench.arms import ARMS, Planned, Target, chosen_arms, plan_arms
from mlactl.bench.cards import DEFAULT, Card, cards, find
from mlactl.bench.method import MIN_SAMPLES, method
from mlactl.bench.results import GATE, TIMED
from mlactl.bench.shapes import EXAMPLE, NOTATION, VERIFY_SHAPES, Layout, Shape, layout_of, parse_shapes, parse_sparse, shapes_of
from mlactl.cli import options
from mlactl.errors import CannotRun, UsageError
from mlactl.kernels.mla.policy import SparsePolicy
from mlactl.kernels.mla.records import ELEMENT_BYTES
from mlactl.ui.output import Output

if TYPE_CHECKING:
    from mlactl.bench.results import Bench
    from mlactl.cache.store import Store

RECORDS = tuple(ELEMENT_BYTES)

app = typer.Typer(help="Time the arms of the verify plan, correctness first", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def group() -> None:
    """Time the arms of the verify plan, correctness first."""


_ARMS_HELP = "Comma-separated, default all. " + "; ".join(f"{name}: {meaning}" for name, meaning in ARMS.items())
_SHAPES_HELP = f"Comma-separated {NOTATION}, as {EXAMPLE}; a trailing r draws ragged lengths of the same total"


def _complete_card(incomplete: str) -> list[str]:
    return [card for card in cards() if card.startswith(incomplete)]


@dataclass(frozen=True, slots=True)
class _Request:
    """What was asked for, before it is known which device plans are for."""

    shapes: tuple[Shape, ...]
    layout: Layout
    arms: tuple[str, ...] | None
    sparse: SparsePolicy | None
    words: tuple[str, ...]

    def plans(self, target: Target) -> list[tuple[Shape, tuple[Planned, ...]]]:
        """Every shape with its planned arms."""
        return [(shape, plan_arms(self.arms, shape, self.layout, target, self.sparse)) for shape in self.shapes]

    def warm_command(self) -> str:
        """What compiles the objects that these plans launch."""
        return shlex.join(["mlactl", "bench", "verify-plan", *self.words, "--warm"])


@dataclass(frozen=True, slots=True)
class _Files:
    """What is written in the end, and the commit that the record names."""

    record: Path | None
    plot: Path | None
    commit: str | None

    def check(self) -> None:
        """Refuses before minutes of work what could not be written after them; raises UsageError, CannotRun."""
        if self.plot is not None:
            from mlactl.bench.plot import require

            require(self.plot)
        for option, path in (("-o", self.record), ("--plot", self.plot)):
            if path is not None and not path.absolute().parent.is_dir():
                raise CannotRun(f"{option} {path}: there is no folder {path.absolute().parent}", hint=f"mkdir -p {path.absolute().parent}")


@app.command("verify-plan")
def verify_plan(
    arms: Annotated[str | None, typer.Option("--arms", metavar="LIST", help=_ARMS_HELP)] = None,
    shapes: Annotated[str | None, typer.Option("--shapes", metavar="LIST", help=_SHAPES_HELP)] = None,
    profile: options.OptionalProfileOption = None,
    kv: Annotated[str | None, typer.Option("--kv", metavar="bf16|fp8", help="KV record, default bf16 or the profile's")] = None,
    page_size: Annotated[int | None, typer.Option("--page-size", min=1, help="Tokens a page, default 64 or the profile's")] = None,
    sparse: Annotated[
        str | None,
        typer.Option("--sparse", metavar="STRIDE,SINK,RECENT,MIN[,REFRESH]", help="Chunk selection of tiled_sparse, default none or the profile's"),
    ] = None,
    card: Annotated[
        str | None,
        typer.Option(
            "--card", help=f"Compute for this card and run nothing: {', '.join(cards())}; without a GPU {DEFAULT}", autocompletion=_complete_card
        ),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=MIN_SAMPLES, help="Samples a median is of")] = MIN_SAMPLES,
    warm: Annotated[bool, typer.Option("--warm", help="Compile the objects into the cache and run nothing; needs no GPU")] = False,
    record: Annotated[Path | None, typer.Option("-o", "--record", metavar="FILE", readable=False, help="Write the whole record as JSON")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", readable=False, help="Draw it (needs the extra mlactl[plot])")] = None,
    commit: Annotated[str | None, typer.Option("--commit", metavar="ID", help="Recorded where the checkout has no history")] = None,
    cache_dir: options.CacheDirOption = None,
    output: options.OutputOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> int:
    """Time the arms of the verify plan on this machine's GPU, or compute plans and floors without one.

    Every arm passes the correctness gate before it is timed. Shares are of the larger floor: bytes over copy bandwidth, or
    FLOP over the mma.sync peak, both measured in the same run. Quiet output is a shape, an arm and microseconds a line.

    Exit codes: 0 measured, or computed without a GPU; 1 the gate refused an arm; 2 objects missing with MLACTL_FROZEN=1.
    """
    out = options.make_output(output, json, quiet)
    request = _request(
        {
            "--profile": profile,
            "--shapes": shapes,
            "--arms": arms,
            "--kv": kv,
            "--page-size": page_size,
            "--sparse": sparse,
            "--card": card,
            "--cache-dir": cache_dir,
        }
    )
    files = _Files(record, plot, commit)
    files.check()
    chosen = find(card) if card is not None else None
    gpu = chosen is None and _gpu_here(out)
    if warm:
        return _warm(out, request, _target(chosen, gpu), cache_dir)
    result = _measure(out, request, samples, cache_dir) if gpu else _compute(request, chosen or find(DEFAULT))
    _report(out, result, request, files, cache_dir, method(samples))
    if result.of(GATE):
        return 1
    if gpu and not result.of(TIMED):
        raise CannotRun("no arm of any shape could be run", hint="mlactl bench verify-plan --help lists the arms")
    return 0


def _request(given: Mapping[str, Any]) -> _Request:
    """Checks what was typed against itself and the profile."""
    layout, policy, found = Layout(), None, VERIFY_SHAPES
    if given["--profile"] is not None:
        from mlactl.profiles import load

        profile = load(given["--profile"])
        layout, policy = layout_of(profile)
        found = shapes_of(profile) if given["--shapes"] is None else ()
    if given["--shapes"] is not None:
        found = parse_shapes(given["--shapes"])
    if given["--kv"] is not None:
        if given["--kv"] not in RECORDS:
            raise UsageError(f"--kv {given['--kv']} is not one of {', '.join(RECORDS)}", hint="--kv fp8")
        layout = replace(layout, record=given["--kv"])
    if given["--page-size"] is not None:
        layout = replace(layout, page_size=given["--page-size"])
    if given["--sparse"] is not None:
        policy = parse_sparse(given["--sparse"])
    words = tuple(word for name, value in given.items() if value is not None for word in (name, str(value)))
    return _Request(found, layout, chosen_arms(given["--arms"], policy), policy, words)


def _gpu_here(out: Output) -> bool:
    """Whether torch can run objects here; torch is imported only where the driver shows a card that they are made for."""
    from mlactl.warmup.arches import present_arches

    if not present_arches():
        out.note(f"no GPU here that objects are made for: floors are computed for --card {DEFAULT}")
        return False
    import torch

    if not torch.cuda.is_available():
        out.note(f"the GPU of this machine is hidden from torch: floors are computed for --card {DEFAULT}")
        return False
    return True


def _target(card: Card | None, gpu: bool) -> Target:
    from mlactl.bench.computed import target_of

    if not gpu:
        return target_of(card or find(DEFAULT))
    from mlactl.bench.verify_plan import device_here

    return device_here()[0]


def _measure(out: Output, request: _Request, samples: int, cache_dir: str | None) -> Bench:
    from mlactl.bench import verify_plan as service
    from mlactl.bench.objects import peak_spec
    from mlactl.opening import open_runtime

    target, _ = service.device_here()
    plans = request.plans(target)
    store = open_runtime(cache_dir)
    if os.environ.get("MLACTL_FROZEN") == "1":
        _refuse_missing(request, plans, target.arch, store)
    with out.progress("measuring", len(plans), "shapes") as task:
        return service.bench(plans, request.layout, peak_spec(), samples=samples, on_shape=task.advance, progress=task.describe)


def _refuse_missing(request: _Request, plans: list[tuple[Shape, tuple[Planned, ...]]], arch: str, store: Store) -> None:
    """A frozen process never compiles: what is missing is named before anything is run."""
    from mlactl.bench.objects import object_rows, specs_of

    rows = object_rows(specs_of(arm for _, arms in plans for arm in arms if arm.runs), arch, store)
    missing = [row.item for row in rows if row.item.state == "missing"]
    if missing:
        named = "; ".join(f"{item.spec.label()}, key {item.key}" if item.key else item.spec.label() for item in missing)
        raise CannotRun(
            f"{len(missing)} of {len(rows)} objects for {arch} are missing and this process is frozen: {named}", hint=request.warm_command()
        )


def _compute(request: _Request, card: Card) -> Bench:
    from mlactl.bench.computed import compute, target_of

    return compute(request.plans(target_of(card)), request.layout, card)


def _warm(out: Output, request: _Request, target: Target, cache_dir: str | None) -> int:
    from mlactl.cli.bench_view import warm

    return warm(out, [arm for _, arms in request.plans(target) for arm in arms if arm.runs], target.arch, cache_dir)


def _report(out: Output, result: Bench, request: _Request, files: _Files, cache_dir: str | None, how: str) -> None:
    from mlactl.bench.computed import METHOD
    from mlactl.bench.objects import object_rows, specs_of
    from mlactl.bench.record import document
    from mlactl.cache.store import Store
    from mlactl.cli import bench_view

    rows = object_rows(specs_of(arm.planned for shape in result.shapes for arm in shape.arms), result.arch, Store.open(cache_dir))
    command = shlex.join(["mlactl", *sys.argv[1:]])
    whole = {
        **document(result, command=command, commit=files.commit, method=METHOD if result.computed else how),
        "objects": [row.as_json() for row in rows],
    }
    if files.record is not None:
        bench_view.write_record(files.record, whole)
        out.note(f"wrote {files.record}")
    if files.plot is not None:
        from mlactl.bench.plot import write_png

        write_png(files.plot, result)
        out.note(f"drew {files.plot}")
    out.document(whole, lambda: bench_view.show(out, result, rows), lambda: bench_view.quiet_lines(result))
    if result.computed and any(row.item.state == "missing" for row in rows):
        out.hint(f"{request.warm_command()} compiles what is missing")
