"""What Python calls of the compiled proof, for type checkers; _proof.pyx documents it."""

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
