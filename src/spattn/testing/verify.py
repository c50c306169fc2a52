"""Verify another implementation of attention, or a mask, against a pattern."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import reference
from .._util.imports import whole_imports
from ..arrays import NUMPY, ArrayNamespace, namespace_of, to_host
from ..patterns import Pattern
from ..patterns.base.check import choice, integer
from ..patterns.conversion import as_pattern
from ..planning import Plan
from ..request.call import LARGEST_HEAD_DIM
from .arrays import DTYPES, inputs
from .bounds import dense_mask, error_bound, naive_orders
from .gradients import GradientExpectation
from .guesses import deviation_of_scores, guess_heads, guess_pairs, guess_scale

__all__ = ["Difference", "Verification", "verify"]

_LEAST_WEIGHT = 2.0**-24  # of the largest weight of a row; a smaller one does not change a float32 result
_LARGE_DEVIATION = 0.02  # of the logarithm of a weight, more than the error of a bfloat16 weight
_MOST_PAIRS = 1 << 26  # batch · heads · q_len · kv_len
_LIBRARIES = ("numpy", "torch", "jax")
_LAYOUTS = ("bhsd", "bshd")


@dataclass(frozen=True)
class Difference:
    """The first row in which the pairs differ from the pattern's.

    Parameters
    ----------
    batch, head, row : int
        Index of the row.
    extra, missing : tuple of range
        Keys that the function uses although the pattern does not allow them, and the reverse.
    rows : int
        Number of rows that differ, in all batch entries and heads.
    """

    batch: int
    head: int
    row: int
    extra: tuple[range, ...]
    missing: tuple[range, ...]
    rows: int

    def __str__(self) -> str:
        lines = [f"{self.rows} rows differ; the first is batch {self.batch}, head {self.head}, row {self.row}"]
        for what, keys in (("keys used but not allowed", self.extra), ("keys allowed but not used", self.missing)):
            if keys:
                lines.append(f"  {what}: {', '.join(map(_text, keys))}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Verification:
    """Result of :func:`spattn.verify`; ``print()`` shows it as text.

    Parameters
    ----------
    problem : str
        The pattern and the sizes.
    difference : Difference or None
        The first row with other pairs.
    problems : tuple of str
        Everything else that differs: NaN, weights, scale, results, gradients.
    guesses : tuple of str
        Likely causes. Each has been verified: the pattern or the formula with this change agrees with the function.
    checked : tuple of str
        What was compared.
    """

    problem: str
    difference: Difference | None
    problems: tuple[str, ...]
    guesses: tuple[str, ...]
    checked: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether everything that was compared agrees."""
        return self.difference is None and not self.problems

    def __str__(self) -> str:
        lines = [self.problem, f"{'agree' if self.ok else 'checked'}: {', '.join(self.checked)}"]
        lines += [] if self.difference is None else [str(self.difference)]
        return "\n".join([*lines, *self.problems, *(f"guess: {guess}" for guess in self.guesses)])


