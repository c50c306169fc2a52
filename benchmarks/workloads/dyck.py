#!/usr/bin/env python3
"""Recognize Dyck-(k, D) by the constructed network; train generators, and LSTMs beside them.

    python benchmarks/workloads/dyck.py        # five minutes; needs torch

Runs the networks of ``examples/dyck``. Writes ``dyck``, the source of the tables and figures of
``docs/tutorials/dyck.rst``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import numpy as np
import record
import torch

sys.path.insert(0, str(record.ROOT / "examples"))

from dyck import generator, language
from dyck.recognizer import Recognizer

TYPES, DEPTHS, STRINGS, LONGEST = range(1, 9), range(1, 9), 24, 1000
K, DEPTH, LENGTH, STEPS, AVERAGED = 8, 5, 64, 1200, 25
LENGTHS = [LENGTH, 2 * LENGTH, 4 * LENGTH, 8 * LENGTH]
SHOWN = 32  # tokens of the string whose attention weights are kept


def recognized() -> list[dict]:
    """For each depth, how often the network and a stack machine agree, on strings of 1 to 8 types."""
    rows = []
    for depth in DEPTHS:
        rng, right, members, seconds = np.random.default_rng(depth), 0, 0, 0.0
        for k in TYPES:
            made = language.strings(rng, STRINGS, LONGEST, k, depth)
            expected = np.array([language.accepts(string, k, depth) for string in made])
            begin = time.process_time()
            answers = Recognizer(k, depth)(language.padded(made, k))
            seconds += time.process_time() - begin
            right, members = right + int((answers == expected).sum()), members + int(expected.sum())
        count = len(TYPES) * STRINGS
        row = {"part": "recognizer", "depth": depth, "layers": depth + 1, "strings": count, "members": members}
        rows.append(row | {"right_percent": 100 * right / count, "seconds": round(seconds, 1)})
        print(rows[-1], flush=True)
    return rows


def models() -> dict[str, torch.nn.Module]:
    """The generator, the same without positions, a narrow one, and LSTMs of the same widths."""
    made = {"attention, 48": generator.Generator(K)}
    still = generator.Generator(K)
    for layer in still.layers:
        torch.nn.init.zeros_(layer.slopes.requires_grad_(False))
    made["attention, 48, no positions"] = still
    made["attention, 16"] = generator.Generator(K, 16)
    return made | {f"LSTM, {width}": generator.Recurrent(K, width) for width in (48, 16)}


def valid_samples(model: torch.nn.Module) -> float:
    """The percentage of valid ones among the closing brackets that a model samples at twice its training length."""
    valid = closing = 0
    for string in generator.generate(model, K, 2 * LENGTH, 32):
        stack: list[int] = []
        for token in string:
            if token < K:
                stack.append(token)
            else:
                closing += 1
                valid += bool(stack) and stack.pop() == token - K
    return round(100 * valid / closing, 2)


def trained(name: str, model: torch.nn.Module) -> list[dict]:
    """Train a model; a row for each length, the first with its losses."""
    losses, seconds = generator.train(model, K, DEPTH, LENGTH, STEPS)
    means = [round(statistics.mean(losses[n : n + AVERAGED]), 3) for n in range(0, STEPS, AVERAGED)]
    about = {"part": "generator", "model": name, "parameters": sum(p.numel() for p in model.parameters())}
    rows = []
    for length in LENGTHS:
        right, confident = (round(100 * share, 2) for share in generator.closings(model, K, DEPTH, length))
        rows.append(about | {"length": length, "right_percent": right, "confident_percent": confident})
    rows[0] |= {"seconds": round(seconds, 1), "losses": means}
    rows[1] |= {"valid_samples_percent": valid_samples(model)}
    for row in rows:
        print({key: value for key, value in row.items() if key != "losses"}, flush=True)
    return rows


def attention_of(model: generator.Generator) -> dict:
    """The attention weights of all heads for one string, and its tokens."""
    tokens, _ = generator.batch(np.random.default_rng(5), 1, SHOWN - 1, K, DEPTH)
    x, layers = model.token(tokens), []
    with torch.no_grad():
        for layer in model.layers:
            layers.append(np.round(layer.weights(x)[0].numpy().astype(float), 2).tolist())
            x = layer(x)
    slopes = [[round(slope, 2) for slope in layer.slopes.tolist()] for layer in model.layers]
    return {"tokens": tokens[0].tolist(), "weights": layers, "slopes": slopes}


def main() -> None:
    """Recognize, train, write."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows, made = recognized(), models()
    for name, model in made.items():
        rows += trained(name, model)
    notes = (
        f"recognizer: for each depth D, {STRINGS} strings of up to {LONGEST} tokens for each k of 1 to 8, half of them "
        f"edited. generator: k = {K}, D = {DEPTH}, {STEPS} steps of 32 prefixes of {LENGTH} tokens; right and "
        "confident: 64 prefixes of each length; valid samples: 32 strings of twice the training length. Seconds are "
        "CPU time of one thread."
    )
    shown = {"k": K, "depth": DEPTH, "attention": attention_of(made["attention, 48"])}
    record.write("dyck", rows, notes=notes, averaged=AVERAGED, **shown)


if __name__ == "__main__":
    main()
