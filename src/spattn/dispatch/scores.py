"""Read the score function, the sinks and the dropout of a call, for kernels and for autograd."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..arrays import NUMPY, ArrayNamespace, check_plain, dtype_name, namespace_of, recorder
from ..arrays.namespace import numpy_dtype
from ..request.call import Call, check_gradients
from ..request.dropout import DeviceSeed, Dropout
from ..request.layout import DEFAULT, Layout
from ..request.score import ScoreOperands, TableType
from ..score.kept_traces import find_or_trace
from ..score.program import Program, program_of
from ..score.recorder import Sizes
from ..score.tracing import Traced

__all__ = ["Given", "dropout_of", "gradients_of", "read"]

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_WIDE = ("int64", "uint32", "uint64")


class Given(NamedTuple):
    """A call's score function, sinks and dropout.

    Attributes
    ----------
    operands : ScoreOperands
        Operands of the kernels.
    sinks, tables : array or None, tuple of arrays
        The caller's sinks and captured arrays, not moved or cast.
    recorded : bool
        Whether autograd records the call.
    """

    operands: ScoreOperands
    sinks: Any
    tables: tuple[Any, ...]
    recorded: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """The part of the cache key of a call that describes its score function, sinks and dropout."""
        return *self.operands.key, None if self.sinks is None else tuple(self.sinks.shape), self.recorded

    @property
    def captured(self) -> tuple[Any, ...]:
        """The arrays that autograd records in addition to q, k and v."""
        return self.sinks, *self.tables

    def check(self, call: Call) -> None:
        """Raise ValueError unless there is one sink for each query head."""
        if self.sinks is not None and tuple(self.sinks.shape) != (call.heads_q,):
            raise ValueError(f"sinks: expected shape ({call.heads_q},), got {tuple(self.sinks.shape)}")


def read(
    score: Any,
    sinks: Any,
    dropout: Dropout | None,
    q: Any,
    k: Any,
    v: Any,
    backend: str,
    layout: str,
    *,
    backward: bool = False,
) -> Given | None:
    """Trace the score function of a call and move its arrays to the device of the call's kernels.

    Parameters
    ----------
    score : callable, Traced or None
    sinks : array or None
    dropout : Dropout or None
    q, k, v : array
        Operands of the call.
    backend, layout : str
        As in :func:`spattn.attention`.
    backward : bool
        Whether the call computes gradients, including those of all captured arrays of floats.

    Returns
    -------
    Given or None
        None for the identity without sinks and dropout.
    """
    kind = namespace_of(q)
    if kind is None:
        raise TypeError(f"q: expected a NumPy, PyTorch, CuPy or JAX array, got {type(q).__name__}")
    on_host = backend in ("cpu", "reference") or (backend == "auto" and kind.device(q) == "cpu")
    program: Program | None = None
    parameters: tuple[float, ...] = ()
    tables: tuple[Any, ...] = ()
    if score is not None:
        traced = score if isinstance(score, Traced) else find_or_trace(score, _sizes(layout, q, k, v))
        graph, tables = traced.graph, traced.tables
        if [graph.operations[at].name for at in graph.results] != ["score"]:
            program, parameters = program_of(graph), traced.parameters
    if program is None and sinks is None and dropout is None:
        return None
    captured: dict[str, Any] = {"sinks": sinks, **{f"score: captured array {at}": x for at, x in enumerate(tables)}}
    recorded = not backward and recorder(q, k, v, *captured.values()) is not None
    moved = {
        name: _moved(name, x, q, kind, on_host, recorded, backward) for name, x in captured.items() if x is not None
    }
    own = moved.pop("sinks", None)
    if own is not None:
        if dtype_name(own) not in _FLOATS:
            raise TypeError(f"sinks: expected an array of floats, got {dtype_name(own)}")
        own = _cast(own, "float64" if dtype_name(q) == "float64" else "float32")
    types = tuple(_type_of(x) for x in moved.values())
    wanted = tuple(backward and x.dtype in _FLOATS for x in types)
    operands = ScoreOperands(program, parameters, tuple(moved.values()), types, own, wanted, dropout)
    return Given(operands, sinks, tables, recorded)


def dropout_of(dropout_p: Any, seed: Any, q: Any) -> Dropout | None:
    """Validate the dropout of a call; the host does not read a seed in the device memory of `q`."""
    kind = namespace_of(seed)
    if kind is not None and kind is namespace_of(q) and kind.device(seed) == kind.device(q) != "cpu":
        found = kind.seed(seed)
        seed = seed if found is None else DeviceSeed(*found)
    return Dropout.of(dropout_p, seed)


def _sizes(layout: str, q: Any, k: Any, v: Any) -> Sizes:
    if layout == DEFAULT and q.ndim == k.ndim == v.ndim == 4:  # without making a Layout, because every call runs this
        batch, heads, q_len, _ = q.shape
        return Sizes(batch, heads, q_len, k.shape[2])
    given = Layout.of(layout, q, k, v)
    (batch, heads, q_len, _), (_, _, kv_len, _) = (map(int, given.sizes(x.shape)) for x in (q, k))
    return Sizes(batch, heads, q_len, kv_len)


def gradients_of(given: Given, found: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert the results of a backward pass to the libraries and dtypes of the captured arrays.

    Returns
    -------
    tuple
        dq, dk, dv, then a tuple with the gradient of each table (None unless wanted), and the gradient of the sinks.
    """
    dq, dk, dv, dtables, dsinks = found
    of_tables = tuple(
        None if x is None else _returned(x, table)
        for x, table in zip(dtables or (None,) * len(given.tables), given.tables, strict=True)
    )
    return dq, dk, dv, of_tables, None if dsinks is None else _returned(dsinks, given.sinks)


