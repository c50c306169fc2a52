"""Plans: a pattern compiled once into tiles over affine views; every backend executes the same plan."""

from __future__ import annotations

from .._index_checks import check_lengths
from .._limits import memory
from ..patterns import Pattern
from ..patterns._check import integer, integers
from ._build import build
from ._cache import PlanCacheInfo, clear_plan_cache, find, keep, plan_cache_info
from ._sealed import seal, validate
from ._tiling import Budget
from ._types import LARGEST_SIDE, Plan, positions

__all__ = ["Plan", "PlanCacheInfo", "clear_plan_cache", "plan", "plan_cache_info", "positions", "validate"]


def plan(
    pattern: Pattern,
    q_len: int,
    kv_len: int | None = None,
    *,
    batch: int = 1,
    heads: int | None = None,
    tile: tuple[int, int] = (128, 64),
    workers: int = 1,
    max_bytes: int | None = None,
) -> Plan:
    """Compile a pattern at given lengths into a plan that every backend can execute.

    Parameters
    ----------
    pattern : Pattern
        What is allowed.
    q_len, kv_len : int
        Lengths in tokens; `kv_len` defaults to `q_len`.
    batch, heads : int, optional
        Batch entries and query heads; they matter only to patterns that tell them apart. `heads` defaults to the
        pattern's own number.
    tile : (int, int), optional
        Queries and keys of a tile, at most 32768; the number of keys is a multiple of 64.
    workers : int, optional
        How many workers (processor cores, multiprocessors) share one head's work, at least 1: long key lists are split
        so that each has about four pieces.
    max_bytes : int, optional
        The most memory that making the plan may take; by default the memory that this process may use (the machine's,
        the cgroup's or what the limit of its address space leaves). It does not change the plan.

    Returns
    -------
    Plan
        Those used last are kept, up to 256 plans and 256 MiB with their patterns; a larger one is made anew by every
        call, unless its user keeps it and hands it to :func:`spattn.attention`. See :func:`spattn.plan_cache_info`.

    Raises
    ------
    TypeError
        If `pattern` is not a Pattern, or `batch`, `heads`, `tile`, `workers` or `max_bytes` is not of integers.
    ValueError
        If the pattern does not fit the lengths, the batch or the heads; if a number is out of range; if the plan would
        have 2³¹ tiles or more, or takes at least a number of bytes, which the message says, that `max_bytes` does not
        allow; if ``pattern.parts()`` has a lattice that leaves the sequence or visits a position twice.

    Notes
    -----
    Costs O(q_len + kv_len + tiles), never q_len × kv_len, for patterns whose ``allows`` uses operators and ufuncs. A
    plan that is too large is refused before its tiles are listed, from the tiles that are known to be in it.

    Examples
    --------
    >>> import spattn
    >>> p = spattn.plan(spattn.patterns.SlidingWindow(256), 16384)
    >>> p.nnz, round(p.efficiency, 2)
    (8339200, 0.8)
    """
    kv_len = q_len if kv_len is None else kv_len
    if not isinstance(pattern, Pattern):
        raise TypeError(f"pattern: expected a Pattern, got {type(pattern).__name__}")
    check_lengths(q_len, kv_len)
    heads = max(1, pattern.sizes()[1]) if heads is None else _at_least(0, "heads", heads)
    key = (
        pattern, int(q_len), int(kv_len), _at_least(0, "batch", batch), heads, _check_tile(tile),
        _at_least(1, "workers", workers),
    )  # fmt: skip
    if max_bytes is not None:
        _at_least(0, "max_bytes", max_bytes)
    kept = find(key)
    if kept is None:
        budget = Budget(memory() if max_bytes is None else max_bytes)
        return keep(key, seal(build(*key, budget)), budget.needed)
    if max_bytes is not None:  # as if the plan were made now
        Budget(max_bytes).need(kept.needed)
    return kept.plan


def _at_least(least: int, name: str, value: int) -> int:
    return value if type(value) is int and value >= least else integer(name, value, least)


def _check_tile(tile: tuple[int, int]) -> tuple[int, int]:
    if not (type(tile) is tuple and len(tile) == 2 and type(tile[0]) is type(tile[1]) is int):
        tile = integers("tile", tile)
    if len(tile) != 2 or not 1 <= tile[0] <= LARGEST_SIDE or not 1 <= tile[1] <= LARGEST_SIDE or tile[1] % 64:
        expected = f"(block_q >= 1, a multiple of 64), both up to {LARGEST_SIDE}"
        raise ValueError(f"tile: expected {expected}, got {tile}")
    return tile
