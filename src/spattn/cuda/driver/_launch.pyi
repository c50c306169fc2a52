"""Type stubs of _launch.pyx."""

from collections.abc import Callable

from ...arrays.operand import Operand
from ...schedule.tensor_maps import MapSpec
from .launch import Kernel, Moving

def current_context(get_current: int) -> int: ...
def is_capturing(is_capturing_at: int, stream: int) -> bool: ...
def copy_to_device(copy: int, pointer: int, host: int, nbytes: int, stream: int) -> None: ...
def encode_map(
    encode: int,
    image: bytearray,
    at: int,
    form: tuple[int, int, int, int],
    operand: Operand,
    spec: MapSpec,
    batch: int | None = None,
) -> int: ...
def replace_address(replace: int, image: bytearray, at: int, address: int) -> None: ...

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
