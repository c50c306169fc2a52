"""Base classes of patterns with array fields."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..._util.cached import cached_property
from ..._util.frozen import content, frozen, frozen_part
from ..._util.imports import whole_imports
from ..._util.index_checks import integer_array, plain_array
from ...arrays import NUMPY, namespace_of, to_host, unknown
from .check import WRITEABLE, assign, integer
from .pattern import Pattern

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["ArrayPattern", "Bound", "ByContent", "dynamic", "frozen_array", "on_device", "on_host"]


def frozen_array(name: str, value: Any, dtype: npt.DTypeLike, ndims: tuple[int, ...]) -> np.ndarray:
    """Convert an array of any framework to a read-only, C-contiguous NumPy array; read-only input is not copied."""
    if unknown(value):
        raise TypeError(
            f"{name}: got an array that JAX traces, which has no values yet; spattn.jax.attention takes patterns that "
            "their own class creates from it, as Documents, KeyPadding, Clusters, RowIntervals and Mask"
        )
    value = on_host(value)
    array = plain_array(name, value) if dtype is bool else integer_array(name, value, dtype)
    if dtype is bool and array.dtype != bool:
        raise TypeError(f"{name}: expected an array of dtype bool, got {array.dtype}")
    if array.ndim not in ndims:
        raise ValueError(f"{name}: expected {' or '.join(f'{n}-D' for n in ndims)}, got shape {array.shape}")
    return frozen(array)


def on_device(value: Any) -> bool:
    """Return True if `value` is a device array that a dynamic mask can read."""
    library = namespace_of(value)
    return library is not None and library.name != "jax" and library.ordinal(value) is not None


def dynamic(name: str, *fields: Any) -> Any:
    """Create a pattern of :mod:`spattn.patterns.dynamic` from device arrays."""
    with whole_imports:
        from .. import dynamic as module

    return getattr(module, name)(*fields)


def on_host(value: Any) -> Any:
    """Convert an array of another framework to NumPy; return anything else, masked arrays included, unchanged."""
    return value if namespace_of(value) in (None, NUMPY) else to_host(value)


class ByContent:
    """Mixin for patterns with array fields, which copies the arrays read-only and compares them by value.

    List it before :class:`Pattern`, and declare the dataclass with ``@dataclass(frozen=True, eq=False, repr=False)``:
    this class defines equality, hash and repr. Arrays of any framework become NumPy arrays. Equal patterns share plans.

    Raises
    ------
    TypeError
        If an array is a masked array.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> import numpy as np
    >>> from spattn.patterns import Pattern
    >>> from spattn.patterns.authoring import ByContent, apply
    >>> @dataclass(frozen=True, eq=False, repr=False)
    ... class Speakers(ByContent, Pattern):
    ...     '''Keys of the query's speaker.'''
    ...     speaker: np.ndarray
    ...     def allows(self, q, k):
    ...         return apply(lambda t: self.speaker[t], q) == apply(lambda t: self.speaker[t], k)
    >>> pattern = Speakers(np.array([0, 1, 0, 1]))
    >>> pattern
    Speakers(speaker=<int64 (4,)>)
    >>> pattern == Speakers(np.array([0, 1, 0, 1])), pattern.index_set(4, 4).row(3)
    (True, array([1, 3]))
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if namespace_of(value) is not None:
                assign(self, **{field.name: frozen(plain_array(field.name, on_host(value)))})
        super().__post_init__()  # type: ignore[misc]

    @cached_property
    def _hash(self) -> int:  # cached: every call and every enclosing composition hashes the pattern
        return hash((type(self).__qualname__, *map(_hash_of, self._fields())))

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        if self is other:
            return True
        if hash(self) != hash(other):
            return False
        return all(map(_same, self._fields(), other._fields()))

    def __getstate__(self) -> dict[str, Any]:  # without the hash, which differs between processes
        return {name: x for name, x in vars(self).items() if name != "_hash" and not name.startswith(WRITEABLE)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        assign(self, **state)

    def _fields(self) -> list[Any]:
        return [getattr(self, name) for name in self.__dataclass_fields__]

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        def show(value: Any) -> str:
            return f"<{value.dtype} {value.shape}>" if isinstance(value, np.ndarray) else repr(value)

        fields = ", ".join(f"{f.name}={show(getattr(self, f.name))}" for f in dataclasses.fields(self))
        return f"{type(self).__name__}({fields})"


def _hash_of(value: Any) -> int:
    if not isinstance(value, np.ndarray):
        return hash(value if isinstance(value, Pattern) else repr(value))
    bits = np.packbits(value) if value.dtype == bool else value  # hashes an eighth of the bytes
    return hash((value.dtype.str, value.shape, content(bits)))


def _same(one: Any, other: Any) -> bool:
    """Compare arrays bitwise, and other fields by value and by repr, which distinguishes 1 from True."""
    if not isinstance(one, np.ndarray) or not isinstance(other, np.ndarray):
        return bool(one == other) and repr(one) == repr(other)
    return one.dtype == other.dtype and one.shape == other.shape and content(one) == content(other)


@dataclass(frozen=True, repr=False)
class Bound(Pattern):
    """Base class of bound patterns with one row of data per query.

    `given` is the unbound pattern, `first` the position of row 0.
    """

    given: Any
    first: int

    def sizes(self) -> tuple[int, int]:
        sizes: tuple[int, int] = self.given.sizes()
        return sizes

    def at(self, batch: int, head: int) -> Pattern:
        return replace(self, given=self.given.at(batch, head))

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        pattern: Pattern = self.given.bind(q_len, kv_len)
        return pattern

    def _description(self) -> dict[str, Any]:
        description: dict[str, Any] = self.given._description()
        return description

    def __repr__(self) -> str:
        return repr(self.given)


class ArrayPattern(ByContent, Pattern):
    """Base class of patterns with array fields ``([[batch,] heads,] ...)``, where `own_axes` axes follow the heads."""

    own_axes: ClassVar[int] = 2

    @staticmethod
    def _leading(draw: Any, sizes: Any, heads: int) -> tuple[int, ...]:
        """Draw leading axes: none, heads, or batch and heads, each possibly of size 1."""
        return draw.choice([(), (1,), (heads,), (1, heads), (sizes.batch, 1), (sizes.batch, heads)])

    def _freeze(self, dtype: npt.DTypeLike, *names: str) -> None:
        """Freeze the named array fields and check that their shapes are equal."""
        shape = None
        for name in names:
            array = frozen_array(name, getattr(self, name), dtype, tuple(range(self.own_axes, self.own_axes + 3)))
            if shape not in (None, array.shape):
                raise ValueError(f"{name}: expected shape {shape}, got {array.shape}")
            assign(self, **{name: array})
            shape = array.shape

    def _arrays(self) -> dict[str, np.ndarray]:
        fields = ((name, getattr(self, name)) for name in self.__dataclass_fields__)
        return {name: value for name, value in fields if isinstance(value, np.ndarray)}

    def _with(self, arrays: dict[str, np.ndarray]) -> Pattern:
        """Return a copy with other arrays, without checks."""
        made = object.__new__(type(self))
        assign(made, **{name: getattr(self, name) for name in self.__dataclass_fields__} | arrays)
        return made

    def sizes(self) -> tuple[int, int]:
        for name in self.__dataclass_fields__:  # a loop: steps of generation ask
            first = getattr(self, name)
            if isinstance(first, np.ndarray):
                break
        return (1, 1, *first.shape)[-self.own_axes - 2 : -self.own_axes]

    def at(self, batch: int, head: int) -> Pattern:
        sizes = self.sizes()
        where = tuple(
            integer(name, number, 0, size - 1) if size != 1 else 0
            for name, number, size in zip(("batch", "head"), (batch, head), sizes, strict=True)
        )
        arrays = self._arrays()
        own = {name: self._one(array, where) for name, array in arrays.items()}
        return self if all(own[name] is array for name, array in arrays.items()) else self._with(own)

    def _bound(self) -> Pattern:
        """Return an equal copy for planning: its cached lookup table is freed with the plan, not with `self`."""
        bound = self._with({})
        vars(bound)["_hash"] = hash(self)
        return bound

    def _one(self, array: np.ndarray, where: tuple[int, ...] = (0, 0)) -> np.ndarray:
        """Return the array of one batch entry and head."""
        leading = array.ndim - self.own_axes
        return frozen_part(array, where[2 - leading :]) if leading else array

    def _rows_of(self, array: np.ndarray, row: np.ndarray, nothing: Any) -> np.ndarray:
        """Return rows of all batch entries and heads, (batch or 1, heads or 1, queries, n).

        `row`, (batch or 1, heads or 1, queries), numbers them; rows out of range are filled with `nothing`.
        """
        batch, heads = self.sizes()
        each, rows = array.reshape(batch, heads, *array.shape[-2:]), array.shape[-2]
        if not rows:
            return np.full((batch, heads, row.shape[-1], array.shape[-1]), nothing, array.dtype)
        known = np.minimum(np.maximum(row, 0), rows - 1)  # faster than np.clip
        found: np.ndarray = each[np.arange(batch)[:, None, None], np.arange(heads)[:, None], known]
        inside = (row >= 0) & (row < rows)
        return found if inside.all() else np.where(inside[..., None], found, nothing)

    def _only(self, array: np.ndarray) -> np.ndarray:
        if (sizes := self.sizes()) != (1, 1):
            batch, heads = sizes
            raise ValueError(
                f"{type(self).__name__}: expected the pattern of one batch entry and head, got {batch} batch entries "
                f"and {heads} heads; use .at(batch, head)"
            )
        return self._one(array)
