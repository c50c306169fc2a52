"""What a pattern is: a predicate over positions, closed under ``| & - ~``, with optional hints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from ..index_set import AffineRows, Runs

__all__ = ["Lattice", "Part", "Pattern", "apply", "from_dict", "get", "member", "names", "register"]

PatternClass = TypeVar("PatternClass", bound="type[Pattern]")

_CELLS_AT_ONCE = 1 << 20  # cells of q_len × kv_len evaluated at once where a pattern has no closed form


class Lattice(NamedTuple):
    """An affine lattice of positions: ``offset + Σ strides[a]·c_a, 0 ≤ c_a < extents[a]``, at most three axes.

    Parameters
    ----------
    offset : int
        Position of the first point.
    strides : tuple of int
        Distance in tokens of neighbours along each axis.
    extents : tuple of int
        Points along each axis.
    """

    offset: int
    strides: tuple[int, ...]
    extents: tuple[int, ...]


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
    """

    pattern: Pattern
    query: Lattice | None = None
    key: Lattice | None = None
    shifts: tuple[tuple[int, int], ...] = ((0, 0),)


class Pattern:
    """A set of allowed (query, key) position pairs.

    Subclasses are frozen dataclasses. They define :meth:`allows`; everything else is a hint that must agree with it.
    """

    name: ClassVar[str] = ""
    translation_invariant: ClassVar[bool] = False
    """True when ``allows(q + t, k + t) == allows(q, k)`` for every t."""

    def allows(self, q: Any, k: Any) -> Any:
        """Whether query position `q` may attend to key position `k` (integer arrays, broadcast together).

        Uses only operators, NumPy ufuncs and :func:`spattn.patterns.apply`, so that the planner can evaluate it on
        whole tiles at once.

        Parameters
        ----------
        q, k : int or int array
            Positions, at least 0; while planning, an object with the same operators.

        Returns
        -------
        bool or bool array
            Of the broadcast shape of `q` and `k`.
        """
        raise NotImplementedError

    def runs(self, q: np.ndarray, kv_len: int) -> Runs | None:
        """Hint: the allowed keys of query positions `q`, in closed form; None where there is none.

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
        number: dict[Pattern, int] = {}
        index = np.array(
            [
                [number.setdefault(self.at(b, h), len(number)) for h in range(own_heads or heads)]
                for b in range(own_batch or batch)
            ],
            dtype=np.int32,
        ).reshape(own_batch or batch, own_heads or heads)
        if own_heads > 1:
            index = np.repeat(index, heads // own_heads, axis=1)
        return list(number), index

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
            If a length is no integer or negative, or the pattern does not fit the lengths, batch entry or head.
        """
        check_lengths(q_len, kv_len)
        bound = self.at(batch, head).bind(q_len, kv_len)
        q = np.arange(kv_len - q_len, kv_len, dtype=np.int64)
        runs = bound.runs(q, kv_len)
        return AffineRows.from_runs(runs, kv_len) if runs is not None else _discover(bound, q, kv_len)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able description; :func:`spattn.patterns.from_dict` reads it back.

        Returns
        -------
        dict
            Integers, text, lists and dicts only.
        """
        return {"pattern": self.name} | {f.name: _encode(getattr(self, f.name)) for f in dataclasses.fields(self)}

    def __and__(self, other: Pattern) -> Pattern:
        return And(self, other) if isinstance(other, Pattern) else NotImplemented

    def __or__(self, other: Pattern) -> Pattern:
        return Or(self, other) if isinstance(other, Pattern) else NotImplemented

    def __sub__(self, other: Pattern) -> Pattern:
        return And(self, Not(other)) if isinstance(other, Pattern) else NotImplemented

    def __invert__(self) -> Pattern:
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError("a pattern has no truth value: use & and | instead of 'and' and 'or'")


def check_lengths(q_len: int, kv_len: int) -> None:
    """ValueError unless both are non-negative integers."""
    for what, length in (("q_len", q_len), ("kv_len", kv_len)):
        if not isinstance(length, (int, np.integer)) or isinstance(length, bool) or length < 0:
            raise ValueError(f"{what}: expected an integer >= 0, got {length!r}")


def apply(function: Callable[[np.ndarray], np.ndarray], positions: Any) -> Any:
    """``function(positions)`` for a function that NumPy has no operator for (a table look-up, a search).

    `function` maps an integer array of positions elementwise to an array of the same shape.

    Parameters
    ----------
    function : callable
        Maps an int64 array of positions to an array of the same shape, elementwise.
    positions : int or int array
        What :meth:`Pattern.allows` was given, or computed from one side of it.

    Returns
    -------
    array
        While planning, an object with the same operators.
    """
    each = getattr(positions, "map", None)
    return each(function) if each is not None else function(positions)


def member(table: np.ndarray, positions: Any) -> Any:
    """Whether each position, or difference of positions, is in the sorted integer array `table`.

    Parameters
    ----------
    table : (n,) int64 array
        Sorted, without repeats.
    positions : int or int array
        What :meth:`Pattern.allows` was given, or a difference of both.

    Returns
    -------
    bool array
        While planning, an object with the same operators.
    """
    decide = getattr(positions, "member", None)
    return decide(table) if decide is not None else np.isin(positions, table)


def _discover(pattern: Pattern, q: np.ndarray, kv_len: int) -> AffineRows:
    """Evaluates the predicate strip by strip, on the keys that a closed form leaves over; bounded memory."""
    rows = max(1, _CELLS_AT_ONCE // max(kv_len, 1))
    counts, columns = [np.zeros(1, np.int64)], [np.zeros(0, np.int64)]
    for first in range(0, len(q), rows):
        strip = q[first : first + rows]
        row, column = _candidates(pattern, strip, kv_len)
        keep = np.broadcast_to(pattern.allows(strip[row], column), row.shape)
        counts.append(np.bincount(row[keep], minlength=len(strip)))
        columns.append(column[keep])
    return AffineRows.from_csr(np.cumsum(np.concatenate(counts)), np.concatenate(columns), kv_len)


def _candidates(pattern: Pattern, q: np.ndarray, kv_len: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, key) pairs, sorted, that contain every pair the pattern allows; as few as the closed forms let us know."""
    runs = pattern.runs(q, kv_len)
    if runs is not None:
        indptr, column = AffineRows.from_runs(runs, kv_len).to_csr()
        return np.repeat(np.arange(len(q)), np.diff(indptr)), column
    if isinstance(pattern, And):
        return min((_candidates(p, q, kv_len) for p in pattern.operands()), key=lambda pairs: len(pairs[0]))
    if isinstance(pattern, Or):
        codes = [row * kv_len + column for row, column in (_candidates(p, q, kv_len) for p in pattern.operands())]
        return np.divmod(np.unique(np.concatenate(codes)), kv_len) if kv_len else (codes[0], codes[0])
    return np.divmod(np.arange(len(q) * kv_len), kv_len) if kv_len else (np.zeros(0, np.int64),) * 2


