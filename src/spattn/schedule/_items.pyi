"""Type stubs of the compiled item pass, documented in _items.pyx."""

from collections.abc import Sequence

import numpy as np

def lists_of(components: np.ndarray, indptr: np.ndarray, tile_indptr: np.ndarray) -> np.ndarray: ...
def cut(
    lists: Sequence[np.ndarray],
    longest: int,
    least: np.ndarray | None,
    meeting: np.ndarray | None,
    dtype: np.dtype[np.void],
) -> tuple[np.ndarray, np.ndarray, int]: ...
def fill(sources: np.ndarray, at: np.ndarray, count: np.ndarray, first: np.ndarray, step: int) -> None: ...
