"""Attention of several problems as one grouped launch, where a backend has them; one after another elsewhere."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ..arrays import autocast, cache_key, compiling, namespace_of, recorder
from ..backends import GroupingBackend, PreparedGroup
from ..dispatch import CONSTANT, as_pattern, backend_for, find_plan
from ..patterns import Pattern
from ..patterns.base.registry import pattern_class
from ..planning import Plan
from ..planning.contract.cache import find_call, keep_call
from ..request.call import Call, check_options, check_scale, default_scale
from .attention import attention, attention_backward

if TYPE_CHECKING:
    from ..request.layout import Layout

_Problem = tuple[Any, Any, Any, Any]


def grouped_attention(
    problems: Iterable[tuple[Any, Any, Any, Pattern | Plan | str | Any]],
    *,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    precision: str | None = None,
    layout: str = "bhsd",
) -> list[Any]:
    r"""Attention of several problems, each with its own lengths, batch, heads and pattern, at once.

    Parameters
    ----------
    problems : sequence of (q, k, v, pattern)
        The problems. What each of the four may be, and their shapes, is as for :func:`attention`: q
        (batch, heads_q, q_len, head_dim), k (batch, heads_kv, kv_len, head_dim), v (batch, heads_kv, kv_len,
        head_dim_v), and a pattern, its registered name, a plan or a bool array. No two problems need to agree in any
        of it.
    scale : float, optional
        Factor of the logits of all problems; default ``1 / sqrt(head_dim)`` of each.
    backend : {"auto", "cpu", "cuda", "reference"}, optional
        As for :func:`attention`. "auto" goes where the arrays of each problem are.
    return_lse : bool, optional
        Also return the log-sum-exp of each row's logits.
    precision : {None, "tf32"}, optional
        As for :func:`attention`.
    layout : {"bhsd", "bshd", "thd"}, optional
        As for :func:`attention`, of all problems.

    Returns
    -------
    list
        For each problem, in their order, what ``attention(q, k, v, pattern)`` returns: out, or (out, lse) with
        `return_lse`.

    Raises
    ------
    TypeError
        If `problems` is no sequence of tuples of four; as :func:`attention`.
    ValueError, RuntimeError, BackendUnavailableError
        As :func:`attention`. What is wrong with one problem is said with its number: ``problems[3]: k: expected …``.

    Warns
    -----
    EfficiencyWarning
        As :func:`attention`.

    Notes
    -----
    The Hopper kernels (compute capability 9.0) compute up to 32 problems at a time, as many as their parameters have
    room for: PyTorch tensors of float16 or bfloat16 on one device, of one dtype and class of head dimensions (up to 64,
    up to 128, up to 256). All their work items are in one queue, the longest first, so that no problem waits for the
    last block of another. A pattern is planned for the group: in the tiles that take the least time in all, each shape
    of which is a launch, side by side with the others; long lists of keys are split only where all others would wait
    for them. Where a plan is given it is executed as it is, and the results have the bits that :func:`attention` gives
    with that plan. Rows that are put together of several items take a launch more for each problem that has such.

    All other problems run one after another, as :func:`attention` runs them: on the CPU, on other GPUs, of other types
    and libraries, of arrays that do not start on 16 bytes, of subclasses of tensors, with a bool array as the pattern
    (a plan, or a :class:`~spattn.patterns.Mask` of the array, may be in a group), and where PyTorch makes a graph of
    the call. The logger ``spattn.cuda`` says on level DEBUG which tensors its kernels leave to calls by themselves, and
    why; repeats of a call say nothing.

    PyTorch records the gradients of every result by itself: the backward of a problem is
    :func:`attention_backward`, and problems are differentiated one after another.

    Examples
    --------
    >>> import numpy as np, spattn
    >>> from spattn.patterns import Causal, SlidingWindow
    >>> rng = np.random.default_rng(0)
    >>> long, short = (rng.standard_normal((3, 1, heads, n, 16), dtype=np.float32) for heads, n in ((2, 300), (4, 50)))
    >>> results = spattn.grouped_attention([(*long, SlidingWindow(8)), (*short, Causal())])
    >>> [out.shape for out in results]
    [(1, 2, 300, 16), (1, 4, 50, 16)]
    """
    given = _checked(problems)
    options: dict[str, Any] = {"scale": scale, "backend": backend, "precision": precision, "layout": layout}
    if compiling():  # each call is an operator of its own
        return [attention(q, k, v, pattern, return_lse=return_lse, **options) for q, k, v, pattern in given]
    given = [(*(autocast(q, k, v) or (q, k, v)), pattern) for q, k, v, pattern in given]
    check_options(backend, return_lse, precision, layout)
    options["scale"] = scale = None if scale is None else check_scale(scale, "float64")
    results: list[Any] = [None] * len(given)
    for group in _find(given, backend, precision, return_lse, layout) if len(given) > 1 else []:
        for number, found in zip(group.numbers, group.run(given, scale), strict=True):
            results[number] = found if return_lse or found is None else found[0]
    for number, (q, k, v, pattern) in enumerate(given):
        if results[number] is None:
            with _named(number):
                results[number] = attention(q, k, v, pattern, return_lse=return_lse, **options)
    return results


def _checked(problems: Any) -> list[_Problem]:
    if not isinstance(problems, Iterable):
        raise TypeError(f"problems: expected a sequence of (q, k, v, pattern), got {type(problems).__name__}")
    given = list(problems)
    for number, problem in enumerate(given):
        if not isinstance(problem, (tuple, list)) or len(problem) != 4:
            what = f"{len(problem)} items" if isinstance(problem, (tuple, list)) else type(problem).__name__
            raise TypeError(f"problems[{number}]: expected (q, k, v, pattern), got {what}")
    return given


@contextlib.contextmanager
def _named(number: int) -> Iterator[None]:
    """Errors say which problem they are about."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        if error.args and isinstance(error.args[0], str):
            error.args = f"problems[{number}]: {error.args[0]}", *error.args[1:]
        raise


