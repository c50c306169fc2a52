"""One execution of an FFI handler: operands, results, stream and allocator."""

from __future__ import annotations

import ctypes
from typing import Any

from ..arrays import dtype_name
from ..arrays.namespace import numpy_dtype
from ..arrays.xla import Buffer
from ..errors import BackendUnavailableError
from . import _c_api as c_api

__all__ = ["Execution", "new_error"]

_INTEGERS = "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"
# XLA_FFI_DataType
_DTYPES = dict(enumerate(("bool", *_INTEGERS, "float16", "float32", "float64"), start=1)) | {16: "bfloat16"}
_ALIGNMENT = 16  # bytes; the largest alignment that XLA guarantees
_CODES = {MemoryError: 8, TypeError: 3, ValueError: 3, KeyboardInterrupt: 1}  # XLA_FFI_Error_Code
_INTERNAL = 13


class Execution:
    """View of an XLA call frame; as a context manager, it frees the device memory that it allocated.

    Memory may be freed before the kernels have run, because XLA reuses it in stream order. The constructor raises
    BackendUnavailableError if the runtime's structs lack fields declared in ``_c_api``.
    """

    def __init__(self, frame: Any, on_gpu: bool):
        self._frame, self._api = frame, frame.api.contents
        self._check_sizes()
        self._memory: list[tuple[int, int]] = []
        self._handed_out = 0
        self.ordinal = self._ask("get_ordinal", c_api.DeviceOrdinal()).ordinal if on_gpu else None
        self.operands, self.results = (self._buffers(x) for x in (frame.operands, frame.results))

    def _check_sizes(self) -> None:
        if not all(map(c_api.fits, (self._frame, self._api))):
            version = self._api.version
            raise BackendUnavailableError(
                "jaxlib: requires the XLA FFI 0.1 with device ordinals, got version "
                f"{version.major}.{version.minor} with fields missing; run pip install --upgrade jax"
            )

    def _buffers(self, tensors: Any) -> list[Buffer]:
        found = [tensors.all[n].contents for n in range(tensors.size)]
        return [
            Buffer(tuple(x.dims[: x.rank]), numpy_dtype(_DTYPES[x.dtype]), x.data or 0, self)  # NULL if empty
            for x in found
        ]

    def text(self) -> str:
        """Return the only attribute of the call, a string."""
        attributes = self._frame.attributes
        if attributes.size != 1 or attributes.types[0] != c_api.STRING:
            raise RuntimeError(f"attributes: expected one string attribute, got {attributes.size}")
        span = ctypes.cast(attributes.all[0], ctypes.POINTER(c_api.ByteSpan)).contents
        return ctypes.string_at(span.pointer, span.size).decode()

    def stream(self) -> int:
        """Return the raw handle of XLA's stream; 0 is CUDA's default stream."""
        return self._ask("get_stream", c_api.Stream()).stream or 0

    def result(self, shape: tuple[int, ...], dtype: str) -> Buffer:
        """Return the next result buffer, which XLA preallocated."""
        found = self.results[self._handed_out]
        if (found.shape, dtype_name(found)) != (shape, dtype):
            raise RuntimeError(f"results: expected {dtype} of shape {shape}, got {dtype_name(found)} of {found.shape}")
        self._handed_out += 1
        return found

    def allocate(self, nbytes: int) -> int:
        """Allocate device memory, which is freed when the execution ends; raise MemoryError if XLA has none left."""
        wanted = c_api.NewMemory(size=nbytes, alignment=_ALIGNMENT)
        address: int = self._ask("allocate", wanted, MemoryError).data or 0
        self._memory.append((address, nbytes))
        return address

    def __enter__(self) -> Execution:
        return self

    def __exit__(self, *error: object) -> None:
        for address, nbytes in self._memory:
            self._ask("free", c_api.Memory(data=address, size=nbytes))

    def _ask(self, function: str, arguments: Any, failure: type[Exception] = RuntimeError) -> Any:
        """Call a runtime function and return its argument struct, which holds the results."""
        arguments.struct_size, arguments.context = ctypes.sizeof(arguments), self._frame.context
        error = getattr(self._api, function)(ctypes.addressof(arguments))
        if error:
            about = c_api.ErrorMessage(struct_size=ctypes.sizeof(c_api.ErrorMessage), error=error)
            self._api.get_message(ctypes.addressof(about))
            message = about.message.decode()
            self._api.destroy_error(ctypes.addressof(about))
            raise failure(f"XLA: {message}")
        return arguments


def new_error(frame: Any, error: BaseException) -> int:
    """Convert an exception to an XLA error, which the runtime frees."""
    code = next((code for known, code in _CODES.items() if isinstance(error, known)), _INTERNAL)
    message = f"{type(error).__name__}: {error}".encode()
    new = c_api.NewError(struct_size=ctypes.sizeof(c_api.NewError), message=message, code=code)
    made: int = frame.api.contents.create_error(ctypes.addressof(new))
    return made
