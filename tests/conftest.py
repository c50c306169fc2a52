"""Hypothesis profiles and markers: the one place for both.

``SPATTN_HYPOTHESIS_PROFILE=dev|ci|nightly`` (or ``--hypothesis-profile``) chooses how many examples a property test
draws. ``dev`` and ``ci`` are deterministic; ``nightly`` looks for news.
"""

import os

import pytest
from hypothesis import HealthCheck, settings

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("dev", max_examples=20, derandomize=True, **_COMMON)
settings.register_profile("ci", max_examples=200, derandomize=True, **_COMMON)
settings.register_profile("nightly", max_examples=2000, print_blob=True, **_COMMON)
settings.load_profile(os.environ.get("SPATTN_HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU; run with `pytest -m gpu`")


def pytest_collection_modifyitems(config, items):
    """GPU tests run only when asked for by ``-m``, so that a plain run needs no GPU and says what it left out."""
    if "gpu" in (config.getoption("-m") or ""):
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU: pytest -m gpu")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
