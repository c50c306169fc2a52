"""Problems shared by the asv benchmarks."""

from __future__ import annotations

import numpy as np

import spattn
from spattn import patterns as sp

HEADS, HEAD_DIM = 2, 64

# Long sequences; every registered pattern is also measured at its own example.
LARGE = {
    "window 256 of 16384": (sp.SlidingWindow(256), 16384),
    "dilated 256 d=4 of 16384": (sp.DilatedWindow(256, dilation=4), 16384),
    "strided 128 of 16384": (sp.strided(128), 16384),
    "fixed 128, 8 of 16384": (sp.fixed(128, 8), 16384),
    "neighbourhood 13x13 of 128x128": (sp.Neighborhood((128, 128), 13), 16384),
    "longformer 512 + 64 of 16384": (sp.longformer(512, global_tokens=64), 16384),
    "causal of 16384": (sp.Causal(), 16384),
}

SMALL = [name for name in sp.registry.names() if sp.registry.example(name) is not None]


def problem(name: str):
    """(pattern, tokens) of a registered name or of a name in :data:`LARGE`."""
    if name in LARGE:
        return LARGE[name]
    pattern, tokens, _ = sp.registry.example(name)
    return pattern, tokens


def fresh_plan(pattern, tokens: int):
    """A new plan, not one from the cache."""
    spattn.clear_plan_cache()
    return spattn.plan(pattern, tokens, batch=max(1, pattern.sizes()[0]))


def arrays(pattern, tokens: int, dtype=np.float32):
    """Random q, k, v with the batch size and heads that the pattern requires."""
    batch, heads = (max(1, size) for size in pattern.sizes())
    shape = batch, heads if heads > 1 else HEADS, tokens, HEAD_DIM
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, dtype=np.float32).astype(dtype) for _ in range(3)]
