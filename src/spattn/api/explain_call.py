"""Explain a call: backend, kernels, plan, predicted and measured time, and what would be faster."""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np

from .. import cpu
from .._util import limits as _limits
from ..arrays import autocast
from ..backends import Backend, Execution, PredictingBackend
from ..dispatch import backend_for, find_plan, may_lose, name_for, resolve
from ..patterns import CSR, Mask, Pattern, discover
from ..patterns.base.walk import leaves
from ..planning import Plan, plan_cache_info
from ..request.call import Call, check_options
from .attention import attention, attention_backward

__all__ = ["CallExplanation", "explain_call"]

_SECONDS = 0.25  # of one measurement; a call has one for itself and one for each piece of advice
_MOST_RUNS = 40
_AT_ONCE = 10  # calls per measurement on a GPU, so that launches overlap with kernels as they do in a program
_GAIN = 1.2  # advice must have been measured to be faster by this factor
_SHARE = 0.5  # share of the measured time from which on reading arrays or host work counts as the bound
_MOST_DISCOVERED = 1 << 20  # maximum number of allowed pairs to search for regular patterns
_LOW_EFFICIENCY = 0.5  # a mask or list of pairs is searched for regular patterns below this efficiency


@dataclass(frozen=True, eq=False)
class CallExplanation:
    """Result of :func:`spattn.explain` for a call; ``print()`` shows it as text.

    Parameters
    ----------
    problem : str
        Pattern, lengths, heads, dtype and array library.
    backend, backend_reason : str
        Name of the backend, and why it was chosen.
    execution : Execution
        `kernels`, `arithmetic`, `workers` and `workers_reason` of the backend.
    plan : Plan
        The plan that the call executes.
    plan_source : {"given", "cached", "made"}
        Where the plan came from.
    planning_ms : float
        Time to make the plan, or to find it in the cache.
    replanned : bool
        Whether every further call with these arguments makes the plan again.
    pattern_ms : float
        Time that each call spends on its `pattern` argument: conversion, hash and comparison with the cached pattern.
    predicted_ms : float or None
        Predicted time of the forward pass on one thread of the benchmark machine; None where the cost model does not
        apply.
    measured_ms : float
        Median time of a forward pass.
    runs : int
        Number of timed forward passes.
    first_ms : float
        Time of the first call, after planning; it includes the compilation of kernels on a GPU.
    host_ms : float
        Part of `measured_ms` that does not depend on the sizes: the time of a call with one query and one key, plus
        `pattern_ms`.
    memory_ms : float
        Time to read q, k and v and to write out once, at the measured speed of a copy.
    bound_by : {"compute", "memory", "planning", "host overhead"}
        The largest part of `measured_ms`.
    advice : tuple of str
        Changes that make the call faster, each with its measured time.
    backward_ms : float or None
        Median time of :func:`spattn.attention_backward`, if requested.
    backward_plan : Plan or None
        Its plan.
    """

    problem: str
    backend: str
    backend_reason: str
    execution: Execution
    plan: Plan
    plan_source: str
    planning_ms: float
    replanned: bool
    pattern_ms: float
    predicted_ms: float | None
    measured_ms: float
    runs: int
    first_ms: float
    host_ms: float
    memory_ms: float
    bound_by: str
    advice: tuple[str, ...]
    backward_ms: float | None = None
    backward_plan: Plan | None = field(default=None, repr=False)

    def __str__(self) -> str:
        execution = self.execution
        predicted = "" if self.predicted_ms is None else f"{self.predicted_ms:.3g} ms on one thread of the cost model"
        lines = [
            self.problem,
            f"backend: {self.backend}, {self.backend_reason}",
            f"kernels: {execution.kernels}; {execution.arithmetic}",
            f"workers: {execution.workers} {execution.workers_reason}",
            f"plan: {self._origin()}",
            _tiles("tiles", self.plan),
            f"predicted: {predicted or 'not covered by the cost model'}",
            f"measured: {self.measured_ms:.3g} ms, median of {self.runs}; the first call took {self.first_ms:.3g} ms",
            f"bound by: {self.bound_by} (reading q, k, v and writing out takes {self.memory_ms:.2g} ms, host work "
            f"{self.host_ms:.2g} ms)",
        ]
        if self.backward_plan is not None:
            lines.append(f"backward: {self.backward_ms:.3g} ms")
            lines.append(_tiles("backward tiles", self.backward_plan))
        return "\n".join([*lines, *(f"advice: {line}" for line in self.advice)])

    def _origin(self) -> str:
        took = f"in {self.planning_ms:.3g} ms"
        if self.replanned:
            return f"made {took}, again at each call"
        return {"given": "given", "cached": f"found in the plan cache {took}", "made": f"made {took}, now cached"}[
            self.plan_source
        ]


