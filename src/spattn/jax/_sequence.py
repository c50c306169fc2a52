"""Attention under ``shard_map`` over a sequence that is sharded over devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..patterns import Causal, Full, Pattern, SlidingWindow
from ..patterns.conversion import as_pattern
from ._attention import attention

__all__ = ["sequence_attention"]


def sequence_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, pattern: Pattern | str = "full", *, axis_name: str, **options: Any
) -> Any:
    """Compute attention over a sequence that ``jax.shard_map`` shards over a mesh axis.

    Parameters
    ----------
    q : (batch, heads_q, n, head_dim) array
        The device's queries; all devices have equally many, in the order of the axis.
    k, v : (batch, heads_kv, n, …) array
        The same rows of keys and values.
    pattern : {"causal", "full"}, Causal, Full or SlidingWindow, optional
        Allowed pairs of the whole sequence.
    axis_name : str
        Name of the mesh axis.
    **options
        `scale`, `backend`, `return_lse`, `precision`, `sinks`, as for :func:`attention`.

    Returns
    -------
    out : (batch, heads_q, n, head_dim_v) array
        The device's rows; with `return_lse`, also their lse.

    Raises
    ------
    TypeError
        If another option is given: positions of score functions and dropout would be those of the shard.
    ValueError
        If the pattern is another one.

    Notes
    -----
    Windows receive the keys within reach from their neighbors, by ``ppermute``; causal and full attention gather all
    keys. Gradients with respect to k and v are summed over devices: their rounding depends on the number of devices.

    Examples
    --------
    >>> import jax, numpy as np, spattn.jax
    >>> from spattn.patterns import SlidingWindow
    >>> rows = jax.sharding.PartitionSpec(None, None, "sequence")
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("sequence",))
    >>> def attend(q, k, v):
    ...     return spattn.jax.sequence_attention(q, k, v, SlidingWindow(16, 0), axis_name="sequence")
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 2, 100, 16))
    >>> jax.shard_map(attend, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows)(q, k, v).shape
    (1, 2, 100, 16)
    """
    for name in options:
        if name not in ("scale", "backend", "return_lse", "precision", "sinks"):
            raise TypeError(f"{name}: not an option of sequence_attention")
    devices, n = jax.lax.axis_size(axis_name), q.shape[2]
    left, right = _reach(pattern, n * devices)
    gathers = max(left, right) > n * (devices - 1)
    if gathers:
        keys, values = (jax.lax.all_gather(x, axis_name, axis=2, tiled=True) for x in (k, v))
    else:
        keys, values = (_with_halos(x, left, right, axis_name, devices) for x in (k, v))

    def on_device(rank: int) -> Any:
        """Compute the rows of one device from the keys in reach. Rows of queries are aligned with the last key."""
        low, high = min(left, rank * n), min(right, (devices - 1 - rank) * n)
        first = rank * n if gathers else left
        own = slice(first - low, first + n + high)
        window = SlidingWindow(left + high, right - high)
        return lambda q, keys, values: attention(q, keys[:, :, own], values[:, :, own], window, **options)

    return jax.lax.switch(jax.lax.axis_index(axis_name), list(map(on_device, range(devices))), q, keys, values)


def _reach(pattern: Any, length: int) -> tuple[int, int]:
    """Return how many tokens before and after a query are keys, at most `length`."""
    own = as_pattern(pattern)
    if isinstance(own, Full):
        return length, length
    if isinstance(own, Causal):
        return length, 0
    if not isinstance(own, SlidingWindow):
        raise ValueError(f"pattern: expected Causal, Full or SlidingWindow, got {own!r}; shard batch entries or heads")
    left, right = own.left, own.left if own.right is None else own.right
    return length if left < 0 else min(left, length), length if right < 0 else min(right, length)


def _with_halos(x: jax.Array, left: int, right: int, axis_name: str, devices: int) -> jax.Array:
    """Return the rows from `left` before the device's to `right` after them; `ppermute` gives 0 at the ends."""
    n = x.shape[2]
    parts = [x]
    for hop in range(1, -(-left // n) + 1):
        count = min(n, left - (hop - 1) * n)
        forth = [(rank, rank + hop) for rank in range(devices - hop)]
        parts.insert(0, jax.lax.ppermute(x[:, :, n - count :], axis_name, forth))
    for hop in range(1, -(-right // n) + 1):
        count = min(n, right - (hop - 1) * n)
        back = [(rank + hop, rank) for rank in range(devices - hop)]
        parts.append(jax.lax.ppermute(x[:, :, :count], axis_name, back))
    return jnp.concatenate(parts, axis=2)
