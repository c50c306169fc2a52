"""The array kinds that spattn takes, described alike: what they are, where they live, how to see them as NumPy.

Frameworks are looked up in ``sys.modules`` only: an array of a framework that was never imported cannot exist.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import ml_dtypes
import numpy as np

_P, _R = ParamSpec("_P"), TypeVar("_R")

DTYPES = ("float32", "float64", "float16", "bfloat16")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


_CLASSES = {"torch": "Tensor", "cupy": "ndarray", "jax": "Array"}


def kind(x: Any) -> str | None:
    """'numpy', 'torch', 'cupy', 'jax', or None for anything else."""
    if isinstance(x, np.ndarray):
        return "numpy"
    for name, array in _CLASSES.items():
        own = getattr(sys.modules.get(name), array, None)  # a module that another thread is importing has none yet
        if own is not None and isinstance(x, own):
            return name
    return None


def oddity(x: Any) -> str | None:
    """What an array is besides the values in its memory, and the way out; None for a plain array.

    To read the memory alone would lose it in silence: a mask, a structure, a transformation that is under way.
    """
    match kind(x):
        case "numpy":
            return _oddity_of_numpy(x)
        case "torch":
            return _oddity_of_torch(x)
        case "jax":
            return _oddity_of_jax(x)
    return None


def _oddity_of_numpy(x: np.ndarray) -> str | None:
    if type(x) is np.ndarray:
        return None
    masked = getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())
    return "a masked array; use .filled(), and a pattern for what is not allowed" if isinstance(x, masked) else None


def _oddity_of_torch(x: Any) -> str | None:
    torch = sys.modules["torch"]
    if x.is_nested:
        return "a nested tensor; join its sequences into one, with spattn.patterns.Documents"
    if type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a {type(x).__name__}, whose operations are not those of its memory; use a torch.Tensor of its values"
    if x.layout is not torch.strided:
        return f"a tensor of layout {x.layout}; use .to_dense()"
    if x.is_quantized:
        return "a quantized tensor; use .dequantize()"
    if x.is_meta:
        return "a meta tensor, which has no values"
    try:  # detached, because torch.func.grad wraps what is touched inside of it
        somewhere = x.detach().data_ptr() or not x.numel()
    except RuntimeError:
        somewhere = False
    return None if somewhere else "a tensor under a transformation of torch.func; call this outside of it"


def _oddity_of_jax(x: Any) -> str | None:
    jax = sys.modules["jax"]
    if isinstance(x, jax.core.Tracer):
        return "a tracer, which has no values; call this outside of jax.jit, jax.grad and jax.vmap"
    devices = len(x.devices())
    return f"one on {devices} devices; use jax.device_put(x, device)" if devices > 1 else None


def dtype_name(x: Any) -> str:
    """The element type's name without its framework: 'float32', 'bfloat16', 'int64', ..."""
    return _name(x.dtype)


@functools.cache  # NumPy takes microseconds to spell a name
def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def device_of(x: Any) -> str:
    """'cpu', 'cuda:N', or the framework's own name of another device: 'mps:0', 'tpu:3'; N is the device's number."""
    match kind(x):
        case "torch":
            return "cpu" if x.device.type == "cpu" else f"{x.device.type}:{x.device.index or 0}"
        case "cupy":
            return f"cuda:{x.device.id}"
        case "jax":
            device = next(iter(x.devices()))
            name = {"gpu": "cuda"}.get(device.platform, device.platform)
            return "cpu" if name == "cpu" else f"{name}:{device.local_hardware_id}"
    return "cpu"


def to_numpy(x: Any) -> np.ndarray:
    """A host array seen as NumPy, without copying where the framework allows."""
    if kind(x) == "torch":
        torch = sys.modules["torch"]
        x = x.detach().resolve_neg()  # of negation as a flag on the tensor
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
    """Whether PyTorch would record a gradient through this tensor now, or carry its tangent on."""
    if kind(x) != "torch":
        return False
    torch = sys.modules["torch"]
    if x.requires_grad and torch.is_grad_enabled():
        return True
    forward_ad = torch.autograd.forward_ad
    if getattr(forward_ad, "_current_level", 0) < 0:  # outside of dual_level(), which costs a microsecond to hear of x
        return False
    return forward_ad.unpack_dual(x).tangent is not None


def eager(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, before which a graph that torch.compile is tracing ends and behind which the next one begins.

    It would trace the checks, the planning and NumPy as if they were a model's.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        traced = getattr(sys.modules.get("torch.compiler"), "is_dynamo_compiling", None)
        if traced is not None and traced():
            return sys.modules["torch"].compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call
