"""Convert what callers hand over as a pattern or as key padding: texts, classes, functions, masks, sparse matrices."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from .._util.imports import whole_imports
from ..arrays import ArrayNamespace, check_plain, dtype_name, namespace_of, unknown
from .base.check import check_mask_mod, default_value
from .base.class_registry import CONVERSIONS, generation, registered
from .base.content import on_host
from .base.pattern import Deferred, Pattern
from .listed.masks import Mask
from .sequence.padding import KeyPadding

__all__ = ["UNKNOWN", "as_pattern", "check_mask", "check_padding", "from_text", "is_key_padding", "key_padding_of"]

Sizes = tuple[int | None, int | None, int | None, int | None]  # batch, heads_q, q_len, kv_len
UNKNOWN: Sizes = (None, None, None, None)
_EXPECTED = "expected a Pattern, its text, a mask_mod, a BlockMask, a sparse matrix, a mask or a Plan"
_BIAS = "write score=spattn.score.bias(mask)"


def as_pattern(value: Any, sizes: Sizes = UNKNOWN, name: str = "pattern") -> Pattern:
    """Convert the `pattern` argument of attention(), other than a Plan, or an operand of ``& | -``, to a Pattern.

    Parameters
    ----------
    value : Pattern, str, class, mask_mod, BlockMask, sparse matrix, bool array or additive array
    sizes : tuple
        Batch, heads_q, q_len and kv_len of the call; None if unknown.
    name : str
        The argument's name in errors.
    """
    if isinstance(value, Pattern):
        return _resolved(value) if isinstance(value, Deferred) else value
    if isinstance(value, str):
        return from_text(value)
    if isinstance(value, type):
        return _from_class(value, name)
    if (of_torch := _causal_bias(value, sizes, name)) is not None:
        return of_torch
    if (kind := namespace_of(value)) is not None:
        return _from_array(value, kind, sizes, name)
    module = type(value).__module__
    if module.startswith(("scipy.sparse", "xformers.")):
        with whole_imports:
            from .interop import from_scipy, from_xformers
        return from_xformers(value) if module.startswith("xformers") else from_scipy(value)
    if type(value).__name__ == "BlockMask":
        with whole_imports:
            from .interop import from_block_mask
        made = from_block_mask(value)
        check_mask((*made.sizes(), *value.shape[-2:]), (*sizes[:2], None, None), "a BlockMask", name)
        return made
    return _from_function(value, name) if callable(value) else _refuse(value, name)


def from_text(text: str) -> Pattern:
    """Read a pattern's text: a registered name, an expression like ``causal & sinks(4)``, a repr, or JSON."""
    return _read(text, generation())


@functools.lru_cache(maxsize=64)
def _read(text: str, generation: int) -> Pattern:
    """Read a text; cached for one state of the registry."""
    with whole_imports:  # late: keeps `import spattn` fast
        from .registry import class_named, from_json, parse
    if text.lstrip().startswith("{"):
        return from_json(text)
    if not text.isidentifier():
        return parse(text)
    cls = class_named(text)
    if missing := _missing(cls):
        raise TypeError(f'pattern: "{text}" needs {missing}; write "{_call(cls, text)}", with your numbers')
    made: Pattern = cls()
    return made


def _from_class(cls: type, name: str) -> Pattern:
    if not issubclass(cls, Pattern) or cls.allows is Pattern.allows:
        raise TypeError(f"{name}: {_EXPECTED}, got the class {cls.__name__}")
    if missing := _missing(cls):
        raise TypeError(
            f"{name}: got {cls.__name__} itself; call it with {missing}: write {_call(cls, cls.__name__)}, with your "
            "numbers"
        )
    return cls()


def _missing(cls: type) -> str:
    """Return the names of the parameters without defaults, joined."""
    return ", ".join(p.name for p in inspect.signature(cls).parameters.values() if p.default is p.empty)


def _call(cls: type, name: str) -> str:
    """Return a call of a pattern's class with example values, for an error message."""

    def example(parameter: str) -> str:
        try:
            return repr(default_value(cls, parameter))
        except TypeError:  # an array
            return "..."

    return f"{name}({', '.join(f'{one}={example(one)}' for one in _missing(cls).split(', '))})"


# -- functions ---------------------------------------------------------------------------------------------------------


def _from_function(value: Any, name: str) -> Pattern:
    """Convert a mask_mod; it is traced again in each call, because the tensors that it captures may change."""
    for cls in registered():
        if getattr(cls, "public", None) is value:  # a recipe
            return _from_class(cls, name)
    module = getattr(value, "__module__", None) or ""  # None in code from eval()
    if module.startswith("spattn.score"):
        raise TypeError(f"{name}: got a score function, which does not allow pairs; pass it as score=")
    if module.startswith("spattn."):
        called = getattr(value, "__name__", type(value).__name__)
        raise TypeError(f"{name}: got {called} itself; call it to create a pattern")
    check_mask_mod(name, value)
    with whole_imports:
        from .interop import from_mask_mod
    return from_mask_mod(value)


