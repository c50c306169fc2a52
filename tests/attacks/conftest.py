"""Programs that run in their own process, as a user's program does."""

from pathlib import Path

import pytest


@pytest.fixture
def program(python):
    """``program(source, **environment) -> stdout``; the source may import ``oracle`` and ``counts``.

    Plans are not validated, unlike in other tests: validation takes memory and imports modules early.
    """
    own = {"SPATTN_CHECK_PLANS": "0", "PYTHONPATH": str(Path(__file__).parent)}
    return lambda source, **environment: python(source, **own | environment)
