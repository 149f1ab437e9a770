"""The benchmark that needs no GPU: plans and floors for a card of the table. Nothing is run; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from mlactl.bench.arms import Planned, Target
from mlactl.bench.cards import Card
from mlactl.bench.floors import floors
from mlactl.bench.results import ArmResult, Bench, ShapeResult
from mlactl.bench.shapes import Layout, Shape

METHOD = "computed from the plan and the card's figures; nothing was run"


def target_of(card: Card) -> Target:
    """What plans for that card are made for."""
    return Target(card.arch, card.multiprocessors)


def compute(shapes: Sequence[tuple[Shape, Sequence[Planned]]], layout: Layout, card: Card) -> Bench:
    """Every arm with its floors on that card."""
    results = []
    for shape, arms in shapes:
        rows = tuple(ArmResult(planned, floors(planned.work, card.rates), planned.state, planned.reason) for planned in arms)
        results.append(ShapeResult(shape, floors(layout.work(shape), card.rates), rows))
    return Bench(True, card.name, card.arch, card.multiprocessors, card.rates, card.source, layout, tuple(results))
