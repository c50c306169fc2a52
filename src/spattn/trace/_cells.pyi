"""Type stub; documented in _cells.pyx."""

from collections.abc import Sequence

import numpy as np

OPERATIONS: dict[str, int]
TYPES: dict[str, int]
LANES: int

def evaluate(
    steps: np.ndarray,
    result: int,
    tables: Sequence[np.ndarray],
    inputs: Sequence[tuple[int, np.ndarray]],
    registers: np.ndarray,
    found: np.ndarray,
) -> bool: ...
