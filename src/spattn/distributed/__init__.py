"""Context parallelism: attention over a sequence whose rows are on several ranks, with the same bits as on one."""

from ..schedule.shard import Sharding
from ._attention import attention
from ._parallel_style import ContextParallel
from ._simulation import Simulation, shard, simulate

__all__ = ["ContextParallel", "Sharding", "Simulation", "attention", "shard", "simulate"]
