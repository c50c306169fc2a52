"""Evaluate predicates on whole tiles: intervals, congruences and tables."""

from __future__ import annotations

import numpy as np

from .cells import Cells
from .excerpts import looked_up, read
from .fractions import summed
from .functions import FUNCTIONS, converted
from .rules import rule_of
from .symbols import Rules, TilePairs, combine

__all__ = ["TilePairs", "combine", "tile_pairs"]

_RULES = Rules(rule_of, FUNCTIONS, converted, looked_up, read, summed)


def tile_pairs(query: Cells, key: Cells, query_box: np.ndarray, key_box: np.ndarray, *, with_keys: bool) -> TilePairs:
    """Return symbolic tile pairs on which NumPy operators, ufuncs and functions can be called."""
    return TilePairs(query, key, query_box, key_box, with_keys, _RULES)