# -- arrays ------------------------------------------------------------------------------------------------------------


def _from_array(array: Any, kind: ArrayNamespace, sizes: Sizes, name: str) -> Pattern:
    if kind.wants_gradient(array):
        raise TypeError(f"{name}: got an array that requires a gradient, which a mask has not; {_BIAS}")
    if str(getattr(array, "layout", "")).startswith("torch.sparse"):
        with whole_imports:
            from .interop import from_torch_sparse
        return from_torch_sparse(array)
    if not unknown(array):
        check_plain(name, array)
    dtype = dtype_name(array)
    if "float" not in dtype and dtype != "bool":
        boolean = "array.bool()" if kind.name == "torch" else "array.astype(bool)"
        raise TypeError(
            f"{name}: got an array of {dtype}; a mask is bool: write {boolean} if 1 means that a pair is allowed"
        )
    later = unknown(array)
    allowed = array if later else _allowed(array, kind, name) if dtype != "bool" else kind.to_host(array)
    check_mask(tuple(allowed.shape), sizes, name=name)
    return Deferred.call("", "as_pattern", (array,), {"name": name}) if later else Mask(allowed)


def _allowed(array: Any, kind: ArrayNamespace, name: str) -> np.ndarray:
    """Convert an additive mask of 0 and −inf to bools; raise TypeError if it is a bias."""
    numbers = kind.to_host(array)
    allowed = np.asarray(numbers == 0)
    if not (allowed | (numbers == -np.inf)).all():
        raise TypeError(
            f"{name}: got an array of {dtype_name(array)} with numbers other than 0 and -inf; if they are added to the "
            f"scores, {_BIAS}; if it only allows and forbids pairs, write a bool mask, mask == 0 or mask != 0"
        )
    return allowed


def _causal_bias(value: Any, sizes: Sizes, name: str) -> Pattern | None:
    """Convert ``torch.nn.attention.bias.CausalBias``, a tensor without elements; None for anything else."""
    if type(value).__name__ != "CausalBias" or not hasattr(value, "variant"):
        return None
    own, given = (value.seq_len_q, value.seq_len_kv), sizes[2:]
    if None not in given and own != given:
        raise ValueError(f"{name}: expected a CausalBias for lengths {given[0]} × {given[1]}, got {own[0]} × {own[1]}")
    return from_text("queries_at(causal, 0)" if value.variant.name == "UPPER_LEFT" else "causal")


def check_mask(shape: tuple[int, ...], sizes: Sizes, what: str = "a bool mask", name: str = "pattern") -> None:
    """Raise ValueError unless a mask has all rows and columns and its leading axes broadcast to q's."""
    batch, heads, q_len, kv_len = sizes
    got = f"{name}: {what} must have shape ([[batch,] heads,] q_len, kv_len), got {shape}"
    if not 2 <= len(shape) <= 4:
        raise ValueError(got)
    if shape == (batch, kv_len) != (q_len, kv_len):
        raise ValueError(f"{got}; if it is key padding, write key_padding=mask, True at tokens")
    if 1 in shape[-2:] and None not in (q_len, kv_len) and shape[-2:] != (q_len, kv_len):
        hint = "np.broadcast_to(mask, shape)"
        if shape[-2] == 1 and shape[-1] == kv_len:
            hint = "key_padding=mask for key padding"
        raise ValueError(f"{got}; its last axes do not broadcast to {q_len} queries and {kv_len} keys: use {hint}")
    if len(shape) == 3 and shape[0] != 1 and shape[0] == heads == batch:
        raise ValueError(
            f"{got}, for a batch of {batch} and {heads} heads; write mask[None] for one mask per head, or "
            "mask[:, None] for one per batch entry"
        )
    for axis, size, wanted in zip(("heads", "batch"), shape[-3::-1], (heads, batch), strict=False):
        if wanted is None or size in (1, wanted) or (not size and what != "a bool mask"):
            continue
        hints = []
        if len(shape) == 3 and batch in (None, size):
            hints.append("insert an axis for one mask per batch entry: mask[:, None]")
        if axis == "heads" and size and wanted % size == 0 and what == "a bool mask":
            hints.append("use spattn.patterns.Mask(mask) for one mask per group of heads")
        expected = f"expected {wanted} {axis}" + (" or 1" if wanted != 1 else "")
        raise ValueError("; ".join([f"{got}: {expected}", *hints]))


# -- key padding -------------------------------------------------------------------------------------------------------


