"""Results of the example's parts: plain records, shared by the code that measures, prints and draws."""

from __future__ import annotations

from dataclasses import dataclass

TOLERANCE = 1e-5
"""Largest absolute difference between results of spattn and of its baselines."""

PARTS = ("projections", "attention", "MLP")
"""Parts of an encoder layer, as profiled in Transformers."""


@dataclass(frozen=True)
class Agreement:
    """Largest absolute difference between spattn's dense embeddings and plain NumPy's.

    Attributes
    ----------
    padded, packed : float
        For padded batches, and for texts packed into one sequence.
    """

    texts: int
    tokens: int
    padded: float
    packed: float

    @property
    def holds(self) -> bool:
        """Whether both are within :data:`TOLERANCE`; False for NaN."""
        return self.padded <= TOLERANCE and self.packed <= TOLERANCE


@dataclass(frozen=True)
class Shift:
    """Effect of a sparse pattern on the embeddings.

    Attributes
    ----------
    pairs : float
        Allowed pairs / all pairs of each text.
    efficiency : float
        Allowed pairs / pairs in the tiles of the plans.
    cosine_mean, cosine_min : float
        Cosine between sparse and dense embeddings.
    found : int
        Functions whose nearest module opening is that of their own module.
    """

    pattern: str
    pairs: float
    efficiency: float
    cosine_mean: float
    cosine_min: float
    found: int


@dataclass(frozen=True)
class Timing:
    """Seconds of one forward call: the median of `runs` calls."""

    seconds: float
    runs: int


@dataclass(frozen=True)
class Case:
    """One pattern at one length.

    Attributes
    ----------
    speedup : float
        Naive dense seconds / spattn seconds.
    plan_seconds : float
        Planning time, paid once: plans are cached.
    error : float or None
        Largest absolute difference from the float64 reference; computed at the shortest length only.
    """

    pattern: str
    tokens: int
    timing: Timing
    speedup: float
    density: float
    efficiency: float
    plan_seconds: float
    error: float | None


@dataclass(frozen=True)
class Timings:
    """Results of part (c).

    Attributes
    ----------
    dense : dict
        Tokens -> timing of naive dense attention.
    cases : list of Case
    omitted : list of int
        Lengths beyond the time budget, in tokens.
    """

    dense: dict[int, Timing]
    cases: list[Case]
    omitted: list[int]


@dataclass(frozen=True)
class Profile:
    """Seconds of one forward pass of the model in Transformers: medians over rounds.

    Attributes
    ----------
    layers : list of dict
        For each layer: part -> seconds.
    rest : float
        Layer norms, hooks and Python calls.
    """

    name: str
    embedding: float
    layers: list[dict[str, float]]
    rest: float

    @property
    def whole(self) -> float:
        """Total seconds."""
        return self.embedding + sum(sum(layer.values()) for layer in self.layers) + self.rest
