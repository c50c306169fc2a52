"""Type stubs of the compiled core, documented in _core.pyx."""

import numpy as np

from ..planning import Plan
from ..request.call import Call
from ..request.dropout import DropoutWords
from ..schedule.gradients import Units
from ._score import Bound, Encoded

DTYPES: tuple[str, ...]
OPENMP: bool
FEW_QUERIES: int
OPERATIONS: dict[str, int]
SUM_WORDS: int
MOST_AXES: int
FAR_LSE: dict[int, float]

def table_names() -> tuple[str, ...]: ...
def openmp_threads() -> int: ...
def in_parallel() -> bool: ...
def team_size(threads: int) -> int: ...
def observe(threads: int, region: int, worked: int, lost: int) -> None: ...
def exact_sums(words: np.ndarray, out: np.ndarray) -> None: ...

class Prepared:
    score: Encoded | None
    def __init__(
        self,
        call: Call,
        plan: Plan,
        work: np.ndarray,
        together: int,
        isa: str,
        least: int = 0,
        score: Encoded | None = None,
    ) -> None: ...

def forward(
    prepared: Prepared,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    scale: float,
    threads: int,
    instead: tuple[np.ndarray, np.ndarray] | None = None,
    score: Bound | None = None,
    sinks: np.ndarray | None = None,
    dropout: DropoutWords | None = None,
) -> bool: ...
def backward(
    prepared: Prepared,
    split: Units,
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    dlse: np.ndarray | None,
    dq: np.ndarray,
    dk: np.ndarray,
    dv: np.ndarray,
    scale: float,
    threads: int,
    instead: tuple[np.ndarray, np.ndarray] | None = None,
    score: Bound | None = None,
    sinks: np.ndarray | None = None,
    dsinks: np.ndarray | None = None,
    sink_rows: np.ndarray | None = None,
    dropout: DropoutWords | None = None,
) -> bool: ...