def verify(
    function: Any,
    pattern: Any,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    batch: int | None = None,
    heads: int | None = None,
    heads_kv: int | None = None,
    head_dim: int = 16,
    scale: float | None = None,
    layout: str = "bhsd",
    arrays: str | None = None,
    dtype: str = "float32",
    gradients: bool = True,
) -> Verification:
    """Verify an attention function or a mask of any library against a pattern, and name the first wrong keys.

    Parameters
    ----------
    function : callable, array of bool, Pattern or BlockMask
        A function or :class:`torch.nn.Module` ``(q, k, v) -> out``; if it returns a tuple, out is its first item. Or a
        mask: an array (q_len, kv_len), (heads, q_len, kv_len) or (batch, heads, q_len, kv_len), a pattern, a function
        ``(q, k) -> bool`` or a `mask_mod` ``(b, h, q, k) -> bool`` of row and key indices, or a
        FlexAttention BlockMask, which is read by its `mask_mod`. True means that the key is used.
    pattern : Pattern, Plan, or anything that :func:`spattn.attention` takes as one
        The pairs that should be used.
    q_len, kv_len : int, optional
        Lengths in tokens; `q_len` defaults to that of a mask array and is otherwise required, `kv_len` defaults to
        `q_len`. Keep them small: the cost is that of dense attention, ``2 · kv_len / head_dim`` times.
    batch, heads, heads_kv : int, optional
        Sizes; by default those of the mask array or of the pattern, otherwise two batch entries and two heads, and
        ``heads_kv = heads``.
    head_dim : int, optional
        Head dimension of q, k and v.
    scale : float, optional
        The scale that the function should use; default ``1 / sqrt(head_dim)``.
    layout : {"bhsd", "bshd"}, optional
        Axis order of the function's arguments and result.
    arrays : {"numpy", "torch", "jax"}, optional
        Library of the arrays that the function takes; by default that of the names that the function refers to.
    dtype : {"float32", "float64", "float16", "bfloat16"}, optional
        Dtype of the arrays.
    gradients : bool, optional
        Also verify the gradients with respect to q, k and v, for functions of PyTorch and JAX.

    Returns
    -------
    Verification
        ``report.ok``, and a text with the batch entry, head, row and keys of the first difference, and guesses.

    Raises
    ------
    TypeError
        If `function` is neither a function nor a mask; if the library of its arrays is unknown.
    ValueError
        If a size is missing or does not match the mask or the pattern; if the problem is too large; if the function
        returns another shape.

    Notes
    -----
    With ``q = 0`` all scores are equal, and with one-hot values the output has the weight of each key: the keys with
    more than 2⁻²⁴ of a row's largest weight are those that the function uses. Then random arrays are compared with the
    float64 formula, within the error bound of :mod:`spattn.testing`. If only the results differ, the scale is estimated
    from the weights, and other orders of key-value heads are tried. Guesses about the pairs are evaluated one by one:
    shifted positions, the pattern without an operand, with an integer one larger or smaller, or transposed.

    Rows without an allowed key may give 0 or NaN.

    Examples
    --------
    >>> import numpy as np, spattn
    >>> from spattn.patterns import SlidingWindow
    >>> row, key = np.ogrid[:8, :8]
    >>> print(spattn.verify((key <= row) & (row - key <= 3), SlidingWindow(2, 0)))
    SlidingWindow(left=2, right=0), 8 × 8 tokens, batch of 1, 1 heads
    checked: pairs
    5 rows differ; the first is batch 0, head 0, row 3
      keys used but not allowed: 0
    guess: off by one: the pairs are those of SlidingWindow(left=3, right=0)
    """
    named = pattern.pattern if isinstance(pattern, Plan) else as_pattern(pattern)
    if named is None:
        raise ValueError("pattern: expected a plan with a pattern, got a plan without")
    choice("layout", layout, _LAYOUTS)
    choice("dtype", dtype, tuple(DTYPES))
    sizes = _sizes(named, function, batch, heads, q_len, kv_len)
    given = f"{named!r}, {sizes[2]} × {sizes[3]} tokens, batch of {sizes[0]}, {sizes[1]} heads"
    expected = dense_mask(named, *sizes)
    mask = _mask_of(function, sizes, arrays)
    if mask is not None:
        difference = _first(mask, expected)
        guesses = () if difference is None else tuple(guess_pairs(mask, named))
        return Verification(given, difference, (), guesses, ("pairs",))
    heads_kv = sizes[1] if heads_kv is None else integer("heads_kv", heads_kv, 1, sizes[1])
    if sizes[1] % heads_kv:
        raise ValueError(f"heads_kv: expected a divisor of {sizes[1]} heads, got {heads_kv}")
    head_dim = integer("head_dim", head_dim, 1, LARGEST_HEAD_DIM)
    kind = _namespace(_library(function) if arrays is None else choice("arrays", arrays, _LIBRARIES))
    values = inputs(sizes[0], sizes[1], heads_kv, sizes[2], sizes[3], head_dim, dtype=dtype)
    scale = head_dim**-0.5 if scale is None else float(scale)
    subject = _Subject(function, kind, layout, values)
    found = _Findings(given, named, expected, scale)
    found.check_pairs(subject)
    if not found.problems and found.difference is None:
        found.check_results(subject)
    if gradients and kind.name != "numpy" and not found.problems and found.difference is None:
        found.check_gradients(subject)
    return found.report()


