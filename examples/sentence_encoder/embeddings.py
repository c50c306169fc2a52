"""Parts (a) and (b): sentence embeddings with every attention layer computed by spattn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spattn import Plan, attention, patterns, plan_for
from spattn.patterns import Pattern

from . import text
from .budget import Budget
from .model import Encoder, unit_length
from .naive import dense_attention
from .progress import Progress
from .results import Agreement, Shift

_BATCH = 8  # texts per batch
_PLAIN_SHARE = 1 / 6  # of the budget; the seven stages by spattn take less time each
_FEWEST = 4  # texts


def sparse_patterns() -> dict[str, Pattern]:
    """The patterns of part (b), for texts of up to 512 tokens."""
    cases: dict[str, Pattern] = {f"window ±{w}": patterns.SlidingWindow(w) for w in (16, 64, 128)}
    for w in (16, 64):
        cases[f"Longformer ±{w}, [CLS] global"] = patterns.longformer(2 * w, global_tokens=(0,))
    return cases


def compare(
    encoder: Encoder, tokenizer: Any, modules: int, backend: str, progress: Progress, budget: Budget
) -> tuple[Agreement, list[Shift]]:
    """Embed texts of up to `modules` modules densely, in plain NumPy and by spattn, then with each sparse pattern.

    The budget bounds the number of texts, and of sparse patterns beyond the first.
    """
    texts = text.tokenise(tokenizer, text.sample(modules), encoder.max_len)
    plain = _plain_embeddings(encoder, texts, progress, budget.share(_PLAIN_SHARE))
    texts = texts[: len(plain)]
    by_length = np.argsort([len(t) for t in texts], kind="stable")
    batches = [by_length[at : at + _BATCH] for at in range(0, len(texts), _BATCH)]

    def embed(stage: str, function: Callable[..., np.ndarray], *arguments: Pattern) -> np.ndarray:
        progress.start(stage, len(batches))
        result = np.empty_like(plain)
        for batch in progress.each(batches):
            result[batch] = function(encoder, [texts[i] for i in batch], backend, *arguments)
        return result

    dense = embed("(a) the same texts by spattn: padded batches", padded_embeddings, patterns.Full())
    packed = embed("(a) the same texts by spattn: packed without padding", packed_embeddings)
    difference = [float(np.abs(x - plain).max()) for x in (dense, packed)]
    agreement = Agreement(len(texts), sum(map(len, texts)), *difference)

    def shift_by(name: str, pattern: Pattern, moved: np.ndarray) -> Shift:
        return shift(name, moved, dense, [_plan(pattern, len(t), encoder, backend) for t in texts])

    shifts = [shift_by("dense", patterns.Full(), dense)]
    for name, pattern in sparse_patterns().items():
        if len(shifts) > 1 and not budget.left:
            break
        shifts.append(shift_by(name, pattern, embed(f"(b) {name}", padded_embeddings, pattern)))
    progress.finish()
    return agreement, shifts


def _plain_embeddings(encoder: Encoder, texts: list[np.ndarray], progress: Progress, budget: Budget) -> np.ndarray:
    """Embeddings by NumPy alone, of an even number of texts: as many as the budget allows."""
    progress.start(f"(a) up to {len(texts)} texts by NumPy", len(texts))
    plain: list[np.ndarray] = []
    for pair in zip(texts[0::2], texts[1::2], strict=True):
        if len(plain) >= _FEWEST and not budget.left:
            break
        plain += [plain_embedding(encoder, t) for t in progress.each(pair)]
    return np.stack(plain)


def plain_embedding(encoder: Encoder, tokens: np.ndarray) -> np.ndarray:
    """Embedding of one text by NumPy: no batch, no padding, dense attention."""
    return encoder.embed(tokens[None], np.ones((1, len(tokens)), bool), dense_attention)[0]


def padded_embeddings(encoder: Encoder, texts: list[np.ndarray], backend: str, pattern: Pattern) -> np.ndarray:
    """Embeddings of a padded batch: ``& Documents(lengths)`` excludes the padding."""
    lengths = [len(t) for t in texts]
    tokens = np.zeros((len(texts), max(lengths)), dtype=np.int64)
    for row, t in zip(tokens, texts, strict=True):
        row[: len(t)] = t
    valid = np.arange(tokens.shape[1]) < np.array(lengths)[:, None]
    allowed = pattern & patterns.Documents(tuple((n,) for n in lengths))
    return encoder.embed(tokens, valid, lambda q, k, v: attention(q, k, v, allowed, backend=backend))


def packed_embeddings(encoder: Encoder, texts: list[np.ndarray], backend: str) -> np.ndarray:
    """Dense embeddings of texts packed into one sequence, without padding."""
    lengths = [len(t) for t in texts]
    positions = np.concatenate([np.arange(n) for n in lengths])
    allowed = patterns.Documents(tuple(lengths))
    hidden = encoder.hidden_states(
        np.concatenate(texts)[None], positions[None], lambda q, k, v: attention(q, k, v, allowed, backend=backend)
    )[0]
    pieces = np.split(hidden, np.cumsum(lengths)[:-1])
    return unit_length(np.stack([piece.mean(axis=0) for piece in pieces]))


def shift(name: str, embeddings: np.ndarray, dense: np.ndarray, plans: list[Plan]) -> Shift:
    """Compare embeddings with the dense ones; texts alternate between a module's opening and one of its functions."""
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
    """The backend's plan for one text."""
    q = np.broadcast_to(np.float32(0), (1, encoder.heads, tokens, encoder.head_dim))
    return plan_for(pattern, q, q, q, backend=backend)
