"""PyTorch tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from .._util.imports import whole_imports
from .namespace import BFLOAT16, DTYPES, ArrayNamespace
from .operand import Operand, in_order


class Torch(ArrayNamespace):
    """PyTorch tensors."""

    name = "torch"

    def __init__(self) -> None:
        self.module = sys.modules["torch"]
        self._dtypes = {name: getattr(self.module, name) for name in DTYPES}
        self._forward_ad = self.module.autograd.forward_ad
        functorch = getattr(self.module._C, "_functorch", None)
        # Returns None outside a torch.func transformation, which wraps tensors without changing their class.
        self._transformation = getattr(functorch, "peek_interpreter_stack", None)
        # Returns the number of active dispatch modes, such as graph tracing and fake tensors.
        self._modes = self.module._C._len_torch_dispatch_stack
        self._script = self.module._C._get_tracing_state  # returns None outside torch.jit.trace
        self._autocast = self.module._C._is_any_autocast_enabled  # true if autocast is on for any device

    def is_plain(self, x: Any) -> bool:
        return type(x) is self.module.Tensor

    def oddity(self, x: Any) -> str | None:
        if x.is_nested:
            return "a nested tensor; concatenate its sequences and use spattn.patterns.Documents"
        if type(x).__torch_dispatch__ is not self.module.Tensor.__torch_dispatch__:
            return f"a {type(x).__name__} with operations of its own; pass its values as a plain torch.Tensor"
        if x.layout is not self.module.strided:
            return f"a tensor of layout {x.layout}; use .to_dense()"
        if x.is_quantized:
            return "a quantized tensor; use .dequantize()"
        if x.is_meta:
            return "a meta tensor, which has no values"
        try:  # detached, because torch.func.grad wraps tensors that are used inside it
            somewhere = x.detach().data_ptr() or not x.numel()
        except RuntimeError:
            somewhere = False
        return None if somewhere else "a tensor inside a transformation of torch.func; call this outside of it"

    def cache_key(self, *arrays: Any) -> tuple[Any, ...] | None:
        if self._transformation is None or self._transformation() is not None or self._in_dual_level():
            return None
        if self._modes() or self._script() is not None:
            return None
        found: list[Any] = [self]
        recording = self.module.is_grad_enabled()
        try:
            for x in arrays:
                if recording and x.requires_grad:
                    found[0] = self, "recorded"
                found.append((x.shape, x.stride(), x.dtype, x.device))
            if self._autocast():  # the autocast dtype is part of the cache key
                found[0] = found[0], self._autocast_dtype(arrays[0])
        except RuntimeError:  # nested and sparse tensors lack a shape or strides
            return None
        return tuple(found)

    def device(self, x: Any) -> str:
        return "cpu" if x.device.type == "cpu" else f"{x.device.type}:{x.device.index or 0}"

    def to_numpy(self, x: Any) -> np.ndarray:
        x = x.detach().resolve_neg()  # PyTorch may store a negation as a flag
        return x.view(self.module.int16).numpy().view(BFLOAT16) if x.dtype == self.module.bfloat16 else x.numpy()

    def to_host(self, x: Any) -> np.ndarray:
        return self.to_numpy(x.cpu())

    def from_numpy(self, x: np.ndarray) -> Any:
        if x.dtype == BFLOAT16:
            return self.module.from_numpy(x.view(np.int16)).view(self.module.bfloat16)
        return self.module.from_numpy(x)

    def on_device(self, x: np.ndarray, like: Any) -> Any:
        return self.from_numpy(np.require(x, requirements="W")).to(like.device)

    def wants_gradient(self, x: Any) -> bool:
        if x.requires_grad and self.module.is_grad_enabled():
            return True
        return self._in_dual_level() and self._forward_ad.unpack_dual(x).tangent is not None

    def autocast(self, *operands: Any) -> tuple[Any, ...] | None:
        """Cast as PyTorch casts the operands of ``scaled_dot_product_attention`` under ``torch.autocast``."""
        if not self._autocast():
            return None
        cast = tuple([self._cast(x) if isinstance(x, self.module.Tensor) else x for x in operands])
        return None if all(x is y for x, y in zip(cast, operands, strict=True)) else cast

    def _cast(self, x: Any) -> Any:
        dtype = self._autocast_dtype(x)
        if dtype is None or not x.is_floating_point() or x.dtype == self.module.float64:
            return x
        try:
            return x.to(dtype)
        except RuntimeError as error:  # raised by the host allocator
            if "can't allocate memory" in str(error):
                raise MemoryError(f"not enough memory to cast {x.numel()} numbers to {dtype}") from error
            raise

    def _autocast_dtype(self, x: Any) -> Any:
        """Return the autocast dtype of the tensor's device; None if autocast is off."""
        device = x.device.type
        if not self.module.amp.is_autocast_available(device) or not self.module.is_autocast_enabled(device):
            return None
        return self.module.get_autocast_dtype(device)

    def traced(self) -> bool:
        if self._in_dual_level():
            return False  # custom operators would silently drop tangents
        if self._transformation is None or self._transformation() is None:
            return self._modes() > 0 or self._script() is not None
        functorch = self.module._C._functorch
        followed = functorch.TransformType.Vmap, functorch.TransformType.Functionalize
        return all(one.key() in followed for one in functorch.get_interpreter_stack())

    def recorder(self, *operands: Any) -> Callable[..., tuple[Any, Any]] | None:
        if not self.module.is_grad_enabled() or not any(getattr(x, "requires_grad", False) for x in operands):
            return None
        if self._transformation is not None and self._transformation() is not None or self._in_dual_level():
            return None  # check_gradients refuses these
        with whole_imports:
            from .torch_gradients import Recorded
        return Recorded.apply

    def _in_dual_level(self) -> bool:
        """Return whether forward-mode AD is active; this is faster than asking for a tensor's tangent (1 µs)."""
        return getattr(self._forward_ad, "_current_level", 0) >= 0

    # -- in device memory ---------------------------------------------------------------------------------------------

    def ordinal(self, x: Any) -> int | None:
        return x.device.index if x.device.type == "cuda" else None

    def resolve(self, x: Any) -> Any:
        return x.resolve_neg()  # PyTorch may store a negation as a flag

    def operand(self, x: Any) -> Operand:
        return tuple.__new__(Operand, (x.data_ptr(), tuple(x.shape), x.stride()))  # NamedTuple's is in Python

    def seed(self, x: Any) -> tuple[int, Any] | None:
        if x.numel() != 1 or x.is_floating_point() or x.is_complex() or x.dtype == self.module.bool:
            return None
        own = x.detach().to(self.module.int64, copy=True)
        return own.data_ptr(), own

    @property
    def raw_stream(self) -> Any:
        """Function from an ordinal to ``torch.cuda.current_stream(device).cuda_stream``, without a Stream object."""
        return self.module._C._cuda_getCurrentRawStream

    def stream(self, x: Any) -> int | None:
        return self.raw_stream(x.device.index)

    def full(self, like: Any, shape: tuple[int, ...], dtype: str, value: float) -> Any:
        return like.new_full(shape, value, dtype=self._dtypes[dtype])

    def empty(self, like: Any, shape: tuple[int, ...], dtype: str, order: tuple[int, ...] | None = None) -> Any:
        shape, back = in_order(shape, order)
        made = like.new_empty(shape, dtype=self._dtypes[dtype])
        return made if back is None else made.permute(back)

    def allocate(self, like: Any, nbytes: int) -> tuple[int, Any]:
        owner = like.new_empty(nbytes, dtype=self.module.uint8)
        return owner.data_ptr(), owner


KIND = Torch
