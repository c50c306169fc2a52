"""Lock-free cached properties and a small bounded cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

__all__ = ["BoundedCache", "cached_property"]

T = TypeVar("T")


class cached_property(Generic[T]):
    """A property that is computed at its first use and stored in the instance's ``__dict__``.

    Up to Python 3.11, :class:`functools.cached_property` takes a lock: a child that is forked while another thread
    holds the lock deadlocks. Without a lock, two threads may both compute the value; the first one is kept.
    """

    def __init__(self, function: Callable[[Any], T]):
        self.function = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[T]: ...

    @overload
    def __get__(self, instance: object, owner: type | None = None) -> T: ...

    def __get__(self, instance: object, owner: type | None = None) -> cached_property[T] | T:
        return self if instance is None else vars(instance).setdefault(self.name, self.function(instance))


class BoundedCache(dict[Any, Any]):
    """A cache of recomputable values: :meth:`keep` first empties it if it has `most` keys."""

    def __init__(self, most: int):
        super().__init__()
        self.most = most

    def keep(self, key: Any, value: Any) -> Any:
        """Store `value` unless the key is present; return the stored value."""
        if len(self) >= self.most:
            self.clear()
        return self.setdefault(key, value)
