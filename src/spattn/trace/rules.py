"""Map PyTorch operations to NumPy operators, which the planner evaluates on whole tiles, or on cells.

A rule takes the operands of a step and returns PyTorch's result, or NotImplemented. Values are the planner's symbols of
tiles or the values of a program of cells, and object arrays of these for tensors with a few elements per pair. NumPy's
and PyTorch's integers, and their correctly rounded floats, are equal. Other functions of floats are PyTorch's on cells;
on tiles, their intervals are wider than the rounding errors of both libraries. Floats of one pair are added in order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .program import Recorded
from .trace import PART, Constant, Ref, Step

__all__ = ["by_rule", "constant_value", "each_element"]

_MOST_ELEMENTS = 256  # of a tensor for one pair; each element is a symbol
_BITS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64, "uint8": 8}  # supported integer dtypes
_FLOATS = ("float32", "float64")


def by_rule(step: Step, value: Callable[[Any], Any], read: Callable[[Constant, Any], Any]) -> Any:
    """Evaluate a step by its rule, or return NotImplemented if there is none.

    `value` resolves operands, NotImplemented for those without a value; ``read(constant, indices)`` looks elements up.
    """
    name = PART if step.name == PART else step.name.split(".")[1]
    if name in _OF_SHAPES:
        operands = [_resolved(x, value) for x in step.args]
        return NotImplemented if _unknown(operands) else _OF_SHAPES[name](*operands, **dict(step.options))
    if name == "index":
        return _index(step, value, read)
    if name == "isin":
        return _member(step, value)
    if name in ("any", "all"):
        return _reduced(step, value, np.logical_or if name == "any" else np.logical_and)
    if name in ("sum", "dot", "linalg_vector_norm"):
        return _summed(name, step, value)
    return _elementwise(name, step, value)


def constant_value(constant: Constant) -> Any:
    """Return a constant as a scalar, or as an object array of scalars; NotImplemented if it is long."""
    array = constant.array
    if not array.ndim:
        return array[()]
    return _array(array.shape, list(array.flat)) if array.size <= _MOST_ELEMENTS else NotImplemented


def each_element(shape: tuple[int, ...], element: Callable[[tuple[int, ...]], Any]) -> Any:
    """Return the value of a tensor from its elements; NotImplemented if it has many."""
    if not shape:
        return element(())
    is_short = math.prod(shape) <= _MOST_ELEMENTS
    return _array(shape, [element(at) for at in np.ndindex(shape)]) if is_short else NotImplemented


def _resolved(operand: Any, value: Callable[[Any], Any]) -> Any:
    """Resolve the references and constants in nested tuples."""
    if isinstance(operand, tuple) and not isinstance(operand, Ref):
        return tuple(_resolved(x, value) for x in operand)
    return value(operand) if isinstance(operand, (Ref, Constant)) else operand


def _array(shape: tuple[int, ...], values: list[Any]) -> np.ndarray:
    """Return an object array; NumPy would ask each value for its elements."""
    found = np.empty(len(values), object)
    for number, value in enumerate(values):
        found[number] = value
    return found.reshape(shape)


def _as_array(x: Any) -> np.ndarray:
    return x if _is_tensor(x) else _array((), [x])


def _is_tensor(x: Any) -> bool:
    """Return whether a value has several elements for each pair."""
    return isinstance(x, np.ndarray) and x.dtype == object


def _unknown(operands: Any) -> bool:
    return any(_unknown(x) if isinstance(x, (tuple, list)) else x is NotImplemented for x in operands)


def _each(rule: Callable[..., Any], *operands: Any) -> Any:
    """Apply a rule to every element."""
    if not any(map(_is_tensor, operands)):
        return rule(*operands)
    found = np.frompyfunc(rule, len(operands), 1)(*map(_as_array, operands))
    return NotImplemented if _unknown(_as_array(found).flat) else found


# -- elementwise operations --------------------------------------------------------------------------------------------


def _elementwise(name: str, step: Step, value: Callable[[Any], Any]) -> Any:
    dtype, options = step.result.dtype, {key: x for key, x in step.options if key in ("alpha", "rounding_mode")}
    kinds = {_kind(x) for x in step.args if x is not None}
    if "other" in kinds or not _numbers_fit(step.args):
        return NotImplemented
    if name == "where":
        condition, *choices = (value(x) for x in step.args)
        chosen = [_as(dtype, x) for x in choices]
        return NotImplemented if _unknown((condition, *chosen)) else _each(_where, condition, *chosen)
    operands = [value(x) if isinstance(x, (Ref, Constant)) else x for x in step.args]
    if _unknown(operands):
        return NotImplemented
    if name.startswith("logical_"):
        operands, kinds = [_as("bool", x) for x in operands], {"bool"}
    common = _common(name, step)
    if common in _FLOATS and name != "_to_copy":
        exponent = operands[1:] if name == "pow" and not isinstance(step.args[1], (Ref, Constant)) else []
        operands = [x if x is None else _as(common, x) for x in operands[: len(operands) - len(exponent)]] + exponent
        rules = _COMPARISONS if dtype == "bool" else _OF_FLOATS
    elif dtype == "bool" and kinds == {"bool"}:
        rules = _OF_TRUTH
    elif kinds <= {"bool", "integer"} or name == "_to_copy":
        rules = _COMPARISONS if dtype == "bool" else _OF_INTEGERS if dtype in _BITS else {}
    else:
        return NotImplemented
    if name == "_to_copy":
        return _each(lambda x: _as(dtype, x), operands[0])
    rule = rules.get(name)
    if rule is None:
        return NotImplemented
    found = _each(functools.partial(rule, **options), *operands)
    return found if found is NotImplemented or dtype not in _BITS else _each(lambda x: _wrapped(x, dtype), found)


def _kind(operand: Any) -> str:
    """Return 'bool', 'integer', 'float' or 'other'."""
    if isinstance(operand, (Ref, Constant)):
        dtype = operand.dtype if isinstance(operand, Ref) else operand.array.dtype.name
        return "integer" if dtype in _BITS else "float" if dtype in _FLOATS else "bool" if dtype == "bool" else "other"
    return {bool: "bool", int: "integer", float: "float"}.get(type(operand), "other")


def _common(name: str, step: Step) -> str:
    """Return the dtype in which PyTorch computes: the result's, except for comparisons."""
    if step.result.dtype != "bool" or len(step.args) != 2:
        return step.result.dtype
    samples = [
        torch.empty(
            x.shape if isinstance(x, Ref) else x.array.shape,
            dtype=getattr(torch, x.dtype if isinstance(x, Ref) else x.array.dtype.name),
            device="meta",
        )
        if isinstance(x, (Ref, Constant))
        else x
        for x in step.args
    ]
    return str(torch.result_type(*samples)).removeprefix("torch.")


