"""The operators ``&``, ``|`` and ``~``: n-ary compositions of patterns."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..._util.cached import cached_property
from ...index_set import Runs
from ..hints.closed_forms import AND, NOT, OR, Bands, Ends, Program, either, joined
from .check import assign
from .class_registry import DEEPEST, OPERATORS, pattern_class
from .pattern import Ordered, Part, Pattern, whole_part
from .predicate import allowed, pair_count

if TYPE_CHECKING:
    from .rows import AskedRows

__all__ = ["And", "Not", "Or", "at_joint", "joint_heads", "joint_size", "nesting", "per_entry"]

_MOST_TERMS = 1 << 16  # repeated operands count again: each `p = p & q | p` doubles the work
_MOST_PARTS = 32  # each part of a union excludes all earlier operands, so many parts cost more than their views save


def nesting(patterns: tuple[Pattern, ...]) -> dict[str, int]:
    """Return `_depth` and `_terms` of a composition of `patterns`; raise ValueError beyond their limits."""
    if len(patterns) == 1:  # an entry of each step of generation
        depth, terms = 1 + patterns[0]._depth, patterns[0]._terms
    else:
        depth, terms = 1 + max(p._depth for p in patterns), sum(p._terms for p in patterns)
    if depth > DEEPEST:
        raise ValueError(f"pattern: expected operators nested at most {DEEPEST} deep, got {depth}")
    if terms > _MOST_TERMS:
        raise ValueError(f"pattern: expected at most {_MOST_TERMS} patterns joined, got {terms}")
    return {"_depth": depth, "_terms": terms}


def joint_size(sizes: Iterable[int], axis: int) -> int:
    """Broadcast patterns' numbers of batch entries (`axis` 0) or heads (1); 0 accepts any, groups of heads repeat."""
    different = set(sizes)
    largest = max(different)
    if 0 in different and largest <= 1:
        return 0
    several = {size for size in different if size > 1}
    if axis and any(largest % size for size in several):
        raise ValueError(
            "pattern: expected groups of heads whose numbers divide the largest, "
            f"got {sorted(several)}; give each PerHead one pattern for each head"
        )
    if not axis and len(several) > 1:
        raise ValueError(f"pattern: expected patterns for one number of batch entries, got {sorted(several)}")
    return largest


def at_joint(pattern: Pattern, batch: int, head: int, heads: int) -> Pattern:
    """Return the pattern of one batch entry, and of one of `heads` heads of the composition of which it is a part."""
    own_batch, own_heads = pattern.sizes()
    return pattern.at(batch if own_batch != 1 else 0, head * own_heads // heads if own_heads and heads else head)


def joint_heads(patterns: Iterable[Pattern], heads: int) -> list[Pattern]:
    """Expand patterns of one composition for a call of `heads` heads: :meth:`.Pattern._for_heads`."""
    own = [p._for_heads(heads) for p in patterns]
    sizes = [p.sizes()[1] for p in own]
    if 0 in sizes and 1 < max(sizes) < heads:
        own = [p if size else per_entry([[p] * heads]) for p, size in zip(own, sizes, strict=True)]
    return own


def per_entry(entries: list[list[Pattern]]) -> Pattern:
    """Combine ``entries[batch][head]`` into one pattern."""
    found = tuple(pattern_class("per_head")(tuple(heads)) for heads in entries)
    joined: Pattern = found[0] if len(found) == 1 else pattern_class("per_batch")(found)
    return joined


@dataclass(frozen=True, repr=False)
class Composite(Pattern):
    """Base class of And, Or and Not, with the methods that combine operands in the same way for every operator."""

    operands: tuple[Pattern, ...]
    symbol: ClassVar[str] = ""
    _between: ClassVar[Any]  # combines Ends.between of the operands
    _operator: ClassVar[np.ufunc]  # combines words of the operands
    _instruction: ClassVar[tuple[int, ...]]  # combines their row programs
    _hash: ClassVar[int]  # set per instance; not a dataclass field

    def __post_init__(self) -> None:
        # The hash is cached, because every call and every enclosing composition hashes the pattern.
        assign(self, **nesting(self.operands), _hash=hash((self.symbol, self.operands)))

    @classmethod
    def of(cls, *patterns: Pattern) -> Pattern:
        """Combine patterns in order: flatten nested operands of the same operator and drop repeated ones."""
        flat = dict.fromkeys(p for each in patterns for p in (each.operands if isinstance(each, cls) else (each,)))
        return cls(tuple(flat)) if len(flat) > 1 else next(iter(flat))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.operands,)  # without the hash, which differs between processes

    def _with(self, operands: Iterable[Pattern]) -> Pattern:
        """Apply the same operator to other operands."""
        operands = tuple(operands)
        unchanged = all(new is old for new, old in zip(operands, self.operands, strict=True))
        return self if unchanged else self.of(*operands)

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        return self._with(p.bind(q_len, kv_len) for p in self.operands)

    @cached_property
    def _sizes(self) -> tuple[int, int]:  # cached: every step of generation needs them
        batch, heads = zip(*(p.sizes() for p in self.operands), strict=True)
        return joint_size(batch, 0), joint_size(heads, 1)

    def sizes(self) -> tuple[int, int]:
        return self._sizes

    def grids(self) -> frozenset[tuple[int, ...]]:
        return frozenset().union(*(p.grids() for p in self.operands))

    def at(self, batch: int, head: int) -> Pattern:
        heads = self._sizes[1]
        return self._with(at_joint(p, batch, head, heads) for p in self.operands)

    def _for_heads(self, heads: int) -> Pattern:
        return self._with(joint_heads(self.operands, heads))

    def ends(self, q_len: int) -> Ends | None:
        found = [p.ends(q_len) for p in self.operands]
        if None in found:
            return None
        first, last, middle = zip(*found, strict=True)
        return Ends(max(first), max(last), type(self)._between(middle))

    def _bands_of_all(self, first: int, stop: int) -> list[tuple[Bands, ...]] | None:
        """Return the interval conjuncts of each operand, or None if an operand has none."""
        found = []
        for p in self.operands:
            own = p._bands(first, stop)
            if own is None:
                return None
            found.append(own)
        return found

    @property
    def translation_invariant(self) -> bool:  # type: ignore[override]  # per instance
        return all(p.translation_invariant for p in self.operands)

    def _row_program(self) -> Program | None:
        return joined((p._row_program() for p in self.operands), self._instruction)

    def _rows(self, asked: AskedRows) -> np.ndarray:
        combine = functools.partial(asked.combined, self._operator)
        return functools.reduce(combine, map(asked.of, self.operands))

    def _description(self) -> dict[str, Any]:
        return {"pattern": self.symbol, "operands": [p._description() for p in self.operands]}


