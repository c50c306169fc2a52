"""``python examples/dyck``: recognize random strings, then train a generator for two minutes."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np  # noqa: E402

from dyck import language  # noqa: E402
from dyck.recognizer import Recognizer  # noqa: E402

K, DEPTH, LENGTH = 8, 5, 64


def main(steps=1200):
    """Print how often the networks are right."""
    strings = language.strings(np.random.default_rng(0), 40, 1000, K, DEPTH)
    expected = [language.accepts(string, K, DEPTH) for string in strings]
    right = (Recognizer(K, DEPTH)(language.padded(strings, K)) == expected).sum()
    print(f"recognizer: {right} of {len(strings)} right, {sum(expected)} of them in Dyck-({K}, {DEPTH})", flush=True)
    try:
        import torch
    except ModuleNotFoundError:
        sys.exit("generator: PyTorch is not installed: pip install torch")
    from dyck import generator

    torch.manual_seed(0)
    model = generator.Generator(K)
    losses, seconds = generator.train(model, K, DEPTH, LENGTH, steps)
    print(f"generator: loss {losses[-1]:.3f} after {steps} steps and {seconds:.0f} s of CPU time")
    for length in (LENGTH, 2 * LENGTH, 4 * LENGTH):
        right, _ = generator.closings(model, K, DEPTH, length)
        print(f"{length} tokens: {100 * right:.1f} % of the closing brackets right")


if __name__ == "__main__":
    main()
