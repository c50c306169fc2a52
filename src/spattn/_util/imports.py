"""Fork-safe imports at first use.

A child that is forked while another thread of its parent imports a module would wait for that import forever.
``os.fork`` therefore waits until no thread is inside ``with whole_imports:``. An import that fails for lack of memory
raises MemoryError, as any other allocation does.
"""

from __future__ import annotations

import os
import threading

__all__ = ["whole_imports"]

_ENOMEM = 12  # the value of ENOMEM on every POSIX system; importing errno would take time
_NO_MEMORY = "Cannot allocate memory", "failed to map segment", "cannot map zero-fill pages"  # dynamic linker messages


class _WholeImports:
    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        self.release()
        if _is_out_of_memory(error):
            raise MemoryError(f"not enough memory to import a module: {error}") from error


def _is_out_of_memory(error: BaseException | None) -> bool:
    if isinstance(error, OSError):
        return error.errno == _ENOMEM
    return isinstance(error, ImportError) and any(text in str(error) for text in _NO_MEMORY)


whole_imports = _WholeImports()
os.register_at_fork(
    before=whole_imports.acquire, after_in_parent=whole_imports.release, after_in_child=whole_imports.release
)
