"""The Pattern class: a predicate over positions, closed under ``| & - ~``, with optional hints."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from ..._util.index_checks import check_lengths, q_offset
from ..._util.ragged import offsets
from ...arrays import compiling, unknown, untraced
from ...index_set import AffineRows, Runs
from ..hints.closed_forms import Bands, Ends, Lattice, Program, Span, whole_lattices
from .check import check_parameters
from .class_registry import CONVERSIONS, OPERATORS, Registered
from .codec import Serializable
from .predicate import evaluate

if TYPE_CHECKING:
    from .rows import AskedRows

__all__ = ["CONSTRUCTORS", "Deferred", "Ordered", "Part", "Pattern", "deferrable", "defers", "whole_part"]

CONSTRUCTORS: set[str] = set()  # names of the methods that traced programs may call
# Hints must agree with the predicate, so a subclass that overrides allows() inherits none of them.
_HINTS = {
    "runs",
    "parts",
    "ends",
    "translation_invariant",
    "_bands",
    "_candidates",
    "_lists_pairs",
    "_has_order",
    "_row_program",
    "_rows",
}


class Part(NamedTuple):
    """A subset of a pattern's pairs, with the two lattices in which it is dense.

    Parameters
    ----------
    pattern : Pattern
        The predicate, which applies to pairs of the two lattices only.
    query, key : Lattice or None
        Absolute positions of the queries and of the keys; None means all positions.
    shifts : tuple of (int, int)
        (query, key) offsets at which the part repeats. Every shift must allow the same pairs of lattice coordinates.
    spans : tuple of Span or None
        Interval of keys per query along each axis, if the keys of every query form a box of the key lattice. Plans may
        then use one key view per box of queries.
    """

    pattern: Pattern
    query: Lattice | None = None
    key: Lattice | None = None
    shifts: tuple[tuple[int, int], ...] = ((0, 0),)
    spans: tuple[Span, ...] | None = None


def whole_part(pattern: Pattern, q_len: int, kv_len: int) -> tuple[Part, ...]:
    """Return one part with explicit lattices, so that a union plans it separately."""
    return (Part(pattern, *whole_lattices(q_len, kv_len)),)


class Ordered(NamedTuple):
    """A bound pattern over permuted tokens: query i is row ``q_order[i]`` of q, key j is row ``kv_order[j]`` of k.

    Query i has position ``i + kv_len - q_len``.
    """

    pattern: Pattern
    q_order: np.ndarray
    kv_order: np.ndarray


class _PatternClass(type):
    """Metaclass of patterns: in ``Causal & Sinks(4)``, a class stands for its instance without arguments.

    ``Causal | Sinks`` remains Python's union of types.
    """

    @property
    def __signature__(cls) -> inspect.Signature | None:
        """The signature of a class without __init__; that of any other class is the one of __init__."""
        return inspect.Signature() if cls.__init__ is object.__init__ else None  # type: ignore[misc]

    def __and__(cls, other: Any) -> Pattern:
        return _joined("&", cls, other)

    def __sub__(cls, other: Any) -> Pattern:
        return _joined("&", cls, ~_operand(other))  # type: ignore[operator]

    def __invert__(cls) -> Pattern:
        return ~_operand(cls)  # type: ignore[operator]


class Pattern(Registered, Serializable, metaclass=_PatternClass):
    """A set of allowed (query, key) position pairs.

    Subclasses are frozen dataclasses that define :meth:`allows`. They may define hints, which must agree with it:
    :meth:`runs`, :meth:`parts` and :meth:`ends`. A subclass that overrides the predicate of another pattern inherits
    none of its hints. Annotations declare valid parameters: ``Annotated[int, Range(0)]``, ``bool``,
    ``Literal["one", "two"]``, tuples and unions of these. Classes with array fields derive from :class:`ByContent`
    first.

    Raises
    ------
    TypeError
        If a parameter does not have its documented type or cannot be hashed. Masked arrays are never accepted.
    ValueError
        If a parameter is out of range, arrays differ from the documented shapes, or patterns nest more than 64 deep.
        These errors apply to every pattern; subclasses document only further ones.
    """

    translation_invariant: ClassVar[bool] = False
    """True if ``allows(q + t, k + t) == allows(q, k)`` for every t."""
    fixes_lengths: ClassVar[bool] = False
    """True if the parameters restrict the lengths, as a grid does."""
    _lists_pairs: ClassVar[bool] = False
    """True if :meth:`_pairs` lists the allowed pairs; plans and index sets are then built from the list."""
    _lacks_program: ClassVar[bool] = False
    """True if :meth:`_row_program` returns None or too long a program; per instance once a step has asked."""
    _has_order: ClassVar[bool] = False
    """True if :meth:`_in_order` may find a permutation that clusters the pairs."""
    _depth: ClassVar[int] = 0
    _terms: ClassVar[int] = 1
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    __array_ufunc__: ClassVar[None] = None  # `array & pattern` is a pattern, not an array of patterns

    _in_graph: ClassVar[tuple[str, tuple[str, ...]] | None] = None
    """Constructor by which a graph restores a pattern, and the attributes that are its arguments."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a :class:`Deferred` pattern if arrays have no values yet, or torch.compile traces the caller."""
        if defers(*args, *kwargs.values()):
            symbol = getattr(cls, "symbol", "")
            if symbol:
                return Deferred.call(symbol, None, args[0], {})
            if cls._registered is cls:
                return Deferred.call(cls.name, None, args, kwargs)
        if (args or kwargs) and cls.__init__ is object.__init__:
            raise TypeError(f"{cls.__name__}() takes no arguments")
        return object.__new__(cls)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        replaced = next(base for base in cls.__mro__[1:] if "allows" in vars(base))
        if "allows" in vars(cls) and replaced is not Pattern:
            for hint in _HINTS - vars(cls).keys():
                setattr(cls, hint, vars(Pattern)[hint])

    def __post_init__(self) -> None:
        check_parameters(self)

    def allows(self, q: Any, k: Any) -> Any:
        """Return True where query position `q` may attend to key position `k` (integer arrays, broadcast together).

        Use only operators, NumPy ufuncs and :func:`spattn.patterns.authoring.apply`, so that the planner can evaluate
        the predicate on whole tiles.

        Parameters
        ----------
        q, k : int or int array
            Positions; during planning, an object with the same operators. Query row i is at ``i + kv_len - q_len``,
            which is negative for the first rows if there are more queries than keys.

        Returns
        -------
        bool or bool array
            Broadcastable to the common shape of `q` and `k`. If the result is not boolean, index sets, plans and
            compositions raise TypeError.

        Raises
        ------
        ValueError
            If :meth:`bind` must be called first to fix the lengths, or :meth:`at` to fix the batch entry and head.
        """
        raise NotImplementedError

    def runs(self, q: np.ndarray, kv_len: int) -> Runs | None:
        """Return the allowed keys of each query position as runs, or None if unknown; a hint.

        Index sets are built from the runs, and plans too if every row has one run.

        Parameters
        ----------
        q : (rows,) int64 array
            Query positions.
        kv_len : int
            Number of keys.

        Returns
        -------
        Runs or None
            One row per query; every key lies in ``[0, kv_len)``.
        """
        return None

    def parts(self, q_len: int, kv_len: int) -> tuple[Part, ...]:
        """Return disjoint parts that cover the pattern, each with the views in which it is dense; a hint.

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
        """Return the keys to which the last queries of any long sequence attend, or None; a hint.

        Only for patterns that accept any length: decode steps of all lengths then share one plan.

        Parameters
        ----------
        q_len : int
            Number of queries, which have the last positions of the sequence.

        Returns
        -------
        Ends or None
        """
        return None

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        """Check the lengths, and return the pattern for these lengths.

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
            If the pattern does not support these lengths.
        """
        return self

    def sizes(self) -> tuple[int, int]:
        """Return the number of batch entries and of heads that have separate patterns; 1 = shared, 0 = any number.

        Returns
        -------
        (int, int)
        """
        return 1, 1

    def grids(self) -> frozenset[tuple[int, ...]]:
        """Return the token grids of the pattern, each as tokens per axis; empty for plain sequences.

        Returns
        -------
        frozenset of tuple of int
            If there is exactly one grid, arrays may have its axes in place of the length axis.
        """
        return frozenset()

    def at(self, batch: int, head: int) -> Pattern:
        """Return the pattern of one batch entry and one head.

        Parameters
        ----------
        batch, head : int
            Indices below :meth:`sizes`.

        Returns
        -------
        Pattern
            With :meth:`sizes` (1, 1).

        Raises
        ------
        ValueError
            If an index is out of range.
        """
        return self

    def variants(self, batch: int, heads: int) -> tuple[list[Pattern], np.ndarray]:
        """Return the distinct patterns of a call, and the index of the pattern of each (batch entry, head).

        Parameters
        ----------
        batch, heads : int
            Batch entries and query heads of the call.

        Returns
        -------
        patterns : list of Pattern
        index : (batch or 1, heads or 1) int32 array
        """
        own_batch, own_heads = self._sizes_in(batch, heads)
        expanded = self._for_heads(heads)
        own_heads = expanded.sizes()[1]
        number: dict[Pattern, int] = {}
        index = np.array(
            [
                [number.setdefault(expanded.at(b, h), len(number)) for h in range(own_heads or heads)]
                for b in range(own_batch or batch)
            ],
            dtype=np.int32,
        ).reshape(own_batch or batch, own_heads or heads)
        if own_heads > 1:
            index = np.repeat(index, heads // own_heads, axis=1)
        return list(number), index

    def _sizes_in(self, batch: int, heads: int) -> tuple[int, int]:
        """Return :meth:`sizes`; raise ValueError unless they fit a call."""
        own_batch, own_heads = self.sizes()
        if own_batch not in (0, 1, batch):
            raise ValueError(f"pattern: expected one for {batch} batch entries, got one for {own_batch}")
        if own_heads > 1 and heads % own_heads:
            raise ValueError(f"pattern: expected one for a divisor of {heads} heads, got one for {own_heads} heads")
        return own_batch, own_heads

    def _for_heads(self, heads: int) -> Pattern:
        """Expand operands that accept any number of heads to one pattern per head, for a call of `heads` heads.

        This is needed if another operand has fewer patterns than `heads`, each for a group of heads.
        """
        changed: dict[str, Any] = {}
        for name in getattr(self, "__dataclass_fields__", ()):  # a user's class may not be a dataclass
            value = getattr(self, name)
            several = type(value) is tuple
            inner = [p for p in (value if several else (value,)) if isinstance(p, Pattern)]
            made = tuple(p._for_heads(heads) for p in inner)
            if any(new is not old for new, old in zip(made, inner, strict=True)):
                changed[name] = made if several else made[0]
        return dataclasses.replace(self, **changed) if changed else self

    def index_set(self, q_len: int, kv_len: int, *, batch: int = 0, head: int = 0) -> AffineRows:
        """Return the exact index set; query row i has position ``i + kv_len - q_len``.

        Parameters
        ----------
        q_len, kv_len : int
            Lengths in tokens.
        batch, head : int, optional
            Batch entry and head, for patterns that differ between them.

        Returns
        -------
        AffineRows

        Raises
        ------
        ValueError
            If a length is not an integer in [0, 2^31), or the pattern does not support the lengths, batch entry or
            head.
        TypeError
            If :meth:`allows` returns anything but bools of the shape of its arguments.
        """
        return untraced(_index_set, self.at(batch, head), *check_lengths(q_len, kv_len))

    def _candidates(self, q: np.ndarray, kv_len: int) -> list[Runs] | None:
        """Return runs that together contain every allowed pair, or None if no such runs are known."""
        runs = Runs.single(*self._pairs(q, kv_len), len(q)) if self._lists_pairs else self.runs(q, kv_len)
        return None if runs is None else [runs]

    def _row_program(self) -> Program | None:
        """Return the allowed keys of each row in closed form, for sequences of any length, or None; a hint."""
        return None

    def _rows(self, asked: AskedRows) -> np.ndarray:
        """Implement :meth:`.rows.AskedRows.of` for patterns without a row program."""
        return asked.in_parts(self, Pattern._rows)

    def _bands(self, first: int, stop: int) -> tuple[Bands, ...] | None:
        """Return interval conjuncts whose intersection is the pattern for queries at ``[first, stop)``, or None."""
        return None

    def _in_order(self, also: Pattern | None = None) -> Ordered | None:
        """Return this bound pattern (``& also``) under a token permutation that clusters its pairs, or None."""
        return None

    def _pairs(self, q: np.ndarray, kv_len: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (index into `q`, key) of every allowed pair, sorted; only called if :attr:`_lists_pairs`."""
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
        return NotImplemented if other is None else self & other.__invert__()  # torch.compile lacks ~

    def __rsub__(self, other: Any) -> Pattern:
        return _joined("&", other, ~self)

    def __invert__(self) -> Pattern:
        return OPERATORS["~"].of(self)

    def __bool__(self) -> bool:
        raise TypeError("a pattern has no truth value: use & and | instead of 'and' and 'or'")


