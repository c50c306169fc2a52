"""Forward passes with a cached plan."""

import spattn

from .problems import LARGE, SMALL, arrays, problem


def _require(backend):
    if backend not in spattn.available_backends():
        raise NotImplementedError(f"backend {backend} is not available")


class Forward:
    """Every registered pattern at its example, where call overhead dominates."""

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
    """Long sequences, where the kernel dominates."""

    params = [list(LARGE), ("cpu", "cuda")]
    timeout = 300

    def peakmem_forward(self, name, backend):
        spattn.attention(*self.qkv, self.pattern, backend=backend)
