"""Grouped attention: several problems in one kernel launch if the backend supports it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ..arrays import autocast, cache_key, compiling, namespace_of, recorder
from ..backends import GroupingBackend, PreparedGroup
from ..dispatch import CONSTANT, backend_for, find_plan, resolve
from ..patterns import Pattern
from ..planning import Plan
from ..planning.contract.cache import find_call, keep_call
from ..request.call import Call, check_options, check_scale, default_scale
from .attention import attention, attention_backward, modifiers

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
    score: Callable[..., Any] | None = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
) -> list[Any]:
    r"""Compute softmax attention for several problems of different lengths, batch sizes, heads and patterns.

    Parameters
    ----------
    problems : sequence of (q, k, v, pattern)
        Arguments of :func:`attention` for each problem: q (batch, heads_q, q_len, head_dim), k (batch, heads_kv,
        kv_len, head_dim), v (batch, heads_kv, kv_len, head_dim_v), and a pattern, its registered name, a plan or a bool
        array. Problems may differ in shapes, dtypes, devices and array libraries.
    scale : float, optional
        Factor of the scores in all problems; by default ``1 / sqrt(head_dim)`` of each problem.
    backend : {"auto", "cpu", "cuda", "reference"}, optional
        As for :func:`attention`. "auto" selects the backend of each problem by its device.
    return_lse : bool, optional
        Also return the log-sum-exp of each row's scores.
    precision : {None, "tf32"}, optional
        As for :func:`attention`.
    layout : {"bhsd", "bshd", "thd"}, optional
        As for :func:`attention`; the same for all problems.
    score, sinks, dropout_p, seed : optional
        As for :func:`attention`; the same for all problems. Each problem drops the pairs of a call of its own.

    Returns
    -------
    list
        The result of ``attention(q, k, v, pattern)`` for each problem, in order: out, or (out, lse) with `return_lse`.

    Raises
    ------
    TypeError
        If `problems` is not a sequence of 4-tuples; as :func:`attention`.
    ValueError, RuntimeError, BackendUnavailableError
        As :func:`attention`. The message starts with the problem's index: ``problems[3]: k: expected …``.

    Warns
    -----
    EfficiencyWarning
        As :func:`attention`.

    Notes
    -----
    The Hopper kernels (compute capability 9.0) compute up to 32 problems per launch, limited by the size of the kernel
    parameters. They group PyTorch tensors of one device, one dtype (float16 or bfloat16) and one class of head
    dimensions (up to 64, up to 128, up to 256). All work items of a group share one queue, longest first, so that the
    tail of one problem overlaps with the others. Patterns are planned for the group: the planner selects the tile
    shapes that minimize the total time, and splits a long key list only if it would otherwise determine the total time.
    One kernel runs for each tile shape, all concurrently. A given plan is executed as is, and its result is bitwise
    equal to that of :func:`attention` with the same plan. Each problem with split-KV rows needs one more launch to
    combine them.

    All other problems run one after another through :func:`attention`: problems with a score function, sinks or
    dropout, on the CPU or on other GPUs, with other dtypes or array libraries, with arrays that are not aligned to 16
    bytes, with tensor subclasses, with a bool array as the pattern (a plan or a :class:`~spattn.patterns.Mask` of the
    array can be grouped), and problems in a traced PyTorch graph. The logger ``spattn.cuda`` reports at level DEBUG, on
    the first such call only, which tensors the kernels do not group, and why.

    PyTorch autograd differentiates each result separately, one problem after another, through
    :func:`attention_backward`.

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
    modified = modifiers(score, sinks, dropout_p, seed)
    if compiling():  # one operator per call in the graph
        return [attention(q, k, v, pattern, return_lse=return_lse, **options, **modified) for q, k, v, pattern in given]
    given = [(*(autocast(q, k, v) or (q, k, v)), _read(pattern, n)) for n, (q, k, v, pattern) in enumerate(given)]
    check_options(backend, return_lse, precision, layout)
    options["scale"] = scale = None if scale is None else check_scale(scale, "float64")
    results: list[Any] = [None] * len(given)
    groups = [] if len(given) < 2 or modified else _find(given, backend, precision, return_lse, layout)
    for group in groups:
        for number, found in zip(group.numbers, group.run(given, scale), strict=True):
            results[number] = found if return_lse or found is None else found[0]
    for number, (q, k, v, pattern) in enumerate(given):
        if results[number] is None:
            with _named(number):
                results[number] = attention(q, k, v, pattern, return_lse=return_lse, **options, **modified)
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


