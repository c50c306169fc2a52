"""Programs that run in a process of their own, as a user's do."""

from pathlib import Path

import pytest


@pytest.fixture
def program(python):
    """``program(source, **environment) -> its standard output``; it may import ``oracle`` and ``counts``.

    Plans are not checked as tests/conftest.py asks for, which takes memory, and imports modules earlier.
    """
    own = {"SPATTN_CHECK_PLANS": "0", "PYTHONPATH": str(Path(__file__).parent)}
    return lambda source, **environment: python(source, **own | environment)
