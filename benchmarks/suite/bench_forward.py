"""Forward passes, plan cached: what a caller waits for from the second call on."""

import spattn

from .problems import LARGE, SMALL, arrays, problem


def _require(backend):
    if backend not in spattn.available_backends():
        raise NotImplementedError(f"backend {backend} is not available here")


class Forward:
    """Every registered pattern at its example: the cost of a call."""

    params = [SMALL, ("cpu", "cuda")]
    param_names = ["pattern", "backend"]

    def setup(self, name, backend):
        _require(backend)
        self.pattern, tokens = problem(name)
        self.qkv = arrays(self.pattern, tokens)
        self.time_forward(name, backend)

    def time_forward(self, name, backend):
        spattn.attention(*self.qkv, self.pattern, backend=backend)


class ForwardLarge(Forward):
    """The patterns at a length where the kernel is what counts."""

    params = [list(LARGE), ("cpu", "cuda")]
    timeout = 300

    def peakmem_forward(self, name, backend):
        spattn.attention(*self.qkv, self.pattern, backend=backend)
