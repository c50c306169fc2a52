"""Type stubs of the compiled tables of rows, documented in _few_queries.pyx."""

from typing import Any

import numpy as np

def by_pairs(words: np.ndarray) -> bool: ...
def tables_of_rows(
    words: np.ndarray, kv_len: int, workers: int, sparse: bool | None = None, tile: int = 0
) -> dict[str, Any]: ...
