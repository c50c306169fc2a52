"""Eight chains of operations on scores, each as a score function and as array operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from spattn import patterns, score

__all__ = ["CHAINS", "PLAIN", "Chain", "Separate", "exact", "parameters", "pattern_of"]

CAP, REACH, BUCKETS, FARTHEST = 20.0, 256, 32, 128


def parameters(heads: int, tokens: int) -> SimpleNamespace:
    """Parameters of all chains, in float32; bfloat16 represents each value."""
    rng, head = np.random.default_rng(0), np.arange(heads, dtype=np.float32)

    def table(width: int) -> np.ndarray:
        return (rng.integers(-64, 65, (heads, width)) / 32).astype(np.float32)

    return SimpleNamespace(
        slopes=np.exp2(-1 - head % 8),
        table=table(2 * REACH + 1),
        buckets=table(BUCKETS),
        temperature=0.5 + head % 8 / 8,
        threshold=head % 8 / 4 - 1,
        tau=np.exp2(2 + head % 8),
        document=np.sort(rng.integers(0, 4, tokens)),
    )


def pattern_of(name: str) -> patterns.Pattern:
    """The pattern ``"all pairs"``, ``"causal"`` or ``"window N"``, which is a query's own key and N keys before it."""
    if name.startswith("window"):
        return patterns.SlidingWindow(_reach(name), 0)
    return patterns.Causal() if name == "causal" else patterns.Full()


def _reach(name: str) -> int:
    return int(name.removeprefix("window"))


@dataclass(frozen=True)
class Chain:
    """A chain of operations on scores.

    Attributes
    ----------
    function : callable
        Parameters to spattn's score function, or None for unchanged scores.
    bias : callable
        An array of the shape of the scores that operators make of parameters `p` and positions `at`, or None. `xp` is
        NumPy or PyTorch.
    operators : callable
        Change the scores `s` in place. Parameters per head have shape (heads, 1, 1, 1).
    """

    function: Callable[[Any], Callable | None]
    bias: Callable[[ModuleType, Any, Any], Any]
    operators: Callable[[ModuleType, Any, Any, Any], None]


def _alibi_bias(xp, p, at):
    return at.steps * -p.slopes


def _documents_bias(xp, p, at):
    bias = _alibi_bias(xp, p, at)
    bias += xp.where(p.document[at.query] == p.document[at.key], 0.0, -math.inf)
    return bias


def _decay_factor(xp, p, at):
    factor = at.steps / -p.tau
    return xp.exp(factor, out=factor)


def _looked_up(xp, table, index):
    if xp is np:
        return np.take(table, index, axis=1)
    return table.index_select(1, index.flatten()).view(-1, *index.shape)


def _add(xp, s, p, bias):
    s += bias


def _multiply(xp, s, p, factor):
    s *= factor


def _cap(xp, s, p, bias):
    s *= 1 / CAP
    xp.tanh(s, out=s)
    s *= CAP
    if bias is not None:
        s += bias


def _temper_and_add(xp, s, p, bias):
    s /= p.temperature
    s += bias


def _gate(xp, s, p, bias):
    if xp is not np:
        s *= (s - p.threshold).sigmoid_()
        return
    inverse = p.threshold - s
    np.exp(inverse, out=inverse)
    inverse += 1
    s /= inverse


def _no_bias(xp, p, at):
    return None


def _unchanged(xp, s, p, bias):
    pass


def _soft_cap(p):
    return lambda s, b, h, q, k: CAP * score.tanh(s / CAP)


def _alibi(p):
    return lambda s, b, h, q, k: s - p.slopes[h] * abs(k - q)


def _soft_cap_and_table(p):
    return lambda s, b, h, q, k: CAP * score.tanh(s / CAP) + p.table[h, score.clip(k - q, -REACH, REACH) + REACH]


def _temperature_and_alibi(p):
    return lambda s, b, h, q, k: s / p.temperature[h] - p.slopes[h] * abs(k - q)


def _t5(p):
    return score.t5_bias(p.buckets.T, max_distance=FARTHEST)


def _sigmoid_gate(p):
    return lambda s, b, h, q, k: s * score.sigmoid(s - p.threshold[h])


def _decay(p):
    return lambda s, b, h, q, k: s * score.exp(-abs(k - q) / p.tau[h])


def _documents(p):
    return lambda s, b, h, q, k: score.where(
        p.document[q] == p.document[k], CAP * score.tanh(s / CAP) - p.slopes[h] * abs(k - q), -math.inf
    )


CHAINS = {
    "ALiBi": Chain(_alibi, _alibi_bias, _add),
    "soft-cap": Chain(_soft_cap, _no_bias, _cap),
    "soft-cap, table of distances": Chain(
        _soft_cap_and_table, lambda xp, p, at: _looked_up(xp, p.table, at.clipped), _cap
    ),
    "temperature, ALiBi": Chain(_temperature_and_alibi, _alibi_bias, _temper_and_add),
    "T5's buckets": Chain(_t5, lambda xp, p, at: _looked_up(xp, p.buckets, at.bucket), _add),
    "sigmoid gate": Chain(_sigmoid_gate, _no_bias, _gate),
    "distance decay": Chain(_decay, _decay_factor, _multiply),
    "soft-cap, ALiBi, documents": Chain(_documents, _documents_bias, _cap),
}
PLAIN = Chain(lambda p: None, _no_bias, _unchanged)


