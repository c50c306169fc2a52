"""The array kinds that spattn takes, described alike: what they are, where they live, how to see them as NumPy.

Frameworks are looked up in ``sys.modules`` only: an array of a framework that was never imported cannot exist.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = ("float32", "float64", "float16", "bfloat16")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def kind(x: Any) -> str | None:
    """'numpy', 'torch', 'cupy', 'jax', or None for anything else."""
    if isinstance(x, np.ndarray):
        return "numpy"
    torch, cupy, jax = (sys.modules.get(name) for name in ("torch", "cupy", "jax"))
    if torch is not None and isinstance(x, torch.Tensor):
        return "torch"
    if cupy is not None and isinstance(x, cupy.ndarray):
        return "cupy"
    if jax is not None and isinstance(x, jax.Array):
        return "jax"
    return None


def dtype_name(x: Any) -> str:
    """The element type's name without its framework: 'float32', 'bfloat16', 'int64', ..."""
    return _name(x.dtype)


@functools.cache  # NumPy takes microseconds to spell a name
def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def device_of(x: Any) -> str:
    """'cpu', or 'cuda:N' with the device's number."""
    match kind(x):
        case "torch":
            return "cpu" if x.device.type == "cpu" else f"{x.device.type}:{x.device.index or 0}"
        case "cupy":
            return f"cuda:{x.device.id}"
        case "jax":
            device = next(iter(x.devices()))
            return "cpu" if device.platform == "cpu" else f"cuda:{device.local_hardware_id}"
    return "cpu"


def to_numpy(x: Any) -> np.ndarray:
    """A host array seen as NumPy, without copying where the framework allows."""
    if kind(x) == "torch":
        torch = sys.modules["torch"]
        x = x.detach().resolve_neg().resolve_conj()
        return x.view(torch.int16).numpy().view(BFLOAT16) if x.dtype == torch.bfloat16 else x.numpy()
    return np.asarray(x)


def to_host(x: Any) -> np.ndarray:
    """Any array as NumPy, copied from its device where it is not in host memory."""
    match kind(x):
        case "cupy":
            return x.get()
        case "torch":
            return to_numpy(x.cpu())
    return np.asarray(x)


def from_numpy(x: np.ndarray, like: Any) -> Any:
    """A NumPy result as the kind of array that `like` is."""
    match kind(like):
        case "torch":
            torch = sys.modules["torch"]
            if x.dtype == BFLOAT16:
                return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
            return torch.from_numpy(x)
        case "jax":
            return sys.modules["jax"].numpy.asarray(x)
    return x


def wants_gradient(x: Any) -> bool:
    """Whether PyTorch would record a gradient through this tensor now."""
    return kind(x) == "torch" and x.requires_grad and sys.modules["torch"].is_grad_enabled()
