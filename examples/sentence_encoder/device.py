"""Array device and dense baseline of part (c)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .naive import STRIP_CELLS, dense_attention


@dataclass(frozen=True)
class Device:
    """A backend and its array library.

    Attributes
    ----------
    put, get : callable
        NumPy array to the device, and back.
    wait : callable
        Synchronise with the device.
    dense : callable
        Naive dense attention on the device.
    dense_label, note : str
        Name of the dense baseline, and a caveat for the reader of the timings.
    """

    backend: str
    put: Callable[[np.ndarray], Any]
    get: Callable[[Any], np.ndarray]
    wait: Callable[[], None]
    dense: Callable[[Any, Any, Any], Any]
    dense_label: str
    note: str


def device_for(backend: str) -> Device:
    """NumPy arrays; PyTorch tensors on the GPU for the backend "cuda" where PyTorch has one."""
    if backend == "cuda":
        return _torch_device() or Device(
            "cuda",
            np.asarray,
            np.asarray,
            _nothing,
            dense_attention,
            "naive dense (NumPy, on the CPU)",
            "PyTorch sees no GPU: spattn's times include copies to and from it, and the dense line is the CPU's",
        )
    return Device(
        backend,
        np.asarray,
        np.asarray,
        _nothing,
        dense_attention,
        "naive dense (NumPy)",
        "naive dense: softmax(q kᵀ / √d) v in NumPy, head by head in strips of rows; matrix products by its BLAS",
    )


def _torch_device() -> Device | None:
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    torch.backends.cuda.matmul.allow_tf32 = False

    def dense(q: Any, k: Any, v: Any) -> Any:
        rows = max(1, 64 * STRIP_CELLS // k.shape[2])
        scale = q.shape[3] ** -0.5
        strips = [((x * scale) @ k.mT).softmax(-1) @ v for x in q.split(rows, dim=2)]
        return torch.cat(strips, dim=2)

    return Device(
        "cuda",
        lambda x: torch.from_numpy(x).cuda(),
        lambda x: x.cpu().numpy(),
        torch.cuda.synchronize,
        dense,
        "naive dense (PyTorch, on the GPU)",
        "naive dense: softmax(q kᵀ / √d) v in PyTorch float32 (no TF32) on the same GPU, in strips of rows",
    )


def _nothing() -> None:
    pass
