"""Type stubs of _launch.pyx."""

from collections.abc import Callable

from .launch import Kernel, Moving

def current_context(get_current: int) -> int: ...
def is_capturing(is_capturing_at: int, stream: int) -> bool: ...

class Nothing:
    def __enter__(self) -> Nothing: ...
    def __exit__(self, kind: object, raised: object, trace: object) -> None: ...

class Launch:
    def __init__(
        self,
        kernel: Kernel,
        blocks: int,
        params: bytes,
        stream: int,
        counter_at: int | None = None,
        moving: Moving | None = None,
        early: bool = False,
    ) -> None: ...

def start(launches: list[Launch], next_counter: Callable[[], int] | None = None, moved: int = 0) -> None: ...
