"""Relative position biases of T5."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..composition import ScoreFunction
from ..functions import clip, take
from ..recorder import constant
from ._numbers import check_size, check_table, constants

__all__ = ["t5_bias"]


@functools.lru_cache(64)
def _buckets(count: int, max_distance: int) -> np.ndarray:
    """The bucket of each distance from 0 to `max_distance`: exact up to count // 2, then logarithmic.

    Computed in float32 like the published code, so that distances at a border get the same bucket.
    """
    exact = count // 2
    distance = np.arange(max_distance + 1)
    with np.errstate(divide="ignore"):
        ratio = np.log(distance.astype(np.float32) / np.float32(exact)) / np.float32(math.log(max_distance / exact))
    far = exact + np.maximum(ratio * np.float32(count - exact), 0).astype(np.int64)
    found = np.where(distance < exact, distance, np.minimum(far, count - 1)).astype(np.int32)
    found.flags.writeable = False
    return found


@dataclass(frozen=True, eq=False, repr=False)
class t5_bias(ScoreFunction):
    """Add T5's bias: an entry per bucket of the distance, and per head.

    Parameters
    ----------
    table : (num_buckets, heads_q) array of floats
        ``relative_attention_bias.weight`` of T5's models. It gets a gradient.
    bidirectional : bool, optional
        True, for encoders: keys after the query have their own buckets, the upper half. False, for decoders: all keys
        after the query are in bucket 0.
    max_distance : int, optional
        Greater distances are in the last bucket.

    Raises
    ------
    ValueError
        If there are fewer than four buckets (two if not bidirectional), or `max_distance` is not greater than the
        exact distances.

    Notes
    -----
    With n buckets per direction, each distance below n / 2 has its own bucket. The bucket of other distances is
    ``n / 2 + floor(log(distance / (n / 2)) / log(max_distance / (n / 2)) * (n / 2))``, at most n - 1 [1]_. T5's layers
    share one table, whose gradient is the sum over layers. T5 does not scale scores: pass ``scale=1.0``.

    References
    ----------
    .. [1] C. Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text transformer",
       JMLR 2020.

    Examples
    --------
    >>> import numpy as np
    >>> from spattn.score import t5_bias
    >>> function = t5_bias(np.arange(32.0)[:, None])
    >>> [float(function(0.0, 0, 0, q=500, k=500 + d)) for d in (-200, -9, -1, 0, 1, 9, 200)]
    [15.0, 8.0, 1.0, 0.0, 17.0, 24.0, 31.0]
    """

    table: Any
    bidirectional: bool = True
    max_distance: int = 128

    def __post_init__(self) -> None:
        check_table("table", self.table, 2)
        count = self._count()
        if count < 2:
            raise ValueError(
                f"table: expected at least {4 if self.bidirectional else 2} buckets, got {self.table.shape[0]}"
            )
        if not self.max_distance > count // 2:
            raise ValueError(f"max_distance: expected more than {count // 2}, got {self.max_distance}")

    def _count(self) -> int:
        """Buckets of one direction."""
        return int(self.table.shape[0]) // 2 if self.bidirectional else int(self.table.shape[0])

    def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        check_size("t5_bias", self.table, 1, score)
        count, farthest = self._count(), constant(self.max_distance)
        distance = k - q if self.bidirectional else q - k
        buckets = constants(score, __name__, "_buckets", count, self.max_distance)
        bucket = take(buckets, clip(abs(distance) if self.bidirectional else distance, 0, farthest))
        if self.bidirectional:
            bucket = bucket + (distance > 0) * constant(count)
        return score + take(self.table, bucket, h)
