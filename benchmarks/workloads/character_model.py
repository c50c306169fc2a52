#!/usr/bin/env python3
"""Train a small character model with dense, strided and windowed attention.

    python benchmarks/workloads/character_model.py        # four minutes; needs torch

Runs the examples of ``docs/tutorials/character_model.rst``, then trains the models that they define for longer than a
documentation build may take. Writes ``character_model``, the source of that page's table and figure.
"""

from __future__ import annotations

import argparse
import doctest
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import record

PAGE = record.ROOT / "docs" / "tutorials" / "character_model.rst"
STEPS, AVERAGED = 400, 10


def page() -> dict:
    """Run the page's examples and return the names that they define."""
    examples = doctest.DocTestParser().get_doctest(PAGE.read_text(), {}, PAGE.name, str(PAGE), 0)
    runner = doctest.DocTestRunner()
    if runner.run(examples, clear_globs=False).failed:
        raise SystemExit(f"{PAGE.name}: an example failed")
    return examples.globs


def main() -> None:
    """Train, print, write."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
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
        f"{STEPS} steps with two sequences of {defined['length']} characters; the three models alternate. step_ms: "
        "median CPU time of all threads, PyTorch on one. loss: on 16 held-out sequences. losses: training loss, "
        f"means of {AVERAGED} steps."
    )
    record.write("character_model", rows, notes=notes, steps=STEPS, averaged=AVERAGED)


if __name__ == "__main__":
    main()
