"""Create patterns by their registered names, from JSON, or from expressions."""

from __future__ import annotations

import ast
import functools
import inspect
import operator
import sys
from typing import Any

from .._util.imports import whole_imports
from .base.class_registry import DEEPEST, generation, names, pattern_class, registered
from .base.codec import decode
from .base.pattern import Pattern

__all__ = ["example", "from_json", "get", "names"]

_OPERATORS = {ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.Sub: operator.sub}


def get(name: str, **params: Any) -> Pattern:
    """Create the pattern registered under `name`.

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
        If a parameter is missing, unknown or of a wrong type.
    """
    cls = pattern_class(name)
    try:
        inspect.signature(cls).bind(**params)
    except TypeError as error:
        raise TypeError(f"pattern: expected {signature(name)}, {error}") from error
    found: Pattern = cls(**params)
    return found


def example(name: str) -> tuple[Pattern, int, int]:
    """Return a small instance of a registered pattern and lengths that suit it.

    Parameters
    ----------
    name : str
        One of :func:`names`.

    Returns
    -------
    pattern : Pattern
        The class's :meth:`Pattern.example`.
    q_len, kv_len : int
        Equal lengths in tokens.
    """
    pattern, length = pattern_class(name).example()
    return pattern, length, length


def from_json(text: str) -> Pattern:
    """Deserialize a pattern from :meth:`Pattern.to_json`; safe on untrusted data.

    Parameters
    ----------
    text : str
        JSON.

    Returns
    -------
    Pattern
        Equal to the serialized one.

    Raises
    ------
    TypeError
        If `text` is not a string.
    ValueError
        If `text` is not JSON, or does not describe a pattern.
    """
    if not isinstance(text, str):
        raise TypeError(f"text: expected a string of JSON, got {type(text).__name__}")
    return _read(text, generation())


@functools.lru_cache(maxsize=32)
def _read(text: str, generation: int) -> Pattern:
    """Decode a pattern. Cached; registering a name again invalidates the cache."""
    with whole_imports:  # late: keeps `import spattn` fast
        import json

    try:
        found: Pattern = decode(json.loads(text))
    except RecursionError as error:
        raise ValueError(f"data: expected lists and dicts nested at most {2 * DEEPEST} deep, got more") from error
    return found


def signature(name: str) -> str:
    """Return the call signature of a registered pattern, without annotations."""
    called = inspect.signature(class_named(name))
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in called.parameters.values()]
    return name + str(called.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def class_named(name: str) -> type[Any]:
    """Return the class with this registered name, or with this name in Python, as in reprs."""
    if name not in names() and name[:1].isupper():
        getattr(sys.modules[__package__], name, None)  # imports the module of a public class
        for cls in registered():
            if cls.__name__ == name:
                return cls
    return pattern_class(name)


def make(name: str, *args: Any, **params: Any) -> Pattern:
    """Create a registered pattern; ValueError if a parameter is missing or unknown."""
    cls = class_named(name)
    try:
        inspect.signature(cls).bind(*args, **params)
    except TypeError as error:
        raise ValueError(f"pattern: expected {signature(name)}, {error}") from error
    return cls(*args, **params)


def parse(text: str) -> Pattern:
    """Parse names of patterns, with or without arguments, joined by ``& | - ~`` and parentheses.

    A name is registered, or that of the class, so that a repr without arrays is parsed, too. Arguments are Python
    literals or patterns: ``per_head((causal, ~sinks(4)))``. Raises ValueError for anything else,
    and TypeError if a parameter is of a wrong type.
    """
    try:
        return _pattern(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise _unexpected(text) from error


def _pattern(node: ast.expr) -> Pattern:
    match node:
        case ast.Name() | ast.Attribute():
            return make(_name(node))
        case ast.Call(ast.Name() | ast.Attribute() as function, args, keywords):
            name = _name(function)
            named = {keyword.arg: _argument(keyword.value) for keyword in keywords if keyword.arg is not None}
            if len(named) == len(keywords):
                return make(name, *map(_argument, args), **named)
        case ast.BinOp(left, symbol, right) if type(symbol) in _OPERATORS:
            return _OPERATORS[type(symbol)](_pattern(left), _pattern(right))
        case ast.UnaryOp(ast.Invert(), operand):
            return ~_pattern(operand)
    raise _unexpected(ast.unparse(node))


def _name(node: ast.expr) -> str:
    """Return the registered name in a name or, as in ``deepspeed.fixed``, in an attribute of a module."""
    name = ast.unparse(node).removeprefix("spattn.").removeprefix("patterns.")
    return name.replace("deepspeed.", "deepspeed_", 1)


def _argument(node: ast.expr) -> Any:
    match node:
        case ast.Tuple(elements) | ast.List(elements):
            return tuple(map(_argument, elements))
        case ast.Name() | ast.Attribute() | ast.Call() | ast.BinOp() | ast.UnaryOp(ast.Invert()):
            return _pattern(node)
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise _unexpected(ast.unparse(node)) from error


def _unexpected(text: str) -> ValueError:
    return ValueError(f"pattern: expected a description like 'causal & sliding_window(255, 0)', got {text!r}")
