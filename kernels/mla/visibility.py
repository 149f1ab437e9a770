"""Which keys each query row sees, and which chunks a tile stages for its rows. Traced code.

The one place where visible lengths, windows and the sparse selection become chunks and masks. All of it follows from device
lengths, so that a captured graph stays right. A tile walks positions: without a selection a position is a chunk; with one,
positions count the staged chunks, the union of what the tile's rows selected, and each row masks what it did not select.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from mlactl.kernels.mla import ptx
from mlactl.kernels.mla.config import CHUNK_SHIFT, CHUNK_TOKENS

_PARTS_SHIFT = 2
_PARTS = 1 << _PARTS_SHIFT
"""Staged chunks of one selectable chunk of 64 tokens."""

_SELECTED_SHIFT = CHUNK_SHIFT + _PARTS_SHIFT

_KEYS_MASK = 0x7FFFFFFF


@dataclass(frozen=True)
class Numbers:
    """Runtime numbers of the window and of the sparse policy; `rows` are the plan's query rows a request."""

    window: Int32
    stride: Int32
    sink: Int32
    recent: Int32
    min_tokens: Int32
    refresh: Int32
    rows: Int32


@dataclass(frozen=True)
class Request:
    """One request's rows: its cache length, what row 0 sees by causal arithmetic, the address of its rows' own lengths."""

    length: Int32
    unseen: Int32
    own_lengths: Int64


@dataclass(frozen=True)
class Walk:
    """Positions of a tile: `count` of them from `base`; `last` is the last token to read; `words` say how positions of a
    selection map to chunks: dense prefix, end of the strided part, its first chunk, shift after it (in 64-token chunks)."""

    base: Int32
    count: Int32
    last: Int32
    words: tuple[Int32, ...]


@dataclass(frozen=True)
class RowKeys:
    """What one consumer thread's row sees. seen: keys less `column`, the thread's first token in a chunk; with a selection,
    keys, negative (top bit set) when the row selects: the loops have no register for one more number. `words` is the shared
    address of the walk's words."""

    visibility: Visibility
    numbers: Numbers
    seen: Int32
    column: Int32
    words: Int32

    def start(self, position):
        """Keys left to see at a position, 16 fewer for each chunk on; not read where a selection says them."""
        return self.seen - (position << CHUNK_SHIFT)

    def left(self, position, left):
        """`left` where chunks follow one another; with a selection the position's own, below 0 where not selected."""
        if not self.visibility.sparse:
            return left
        return self.visibility.left_of(self, position)

    @property
    def window(self):
        """The window, or None without one."""
        return self.numbers.window if self.visibility.window else None


