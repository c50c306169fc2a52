"""Patterns of traced mask functions of FlexAttention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..._util.making import shared
from ..base.check import integer
from ..base.content import ByContent
from ..base.pattern import Pattern
from .traced_parts import compares_labels, composed
from .traced_rows import SIDES

if TYPE_CHECKING:
    from ...trace.trace import Trace

__all__ = ["BATCH", "HEAD", "MaskMod"]

BATCH, HEAD = 0, 1  # arguments of a mask_mod, before those of SIDES


@dataclass(frozen=True, eq=False, repr=False)
class MaskMod(ByContent, Pattern):
    """A traced mask_mod over query rows; `batch` and `heads` are its :meth:`sizes`."""

    trace: Trace
    batch: int
    heads: int

    def sizes(self) -> tuple[int, int]:
        return self.batch, self.heads

    def at(self, batch: int, head: int) -> Pattern:
        one = self.trace
        for argument, number, of in ((BATCH, batch, self.batch), (HEAD, head, self.heads)):
            name = "batch" if argument == BATCH else "head"
            one = one.fix(argument, integer(name, number, 0, of - 1 if of else None) if of != 1 else 0)
        return self if one is self.trace else replace(self, trace=one, batch=1, heads=1)

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        if not self.trace.used <= SIDES:
            raise ValueError("mask_mod: it depends on the batch entry or head; use .at(batch, head)")
        return shared((self, q_len, kv_len), lambda: composed(self.trace, q_len, kv_len))

    def allows(self, q: Any, k: Any) -> Any:
        raise ValueError("mask_mod: its rows depend on the lengths; use .bind(q_len, kv_len)")

    @property
    def _has_order(self) -> bool:  # type: ignore[override]  # per instance
        return compares_labels(self.trace)

    def __repr__(self) -> str:
        return f"<{self.trace.name}>"

    def _description(self) -> dict[str, Any]:
        raise TypeError("to_json(): expected a pattern of parameters, got a mask_mod, which is a function")