class Or(Composite):
    """Union of the operands."""

    symbol = "|"
    _between = any
    _operator = np.bitwise_or
    _instruction = OR

    def allows(self, q: Any, k: Any) -> Any:
        return functools.reduce(operator.or_, (allowed(p, q, k) for p in self.operands))

    def parts(self, q_len: int, kv_len: int) -> tuple[Part, ...]:
        pieces: list[tuple[Part, ...]] = []
        # Operands that list their pairs come last: filtering a list is cheaper than excluding a list.
        operands = sorted(self.operands, key=lambda p: p._lists_pairs)
        for p in operands:
            pieces.append(p.parts(q_len, kv_len))
            if sum(map(len, pieces)) > _MOST_PARTS:
                return (Part(self),)
        whole = sum(1 for _ in itertools.takewhile(_whole, pieces))
        if whole == len(pieces):
            return (Part(self),)
        parts = (Part(Or.of(*operands[:whole])),) if whole else pieces[0]
        for number in range(max(whole, 1), len(pieces)):
            others = ~Or.of(*operands[:number])
            parts += tuple(piece for p in pieces[number] for piece in _filtered(p, (others,)))
        return parts

    def _bands(self, first: int, stop: int) -> tuple[Bands, ...] | None:
        found = self._bands_of_all(first, stop)
        return None if found is None else either(found)

    def _candidates(self, q: np.ndarray, kv_len: int) -> list[Runs] | None:
        joined: list[Runs] = []
        for p in self.operands:
            runs = p._candidates(q, kv_len)
            if runs is None:
                return None
            joined += runs
        return joined

    def __repr__(self) -> str:
        return f"({' | '.join(map(repr, self.operands))})"


