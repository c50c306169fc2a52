"""What is computed once, and what is kept for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

__all__ = ["Recent", "cached_property"]

T = TypeVar("T")


class cached_property(Generic[T]):
    """A property computed at its first use and kept in the object's ``__dict__``.

    :class:`functools.cached_property` without the lock that it has up to Python 3.11: all objects of a class share that
    one, and a child forked while another thread holds it waits for it for ever. Threads that meet here may both
    compute; the first result stays.
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


class Recent(dict[Any, Any]):
    """What can be made again, for at most `most` keys: it forgets everything when it is full."""

    def __init__(self, most: int):
        super().__init__()
        self.most = most

    def keep(self, key: Any, value: Any) -> Any:
        """Keeps a value; returns the one that was there first."""
        if len(self) >= self.most:
            self.clear()
        return self.setdefault(key, value)