def explain_call(
    q: Any,
    k: Any,
    v: Any,
    pattern: Any = "full",
    *,
    scale: float | None = None,
    backend: str = "auto",
    precision: str | None = None,
    layout: str = "bhsd",
    score: Callable[..., Any] | None = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    key_padding: Any = None,
    backward: bool = False,
) -> CallExplanation:
    """Implement :func:`spattn.explain` for arrays."""
    check_options(backend, precision=precision, layout=layout)
    q, k, v = (x.detach() if hasattr(x, "detach") else x for x in autocast(q, k, v) or (q, k, v))
    call = Call.of(q, k, v, scale=scale, precision=precision, layout=layout)
    module, name = backend_for(call, backend), name_for(call, backend)
    (plan, planning_ms), made = _planned(module, pattern, call, key_padding)
    options: dict[str, Any] = {
        "scale": scale,
        "backend": backend,
        "precision": precision,
        "layout": layout,
        "score": score,
        "sinks": sinks,
        "dropout_p": dropout_p,
        "seed": seed,
        "key_padding": key_padding,
    }
    timed = _Timed(q, k, v, pattern, options, call)
    first_ms = _once(timed.run, timed.finish)
    misses = plan_cache_info().misses
    timed.run()
    replanned = plan_cache_info().misses > misses
    measured, smallest = timed.alternate([timed.run, timed.smallest()])
    measured_ms, pattern_ms = statistics.median(measured), _pattern_ms(pattern, plan, call, key_padding)
    host_ms = min(measured_ms, statistics.median(smallest) + pattern_ms)
    execution = module.execution(call, plan)
    memory_ms = _memory_ms(call, execution.workers if name == "cpu" else 1)
    own = _Case(call, name, plan, timed, measured_ms, pattern, pattern_ms, planning_ms, replanned, made, execution)
    found = _backward(module, pattern, call, timed) if backward else (None, None)
    return CallExplanation(
        _problem(plan, call, layout),
        name,
        _reason(call, backend),
        execution,
        plan,
        "given" if plan is pattern else "made" if made else "cached",
        planning_ms,
        replanned,
        pattern_ms,
        _predicted_ms(module, plan, call) if score is None and not dropout_p else None,
        measured_ms,
        len(measured),
        first_ms,
        host_ms,
        memory_ms,
        _bound(measured_ms, host_ms, pattern_ms, memory_ms, replanned),
        tuple(_advice(own)),
        *found,
    )


class _Timed:
    """The calls to measure."""

    def __init__(self, q: Any, k: Any, v: Any, pattern: Any, options: dict[str, Any], call: Call) -> None:
        self.arrays, self.options, self.call = (q, k, v), options, call
        self.run = self.with_pattern(pattern)
        self.at_once = 1 if call.device == "cpu" else _AT_ONCE

    def with_pattern(self, pattern: Any) -> Callable[[], Any]:
        return self.with_arrays(*self.arrays, pattern)

    def with_arrays(self, q: Any, k: Any, v: Any, pattern: Any) -> Callable[[], Any]:
        return functools.partial(attention, q, k, v, pattern, **self.options)

    def smallest(self) -> Callable[[], Any]:
        """Return the same call with one query and one key, without score function, sinks and dropout."""
        if 0 in self.call.out_shape or not self.call.kv_len:
            return self.run
        q, k, v = (x[:1, :1, :1] for x in (self.call.q, self.call.k, self.call.v))
        same = {name: self.options[name] for name in ("backend", "precision")}
        return functools.partial(attention, q, k, v, "full", **same)

    def finish(self, result: Any) -> None:
        """Wait for the device; reading one number waits for all libraries."""
        if self.call.device != "cpu" or self.call.kind.name == "jax":
            self.call.kind.to_host(result.reshape(-1)[:1])

    def alternate(self, runs: list[Callable[[], Any]]) -> list[list[float]]:
        """Return the milliseconds of each function, measured in turns; the functions have run before or run once."""
        for run in runs[1:]:
            run()
        found: list[list[float]] = [[] for _ in runs]
        end = time.perf_counter() + _SECONDS
        while not found[0] or (len(found[0]) < _MOST_RUNS and time.perf_counter() < end):
            for run, times in zip(runs, found, strict=True):
                times.append(_once(run, self.finish, self.at_once))
        return found


class _Case(NamedTuple):
    """A measured call, for advice."""

    call: Call
    backend: str
    plan: Plan
    timed: _Timed
    measured_ms: float
    pattern: Any
    pattern_ms: float
    planning_ms: float
    replanned: bool
    made: bool
    execution: Execution

    @property
    def affordable(self) -> bool:
        """Whether another measurement fits into the time limit."""
        return self.measured_ms < 1e3 * _SECONDS

    def faster_ms(self, run: Callable[[], Any]) -> tuple[float, float] | None:
        """Return the times of the call and of `run`, measured in turns, if `run` is clearly faster."""
        both = self.timed.alternate([self.timed.run, run])
        own, other = map(statistics.median, both)
        return (own, other) if own > _GAIN * other and min(both[0]) > _GAIN * min(both[1]) else None


