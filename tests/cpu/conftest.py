"""What the tests of the forward and of the backward share."""

from __future__ import annotations

import pytest

from spattn import patterns

PATTERNS = [
    patterns.Full(),
    patterns.Causal(),
    patterns.SlidingWindow(20, 20),
    patterns.DilatedWindow(12, 12, 3),
    patterns.Strided(16),
    patterns.Longformer(24, global_tokens=5),
]


@pytest.fixture(params=PATTERNS, ids=repr)
def pattern(request):
    """Dense, causal and four sparse patterns whose tiles differ in kind, in turn."""
    return request.param
