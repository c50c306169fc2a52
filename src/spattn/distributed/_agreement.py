"""Compare the arguments of a call among ranks, so that every rank raises the error that one finds."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..planning import Plan
from ..planning.contract.cache import kept_with_plan

__all__ = ["DIGEST", "agree", "compare", "digest", "digest_of_plan", "gathered"]

DIGEST = 8  # bytes of the digest of a call; zeros if there is none


def agree(group: Any, call: bytes | None, describe: Callable[[], dict[str, Any]]) -> None:
    """Compare the digests of a call among the ranks, None if there is none yet; unless all are equal, compare all."""
    if set(gathered(group, call or bytes(DIGEST))) != {call}:
        compare(group, describe)


def compare(group: Any, describe: Callable[[], dict[str, Any]]) -> None:
    """Compare ``describe()`` among the ranks.

    Raise ValueError on every rank if values differ, or if another rank raised an error; a rank raises its own error.
    """
    own, failed = None, None
    try:
        own = describe()
    except Exception as error:  # raised below, when the others know
        failed = error
    found: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(found, (own, None if failed is None else f"{type(failed).__name__}: {failed}"), group)
    except RuntimeError as error:
        raise _lost() from error
    if failed is not None:
        raise failed
    for rank, (_, text) in enumerate(found):
        if text is not None:
            raise ValueError(f"attention: rank {rank} raised {text}")
    for name in found[0][0]:
        values: dict[Any, list[int]] = {}
        for rank, (described, _) in enumerate(found):
            values.setdefault(described[name], []).append(rank)
        if len(values) > 1:
            text = "; ".join(f"{value} on ranks {ranks}" for value, ranks in values.items())
            raise ValueError(f"{name}: expected the same on every rank, got {text}")


def gathered(group: Any, value: bytes) -> list[bytes]:
    """Return the bytes of each rank, equally many.

    Raises
    ------
    RuntimeError
        If a rank does not answer within the timeout of the process group.
    """
    own = torch.tensor(list(value), dtype=torch.uint8)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    try:
        dist.all_gather(found, own, group=group)
    except RuntimeError as error:
        raise _lost() from error
    return [bytes(x.tolist()) for x in found]


def _lost() -> RuntimeError:
    return RuntimeError(
        "attention: a rank did not compare its arguments within the timeout of the process group: it has died, "
        "stalled, or made another call. Make a new process group"
    )


def digest(*values: Any) -> str:
    """Return a short digest of values and arrays."""
    state = sha256()
    for value in values:
        state.update(repr((value.dtype, value.shape)).encode() if isinstance(value, np.ndarray) else b"")
        state.update(np.ascontiguousarray(value).tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    return state.hexdigest()[:16]


@kept_with_plan
def digest_of_plan(plan: Plan) -> str:
    """Return a digest of the pairs and tiles of a plan."""
    return digest(*(value for name, value in sorted(vars(plan).items()) if isinstance(value, np.ndarray)))
