"""What is benchmarked: a batch shape, how its KV is laid out, and the shapes of a profile. Imports no torch."""

from __future__ import annotations

import random
import re
from dataclasses import asdict, dataclass

from mlactl.bench.floors import Work, dense_work
from mlactl.errors import UsageError
from mlactl.kernels.envelope import DenseEnvelope
from mlactl.kernels.errors import PlanError
from mlactl.kernels.mla.policy import SparsePolicy
from mlactl.kernels.mla.records import DenseRecord, dense_record
from mlactl.kernels.mla.selection import SELECTION_TOKENS
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


VERIFY_SHAPES: tuple[Shape, ...] = (
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
        """What an exact launch of that shape cannot avoid; every row is counted with its whole request."""
        tokens = sum(shape.lengths())
        return self._work(shape, tokens, tokens * shape.rows)

    def sparse_work(self, shape: Shape, sparse: SparsePolicy) -> Work:
        """The same for the strided selection: the chunks that any row of a request selects, and each row's own."""
        kv_tokens = row_tokens = 0
        for length in shape.lengths():
            read: set[int] = set()
            for row in range(shape.rows):
                visible = max(length - shape.rows + row + 1, 0)
                chunks = sparse.chunks(visible, shape.rows)
                row_tokens += sum(min(SELECTION_TOKENS, visible - chunk * SELECTION_TOKENS) for chunk in chunks)
                read.update(chunks)
            kv_tokens += sum(min(SELECTION_TOKENS, length - chunk * SELECTION_TOKENS) for chunk in read)
        return self._work(shape, kv_tokens, row_tokens)

    def _work(self, shape: Shape, kv_tokens: int, row_tokens: int) -> Work:
        rows = shape.requests * shape.rows
        return dense_work(kv_tokens, row_tokens, rows, shape.heads, self.kv_record, _Q_ELEMENT_BYTES[self.q_dtype])


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


def parse_sparse(text: str) -> SparsePolicy:
    """`STRIDE,SINK,RECENT,MIN_TOKENS` or with `,REFRESH` behind it; raises UsageError."""
    hint = "--sparse 4,1,2,4096: chunks are 64 tokens"
    parts = text.split(",")
    if len(parts) not in (4, 5) or not all(part.strip().isdigit() for part in parts):
        raise UsageError(f"--sparse {text!r} is not STRIDE,SINK,RECENT,MIN_TOKENS[,REFRESH]", hint=hint)
    try:
        return SparsePolicy(*(int(part) for part in parts))
    except PlanError as error:
        raise UsageError(f"--sparse {text}: {error.message}", hint=hint) from error


def layout_of(profile: Profile) -> tuple[Layout, SparsePolicy | None]:
    """How a deployment stores KV, and its chunk selection. Raises UsageError for attention that has no dense verify launch."""
    (envelope,) = profile.envelopes()
    if not isinstance(envelope, DenseEnvelope) or not envelope.verify_rows:
        what = "reads selected slots, not whole pages" if profile.sparse else f"has modes {', '.join(profile.serving.modes)}"
        raise UsageError(f"profile {profile.name} {what}: it has no verify plan", hint="mlactl profile ls; or give --shapes without a profile")
    chosen = profile.serving.sparse_policy
    sparse = None if chosen is None else SparsePolicy(**asdict(chosen))
    return Layout(envelope.record, envelope.q_dtype, envelope.width, profile.kv.page_size, envelope.per_query), sparse


def shapes_of(profile: Profile) -> tuple[Shape, ...]:
    """The verify launches of a deployment: one request and its most, at the longest shard of the context.

    Raises UsageError for a profile that gives no context length.
    """
    tokens = profile.local_shard_tokens
    if tokens is None:
        raise UsageError(f"profile {profile.name} has no serving.max_context, which says how long requests get", hint="give --shapes as well")
    counts = sorted({1, profile.serving.max_sequences or 1})
    return tuple(Shape("verify", requests, rows + 1, profile.kernel_heads, tokens) for rows in profile.serving.draft_rows for requests in counts)
