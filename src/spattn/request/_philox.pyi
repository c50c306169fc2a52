"""Type stubs of the random number generator, documented in _philox.pyx."""

import numpy as np

def philox(seed: int, first: int, stream: int, out: np.ndarray) -> None: ...
