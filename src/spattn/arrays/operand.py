"""Device arrays as kernel operands."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["IN_ORDER", "Operand", "in_order", "like", "memory_order", "row_major"]

IN_ORDER = (0, 1, 2, 3)


class Operand(NamedTuple):
    """A 4-D device array: address, shape, and strides in elements."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a C-contiguous array, in elements."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * shape[axis]
    return tuple(strides)


def memory_order(x: Operand) -> tuple[int, ...]:
    """Return the axes of `x` from slowest to fastest in memory, with the last axis always last.

    A result in this order can be reshaped without a copy whenever `x` can. Axes of length 1 keep their index.
    """
    if x.strides[0] >= x.strides[1] >= x.strides[2]:
        return IN_ORDER
    longer = [axis for axis in range(3) if x.shape[axis] > 1]
    ranked = iter(sorted(longer, key=lambda axis: -abs(x.strides[axis])))
    return (*(next(ranked) if axis in longer else axis for axis in range(3)), 3)


def like(x: Operand, shape: tuple[int, ...]) -> Operand:
    """Return an array of a shape in the memory order of `x`, without gaps, with the address of `x` as a placeholder."""
    ordered, back = in_order(shape, memory_order(x))
    strides = row_major(ordered)
    return Operand(x.pointer, shape, strides if back is None else tuple(strides[axis] for axis in back))


def in_order(shape: tuple[int, ...], order: tuple[int, ...] | None) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return the shape permuted by `order`, and the inverse permutation, None for the identity."""
    if order is None or order == IN_ORDER:
        return shape, None
    return tuple(shape[axis] for axis in order), tuple(order.index(axis) for axis in range(len(order)))
