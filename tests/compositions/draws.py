"""Compositions of patterns at random, each beside its mask, which :mod:`.oracle` makes of its definition alone.

A *term* is a pattern and a function ``(q_len, kv_len) -> mask``. Its kind is drawn, so that operands of a composition
have views of their own: strides, residue classes, grids, columns, rows that are empty, orders. What is drawn comes from
a :class:`Source`: Hypothesis, which makes failures small, or a seeded generator, which draws thousands in seconds.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from spattn import patterns as p

from . import oracle
from .oracle import Mask

T = TypeVar("T")


class Source(Protocol):
    """What numbers and choices come from."""

    def integer(self, least: int, most: int) -> int:
        """One from `least` to `most`, which may be less and then does not count."""

    def choice(self, options: Sequence[T]) -> T:
        """One of several."""

    def rng(self) -> np.random.Generator:
        """For arrays."""

    def note(self, text: object) -> None:
        """Says what was drawn, for whoever reads of a failure."""


class Drawn:
    """Of Hypothesis' ``data``.

    Numbers are those of a random generator that Hypothesis steers and makes small. Drawn one by one, as strategies do,
    they would be a structure of which it tries five more examples for each new one, all but alike: of ten compositions
    three would be different.
    """

    def __init__(self, data: Any):
        import hypothesis  # which a program that draws by seeds does without

        self._random = data.draw(hypothesis.strategies.randoms(note_method_calls=False, use_true_random=False))
        self._note = hypothesis.note

    def integer(self, least: int, most: int) -> int:
        return self._random.randint(least, max(least, most))

    def choice(self, options: Sequence[T]) -> T:
        return options[self.integer(0, len(options) - 1)]

    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.integer(0, 2**32 - 1))

    def note(self, text: object) -> None:
        self._note(repr(text))


class Seeded:
    """Of a generator: the same for the same seed, on every machine. `notes` is what was said."""

    def __init__(self, *seed: int):
        self._rng, self.notes = np.random.default_rng(seed), []

    def integer(self, least: int, most: int) -> int:
        return int(self._rng.integers(least, max(least, most), endpoint=True))

    def choice(self, options: Sequence[T]) -> T:
        return options[self.integer(0, len(options) - 1)]

    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.integer(0, 2**32 - 1))

    def note(self, text: object) -> None:
        self.notes.append(repr(text))


class Sizes(NamedTuple):
    """Of a problem."""

    batch: int
    heads_q: int
    heads_kv: int
    q_len: int
    kv_len: int


class Term(NamedTuple):
    """A pattern, and what it allows."""

    pattern: p.Pattern
    mask: Mask

    def __or__(self, other: Term) -> Term:
        return Term(self.pattern | other.pattern, oracle.either(self.mask, other.mask))

    def __and__(self, other: Term) -> Term:
        return Term(self.pattern & other.pattern, oracle.both(self.mask, other.mask))

    def __sub__(self, other: Term) -> Term:
        return Term(self.pattern - other.pattern, oracle.minus(self.mask, other.mask))

    def __invert__(self) -> Term:
        return Term(~self.pattern, oracle.complement(self.mask))


class Case(NamedTuple):
    """A composition and sizes that it suits."""

    pattern: p.Pattern
    mask: Mask
    sizes: Sizes

    def allowed(self, kv_len: int | None = None) -> np.ndarray:
        """(batch, heads_q, q_len, kv_len) bool: of these sizes, or with another number of keys."""
        batch, heads, _, q_len, own = self.sizes
        return oracle.whole(self.mask, batch, heads, q_len, own if kv_len is None else kv_len)

    def __repr__(self) -> str:
        return f"Case({self.pattern!r}, {self.sizes!r})"


# -- sizes -------------------------------------------------------------------------------------------------------------


def draw_sizes(source: Source, longest: int = 150) -> Sizes:
    """Odd numbers of tokens, or those of a grid, now and then more than `longest`; as many queries as keys in most
    cases, which is where grids have views of their own."""
    way = source.integer(0, 9)
    if way < 5:
        kv_len = math.prod(draw_grid(source, longest))
    elif way < 9:
        kv_len = source.integer(1, longest // 2) * 2 - 1
    else:
        kv_len = source.integer(longest, 2 * longest)
    way = source.integer(0, 9)
    q_len = kv_len if way < 6 else source.integer(1, kv_len) if way < 9 else source.integer(1, longest)
    heads_kv, group = source.choice([(1, 1), (1, 2), (1, 2), (2, 1), (2, 2), (1, 4)][: 6 if kv_len <= longest else 3])
    return Sizes(source.choice([1, 1, 1, 2]), heads_kv * group, heads_kv, q_len, kv_len)


def draw_grid(source: Source, most: int) -> tuple[int, ...]:
    """One to three axes with up to `most` tokens in all."""
    axes = source.choice([2, 3, 2, 1])
    shape: tuple[int, ...] = ()
    for left in reversed(range(axes)):
        room = most // math.prod(shape)
        shape += (source.integer(2, min(room, round(1.5 * room ** (1 / (1 + left))))),)
    return shape


# -- terms of any length, of positions alone ---------------------------------------------------------------------------


def full(source: Source, s: Sizes) -> Term:
    return Term(p.Full(), oracle.full())


def nothing(source: Source, s: Sizes) -> Term:
    return Term(p.Full() - p.Full(), oracle.nothing())


def causal(source: Source, s: Sizes) -> Term:
    return Term(p.Causal(), oracle.causal())


def sliding_window(source: Source, s: Sizes) -> Term:
    left, right = (source.choice([-1, 0, source.integer(0, 40)]) for _ in range(2))
    return Term(p.SlidingWindow(left, right), oracle.sliding_window(left, right))


def a_step(source: Source) -> int:
    """From one token to the next of a view; of short steps it has many tiles."""
    return source.choice([2, 3, source.integer(2, 9)])


def dilated_window(source: Source, s: Sizes) -> Term:
    left, right, dilation = source.integer(0, 9), source.integer(0, 9), a_step(source)
    return Term(p.DilatedWindow(left, right, dilation), oracle.dilated_window(left, right, dilation))


def periodic_window(source: Source, s: Sizes) -> Term:
    period = source.integer(2, 30)
    left, right, offset = source.integer(0, 6), source.integer(0, 6), source.integer(0, period)
    return Term(p.PeriodicWindow(period, left, right, offset), oracle.periodic_window(period, left, right, offset))


def block_local(source: Source, s: Sizes) -> Term:
    block, offset = source.integer(2, 50), source.choice([0, source.integer(0, 20)])
    return Term(p.BlockLocal(block, offset), oracle.block_local(block, offset))


def strided(source: Source, s: Sizes) -> Term:
    step = a_step(source)
    return Term(p.strided(step), oracle.strided(step))


def fixed(source: Source, s: Sizes) -> Term:
    block = source.integer(2, 20)
    summary = source.integer(1, block)
    return Term(p.fixed(block, summary), oracle.fixed(block, summary))


def stride(source: Source, s: Sizes) -> Term:
    step = a_step(source)
    offset = source.integer(0, step - 1)
    return Term(p.Stride(step, offset), oracle.stride(step, offset))


def columns(source: Source, s: Sizes) -> Term:
    period = source.integer(2, 20)
    start = source.integer(0, period - 1)
    stop = source.integer(start + 1, period)
    return Term(p.Columns(period, start, stop), oracle.columns(period, start, stop))


def sinks(source: Source, s: Sizes) -> Term:
    count = source.integer(0, 80)
    return Term(p.Sinks(count), oracle.sinks(count))


def global_tokens(source: Source, s: Sizes) -> Term:
    """The first ones, any, or some at equal distances, which have a view of their own."""
    way = source.integer(0, 2)
    if way == 0:
        tokens: int | tuple[int, ...] = source.integer(0, 20)
    elif way == 1:
        tokens = tuple(source.rng().integers(0, s.kv_len + 3, source.integer(0, 5)).tolist())
    else:
        first, step = source.integer(0, 9), a_step(source)
        tokens = tuple(range(first, first + step * source.integer(1, 30), step))
    queries, keys = source.choice([(True, True), (True, False), (False, True)])
    return Term(p.GlobalTokens(tokens, queries, keys), oracle.global_tokens(tokens, queries, keys))


def longformer(source: Source, s: Sizes) -> Term:
    window, dilation = 2 * source.integer(1, 12), source.choice([1, 1, source.integer(2, 5)])
    tokens = source.choice([source.integer(0, 9), tuple(source.rng().integers(0, s.kv_len, 3).tolist())])
    return Term(p.longformer(window, dilation, tokens), oracle.longformer(window, dilation, tokens))


def prefix_lm(source: Source, s: Sizes) -> Term:
    tokens = source.integer(0, s.kv_len)
    return Term(p.prefix_lm(tokens), oracle.prefix_lm(tokens))


def vertical_slash(source: Source, s: Sizes) -> Term:
    rng = source.rng()
    chosen, diagonals = (tuple(rng.integers(0, s.kv_len, rng.integers(0, 5)).tolist()) for _ in range(2))
    return Term(p.VerticalSlash(chosen, diagonals), oracle.vertical_slash(chosen, diagonals))


@dataclasses.dataclass(frozen=True)
class Predicate(p.Pattern):
    """A class of a user's, registered nowhere, which has a predicate and no hint."""

    form: str
    a: int
    b: int

    def allows(self, q: Any, k: Any) -> Any:
        a, b = self.a, self.b
        match self.form:
            case "sum":
                return (q + k - b) % a == 0
            case "blocks":
                return q // a % 2 == k // a % 2 if a == b else q // a % 2 == k // b % 2
            case "apart":
                return np.abs(k - q) // a % 2 < 1
            case "smaller":
                return np.minimum(q, k) % a < b % a
            case "rows":
                return (q % (a + b) < a) & (k >= 0)
            case "product":
                return (q * k - b) % (a + 1) == 0
        return ~(np.gcd(k + a, q) != 1)


