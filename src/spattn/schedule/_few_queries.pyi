"""Type stubs of the compiled tables of rows, documented in _few_queries.pyx."""

from typing import Any

import numpy as np

def device_tables(
    words: np.ndarray,
    variant: np.ndarray,
    kv_len: int,
    group: int,
    heads_per_kv: int,
    tile: int,
    workers: int,
    query_views: np.ndarray,
    key_views: np.ndarray,
    counters: int,
) -> tuple[np.ndarray, dict[str, int], tuple[Any, ...], tuple[int, int, int, int]]: ...
def by_pairs(words: np.ndarray) -> bool: ...
def tables_of_rows(
    words: np.ndarray, kv_len: int, workers: int, sparse: bool | None = None, tile: int = 0
) -> dict[str, Any]: ...
