"""Where in the KV an error comes from, inferred: an output alone does not say which keys it was made of.

Taking a set of keys with weight w and mean value m out of a row moves its output along w * (m - output). The set whose
movement lines up best with the error over all failing rows is where to look first. This is a correlation, not a proof,
and everything that shows it says so; `--bisect` tests explanations by computing them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mlactl.replay.attention import RowView, views
from mlactl.replay.compare import Cluster
from mlactl.replay.ranges import GRAIN_TOKENS

if TYPE_CHECKING:
    import torch

    from mlactl.replay.capture import Capture
    from mlactl.replay.report import Pair

CHUNK_TOKENS = 64
MAX_ROWS = 8
MIN_CORRELATION = 0.3
"""Under this an axis says nothing."""


def inferred_clusters(
    capture: Capture, rows: Sequence[int], heads: Sequence[int] | None, judged: torch.Tensor, reference: torch.Tensor, wrong: Pair
) -> tuple[Cluster, ...]:
    """Chunk, page and split that the error of the failing rows lines up with; empty where the output itself is right or not finite."""
    import torch

    output = next((item for item in wrong.comparisons if item.name == "output" and not item.matches), None)
    if output is None:
        return ()
    error = (judged.double() - reference.double()).float()
    worst = error.abs().nan_to_num(posinf=0.0, neginf=0.0).flatten(1).amax(1).argsort(descending=True)[:MAX_ROWS]
    places = [int(place) for place in worst if bool(torch.isfinite(error[place]).all())]
    found = [item for item in views(capture, [rows[place] for place in places], torch.float32) if item is not None]
    if not found:
        return ()
    chosen = list(range(capture.heads)) if heads is None else list(heads)
    errors = [error[place] for place in places]
    ids = capture.tensors["page_ids"]
    axes: list[tuple[str, Callable[[RowView], torch.Tensor], Callable[[int], int], str]] = [
        ("chunk", lambda item: item.seen.positions // CHUNK_TOKENS, lambda group: group, f"chunks of {CHUNK_TOKENS} tokens"),
        ("page", lambda item: item.seen.pages, lambda group: int(ids[group]), "original page id"),
    ]
    splits = capture.call.splits
    if splits is not None and splits > 1:
        axes.append(("split", lambda item: split_of(item.seen.positions, splits), lambda group: group, f"of {splits} even splits"))
    made = (_axis(name, group_of, label, note, found, errors, chosen) for name, group_of, label, note in axes)
    return tuple(cluster for cluster in made if cluster is not None)


def split_of(positions: torch.Tensor, splits: int) -> torch.Tensor:
    """The split that each key of a row falls into when its chunks of 16 tokens are cut evenly."""
    if not len(positions):
        return positions
    chunks = int(positions[-1]) // GRAIN_TOKENS + 1
    return positions // (-(-chunks // splits) * GRAIN_TOKENS)


def _axis(
    name: str, group_of: Callable[[RowView], torch.Tensor], label: Callable[[int], int], note: str,
    found: Sequence[RowView], errors: Sequence[torch.Tensor], heads: Sequence[int],
) -> Cluster | None:  # fmt: skip
    import torch

    dot: dict[int, float] = {}
    energy: dict[int, float] = {}
    total = sum(float((error**2).sum()) for error in errors)
    for item, error in zip(found, errors, strict=True):
        groups, order = torch.sort(group_of(item), stable=True)
        names, counts = torch.unique_consecutive(groups, return_counts=True)
        weights, values, output = item.weights[heads][:, order], item.values[order], item.output[heads]
        sizes = counts.tolist()
        for group, part, keys in zip(names.tolist(), torch.split(weights, sizes, 1), torch.split(values, sizes), strict=True):
            movement = part @ keys - part.sum(1, keepdim=True) * output
            dot[group] = dot.get(group, 0.0) + float((movement * error).sum())
            energy[group] = energy.get(group, 0.0) + float((movement**2).sum())
    scores = {group: abs(dot[group]) / max((energy[group] * total) ** 0.5, 1e-300) for group in dot}
    best = sorted(scores, key=lambda group: -scores[group])[:2]
    # Of two sets the movements are opposite: each would line up as well as the other.
    if len(dot) < 3 or not best or scores[best[0]] < MIN_CORRELATION:
        return None
    second = f", next {label(best[1])} with {scores[best[1]]:.2f}" if len(best) > 1 else ""
    return Cluster(
        name,
        1,
        len(dot),
        ((label(best[0]), 0, 0),),
        inferred=True,
        note=f"{name} {label(best[0])} ({note}): correlation {scores[best[0]]:.2f}{second}",
    )
