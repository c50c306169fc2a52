"""What Python calls of the compiled bitmasks, for type checkers; _bitmasks.pyx documents it."""

import numpy as np

def hashes(masks: np.ndarray) -> np.ndarray: ...

class Numbers:
    def number(self, hashes: np.ndarray, masks: np.ndarray, stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]: ...
