"""Problems of the CPU comparison, their inputs, and the float64 check of results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch

from spattn import patterns as sp
from spattn.testing import error_bound, naive, naive_gradients

HEADS, HEAD_DIM = 8, 64
SAMPLED_ROWS = 48
CHECKED_HEAD = 3  # head whose gradients are checked; they need every row
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Problem:
    """One pattern at one length, with 8 heads of 64 features.

    Attributes
    ----------
    mask_mod : callable
        The pattern as a FlexAttention user writes it; checked against the pattern's predicate.
    forward, both : tuple of str
        Contenders of the forward pass and of forward + backward.
    side : int
        Tokens on each side of a plain window; 0 for other patterns.
    """

    name: str
    title: str
    tokens: int
    pattern: sp.Pattern
    mask_mod: Callable
    forward: tuple[str, ...]
    both: tuple[str, ...] = ()
    side: int = 0
    grid: int = 0

    @property
    def pairs(self) -> int:
        """Allowed pairs of one head."""
        return self.pattern.index_set(self.tokens, self.tokens).nnz


@dataclass(frozen=True)
class Inputs:
    """q, k, v and the gradient of the output, (1, heads, tokens, head_dim)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    @property
    def arrays(self) -> list[np.ndarray]:
        """q, k, v and dout as NumPy arrays."""
        return [as_numpy(x) for x in (self.q, self.k, self.v, self.dout)]


def problems(quick: bool) -> list[Problem]:
    """All problems; `quick` ones have 16 times fewer pairs."""
    cut = 4 if quick else 1
    short, long, side, grid = 4096 // cut, 8192 // cut, 256 // cut, 64 // (2 if quick else 1)
    rest = ("SDPA boolean mask", "FlexAttention")
    window = ("SDPA dense", *rest, "banded SDPA")
    window_both = ("spattn", "SDPA dense", "SDPA causal", "SDPA boolean mask", "banded SDPA", "NumPy dense masked")
    return [
        Problem(
            "window",
            f"window ±{side}",
            short,
            sp.SlidingWindow(side),
            lambda b, h, q, k: (q - k).abs() <= side,
            ("spattn", *window, "NumPy dense masked", "SciPy CSR"),
            window_both,
            side,
        ),
        Problem(
            "window_long",
            f"window ±{side}",
            long,
            sp.SlidingWindow(side),
            lambda b, h, q, k: (q - k).abs() <= side,
            ("spattn", *window),
            (),
            side,
        ),
        Problem(
            "dense",
            "dense",
            short,
            sp.Full(),
            lambda b, h, q, k: q >= 0,
            ("spattn", "SDPA dense"),
            ("spattn", "SDPA dense"),
        ),
        Problem(
            "causal",
            "causal",
            short,
            sp.Causal(),
            lambda b, h, q, k: k <= q,
            ("spattn", "SDPA causal", "FlexAttention"),
            ("spattn", "SDPA causal"),
        ),
        Problem(
            "longformer",
            f"Longformer ±{side} + 16",
            short,
            sp.longformer(2 * side, global_tokens=16),
            lambda b, h, q, k: ((q - k).abs() <= side) | (q < 16) | (k < 16),
            ("spattn", "SDPA dense", *rest),
            ("spattn", "SDPA boolean mask"),
        ),
        Problem(
            "neighborhood",
            f"neighbourhood {grid}×{grid}, 13×13",
            grid * grid,
            sp.Neighborhood((grid, grid), 13),
            _neighborhood(grid, 13),
            ("spattn", "SDPA dense", *rest, "NATTEN"),
            ("spattn", "SDPA boolean mask"),
            grid=grid,
        ),
        Problem(
            "dilated",
            f"dilated ±{side}, every 4th",
            long,
            sp.DilatedWindow(side, side, dilation=4),
            lambda b, h, q, k: ((q - k).abs() <= 4 * side) & ((q - k) % 4 == 0),
            ("spattn", "SDPA dense", *rest),
            ("spattn", "SDPA dense"),
        ),
        Problem(
            "strided",
            "strided 128",
            long,
            sp.strided(128),
            lambda b, h, q, k: (k <= q) & ((q - k < 128) | ((q - k) % 128 == 0)),
            ("spattn", "SDPA dense", *rest),
        ),
    ]