def predicate(source: Source, s: Sizes) -> Term:
    form, a, b = source.choice(list(oracle.PREDICATES)), source.integer(2, 20), source.integer(2, 20)
    return Term(Predicate(form, a, b), oracle.predicate(form, a, b))


# -- terms that are made for some lengths, of positions alone ----------------------------------------------------------


def documents(source: Source, s: Sizes) -> Term:
    """The longest first: numbers that rise are taken for cumulative lengths."""
    lengths: list[int] = []
    for _ in range(source.integer(1, 5)):
        lengths.append(source.integer(1, s.kv_len - sum(lengths)))
        if sum(lengths) == s.kv_len:
            break
    lengths = sorted(lengths, reverse=True)
    return Term(p.Documents(tuple(lengths)), oracle.documents(lengths))


def block_layout(source: Source, s: Sizes) -> Term:
    block_q = source.integer(3, 40)
    block_kv = source.choice([block_q, source.integer(3, 40)])
    shape = -(-s.kv_len // block_q), -(-s.kv_len // block_kv)
    layout = source.rng().random(shape) < source.choice([0.1, 0.3, 0.8])
    block = block_q if block_q == block_kv else (block_q, block_kv)
    return Term(p.BlockLayout(layout, block), oracle.block_layout(layout, block_q, block_kv))


def clusters(source: Source, s: Sizes) -> Term:
    """Which have an order of the tokens."""
    labels = source.rng().integers(-1, source.integer(1, 6), s.kv_len)
    return Term(p.Clusters(labels), oracle.of_labels(labels, None))


def column_intervals(source: Source, s: Sizes) -> Term:
    bounds = source.rng().integers(-2, s.kv_len + 3, (source.choice([2, 4]), s.kv_len))
    ahead = source.choice([False, True])
    intervals = list(zip(bounds[::2], bounds[1::2], strict=True))
    return Term(p.ColumnIntervals(*bounds, causal=ahead), oracle.column_intervals(intervals, ahead))


def bigbird(source: Source, s: Sizes) -> Term:
    """Of one head's blocks."""
    return _bigbird(source, [source.integer(0, 9)])


def _bigbird(source: Source, heads: Sequence[int], head: int | None = -1) -> Term:
    block, window, at_ends = source.integer(3, 20), source.choice([1, 3]), source.integer(0, 1)
    drawn, seed, ahead = source.integer(0, 2), source.integer(0, 99), source.choice([False, True])
    parameters = block, window, at_ends, drawn, seed, ahead
    head = heads[0] if head == -1 else head
    return Term(p.BigBird(*parameters, head), oracle.bigbird(*parameters, heads))


def a_grid(source: Source, tokens: int) -> tuple[int, ...]:
    """A grid of so many tokens, of several axes that are longer than 1 where there is one."""
    found = oracle.factorisations(tokens)
    several = [grid for grid in found if sum(length > 1 for length in grid) == len(grid) > 1]
    return source.choice(several if several and source.integer(0, 4) else found)


def neighborhood(source: Source, s: Sizes) -> Term:
    grid = a_grid(source, s.kv_len)
    dilation = tuple(source.choice([1, 1, source.integer(1, max(1, n // 3))]) for n in grid)
    kernel = tuple(source.integer(1, min(7, n // d)) for n, d in zip(grid, dilation, strict=True))
    steps = tuple(source.choice([1, source.integer(1, w)]) for w in kernel)
    ahead = tuple(source.choice([False, False, True]) for _ in grid)
    parameters = kernel, dilation, steps, ahead
    return Term(p.Neighborhood(grid, *parameters), oracle.neighborhood(grid, *parameters))


def windowed(source: Source, s: Sizes) -> Term:
    grid = a_grid(source, s.kv_len)
    window = tuple(source.integer(1, min(8, n)) for n in grid)
    shift = tuple(source.choice([0, source.integer(0, w - 1)]) for w in window)
    return Term(p.windowed(grid, window, shift), oracle.windowed(grid, window, shift))


def axial(source: Source, s: Sizes) -> Term:
    grid = a_grid(source, s.kv_len)
    axis = source.integer(0, len(grid) - 1)
    return Term(p.axial(grid, axis), oracle.axial(grid, axis))


def per_axis(source: Source, s: Sizes) -> Term:
    grid = a_grid(source, s.kv_len)
    along = [ANYWHERE[source.choice(sorted(ANYWHERE))](source, s._replace(q_len=n, kv_len=n)) for n in grid]
    patterns, masks = zip(*along, strict=True)
    return Term(p.PerAxis(grid, patterns), oracle.per_axis(grid, masks))


def prefix(source: Source, s: Sizes) -> Term:
    """What has views of its own, behind a few tokens."""
    most = min(7, s.kv_len)
    several = [n for n in range(most) if any((s.kv_len - n) % axis == 0 for axis in (2, 3, 5)) and s.kv_len - n > 5]
    tokens = source.choice(several or list(range(most)))  # behind so many there is a grid of several axes
    kind = source.choice([neighborhood, windowed, axial, axial, sliding_window, stride, dilated_window, per_axis])
    inner = kind(source, s._replace(kv_len=s.kv_len - tokens, q_len=min(s.q_len, s.kv_len - tokens)))
    return Term(p.Prefix(inner.pattern, tokens), oracle.prefix(inner.mask, tokens))


# -- terms of rows, which are made for some lengths --------------------------------------------------------------------


def row_intervals(source: Source, s: Sizes) -> Term:
    """Some of them empty."""
    start, stop = source.rng().integers(-2, s.kv_len + 3, (2, s.q_len))
    kv_len = source.choice([None, s.kv_len])
    return Term(p.RowIntervals(start, stop, kv_len), oracle.row_intervals(start, stop))


def some_rows(source: Source, s: Sizes) -> Term:
    """Another pattern, of some rows alone."""
    return in_some_rows(source, s, ANYWHERE[source.choice(sorted(ANYWHERE))](source, s))


def in_some_rows(source: Source, s: Sizes, inner: Term) -> Term:
    """Of half of them, of every other few, or of any: elsewhere it has no pair."""
    row, way = np.arange(s.q_len), source.integer(0, 3)
    if way < 2:
        chosen = (row < s.q_len // 2) == source.choice([False, True])
    elif way == 2:
        chosen = row // source.integer(1, 20) % 2 == 0
    else:
        chosen = source.rng().random(s.q_len) < 0.5
    stop = np.where(chosen, s.kv_len, 0)
    return inner & Term(p.RowIntervals(0 * stop, stop), oracle.row_intervals(0 * stop, stop))


def mask(source: Source, s: Sizes) -> Term:
    array = source.rng().random((s.q_len, s.kv_len)) < source.choice([0.02, 0.3, 0.9])
    return Term(p.Mask(array), oracle.given(array))


def pairs(source: Source, s: Sizes) -> Term:
    """Scattered ones."""
    row, key = (source.rng().random((s.q_len, s.kv_len)) < source.choice([0.003, 0.03])).nonzero()
    return Term(p.interop.from_pairs(row, key, s.q_len, s.kv_len), oracle.pairs(row, key))


def together(source: Source, s: Sizes) -> Term:
    """Listed pairs that lie together where tokens are taken in another order."""
    rng, several = source.rng(), source.integer(1, 5)
    of_rows, of_keys = rng.integers(0, several, s.q_len), rng.integers(0, several, s.kv_len)
    row, key = (of_rows[:, None] == of_keys).nonzero()
    return Term(p.interop.from_pairs(row, key, s.q_len, s.kv_len), oracle.pairs(row, key))


def row_runs(source: Source, s: Sizes) -> Term:
    rng = source.rng()
    start, step = rng.integers(0, s.kv_len, (s.q_len, 1)), rng.integers(1, 6, (s.q_len, 1))
    count = rng.integers(0, -((start - s.kv_len) // step) + 1)
    return Term(p.authoring.RowRuns(start, step, count), oracle.row_runs(start, step, count))


def queries_at(source: Source, s: Sizes) -> Term:
    """Rows of another pattern, in a row or in any order."""
    inner = ANYWHERE[source.choice(sorted(ANYWHERE))](source, s)
    last = max(0, s.kv_len - s.q_len)
    way = source.integer(0, 1)
    where = source.integer(0, last) if way else tuple(source.rng().integers(0, s.kv_len, s.q_len).tolist())
    return Term(p.QueriesAt(inner.pattern, where), oracle.queries_at(inner.mask, where))


# -- terms that tell heads or batch entries apart ----------------------------------------------------------------------


def key_blocks(source: Source, s: Sizes) -> Term:
    block_q, block_kv = source.integer(3, 40), source.integer(3, 40)
    leading = source.choice([(), (s.heads_kv,), (s.batch, s.heads_kv), (s.batch, 1)])
    shape = *leading, -(-s.kv_len // block_q), source.integer(1, 3)
    blocks = source.rng().integers(-1, -(-s.kv_len // block_kv), shape)
    own = oracle.over_heads(oracle.key_blocks(blocks, block_q, block_kv), s.heads_q)
    return Term(
        p.KeyBlocks(blocks, block_q, block_kv), own if leading else oracle.key_blocks(blocks, block_q, block_kv)
    )


def masks(source: Source, s: Sizes) -> Term:
    leading = source.choice([(s.heads_q,), (s.batch, s.heads_q), (s.batch, 1)])
    array = source.rng().random((*leading, s.q_len, s.kv_len)) < source.choice([0.02, 0.3])
    return Term(p.Mask(array), oracle.given(array))


def bigbirds(source: Source, s: Sizes) -> Term:
    """Each head has blocks of its own."""
    return _bigbird(source, range(s.heads_q), None)


def key_padding(source: Source, s: Sizes) -> Term:
    lengths = source.rng().integers(0, s.kv_len + 1, s.batch)
    valid = np.arange(s.kv_len) < lengths[:, None]
    valid = valid[0] if s.batch == 1 else valid
    return Term(p.KeyPadding(valid), oracle.key_padding(valid))


def per_head(source: Source, s: Sizes) -> Term:
    """As many as there are heads, or fewer, each for neighbouring ones; any of them may tell batch entries apart."""
    number = source.choice([n for n in range(1, s.heads_q + 1) if s.heads_q % n == 0])
    each = [_single(source, s) for _ in range(number)]
    if source.integer(0, 2) == 0:
        each[0] = per_batch(source, s)
    patterns, own = zip(*each, strict=True)
    return Term(p.PerHead(patterns), oracle.per_head(own, s.heads_q))


def per_batch(source: Source, s: Sizes) -> Term:
    patterns, own = zip(*(_single(source, s) for _ in range(s.batch)), strict=True)
    return Term(p.PerBatch(patterns), oracle.per_batch(own))


def _single(source: Source, s: Sizes) -> Term:
    """Of one head: a term, or a few of them."""
    kinds = sorted(SINGLE)
    found = SINGLE[source.choice(kinds)](source, s)
    return found | SINGLE[source.choice(kinds)](source, s) if source.integer(0, 2) == 0 else found


Make = Callable[[Source, Sizes], Term]


def named(*makers: Make) -> dict[str, Make]:
    return {make.__name__: make for make in makers}


ANYWHERE = named(
    *(full, nothing, causal, sliding_window, dilated_window, periodic_window, block_local, strided, fixed, stride),
    *(columns, sinks, global_tokens, longformer, prefix_lm, vertical_slash, predicate),
)
"""Of any lengths."""
GROWING = named(full, causal, sliding_window, sinks, nothing)
"""Those whose keys lie at both ends of a sequence, and all or none between: their plans move with it, or grow."""
AT_LENGTHS = named(
    *(documents, block_layout, clusters, column_intervals, bigbird, neighborhood, windowed, axial, per_axis, prefix),
    *(row_intervals, some_rows, mask, pairs, together, row_runs, queries_at),
)
SINGLE = ANYWHERE | AT_LENGTHS
"""Of one head."""
TERMS = SINGLE | named(key_blocks, masks, bigbirds, key_padding, per_head, per_batch)
"""All of them."""


INVARIANT = named(full, causal, sliding_window, dilated_window, strided, stride)
"""Of the distance from query to key alone: pieces of other operands that repeat stay together beside them."""
REPEATING = named(prefix, axial, neighborhood, per_axis, dilated_window, stride)
"""Of pieces that repeat, moved by some tokens; those of a prefix have moved queries and always the same keys."""
VIEWED = named(
    *(dilated_window, periodic_window, strided, fixed, stride, columns, global_tokens),
    *(neighborhood, windowed, axial, per_axis, prefix),
)
"""Whose plans have views of their own, of queries or of keys."""


# -- compositions ------------------------------------------------------------------------------------------------------


def compose(source: Source, leaf: Callable[[], Term], leaves: int) -> Term:
    """A random tree of ``|``, ``&``, ``-`` and ``~`` over so many leaves; mostly unions, where views meet."""
    if leaves == 1:
        return leaf() if source.integer(0, 9) else ~leaf()
    few = source.integer(1, leaves - 1)
    one, other = compose(source, leaf, few), compose(source, leaf, leaves - few)
    match source.choice("|||||&&-"):
        case "|":
            return one | other
        case "&":
            return one & other
    return one - other


def draw_case(source: Source, longest: int = 150, most: int = 6, kinds: dict | None = None) -> Case:
    """A composition of up to `most` operands, at sizes that suit it."""
    sizes = draw_sizes(source, longest)
    return Case(*draw_term(source, sizes, most, TERMS if kinds is None else kinds), sizes)


def draw_term(source: Source, sizes: Sizes, most: int, kinds: dict[str, Make]) -> Term:
    """One of three: any tree of operands; the union of several that have views of their own, so that some rows lie in
    three views or more, and in one of them without a pair; a few of these beside operands that do not tell them
    apart."""
    names = sorted(kinds)
    viewed, invariant = (sorted(own.keys() & kinds.keys()) or names for own in (VIEWED, INVARIANT))
    repeating = sorted(REPEATING.keys() & kinds.keys()) or names

    def one(among: Sequence[str]) -> Term:
        return kinds[source.choice(among)](source, sizes)

    way = source.integer(0, 8)
    if most < 3 or way < 3:
        return compose(source, lambda: one(names), source.choice([1, *range(2, most + 1), *range(2, most + 1)]))
    if way < 5:
        pair = [one(invariant), one(["prefix"] if "prefix" in kinds and source.integer(0, 1) else repeating)]
        if source.integer(0, 2) == 0:
            pair.reverse()
        few = [*pair, one(source.choice([invariant, repeating]))][: source.integer(2, 3)]
        return compose(source, iter(few).__next__, len(few))
    found = []
    for _ in range(source.integer(3, most)):
        own = one(viewed if source.integer(0, 4) else names)
        in_some = "row_intervals" in kinds and source.integer(0, 2) == 0
        found.append(in_some_rows(source, sizes, own) if in_some else own)
    joined = functools.reduce(operator.or_, found)
    return joined if source.integer(0, 5) else joined - one(names)


# -- how they are planned ----------------------------------------------------------------------------------------------

FEW = [(1, 64), (1, 64), (4, 64), (4, 64), (7, 64), (8, 128), (16, 64), (16, 64)]
TILES = [*FEW, (33, 64), (48, 64), (64, 64), (128, 64), (128, 192)]
"""Of all backends, or like theirs: one query, a few that are computed together, vectors, panels and blocks of them."""
WORKERS = [1, 3, 7, 1000]


class How(NamedTuple):
    """Of what :func:`spattn.schedule.compiler.plan` makes a plan."""

    tile: tuple[int, int] | None
    box: tuple[int, ...] | None
    workers: int
    ordered: bool = False
    gathered: bool = False


def draw_how(
    source: Source, case: Case, tiles: Sequence[tuple[int, int]] = TILES, gathered: bool = True, most_cells: int = 96
) -> How:
    """A tile, or a box of queries where the composition has a grid; sometimes tokens in an order, or keys gathered."""
    workers, grids = source.choice(WORKERS), sorted(case.pattern.grids())
    if grids and source.integer(0, 1):
        box: tuple[int, ...] = ()
        for length in source.choice(grids):
            most = min(length, 8, most_cells // math.prod(box))
            box += (min(most, source.choice([1, 2, source.integer(1, most)])),)
        return How((math.prod(box), source.choice(tiles)[1]), box, workers)
    way = source.integer(0, 5)
    return How(source.choice(tiles), None, workers, way == 0, way == 1 and gathered)


# -- arrays ------------------------------------------------------------------------------------------------------------


class Arrays(NamedTuple):
    """Of a problem, in its dtype."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray


def draw_arrays(source: Source, sizes: Sizes, dim: int, dim_v: int, dtype: np.dtype) -> Arrays:
    """Normal numbers, as the dtype has them; ``dlse`` is of the dtype that ``lse`` is of."""
    rng, (batch, heads_q, heads_kv, q_len, kv_len) = source.rng(), sizes
    shapes = [(heads_q, q_len, dim), (heads_kv, kv_len, dim), (heads_kv, kv_len, dim_v), (heads_q, q_len, dim_v)]
    made = [rng.standard_normal((batch, *shape)).astype(dtype) for shape in shapes]
    dlse = rng.standard_normal((batch, heads_q, q_len)).astype(np.float64 if dtype == np.float64 else np.float32)
    return Arrays(*made, dlse)
