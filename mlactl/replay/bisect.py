"""`--bisect` of a captured output: named explanations, each computed and held against what was captured.

An explanation is taken only when what it predicts agrees with the captured result on every failing row, within the same
tolerance that failed the reference. The order below is from simple to general: of several that agree, the simplest wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlactl.replay import ranges, record_fault, tolerances
from mlactl.replay.attention import Select, views, without
from mlactl.replay.gates import lse_factors, output_factors
from mlactl.replay.report import Bisection, Hypothesis

if TYPE_CHECKING:
    import torch

    from mlactl.replay.capture import Capture

MAX_ROWS = 24
"""Failing rows that explanations are computed for; the worst ones."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The failing rows: what was captured, what the reference gives (fp64, LSE natural), and what they are held to.

    `lse` is None where none was captured. `heads` are those the comparison was restricted to; `restricted` says whether
    rows or heads were left out that the capture has.
    """

    capture: Capture
    rows: tuple[int, ...]
    heads: tuple[int, ...]
    output: torch.Tensor
    lse: torch.Tensor | None
    reference: torch.Tensor
    reference_lse: torch.Tensor
    restricted: bool = False

    def factor(self, output: torch.Tensor, lse: torch.Tensor) -> tuple[float, float | None]:
        """How well a prediction over these rows fits: the largest output factor and LSE factor."""
        call = self.capture.call
        fit = float(output_factors(self.output, output, tolerances.for_output(call.record, call.mode)).max())
        return fit, None if self.lse is None else float(lse_factors(self.lse, lse, tolerances.for_lse()).max())

    def row_factors(self, output: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """The larger of both factors by row."""
        call = self.capture.call
        found = output_factors(self.output, output, tolerances.for_output(call.record, call.mode)).amax(1)
        return found if self.lse is None else found.maximum(lse_factors(self.lse, lse, tolerances.for_lse()).amax(1))

    def place(self, row: int) -> tuple[tuple[str, int | float], ...]:
        """Request and row as coordinates."""
        return (("request", self.capture.requests[row]), ("row", row))


def explain(
    capture: Capture,
    rows: Sequence[int],
    heads: Sequence[int] | None,
    captured: tuple[torch.Tensor | None, torch.Tensor | None],
    reference: tuple[torch.Tensor, torch.Tensor],
    *,
    on_step: Callable[[str], None] | None = None,
) -> Bisection:
    """Tests every explanation of a captured output that does not match; tensors are [rows, heads, ...], LSEs natural.

    `on_step` hears which explanation of how many is being tried.
    """
    if captured[0] is None:
        return Bisection("no output was captured, so there is nothing to explain")
    evidence = gather(capture, rows, heads, captured[0], captured[1], reference)
    if not evidence.rows:
        return Bisection("no row of the captured output fails")
    tried: list[Hypothesis] = []
    for number, hypothesis in enumerate(HYPOTHESES, 1):
        if on_step is not None:
            on_step(f"trying explanation {number} of {len(HYPOTHESES)}, {hypothesis.__name__.replace('_', ' ')}")
        tried += hypothesis(evidence)
    tried = _best_of_each(tried)
    ranked = sorted(tried, key=lambda item: (not item.reproduces, not item.tested, 0 if item.reproduces else max(item.factor, item.lse_factor or 0)))
    if ranked and ranked[0].reproduces:
        verdict = f"{ranked[0].name}: {ranked[0].text}"
    else:
        untested = [item.name for item in tried if not item.tested]
        verdict = f"none of {len(tried) - len(untested)} explanations reproduces the captured output"
        verdict += f"; not tested: {', '.join(untested)}" if untested else ""
    return Bisection(verdict, tuple(ranked))


def _best_of_each(tried: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Of explanations with one name, those that reproduce, or else the closest."""
    kept: list[Hypothesis] = []
    for name in dict.fromkeys(item.name for item in tried):
        same = [item for item in tried if item.name == name]
        right = [item for item in same if item.reproduces]
        kept += right or [min(same, key=lambda item: max(item.factor, item.lse_factor or 0))]
    return kept