def _once(run: Callable[[], Any], finish: Callable[[Any], None], times: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(times):
        result = run()
    finish(result)
    return 1e3 * (time.perf_counter() - start) / times


def _planned(module: Backend, pattern: Any, call: Call, key_padding: Any) -> tuple[tuple[Plan, float], bool]:
    """Return the plan of a call, the milliseconds that it took, and whether it was made."""
    misses, start = plan_cache_info().misses, time.perf_counter()
    plan = find_plan(module, resolve(pattern, call.sizes, key_padding), call)
    took = 1e3 * (time.perf_counter() - start)
    return (plan, took), plan_cache_info().misses > misses


def _backward(module: Backend, pattern: Any, call: Call, timed: _Timed) -> tuple[float, Plan]:
    """Return the time of the gradients, with out as its own gradient, and their plan."""
    out, lse = attention(*timed.arrays, pattern, return_lse=True, **timed.options)
    out, lse = (x.detach() if hasattr(x, "detach") else x for x in (out, lse))
    plan = find_plan(module, resolve(pattern, call.sizes, timed.options["key_padding"]), call, backward=True)

    def run() -> Any:
        return attention_backward(out, *timed.arrays, out, lse, pattern, **timed.options)[0]

    run()
    return statistics.median(timed.alternate([run])[0]), plan


def _pattern_ms(pattern: Any, plan: Plan, call: Call, key_padding: Any) -> float:
    """Return the time to convert, hash and compare the `pattern` argument, as each call does."""
    if isinstance(pattern, (Plan, str)) and key_padding is None:
        return 0.0

    def run() -> bool:
        found = resolve(pattern, call.sizes, key_padding)
        return hash(found) == hash(plan.pattern) and found == plan.pattern

    return min(_once(run, lambda same: None) for _ in range(5))


def _memory_ms(call: Call, threads: int) -> float:
    """Return the time to read q, k and v and to write out once, at the speed of a copy of q, k and v."""
    arrays = [call.q, call.k, call.v]
    if call.device == "cpu":
        host = [call.kind.to_numpy(x) for x in arrays]
        copies = [np.empty_like(x) for x in host]

        def run() -> Any:
            for target, x in zip(copies, host, strict=True):
                np.copyto(target, x)
            return call.q
    else:

        def run() -> Any:
            return [x.clone() if hasattr(x, "clone") else x.copy() for x in arrays][-1]

    def finish(result: Any) -> None:
        if call.device != "cpu":
            call.kind.to_host(result.reshape(-1)[:1])

    copied = sum(x.nbytes for x in arrays)
    milliseconds = min(_once(run, finish) for _ in range(3))
    return milliseconds * (copied + call.result_bytes()) / max(2 * copied, 1) / threads


def _predicted_ms(module: Backend, plan: Plan, call: Call) -> float | None:
    if not module.LIMITS.predicts:
        return None
    sizes = call.batch, call.heads_q, call.head_dim, call.head_dim_v, call.dtype
    return cast(PredictingBackend, module).predicted_ms(plan, *sizes)


def _bound(measured: float, host: float, pattern: float, memory: float, replanned: bool) -> str:
    if replanned or pattern > _SHARE * measured:
        return "planning"
    if host > _SHARE * measured:
        return "host overhead"
    return "memory" if memory > _SHARE * measured else "compute"


def _problem(plan: Plan, call: Call, layout: str) -> str:
    heads = f"{call.heads_q}" if call.heads_q == call.heads_kv else f"{call.heads_q} query and {call.heads_kv} key"
    dims = f"{call.head_dim}" if call.head_dim == call.head_dim_v else f"{call.head_dim} and {call.head_dim_v}"
    return (
        f"{plan.pattern!r}, {call.q_len} × {call.kv_len} tokens, batch of {call.batch}, {heads} heads of {dims}, "
        f"{call.dtype} {call.kind.name} arrays on {call.device}, layout {layout}"
    )


def _reason(call: Call, backend: str) -> str:
    if backend != "auto":
        return "named by the caller"
    return (
        f'chosen by "auto" because the arrays are {"in host memory" if call.device == "cpu" else "on " + call.device}'
    )


def _tiles(label: str, plan: Plan) -> str:
    return (
        f"{label}: {plan.tiles} of {plan.block_q} queries × {plan.block_kv} keys in {len(plan.work)} work items; "
        f"efficiency {plan.efficiency:.3g} ({plan.nnz} allowed pairs)"
    )


def _advice(of: _Case) -> Iterator[str]:
    yield from _planning_advice(of)
    if of.execution.advice is not None:
        yield of.execution.advice
    if of.affordable:
        for advise in (_threads_advice, _strides_advice, _discovery_advice, _dense_advice):
            if (line := advise(of)) is not None:
                yield line


def _planning_advice(of: _Case) -> Iterator[str]:
    if of.replanned:
        yield (
            f"the plan is made at each call, {of.planning_ms:.3g} ms, because it does not fit into the plan cache: "
            "keep the result of spattn.plan_for(pattern, q, k, v) and pass it instead of the pattern"
        )
    elif of.pattern_ms > (1 - 1 / _GAIN) * of.measured_ms:
        what, instead = "the pattern is hashed and compared", "pass spattn.plan_for(pattern, q, k, v)"
        if str(getattr(of.pattern, "dtype", "")).endswith("bool"):
            what, instead = "the boolean array is copied and hashed", "pass spattn.patterns.Mask(array), made once"
        elif not isinstance(of.pattern, (Pattern, Plan, str)):
            what, instead = "the argument is converted to a pattern", "convert it once, with spattn.patterns.interop"
        yield f"{what} at each call, {of.pattern_ms:.3g} of {of.measured_ms:.3g} ms: {instead}"
    elif of.made and of.planning_ms > of.measured_ms:
        factor = of.planning_ms / of.measured_ms
        yield (
            f"planning took {of.planning_ms:.3g} ms, {factor:.3g} times the call: build the pattern once, and plan "
            "ahead of time with spattn.plan_for(pattern, q, k, v)"
        )
    if isinstance(of.plan.pattern, Pattern):
        for name in dict.fromkeys(type(p).__name__ for p in leaves(of.plan.pattern) if copy.copy(p) != p):
            yield (
                f"an equal {name} that is built anew is planned anew, because {name} compares by identity: build it "
                "once, or make the class a frozen dataclass"
            )


def _threads_advice(of: _Case) -> str | None:
    if of.backend != "cpu" or of.execution.workers != 1 or _limits.processors() < 2:
        return None

    def run() -> Any:
        with cpu.threads(2):
            return of.timed.run()

    with cpu.threads(2):
        if cpu.execution(of.call, of.plan).workers < 2:  # too little work, or other processes occupy the cores
            return None
    times = of.faster_ms(run)
    return None if times is None else f"two threads take {times[1]:.3g} ms instead of {times[0]:.3g} ms"


def _strides_advice(of: _Case) -> str | None:
    """Compare with contiguous copies."""
    if of.call.kind.name == "jax":
        return None  # JAX arrays have no strides
    arrays: tuple[Any, ...] = of.timed.arrays
    copied = [x.contiguous() if hasattr(x, "contiguous") else x.copy(order="C") for x in arrays]
    changed = [(name, x) for name, x, own in zip("qkv", arrays, copied, strict=True) if _strides(x) != _strides(own)]
    q, k, v = copied
    times = of.faster_ms(of.timed.with_arrays(q, k, v, of.pattern)) if changed else None
    if times is None:
        return None
    which = " and ".join(f"{name} has strides {_strides(x)}" for name, x in changed)
    return f"{which}: contiguous arrays take {times[1]:.3g} ms instead of {times[0]:.3g} ms"


def _strides(x: Any) -> tuple[int, ...]:
    """Return the strides in bytes of NumPy and CuPy arrays, in elements of PyTorch tensors."""
    return tuple(x.stride()) if hasattr(x, "stride") else tuple(x.strides)


def _discovery_advice(of: _Case) -> str | None:
    """Compare with the regular patterns in a mask or a list of pairs."""
    pattern = of.plan.pattern
    if not isinstance(pattern, (Mask, CSR)) or of.plan.efficiency > _LOW_EFFICIENCY or of.plan.nnz > _MOST_DISCOVERED:
        return None
    found = discover(pattern)
    if any(isinstance(p, CSR) for p in leaves(found)):
        return None
    times = of.faster_ms(of.timed.with_pattern(found))
    if times is None:
        return None
    return f"pass patterns.discover(mask), which is {found!r}: {times[1]:.3g} ms instead of {times[0]:.3g} ms"


def _dense_advice(of: _Case) -> str | None:
    """Compare with all pairs, where the plan has nearly as many tiles."""
    times = of.faster_ms(of.timed.with_pattern("full")) if may_lose(of.plan) else None
    if times is None:
        return None
    return (
        f"attention over all pairs takes {times[1]:.3g} ms instead of {times[0]:.3g} ms, because only "
        f"{100 * of.plan.efficiency:.2g} % of the computed pairs are allowed: use dense attention with a mask"
    )
