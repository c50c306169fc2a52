"""Compositions on a GPU: what the tests here and ``tools/attack_unions.py`` have in common.

A problem is a composition with arrays, and what :mod:`.oracle` makes of them. Everything here also runs on PyTorch
tensors in host memory, by the CPU's kernels, so that it can be tried where there is no GPU.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

import spattn
from spattn.arrays import namespace_of
from spattn.cuda.sm80 import backward as portable_backward
from spattn.cuda.sm80 import forward as portable
from spattn.patterns import dynamic
from spattn.patterns.dynamic import Form
from spattn.schedule import compiler
from spattn.schedule.tensor_maps import MAPS, maps_of

from . import draws, oracle
from .draws import Case, How, Sizes, Source
from .oracle import Mask
from .problems import Problem, make_problem

FAMILIES = {"hopper": "auto", "portable": "portable"}
"""Families of kernels, and what ``SPATTN_CUDA_KERNEL`` says of each."""
KINDS = {
    "hopper": [("bfloat16", 64), ("float16", 128)],
    "portable": [("float32", 64), ("float64", 64), ("bfloat16", 64), ("float16", 128)],
    "cpu": [("float32", 64), ("float64", 64), ("bfloat16", 64), ("float16", 128)],
}
"""Dtypes and head dimensions that each family runs here: few, as each is a kernel that is compiled at its first use.
The Hopper kernels have 16-bit types only; float32 runs on the portable ones whatever is preferred."""
HOPPER_TILES = [(1, 64), (16, 64), (33, 64), (64, 64), (64, 64), (128, 64), (128, 64)]
PORTABLE_TILES = [(16, 64), (64, 64), (128, 64)]


class Chosen(NamedTuple):
    """A selection: its form, what it allows, what is found before pairs are looked at, and what makes one of arrays
    that `on` puts on the device."""

    form: Form
    mask: Mask
    found: Mask
    make: Callable[[Callable[[np.ndarray], Any]], dynamic.DynamicMask]


def _blocks(source: Source, s: Sizes) -> Chosen:
    """Some numbers are of no block, as of the next row's."""
    block_q, block_kv = source.choice([64, 128, 64, 128, 37]), source.choice([64, 128, 64, 21])
    leading = source.choice([(), (1, 1), (s.batch, s.heads_kv), (s.batch, s.heads_q), (1, s.heads_q)])
    several, rng = -(-s.kv_len // block_kv), source.rng()
    shape = *leading, -(-s.kv_len // block_q), source.integer(0, 4)
    numbers = np.where(rng.random(shape) < 0.1, -(-several // 32) * 32, rng.integers(-2, several + 1, shape))
    mask = oracle.over_heads(oracle.key_blocks(numbers, block_q, block_kv), s.heads_q)
    batch, heads = (1, 1, *leading)[-2:]
    form = Form("blocks", batch, heads, (shape[-1],), shape[-2], block_q, block_kv)
    return Chosen(form, mask, mask, lambda on: dynamic.DynamicKeyBlocks(on(numbers), block_q, block_kv))


def _padding(source: Source, s: Sizes) -> Chosen:
    lengths, left = source.rng().integers(-3, s.kv_len + 4, s.batch), source.choice([False, True])
    key = np.arange(s.kv_len)
    mask = oracle.key_padding(key >= s.kv_len - lengths[:, None] if left else key < lengths[:, None])
    form = Form("lengths", s.batch, 1, (1,), left=left)
    return Chosen(form, mask, mask, lambda on: dynamic.DynamicKeyPadding(on(lengths), left=left))


def _documents(source: Source, s: Sizes) -> Chosen:
    """Some without tokens; what is behind the last one is of none."""
    leading, several = source.choice([(), (s.batch,)]), source.integer(1, 8)
    starts = np.sort(source.rng().integers(0, s.kv_len + 1, (*leading, several)), axis=-1)
    starts = np.concatenate([np.zeros((*leading, 1), int), starts], axis=-1)

    def of(own: np.ndarray) -> Mask:
        number, key = np.searchsorted(own, np.arange(s.kv_len), "right"), np.arange(s.kv_len)
        return oracle.of_labels(np.where(key < own[-1], number, -1), None)

    mask = oracle.per_batch([of(own) for own in starts]) if leading else of(starts)
    form = Form("documents", *(*leading, 1)[:1], 1, (several + 1,))
    return Chosen(form, mask, mask, lambda on: dynamic.DynamicDocuments(on(starts)))


def _lines(source: Source, s: Sizes) -> Chosen:
    leading, rng = source.choice([(), (s.heads_q,), (s.batch, s.heads_q)]), source.rng()
    columns, diagonals = (rng.integers(-3, s.kv_len + 3, (*leading, source.integer(0, 9))) for _ in range(2))

    def rule(p: np.ndarray, j: np.ndarray) -> np.ndarray:
        of_columns = (columns[..., None, None] == j).any(axis=-3)
        of_diagonals = (np.where(diagonals < 0, s.kv_len + s.q_len, diagonals)[..., None, None] == p - j).any(axis=-3)
        return of_columns | of_diagonals

    def found(q_len: int, kv_len: int) -> np.ndarray:
        return rule(np.arange(q_len)[:, None] + kv_len - q_len, np.arange(kv_len)[None])

    batch, heads = (1, 1, *leading)[-2:]
    form = Form("lines", batch, heads, (columns.shape[-1], diagonals.shape[-1]))
    made = Chosen(form, oracle.both(found, oracle.causal()), found, lambda on: None)
    return made._replace(make=lambda on: dynamic.DynamicVerticalSlash(on(columns), on(diagonals)))


SELECTIONS = {"blocks": _blocks, "padding": _padding, "documents": _documents, "lines": _lines}


def use(family: str) -> None:
    """Calls from now on are for the kernels of a family; plans that are kept were made for those of another one."""
    asked = FAMILIES.get(family, "auto")
    if os.environ.get("SPATTN_CUDA_KERNEL") != asked:
        os.environ["SPATTN_CUDA_KERNEL"] = asked
        spattn.clear_plan_cache()


@contextlib.contextmanager
def counting_fallbacks() -> Iterator[list[str]]:
    """The calls that the portable kernels take over: where plans need more tensor maps than parameters hold."""
    found: list[str] = []
    forward, backward = portable.forward, portable_backward.backward
    with (
        mock.patch.object(portable, "forward", lambda call: (found.append("forward"), forward(call))),
        mock.patch.object(portable_backward, "backward", lambda call: (found.append("backward"), backward(call))),
    ):
        yield found


def on_device(x: np.ndarray, where: str) -> Any:
    """A tensor of PyTorch's."""
    import torch

    return namespace_of(torch.empty(0)).from_numpy(np.array(x)).to(where)


def operands(problem: Problem, where: str) -> list[Any]:
    """q, k, v, dout, and dlse where there is one."""
    arrays = problem.arrays if problem.with_dlse else problem.arrays[:4]
    return [on_device(x, where) for x in arrays]


# -- what is run -------------------------------------------------------------------------------------------------------


class Done(NamedTuple):
    """What was run, what of the results is wrong, and of which problem."""

    what: str
    wrong: list[str]
    problem: Problem


def run_call(problem: Problem, pattern: Any, where: str) -> list[str]:
    """A forward and a backward of a pattern or a plan; what of them is wrong."""
    q, k, v, dout, *dlse = operands(problem, where)
    out, lse = spattn.attention(q, k, v, pattern, return_lse=True)
    gradients = spattn.attention_backward(dout, q, k, v, out, lse, pattern, **({"dlse": dlse[0]} if dlse else {}))
    return problem.wrong((out, lse, *gradients))


def plan_of(case: Case, how: How) -> Any:
    batch, heads, _, q_len, kv_len = case.sizes
    return compiler.plan(case.pattern, q_len, kv_len, batch=batch, heads=heads, **how._asdict())


def draw_plan(source: Source, case: Case, family: str) -> tuple[How, Any]:
    """A plan that kernels of a family execute, or for the CPU. Others are planned anew by whoever is handed them."""
    tiles = {"hopper": HOPPER_TILES, "portable": PORTABLE_TILES}.get(family, draws.TILES)
    how = draws.draw_how(source, case, tiles, gathered=family == "hopper", most_cells=64)
    if family == "portable" and how.tile[0] % 16:
        how = How(source.choice(tiles), None, how.workers)
    return how, plan_of(case, how)


def of_case(source: Source, case: Case, family: str, kind: tuple[str, int], where: str) -> Iterator[Done]:
    """Calls of a composition: of the pattern, and of a plan in any tiles that the kernels have."""
    dtype, dim = kind
    problem = make_problem(source, case, dtype, dim, dim)
    yield Done(f"{family}, {dtype}, pattern", run_call(problem, case.pattern, where), problem)
    how, plan = draw_plan(source, case, family)
    source.note(how)
    yield Done(f"{family}, {dtype}, plan", run_call(problem, plan, where), problem)


def of_group(problems: Sequence[Problem], patterns: Sequence[Any], where: str) -> Iterator[Done]:
    """Several problems in one call."""
    given = [(*operands(one, where)[:3], pattern) for one, pattern in zip(problems, patterns, strict=True)]
    found = spattn.grouped_attention(given, return_lse=True)
    for problem, got in zip(problems, found, strict=True):
        yield Done(f"grouped, {problem.dtype}", problem.wrong(got, ("out", "lse")), problem)


def of_selection(source: Source, case: Case, kind: tuple[str, int], where: str) -> Iterator[Done]:
    """A composition of which a selection allows some pairs: what its numbers allow, which kernels read, and the pattern
    of these numbers."""
    import torch

    name, chosen, problem = draw_selected(source, case, *kind)
    source.note(f"{name}: {chosen.form}")
    integers = source.choice([torch.int32, torch.int64])
    selected = case.pattern & chosen.make(lambda x: on_device(x.astype(np.int64), where).to(integers))
    q, k, v, *_ = operands(problem, where)
    rows = 64 if name == "blocks" and chosen.form.block_q % 128 else 128
    many = maps_of(plan_of(case, How((rows, 64), None, 1)), False) > MAPS[-1]
    for what, pattern in (("", selected), (", on the host", selected.to_host(case.sizes.kv_len))):
        if pattern is selected and many:  # which is refused
            continue
        got = spattn.attention(q, k, v, pattern, return_lse=True)
        yield Done(f"selection of {name}{what}", problem.wrong(got, ("out", "lse")), problem)


def draw_selected(source: Source, case: Case, dtype: str, dim: int) -> tuple[str, Chosen, Problem]:
    """A composition of which a selection allows some pairs."""
    name = source.choice(sorted(SELECTIONS))
    chosen = SELECTIONS[name](source, case.sizes)
    batch, heads, _, q_len, kv_len = case.sizes
    allowed = case.allowed() & oracle.whole(chosen.mask, batch, heads, q_len, kv_len)
    return name, chosen, make_problem(source, case, dtype, dim, dim, mask=allowed)