class And(Composite):
    """Intersection of the operands."""

    symbol = "&"
    _between = all
    _operator = np.bitwise_and
    _instruction = AND

    def allows(self, q: Any, k: Any) -> Any:
        return functools.reduce(operator.and_, (allowed(p, q, k) for p in self.operands))

    @property
    def _lists_pairs(self) -> bool:  # type: ignore[override]  # per instance
        return any(p._lists_pairs for p in self.operands)

    @property
    def _has_order(self) -> bool:  # type: ignore[override]
        return any(p._has_order for p in self.operands)

    def _in_order(self, also: Pattern | None = None) -> Ordered | None:
        """Permute tokens by the first operand that has a permutation."""
        more = () if also is None else (also,)
        for p in self.operands:
            others = (other for other in self.operands if other is not p)
            found = p._in_order(And.of(*others, *more)) if p._has_order else None
            if found is not None:
                return found
        return None

    def _pairs(self, q: np.ndarray, kv_len: int) -> tuple[np.ndarray, np.ndarray]:
        listing = next(p for p in self.operands if p._lists_pairs)
        row, key = listing._pairs(q, kv_len)
        keep = np.ones(len(row), dtype=bool)
        for p in self.operands:
            if p is not listing:
                keep &= allowed(p, q[row], key)
        return row[keep], key[keep]

    def parts(self, q_len: int, kv_len: int) -> tuple[Part, ...]:
        if self._lists_pairs:
            return whole_part(self, q_len, kv_len)
        for number, p in enumerate(self.operands):
            parts = p.parts(q_len, kv_len)
            if not _whole(parts):
                others = self.operands[:number] + self.operands[number + 1 :]
                return tuple(piece for part in parts for piece in _filtered(part, others))
        return (Part(self),)

    def runs(self, q: np.ndarray, kv_len: int) -> Runs | None:
        """Intersect the runs if every operand allows one interval of keys per query; else return None."""
        start, stop = np.zeros_like(q), np.full_like(q, kv_len)
        for p in self.operands:
            own = p.runs(q, kv_len)
            if own is None or own.start.shape[1] != 1 or (own.step != 1).any():
                return None
            start, stop = np.maximum(start, own.start[:, 0]), np.minimum(stop, (own.start + own.count)[:, 0])
        return Runs.span(start, stop, kv_len)

    def _bands(self, first: int, stop: int) -> tuple[Bands, ...] | None:
        found = self._bands_of_all(first, stop)
        return None if found is None else tuple(itertools.chain.from_iterable(found))

    def _candidates(self, q: np.ndarray, kv_len: int) -> list[Runs] | None:
        each = (p._candidates(q, kv_len) for p in self.operands)
        return min((runs for runs in each if runs is not None), key=pair_count, default=None)

    @cached_property
    def _predicates_last(self) -> list[Pattern]:
        return sorted(self.operands, key=_by_predicate)

    def _rows(self, asked: AskedRows) -> np.ndarray:
        """Evaluate the predicates of operands without hints last, and only where all others allow the keys."""
        found = None
        for p in self._predicates_last:
            own = (asked if found is None else asked._replace(within=found)).of(p)
            found = own if found is None else asked.combined(self._operator, found, own)
        assert found is not None, "there are two operands or more"
        return found

    def __repr__(self) -> str:
        first, *others = self.operands
        return f"({first!r}{''.join(f' - {p.operands[0]!r}' if isinstance(p, Not) else f' & {p!r}' for p in others)})"


class Not(Composite):
    """Complement of the operand."""

    symbol = "~"
    _between = staticmethod(lambda flags: not all(flags))

    @classmethod
    def of(cls, *patterns: Pattern) -> Pattern:
        """Complement one pattern; a double complement cancels."""
        (pattern,) = patterns
        return pattern.operands[0] if isinstance(pattern, Not) else cls((pattern,))

    def allows(self, q: Any, k: Any) -> Any:
        result = allowed(self.operands[0], q, k)
        return (not result) if isinstance(result, bool) else ~result  # ~ of a Python bool is an int

    def _row_program(self) -> Program | None:
        own = self.operands[0]._row_program()
        return None if own is None else (*own, NOT)

    def _rows(self, asked: AskedRows) -> np.ndarray:
        return ~asked.of(self.operands[0])

    def __repr__(self) -> str:
        return f"~{self.operands[0]!r}"


OPERATORS.update({cls.symbol: cls for cls in (Or, And, Not)})


def _by_predicate(pattern: Pattern) -> bool:
    """Return whether the keys of rows are found by evaluating the predicate."""
    if isinstance(pattern, Composite):
        return any(map(_by_predicate, pattern.operands))
    own = type(pattern)
    hints = own.runs is not Pattern.runs or own._rows is not Pattern._rows or pattern._lists_pairs
    return not hints and own.bind is Pattern.bind


def _whole(parts: tuple[Part, ...]) -> bool:
    return all(p.query is None and p.key is None for p in parts)


def _filtered(part: Part, others: tuple[Pattern, ...]) -> tuple[Part, ...]:
    """Intersect a part with `others`, and split its shifts into groups that allow the same pairs."""
    pattern = And.of(part.pattern, *others)
    if len(part.shifts) == 1:
        return (part._replace(pattern=pattern, spans=None),)
    if all(p.translation_invariant for p in others):
        alike: dict[int, list[tuple[int, int]]] = {}
        for dq, dk in part.shifts:
            alike.setdefault(dq - dk, []).append((dq, dk))
        return tuple(part._replace(pattern=pattern, shifts=tuple(shifts), spans=None) for shifts in alike.values())
    query, key = part.query, part.key
    return tuple(Part(pattern, query and query.moved(dq), key and key.moved(dk)) for dq, dk in part.shifts)
