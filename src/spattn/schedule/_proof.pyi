"""Type stubs of the compiled proof, documented in _proof.pyx."""

import numpy as np

def find_fault(
    views: np.ndarray,
    query_view: np.ndarray,
    owner: np.ndarray,
    tile: np.ndarray,
    slot: np.ndarray,
    work_indptr: np.ndarray,
    slots: int,
    rows: np.ndarray,
    indptr: np.ndarray,
    sources: np.ndarray,
    variants: np.ndarray,
    length: int,
    block: int,
    together: int,
    order: np.ndarray,
) -> tuple[int, int, int]: ...
