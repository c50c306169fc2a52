"""Make plans: at given lengths, or for the arrays of a call."""

from __future__ import annotations

from typing import Any

from .._util.imports import whole_imports
from ..arrays import autocast
from ..dispatch import backend_for, find_plan
from ..patterns import Pattern
from ..planning import Plan
from ..request.call import Call, check_options

__all__ = ["plan"]


def plan(
    pattern: Pattern,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    batch: int = 1,
    heads: int | None = None,
    tile: tuple[int, int] | None = None,
    box: tuple[int, ...] | None = None,
    workers: int = 1,
    max_bytes: int | None = None,
    backend: str | None = None,
    like: tuple[Any, Any, Any] | None = None,
    layout: str = "bhnd",
) -> Plan:
    """Compile a pattern at given lengths into a plan that every backend can execute.

    Parameters
    ----------
    pattern : Pattern
        What is allowed.
    q_len, kv_len : int
        Lengths in tokens; `kv_len` defaults to `q_len`. `like` replaces them, and `batch`, `heads`, `tile`, `box` and
        `workers`.
    batch, heads : int, optional
        Batch entries and query heads; they matter only to patterns that tell them apart. `heads` defaults to the
        pattern's own number.
    tile : (int, int), optional
        Queries and keys of a tile, at most 32768; the number of keys is a multiple of 64. The default is 128 × 64, or
        without a `box` 64 × 64 where a head's pairs are listed and scattered: where, of sixteen query tiles, the tiles
        that hold a pair hold fewer than eight in the mean. Hardly any two of such tiles share a bitmask.
    box : tuple of int, optional
        Queries of a tile along each axis of a grid, as many in all as `tile` has; the keys that such a box of queries
        reaches are then a view of their own. Only the parts of a pattern that have spans on as many axes are cut so.
    workers : int, optional
        How many workers (processor cores, multiprocessors) share one head's work, at least 1: long key lists are split
        so that each has about four pieces.
    max_bytes : int, optional
        The most memory that making the plan may take; by default the memory that this process may use (the machine's,
        the cgroup's or what the limit of its address space leaves). It does not change the plan.

    backend : {"auto", "cpu", "cuda", "reference"}, optional
        Only with `like`: the backend whose plan is asked for, by default the one that such arrays go to.
    like : (q, k, v), optional
        Arrays as for :func:`spattn.attention`, whose plan for them is returned: the one with the tiles that its kernels
        have for such a call, so that its efficiency is the one that is paid.
    layout : {"bhnd", "bnhd", "thd"}, optional
        Only with `like`: of its arrays, as for :func:`spattn.attention`.

    Returns
    -------
    Plan
        Those used last are kept, up to 256 plans and 256 MiB with their patterns; a larger one is made anew by every
        call, unless its user keeps it and hands it to :func:`spattn.attention`. See :func:`spattn.plan_cache_info`.

    Raises
    ------
    TypeError
        If `pattern` is not a Pattern, or `batch`, `heads`, `tile`, `box`, `workers` or `max_bytes` is not of integers;
        if neither lengths nor `like` are given, or both; as :func:`spattn.attention` for `like`, `backend` and
        `layout`.
    BackendUnavailable
        If the backend asked for cannot run here.
    ValueError
        If the pattern does not fit the lengths, the batch or the heads; if a number is out of range; if the plan would
        have 2³¹ runs of tiles or more (on a GPU: tiles), or takes at least a number of bytes, which the message says,
        that `max_bytes` does not allow; if ``pattern.parts()`` has a lattice that leaves the sequence or visits a
        position twice.

    Notes
    -----
    Costs O(q_len + kv_len + tiles) where ``allows`` can be followed on whole tiles: integers that depend on the query
    or the key alone always can, and what depends on both if it is made of sums, differences, products, comparisons,
    extrema, absolute values and ``//`` and ``%`` by constants. Anything else is evaluated in every cell of one tile of
    each kind, on the tiles that the rest of the predicate leaves undecided; a warning says on how many. A plan that is
    too large is refused before its tiles are listed, from the tiles that are known to be in it.

    Examples
    --------
    >>> import spattn
    >>> p = spattn.plan(spattn.patterns.SlidingWindow(256), 16384)
    >>> p.nnz, round(p.efficiency, 2)
    (8339200, 0.8)
    >>> import numpy as np
    >>> q = k = v = np.zeros((1, 8, 16384, 64), np.float32)
    >>> spattn.plan(spattn.patterns.SlidingWindow(256), backend="cpu", like=(q, k, v)).tile
    (48, 64)
    """
    if like is None:
        with whole_imports:
            from ..schedule import compiler  # late, as backends are: `import spattn` takes little time

        if q_len is None or backend is not None or layout != "bhnd":
            raise TypeError(
                "plan(): expected q_len, or arrays like=(q, k, v) with which a backend and a layout may be named"
            )
        return compiler.plan(
            pattern, q_len, kv_len, batch=batch, heads=heads, tile=tile, box=box, workers=workers, max_bytes=max_bytes
        )
    given = q_len, kv_len, batch, heads, tile, box, workers
    if given != (None, None, 1, None, None, None, 1):
        raise TypeError("plan(): expected no lengths, batch, heads, tile, box or workers beside like=(q, k, v)")
    backend = "auto" if backend is None else backend
    check_options(backend, layout=layout)
    call = Call.of(*(autocast(*like) or like), layout=layout)
    return find_plan(backend_for(call, backend), pattern, call, max_bytes)
