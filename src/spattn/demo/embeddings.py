"""Parts (a) and (b): sentence embeddings with every attention layer computed by spattn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import patterns
from ..api.attention import attention
from ..api.plans import plan
from ..patterns import Pattern
from ..planning import Plan
from . import text
from .model import Encoder, unit_length
from .naive import dense_attention
from .progress import Progress

TOLERANCE = 1e-5
_BATCH = 8  # texts computed together


@dataclass(frozen=True)
class Agreement:
    """How far spattn's dense embeddings are from plain NumPy's, as a largest absolute difference."""

    texts: int
    tokens: int
    padded: float
    packed: float

    @property
    def holds(self) -> bool:
        """Whether both are within :data:`TOLERANCE`; NaN is not."""
        return self.padded <= TOLERANCE and self.packed <= TOLERANCE


@dataclass(frozen=True)
class Shift:
    """What a sparse pattern does to the embeddings.

    Attributes
    ----------
    pairs : float
        Allowed pairs as a share of all pairs of each text.
    efficiency : float
        Allowed pairs as a share of the pairs in the plan's tiles.
    cosine_mean, cosine_min : float
        Of each embedding to the dense one.
    found : int
        Functions whose nearest module opening is their own module's.
    """

    pattern: str
    pairs: float
    efficiency: float
    cosine_mean: float
    cosine_min: float
    found: int


def sparse_patterns() -> dict[str, Pattern]:
    """The patterns of part (b), for texts of up to 512 tokens."""
    cases: dict[str, Pattern] = {f"window ±{w}": patterns.SlidingWindow(w) for w in (16, 64, 128)}
    for w in (16, 64):
        cases[f"Longformer ±{w}, [CLS] global"] = patterns.longformer(2 * w, global_tokens=(0,))
    return cases


def compare(
    encoder: Encoder, tokenizer: Any, modules: int, backend: str, progress: Progress
) -> tuple[Agreement, list[Shift]]:
    """Embeds texts of `modules` modules densely, in plain NumPy and by spattn, then with each sparse pattern."""
    texts = text.tokenise(tokenizer, text.sample(modules), encoder.max_len)
    texts_by_length = np.argsort([len(t) for t in texts], kind="stable")
    batches = [texts_by_length[at : at + _BATCH] for at in range(0, len(texts), _BATCH)]
    cases = sparse_patterns()
    progress.start("embeddings", len(texts) + len(batches) * (2 + len(cases)))

    plain = np.stack([plain_embedding(encoder, t) for t in progress.each(texts)])

    def embed(function: Callable[..., np.ndarray], *arguments: Pattern) -> np.ndarray:
        result = np.empty_like(plain)
        for batch in progress.each(batches):
            result[batch] = function(encoder, [texts[i] for i in batch], backend, *arguments)
        return result

    dense = embed(padded_embeddings, patterns.Full())
    packed = embed(packed_embeddings)
    difference = [float(np.abs(x - plain).max()) for x in (dense, packed)]
    agreement = Agreement(len(texts), sum(map(len, texts)), *difference)

    def shift_by(name: str, pattern: Pattern, moved: np.ndarray) -> Shift:
        plans = [_plan(pattern, len(t), encoder, backend) for t in texts]
        return shift(name, moved, dense, plans)

    shifts = [shift_by("dense", patterns.Full(), dense)]
    shifts += [shift_by(name, p, embed(padded_embeddings, p)) for name, p in cases.items()]
    progress.finish()
    return agreement, shifts


def plain_embedding(encoder: Encoder, tokens: np.ndarray) -> np.ndarray:
    """One text's embedding without spattn: no batch, no padding, NumPy's dense attention."""
    return encoder.embed(tokens[None], np.ones((1, len(tokens)), bool), dense_attention)[0]


def padded_embeddings(encoder: Encoder, texts: list[np.ndarray], backend: str, pattern: Pattern) -> np.ndarray:
    """Embeddings of a padded batch: the padding is one more pattern, ``& Documents(lengths)``."""
    lengths = [len(t) for t in texts]
    tokens = np.zeros((len(texts), max(lengths)), dtype=np.int64)
    for row, t in zip(tokens, texts, strict=True):
        row[: len(t)] = t
    valid = np.arange(tokens.shape[1]) < np.array(lengths)[:, None]
    allowed = pattern & patterns.Documents(tuple((n,) for n in lengths))
    return encoder.embed(tokens, valid, lambda q, k, v: attention(q, k, v, allowed, backend=backend))


def packed_embeddings(encoder: Encoder, texts: list[np.ndarray], backend: str) -> np.ndarray:
    """Dense embeddings of texts laid end to end in one sequence, without any padding."""
    lengths = [len(t) for t in texts]
    positions = np.concatenate([np.arange(n) for n in lengths])
    allowed = patterns.Documents(tuple(lengths))
    hidden = encoder.hidden_states(
        np.concatenate(texts)[None], positions[None], lambda q, k, v: attention(q, k, v, allowed, backend=backend)
    )[0]
    pieces = np.split(hidden, np.cumsum(lengths)[:-1])
    return unit_length(np.stack([piece.mean(axis=0) for piece in pieces]))


def shift(name: str, embeddings: np.ndarray, dense: np.ndarray, plans: list[Plan]) -> Shift:
    """Compares embeddings with the dense ones; texts alternate between a module's opening and one of its functions."""
    cosine = np.einsum("ij,ij->i", embeddings, dense)
    openings, functions = embeddings[0::2], embeddings[1::2]
    nearest = (functions @ openings.T).argmax(axis=1)
    pairs = sum(p.nnz for p in plans)
    return Shift(
        pattern=name,
        pairs=pairs / sum(p.q_len * p.kv_len for p in plans),
        efficiency=pairs / sum(p.tiles * p.block_q * p.block_kv for p in plans),
        cosine_mean=float(cosine.mean()),
        cosine_min=float(cosine.min()),
        found=int((nearest == np.arange(len(nearest))).sum()),
    )


def _plan(pattern: Pattern, tokens: int, encoder: Encoder, backend: str) -> Plan:
    """The plan that the backend makes for one text."""
    q = np.broadcast_to(np.float32(0), (1, encoder.heads, tokens, encoder.head_dim))
    return plan(pattern, backend=backend, like=(q, q, q))
