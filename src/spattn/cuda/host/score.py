"""Score functions, sinks and dropout of calls: generated kernel source, and captured values in device memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..._util.cached import BoundedCache
from ...arrays import dtype_name, namespace_of
from ...arrays.operand import Operand, row_major
from ...request.call import Call
from ...request.score import ScoreOperands, TableType
from ...score.graph import Builder, Graph
from ...score.program import Program, program_of
from ...score.source import Array, arguments, source
from ..driver.buffer import keep_if_captured, upload
from ..driver.device import Device, require_owner
from ..driver.structs import packer
from .dropout import launch_words

__all__ = ["IDENTITY", "NO_SUMS", "Binder", "BoundScore", "TableSums", "generated", "table_types"]

_BLOCKS_KEPT = 256  # most recent ``ScoreArgs`` of a device; a function whose values do not change needs one
_CODES_KEPT = 256
_LARGEST_FACTOR = 1 << 15  # of float16 weights that dropout keeps


class BoundScore(NamedTuple):
    """The score function and the sinks of one call.

    Attributes
    ----------
    text : str
        Generated C++ that precedes kernel files, the same for all captured values; empty for the identity.
    address : int
        Device address of the call's ``ScoreArgs``.
    owner : object
        Keeps the memory at `address`, and copies of captured arrays, allocated.
    sinks : int
        Device address of (heads_q,) logits in the dtype of lse; 0 without sinks.
    scales : int
        Device address of (batch, heads_q, 2) scales of float8; 0 without them.
    """

    text: str = ""
    address: int = 0
    owner: object = None
    sinks: int = 0
    scales: int = 0


class TableSums(NamedTuple):
    """Accumulators of the gradients of a call's captured arrays, to which a fused backward adds.

    Attributes
    ----------
    text : str
        Generated C++ as in :class:`BoundScore`, with ``Score::Uses``; empty if the backward does not sum.
    words : int
        Device address of the accumulators (accumulator.cuh), set to zero before the backward.
    first : tuple of int
        Index of the accumulator of each captured array's first element.
    """

    text: str = ""
    words: int = 0
    first: tuple[int, ...] = ()


IDENTITY = BoundScore()
NO_SUMS = TableSums()
_blocks: dict[Device, BoundedCache] = {}


@functools.lru_cache(_CODES_KEPT)
def generated(
    program: Program | None,
    types: tuple[TableType, ...],
    direct: tuple[tuple[int, bool], ...] = (),
    drops: bool = False,
) -> tuple[str, np.dtype]:
    """Return the C++ of a score function, None for the identity, and the dtype of its ``ScoreArgs``.

    `direct` are items for :func:`source`; `drops` is True for calls with dropout.
    """
    arrays, program = [Array.of(*one) for one in types], program or _identity()
    return source(program, arrays, dict(direct), drops), arguments(program, arrays, drops)


@functools.cache
def _identity() -> Program:
    builder = Builder()
    score = builder.input("score")
    return program_of(Graph(tuple(builder.operations), (score,)))


def table_types(call: Call) -> tuple[TableType, ...]:
    """Return the types of a call's captured arrays on the device, to which host arrays are copied in C order."""
    assert call.score is not None
    if call.kind.ordinal(call.q) is not None:
        return call.score.types
    return tuple(one._replace(strides=row_major(one.shape)) for one in call.score.types)


