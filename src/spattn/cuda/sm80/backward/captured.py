"""Gradients of the arrays that a score function captures, for calls of every kernel family.

A second pass over the pairs of a plan forms dS, and adds its products with the function's derivatives to exact
accumulators (captured.cuh): the results are bitwise the same every time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ....arrays.operand import Operand
from ....request.call import Call
from ....score.program import Program, is_summed
from ...driver.buffer import clear
from ...driver.launch import Request, kernel
from ...driver.structs import packer
from ...host.backward_pass import BackwardPass
from ...host.score import NO_SUMS, TableSums, generated, table_types
from ..kernels import captured_request, common_request, load_common
from ..params import captured_dtype, pack_accumulated, pack_backward, passes_on_device
from ..variants import Variant, captured_variant

__all__ = ["CapturedGradients"]

_ELEMENT_BYTES = 80  # of an accumulator
_MOST = (64 << 20) // _ELEMENT_BYTES  # accumulators at a time; more elements take several passes


class CapturedGradients:
    """Computes the gradients of the arrays that the score function of a call captures."""

    def __init__(self, call: Call):
        score = call.score
        assert score is not None and score.program is not None
        self.wanted = [number for number, wanted in enumerate(score.wanted) if wanted]
        uses = {use.number for use in score.program.captured if use.name == "look_up"}
        direct = {number: _one_pair_each(score.program, number, call) for number in self.wanted if number in uses}
        self._tables, self._direct = len(score.types), direct
        self.text, _ = generated(score.program, table_types(call), tuple(direct.items()), score.dropout is not None)
        self._pack = packer(captured_dtype(self._tables)).pack
        self._problem = call.dtype, call.precision, call.head_dim, call.head_dim_v
        captured = [use for use in score.program.captured if use.name == "look_up" and use.number in direct]
        self._summed = bool(direct) and all(is_summed(score.program, use) for use in captured)
        # Index of each array's first accumulator; the arrays that need accumulators; the number of all accumulators.
        self._first, self._accumulated, self._total = [0] * self._tables, [], 0
        for number, in_place in direct.items():
            if not in_place:
                self._first[number] = self._total
                self._accumulated.append(number)
                self._total += math.prod(score.types[number].shape)

    def begin(self, call: BackwardPass) -> None:
        """See :class:`~spattn.cuda.host.family.CapturedGradients`."""
        if self.sums().text:
            words = call.allocate(self._total * _ELEMENT_BYTES)
            clear(words, self._total * _ELEMENT_BYTES, call.stream)
            call.table_sums = self.sums(words)

    def sums(self, words: int = 0) -> TableSums:
        """See :class:`~spattn.cuda.host.family.CapturedGradients`."""
        fits = self._summed and self._total <= _MOST // 2
        return TableSums(self.text, words, tuple(self._first)) if fits else NO_SUMS

    def requests(self, call: BackwardPass) -> list[Request]:
        """See :class:`~spattn.cuda.host.family.CapturedGradients`."""
        if not self._direct:
            return []
        common = [common_request(call.device, f"backward/{name}", call.dtype) for name in ("statistics", "captured")]
        return [captured_request(call.device, self._variant(call), self.text, self._tables), *common]

    def enqueue(self, call: BackwardPass, results: Sequence[Operand], nonfinite: int) -> None:
        """Enqueue all kernels; `results` are contiguous gradients of the wanted arrays. The context must be current.

        If the backward has summed the gradients, this pass over the pairs does nothing unless the flag at `nonfinite`
        is set: then a sum may be NaN because of a masked key, which the products of the backward include.
        """
        itemsize = 8 if call.dtype == "float64" else 4
        direct, targets = [0] * self._tables, dict(zip(self.wanted, results, strict=True))
        for number, result in targets.items():
            if self._direct.get(number, True):  # True: an array without a use has a gradient of zero
                direct[number] = result.pointer
                clear(result.pointer, math.prod(result.shape) * itemsize, call.stream)
        if not self._direct:
            return
        launch = self._prepared(call, itemsize, nonfinite)
        sums = load_common(call.device, "backward/captured", call.dtype)
        words = call.allocate(min(self._total, _MOST) * _ELEMENT_BYTES) if self._total else 0
        for begin in range(0, max(self._total, 1), _MOST):
            count = min(self._total - begin, _MOST)
            clear(words, count * _ELEMENT_BYTES, call.stream)
            launch(self._pack(words, begin, count, *self._first, *direct))
            for number in self._accumulated:
                start, size = self._first[number], math.prod(targets[number].shape)
                low, high = max(start, begin), min(start + size, begin + count)
                if low < high:
                    at = (low - begin) * _ELEMENT_BYTES
                    summed = call.table_sums.words if nonfinite else words
                    target = targets[number].pointer + (low - start) * itemsize
                    given = pack_accumulated(summed + at, words + at, nonfinite, target, high - low)
                    sums.launch(-(-(high - low) // sums.threads), given, call.stream)

    def _variant(self, call: BackwardPass) -> Variant:
        return captured_variant(*self._problem, call.aligned(), self._tables, call.device.shared_bytes)

    def _prepared(self, call: BackwardPass, itemsize: int, gate: int) -> Callable[[bytes], None]:
        """Enqueue the statistics; return a function that enqueues a pass with given ``Captured``. Kernels do nothing if
        the flag at address `gate` is 0."""
        batch, heads_q, q_len, _ = call.q.shape
        own, _ = passes_on_device(call.plan, call.device, batch, heads_q, call.k.shape[1])
        params = pack_backward(
            call, own, call.allocate(2 * batch * heads_q * q_len * itemsize), (call.dq, 0), None, gate
        )
        statistics = load_common(call.device, "backward/statistics", call.dtype)
        statistics.launch(-(-batch * heads_q * q_len // (statistics.threads // 32)), params, call.stream)
        chosen = self._variant(call)
        ready = kernel(call.device, captured_request(call.device, chosen, self.text, self._tables))
        blocks = own.tasks * own.subtiles * -(-own.subtile_rows // chosen.rows)

        def launch(captured: bytes) -> None:
            if blocks:
                ready.launch(blocks, params + captured, call.stream)

        return launch


def _one_pair_each(program: Program, number: int, call: Call) -> bool:
    """True if at most one pair reads each element of an array: its indices are the query, the key and, if there are
    several, the batch entry and the query head."""
    uses = [use for use in program.captured if (use.name, use.number) == ("look_up", number)]
    if len(uses) != 1:
        return False
    operations, found = program.graph.operations, set()
    for index in uses[0].indices:
        name, operands, *_ = operations[index]
        if name == "sub" and [operations[x].name for x in operands] == ["q", "offset"]:
            found.add("q")
        elif name != "q" or call.q_offset >= 0:  # negative positions count from the end
            found.add(name)
    sizes = {"q": 2, "k": 2, "b": call.batch, "h": call.heads_q}
    return all(size == 1 or name in found for name, size in sizes.items())
