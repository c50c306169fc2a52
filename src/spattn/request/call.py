"""A validated attention call and its derived sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .._util.imports import whole_imports
from .._util.index_checks import q_offset
from ..arrays import DTYPES, FLOAT8, ArrayNamespace, check_plain, dtype_name, namespace_of

if TYPE_CHECKING:
    from .layout import Layout
    from .score import ScoreOperands

__all__ = [
    "LARGEST_HEAD_DIM",
    "Call",
    "check_gradients",
    "check_options",
    "check_results",
    "check_scale",
    "default_scale",
]

LARGEST_HEAD_DIM = 1024
_NOT_NUMBERS = (bool, np.timedelta64)  # subclasses of int and np.integer
_LARGEST_SCALE = float(np.finfo(np.float32).max)  # kernels take the scale in float32, except for float64 arrays


@dataclass(frozen=True, slots=True)
class Call:
    """The validated operands and parameters of an attention call.

    A backend prepares all calls with the same cache key at once: it may rely on all fields except the scale and the
    values and addresses of the arrays.

    Attributes
    ----------
    q, k, v : arrays
        (batch, heads, length, head_dim) views of the operands, which share array backend, dtype and device.
    layout : Layout
        Axis order of the caller's operands and results; backends only see the views.
    kind : ArrayNamespace
        Array backend.
    dtype, device : str
        See :func:`~spattn.arrays.dtype_name` and :meth:`~spattn.arrays.ArrayNamespace.device`.
    batch, heads_q, heads_kv, q_len, kv_len, head_dim, head_dim_v : int
        Sizes.
    scale : float
        Factor applied to ``q @ k.T``.
    precision : {None, "tf32"}
        Precision of the matrix products; None means the precision of `dtype`.
    return_lse : bool
        Whether lse is required.
    score : ScoreOperands or None
        Score function, sinks and dropout; None means none of them.
    """

    q: Any = field(repr=False)
    k: Any = field(repr=False)
    v: Any = field(repr=False)
    layout: Layout = field(repr=False)
    kind: ArrayNamespace
    dtype: str
    device: str
    batch: int
    heads_q: int
    heads_kv: int
    q_len: int
    kv_len: int
    head_dim: int
    head_dim_v: int
    scale: float
    precision: str | None = None
    return_lse: bool = True
    score: ScoreOperands | None = None

    @classmethod
    def of(
        cls,
        q: Any,
        k: Any,
        v: Any,
        *,
        scale: float | None = None,
        precision: str | None = None,
        return_lse: bool = True,
        layout: str = "bhsd",
        dtypes: tuple[str, ...] = DTYPES,
    ) -> Call:
        """Validate the operands, arrays of one of `dtypes`; `scale` defaults to ``1 / sqrt(head_dim)``, and errors
        name the argument."""
        with whole_imports:
            from .layout import Layout  # imported late, as backends are

        kind, dtype, device = _check_operands(q, k, v, dtypes)
        given = Layout.of(layout, q, k, v)
        (batch, heads_q, q_len, head_dim), (_, heads_kv, kv_len, _) = (map(int, given.sizes(x.shape)) for x in (q, k))
        head_dim_v = int(v.shape[-1])
        of_keys = batch, heads_kv, kv_len
        for name, x, sizes in (("k", k, (*of_keys, head_dim)), ("v", v, (*of_keys, head_dim_v))):
            if tuple(x.shape) != given.shape(sizes):
                raise ValueError(f"{name}: expected shape {given.shape(sizes)}, got {tuple(x.shape)}")
        if heads_q % heads_kv if heads_kv else heads_q:
            raise ValueError(f"k: expected a number of heads that divides q's {heads_q}, got {heads_kv}")
        if not 1 <= head_dim <= LARGEST_HEAD_DIM or not 1 <= head_dim_v <= LARGEST_HEAD_DIM:
            raise ValueError(
                f"head_dim: expected 1 … {LARGEST_HEAD_DIM} for q, k and v, got {head_dim} and {head_dim_v}"
            )
        scale = default_scale(head_dim) if scale is None else check_scale(scale, dtype)
        _check_precision(precision, dtype)
        return cls(
            given.view(q),
            given.view(k),
            given.view(v),
            given,
            kind,
            dtype,
            device,
            batch,
            heads_q,
            heads_kv,
            q_len,
            kv_len,
            head_dim,
            head_dim_v,
            scale,
            precision,
            bool(return_lse),
        )

    @property
    def q_offset(self) -> int:
        """Position of the first query."""
        return q_offset(self.q_len, self.kv_len)

    @property
    def group(self) -> int:
        """Number of query heads per key-value head."""
        return self.heads_q // self.heads_kv if self.heads_kv else 0

    @property
    def rows(self) -> tuple[int, int, int]:
        """Shape of lse, (batch, heads_q, q_len)."""
        return self.batch, self.heads_q, self.q_len

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """``(batch, heads_q, q_len, kv_len)``."""
        return *self.rows, self.kv_len

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """Shape of out, (batch, heads_q, q_len, head_dim_v)."""
        return *self.rows, self.head_dim_v

    def result_bytes(self, backward: bool = False) -> int:
        """Return the bytes of out and lse, or of dq, dk and dv."""
        of_rows, of_keys = math.prod(self.rows), self.batch * self.heads_kv * self.kv_len
        itemsize = {"float64": 8, "float32": 4}.get(self.dtype, 2)
        if backward:
            return itemsize * (of_rows * self.head_dim + of_keys * (self.head_dim + self.head_dim_v))
        return of_rows * (itemsize * self.head_dim_v + self.return_lse * max(itemsize, 4))

    @property
    def out_dtype(self) -> str:
        """Dtype of out."""
        return "bfloat16" if self.dtype == FLOAT8 else self.dtype

    @property
    def lse_dtype(self) -> str:
        """Dtype of lse."""
        return "float64" if self.dtype == "float64" else "float32"


def default_scale(head_dim: int) -> float:
    return 1.0 / math.sqrt(head_dim)


def check_options(backend: str, return_lse: bool = False, precision: str | None = None, layout: str = "bhsd") -> None:
    if not isinstance(backend, str):
        raise TypeError(f"backend: expected a name, got {type(backend).__name__}")
    if not isinstance(return_lse, (bool, np.bool_)):
        raise TypeError(f"return_lse: expected a bool, got {type(return_lse).__name__}")
    if precision is not None and not isinstance(precision, str):
        raise TypeError(f"precision: expected None or 'tf32', got {type(precision).__name__}")
    if not isinstance(layout, str):
        raise TypeError(f"layout: expected a name, got {type(layout).__name__}")


def _check_operands(q: Any, k: Any, v: Any, dtypes: tuple[str, ...]) -> tuple[ArrayNamespace, str, str]:
    """Check that q, k and v share array backend, dtype and device; return all three."""
    like_q = _check_operand("q", q, dtypes)
    for name, x in (("k", k), ("v", v)):
        kind, dtype, device = _check_operand(name, x, dtypes)
        if kind is not like_q[0]:
            raise TypeError(f"{name}: expected a {like_q[0].name} array like q, got {kind.name}")
        if dtype != like_q[1]:
            raise TypeError(f"{name}: expected dtype {like_q[1]} like q, got {dtype}")
        if device != like_q[2]:
            raise ValueError(f"{name}: expected device {like_q[2]} like q, got {device}")
    return like_q


def _check_operand(name: str, x: Any, dtypes: tuple[str, ...]) -> tuple[ArrayNamespace, str, str]:
    kind = namespace_of(x)
    if kind is None:
        raise TypeError(f"{name}: expected a NumPy, PyTorch, CuPy or JAX array, got {type(x).__name__}")
    check_plain(name, x)
    dtype, device = dtype_name(x), kind.device(x)
    if dtype not in dtypes:
        instead = "; use spattn.float8_attention()" if dtype == FLOAT8 else ""
        raise TypeError(f"{name}: expected one of {', '.join(dtypes)}, got {dtype}{instead}")
    if not device.startswith(("cpu", "cuda:")):
        raise ValueError(f"{name}: expected an array in host memory or on a CUDA device, got one on {device}")
    return kind, dtype, device


def check_results(call: Call, dout: Any, out: Any, lse: Any, dlse: Any = None) -> None:
    """Check the results of the forward pass and their gradients; dlse may be None."""
    of_out, of_lse = (call.layout.shape(call.out_shape), call.dtype), (call.layout.shape(call.rows), call.lse_dtype)
    given = [("dout", dout, of_out), ("out", out, of_out), ("lse", lse, of_lse)]
    for name, x, (shape, dtype) in given if dlse is None else [*given, ("dlse", dlse, of_lse)]:
        if namespace_of(x) is not call.kind:
            raise TypeError(f"{name}: expected a {call.kind.name} array like q, got {type(x).__name__}")
        check_plain(name, x)
        if tuple(x.shape) != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {tuple(x.shape)}")
        if dtype_name(x) != dtype:
            raise TypeError(f"{name}: expected {dtype}, got {dtype_name(x)}")
        if call.kind.device(x) != call.device:
            raise ValueError(f"{name}: expected device {call.device} like q, got {call.kind.device(x)}")


def check_gradients(caller: str, kind: ArrayNamespace, **operands: Any) -> None:
    """Raise RuntimeError if an operand requires a gradient."""
    wanting = [name for name, x in operands.items() if kind.wants_gradient(x)]
    if wanting:
        raise RuntimeError(
            f"{', '.join(wanting)}: {caller}() does not record gradients; use torch.no_grad() or detach()"
        )


def check_scale(scale: float, dtype: str) -> float:
    """Validate the scale and return it as a float."""
    if not isinstance(scale, (int, float, np.integer, np.floating)) or isinstance(scale, _NOT_NUMBERS):
        raise TypeError(f"scale must be an int or float, got {type(scale).__name__}")
    try:
        number = float(scale)
    except OverflowError:  # an int beyond float64
        number = math.inf if scale > 0 else -math.inf
    if not math.isfinite(number):
        raise ValueError(f"scale must be finite, got {number}")
    if abs(number) > _LARGEST_SCALE and dtype != "float64":
        raise ValueError(f"scale must not exceed {_LARGEST_SCALE:.4g} unless q is float64, got {number}")
    return number


def _check_precision(precision: str | None, dtype: str) -> None:
    if precision is None:
        return
    if precision != "tf32":
        raise ValueError(f"precision: expected None or 'tf32', got {precision!r}")
    if dtype != "float32":
        raise TypeError(f"precision: 'tf32' needs float32 arrays, got {dtype}")