class Binder:
    """Binds captured values and sinks on one device, for calls with the score function of `call`; without `device` it
    only checks them."""

    def __init__(self, call: Call, device: Device | None = None):
        self._device: Any = device
        self._kind, self._ordinal = call.kind, call.kind.ordinal(call.q)
        self._key = None if call.score is None else call.score.key
        self.has_sinks = call.score is not None and call.score.sinks is not None
        self._has_scales = call.score is not None and call.score.scales is not None
        self._expected: list[tuple[str, str, tuple[int, ...]]] = []
        if self.has_sinks:
            self._expected.append(("sinks", call.lse_dtype, (call.heads_q,)))
        if self._has_scales:
            self._expected.append(("scales", "float32", (call.batch, call.heads_q, 2)))
        self.drops = call.score is not None and call.score.dropout is not None
        self._heads, self._half = (call.batch, call.heads_q), call.dtype == "float16"
        self.text, self._record = "", np.dtype([])
        self._types: tuple[TableType, ...] = ()
        self._strides: list[tuple[int, ...]] = []
        if call.score is not None and (call.score.program is not None or self.drops):
            types = table_types(call)
            self._types, self._strides = call.score.types, [tuple(one.strides) for one in types]
            self.text, self._record = generated(call.score.program, types, drops=self.drops)
            self._pack = packer(self._record).pack

    def check(self, score: ScoreOperands | None) -> tuple[Any, ...]:
        """Check the score function of a call; return its captured arrays, sinks and scales, which the caller keeps
        until all kernels are enqueued.

        Raises
        ------
        TypeError, ValueError
            If it is not the function of the prepared call, or an array does not match its type.
        """
        if (None if score is None else score.key) != self._key:
            raise ValueError(
                "score: expected the function that the call was prepared for, with arrays of the same dtypes, shapes "
                "and strides"
            )
        if score is None:
            return ()
        if len(score.tables) != len(self._types):
            raise ValueError(f"score: expected {len(self._types)} captured arrays, got {len(score.tables)}")
        given = *score.tables, *self._sinks_of(score), *([score.scales] * self._has_scales)
        expected = [*(("score", one.dtype, tuple(one.shape)) for one in self._types), *self._expected]
        for array, (name, dtype, shape) in zip(given, expected, strict=True):
            if namespace_of(array) is not self._kind:
                raise TypeError(f"{name}: expected {self._kind.name} arrays like q, got {type(array).__name__}")
            if self._kind.ordinal(array) != self._ordinal:
                raise ValueError(f"{name}: expected arrays on the device of q, got one on {self._kind.device(array)}")
            found = dtype_name(array), tuple(map(int, array.shape))
            if found != (dtype, shape):
                raise ValueError(f"{name}: expected an array of {dtype} and shape {shape}, got {found[0]}, {found[1]}")
        return tuple(map(self._kind.resolve, given))

    def _sinks_of(self, score: ScoreOperands) -> tuple[Any, ...]:
        """Return the sinks of a call, contiguous in device memory, as a tuple of one array; () without sinks."""
        sinks = score.sinks
        if sinks is None:
            return ()
        if self._ordinal is not None and namespace_of(sinks) is self._kind and self._kind.ordinal(sinks) is not None:
            sinks = self._kind.resolve(sinks)
            if sinks.ndim == 1 and self._kind.operand(sinks).strides != (1,):
                sinks = sinks + 0  # a sum is contiguous
        return (sinks,)

    def bind(
        self,
        stream: int,
        score: ScoreOperands | None,
        operands: list[Operand],
        lengths: tuple[int, int],
        allocate: Callable[[int], int],
    ) -> BoundScore:
        """Return the score function of a call, with its values in device memory, visible to every stream.

        `operands` are the arrays of :meth:`check` in device memory, `lengths` q_len and kv_len. The device's context
        must be current. Memory of `allocate` holds the random words of dropout, whose kernel is enqueued on `stream`.
        """
        *others, operands = *operands[len(self._types) :], operands[: len(self._types)]
        sinks = others[0].pointer if self.has_sinks else 0
        scales = others[-1].pointer if self._has_scales else 0
        if score is None or not self.text:
            return BoundScore(sinks=sinks, scales=scales) if others else IDENTITY
        if [x.strides for x in operands] != self._strides:
            raise ValueError(f"score: expected arrays of strides {self._strides}, got {[x.strides for x in operands]}")
        packed = self._pack(*self._values(score, operands, self._dropout(stream, score, lengths, allocate)))
        kept = _blocks.setdefault(self._device, BoundedCache(_BLOCKS_KEPT))
        block = kept.get(packed)
        if block is None:  # kernels may still read a block that the cache drops: freeing it waits for all kernels
            with self._device:  # PyCUDA allocates only in a context that it has pushed
                block = kept.keep(packed, upload(self._device, {"args": np.frombuffer(packed, np.uint8)}))
        keep_if_captured(self._device, stream, block)
        return BoundScore(self.text, block[1]["args"], block, sinks, scales)

    def bound(self, stream: int, score: ScoreOperands | None, q: Any, k: Any) -> BoundScore:
        """Check and bind the score function of a call on device arrays, which the result keeps allocated."""
        require_owner()
        owners: list[Any] = []

        def allocate(nbytes: int) -> int:
            address, owner = self._kind.allocate(q, nbytes)
            owners.append(owner)
            return address

        lengths = q.shape[2], k.shape[2]
        with self._device if self.drops else self._device.made_current():  # a kernel may have to be loaded
            arrays = self.check(score)
            found = self.bind(stream, score, list(map(self._kind.operand, arrays)), lengths, allocate)
        return found._replace(owner=(found.owner, arrays, owners))

    def unbound(self) -> BoundScore:
        """Return a score without addresses, for preparing launches: the source, and `sinks` = 1 if there are any."""
        return BoundScore(self.text, sinks=int(self.has_sinks))

    def _dropout(
        self, stream: int, score: ScoreOperands, lengths: tuple[int, int], allocate: Callable[[int], int]
    ) -> dict[str, float]:
        """Enqueue the random words of a call with dropout; return the fields of ``ScoreArgs`` for them."""
        dropout = score.dropout
        if dropout is None:
            return {}
        if self._half and dropout.factor > _LARGEST_FACTOR:
            raise ValueError(
                f"dropout_p: must not exceed 1 - 2**-15 for float16 arrays on a GPU, got {1 - 1 / dropout.factor}"
            )
        q_len, kv_len = map(int, lengths)
        rows, words = launch_words(self._device, stream, dropout.seed, *self._heads, q_len, kv_len, allocate)
        return {
            "dropout_rows": rows,
            "dropout_words": words,
            "dropout_factor": dropout.factor,
            "dropout_q_len": q_len,
            "dropout_kv_len": kv_len,
            "dropout_heads": self._heads[1],
            "dropout_threshold": dropout.threshold,
        }

    def _values(self, score: ScoreOperands, operands: list[Operand], dropout: dict[str, float]) -> list[float]:
        """Return the fields of ``ScoreArgs``."""
        values: list[float] = []
        for name in self._record.names or ():
            kind = name.rstrip("0123456789")
            number = int(name[len(kind) :] or 0)
            if name in dropout:
                values.append(dropout[name])
            elif kind == "parameter":
                value = score.parameters[number]
                values.append(float(value) if self._record[name].kind == "f" else int(value))
            elif kind == "table":
                values.append(operands[number].pointer if 0 not in operands[number].shape else 0)
            elif kind == "unused":
                values.append(0)
            else:
                values += operands[number].strides if kind == "stride" else operands[number].shape
        return values
