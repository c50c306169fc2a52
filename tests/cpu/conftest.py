"""Fixtures of the CPU tests."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from spattn import patterns

PATTERNS = [
    patterns.Full(),
    patterns.Causal(),
    patterns.SlidingWindow(20, 20),
    patterns.DilatedWindow(12, 12, 3),
    patterns.strided(16),
    patterns.longformer(24, global_tokens=5),
]


@pytest.fixture(params=PATTERNS, ids=repr)
def pattern(request):
    """Each of `PATTERNS`: dense, causal, and four sparse patterns with different mixes of full and partial tiles."""
    return request.param


@pytest.fixture
def assert_interruptible():
    """``assert_interruptible(call)``: Ctrl-C stops a call of many seconds at the next work item."""
    # A shell makes its background processes ignore SIGINT, and Python then installs no handler.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def check(call):
        sent = []

        def interrupt():
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        timer = threading.Timer(0.3, interrupt)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            call()
        assert time.monotonic() - sent[0] < 10
        timer.join()

    yield check
    signal.signal(signal.SIGINT, before)
