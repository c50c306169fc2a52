"""What a pattern is: a predicate over positions, closed under ``| & - ~``, with optional hints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..._util.imports import whole_imports
from ..._util.index_checks import check_lengths, q_offset
from ..._util.ragged import offsets
from ...arrays import dtype_name, namespace_of
from ...index_set import AffineRows, Runs
from ..hints.bands import Bands
from ..hints.lattice import Ends, Lattice, Span
from .codec import decode, encode
from .evaluate import evaluate
from .parameters import check_parameters, default_value
from .registry import OPERATORS, pattern_class

__all__ = ["Ordered", "Part", "Pattern"]

# What must agree with a predicate.
_HINTS = {"runs", "parts", "ends", "translation_invariant", "_bands", "_candidates", "_lists_pairs", "_has_order"}


class Part(NamedTuple):
    """A piece of a pattern and the views in which it is dense.

    Parameters
    ----------
    pattern : Pattern
        What is allowed in this piece; only pairs of the two lattices count.
    query, key : Lattice or None
        Absolute positions of the queries and of the keys; None is the whole sequence.
    shifts : tuple of (int, int)
        The piece repeats with both lattices moved by each of these (query, key) offsets, and it is *the same* piece:
        in lattice coordinates the allowed pairs do not depend on the shift.
    spans : tuple of Span or None
        Where the keys of every query are a box of the key lattice: what that is along each axis. Plans may then have
        views of keys for each box of queries.
    """

    pattern: Pattern
    query: Lattice | None = None
    key: Lattice | None = None
    shifts: tuple[tuple[int, int], ...] = ((0, 0),)
    spans: tuple[Span, ...] | None = None


class Ordered(NamedTuple):
    """A pattern of places, and what is at each place.

    Attributes
    ----------
    pattern : Pattern
        Bound to the same lengths: the query at place p stands at position ``p + kv_len - q_len``, the key at place p at
        position p.
    q_order : (q_len,) int64 array
        The query row at each place.
    kv_order : (kv_len,) int64 array
        The key at each place.
    """

    pattern: Pattern
    q_order: np.ndarray
    kv_order: np.ndarray


class Pattern:
    """A set of allowed (query, key) position pairs.

    Subclasses are frozen dataclasses. They define :meth:`allows`; everything else is a hint that must agree with it. A
    class that replaces the predicate of another one inherits none of its hints.
    Annotations declare what their parameters may be: ``Annotated[int, Range(0)]``, ``bool``, ``Literal["one", "two"]``,
    tuples and unions of these. Those with arrays among their fields derive from :class:`ByContent` too.

    Raises
    ------
    TypeError
        If a parameter is not of the type that its annotation declares, or cannot be hashed.
    ValueError
        If it is out of the range that its annotation declares.
    """

    name: ClassVar[str] = ""
    translation_invariant: ClassVar[bool] = False
    """True when ``allows(q + t, k + t) == allows(q, k)`` for every t."""
    fixes_lengths: ClassVar[bool] = False
    """True when the parameters leave only some lengths, as a grid does."""
    _lists_pairs: ClassVar[bool] = False
    """Whether :meth:`_pairs` lists the allowed pairs, of which plans and index sets are made then."""
    _has_order: ClassVar[bool] = False
    """Whether there may be an order of the tokens in which its pairs lie together: :meth:`_in_order` of some head."""
    _depth: ClassVar[int] = 0
    _terms: ClassVar[int] = 1
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]  # made by the decorator of subclasses
    __array_ufunc__: ClassVar[None] = None  # `array & pattern` is a pattern, not an array of patterns

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        replaced = next(base for base in cls.__mro__[1:] if "allows" in vars(base))
        if "allows" in vars(cls) and replaced is not Pattern:
            for hint in _HINTS - vars(cls).keys():
                setattr(cls, hint, vars(Pattern)[hint])

    def __post_init__(self) -> None:
        check_parameters(self)

    def allows(self, q: Any, k: Any) -> Any:
        """Whether query position `q` may attend to key position `k` (integer arrays, broadcast together).

        Uses only operators, NumPy ufuncs and :func:`spattn.patterns.authoring.apply`, so that the planner can evaluate
        it on whole tiles at once.

        Parameters
        ----------
        q, k : int or int array
            Positions, at least 0; while planning, an object with the same operators.

        Returns
        -------
        bool or bool array
            Of the broadcast shape of `q` and `k`, or of one that broadcasts to it. Numbers are no truth values: index
            sets, plans and compositions raise TypeError for them.
        """
        raise NotImplementedError

    def runs(self, q: np.ndarray, kv_len: int) -> Runs | None:
        """Hint: the allowed keys of query positions `q`, in closed form; None where there is none.

        Index sets are made of them, and plans where every row has one run.

        Parameters
        ----------
        q : (rows,) int64 array
            Positions of queries.
        kv_len : int
            Keys of the sequence.

        Returns
        -------
        Runs or None
            One row for each query; every key lies in ``[0, kv_len)``.
        """
        return None

    def parts(self, q_len: int, kv_len: int) -> tuple[Part, ...]:
        """Hint: disjoint pieces that cover the pattern, with the views in which each is dense.

        Parameters
        ----------
        q_len, kv_len : int
            Lengths in tokens.

        Returns
        -------
        tuple of Part
        """
        return (Part(self),)

    def ends(self, q_len: int) -> Ends | None:
        """Hint: where the keys of the last queries lie, the same for all long sequences; None where there is none.

        Only a pattern that suits every length has it. Steps of generation at all lengths share one plan then.

        Parameters
        ----------
        q_len : int
            Queries, the last so many positions of the sequence.

        Returns
        -------
        Ends or None
        """
        return None

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        """This pattern at these lengths: checks that they fit and fixes whatever depends on them.

        Parameters
        ----------
        q_len, kv_len : int
            Lengths in tokens.

        Returns
        -------
        Pattern

        Raises
        ------
        ValueError
            If the pattern is not made for these lengths.
        """
        return self

    def sizes(self) -> tuple[int, int]:
        """How many (batch entries, heads) the pattern tells apart: 1 = none, 0 = as many as there are.

        Returns
        -------
        (int, int)
        """
        return 1, 1

    def grids(self) -> frozenset[tuple[int, ...]]:
        """The grids that the tokens form, each as its tokens along each axis; none for tokens in a row.

        Returns
        -------
        frozenset of tuple of int
            One where arrays may have its axes in place of the length.
        """
        return frozenset()

    def at(self, batch: int, head: int) -> Pattern:
        """The pattern of one batch entry and one head, numbered as in :meth:`sizes`.

        Parameters
        ----------
        batch, head : int
            Numbers of the batch entry and the head.

        Returns
        -------
        Pattern
            One whose :meth:`sizes` are (1, 1).

        Raises
        ------
        ValueError
            If there is no batch entry or head of this number.
        """
        return self

    # -- to try it with ----------------------------------------------------------------------------------------------

    @classmethod
    def example(cls) -> tuple[Pattern, int]:
        """A small instance for tests, benchmarks and pictures, and a length that suits it.

        By default parameters have their own defaults, or else plain values that their annotations declare.

        Returns
        -------
        pattern : Pattern
        length : int
            Tokens, of queries and of keys.

        Raises
        ------
        TypeError
            If the annotation of a parameter without a default does not tell a value.
        """
        required = [f.name for f in dataclasses.fields(cls) if _is_required(f)]
        return cls(**{name: default_value(cls, name) for name in required}), 32

    @classmethod
    def typical(cls) -> tuple[Pattern, int]:
        """An instance as large as people use it, at a length where its plan says something about its cost.

        By default the example, at 64 times its length unless it refuses that.

        Returns
        -------
        pattern : Pattern
        length : int
            Tokens, of queries and of keys.
        """
        pattern, length = cls.example()
        try:
            pattern.at(0, 0).bind(64 * length, 64 * length)
        except ValueError:
            return pattern, length
        return pattern, 64 * length

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        """A random instance for property tests, and sizes that suit it.

        By default each parameter is drawn as its annotation declares. Classes whose parameters depend on each other, or
        on the lengths, override this.

        Parameters
        ----------
        draw : spattn.testing.strategies.Draw
            Draws numbers and choices: ``draw.integer(1, 9)``.
        sizes : spattn.testing.strategies.Sizes
            batch, heads_q, heads_kv, q_len and kv_len at hand.

        Returns
        -------
        pattern : Pattern
        sizes : Sizes
            The same, or ``sizes._replace(q_len=..., kv_len=...)`` where :attr:`fixes_lengths` is True.
        """
        return draw.instance(cls, sizes)

    # -- derived -----------------------------------------------------------------------------------------------------

    def variants(self, batch: int, heads: int) -> tuple[list[Pattern], np.ndarray]:
        """The different patterns of a batch and which one each (batch entry, head) has.

        Parameters
        ----------
        batch, heads : int
            Batch entries and query heads of the call.

        Returns
        -------
        patterns : list of Pattern
        index : int32 array (batch or 1, heads or 1)

        Raises
        ------
        ValueError
            If the pattern is made for another number of batch entries or heads.
        """
        own_batch, own_heads = self.sizes()
        if own_batch not in (0, 1, batch):
            raise ValueError(f"pattern: expected one for {batch} batch entries, got one for {own_batch}")
        if own_heads > 1 and heads % own_heads:
            raise ValueError(f"pattern: expected one for a divisor of {heads} heads, got one for {own_heads} heads")
        per_head = self._for_heads(heads)
        own_heads = per_head.sizes()[1]
        number: dict[Pattern, int] = {}
        index = np.array(
            [
                [number.setdefault(per_head.at(b, h), len(number)) for h in range(own_heads or heads)]
                for b in range(own_batch or batch)
            ],
            dtype=np.int32,
        ).reshape(own_batch or batch, own_heads or heads)
        if own_heads > 1:
            index = np.repeat(index, heads // own_heads, axis=1)
        return list(number), index

    def _for_heads(self, heads: int) -> Pattern:
        """The same for so many query heads: where a part that tells each head apart meets one for groups of heads, it
        says what each of its heads attends to."""
        changed: dict[str, Any] = {}
        for name in getattr(self, "__dataclass_fields__", ()):  # which not every user's class has
            value = getattr(self, name)
            several = type(value) is tuple
            inner = [p for p in (value if several else (value,)) if isinstance(p, Pattern)]
            made = tuple(p._for_heads(heads) for p in inner)
            if any(new is not old for new, old in zip(made, inner, strict=True)):
                changed[name] = made if several else made[0]
        return dataclasses.replace(self, **changed) if changed else self

    def index_set(self, q_len: int, kv_len: int, *, batch: int = 0, head: int = 0) -> AffineRows:
        """The exact index set: query row i stands at position ``i + kv_len - q_len``.

        Parameters
        ----------
        q_len, kv_len : int
            Lengths in tokens.
        batch, head : int, optional
            Which batch entry and head, for patterns that tell them apart.

        Returns
        -------
        AffineRows

        Raises
        ------
        ValueError
            If a length is no integer, negative or 2^31 or more, or the pattern does not fit the lengths, batch entry or
            head.
        TypeError
            If :meth:`allows` returns anything but truth values of the shape of its arguments.
        """
        q_len, kv_len = check_lengths(q_len, kv_len)
        bound = self.at(batch, head).bind(q_len, kv_len)
        q = np.arange(q_offset(q_len, kv_len), kv_len, dtype=np.int64)
        if bound._lists_pairs:
            row, key = bound._pairs(q, kv_len)
            return AffineRows.from_csr(offsets(np.bincount(row, minlength=q_len)), key, kv_len)
        runs = bound.runs(q, kv_len)
        return AffineRows.from_runs(runs, kv_len) if runs is not None else evaluate(bound, q, kv_len)

    def to_json(self) -> str:
        """Serialize this pattern; :func:`spattn.patterns.from_json` reads it back, in any process.

        Returns
        -------
        str
            JSON.

        Raises
        ------
        ValueError
            If the pattern's class is not registered, or JSON cannot hold a parameter.
        """
        text = self._serialized()
        if text is None:
            raise ValueError(f"pattern: expected a registered class with parameters that JSON can hold, got {self!r}")
        return text

    def _description(self) -> dict[str, Any]:
        """What JSON holds: integers, text, lists and dicts only."""
        return {"pattern": self.name} | {f.name: encode(getattr(self, f.name)) for f in dataclasses.fields(self)}

    def _serialized(self) -> str | None:
        """The JSON, None where it cannot say all of the pattern."""
        with whole_imports:  # late: `import spattn` takes little time
            import json

        try:
            # An object that is made while torch.compile is tracing lacks its fields, but for their defaults.
            if not {field.name for field in dataclasses.fields(self)} <= vars(self).keys():
                return None
            text = json.dumps(self._description(), separators=(",", ":"))
            return text if decode(json.loads(text)) == self else None
        except (TypeError, ValueError):
            return None

    def _candidates(self, q: np.ndarray, kv_len: int) -> list[Runs] | None:
        """Runs that together contain every pair the pattern allows, as few as closed forms tell; None: all pairs."""
        runs = Runs.single(*self._pairs(q, kv_len), len(q)) if self._lists_pairs else self.runs(q, kv_len)
        return None if runs is None else [runs]

    def _bands(self, first: int, stop: int) -> tuple[Bands, ...] | None:
        """Hint: conjuncts, all of which allow each allowed pair of the queries at ``[first, stop)``; None where there are
        none."""
        return None

    def _in_order(self, also: Pattern | None = None) -> Ordered | None:
        """Hint: the pairs of this pattern, bound to its lengths, in an order of the tokens in which they lie together;
        None where there is none. With `also`, those pairs that this pattern allows, too."""
        return None

    def _pairs(self, q: np.ndarray, kv_len: int) -> tuple[np.ndarray, np.ndarray]:
        """(number of the query in `q`, key) of every allowed pair, sorted; asked only where :attr:`_lists_pairs`."""
        raise NotImplementedError

    def __and__(self, other: Any) -> Pattern:
        return _joined("&", self, other)

    def __rand__(self, other: Any) -> Pattern:
        return _joined("&", other, self)

    def __or__(self, other: Any) -> Pattern:
        return _joined("|", self, other)

    def __ror__(self, other: Any) -> Pattern:
        return _joined("|", other, self)

    def __sub__(self, other: Any) -> Pattern:
        other = _operand(other)
        return NotImplemented if other is None else self & ~other

    def __rsub__(self, other: Any) -> Pattern:
        return _joined("&", other, ~self)

    def __invert__(self) -> Pattern:
        return OPERATORS["~"].of(self)

    def __bool__(self) -> bool:
        raise TypeError("a pattern has no truth value: use & and | instead of 'and' and 'or'")


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _operand(value: Any) -> Pattern | None:
    """What stands beside an operator, as a pattern: a bool array of any framework is a Mask. None if it is neither."""
    if isinstance(value, Pattern):
        return value
    if namespace_of(value) is None:
        return None
    if dtype_name(value) != "bool":
        got = dtype_name(value)
        raise TypeError(f"operand: expected a pattern or a bool array, to wrap in Mask(...), got an array of {got}")
    mask: Callable[[Any], Pattern] = pattern_class("mask")
    return mask(value)


def _joined(symbol: str, left: Any, right: Any) -> Pattern:
    one, other = _operand(left), _operand(right)
    return NotImplemented if one is None or other is None else OPERATORS[symbol].of(one, other)
