"""Imports at first use, which no fork cuts in two.

A child that is forked while another thread of its parent imports a module waits for that import for ever: nobody goes
on with it there. So ``os.fork`` waits until nobody is within ``with whole_imports:``.
"""

from __future__ import annotations

import os
import threading

__all__ = ["whole_imports"]

whole_imports = threading.RLock()
os.register_at_fork(
    before=whole_imports.acquire, after_in_parent=whole_imports.release, after_in_child=whole_imports.release
)
