"""Time of patterns.discover, and efficiency of the discovered pattern's plan."""

from spattn import patterns as sp

from .problems import fresh_plan

TOKENS = 2048
PATTERNS = {
    "dilated 128 d=4": sp.DilatedWindow(128, dilation=4),
    "strided 64": sp.strided(64),
    "fixed 64, 8": sp.fixed(64, 8),
    "bigbird 64": sp.BigBird(64).at(0, 0),
}


class Discover:
    """Regular patterns as boolean arrays."""

    params = list(PATTERNS)
    param_names = ["pattern"]

    def setup(self, name):
        self.mask = PATTERNS[name].index_set(TOKENS, TOKENS).to_dense()

    def time_discover(self, name):
        sp.discover(self.mask)

    def track_efficiency(self, name):
        return fresh_plan(sp.discover(self.mask), TOKENS).efficiency

    track_efficiency.unit = "nnz / cells of tiles"
