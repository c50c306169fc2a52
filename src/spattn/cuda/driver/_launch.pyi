"""Type stubs of _launch.pyx."""

from collections.abc import Callable, Sequence

from ...arrays.operand import Operand
from ...schedule.tensor_maps import MapSpec
from .launch import Kernel, Moving

def current_context(get_current: int) -> int: ...
def is_capturing(is_capturing_at: int, stream: int) -> bool: ...
def address_of(memory: bytearray) -> int: ...
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

class StepParams:
    def __init__(
        self,
        kernel: Kernel,
        image: bytes,
        at: dict[str, int],
        maps: list[tuple[int, int, int]],
        forms: Sequence[tuple[int, int, int, int]],
        spec: MapSpec,
        entry_maps: int,
        encode: int,
        replace: int,
    ) -> None: ...
    def of(
        self,
        k: Operand,
        v: Operand,
        tables: tuple[int, ...],
        tasks: int,
        partial_rows: int,
        q_len: int,
        blocks: int,
    ) -> StepLaunch: ...

class StepLaunch:
    params: bytes
    def launch(
        self, arrays: tuple[int, ...], scale_log2: float, sign: float, score: int, stream: int, early: bool
    ) -> Launch: ...

def start(launches: list[Launch], next_counter: Callable[[], int] | None = None, moved: int = 0) -> None: ...
