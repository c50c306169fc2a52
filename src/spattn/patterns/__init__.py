"""Patterns: what is allowed. Every class here is registered by name; see :func:`get` and :func:`names`."""

from ._base import Lattice, Part, Pattern, apply, from_dict, get, names, register

__all__ = ["Lattice", "Part", "Pattern", "apply", "from_dict", "get", "names", "register"]