class _Subject:
    """The function under test, from NumPy arrays (batch, heads, length, head_dim) to such arrays."""

    def __init__(
        self, function: Callable[..., Any], kind: ArrayNamespace, layout: str, values: tuple[np.ndarray, ...]
    ) -> None:
        self.function, self.kind, self.tokens_first = function, kind, layout == "bshd"
        self.q, self.k, self.v = values

    def _in(self, x: np.ndarray) -> Any:
        return self.kind.from_numpy(np.ascontiguousarray(np.swapaxes(x, 1, 2)) if self.tokens_first else x.copy())

    def _out(self, x: Any) -> np.ndarray:
        host = self.kind.to_host(x).astype(np.float64)
        return np.swapaxes(host, 1, 2) if self.tokens_first else host

    def _call(self, *arrays: Any) -> Any:
        try:
            found = self.function(*arrays)
        except (TypeError, AttributeError) as error:
            raise TypeError(
                f"function: failed with {self.kind.name} arrays ({error}); `arrays` names another library: "
                f"{', '.join(_LIBRARIES)}"
            ) from error
        out = found[0] if isinstance(found, tuple) else found
        length, heads = self.q.shape[2], self.q.shape[1]
        inner = (length, heads) if self.tokens_first else (heads, length)
        expected = (self.q.shape[0], *inner, self.v.shape[3])
        if tuple(out.shape) != expected:
            raise ValueError(f"function: expected a result of shape {expected}, got {tuple(out.shape)}")
        return out

    def __call__(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        return self._out(self._call(*map(self._in, (q, k, v))))

    def weights(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        """Return the attention weights, (batch, heads, q_len, kv_len) float64, from one-hot values."""
        found = np.zeros((*self.q.shape[:3], self.k.shape[2]))
        for first, stop, v in _one_hot(self.v):
            found[..., first:stop] = self(q, k, v)[..., : stop - first]
        return found

    def gradients(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return dq, dk and dv."""
        operands, upstream = [self._in(x) for x in (q, k, v)], self._in(dout)
        if self.kind.name == "torch":
            torch = sys.modules["torch"]
            operands = [x.requires_grad_() for x in operands]
            with torch.enable_grad():
                found = torch.autograd.grad(self._call(*operands), operands, upstream)
        else:
            found = importlib.import_module("jax").vjp(self._call, *operands)[1](upstream)
        return tuple(map(self._out, found))

    def backward_weights(self) -> np.ndarray:
        """Return the weights that the gradient of v uses, for equal scores and one-hot gradients of out."""
        found = np.zeros((*self.q.shape[:3], self.k.shape[2]))
        group = self.q.shape[1] // self.k.shape[1]
        for first, stop, dout in _one_hot(np.zeros((*self.q.shape[:3], self.v.shape[3]), self.v.dtype)):
            for member in range(group):  # dv sums over the heads of a group
                own = np.zeros_like(dout)
                own[:, member::group] = dout[:, member::group]
                dv = self.gradients(np.zeros_like(self.q), self.k, self.v, own)[2]
                found[:, member::group, first:stop] = np.swapaxes(dv, 2, 3)[:, :, : stop - first]
        return found


class _Findings:
    """What the checks have found so far."""

    def __init__(self, given: str, pattern: Pattern, expected: np.ndarray, scale: float) -> None:
        self.given, self.pattern, self.expected, self.scale = given, pattern, expected, scale
        self.difference: Difference | None = None
        self.problems: list[str] = []
        self.guesses: list[str] = []
        self.checked: list[str] = []

    def report(self) -> Verification:
        lists = map(tuple, (self.problems, self.guesses, self.checked))
        return Verification(self.given, self.difference, *lists)

    def check_pairs(self, subject: _Subject) -> None:
        self.checked.append("pairs")
        self._compare(subject.weights(np.zeros_like(subject.q), subject.k), "")

    def _compare(self, weights: np.ndarray, where: str) -> None:
        """Compare the pairs with non-zero weights, then the weights, which are equal in each row."""
        nan = np.isnan(weights).any(axis=3) & self.expected.any(axis=3)
        if nan.any():
            self.problems.append(f"{where}NaN in {nan.sum()} rows; the first is {_row(nan)}")
        weights = np.nan_to_num(weights)
        seen = np.abs(weights) > _LEAST_WEIGHT * np.abs(weights).max(axis=3, keepdims=True)
        self.difference = None if nan.any() else _first(seen, self.expected)
        if self.difference is not None:
            self.problems += [where.rstrip(": ")] if where else []
            self.guesses += guess_pairs(seen, self.pattern)
        sums = weights.sum(axis=3)
        wrong = self.expected.any(axis=3) & ~nan & (abs(sums - 1) > 0.02)
        if wrong.any():
            self.problems.append(
                f"{where}the weights of {wrong.sum()} rows do not sum to 1; the first is {_row(wrong)}, with a sum of "
                f"{sums[wrong][0]:.3g}: dropout, a sink, or a projection of the output"
            )

    def check_results(self, subject: _Subject) -> None:
        self.checked += ["weights", "results"]
        q, k, v = subject.q, subject.k, subject.v
        out = subject(q, k, v)
        error, limit = self._errors(out, q, k, v, self.scale)
        if error.max(initial=0) <= limit:
            return
        worst = tuple(map(int, np.unravel_index(np.argmax(error), error.shape)))
        self.problems.append(
            f"results differ by up to {error.max():.3g}, more than the error bound {limit:.3g}, at (batch, head, row, "
            f"feature) {worst}"
        )

        def agrees(k: np.ndarray, v: np.ndarray, scale: float) -> bool:
            error, limit = self._errors(out, q, k, v, scale)
            return bool(error.max(initial=0) <= limit)

        weights = subject.weights(q, k)
        self.guesses += guess_heads(k, v, q.shape[1], lambda k, v: agrees(k, v, self.scale))
        self.guesses += guess_scale(q, k, weights, self.expected, self.scale, lambda scale: agrees(k, v, scale))
        if not self.guesses:
            deviation = deviation_of_scores(q, k, weights, self.expected, self.scale)
            self.problems.append(
                f"logarithms of weights deviate from scale · q·k by up to {deviation:.3g}: a bias, a soft-cap or "
                "another score function"
                if deviation > _LARGE_DEVIATION
                else "the weights agree: the values or the precision of the sums differ"
            )

    def _errors(
        self, out: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float
    ) -> tuple[np.ndarray, float]:
        """Return the errors of `out`, infinity for NaN, and their bound; rows without an allowed key have error 0."""
        exact = reference.attend(q, k, v, self.expected, scale)[0]
        live = self.expected.any(axis=3, keepdims=True)
        error = np.nan_to_num(np.abs(np.where(live, out - exact, 0)), nan=np.inf)
        return error, error_bound(exact, naive_orders(q, k, v, self.expected, scale)[0], q.dtype)

    def check_gradients(self, subject: _Subject) -> None:
        q, k, v = subject.q, subject.k, subject.v
        expectation = GradientExpectation(self.pattern, q, k, v, self.scale)
        try:
            found = subject.gradients(q, k, v, expectation.dout)
        except NotImplementedError:  # such as FlexAttention's on the CPU
            self.checked.append("no gradients, which the function does not implement")
            return
        self.checked.append("gradients")
        wrong = expectation.problems(found)
        if not wrong:
            return
        self._compare(subject.backward_weights(), "the gradient of v uses other pairs than the forward: ")
        self.problems += [f"gradients: {each}" for each in wrong]


def _sizes(
    pattern: Pattern, function: Any, batch: int | None, heads: int | None, q_len: int | None, kv_len: int | None
) -> tuple[int, int, int, int]:
    """Return batch, heads, q_len and kv_len: given, or those of a mask, or those of the pattern, or 2."""
    own: tuple[int, ...] = (2, 2)
    if namespace_of(function) is not None:
        shape = tuple(map(int, function.shape))
        if len(shape) not in (2, 3, 4):
            raise ValueError(f"function: expected a mask of 2 to 4 axes, got shape {shape}")
        own = ((1, 1) + shape)[-4:]
    elif isinstance(function, Pattern):
        own = 1, 1
    given = {"batch": batch, "heads": heads, "q_len": q_len, "kv_len": kv_len}
    several = *(size if size > 1 else 0 for size in pattern.sizes()), 0, 0
    found: list[int] = []
    for (name, size), default, of_pattern in zip(given.items(), (*own, 0, 0)[:4], several, strict=True):
        if size is None:
            size = default if default > 1 or not of_pattern else of_pattern
        if size == 0 and name == "kv_len":
            size = found[-1]
        if size == 0:
            raise ValueError("q_len: expected the number of queries, got None")
        found.append(integer(name, size, 1))
    if len(own) == 4 and tuple(found[2:]) != own[2:]:
        raise ValueError(f"function: expected a mask of {found[2]} × {found[3]}, got {own[2]} × {own[3]}")
    if int(np.prod(found)) > _MOST_PAIRS:
        raise ValueError(f"q_len: expected at most {_MOST_PAIRS} pairs in all heads, got {int(np.prod(found))}")
    return found[0], found[1], found[2], found[3]


def _mask_of(function: Any, sizes: tuple[int, int, int, int], arrays: str | None) -> np.ndarray | None:
    """Return `function` as a mask (batch, heads, q_len, kv_len); None for an attention function."""
    if isinstance(function, (Pattern, Plan)):
        return dense_mask(function, *sizes)
    if namespace_of(function) is not None:
        mask = to_host(function)
        if mask.dtype != bool:
            raise TypeError(f"function: expected a mask of bool, got {mask.dtype}")
        return np.broadcast_to(mask, sizes)
    if type(function).__name__ == "BlockMask":
        function = function.mask_mod
    if not callable(function):
        raise TypeError(f"function: expected a function or a mask, got {type(function).__name__}")
    arguments = _required(function)
    if arguments not in (2, 4):
        return None
    kind = _namespace(_library(function) if arrays is None else choice("arrays", arrays, _LIBRARIES))
    indices = [kind.from_numpy(x) for x in np.ogrid[tuple(map(slice, sizes))]]
    found = kind.to_host(function(*indices[-arguments:]))
    if found.dtype != bool:
        raise TypeError(f"function: expected a mask function that returns bool, got {found.dtype}")
    return np.broadcast_to(found, sizes)


def _required(function: Callable[..., Any]) -> int:
    """Return the number of positional arguments without defaults; 3 if the function has no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return 3  # a builtin
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return 3 if variadic else sum(p.default is p.empty for p in positional)


def _library(function: Any) -> str:
    """Return the array library of the names that a function refers to, by default NumPy."""
    found = {root for root in _roots(function, set(), 4) if root in _LIBRARIES[1:]}
    if len(found) > 1:
        raise TypeError(f"arrays: expected one of {', '.join(_LIBRARIES)}, as the function refers to several of them")
    return found.pop() if found else "numpy"


def _roots(value: Any, seen: set[int], depth: int) -> Iterator[str]:
    """Yield the top-level packages of an object, its class, and what its code refers to."""
    if id(value) in seen or depth == 0:
        return
    seen.add(id(value))
    if isinstance(value, functools.partial):
        for inner in (value.func, *value.args, *value.keywords.values()):
            yield from _roots(inner, seen, depth)
        return
    classes = value.__mro__ if isinstance(value, type) else type(value).__mro__
    name = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
    own = [str(each).partition(".")[0] for each in (name, *(cls.__module__ for cls in classes))]
    yield from own
    code = value if inspect.isroutine(value) else vars(type(value)).get("__call__")
    if {"spattn", *_LIBRARIES}.isdisjoint(own) and (inspect.isfunction(code) or inspect.ismethod(code)):
        names = inspect.getclosurevars(code)
        for inner in (*names.globals.values(), *names.nonlocals.values()):
            yield from _roots(inner, seen, depth - 1)


def _namespace(name: str) -> ArrayNamespace:
    """Import an array library, and return its arrays' interface."""
    if name != "numpy":
        importlib.import_module("jax.numpy" if name == "jax" else name)
    with whole_imports:
        made: ArrayNamespace = NUMPY if name == "numpy" else importlib.import_module(f"spattn.arrays.{name}").KIND()
    return made


def _one_hot(v: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield (first, stop, array like `v`) with row ``first + n`` one-hot at feature n, for all rows in turn."""
    length, features = v.shape[2:]
    for first in range(0, length, features):
        stop, one = min(first + features, length), np.zeros_like(v)
        each = np.arange(stop - first)
        one[:, :, first + each, each] = 1
        yield first, stop, one


def _first(seen: np.ndarray, expected: np.ndarray) -> Difference | None:
    """Return the first row whose keys differ."""
    wrong = (seen != expected).any(axis=3)
    if not wrong.any():
        return None
    b, h, row = (int(n) for n in np.argwhere(wrong)[0])
    got, want = seen[b, h, row], expected[b, h, row]
    return Difference(b, h, row, _ranges(got & ~want), _ranges(want & ~got), int(wrong.sum()))


def _ranges(keys: np.ndarray) -> tuple[range, ...]:
    """Return the runs of True."""
    edges = np.flatnonzero(np.diff(np.pad(keys, 1).astype(np.int8)))
    return tuple(range(int(first), int(stop)) for first, stop in edges.reshape(-1, 2))


def _text(keys: range) -> str:
    return str(keys[0]) if len(keys) == 1 else f"{keys[0]}–{keys[-1]}"


def _row(wrong: np.ndarray) -> str:
    b, h, row = np.argwhere(wrong)[0]
    return f"batch {b}, head {h}, row {row}"
