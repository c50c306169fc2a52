"""Type stubs of the compiled tables of rows, documented in _few_queries.pyx."""

from typing import Any

import numpy as np

class StepTables:
    def __init__(
        self,
        batch: int,
        heads: int,
        q_len: int,
        group: int,
        heads_per_kv: int,
        tile: int,
        workers: int,
        views: bytes,
        query_views: bytes,
        key_views: bytes,
        length_at: int,
        counters: int,
    ) -> None: ...
    def of(self, words: np.ndarray, variant: np.ndarray, kv_len: int) -> RowTables | None: ...

class RowTables:
    nbytes: int
    tasks: int
    longest: int
    slots: int
    merges: int
    def addresses(self, first: int) -> tuple[int, ...]: ...
    def write(self, address: int) -> None: ...
    def check(self, address: int) -> None: ...

def by_pairs(words: np.ndarray) -> bool: ...
def tables_of_rows(
    words: np.ndarray, kv_len: int, workers: int, sparse: bool | None = None, tile: int = 0
) -> dict[str, Any]: ...