# -- composition -----------------------------------------------------------------------------------------------------


def _joint_size(sizes: list[int]) -> int:
    """The size that serves every operand: 1 gives way to all, a smaller divisor to its multiple."""
    largest = max(sizes)
    if 0 in sizes and largest <= 1:
        return 0
    for size in sizes:
        if size and largest % size:
            made_for = sorted(set(sizes))
            raise ValueError(f"pattern: its parts are made for {made_for} heads or batch entries, which do not fit")
    return largest


class _Composite(Pattern):
    """Shared by the operators: everything but the predicate goes through to the operands."""

    symbol: ClassVar[str] = ""

    def operands(self) -> tuple[Pattern, ...]:
        return tuple(getattr(self, f.name) for f in dataclasses.fields(self))

    def bind(self, q_len, kv_len):
        return type(self)(*(p.bind(q_len, kv_len) for p in self.operands()))

    def sizes(self):
        batch, heads = zip(*(p.sizes() for p in self.operands()), strict=True)
        return _joint_size(list(batch)), _joint_size(list(heads))

    def at(self, batch, head):
        heads = self.sizes()[1]

        def own(p):
            size = p.sizes()
            return p.at(batch if size[0] != 1 else 0, head * size[1] // heads if size[1] and heads else head)

        return type(self)(*(own(p) for p in self.operands()))

    @property
    def translation_invariant(self):
        return all(p.translation_invariant for p in self.operands())

    def to_dict(self):
        return {"pattern": self.symbol, "operands": [p.to_dict() for p in self.operands()]}


@dataclass(frozen=True, repr=False)
class Or(_Composite):
    """Pairs allowed by either operand."""

    left: Pattern
    right: Pattern
    symbol = "|"

    def allows(self, q, k):
        return self.left.allows(q, k) | self.right.allows(q, k)

    def parts(self, q_len, kv_len):
        left, right = self.left.parts(q_len, kv_len), self.right.parts(q_len, kv_len)
        if _whole(left) and _whole(right):
            return (Part(self),)
        return left + tuple(piece for p in right for piece in _filtered(p, Not(self.left)))

    def __repr__(self):
        return f"({self.left!r} | {self.right!r})"


@dataclass(frozen=True, repr=False)
class And(_Composite):
    """Pairs allowed by both operands."""

    left: Pattern
    right: Pattern
    symbol = "&"

    def allows(self, q, k):
        return self.left.allows(q, k) & self.right.allows(q, k)

    def parts(self, q_len, kv_len):
        left, right = self.left.parts(q_len, kv_len), self.right.parts(q_len, kv_len)
        if _whole(left) and _whole(right):
            return (Part(self),)
        dense, other = (right, self.left) if _whole(left) else (left, self.right)
        return tuple(piece for p in dense for piece in _filtered(p, other))

    def __repr__(self):
        if isinstance(self.right, Not):
            return f"({self.left!r} - {self.right.operand!r})"
        return f"({self.left!r} & {self.right!r})"


@dataclass(frozen=True, repr=False)
class Not(_Composite):
    """Pairs that the operand does not allow."""

    operand: Pattern
    symbol = "~"

    def allows(self, q, k):
        allowed = self.operand.allows(q, k)
        return (not allowed) if isinstance(allowed, bool) else ~allowed  # Python integers compare to Python's bool

    def __repr__(self):
        return f"~{self.operand!r}"


def _whole(parts: tuple[Part, ...]) -> bool:
    return all(p.query is None and p.key is None for p in parts)


def _filtered(part: Part, other: Pattern) -> tuple[Part, ...]:
    """The part's pairs that `other` allows too; its shifts stay together only where `other` cannot tell them apart."""
    pattern = And(part.pattern, other)
    if len(part.shifts) == 1 or other.translation_invariant:
        return (part._replace(pattern=pattern),)
    return tuple(Part(pattern, _moved(part.query, dq), _moved(part.key, dk)) for dq, dk in part.shifts)


def _moved(lattice: Lattice | None, by: int) -> Lattice | None:
    return lattice._replace(offset=lattice.offset + by) if lattice is not None else None


# -- registry and serialisation --------------------------------------------------------------------------------------

_REGISTRY: dict[str, type[Pattern]] = {}
_OPERATORS: dict[str, type[_Composite]] = {c.symbol: c for c in (Or, And, Not)}
_LARGEST_ARRAY = 1 << 28
_DEEPEST = 64


def register(name: str) -> Callable[[PatternClass], PatternClass]:
    """Class decorator: makes a pattern known by `name` to :func:`get`, the tests, the benchmarks and the gallery.

    Parameters
    ----------
    name : str
        What :func:`get` finds it under.

    Returns
    -------
    callable
        The decorator; it returns the class.

    Raises
    ------
    ValueError
        From the decorator, if another class has the name.
    """

    def add(cls: PatternClass) -> PatternClass:
        if _REGISTRY.get(name, cls).__qualname__ != cls.__qualname__:
            raise ValueError(f"name: {name!r} is already registered for {_REGISTRY[name].__name__}")
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return add


def names() -> list[str]:
    """Registered names, sorted.

    Returns
    -------
    list of str
    """
    return sorted(_REGISTRY)


def pattern_class(name: str) -> type[Pattern]:
    """The class registered under `name`."""
    if not isinstance(name, str) or name not in _REGISTRY:
        raise ValueError(f"pattern: expected one of {', '.join(names())}; got {name!r}")
    return _REGISTRY[name]


def get(name: str, **params: Any) -> Pattern:
    """The pattern registered under `name`, made with `params`.

    Parameters
    ----------
    name : str
        One of :func:`names`.
    **params
        Parameters of the pattern's class.

    Returns
    -------
    Pattern

    Raises
    ------
    ValueError
        If the name is unknown or a parameter is out of range.
    TypeError
        If a parameter is missing or unknown.
    """
    return pattern_class(name)(**params)


def from_dict(data: dict[str, Any]) -> Pattern:
    """Reads what :meth:`Pattern.to_dict` wrote; safe on untrusted data.

    Parameters
    ----------
    data : dict
        As read from JSON.

    Returns
    -------
    Pattern
        Equal to the one described.

    Raises
    ------
    ValueError
        If `data` is not such a description.
    """
    return _decode_pattern(data, depth=0)


def _decode_pattern(data, depth: int) -> Pattern:
    if not isinstance(data, dict) or not isinstance(data.get("pattern"), str):
        raise ValueError(f"data: expected a dict with a 'pattern' name, got {str(data)[:80]!r}")
    if depth > _DEEPEST:
        raise ValueError(f"data: patterns nested more than {_DEEPEST} deep")
    fields = {k: v for k, v in data.items() if k != "pattern"}
    if data["pattern"] in _OPERATORS:
        operands = fields.get("operands")
        cls = _OPERATORS[data["pattern"]]
        wanted = len(dataclasses.fields(cls))
        if set(fields) != {"operands"} or not isinstance(operands, list) or len(operands) != wanted:
            raise ValueError(f"data: expected {wanted} operands of {data['pattern']!r}")
        return cls(*(_decode_pattern(o, depth + 1) for o in operands))
    cls = pattern_class(data["pattern"])
    known = {f.name for f in dataclasses.fields(cls)}
    if not set(fields) <= known:
        raise ValueError(f"data: {data['pattern']} has the fields {sorted(known)}, got {sorted(fields)}")
    try:
        return cls(**{k: _decode(v, depth + 1) for k, v in fields.items()})
    except TypeError as error:
        raise ValueError(f"data: {error}") from error


def _encode(value):
    if isinstance(value, Pattern):
        return value.to_dict()
    if isinstance(value, np.ndarray):
        packed = np.packbits(value) if value.dtype == bool else value
        return {"array": packed.tobytes().hex(), "dtype": value.dtype.name, "shape": list(value.shape)}
    if isinstance(value, (tuple, list)):
        return [_encode(v) for v in value]
    return value.item() if isinstance(value, np.generic) else value


def _decode(value, depth: int):
    if isinstance(value, dict):
        return _decode_array(value) if "array" in value else _decode_pattern(value, depth)
    if isinstance(value, list):
        if depth > _DEEPEST:
            raise ValueError(f"data: lists nested more than {_DEEPEST} deep")
        return tuple(_decode(v, depth + 1) for v in value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise ValueError(f"data: expected integers, text, lists or patterns, got {value!r}")


def _decode_array(value: dict) -> np.ndarray:
    try:
        shape = tuple(int(n) for n in value["shape"])
        dtype = np.dtype({"bool": bool, "int32": np.int32, "int64": np.int64}[value["dtype"]])
        if any(n < 0 for n in shape) or math.prod(shape) > _LARGEST_ARRAY:
            raise ValueError(f"data: expected an array of at most {_LARGEST_ARRAY} elements, got shape {shape}")
        raw = np.frombuffer(bytes.fromhex(value["array"]), dtype=np.uint8 if dtype.kind == "b" else dtype)
    except (KeyError, TypeError) as error:
        raise ValueError(f"data: expected an array of bool, int32 or int64, got {str(value)[:80]}") from error
    if dtype.kind == "b" and raw.size == -(-math.prod(shape) // 8):  # unpackbits would make up missing bits
        raw = np.unpackbits(raw, count=math.prod(shape)).astype(bool)
    if raw.dtype != dtype or raw.size != math.prod(shape):
        raise ValueError(f"data: expected {math.prod(shape)} elements for shape {shape}, got {raw.size}")
    return raw.reshape(shape)