def _moved(name: str, x: Any, q: Any, kind: ArrayNamespace, on_host: bool, recorded: bool, backward: bool) -> Any:
    """Return an array on the device of the call's kernels.

    Copies a NumPy array if the call is recorded: autograd detects if the caller changes a tensor before the backward
    pass, but not a NumPy array.
    """
    own = namespace_of(x)
    if own is None:
        raise TypeError(f"{name}: expected an array, got {type(x).__name__}")
    check_plain(name, x)
    if not backward and not (recorded and own is kind):
        check_gradients("attention", own, **{name: x})
    device = own.device(x)
    if on_host or kind is NUMPY:
        if device != "cpu":
            raise ValueError(f"{name}: expected an array in host memory like q, got one on {device}")
        found = own.to_numpy(x)
        if dtype_name(found) in _WIDE and found.size and not -(2**31) <= found.min() <= found.max() < 2**31:
            raise ValueError(f"{name}: expected integers of at most 32 bits, got {found.min()} to {found.max()}")
        return found.copy() if recorded and own is NUMPY else found
    if own is kind and device == kind.device(q):
        return kind.resolve(x)
    if device == "cpu" and (own is NUMPY or x.ndim == 0):
        return kind.on_device(own.to_numpy(x), q)
    raise ValueError(f"{name}: expected an array on {kind.device(q)} like q, got one of {own.name} on {device}")


def _type_of(x: Any) -> TableType:
    if isinstance(x, np.ndarray):
        return TableType(dtype_name(x), x.shape, tuple(step // x.itemsize for step in x.strides))
    kind = namespace_of(x)
    assert kind is not None  # _moved has checked it
    given = kind.operand(x)
    return TableType(dtype_name(x), tuple(given.shape), tuple(given.strides))


def _cast(x: Any, dtype: Any) -> Any:
    """Convert an array to a dtype, given by name or as the library's object."""
    if namespace_of(x) is None or dtype_name(x) == str(dtype).removeprefix("torch."):
        return x
    if hasattr(x, "astype"):
        return x.astype(numpy_dtype(dtype) if isinstance(dtype, str) else dtype)
    return x.to(getattr(namespace_of(x).module, dtype) if isinstance(dtype, str) else dtype)  # type: ignore[union-attr]


def _returned(gradient: Any, like: Any) -> Any:
    own, kind = namespace_of(like), namespace_of(gradient)
    assert own is not None and kind is not None
    if kind is not own:
        gradient = own.from_numpy(kind.to_host(gradient))
    return _cast(gradient, like.dtype)
