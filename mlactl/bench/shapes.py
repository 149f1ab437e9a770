"""What is benchmarked: a batch shape, how its KV is laid out, and the shapes of a profile. Imports no torch."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from mlactl.bench.floors import Work, dense_work
from mlactl.errors import UsageError
from mlactl.kernels.envelope import DenseEnvelope
from mlactl.kernels.mla.records import DenseRecord, dense_record
from mlactl.profiles import Profile

NOTATION = "REQUESTSxROWSxHHEADSxTOKENS"
EXAMPLE = "16x4xH8x8192"
_PATTERN = re.compile(r"(\d+)x(\d+)xH(\d+)x(\d+)(r?)")
_Q_ELEMENT_BYTES = {"bf16": 2, "e4m3": 1}


@dataclass(frozen=True, slots=True)
class Shape:
    """`requests` requests of `rows` query rows each over `tokens` cached tokens, for `heads` query heads.

    `ragged` draws the lengths uniformly from [1, 2 * tokens] with the same total, the same ones every time.
    """

    mode: str
    requests: int
    rows: int
    heads: int
    tokens: int
    ragged: bool = False

    @property
    def name(self) -> str:
        """The shape as `--shapes` takes it."""
        return f"{self.requests}x{self.rows}xH{self.heads}x{self.tokens}{'r' if self.ragged else ''}"

    def label(self) -> str:
        """The shape for people: `verify 16 x 4, H 8, 8,192`."""
        rows = f" x {self.rows}" if self.rows > 1 else ""
        return f"{self.mode} {self.requests}{rows}, H {self.heads}, {self.tokens:,}{' ragged' if self.ragged else ''}"

    def lengths(self) -> list[int]:
        """Cache length of each request."""
        if not self.ragged:
            return [self.tokens] * self.requests
        source = random.Random(7)
        drawn = [1 + source.random() * (2 * self.tokens - 1) for _ in range(self.requests)]
        total = self.tokens * self.requests
        lengths = [min(max(int(length * total / sum(drawn)), 1), 2 * self.tokens) for length in drawn]
        lengths[lengths.index(min(lengths))] += total - sum(lengths)
        return lengths


VERIFY_SHAPES = (
    Shape("verify", 16, 4, 8, 8192),
    Shape("verify", 8, 4, 16, 8192),
    Shape("verify", 8, 4, 64, 8192),
    Shape("verify", 1, 4, 8, 131072),
    Shape("verify", 1, 4, 96, 131072),
    Shape("verify", 4, 4, 96, 16384),
)
"""The verify shapes that figures are published for."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How KV and queries are stored, and whether verify rows carry their own visible lengths."""

    record: str = "bf16"
    q_dtype: str = "bf16"
    width: int = 576
    page_size: int = 64
    per_query: bool = False

    @property
    def kv_record(self) -> DenseRecord:
        """The record of one token."""
        return dense_record(self.record, self.width)

    def work(self, shape: Shape) -> Work:
        """What a launch of that shape cannot avoid."""
        return dense_work(shape.lengths(), [shape.rows] * shape.requests, shape.heads, self.kv_record, _Q_ELEMENT_BYTES[self.q_dtype])


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """Comma-separated shapes in `NOTATION`, a trailing `r` for ragged lengths; raises UsageError naming the first misfit."""
    found = []
    for part in text.split(","):
        match = _PATTERN.fullmatch(part.strip())
        if match is None:
            raise UsageError(f"--shapes {part!r} is not {NOTATION}", hint=f"--shapes {EXAMPLE}: 16 requests of 4 rows, 8 heads, 8,192 tokens each")
        requests, rows, heads, tokens = (int(number) for number in match.groups()[:4])
        if not (requests and rows and heads and tokens):
            raise UsageError(f"--shapes {part!r} has a 0, expected at least 1 of each", hint=f"--shapes {EXAMPLE}")
        found.append(Shape("verify", requests, rows, heads, tokens, ragged=bool(match[5])))
    return tuple(dict.fromkeys(found))


def of_profile(profile: Profile) -> tuple[tuple[Shape, ...], Layout]:
    """The verify launches of a deployment: one request and its most, at the longest shard of the context.

    Raises UsageError for a profile whose attention has no dense verify launch or that gives no context length.
    """
    (envelope,) = profile.envelopes()
    if not isinstance(envelope, DenseEnvelope) or not envelope.verify_rows:
        what = "reads selected slots, not whole pages" if profile.sparse else f"has modes {', '.join(profile.serving.modes)}"
        raise UsageError(f"profile {profile.name} {what}: it has no verify plan", hint="mlactl profile ls; or give --shapes")
    tokens = profile.local_shard_tokens
    if tokens is None:
        raise UsageError(f"profile {profile.name} has no serving.max_context, which says how long requests get", hint="give --shapes instead")
    counts = sorted({1, profile.serving.max_sequences or 1})
    shapes = tuple(Shape("verify", requests, rows, envelope.heads, tokens) for rows in envelope.verify_rows for requests in counts)
    return shapes, Layout(envelope.record, envelope.q_dtype, envelope.width, profile.kv.page_size, envelope.per_query)