@dataclass(frozen=True)
class Visibility:
    """The compile-time side: whether rows carry their own lengths, select chunks, or see a window."""

    per_query: bool
    sparse: bool
    window: bool

    def visible(self, request, row):
        """Keys that a request's query row sees, in [0, cache length]."""
        wanted = ptx.load_i32(request.own_lengths + Int64(row) * 4) if self.per_query else request.unseen + row
        return cutlass.min(cutlass.max(wanted, Int32(0)), request.length)

    @cute.jit
    def recent_from(self, numbers: cutlass.Constexpr[Numbers], visible: Int32):
        """First recent chunk of a row that selects, -1 for one that attends every chunk."""
        chunk = Int32(-1)
        if (numbers.stride > 1) & (visible > numbers.min_tokens):
            chunk = cutlass.max(((visible + (CHUNK_TOKENS * _PARTS - 1)) >> _SELECTED_SHIFT) - numbers.recent, Int32(0))
            if numbers.refresh > 0:  # noqa: SIM102  a runtime branch inside a runtime branch
                if ptx.remainder(visible, numbers.refresh) < numbers.rows:
                    chunk = Int32(-1)
        return chunk

    @cute.jit
    def work(self, numbers: cutlass.Constexpr[Numbers], chunks: Int32):
        """About how many chunks a tile stages of a cache of `chunks`, for the schedule; 0 only for an empty cache."""
        if cutlass.const_expr(self.window):
            chunks = cutlass.min(chunks, (numbers.window >> CHUNK_SHIFT) + 2)
        if cutlass.const_expr(self.sparse):  # noqa: SIM102  this one is decided at trace time
            if (numbers.stride > 1) & ((chunks << CHUNK_SHIFT) > numbers.min_tokens):
                whole = (chunks + (_PARTS - 1)) >> _PARTS_SHIFT
                kept = ptx.divide(whole + (numbers.stride - 1), numbers.stride)
                kept = cutlass.min(kept + cutlass.min(numbers.sink, whole) + cutlass.min(numbers.recent, whole), whole)
                chunks = cutlass.min(chunks, kept << _PARTS_SHIFT)
        return chunks

    @cute.jit
    def walk(self, request: cutlass.Constexpr[Request], numbers: cutlass.Constexpr[Numbers], first_row: Int32, last_row: Int32, lane: Int32):
        """The walk of a tile that holds query rows [first_row, last_row]; the same in every lane."""
        base = Int32(0)
        words = ()
        if cutlass.const_expr(not self.per_query and not self.sparse):
            # By causal arithmetic the last row sees most, the first row's window begins first.
            most = self.visible(request, last_row)
            if cutlass.const_expr(self.window):
                base = cutlass.max(self.visible(request, first_row) - numbers.window, Int32(0)) >> CHUNK_SHIFT
        else:
            most, dense, recent_from = self.extremes(request, numbers, first_row, last_row, lane)
        count = ((most + (CHUNK_TOKENS - 1)) >> CHUNK_SHIFT) - base
        if cutlass.const_expr(self.sparse):
            total = (most + (CHUNK_TOKENS * _PARTS - 1)) >> _SELECTED_SHIFT
            prefix = cutlass.min(cutlass.max(dense, numbers.sink), total)
            recent = cutlass.max(cutlass.min(recent_from, total), prefix)
            steps = ptx.divide(cutlass.max(prefix - numbers.sink, Int32(0)) + (numbers.stride - 1), numbers.stride)
            first = numbers.sink + steps * numbers.stride
            strided_end = prefix + ptx.divide(cutlass.max(recent - first + (numbers.stride - 1), Int32(0)), numbers.stride)
            words = (prefix, strided_end, first, recent - strided_end)
            # The last chunk is always staged and may be partly filled.
            count = count - ((recent - strided_end) << _PARTS_SHIFT)
        return Walk(base, count, most - 1, words)

    @cute.jit
    def extremes(self, request: cutlass.Constexpr[Request], numbers: cutlass.Constexpr[Numbers], first_row: Int32, last_row: Int32, lane: Int32):
        """Over a tile's rows: (most keys seen, chunks that a row without selection sees, first recent chunk of those with)."""
        most = Int32(0)
        dense = Int32(0)
        earliest = Int32(-(1 << 30))
        for row in cutlass.range(first_row + lane, last_row + 1, 32, unroll=1):
            seen = self.visible(request, row)
            most = cutlass.max(most, seen)
            if cutlass.const_expr(self.sparse):
                recent = self.recent_from(numbers, seen)
                if recent < 0:
                    dense = cutlass.max(dense, (seen + (CHUNK_TOKENS * _PARTS - 1)) >> _SELECTED_SHIFT)
                else:
                    earliest = cutlass.max(earliest, Int32(0) - recent)
        most = ptx.warp_max(most)
        if cutlass.const_expr(self.sparse):
            dense = ptx.warp_max(dense)
            earliest = ptx.warp_max(earliest)
        return most, dense, Int32(0) - earliest

    @cute.jit
    def chunk(self, numbers: cutlass.Constexpr[Numbers], position: Int32, words: Int32):
        """The chunk at a position; `words` is the shared address of the walk's words."""
        chunk = position
        if cutlass.const_expr(self.sparse):
            at = position >> _PARTS_SHIFT
            prefix = ptx.load_shared_i32(words)
            if at >= prefix:
                if at < ptx.load_shared_i32(words, 4):
                    at = ptx.load_shared_i32(words, 8) + (at - prefix) * numbers.stride
                else:
                    at = at + ptx.load_shared_i32(words, 12)
            chunk = (at << _PARTS_SHIFT) | (position & (_PARTS - 1))
        return chunk

    @cute.jit
    def left_of(self, keys: cutlass.Constexpr[RowKeys], position: Int32):
        """Keys that a row has left to see at a position, -1 where it did not select the chunk."""
        numbers = keys.numbers
        chunk = self.chunk(numbers, position, keys.words)
        seen = keys.seen & _KEYS_MASK
        left = seen - (chunk << CHUNK_SHIFT) - keys.column
        selected = chunk >> _PARTS_SHIFT
        recent = (seen + (CHUNK_TOKENS * _PARTS - 1)) >> _SELECTED_SHIFT
        past = cutlass.max(selected - numbers.sink, Int32(0))
        if (keys.seen < 0) & (selected < recent - numbers.recent) & (ptx.remainder(past, numbers.stride) != 0):
            left = Int32(-1)
        return left

    def keys_of(self, request, numbers, row, column, words):
        """The keys of a consumer thread's row whose first token in a chunk is `column`."""
        seen = self.visible(request, row)
        return RowKeys(self, numbers, self.flagged(numbers, seen) if self.sparse else seen - column, column, words)

    @cute.jit
    def flagged(self, numbers: cutlass.Constexpr[Numbers], seen: Int32):
        """Visible keys, with the top bit set for a row that selects."""
        if self.recent_from(numbers, seen) >= 0:
            seen = seen | ~_KEYS_MASK
        return seen
