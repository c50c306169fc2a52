"""Planning: time, plan size and efficiency."""

from .problems import LARGE, SMALL, fresh_plan, problem


class Plan:
    """Every registered pattern at its example, and the long sequences."""

    params = [*SMALL, *LARGE]
    param_names = ["pattern"]

    def setup(self, name):
        self.pattern, self.tokens = problem(name)

    def time_plan(self, name):
        fresh_plan(self.pattern, self.tokens)

    def track_efficiency(self, name):
        return fresh_plan(self.pattern, self.tokens).efficiency

    track_efficiency.unit = "nnz / cells of tiles"

    def track_plan_bytes(self, name):
        return fresh_plan(self.pattern, self.tokens).nbytes

    track_plan_bytes.unit = "bytes"


class PeakMemory:
    """Peak resident memory of a process that plans."""

    params = list(LARGE)
    param_names = ["pattern"]

    def setup(self, name):
        self.pattern, self.tokens = problem(name)

    def peakmem_plan(self, name):
        fresh_plan(self.pattern, self.tokens)