def gather(
    capture: Capture,
    rows: Sequence[int],
    heads: Sequence[int] | None,
    output: torch.Tensor,
    lse: torch.Tensor | None,
    reference: tuple[torch.Tensor, torch.Tensor],
) -> Evidence:
    """The rows that fail, worst first up to MAX_ROWS, in their order."""
    call = capture.call
    factors = output_factors(output, reference[0], tolerances.for_output(call.record, call.mode)).amax(1)
    if lse is not None:
        factors = factors.maximum(lse_factors(lse, reference[1], tolerances.for_lse()).amax(1))
    worst = sorted(sorted((factors > 1).nonzero()[:, 0].tolist(), key=lambda place: -float(factors[place]))[:MAX_ROWS])
    chosen = tuple(range(capture.heads)) if heads is None else tuple(heads)
    return Evidence(
        capture,
        tuple(rows[place] for place in worst),
        chosen,
        output[worst].double(),
        None if lse is None else lse[worst].double(),
        reference[0][worst].double(),
        reference[1][worst].double(),
        restricted=len(rows) < capture.rows or len(chosen) < capture.heads,
    )


def predict(
    evidence: Evidence,
    *,
    latent_scale: float | None = None,
    kv_scale: float | None = None,
    shift: int = 0,
    window_shift: int = 0,
    keep: Select | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What the failing rows would be with that one thing different; None where a row cannot be read that way."""
    import torch

    found = list(
        views(
            evidence.capture,
            evidence.rows,
            torch.float64,
            latent_scale=latent_scale,
            kv_scale=kv_scale,
            shift=shift,
            window_shift=window_shift,
            keep=keep,
        )
    )
    made = [item for item in found if item is not None]
    if len(made) < len(found):
        return None
    heads = list(evidence.heads)
    return torch.stack([item.output[heads] for item in made]), torch.stack([item.lse[heads] for item in made])


def _judge(
    evidence: Evidence, name: str, text: str, coordinates: tuple[tuple[str, int | float], ...], prediction: tuple[torch.Tensor, torch.Tensor]
) -> Hypothesis:
    factor, lse_factor = evidence.factor(*prediction)
    return Hypothesis(name, text, coordinates, max(factor, lse_factor or 0.0) <= 1, factor, lse_factor)


# ---- explanations, simple ones first


def lse_base(evidence: Evidence) -> Iterator[Hypothesis]:
    """The LSE was written in another base than the capture declares."""
    if evidence.lse is None:
        return
    declared = evidence.capture.call.lse_base
    other = "2" if declared == "natural" else "natural"
    factor = 1 / math.log(2) if declared == "natural" else math.log(2)
    text = (
        f"the LSE was written as base {other} where {declared} is declared"
        if other == "2"
        else "the LSE was written as natural logarithm where base 2 is declared"
    )
    yield _judge(evidence, "LSE base", text, (("factor", round(factor, 6)),), (evidence.reference, evidence.reference_lse * factor))


def scale_dropped(evidence: Evidence) -> Iterator[Hypothesis]:
    """A real scale was read as 1.0, as a kernel specialised for the identity would."""
    call = evidence.capture.call
    if evidence.capture.layout.takes_latent_scale and call.latent_scale != 1.0:
        found = predict(evidence, latent_scale=1.0)
        if found is not None:
            text = f"latent_scale {call.latent_scale:.6g} was read as 1.0: an identity kernel served a launch with a real scale"
            yield _judge(evidence, "identity scale", text, (("latent_scale", call.latent_scale), ("read_as", 1.0)), found)
        found = predict(evidence, latent_scale=call.latent_scale**2)
        if found is not None:
            text = f"latent_scale {call.latent_scale:.6g} was applied twice"
            yield _judge(evidence, "scale twice", text, (("latent_scale", call.latent_scale),), found)
    if evidence.capture.layout.scale_mode == "tensor" and call.kv_scale != 1.0:
        found = predict(evidence, kv_scale=1.0)
        if found is not None:
            yield _judge(
                evidence, "identity scale", f"kv_scale {call.kv_scale:.6g} was read as 1.0", (("kv_scale", call.kv_scale), ("read_as", 1.0)), found
            )


def visible_length(evidence: Evidence) -> Iterator[Hypothesis]:
    """Rows saw one key more or fewer than they should; each failing row on its own."""
    yield from _per_row(evidence, "visible length", lambda shift: predict_rows(evidence, shift=shift), "keys")


def window_length(evidence: Evidence) -> Iterator[Hypothesis]:
    """Rows saw a window one key longer or shorter."""
    if evidence.capture.call.window is not None:
        yield from _per_row(evidence, "window", lambda shift: predict_rows(evidence, window_shift=shift), "keys of window")


def predict_rows(evidence: Evidence, *, shift: int = 0, window_shift: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """As `predict`, row by row: one that cannot be read that way is predicted as NaN, which agrees with nothing."""
    import torch

    outputs, totals = [], []
    heads = list(evidence.heads)
    for item in views(evidence.capture, evidence.rows, torch.float64, shift=shift, window_shift=window_shift):
        outputs.append(torch.full_like(evidence.output[0], math.nan) if item is None else item.output[heads])
        totals.append(torch.full_like(evidence.reference_lse[0], math.nan) if item is None else item.lse[heads])
    return torch.stack(outputs), torch.stack(totals)


def _per_row(evidence: Evidence, name: str, predicted: Callable[[int], tuple[torch.Tensor, torch.Tensor]], what: str) -> Iterator[Hypothesis]:
    import torch

    shifts = (-1, 1)
    made = [predicted(shift) for shift in shifts]
    factors = torch.stack([evidence.row_factors(*prediction) for prediction in made])
    best = factors.argmin(0)
    output = torch.stack([made[int(choice)][0][place] for place, choice in enumerate(best)])
    lse = torch.stack([made[int(choice)][1][place] for place, choice in enumerate(best)])
    parts = [f"row {row} {'one short' if shifts[int(choice)] < 0 else 'one long'}" for row, choice in zip(evidence.rows, best, strict=True)]
    more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
    row = evidence.rows[int(factors.amin(0).argmin())]
    shift = shifts[int(best[evidence.rows.index(row)])]
    text = f"off by one in {what}: {', '.join(parts[:3])}{more}"
    yield _judge(evidence, name, text, (*evidence.place(row), ("shift", shift)), (output, lse))


def dropped_split(evidence: Evidence) -> Iterator[Hypothesis]:
    """A run of keys, such as one split of the KV, is missing from every failing row of a request."""
    for found in ranges.candidates(evidence):
        prediction = predict(evidence, keep=ranges.by_request(found, evidence))
        if prediction is None:
            continue
        request, span = next(iter(found.items()))
        named = ranges.split_name(evidence, request, span)
        others = f", and of {len(found) - 1} more request{'s' if len(found) > 2 else ''}" if len(found) > 1 else ""
        coordinates: tuple[tuple[str, int | float], ...] = (("request", request), ("first_token", span.start), ("end_token", span.stop))
        if named is not None:
            coordinates = (("request", request), ("split", named[0]), ("splits", named[1]), ("first_token", span.start), ("end_token", span.stop))
        label = f" (split {named[0]} of {named[1]})" if named is not None else ""
        text = f"tokens {span.start} to {span.stop - 1} of request {request}{label} are missing{others}"
        yield _judge(evidence, "dropped split", text, coordinates, prediction)


def altered_record(evidence: Evidence) -> Iterator[Hypothesis]:
    """One record was read as something else than the capture holds; its page and offset are solved for."""
    yield from record_fault.candidates(evidence)


HYPOTHESES: tuple[Callable[[Evidence], Iterator[Hypothesis]], ...] = (
    lse_base,
    scale_dropped,
    visible_length,
    window_length,
    dropped_split,
    altered_record,
)

__all__ = ["HYPOTHESES", "Evidence", "explain", "gather", "predict", "without"]