def _index_set(pattern: Pattern, q_len: int, kv_len: int) -> AffineRows:
    bound = pattern.bind(q_len, kv_len)
    q = np.arange(q_offset(q_len, kv_len), kv_len, dtype=np.int64)
    if bound._lists_pairs:
        row, key = bound._pairs(q, kv_len)
        return AffineRows.from_csr(offsets(np.bincount(row, minlength=q_len)), key, kv_len)
    runs = bound.runs(q, kv_len)
    return AffineRows.from_runs(runs, kv_len) if runs is not None else evaluate(bound, q, kv_len)


def _operand(value: Any) -> Pattern | None:
    """Convert an operand to a pattern; return None for a dynamic mask, which has the operator itself."""
    if isinstance(value, Pattern):
        return value
    if hasattr(type(value), "to_host"):
        return None
    if compiling():
        return value() if isinstance(value, type) else Deferred.call("", "as_pattern", (value,), {"name": "operand"})
    found: Pattern = CONVERSIONS["as_pattern"](value, name="operand")
    return found


def _joined(symbol: str, left: Any, right: Any) -> Pattern:
    one, other = _operand(left), _operand(right)
    if one is None or other is None:
        return NotImplemented
    if compiling() or isinstance(one, Deferred) or isinstance(other, Deferred):  # equal only by their values
        return Deferred.call(symbol, None, (one, other), {})
    return OPERATORS[symbol].of(one, other)


