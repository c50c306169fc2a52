"""Patterns whose fields are arrays: read-only copies, compared by what they hold."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from .._cached import cached_property
from .._frozen import frozen
from .._imports import whole_imports
from .._index_checks import integer_array, plain_array
from ..arrays import NUMPY, kind_of, to_host
from ._check import assign

__all__ = ["ByContent", "frozen_array", "on_host"]


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


def on_host(value: Any) -> Any:
    """An array of another framework as NumPy's; anything else, masked arrays among it, as it is."""
    return value if kind_of(value) in (None, NUMPY) else to_host(value)


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
            if kind_of(value) is not None:
                assign(self, **{field.name: frozen(plain_array(field.name, on_host(value)))})
        super().__post_init__()  # type: ignore[misc]

    @cached_property
    def _digest(self) -> bytes:
        with whole_imports:
            import hashlib  # with OpenSSL's modules, for arrays alone
        digest = hashlib.blake2b(digest_size=16)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                digest.update(f"{field.name}:{value.dtype.str}{value.shape}".encode())
                content = np.packbits(value) if value.dtype == bool else value  # an eighth of it to go through
                digest.update(content.data if value.size else b"")
            else:
                digest.update(f"{field.name}={value!r};".encode())
        return digest.digest()

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._digest == other._digest and self._plain_fields() == other._plain_fields()

    def _plain_fields(self) -> list[Any]:
        """What is no array: a pattern among it may hold more than it is written as."""
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return [value for value in values if not isinstance(value, np.ndarray)]

    def __hash__(self) -> int:
        return hash((type(self).__qualname__, self._digest))

    def __repr__(self) -> str:
        def show(value: Any) -> str:
            return f"<{value.dtype} {value.shape}>" if isinstance(value, np.ndarray) else repr(value)

        fields = ", ".join(f"{f.name}={show(getattr(self, f.name))}" for f in dataclasses.fields(self))
        return f"{type(self).__name__}({fields})"
