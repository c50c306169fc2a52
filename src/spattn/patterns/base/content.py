"""Patterns whose fields are arrays: read-only copies, compared by what they hold."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..._util.cached import cached_property
from ..._util.frozen import content, frozen
from ..._util.index_checks import integer_array, plain_array
from ...arrays import NUMPY, namespace_of, to_host
from .check import assign

__all__ = ["ByContent", "frozen_array", "on_device", "on_host"]


def frozen_array(name: str, value: Any, dtype: npt.DTypeLike, ndims: tuple[int, ...]) -> np.ndarray:
    """A copy of an array of any framework that nobody can change, C-contiguous; its elements are copied unless nobody
    can change them.

    Raises
    ------
    TypeError
        If `value` is a masked array or has another kind of dtype: bool for `dtype` bool, integers otherwise.
    ValueError
        If its number of axes is not among `ndims`, or a number does not fit into `dtype`.
    """
    value = on_host(value)
    array = plain_array(name, value) if dtype is bool else integer_array(name, value, dtype)
    if dtype is bool and array.dtype != bool:
        raise TypeError(f"{name}: expected an array of dtype bool, got {array.dtype}")
    if array.ndim not in ndims:
        raise ValueError(f"{name}: expected {' or '.join(f'{n}-D' for n in ndims)}, got shape {array.shape}")
    return frozen(array)


def on_device(value: Any) -> bool:
    """Whether a value is an array in device memory that a dynamic mask can read."""
    kind = namespace_of(value)
    return kind is not None and kind.name != "jax" and kind.ordinal(value) is not None


def on_host(value: Any) -> Any:
    """An array of another framework as NumPy's; anything else, masked arrays among it, as it is."""
    return value if namespace_of(value) in (None, NUMPY) else to_host(value)


class ByContent:
    """What a pattern with array fields derives from first: arrays are copied, and compared by what they hold.

    The dataclass must leave equality, hash and repr to this class: ``@dataclass(frozen=True, eq=False, repr=False)``.
    Fields that hold an array of any framework become read-only NumPy arrays; two patterns are equal, and have one plan,
    where all elements are equal.

    Raises
    ------
    TypeError
        If an array is masked, which would lose its mask.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> import numpy as np
    >>> from spattn.patterns import ByContent, Pattern, apply
    >>> @dataclass(frozen=True, eq=False, repr=False)
    ... class Speakers(ByContent, Pattern):
    ...     '''What the query's speaker said.'''
    ...     speaker: np.ndarray
    ...     def allows(self, q, k):
    ...         return apply(lambda t: self.speaker[t], q) == apply(lambda t: self.speaker[t], k)
    >>> pattern = Speakers(np.array([0, 1, 0, 1]))
    >>> pattern
    Speakers(speaker=<int64 (4,)>)
    >>> pattern == Speakers(np.array([0, 1, 0, 1])), pattern.index_set(4, 4).row(3)
    (True, array([1, 3]))
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]  # made by the decorator of subclasses

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if namespace_of(value) is not None:
                assign(self, **{field.name: frozen(plain_array(field.name, on_host(value)))})
        super().__post_init__()  # type: ignore[misc]

    @cached_property
    def _hash(self) -> int:
        """Asked for at every call and by every larger composition, and kept: an array takes time."""
        return hash((type(self).__qualname__, *map(_hash_of, self._fields())))

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        if self is other:
            return True
        if hash(self) != hash(other):
            return False
        return all(map(_same, self._fields(), other._fields()))

    def __getstate__(self) -> dict[str, Any]:
        """Without the hash, which differs from process to process."""
        return {name: value for name, value in vars(self).items() if name != "_hash"}

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
        return hash(repr(value))
    bits = np.packbits(value) if value.dtype == bool else value  # an eighth of it to go through
    return hash((value.dtype.str, value.shape, content(bits)))


def _same(one: Any, other: Any) -> bool:
    """Arrays bit by bit; of what is no array, a pattern among it may hold more than it is written as, and 1 is no
    True."""
    if not isinstance(one, np.ndarray) or not isinstance(other, np.ndarray):
        return bool(one == other) and repr(one) == repr(other)
    return one.dtype == other.dtype and one.shape == other.shape and content(one) == content(other)