def _numbers_fit(operands: tuple[Any, ...]) -> bool:
    """Return True if Python ints fit into the integer dtype of every tensor operand, to which PyTorch casts them."""
    types = [x.dtype for x in operands if isinstance(x, Ref) and x.dtype in _BITS]
    return all(0 <= x - _least(dtype) < 1 << _BITS[dtype] for x in operands if type(x) is int for dtype in types)


def _least(dtype: str) -> int:
    return 0 if dtype == "uint8" else -1 << (_BITS[dtype] - 1)


def _wrapped(value: Any, dtype: str) -> Any:
    """Wrap int64 values around to a dtype of fewer bits, as PyTorch does."""
    if dtype == "int64" or value is NotImplemented:
        return value
    return (value - _least(dtype)) % (1 << _BITS[dtype]) + _least(dtype)


def _as(dtype: str, x: Any) -> Any:
    """Convert a value as PyTorch converts it to `dtype`."""
    if x is NotImplemented or _is_tensor(x):
        return x if x is NotImplemented else _each(functools.partial(_as, dtype), x)
    own = np.dtype(np.result_type(x)) if isinstance(x, (bool, int, float)) else x.dtype
    if dtype == "bool":
        return x if own.kind == "b" else np.not_equal(x, 0)
    if dtype in _FLOATS:
        kind = np.dtype(dtype)
        return x if own == kind else x.astype(kind) if hasattr(x, "astype") else kind.type(x)
    if own.kind == "f":
        return x.astype(np.int64) if dtype == "int64" and hasattr(x, "astype") else NotImplemented
    return _wrapped(x + 0, dtype) if dtype in _BITS else NotImplemented


def _where(condition: Any, a: Any, b: Any) -> Any:
    if all(getattr(x, "is_truth", isinstance(x, (bool, np.bool_))) for x in (a, b)):
        return (condition & a) | (~condition & b)
    return np.where(condition, a, b)


def _add(a: Any, b: Any, alpha: int = 1) -> Any:
    return a + b if alpha == 1 else NotImplemented