def _neighborhood(grid: int, kernel: int) -> Callable:
    half = kernel // 2

    def near(q, k):
        return (q.clamp(half, grid - 1 - half) - k).abs() <= half

    return lambda b, h, q, k: near(q // grid, k // grid) & near(q % grid, k % grid)


def inputs(problem: Problem, dtype: str) -> Inputs:
    """Standard normal inputs, the same for every contender."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, HEADS, problem.tokens, HEAD_DIM)
    return Inputs(*(torch.randn(shape, generator=generator).to(DTYPES[dtype]) for _ in range(4)))


def as_numpy(x: torch.Tensor) -> np.ndarray:
    """A NumPy view of a tensor; bfloat16 by ml_dtypes."""
    x = x.detach()
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def mask_of(problem: Problem, rows: np.ndarray | None = None) -> np.ndarray:
    """The pattern's mask of all or some rows."""
    rows = np.arange(problem.tokens) if rows is None else rows
    bound = problem.pattern.bind(problem.tokens, problem.tokens)
    keys = np.arange(problem.tokens)[None, :]
    return np.broadcast_to(bound.allows(rows[:, None], keys), (len(rows), problem.tokens))


class Reference:
    """Checks a contender's results against float64.

    The error bound is spattn's own: twice the error of the naive formula in the inputs' precision, plus one rounding.
    """

    def __init__(self, problem: Problem, given: Inputs, mask_mod: bool = True):
        self.problem, self.given = problem, given
        rng = np.random.default_rng(0)
        n = problem.tokens
        ends = {0, 1, n - 1, n // 2}
        self.rows = np.array(sorted(ends | set(rng.choice(n, SAMPLED_ROWS - len(ends), replace=False).tolist())))
        if mask_mod:
            self._check_mask_mod()
        self._expected: dict[str, tuple[np.ndarray, float]] = {}

    def _check_mask_mod(self) -> None:
        at = torch.arange(self.problem.tokens)
        rows = torch.from_numpy(self.rows)
        theirs = self.problem.mask_mod(0, 0, rows[:, None], at[None, :]).numpy()
        assert (theirs == mask_of(self.problem, self.rows)).all(), f"{self.problem.name}: mask_mod and pattern differ"

    def check(self, result: tuple, allowed: str = "pattern") -> dict[str, float]:
        """Largest error and bound of the output, and of the gradients if given.

        Parameters
        ----------
        result : (out,) or (out, dq, dk, dv)
        allowed : {"pattern", "dense", "causal"}
            The pairs that were computed.
        """
        mask, key = self._allowed(self.rows, allowed), allowed
        if key not in self._expected:
            q, k, v, _ = self.given.arrays
            rows = q[:, :, self.rows]
            wide = naive(*(x.astype(np.float64) for x in (rows, k, v)), mask)[0]
            self._expected[key] = wide, error_bound(wide, naive(rows, k, v, mask)[0], q.dtype)
        wide, bound = self._expected[key]
        found = {"error": _error(as_numpy(result[0])[:, :, self.rows], wide), "error_bound": bound}
        if len(result) > 1:
            found |= self._check_gradients(result[1:], allowed)
        return found | {"within_bound": _within(found)}

    def _allowed(self, rows: np.ndarray, allowed: str) -> np.ndarray:
        if allowed == "pattern":
            return mask_of(self.problem, rows)
        every = np.arange(self.problem.tokens)[None, :]
        return every <= (rows[:, None] if allowed == "causal" else self.problem.tokens)

    def _check_gradients(self, gradients, allowed: str) -> dict[str, float]:
        key = f"gradients {allowed}"
        if key not in self._expected:
            head = slice(CHECKED_HEAD, CHECKED_HEAD + 1)
            q, k, v, dout = (x[:, head] for x in self.given.arrays)
            mask = self._allowed(np.arange(self.problem.tokens), allowed)
            wide = naive_gradients(*(x.astype(np.float64) for x in (dout, q, k, v)), mask)
            low = naive_gradients(dout, q, k, v, mask)
            bounds = [error_bound(w, n, q.dtype) for w, n in zip(wide, low, strict=True)]
            self._expected[key] = wide, bounds
        wide, bounds = self._expected[key]
        errors = [_error(as_numpy(g)[:, CHECKED_HEAD][:, None], w) for g, w in zip(gradients, wide, strict=True)]
        return {
            f"{what}_{name}": value
            for name, error, bound in zip(("dq", "dk", "dv"), errors, bounds, strict=True)
            for what, value in (("error", error), ("error_bound", bound))
        }


def _error(actual: np.ndarray, wide: np.ndarray) -> float:
    return float(np.abs(actual.astype(np.float64) - wide).max())


def _within(found: dict[str, float]) -> bool:
    errors = [name for name in found if not name.startswith("error_bound")]
    return all(found[name] <= found[name.replace("error", "error_bound")] for name in errors)
