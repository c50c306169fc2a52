"""Make plans: at given lengths, or for the arrays of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .._util.imports import whole_imports
from ..arrays import autocast
from ..dispatch import as_pattern, backend_for, find_plan
from ..patterns import Pattern
from ..planning import Plan
from ..request.call import Call, check_options

__all__ = ["Tiling", "plan", "plan_for"]


@dataclass(frozen=True)
class Tiling:
    """How a plan is tiled, for :func:`spattn.plan`. :func:`spattn.plan_for` chooses it for a call.

    Parameters
    ----------
    tile : (int, int), optional
        Queries and keys of a tile, at most 32768; the number of keys is a multiple of 64. The default is 128 × 64, or
        64 × 64 where a head's pairs are listed and scattered: if sampled non-empty tiles hold fewer than 8 pairs on
        average, hardly any two of which share a bitmask.
    box : tuple of int, optional
        Queries of a tile along each axis of a grid, as many in all as `tile` has; the keys that such a box of queries
        reaches form a view of their own. Applies to the parts of a pattern that have spans on as many axes.
    workers : int, optional
        How many workers (processor cores, multiprocessors) share one head's work, at least 1: long key lists are split
        so that each worker has about four pieces.
    """

    tile: tuple[int, int] | None = None
    box: tuple[int, ...] | None = None
    workers: int = 1


_DEFAULT = Tiling()


def plan(
    pattern: Pattern | str | Any,
    q_len: int,
    kv_len: int | None = None,
    *,
    batch: int = 1,
    heads: int | None = None,
    tiling: Tiling = _DEFAULT,
    max_bytes: int | None = None,
) -> Plan:
    """Compile a pattern at given lengths into a plan that every backend can execute.

    Parameters
    ----------
    pattern : Pattern, str or bool array
        As for :func:`spattn.attention`.
    q_len, kv_len : int
        Lengths in tokens; `kv_len` defaults to `q_len`.
    batch, heads : int, optional
        Batch entries and query heads; they matter only to patterns that differ between them. `heads` defaults to the
        pattern's own number.
    tiling : Tiling, optional
        Tile, box of queries and number of workers.
    max_bytes : int, optional
        The most memory that making the plan may take; by default the memory that this process may use (the machine's,
        the cgroup's or what the limit of its address space leaves). It does not change the plan.

    Returns
    -------
    Plan
        The last 256 plans, up to 256 MiB with their patterns, are cached; a larger one is made anew by every call,
        unless its user keeps it and hands it to :func:`spattn.attention`. See :func:`spattn.plan_cache_info`.

    Raises
    ------
    TypeError
        If `pattern` is not a pattern, a name or a bool array, `tiling` not a Tiling, or a number not an integer.
    ValueError
        If the pattern does not fit the lengths, the batch or the heads; if a number is out of range; if the plan would
        have 2³¹ runs of tiles or more (on a GPU: tiles), or needs more memory than `max_bytes` (the message says how
        much); if ``pattern.parts()`` has a lattice that leaves the sequence or visits a position twice.

    Notes
    -----
    Costs O(q_len + kv_len + tiles) where the planner can follow ``allows`` on whole tiles: integers that depend on the
    query or the key alone always, and what depends on both if it consists of sums, differences, products, comparisons,
    extrema, absolute values and ``//`` and ``%`` by constants. Anything else is evaluated in every cell of one tile of
    each kind, on the tiles that the rest of the predicate leaves undecided; a warning says on how many. A plan that is
    too large is refused before its tiles are listed.

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
        from ..schedule import compiler  # late, as backends are: `import spattn` takes little time

    if not isinstance(tiling, Tiling):
        raise TypeError(f"tiling: expected a spattn.Tiling, got {tiling!r}")
    return compiler.plan(
        as_pattern(pattern, (None, heads, None, None)),
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
    backend: str = "auto",
    layout: str = "bhsd",
    max_bytes: int | None = None,
) -> Plan:
    """Compile the plan that :func:`spattn.attention` uses for these arrays.

    Parameters
    ----------
    pattern, q, k, v, backend, layout
        As for :func:`spattn.attention`; no value of the arrays is read.
    max_bytes : int, optional
        As for :func:`plan`.

    Returns
    -------
    Plan
        With the tiles that the backend's kernels have for such a call, so that its efficiency is the one that is paid.

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
    return find_plan(backend_for(call, backend), pattern, call, max_bytes)