def _subtract(a: Any, b: Any, alpha: int = 1) -> Any:
    return a - b if alpha == 1 else NotImplemented


def _constant_divisor(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule of floor division or remainder, which supports only positive constant divisors."""

    def rule(a: Any, b: Any, rounding_mode: str = "floor") -> Any:
        if not isinstance(b, (int, np.integer)) or b <= 0:
            return NotImplemented
        if rounding_mode == "trunc":
            return np.where(a >= 0, operation(a, int(b)), -operation(-a, int(b)))
        return operation(a, int(b)) if rounding_mode == "floor" else NotImplemented

    return rule


def _quotient(a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    """Return the rule of the division of floats."""
    if rounding_mode == "floor":  # PyTorch's is not floor(a / b)
        return NotImplemented
    return np.trunc(a / b) if rounding_mode == "trunc" else a / b


def _clamp(a: Any, least: Any = None, most: Any = None) -> Any:
    a = a if least is None else np.maximum(a, least)
    return a if most is None else np.minimum(a, most)


def _by_torch(name: str, ufunc: Callable[..., Any], a: Any, *more: Any) -> Any:
    """Apply a function of floats that the libraries round differently: PyTorch's to cells, NumPy's to tiles."""
    return a.record(functools.partial(_of_torch, name), a, *more) if isinstance(a, Recorded) else ufunc(a, *more)


def _of_torch(name: str, a: np.ndarray, *more: Any) -> np.ndarray:
    with torch.no_grad():
        found: np.ndarray = getattr(torch, name)(torch.from_numpy(np.array(a)), *more).numpy()
    return found


def _power(a: Any, exponent: Any) -> Any:
    if not isinstance(a, Recorded):
        return np.power(a, exponent) if hasattr(a, "dtype") or hasattr(exponent, "dtype") else NotImplemented
    if not isinstance(exponent, (int, float)):
        return NotImplemented
    return a * a if exponent == 2 else _by_torch("pow", np.power, a, exponent)


def _shift(operation: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, by: operation(a, int(by)) if isinstance(by, (int, np.integer)) and by >= 0 else NotImplemented


_OF_NUMBERS: dict[str, Callable[..., Any]] = {
    "add": _add,
    "sub": _subtract,
    "rsub": lambda a, b, alpha=1: _subtract(b, a, alpha),
    "mul": np.multiply,
    "neg": np.negative,
    "abs": np.absolute,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda a, most: _clamp(a, None, most),
}
_OF_INTEGERS = _OF_NUMBERS | {
    "pow": np.power,
    "sign": np.sign,
    "remainder": _constant_divisor(np.remainder),
    "floor_divide": _constant_divisor(np.floor_divide),
    "div": _constant_divisor(np.floor_divide),
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "bitwise_not": np.invert,
    "bitwise_left_shift": _shift(np.left_shift),
    "bitwise_right_shift": _shift(np.right_shift),
}
_OF_INTEGERS["__lshift__"], _OF_INTEGERS["__rshift__"] = _shift(np.left_shift), _shift(np.right_shift)
_OF_FLOATS = _OF_NUMBERS | {
    "div": _quotient,
    "pow": _power,
    "rsqrt": lambda a: _by_torch("rsqrt", lambda x: 1 / np.sqrt(x), a),
    "reciprocal": lambda a: 1 / a,
    "sign": lambda a: _by_torch("sign", np.sign, a),
    "atan": lambda a: _by_torch("atan", np.arctan, a),
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "round": np.rint,
}
_OF_FLOATS |= {
    name: functools.partial(_by_torch, name, getattr(np, name))
    for name in ("sqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "tanh")
}
_COMPARISONS: dict[str, Callable[..., Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_OF_TRUTH: dict[str, Callable[..., Any]] = _COMPARISONS | {
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.not_equal,
    "bitwise_not": np.invert,
    "logical_and": np.bitwise_and,
    "logical_or": np.bitwise_or,
    "logical_xor": np.not_equal,
    "logical_not": np.invert,
    "add": np.bitwise_or,
    "mul": np.bitwise_and,
    "maximum": np.bitwise_or,
    "minimum": np.bitwise_and,
}


# -- look-ups, reductions and shapes -----------------------------------------------------------------------------------


def _index(step: Step, value: Callable[[Any], Any], read: Callable[[Constant, Any], Any]) -> Any:
    """Look an element of a captured tensor up."""
    table, indices = step.args[0], step.args[1]
    if not isinstance(table, Constant) or None in indices or len(indices) != table.array.ndim or step.result.shape:
        return NotImplemented
    operands = [value(x) for x in indices]
    return NotImplemented if _unknown(operands) else read(table, operands)


def _member(step: Step, value: Callable[[Any], Any]) -> Any:
    """Return whether an integer is in a captured tensor of integers."""
    if len(step.args) != 2 or step.options or [_kind(x) for x in step.args] != ["integer", "integer"]:
        return NotImplemented
    x, table = value(step.args[0]), step.args[1]
    if x is NotImplemented or not isinstance(table, Constant):
        return NotImplemented
    return _each(lambda own: np.isin(own, table.array.astype(np.int64)), x)


def _axes(shape: tuple[int, ...], dims: Any) -> tuple[int, ...]:
    if dims is None or dims == ():
        return tuple(range(len(shape)))
    return tuple(dim % len(shape) for dim in (dims if isinstance(dims, tuple) else (dims,)))


def _folded(operation: Callable[[list[Any]], Any], x: np.ndarray, dims: Any = None, keep: bool = False) -> Any:
    """Reduce an object array along some axes."""
    axes = _axes(x.shape, dims)
    others = [axis for axis in range(x.ndim) if axis not in axes]
    rows = x.transpose(*others, *axes).reshape(*(x.shape[axis] for axis in others), -1)
    found = _array(rows.shape[:-1], [operation(list(rows[at])) for at in np.ndindex(rows.shape[:-1])])
    if keep:
        found = found.reshape([1 if axis in axes else n for axis, n in enumerate(x.shape)])
    return NotImplemented if _unknown(found.flat) else found if found.ndim else found[()]


def _reduced(step: Step, value: Callable[[Any], Any], operation: np.ufunc) -> Any:
    """Return whether any or all elements are true."""
    x, *options = step.args
    found = _as("bool", value(x))
    if not _is_tensor(found):
        return found
    return _folded(functools.partial(functools.reduce, operation), found, *options) if found.size else NotImplemented


def _summed(name: str, step: Step, value: Callable[[Any], Any]) -> Any:
    """Add elements, products or squares; floats in any order, as PyTorch may."""
    dtype, tensors = step.result.dtype, [x for x in step.args if isinstance(x, (Ref, Constant))]
    operands = [value(x) for x in tensors]
    if _unknown(operands) or step.options or "other" in map(_kind, tensors) or dtype not in ("int64", *_FLOATS):
        return NotImplemented
    x, *others = (_as(dtype, operand) for operand in operands)
    if not _is_tensor(x) or not x.size:
        return NotImplemented
    options = list(step.args[len(tensors) :])
    if name == "dot":
        x = _each(np.multiply, x, others[0])
    if name == "linalg_vector_norm":
        if (options.pop(0) if options else 2) != 2:
            return NotImplemented
        x = _each(np.multiply, x, x)
    add: Callable[[list[Any]], Any] = functools.partial(functools.reduce, np.add)
    found = _folded(add if dtype == "int64" else _sum_of_floats, x, *options)
    return _each(np.sqrt, found) if name == "linalg_vector_norm" else found


def _sum_of_floats(terms: list[Any]) -> Any:
    summed = next((x.summed for x in terms if hasattr(x, "summed")), None)
    return functools.reduce(np.add, terms) if summed is None else summed(terms)


def _item(x: np.ndarray, index: Any) -> Any:
    found = x[index]
    return found[()] if _is_tensor(found) and not found.ndim else found


def _slice(x: np.ndarray, dim: int = 0, start: Any = None, stop: Any = None, step: int = 1) -> np.ndarray:
    return np.moveaxis(np.moveaxis(x, dim, 0)[start:stop:step], 0, dim)


_OF_SHAPES: dict[str, Callable[..., Any]] = {
    "stack": lambda tensors, dim=0: np.stack([_as_array(x) for x in tensors], axis=dim),
    "select": lambda x, dim, index: _item(np.moveaxis(x, dim, 0), index),
    "slice": _slice,
    "unbind": lambda x, dim=0: np.moveaxis(x, dim, 0),
    "unsqueeze": lambda x, dim: np.expand_dims(_as_array(x), dim),
    "alias": lambda x: x,
    "clone": lambda x, **options: x,
    "detach": lambda x: x,
    PART: _item,
}
