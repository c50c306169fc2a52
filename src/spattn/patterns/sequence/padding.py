"""Key padding masks."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import ml_dtypes
import numpy as np

from ..._util.cached import cached_property
from ..._util.frozen import frozen
from ..._util.imports import whole_imports
from ..._util.index_checks import check_lengths
from ...arrays import BFLOAT16
from ...index_set import Runs
from ..base.check import MOST_RUNS, assign, integers
from ..base.class_registry import register
from ..base.content import ArrayPattern, dynamic, frozen_array, on_device, on_host
from ..base.pattern import Pattern, deferrable
from ..base.predicate import member
from ..hints.closed_forms import Bands, same_keys
from .basic import always

if TYPE_CHECKING:
    import numpy.typing as npt

    from ..base.rows import AskedRows

__all__ = ["KeyPadding"]

_FLOATS = tuple(np.dtype(name) for name in ("float32", "float64", "float16", BFLOAT16))


@register(
    "key_padding",
    example=lambda: ((np.arange(32)[None] < 26,), 32),
    typical=lambda: ((np.arange(4096)[None] < 3500,), 4096),
)
@dataclass(frozen=True, eq=False, repr=False)
class KeyPadding(ArrayPattern):
    """Key padding mask: every query attends to the keys with ``valid[j]``.

    For batches of sequences of different lengths, padded on either side; usually as ``Causal() & KeyPadding(mask)``.
    Padding queries attend like other queries; ignore their results.

    Parameters
    ----------
    valid : array (kv_len,), (batch, kv_len) or (batch, 1, 1, kv_len)
        True, or 1 in a tokenizer's integer mask, at keys that are not padding; copied.
    """

    valid: np.ndarray
    own_axes: ClassVar[int] = 1

    def __post_init__(self) -> None:
        valid = np.asanyarray(on_host(self.valid))
        if valid.dtype.kind in "iu":
            numbers = frozen_array("valid", valid, np.int64, (1, 2, 3, 4))
            if ((numbers != 0) & (numbers != 1)).any():
                raise ValueError(
                    f"valid: expected bools, or the integers 0 and 1, got {numbers.min()} … {numbers.max()}"
                )
            valid = numbers == 1
        array = frozen_array("valid", valid, bool, (1, 2, 3, 4))
        if array.ndim == 2:
            array = array[:, None]
        elif array.ndim == 4 and array.shape[1:3] == (1, 1):
            array = array[:, 0]
        elif array.ndim != 1 and array.shape[1:-1] != (1,):
            raise ValueError(
                f"valid: expected shape (kv_len,), (batch, kv_len) or (batch, 1, 1, kv_len), got {array.shape}"
            )
        assign(self, valid=array)

    @classmethod
    @deferrable
    def from_lengths(cls, lengths: Any, kv_len: int, *, left: bool = False) -> Any:
        """Create the padding mask from sequence lengths.

        Parameters
        ----------
        lengths : sequence of int
            Tokens per batch entry, at most `kv_len`. An int array (batch,) on a GPU gives a
            :class:`~spattn.patterns.dynamic.DynamicKeyPadding`, which each call reads on the device.
        kv_len : int
            Number of keys, padding included.
        left : bool, optional
            Whether the padding precedes the tokens, as for generation, instead of following them.

        Returns
        -------
        KeyPadding

        Examples
        --------
        >>> KeyPadding.from_lengths([3, 1], 4, left=True).valid[:, 0].astype(int)
        array([[0, 1, 1, 1],
               [0, 0, 0, 1]])
        """
        _, kv_len = check_lengths(kv_len, kv_len)
        if not isinstance(left, (bool, np.bool_)):
            raise TypeError(f"left: expected a bool, got {type(left).__name__}")
        if on_device(lengths):
            return dynamic("DynamicKeyPadding", lengths, left)
        tokens = np.array(integers("lengths", lengths, 0), dtype=np.int64)
        if (tokens > kv_len).any():
            raise ValueError(f"lengths: expected at most {kv_len} tokens (kv_len), got {tokens.max()}")
        real, padding = memoryview(b"\1" * kv_len), memoryview(bytes(kv_len))
        rows = ((padding[n:], real[:n]) if left else (real[:n], padding[n:]) for n in tokens.tolist())
        whole = b"".join(itertools.chain.from_iterable(rows))  # of a frozen array, which is not copied
        made = cls(np.ndarray((len(tokens), kv_len), bool, whole))
        vars(made)["_words"] = _words_of(tokens, kv_len, left)  # packing `valid` would take longer than making it
        return made

    @classmethod
    @deferrable
    def from_additive(cls, mask: npt.ArrayLike) -> KeyPadding:
        """Create the padding mask from an additive mask: 0 at keys, −∞ or the dtype's minimum at padding.

        Parameters
        ----------
        mask : array (kv_len,), (batch, kv_len) or (batch, 1, 1, kv_len) of a floating-point dtype
            Additive mask, as Hugging Face Transformers derives it from a tokenizer's mask.

        Returns
        -------
        KeyPadding

        Raises
        ------
        ValueError
            If the mask contains any other value, i.e. an additive bias.

        Examples
        --------
        >>> KeyPadding.from_additive(np.array([[0, 0, -np.inf]])).valid
        array([[[ True,  True, False]]])
        """
        array = np.asanyarray(on_host(mask))
        if isinstance(array, np.ma.MaskedArray) or array.dtype not in _FLOATS:
            raise TypeError(f"mask: expected an array of {', '.join(map(str, _FLOATS))}, got {array.dtype}")
        numbers, least = array.astype(np.float64), float(ml_dtypes.finfo(array.dtype).min)
        if not ((numbers == 0) | (numbers <= least)).all():
            raise ValueError(
                f"mask: expected a padding mask (0 = keep, −inf or {least:g} = padding), got other numbers; additive "
                "biases are not supported"
            )
        return cls(numbers == 0)

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        self._check_keys(kv_len)
        return self._bound()

    def _check_keys(self, kv_len: int) -> None:
        if self.valid.shape[-1] != kv_len:
            raise ValueError(f"valid: expected {kv_len} keys (kv_len), got {self.valid.shape[-1]}")

    @cached_property
    def _words(self) -> np.ndarray:
        """The bits of all keys, (batch or 1, 1, 1, words): for the hash, and for the rows of steps."""
        with whole_imports:
            from ..base.rows import AskedRows  # imported late: other patterns do not need it

        return frozen(AskedRows.packed(self.valid.reshape(*self.sizes(), 1, self.valid.shape[-1])))

    @cached_property
    def _hash(self) -> int:
        return hash((type(self).__qualname__, self.valid.shape, _bit_rows().hash_words(self._words.reshape(-1))))

    @cached_property
    def _keys(self) -> np.ndarray:
        return np.flatnonzero(self._only(self.valid))

    def _rows(self, asked: AskedRows) -> np.ndarray:
        self._check_keys(asked.kv_len)
        words, rows = self._words, asked.q.shape[2]
        return words if rows == 1 else np.broadcast_to(words, (*words.shape[:2], rows, words.shape[3]))

    def allows(self, q: Any, k: Any) -> Any:
        return always(q) & member(self._keys, k)

    def runs(self, q: np.ndarray, kv_len: int) -> Runs | None:
        keys = self._keys[self._keys < kv_len]
        new = np.diff(keys, prepend=-2) > 1
        start, stop = keys[new], keys[np.append(new[1:], True)[: len(keys)]] + 1
        if len(q) * len(start) > MOST_RUNS:
            return None
        shape = len(q), len(start)
        return Runs(*(np.broadcast_to(x, shape) for x in (start, np.ones_like(start), stop - start)))

    def _bands(self, first: int, stop: int) -> tuple[Bands, ...]:
        valid = self._only(self.valid)
        (before,) = (valid[1:] != valid[:-1]).nonzero()
        edges = np.empty(len(before) + 2, np.int64)
        edges[0], edges[1:-1], edges[-1] = 0, before + 1, len(valid)
        if not (len(valid) and valid[0]):
            edges = edges[1:]
        edges = edges[: len(edges) // 2 * 2]
        return (same_keys(edges[::2].copy(), edges[1::2].copy()),)

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        return cls(draw.flags(draw.choice([(sizes.kv_len,), (sizes.batch, sizes.kv_len)]))), sizes


def _words_of(tokens: np.ndarray, kv_len: int, left: bool) -> np.ndarray:
    """Return :attr:`KeyPadding._words` of lengths."""
    found, count = np.zeros((len(tokens), -(-kv_len // 64)), np.uint64), tokens[:, None]
    first, step = count * 0, count * 0 + 1  # faster than functions of NumPy
    _bit_rows().set_runs(found, kv_len - count if left else first, step, count, kv_len)
    return frozen(found).reshape(len(tokens), 1, 1, -1)


@functools.cache
def _bit_rows() -> Any:
    """Import the native functions late: other patterns do not need them."""
    with whole_imports:
        from ..._util import bit_rows
    return bit_rows
