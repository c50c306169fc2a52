"""Make plans for given lengths, or for the arrays of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .._util.imports import whole_imports
from ..arrays import autocast
from ..dispatch import backend_for, find_plan, resolve
from ..patterns import Pattern
from ..planning import Plan
from ..request.call import Call, check_options

__all__ = ["Tiling", "plan", "plan_for"]


@dataclass(frozen=True)
class Tiling:
    """The tiling of a plan, for :func:`spattn.plan`. :func:`spattn.plan_for` selects one for a call.

    Parameters
    ----------
    tile : (int, int), optional
        Queries and keys per tile, each at most 32768; the number of keys must be a multiple of 64. The default is
        128 × 64. It is 64 × 64 for a pattern that lists its pairs, such as CSR, if sampled non-empty tiles hold fewer
        than 8 pairs on average: nearly every tile then has a bitmask of its own, and smaller tiles have smaller ones.
    box : tuple of int, optional
        Queries of a tile along each axis of a grid; the product must equal the queries of `tile`. Each box of queries
        gets a separate view of the keys that it needs. Only parts of the pattern that have a
        :class:`~spattn.patterns.authoring.Span` along each of these axes are divided into boxes.
    workers : int, optional
        Number of workers (CPU cores or SMs) for each head, at least 1. Long key lists are split so that each worker
        gets about four work items.
    """

    tile: tuple[int, int] | None = None
    box: tuple[int, ...] | None = None
    workers: int = 1

    def __post_init__(self) -> None:
        for name in ("tile", "box"):
            if isinstance(value := getattr(self, name), (list, np.ndarray)):
                object.__setattr__(self, name, tuple(value))


_DEFAULT = Tiling()


def plan(
    pattern: Pattern | str | Any,
    q_len: int,
    kv_len: int | None = None,
    *,
    batch: int = 1,
    heads: int | None = None,
    key_padding: Any = None,
    tiling: Tiling = _DEFAULT,
    max_bytes: int | None = None,
) -> Plan:
    """Compile a pattern for given lengths into a plan that every backend can execute.

    Parameters
    ----------
    pattern
        As for :func:`spattn.attention`, but not a plan.
    q_len, kv_len : int
        Lengths in tokens; `kv_len` defaults to `q_len`.
    batch, heads : int, optional
        Batch size and query heads; relevant only to patterns that differ between batch entries or heads. `heads`
        defaults to the pattern's number of heads.
    key_padding : (batch, kv_len) array, optional
        As for :func:`spattn.attention`.
    tiling : Tiling, optional
        Tile size, query box and number of workers.
    max_bytes : int, optional
        Memory limit of the planner; by default the memory available to this process (physical memory, cgroup limit or
        address space limit). It does not change the plan.

    Returns
    -------
    Plan
        The 256 most recently used plans, up to 256 MiB with their patterns, are cached. A larger plan is not cached:
        keep it and pass it to :func:`spattn.attention`. See :func:`spattn.plan_cache_info`.

    Raises
    ------
    TypeError
        If `pattern` is not a pattern; if `tiling` is not a Tiling; if a number is not an integer.
    ValueError
        If the pattern does not match the lengths, the batch size or the heads; if a number is out of range; if the plan
        would have 2³¹ or more runs of tiles (tiles, for :func:`plan_for` on a GPU), or would need more than `max_bytes`
        of memory (the message states the amount); if a lattice in ``pattern.parts()`` leaves the sequence or repeats a
        position.

    Notes
    -----
    The cost is O(q_len + kv_len + tiles) if the planner can evaluate ``allows`` symbolically on whole tiles. Integer
    expressions of the query alone or the key alone always qualify. Expressions of both qualify if they consist of sums,
    differences, products, comparisons, minima, maxima, absolute values, and ``//`` and ``%`` by constants. Any other
    expression is evaluated cell by cell, on one tile of each equivalence class that the rest of the predicate does not
    decide; a warning gives the number of these tiles. A plan over a limit is rejected before its tiles are listed.

    Examples
    --------
    >>> import spattn
    >>> p = spattn.plan(spattn.patterns.SlidingWindow(256), 16384)
    >>> p.nnz, round(p.efficiency, 2)
    (8339200, 0.8)
    >>> spattn.plan("causal", 1024, tiling=spattn.Tiling(tile=(64, 64))).tile
    (64, 64)
    """
    with whole_imports:
        from ..schedule import compiler  # imported late, as backends are, to keep `import spattn` fast

    if not isinstance(tiling, Tiling):
        raise TypeError(f"tiling: expected a spattn.Tiling, got {tiling!r}")
    own = resolve(pattern, (batch, heads, q_len, q_len if kv_len is None else kv_len), key_padding)
    if isinstance(own, Plan):
        raise TypeError("pattern: expected a Pattern, got a Plan, which is planned already")
    return compiler.plan(
        own,
        q_len,
        kv_len,
        batch=batch,
        heads=heads,
        tile=tiling.tile,
        box=tiling.box,
        workers=tiling.workers,
        max_bytes=max_bytes,
    )


def plan_for(
    pattern: Pattern | str | Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    key_padding: Any = None,
    backend: str = "auto",
    layout: str = "bhsd",
    max_bytes: int | None = None,
) -> Plan:
    """Compile the plan that :func:`spattn.attention` uses for the given arrays.

    Parameters
    ----------
    pattern, q, k, v, key_padding, backend, layout
        As for :func:`spattn.attention`. The values of q, k and v are not read.
    max_bytes : int, optional
        As for :func:`plan`.

    Returns
    -------
    Plan
        The plan with the tile size of the backend's kernels; its efficiency is that of the actual call.

    Raises
    ------
    TypeError, ValueError, BackendUnavailableError
        As :func:`spattn.attention` and :func:`plan`.

    Examples
    --------
    >>> import numpy as np, spattn
    >>> q = k = v = np.zeros((1, 8, 16384, 64), np.float32)
    >>> spattn.plan_for(spattn.patterns.SlidingWindow(256), q, k, v, backend="cpu").tile
    (48, 64)
    """
    check_options(backend, layout=layout)
    call = Call.of(*(autocast(q, k, v) or (q, k, v)), layout=layout)
    return find_plan(backend_for(call, backend), resolve(pattern, call.sizes, key_padding), call, max_bytes)
