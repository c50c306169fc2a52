"""What Python calls of the compiled listed pairs, for type checkers; _pairs.pyx documents it."""

import numpy as np

class Pairs:
    def __init__(self, tile: tuple[int, int], first_key: int, keys: int) -> None: ...
    def group(
        self, row: np.ndarray, key: np.ndarray, number: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]: ...

def bitmasks(first: np.ndarray, cell: np.ndarray, tiles: np.ndarray, words: int) -> np.ndarray: ...
