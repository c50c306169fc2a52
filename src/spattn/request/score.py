"""Score functions of the kernels. They are not public yet: only tests pass one to a call."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["KINDS", "Score", "check_score"]

KINDS = ("identity", "softcap", "alibi")  # files in scores/; kernels use the index


class Score(NamedTuple):
    """A score function of ``scores/<name>.h``, with one parameter per query head.

    Kernels apply it to the scaled score of every allowed pair, before they take the maximum, and its derivative in the
    backward pass. Positions are those of the pattern: the last query has the position of the last key.
    """

    name: str
    values: tuple[float, ...]  # (heads_q,)


def check_score(score: Score, heads_q: int) -> None:
    """Check the name and the number of parameters, which kernels read by query head."""
    if score.name not in KINDS or len(score.values) != heads_q:
        raise ValueError(f"score: expected one of {', '.join(KINDS)} with {heads_q} values, got {score}")
