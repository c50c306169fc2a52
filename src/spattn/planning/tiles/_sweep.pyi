"""Type stub; documented in _sweep.pyx."""

from collections.abc import Sequence

from ...patterns.hints.closed_forms import Bands
from ._bitmasks import Bitmasks
from ._lists import RunLists

def sweep(
    queries: tuple[int, int],
    keys: tuple[int, int],
    conjuncts: Sequence[Bands],
    masks: Bitmasks,
    lists: RunLists,
    most: int,
) -> int: ...
