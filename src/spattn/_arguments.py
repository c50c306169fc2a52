"""What attention() and attention_backward() take, checked argument by argument; all else is refused by its name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import _arrays

_NOT_NUMBERS = (bool, np.timedelta64)  # which Python and NumPy count among the integers
_LARGEST_SCALE = float(np.finfo(np.float32).max)  # kernels take the scale in float32, but for float64 arrays


def check_options(backend: str, return_lse: bool = False) -> None:
    if not isinstance(backend, str):
        raise TypeError(f"backend: expected a name, got {type(backend).__name__}")
    if not isinstance(return_lse, (bool, np.bool_)):
        raise TypeError(f"return_lse: expected a bool, got {type(return_lse).__name__}")


def check_arrays(q: Any, k: Any, v: Any) -> None:
    """Three plain arrays of one kind, dtype and device."""
    like_q = None
    for name, x in (("q", q), ("k", k), ("v", v)):
        kind = _arrays.kind(x)
        if kind is None:
            raise TypeError(f"{name}: expected a NumPy, PyTorch, CuPy or JAX array, got {type(x).__name__}")
        check_plain(name, x)
        dtype, device = _arrays.dtype_name(x), _arrays.device_of(x)
        if dtype not in _arrays.DTYPES:
            raise TypeError(f"{name}: expected one of {', '.join(_arrays.DTYPES)}, got {dtype}")
        if x.ndim != 4:
            raise ValueError(f"{name}: expected shape (batch, heads, length, head_dim), got {tuple(x.shape)}")
        if not device.startswith(("cpu", "cuda:")):
            raise ValueError(f"{name}: expected an array in host memory or on a CUDA device, got one on {device}")
        like_q = like_q or (kind, dtype, device)
        if kind != like_q[0]:
            raise TypeError(f"{name}: expected a {like_q[0]} array like q, got {kind}")
        if dtype != like_q[1]:
            raise TypeError(f"{name}: expected dtype {like_q[1]} like q, got {dtype}")
        if device != like_q[2]:
            raise ValueError(f"{name}: expected device {like_q[2]} like q, got {device}")


def check_plain(name: str, x: Any) -> None:
    """An array that is nothing but its values."""
    odd = _arrays.oddity(x)
    if odd is not None:
        raise TypeError(f"{name}: expected a plain array, got {odd}")


def check_shapes(q: Any, k: Any, v: Any) -> None:
    batch, heads_q, _, head_dim = q.shape
    heads_kv, kv_len = k.shape[1:3]
    if tuple(k.shape) != (batch, heads_kv, kv_len, head_dim):
        raise ValueError(f"k: expected shape {(batch, heads_kv, kv_len, head_dim)}, got {tuple(k.shape)}")
    if tuple(v.shape[:3]) != (batch, heads_kv, kv_len):
        raise ValueError(f"v: expected shape {(batch, heads_kv, kv_len, v.shape[3])}, got {tuple(v.shape)}")
    if heads_q % heads_kv if heads_kv else heads_q:
        raise ValueError(f"k: expected a number of heads that divides q's {heads_q}, got {heads_kv}")
    if not 1 <= head_dim <= 256 or not 1 <= v.shape[3] <= 256:
        raise ValueError(f"head_dim: expected 1 … 256 for q, k and v, got {head_dim} and {v.shape[3]}")


def check_results(q: Any, v: Any, dout: Any, out: Any, lse: Any) -> None:
    """What the forward call returned for q and v, and the gradient of its out."""
    kind, device = _arrays.kind(q), _arrays.device_of(q)
    wide = "float64" if _arrays.dtype_name(q) == "float64" else "float32"
    row = tuple(q.shape[:3])
    features = (*row, v.shape[3])
    of_out = features, _arrays.dtype_name(q)
    for name, x, (shape, dtype) in (("dout", dout, of_out), ("out", out, of_out), ("lse", lse, (row, wide))):
        if _arrays.kind(x) != kind:
            raise TypeError(f"{name}: expected a {kind} array like q, got {type(x).__name__}")
        check_plain(name, x)
        if tuple(x.shape) != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {tuple(x.shape)}")
        if _arrays.dtype_name(x) != dtype:
            raise TypeError(f"{name}: expected {dtype}, got {_arrays.dtype_name(x)}")
        if _arrays.device_of(x) != device:
            raise ValueError(f"{name}: expected device {device} like q, got {_arrays.device_of(x)}")


def check_gradients(caller: str, **arrays: Any) -> None:
    """No tensor through which PyTorch would expect a gradient."""
    wanting = [name for name, x in arrays.items() if _arrays.wants_gradient(x)]
    if wanting:
        raise RuntimeError(
            f"{', '.join(wanting)}: expected no tensor that requires a gradient, which {caller}() does not record; "
            "call it under torch.no_grad() or detach them"
        )


def check_scale(scale: float | None, q: Any) -> float:
    """The scale as a float, by default 1 / sqrt(head_dim)."""
    if scale is None:
        return 1.0 / math.sqrt(q.shape[3])
    if not isinstance(scale, (int, float, np.integer, np.floating)) or isinstance(scale, _NOT_NUMBERS):
        raise TypeError(f"scale: expected a number (int or float), got {type(scale).__name__}")
    try:
        number = float(scale)
    except OverflowError:  # an int beyond float64
        number = math.inf if scale > 0 else -math.inf
    if not math.isfinite(number):
        raise ValueError(f"scale: expected a finite number, got {number}")
    if abs(number) > _LARGEST_SCALE and _arrays.dtype_name(q) != "float64":
        raise ValueError(f"scale: expected at most {_LARGEST_SCALE:.4g} for arrays of no float64, got {number}")
    return number


def check_precision(precision: str | None, q: Any, backend: str) -> None:
    if precision is None:
        return
    if not isinstance(precision, str):
        raise TypeError(f"precision: expected None or 'tf32', got {type(precision).__name__}")
    if precision != "tf32":
        raise ValueError(f"precision: expected None or 'tf32', got {precision!r}")
    if _arrays.dtype_name(q) != "float32":
        raise TypeError(f"precision: 'tf32' needs float32 arrays, got {_arrays.dtype_name(q)}")
    if backend != "cuda":
        raise ValueError(f"precision: 'tf32' needs the cuda backend, got {backend!r}")
