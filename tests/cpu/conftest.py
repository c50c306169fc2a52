"""What the tests of the forward and of the backward share."""

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
    patterns.Strided(16),
    patterns.Longformer(24, global_tokens=5),
]


@pytest.fixture(params=PATTERNS, ids=repr)
def pattern(request):
    """Dense, causal and four sparse patterns whose tiles differ in kind, in turn."""
    return request.param


@pytest.fixture
def assert_interruptible():
    """``assert_interruptible(call)``: Ctrl-C ends a call of many seconds at its next work item."""
    # A process that a shell started in the background ignores Ctrl-C, and so would Python in it.
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