def _in_device_memory(x: Any) -> bool:
    kind = namespace_of(x)
    return kind is not None and kind.ordinal(x) is not None


class _Group(NamedTuple):
    """Problems that run together: their numbers, and what else is the same in all calls like this one."""

    numbers: list[int]
    prepared: PreparedGroup
    scales: list[float]
    dtype: str
    layouts: list[Layout | None]  # of those that have other axes than the default's
    records: list[Callable[..., Any] | None]  # of those whose gradients PyTorch records

    def run(self, given: Sequence[_Problem], scale: float | None) -> list[Any]:
        """(out, lse) of each; None for one that must be made by itself."""
        operands: list[Any] = [given[number][:3] for number in self.numbers]
        for place, layout in enumerate(self.layouts):
            if layout is not None:
                operands[place] = tuple([layout.view(x) for x in operands[place]])
        scales = self.scales
        if scale is not None:
            with _named(self.numbers[0]):
                scales = [check_scale(scale, self.dtype)] * len(operands)
        results: list[Any] = self.prepared(operands, scales)
        for place, (layout, record) in enumerate(zip(self.layouts, self.records, strict=True)):
            found = results[place]
            if found is not None and layout is not None:
                found = results[place] = tuple([layout.back(x) for x in found])
            if found is not None and record is not None:
                # What is already computed is put on record as if it were computed there.
                results[place] = record(_returning(found), *given[self.numbers[place]][:3], scales[place])
        return results


def _returning(found: tuple[Any, Any]) -> Callable[..., tuple[Any, Any]]:
    return lambda *operands: found


def _find(given: list[_Problem], backend: str, precision: str | None, return_lse: bool, layout: str) -> list[_Group]:
    """The groups among the problems, kept with the plan of the first one that may be in one."""
    signatures, named = {}, []
    for number, (q, k, v, pattern) in enumerate(given):
        own = cache_key(q, k, v) if isinstance(pattern, CONSTANT) else None
        if own is not None and _in_device_memory(q):
            signatures[number] = own
            if isinstance(pattern, str):  # which stands for the class that has it now
                with _named(number):
                    pattern = pattern_class(pattern)
            named.append(pattern)
    if len(signatures) < 2:
        return []
    numbers = tuple(signatures)
    key = "group", numbers, *signatures.values(), *named, backend, precision, return_lse, layout
    found: list[_Group] | None = find_call(given[numbers[0]][3], key)
    if found is None:
        found, plans = _prepare(given, numbers, backend, precision, return_lse, layout)
        if numbers[0] in plans:
            keep_call(given[numbers[0]][3], key, plans[numbers[0]], found)
    return found


class _Candidate(NamedTuple):
    """A problem that may be in a group, with the plan that it would have by itself."""

    call: Call
    plan: Plan
    record: Callable[..., Any] | None

    def kept(self, problem: _Problem) -> bool:
        """Whether it has this plan in a group, too: one that is given, and one that looks places up, beside which any
        other would take longer."""
        return self.plan is problem[3] or self.plan.ordered


def _prepare(
    given: list[_Problem],
    numbers: Iterable[int],
    backend: str,
    precision: str | None,
    return_lse: bool,
    layout: str,
) -> tuple[list[_Group], dict[int, Plan]]:
    """The groups among problems of these numbers, and the plans that they would have by themselves."""
    candidates: dict[GroupingBackend, dict[int, _Candidate]] = {}
    for number in numbers:
        q, k, v, pattern = given[number]
        with _named(number):
            record = recorder(q, k, v)
            wants_lse = return_lse or record is not None
            call = Call.of(q, k, v, precision=precision, return_lse=wants_lse, layout=layout)
            module = backend_for(call, backend)
            if not module.LIMITS.groups:
                continue
            if record is not None:
                constant = pattern if isinstance(pattern, Plan) else as_pattern(pattern, call.sizes)
                backward = functools.partial(
                    attention_backward, pattern=constant, backend=backend, precision=precision, layout=layout
                )
                record = functools.partial(record, backward)
            own = candidates.setdefault(cast(GroupingBackend, module), {})
            own[number] = _Candidate(call, find_plan(module, pattern, call), record)
    groups = [
        _group(module, own, plans)
        for module, own in candidates.items()
        for plans in module.together({n: (one.call, one.plan, one.kept(given[n])) for n, one in own.items()})
    ]
    return groups, {number: one.plan for own in candidates.values() for number, one in own.items()}


def _group(module: GroupingBackend, candidates: Mapping[int, _Candidate], plans: Mapping[int, Plan]) -> _Group:
    """Problems that run together, with their plans."""
    members = [candidates[number] for number in plans]
    calls = [one.call for one in members]
    return _Group(
        list(plans),
        module.prepare_group({number: (candidates[number].call, plan) for number, plan in plans.items()}),
        [default_scale(call.head_dim) for call in calls],
        calls[0].dtype,
        [None if call.layout.is_default else call.layout for call in calls],
        [one.record for one in members],
    )
