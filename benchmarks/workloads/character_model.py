#!/usr/bin/env python3
"""How does a small model of characters train with dense, strided and windowed attention?

    python benchmarks/workloads/character_model.py

Runs the examples of ``docs/tutorials/character_model.rst`` as they stand there, and trains what they define for longer
than documentation may take: four minutes. Writes ``benchmarks/results/character_model-xeon-amx.json``, from which the page has
its table and its picture. Needs torch.
"""

from __future__ import annotations

import doctest
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import record

PAGE = record.ROOT / "docs" / "tutorials" / "character_model.rst"
STEPS, AVERAGED = 400, 10


def page() -> dict:
    """The names that the page's examples define; SystemExit where one of them fails."""
    examples = doctest.DocTestParser().get_doctest(PAGE.read_text(), {}, PAGE.name, str(PAGE), 0)
    runner = doctest.DocTestRunner()
    if runner.run(examples, clear_globs=False).failed:
        raise SystemExit(f"{PAGE.name}: expected its examples to hold")
    return examples.globs


def main() -> None:
    """Train, print, write."""
    defined = page()
    patterns, torch = defined["patterns"], defined["torch"]
    torch.set_num_threads(1)
    trainings = {name: defined["Training"](defined["sparse"](pattern)) for name, pattern in patterns.items()}
    defined["train"](trainings.values(), STEPS)
    rows = []
    for name, one in trainings.items():
        plan = defined["plans"][name]
        row = {
            "name": name,
            "pattern": repr(patterns[name]),
            "pairs": plan.nnz,
            "plan_kib": round(plan.nbytes / 1024, 1),
            "step_ms": round(1e3 * statistics.median(one.seconds), 1),
            "loss": round(defined["loss_of"](one), 3),
        }
        print(*row.values(), sep="  ")
        averages = (statistics.mean(one.losses[n : n + AVERAGED]) for n in range(0, STEPS, AVERAGED))
        rows.append(row | {"losses": [round(loss, 3) for loss in averages]})
    notes = (
        f"{STEPS} steps of two pieces of {defined['length']} characters; the three take turns. step_ms: median "
        "processor time of all threads, PyTorch on one. loss: of 16 pieces of text that was not trained on. losses: of "
        f"the training's pieces, means of {AVERAGED} steps."
    )
    record.write("character_model", rows, notes=notes, steps=STEPS, averaged=AVERAGED)


if __name__ == "__main__":
    main()