def key_padding_of(valid: Any, sizes: Sizes = UNKNOWN) -> Pattern:
    """Convert a `key_padding` argument: bools, or 0 and 1, True at tokens; or floats, 0 at tokens, −inf at padding."""
    if isinstance(valid, Deferred):
        valid = _resolved(valid)
    if is_key_padding(valid):
        own: Pattern = valid
        return own
    if (kind := namespace_of(valid)) is None:
        got = repr(valid) if isinstance(valid, Pattern) else type(valid).__name__
        raise TypeError(f"key_padding: expected an array, True at tokens, or a KeyPadding, got {got}")
    if unknown(valid):
        check_padding(valid.shape, sizes)
        return Deferred.call("", "key_padding_of", (valid,), {})
    check_plain("key_padding", valid)
    check_padding(tuple(valid.shape), sizes)
    if kind.wants_gradient(valid):
        raise TypeError("key_padding: expected an array that requires no gradient")
    additive = "float" in dtype_name(valid)
    try:
        return KeyPadding.from_additive(valid) if additive else KeyPadding(on_host(valid))
    except (TypeError, ValueError) as error:
        hint = "; if 1 marks tokens, write key_padding=mask == 1" if additive else ""
        raise type(error)(f"key_padding: {str(error).partition(': ')[2]}{hint}") from error


def is_key_padding(value: Any) -> bool:
    """Return whether `value` is a KeyPadding, or one that a traced program creates."""
    return isinstance(value, KeyPadding) or (isinstance(value, Deferred) and value.target == "key_padding")


def check_padding(shape: tuple[int, ...], sizes: Sizes) -> None:
    """Raise ValueError unless a padding mask has the shape of the call's keys."""
    batch, _, _, kv_len = sizes
    if batch is None or kv_len is None or shape == (kv_len,):
        return
    if shape in ((batch, kv_len), (1, kv_len), (batch, 1, 1, kv_len), (1, 1, 1, kv_len)):
        return
    hint = ""
    if shape == (batch,):
        hint = f"; for lengths, write key_padding=spattn.patterns.KeyPadding.from_lengths(lengths, {kv_len})"
    elif len(shape) > 1 and shape[-2:] != (1, kv_len) and shape[-1] == kv_len:
        hint = "; write a mask of pairs as pattern=mask"
    raise ValueError(f"key_padding: expected shape ({batch}, {kv_len}), got {shape}{hint}")


def _contents(mask: np.ndarray) -> tuple[Pattern | None, Pattern | None]:
    """Return what a mask is planned as."""
    with whole_imports:  # late: keeps `import spattn` fast
        from .discovery.of_mask import contents
    return contents(mask)


# for operands of patterns, for graphs, and for masks
CONVERSIONS.update(as_pattern=as_pattern, key_padding_of=key_padding_of, contents=_contents)


def _resolved(value: Deferred) -> Pattern:
    with whole_imports:
        from .base.in_graphs import resolved
    made: Pattern = resolved(value)
    return made


# -- errors ------------------------------------------------------------------------------------------------------------

_HINTS: list[tuple[Callable[[Any], bool], Callable[[Any], str]]] = [
    (lambda x: x is None, lambda x: 'for all pairs, write "full"'),
    (lambda x: isinstance(x, (bool, np.bool_)), lambda x: f'write "{"causal" if x else "full"}"'),
    (lambda x: isinstance(x, (int, np.integer)), lambda x: f'for a window, write "sliding_window({x})"'),
    (
        lambda x: isinstance(x, tuple) and len(x) == 2 and all(isinstance(n, int) for n in x),
        lambda x: f'for a window, write "sliding_window({x[0]}, {x[1]})"',
    ),
    (
        lambda x: isinstance(x, (tuple, list)) and bool(x) and all(isinstance(one, Pattern) for one in x),
        lambda x: "join patterns by & or |, or write spattn.patterns.PerHead(patterns) for one per head",
    ),
    (lambda x: isinstance(x, (tuple, list)), lambda x: "write numpy.array(mask)"),
    (
        lambda x: isinstance(x, types.UnionType),
        lambda x: "write Causal() | Sinks(4), with parentheses after each class",
    ),
    (lambda x: isinstance(x, dict), lambda x: "for DeepSpeed, write spattn.patterns.interop.from_deepspeed(config)"),
    (lambda x: type(x).__module__.startswith("cupyx."), lambda x: "write matrix.get()"),
    (lambda x: type(x).__module__.startswith("jax.experimental.sparse"), lambda x: "write matrix.todense() != 0"),
]


def _refuse(value: Any, name: str) -> NoReturn:
    """Raise TypeError for a value that is no pattern."""
    hint = next((f"; {advice(value)}" for fits, advice in _HINTS if fits(value)), "")
    raise TypeError(f"{name}: {_EXPECTED}, got {'None' if value is None else type(value).__name__}{hint}")