class Separate:
    """Attention with a chain, as separate operators of NumPy or PyTorch.

    Products, operators, mask and softmax work on scores of shape (heads, blocks, rows, keys): a window of N has blocks
    of N rows and 2 N keys, another pattern one block of all pairs. What depends on positions alone is computed once,
    here; what depends on parameters, in each call.

    Parameters
    ----------
    xp : module
        NumPy or PyTorch.
    chain : Chain
    pattern : str
        As for :func:`pattern_of`.
    parameters : SimpleNamespace of arrays of NumPy
    convert : callable
        From an array of NumPy to one of `xp`; floats get the dtype of the scores.
    """

    def __init__(
        self, xp: ModuleType, chain: Chain, pattern: str, parameters: SimpleNamespace, convert: Callable[[Any], Any]
    ):
        tokens = len(parameters.document)
        self._xp, self._chain = xp, chain
        self._reach = _reach(pattern) if pattern.startswith("window") else None
        self._at = SimpleNamespace(**{name: convert(x) for name, x in _positions(pattern, tokens).items()})
        self._masked = pattern != "all pairs"
        self._p = SimpleNamespace(
            **{name: convert(x if name in _TABLES else x[:, None, None, None]) for name, x in vars(parameters).items()}
        )

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        """Attention of (heads, tokens, head_dim) arrays, all heads at once."""
        return self._attend(q, k, v, self._p, self._chain.bias(self._xp, self._p, self._at))

    def head_by_head(self) -> Callable[[Any, Any, Any], Any]:
        """The same one head after the other, with the bias computed here: parameters must not change."""
        bias = self._chain.bias(self._xp, self._p, self._at)
        own = {name: x for name, x in vars(self._p).items() if name not in _TABLES}

        def attend(q, k, v):
            out = self._xp.empty_like(v)
            for h in range(len(q)):
                one = slice(h, h + 1)
                p = SimpleNamespace(**{name: x[one] for name, x in own.items()})
                out[one] = self._attend(q[one], k[one], v[one], p, None if bias is None else bias[one])
            return out

        return attend

    def _attend(self, q, k, v, p, bias):
        rows = (q * q.shape[-1] ** -0.5).reshape(len(q), len(self._at.steps), -1, q.shape[-1])
        s = rows @ self._in_blocks(k).swapaxes(-1, -2)
        self._chain.operators(self._xp, s, p, bias)
        if self._masked:
            s += self._at.mask
        values = self._in_blocks(v)
        if self._xp is not np:
            return (s.softmax(-1) @ values).reshape(v.shape)
        s -= s.max(-1, keepdims=True)
        np.exp(s, out=s)
        total = s.sum(-1, keepdims=True)
        out = s @ values
        out /= total
        return out.reshape(v.shape)

    def _in_blocks(self, x):
        """Keys or values of each block: for a window those of the block's own tokens after those of the one before."""
        if self._reach is None:
            return x[:, None]
        own = x.reshape(len(x), -1, self._reach, x.shape[-1])
        before = self._xp.roll(own, 1, 1)  # the mask hides those of the first block
        return self._xp.concatenate([before, own], 2)


_TABLES = ("table", "buckets", "document")


def _positions(pattern: str, tokens: int) -> dict[str, np.ndarray]:
    """Positions of queries and keys in blocks, and what depends on them alone."""
    query, key = np.arange(tokens)[None, :, None], np.arange(tokens)[None, None, :]
    forbidden = key > query
    if pattern.startswith("window"):
        reach = _reach(pattern)
        query = query.reshape(-1, reach, 1)
        key = query[:, :1] + np.arange(-reach, reach)
        forbidden = (key > query) | (key < query - reach) | (key < 0)
    elif pattern == "all pairs":
        forbidden = np.zeros_like(forbidden)
    distance = key - query
    return {
        "query": query,
        "key": key,
        "steps": abs(distance).astype(np.float32),
        "clipped": np.clip(distance, -REACH, REACH) + REACH,
        "bucket": _bucket(distance),
        "mask": np.where(forbidden, np.float32(-np.inf), np.float32(0)),
    }


def _bucket(distance: np.ndarray) -> np.ndarray:
    """T5's bucket of each distance, as in the model's code."""
    one_way = BUCKETS // 2
    near = one_way // 2
    steps = np.maximum(abs(distance), 1).astype(np.float32)
    far = near + (np.log(steps / near) / np.float32(math.log(FARTHEST / near)) * (one_way - near)).astype(int)
    return (distance > 0) * one_way + np.where(abs(distance) < near, abs(distance), np.minimum(far, one_way - 1))


def exact(
    function: Callable | None, pattern: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, rows: np.ndarray
) -> np.ndarray:
    """Rows of attention of float64 (heads, tokens, head_dim) arrays, by the textbook formula and a score function."""
    i, j = rows[:, None], np.arange(q.shape[1])[None]
    allowed = pattern_of(pattern).bind(q.shape[1], q.shape[1]).allows(i, j)
    heads = []
    for h in range(len(q)):
        s = q[h, rows] @ k[h].T / math.sqrt(q.shape[-1])
        s = np.where(allowed, s if function is None else function(s, 0, h, i, j), -math.inf)
        weights = np.exp(s - s.max(-1, keepdims=True))
        heads.append(weights @ v[h] / weights.sum(-1, keepdims=True))
    return np.stack(heads)
