"""Macros and parameters of kernels with a score function."""

from __future__ import annotations

import functools

import numpy as np

from ...request.score import KINDS, Score, check_score
from ..driver.buffer import Buffer, upload
from ..driver.device import Device

__all__ = ["score_macros", "score_values"]


def score_macros(score: Score | None) -> dict[str, object]:
    """Return the macros of a kernel with this score function; none for the identity."""
    kind = 0 if score is None else KINDS.index(score.name)
    return {"SPATTN_SCORE_KIND": kind} if kind else {}


def score_values(device: Device, score: Score | None, heads_q: int) -> int:
    """Return the address of the function's parameters, (heads_q,) float32, kept until the process ends; 0 for the
    identity. The device's context must be current."""
    if score is None:
        return 0
    check_score(score, heads_q)
    return _on_device(device, score.values)[1]["values"]


@functools.cache
def _on_device(device: Device, values: tuple[float, ...]) -> tuple[Buffer, dict[str, int]]:
    return upload(device, {"values": np.array(values, np.float32)})
