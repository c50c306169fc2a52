"""Random inputs in every memory layout that a caller may pass."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

__all__ = ["DTYPES", "LAYOUTS", "eps", "inputs", "random"]

DTYPES = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def eps(dtype: npt.DTypeLike) -> float:
    """Return the machine epsilon of `dtype`.

    Parameters
    ----------
    dtype : dtype
        Floating-point dtype, including bfloat16.

    Returns
    -------
    float
    """
    return float(ml_dtypes.finfo(dtype).eps)


def inputs(
    batch: int = 1,
    heads_q: int = 1,
    heads_kv: int | None = None,
    q_len: int = 64,
    kv_len: int | None = None,
    head_dim: int = 32,
    head_dim_v: int | None = None,
    *,
    dtype: npt.DTypeLike = "float32",
    layout: str | tuple[str, str, str] = "contiguous",
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return random normal ``q, k, v`` for :func:`spattn.attention`.

    Parameters
    ----------
    batch, heads_q, heads_kv, q_len, kv_len, head_dim, head_dim_v : int
        Sizes; ``heads_kv``, ``kv_len`` and ``head_dim_v`` default to ``heads_q``, ``q_len`` and ``head_dim``.
    dtype : str or dtype
        One of :data:`DTYPES`.
    layout : str or tuple of three
        Names in :data:`LAYOUTS`, one for all or one each for q, k and v.
    seed : int
        Seed of the random generator.

    Returns
    -------
    q, k, v : arrays
        Of shape (batch, heads, tokens, features).

    Examples
    --------
    >>> q, k, v = inputs(2, 4, 2, q_len=5, kv_len=7, head_dim=8, dtype="float16", layout="bshd")
    >>> q.shape, k.shape, k.dtype
    ((2, 4, 5, 8), (2, 2, 7, 8), dtype('float16'))
    >>> k.flags.c_contiguous
    False
    """
    heads_kv = heads_q if heads_kv is None else heads_kv
    kv_len = q_len if kv_len is None else kv_len
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    layouts = (layout,) * 3 if isinstance(layout, str) else layout
    keys = batch, heads_kv, kv_len
    shapes = (batch, heads_q, q_len, head_dim), (*keys, head_dim), (*keys, head_dim_v)
    q, k, v = (
        random(shape, dtype, layout=name, seed=(seed, n))
        for n, (shape, name) in enumerate(zip(shapes, layouts, strict=True))
    )
    return q, k, v


def random(
    shape: tuple[int, int, int, int],
    dtype: npt.DTypeLike = "float32",
    *,
    layout: str = "contiguous",
    seed: int | tuple[int, ...] = 0,
) -> np.ndarray:
    """Return a random normal array (batch, heads, tokens, features) in a given dtype and layout.

    Parameters
    ----------
    shape : (int, int, int, int)
        Batch size, heads, tokens, features.
    dtype : str or dtype, optional
        One of :data:`DTYPES`.
    layout : str, optional
        Name in :data:`LAYOUTS`.
    seed : int or tuple of int, optional
        Seed of the random generator.

    Returns
    -------
    array of `dtype`
        Of shape `shape`.
    """
    rng = np.random.default_rng(seed)
    dtype = DTYPES[dtype] if isinstance(dtype, str) else np.dtype(dtype)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32).astype(dtype)

    return LAYOUTS[layout](draw, *shape)


def _offset_copy(array: np.ndarray, nbytes: int) -> np.ndarray:
    """Copy an array to an address `nbytes` past a 64-byte boundary."""
    store = np.zeros(array.nbytes + 64 + nbytes, dtype=np.uint8)
    first = -store.ctypes.data % 64 + nbytes
    copy = store[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def _overlapping(draw: Callable[..., np.ndarray], b: int, h: int, t: int, f: int) -> np.ndarray:
    """Return overlapping rows: token i starts one element after token i - 1."""
    heads = draw(b, h, max(t + f, 1))
    return as_strided(heads, (b, h, t, f), (*heads.strides[:2], heads.itemsize, heads.itemsize), writeable=False)


LAYOUTS: dict[str, Callable[..., np.ndarray]] = {
    "contiguous": lambda draw, *shape: draw(*shape),
    # (batch, tokens, heads, features) in memory, the layout of most model code
    "bshd": lambda draw, b, h, t, f: draw(b, t, h, f).transpose(0, 2, 1, 3),
    "fortran": lambda draw, *shape: np.asfortranarray(draw(*shape)),
    "gapped": lambda draw, b, h, t, f: draw(b, h, 2 * t, 3 * f)[:, :, ::2, ::3],
    "negative": lambda draw, *shape: draw(*shape)[::-1, ::-1, ::-1, ::-1],
    "broadcast_heads": lambda draw, b, h, t, f: np.broadcast_to(draw(b, 1, t, f), (b, h, t, f)),
    "broadcast_tokens": lambda draw, b, h, t, f: np.broadcast_to(draw(b, h, 1, f), (b, h, t, f)),
    "overlapping": _overlapping,
    # starts one element past an aligned address, like x[1:]
    "misaligned": lambda draw, *shape: _offset_copy(a := draw(*shape), a.itemsize),
    # starts at an address that is not a multiple of the element size, like a field of a packed record
    "unaligned": lambda draw, *shape: _offset_copy(draw(*shape), 1),
    "read_only": lambda draw, *shape: _read_only(draw(*shape)),
}
"""Maps the name of a layout to a function that draws an array (batch, heads, tokens, features) in this layout."""


def at_protected_page(array: np.ndarray) -> np.ndarray:
    """Copy an array to the end of a page before a protected page, so that an over-read crashes the process.

    Linux only. The pages stay mapped until the process exits.

    Parameters
    ----------
    array : array
        Array of any dtype and layout.

    Returns
    -------
    array
        C-contiguous copy.

    Raises
    ------
    OSError
        If ``mprotect`` fails.
    """
    page = mmap.PAGESIZE
    room = math.ceil(max(array.nbytes, 1) / page) * page
    pages = mmap.mmap(-1, room + page)
    _KEPT.append(pages)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address + room), ctypes.c_size_t(page), 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect failed")
    store = np.frombuffer(pages, np.uint8, count=array.nbytes, offset=room - array.nbytes)
    copy = store.view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


_KEPT: list[Any] = []