def _read(pattern: Any, number: int) -> Any:
    """Convert a text or a class; attention() converts what depends on the arrays."""
    if not isinstance(pattern, (str, type)):
        return pattern
    with _named(number):
        return resolve(pattern)


@contextlib.contextmanager
def _named(number: int) -> Iterator[None]:
    """Prefix the messages of errors with the problem's index."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        if error.args and isinstance(error.args[0], str):
            error.args = f"problems[{number}]: {error.args[0]}", *error.args[1:]
        raise


def _in_device_memory(x: Any) -> bool:
    library = namespace_of(x)
    return library is not None and library.ordinal(x) is not None


class _Group(NamedTuple):
    """The cached dispatch of problems that run in one group."""

    numbers: list[int]
    prepared: PreparedGroup
    scales: list[float]
    dtype: str
    layouts: list[Layout | None]  # None for the default layout
    records: list[Callable[..., Any] | None]  # None for problems without autograd

    def run(self, given: Sequence[_Problem], scale: float | None) -> list[Any]:
        """Return (out, lse) for each problem, or None if the problem must run separately."""
        operands: list[Any] = [given[number][:3] for number in self.numbers]
        for index, layout in enumerate(self.layouts):
            if layout is not None:
                operands[index] = tuple([layout.view(x) for x in operands[index]])
        scales = self.scales
        if scale is not None:
            with _named(self.numbers[0]):
                scales = [check_scale(scale, self.dtype)] * len(operands)
        results: list[Any] = self.prepared(operands, scales)
        for index, (layout, record) in enumerate(zip(self.layouts, self.records, strict=True)):
            found = results[index]
            if found is not None and layout is not None:
                found = results[index] = tuple([layout.back(x) for x in found])
            if found is not None and record is not None:
                # Autograd runs the forward callable itself: give it one that returns the computed result.
                results[index] = record(_returning(found), *given[self.numbers[index]][:3], scales[index])
        return results


def _returning(found: tuple[Any, Any]) -> Callable[..., tuple[Any, Any]]:
    return lambda *operands: found


def _find(given: list[_Problem], backend: str, precision: str | None, return_lse: bool, layout: str) -> list[_Group]:
    """Find groups among the problems; the result is cached with the plan of the first candidate."""
    signatures, patterns = {}, []
    for number, (q, k, v, pattern) in enumerate(given):
        own = cache_key(q, k, v) if isinstance(pattern, CONSTANT) else None
        if own is not None and _in_device_memory(q):
            signatures[number] = own
            patterns.append(pattern)
    if len(signatures) < 2:
        return []
    numbers = tuple(signatures)
    key = "group", numbers, *signatures.values(), *patterns, backend, precision, return_lse, layout
    found: list[_Group] | None = find_call(given[numbers[0]][3], key)
    if found is None:
        found, plans = _prepare(given, numbers, backend, precision, return_lse, layout)
        if numbers[0] in plans:
            keep_call(given[numbers[0]][3], key, plans[numbers[0]], found)
    return found


class _Candidate(NamedTuple):
    """A candidate problem for a group, with its plan for a separate call."""

    call: Call
    plan: Plan
    record: Callable[..., Any] | None

    def kept(self, problem: _Problem) -> bool:
        """Return whether the group must use this plan: the caller gave it, or it permutes tokens and is fastest."""
        return self.plan is problem[3] or self.plan.ordered


def _prepare(
    given: list[_Problem],
    numbers: Iterable[int],
    backend: str,
    precision: str | None,
    return_lse: bool,
    layout: str,
) -> tuple[list[_Group], dict[int, Plan]]:
    """Return the groups among the numbered problems, and the plan of each problem for a separate call."""
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
                backward = functools.partial(
                    attention_backward, pattern=pattern, backend=backend, precision=precision, layout=layout
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
    """Prepare a group of problems with the given plans."""
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
