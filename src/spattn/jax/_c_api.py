"""ctypes declarations of XLA's FFI: the structs and enumerations of ``c_api.h`` used here.

The declarations follow version 0.1. Later versions 0.x only append fields to structs. Most structs begin with their
runtime size, so a struct of at least the size declared here has all fields.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

__all__ = [
    "METADATA",
    "STRING",
    "VERSION",
    "ByteSpan",
    "DeviceOrdinal",
    "ErrorMessage",
    "Handler",
    "Memory",
    "MetadataExtension",
    "NewError",
    "NewMemory",
    "Stream",
    "fits",
]

VERSION = 0, 1
METADATA = 1  # XLA_FFI_Extension_Metadata
STRING = 4  # XLA_FFI_AttrType_STRING


class Extension(ctypes.Structure):
    """XLA_FFI_Extension_Base"""


Extension._fields_ = [
    ("struct_size", ctypes.c_size_t),
    ("type", ctypes.c_int),
    ("next", ctypes.POINTER(Extension)),
]


class _Struct(ctypes.Structure):
    """Common header of most structs."""

    _fields_ = [("struct_size", ctypes.c_size_t), ("extensions", ctypes.POINTER(Extension))]


class ApiVersion(_Struct):
    """XLA_FFI_Api_Version"""

    _fields_ = [("major", ctypes.c_int), ("minor", ctypes.c_int)]


class Metadata(ctypes.Structure):
    """XLA_FFI_Metadata"""

    _fields_ = [("struct_size", ctypes.c_size_t), ("version", ApiVersion), ("traits", ctypes.c_uint32)]


class MetadataExtension(ctypes.Structure):
    """XLA_FFI_Metadata_Extension"""

    _fields_ = [("base", Extension), ("metadata", ctypes.POINTER(Metadata))]


_Function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)  # takes an argument struct; returns an error or NULL
_FUNCTIONS = (
    "create_error",
    "get_message",
    "destroy_error",
    "register_handler",
    "get_stream",
    "register_type",
    "get_context",
    "set_state",
    "get_state",
    "allocate",
    "free",
    "schedule",
    "count_threads",
    "create_future",
    "set_available",
    "set_error",
    "get_run",
    "get_ordinal",
)


class Api(_Struct):
    """XLA_FFI_Api"""

    _fields_ = [
        ("version", ApiVersion),
        ("internal", ctypes.c_void_p),
        *((name, _Function) for name in _FUNCTIONS),
    ]


class Tensor(_Struct):
    """XLA_FFI_Buffer"""

    _fields_ = [
        ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    ]


class Tensors(_Struct):
    """XLA_FFI_Args, XLA_FFI_Rets"""

    _fields_ = [
        ("size", ctypes.c_int64),
        ("types", ctypes.POINTER(ctypes.c_int)),
        ("all", ctypes.POINTER(ctypes.POINTER(Tensor))),
    ]


class ByteSpan(ctypes.Structure):
    """XLA_FFI_ByteSpan"""

    _fields_ = [("pointer", ctypes.c_void_p), ("size", ctypes.c_size_t)]


class Attributes(_Struct):
    """XLA_FFI_Attrs"""

    _fields_ = [
        ("size", ctypes.c_int64),
        ("types", ctypes.POINTER(ctypes.c_int)),
        ("names", ctypes.POINTER(ctypes.POINTER(ByteSpan))),
        ("all", ctypes.POINTER(ctypes.c_void_p)),
    ]


class CallFrame(_Struct):
    """XLA_FFI_CallFrame"""

    _fields_ = [
        ("api", ctypes.POINTER(Api)),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("operands", Tensors),
        ("results", Tensors),
        ("attributes", Attributes),
    ]


Handler: Callable[..., Any] = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(CallFrame))

# -- argument structs --------------------------------------------------------------------------------------------------


class NewError(_Struct):
    """XLA_FFI_Error_Create_Args"""

    _fields_ = [("message", ctypes.c_char_p), ("code", ctypes.c_int)]


class ErrorMessage(_Struct):
    """XLA_FFI_Error_GetMessage_Args; its prefix is XLA_FFI_Error_Destroy_Args"""

    _fields_ = [("error", ctypes.c_void_p), ("message", ctypes.c_char_p)]


class Stream(_Struct):
    """XLA_FFI_Stream_Get_Args"""

    _fields_ = [("context", ctypes.c_void_p), ("stream", ctypes.c_void_p)]


class DeviceOrdinal(_Struct):
    """XLA_FFI_DeviceOrdinal_Get_Args"""

    _fields_ = [("context", ctypes.c_void_p), ("ordinal", ctypes.c_int32)]


class NewMemory(_Struct):
    """XLA_FFI_DeviceMemory_Allocate_Args"""

    _fields_ = [
        ("context", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("alignment", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
    ]


class Memory(_Struct):
    """XLA_FFI_DeviceMemory_Free_Args"""

    _fields_ = [("context", ctypes.c_void_p), ("size", ctypes.c_size_t), ("data", ctypes.c_void_p)]


def fits(struct: Any) -> bool:
    """Return True if a struct from the runtime has all fields declared here."""
    name, kind = struct._fields_[-1]
    return struct.struct_size >= getattr(type(struct), name).offset + ctypes.sizeof(kind)
