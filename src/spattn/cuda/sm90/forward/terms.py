"""Arrays of bfloat16 terms, which the attention kernel reads in place of float32."""

from __future__ import annotations

import math

import numpy as np

from ....arrays import FLOAT8
from ....arrays.operand import Operand, row_major
from ....choose.specializations import ARCH, Specialization, build, terms_of
from ...driver.launch import Request
from ...driver.structs import packer
from ...host.forward_pass import ForwardPass, is_aligned

__all__ = [
    "SPLIT",
    "SPLIT_STRUCTS",
    "blocks",
    "formats_of",
    "itemsizes_of",
    "operands_of",
    "pack_split",
    "specialization",
    "split_macros",
    "split_request",
    "term_bytes",
]

_ALIGNMENT = 256  # of each array, in bytes
_THREADS, _EACH = 256, 8  # threads per CTA, and features per thread, of split.cu
_TERM_BYTES = 2
_ANYWHERE = _ALIGNMENT  # address of arrays of terms until a call places them; tensor maps refuse address 0
_VALUE_FACTOR = 2.0**40  # kValueFactor of terms.cuh

_SOURCE = np.dtype(
    [
        *((name, "u8") for name in ("from", "to")),
        ("stride", "i8", 4),
        ("rows", "i8"),
        *((name, "i4") for name in ("heads", "tokens", "head_dim", "aligned")),
        ("factor", "f4"),
        ("unused", "i4"),
    ]
)
SPLIT = np.dtype([("of", _SOURCE, (3,))])
SPLIT_STRUCTS = {"Source": _SOURCE, "Split": SPLIT}
_pack_split = packer(SPLIT).pack


def specialization(call: ForwardPass, keys: float = math.inf) -> Specialization:
    """Return the specialization of a call whose work items have `keys` keys."""
    dims, float8 = (call.q.shape[3], call.v.shape[3]), call.dtype == FLOAT8
    return build(call.plan.block_q, dims, keys, terms_of(call.dtype, call.precision), float8)


def operands_of(call: ForwardPass) -> tuple[Operand, Operand, Operand, Operand]:
    """Return the arrays that the attention kernel reads and writes: q, k, v or the arrays of their terms, and out.

    Arrays of terms have rows of all terms in order, each padded to the head dimension of the specialization; their
    address is a placeholder.
    """
    if terms_of(call.dtype, call.precision) == 1:
        return call.q, call.k, call.v, call.out
    row = specialization(call)
    shapes = [(*x.shape[:3], row.terms * row.head_dim) for x in (call.q, call.k, call.v)]
    q, k, v = (Operand(_ANYWHERE, shape, row_major(shape)) for shape in shapes)
    return q, k, v, call.out


def formats_of(call: ForwardPass) -> list[str]:
    """Return the format of the tensor maps of each of these arrays."""
    if call.dtype == FLOAT8:
        return [FLOAT8] * 3 + ["bfloat16"]
    if terms_of(call.dtype, call.precision) == 1:
        return [call.dtype] * 4
    return ["bfloat16"] * 3 + ["float32 panels"]


def itemsizes_of(call: ForwardPass) -> tuple[int, int]:
    """Return the bytes of an element of q, k and v, or of their terms, and of out."""
    if call.dtype == FLOAT8:
        return 1, 2
    return _TERM_BYTES, 2 if terms_of(call.dtype, call.precision) == 1 else 4


def term_bytes(call: ForwardPass) -> list[int]:
    """Return the bytes of each array of terms, rounded up to the alignment of arrays; nothing for 16-bit types."""
    if terms_of(call.dtype, call.precision) == 1:
        return []
    sizes = [math.prod(x.shape) * _TERM_BYTES for x in operands_of(call)[:3]]
    return [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]


def split_macros(row: Specialization) -> dict[str, object]:
    """Return the macros of split.cu for an attention kernel."""
    return {"SPATTN_DTYPE": "float32", "SPATTN_HEAD_DIM": row.head_dim, "SPATTN_TERMS": row.terms}


def split_request(call: ForwardPass) -> Request:
    """Return the request for split.cu."""
    return Request("sm90/forward/split.cu", ARCH, split_macros(specialization(call)), SPLIT_STRUCTS, "hopper_split")


def blocks(call: ForwardPass) -> int:
    """Return the CTAs of split.cu."""
    rows = sum(math.prod(x.shape[:3]) for x in (call.q, call.k, call.v))
    return -(-rows * specialization(call).head_dim // (_EACH * _THREADS))


def pack_split(call: ForwardPass, sources: tuple[int, ...], targets: tuple[int, ...]) -> bytes:
    """Pack ``Split`` for arrays at these addresses."""
    fields: list[float] = []
    for operand, source, target, factor in zip(
        (call.q, call.k, call.v), sources, targets, (1.0, 1.0, _VALUE_FACTOR), strict=True
    ):
        batch, heads, tokens, head_dim = operand.shape
        aligned = is_aligned(operand._replace(pointer=source), 4)
        fields += source, target, *operand.strides, batch * heads * tokens, heads, tokens, head_dim, aligned, factor, 0
    return _pack_split(*fields)