class Deferred(Pattern):
    """The call of a constructor that a traced program runs later, because its arrays have no values yet.

    `target` is a registered name or an operator, `make` a constructor of its class, None for the class itself. Without
    a target, `make` is a conversion of :mod:`spattn.patterns.conversion`. Outside of the arguments of attention(), a
    call is the pattern that it makes: torch.compile breaks the graph there, and for JAX it is an error.
    """

    target: str
    make: str | None
    args: tuple[Any, ...]
    names: tuple[str, ...]
    values: tuple[Any, ...]

    @staticmethod
    def call(target: str, make: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Deferred:
        made: Deferred = object.__new__(Deferred)
        for name, value in (("target", target), ("make", make), ("args", args)):
            object.__setattr__(made, name, value)
        object.__setattr__(made, "names", tuple(kwargs.keys()))
        object.__setattr__(made, "values", tuple(kwargs.values()))
        return made

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in Deferred.__annotations__:
            raise AttributeError(name)
        return untraced(_of_made, self, name)

    def __eq__(self, other: Any) -> Any:
        return self is other or untraced(_same, self, other)

    def __hash__(self) -> int:
        made = untraced(CONVERSIONS["as_pattern"], self)
        return id(self) if made is self else hash(made)

    def __repr__(self) -> str:
        return f"{'.'.join(filter(None, (self.target, self.make)))}(...)"


def _of_made(deferred: Deferred, name: str) -> Any:
    """Return an attribute of the pattern of a call whose arrays have values."""
    return getattr(_made(deferred), name)


def _call_made(deferred: Deferred, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return getattr(_made(deferred), name)(*args, **options)


def _made(deferred: Deferred) -> Pattern:
    made: Pattern = CONVERSIONS["as_pattern"](deferred)
    if made is deferred:
        raise TypeError(
            "pattern: expected a plain array, got a tracer, which has no values; call this outside of jax.jit, "
            "torch.export and vmap, or pass the pattern to attention()"
        )
    return made


def _same(deferred: Deferred, other: Any) -> bool:
    return bool(_made(deferred) == (_made(other) if isinstance(other, Deferred) else other))


def _delegate(name: str) -> None:
    def call(self: Deferred, *args: Any, **options: Any) -> Any:
        return untraced(_call_made, self, name, args, options)

    setattr(Deferred, name, call)


for _name in "allows runs parts ends bind sizes grids at variants index_set to_json".split():
    _delegate(_name)
for _name in "_for_heads _candidates _bands _in_order _pairs _description _serialized".split():
    _delegate(_name)


def deferrable(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a constructor of a pattern, which a traced program calls later if its arrays have no values yet."""
    name = method.__name__
    CONSTRUCTORS.add(name)

    @functools.wraps(method)
    def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return (
            Deferred.call(cls.name, name, args, kwargs)
            if defers(*args, *kwargs.values())
            else method(cls, *args, **kwargs)
        )

    return call


def defers(*arguments: Any) -> bool:
    """Whether a pattern of these arguments is a :class:`Deferred` one."""
    if compiling():  # first: torch.compile cannot trace the rest
        return True
    for value in arguments:  # a loop: steps of generation make patterns
        if type(value) is not int and _is_unknown(value):
            return True
    return False


def _is_unknown(value: Any) -> bool:
    if type(value) is int:
        return False
    if isinstance(value, (tuple, list)):  # long ones are sequences of Python's integers
        return set(map(type, value)) != {int} and any(map(_is_unknown, value))
    if isinstance(value, Pattern):
        return isinstance(value, Deferred)
    return unknown(value)
