"""Generated score functions, compiled by a C++ compiler, against NumPy."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import numpy as np
import pytest

from spattn.cuda.driver import compile
from spattn.score.source import Array, arguments, source

from .score_trees import evaluated, operands, random_score, table_gradients

pytestmark = pytest.mark.family("sm80")

COMPILER = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
TREES, PAIRS = 100, 300
INSIDE = np.zeros(2, int)  # tiles for which inside() is true, and those of functions of positions
RELATIVE = np.zeros(3, bool)  # of the last function: kRelative, kDiagonal, and whether an array's gradient is summed
DIAGONALS = """
template <class Score, class Head>
void check_diagonals(double score, int query, int key, const Head& head, int* kinds) {
  const auto differ = [](double x, double y) { return !(x == y || (x != x && y != y)); };
  if constexpr (Score::kRelative) {
    kinds[3] += 1;
    kinds[2] += differ(Score::value(score, query, key, head), Score::value(score, query + 5, key + 5, head));
    kinds[2] += differ(Score::derivative(score, query, key, head), Score::derivative(score, query + 5, key + 5, head));
  }
  if constexpr (Score::kDiagonal) {
    kinds[4] += 1;
    const auto shared = Score::template diagonal<false>(0, key - query, head);
    kinds[2] += differ(Score::value(score, query, key, head), Score::value_on(score, shared, head));
  }
}

template <class Use, class Head>
void check_sum(double score, int query, int key, const Head& head, double gradient, double slope, int* kinds) {
  if constexpr (Use::kSummed) {
    kinds[5] += 1;
    const double x = Use::of_sum(score_adjoint(gradient, slope), query, key, head);
    const double y = Use::contribution(score, query, key, head, gradient);
    if (!(fabs(x - y) <= 1e-12 * fabs(y) || (x != x && y != y))) kinds[2] += 1;
  }
}
"""
UNIT = """
extern "C" void tree{n}(const void* args, int offset, int count, const int* pairs, const double* scores,
                        const double* gradients, double* values, double* derivatives, double** sums, int* kinds) {{
  using namespace spattn::tree{n};
  for (int i = 0; i < count; ++i) {{
    const int *at = pairs + 4 * i;
    const auto head = Score::open<double>(*static_cast<const ScoreArgs*>(args), offset, at[0], at[1]);
    values[i] = Score::value(scores[i], at[2], at[3], head);
    derivatives[i] = Score::derivative(scores[i], at[2], at[3], head);
    const int low = at[3] - at[3] % 16, first = at[2] - 7;  // a tile of the pair
    const bool inside = Score::inside(first, first + 15, low, low + 15, head);
    kinds[0] += inside, kinds[1] += Score::kPositions && inside;
    spattn::check_diagonals<Score>(scores[i], at[2], at[3], head, kinds);
    for (int query = first; inside && query < first + 16; ++query) {{
      for (int key = low; key < low + 16; ++key) {{
        const double x = Score::value<true>(scores[i], query, key, head), y = Score::value(scores[i], query, key, head);
        if (!(x == y || (x != x && y != y))) kinds[2] += 1;
      }}
    }}
    Score::Uses::for_each([&](auto use) {{
      const double x = use.contribution(scores[i], at[2], at[3], head, gradients[i]);
      spattn::check_sum<decltype(use)>(scores[i], at[2], at[3], head, gradients[i], derivatives[i], kinds);
      const long long index = use.index(at[2], at[3], head);
      if (index >= 0) sums[use.kTable][index] += x;
    }});
  }}
}}
"""


def wanted(score):
    """The arrays that need a gradient, whose elements have several pairs."""
    return {number: False for number, one in enumerate(score.wanted) if one}


def compiled(folder, scores):
    """A library with the functions tree0, tree1, ..."""
    text = '#include "common/score_functions.cuh"\nnamespace spattn {' + DIAGONALS + "}\n"
    for n, score in enumerate(scores):
        own = source(score.program, [Array.of(*one) for one in score.types], wanted(score))
        own = own.replace("namespace spattn {", f"namespace spattn::tree{n} {{")
        text += own + UNIT.format(n=n)
    file, library = folder / "trees.cpp", folder / "trees.so"
    file.write_text(text)
    command = [COMPILER, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{compile.SOURCES}", "-o", library, file]
    subprocess.run([*map(str, command)], check=True)
    return ctypes.CDLL(str(library))


def packed(score):
    """ScoreArgs."""
    args = np.zeros(1, arguments(score.program, [Array.of(*one) for one in score.types]))
    for n, value in enumerate(score.parameters):
        if f"parameter{n}" in args.dtype.names:
            args[f"parameter{n}"] = value
    for n, (table, one) in enumerate(zip(score.tables, score.types, strict=True)):
        args[f"table{n}"] = table.ctypes.data if table.size else 0
        if table.ndim:
            args[f"stride{n}"], args[f"shape{n}"] = one.strides, one.shape
    return args


def run(library, n, score, pairs, scores, gradients, offset):
    values, derivatives = np.zeros(len(pairs)), np.zeros(len(pairs))
    sums = [np.zeros(max(1, int(np.prod(one.shape)))) for one in score.types]
    pointers = (ctypes.c_void_p * max(1, len(sums)))(*(x.ctypes.data for x in sums))
    arrays = [x.ctypes.data_as(ctypes.c_void_p) for x in (pairs, scores, gradients, values, derivatives)]
    args = packed(score)
    kinds = np.zeros(6, np.int32)
    own = *arrays, pointers, kinds.ctypes.data_as(ctypes.c_void_p)
    getattr(library, f"tree{n}")(args.ctypes.data_as(ctypes.c_void_p), offset, len(pairs), *own)
    assert kinds[2] == 0  # value<true>() is value() where inside() is true, and so on
    INSIDE[:] += kinds[:2]
    RELATIVE[:] = kinds[3:] > 0
    shapes = [one.shape for one in score.types]
    sums = [x[: int(np.prod(shape))].reshape(shape) for x, shape in zip(sums, shapes, strict=True)]
    return values, derivatives, sums


def random_pairs(seed=0):
    rng = np.random.default_rng(seed)
    pairs = rng.integers(0, (3, 5, 200, 230), (PAIRS, 4)).astype(np.int32)
    pairs[:, 2] -= 20  # with more queries than keys, the first positions are negative
    gradients = np.where(rng.random(PAIRS) < 0.2, 0, rng.normal(size=PAIRS))
    return pairs, rng.normal(0, 3, PAIRS), gradients


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler was found")
def test_random_trees(tmp_path):
    """Values, derivatives, and gradients of captured arrays, in float64."""
    trees = [random_score(seed) for seed in range(TREES)]
    library, (pairs, scores, gradients), offset = compiled(tmp_path, trees), random_pairs(), 30
    inputs = dict(zip("bhqk", pairs.T.astype(np.int64), strict=True)) | {"score": scores, "offset": offset}
    names = set()
    for n, tree in enumerate(trees):
        names |= {op.name for op in tree.program.graph.operations}
        got, slope, sums = run(library, n, tree, pairs, scores, gradients, offset)
        value, derivative, uses = evaluated(tree, inputs)
        np.testing.assert_allclose(got, value, rtol=1e-9, atol=1e-12, err_msg=f"tree {n}")
        np.testing.assert_allclose(slope, derivative, rtol=1e-8, atol=1e-12, err_msg=f"tree {n}")
        for x, want in zip(sums, table_gradients(tree, uses, gradients), strict=True):
            np.testing.assert_allclose(x, want, rtol=1e-8, atol=1e-11, err_msg=f"tree {n}")
    assert 0 < INSIDE[1] < INSIDE[0] < TREES * PAIRS
    assert {"look_up", "parameter", "floordiv", "mod", "where", "pow", "adjoint", "offset", "sigmoid"} <= names


SLOPES, DISTANCES = np.array([0.5, -0.25, 0.1, 2, 1]), np.random.default_rng(0).normal(size=(5, 9))
BY_ROW = np.random.default_rng(1).normal(size=240)


def clipped(q, k):
    return np.minimum(np.maximum(k - q, -4), 4) + 4


# (function, kRelative, kDiagonal, whether the gradient of an array may be summed along diagonals)
OF_DISTANCES = {
    "alibi": (lambda s, b, h, q, k: s - SLOPES[h] * abs(q - k), True, True, True),
    "table": (lambda s, b, h, q, k: s + DISTANCES[h, clipped(q, k)], True, True, True),
    "capped sum": (lambda s, b, h, q, k: 5 * np.tanh((s + DISTANCES[h, clipped(q, k)]) / 5), True, True, True),
    "sum of capped": (lambda s, b, h, q, k: 5 * np.tanh(s / 5) + DISTANCES[h, clipped(q, k)], True, True, False),
    "two numbers": (
        lambda s, b, h, q, k: s * SLOPES[(q - k) % 5] + DISTANCES[h, clipped(q, k)],
        True,
        False,
        False,
    ),
    "no position": (lambda s, b, h, q, k: s * SLOPES[h], True, False, False),
    "of a query": (lambda s, b, h, q, k: s + DISTANCES[h, clipped(q, k)] + BY_ROW[q], False, False, True),
    "a choice": (lambda s, b, h, q, k: np.where(q - k > 3, s + SLOPES[h], s), True, True, False),
}


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler was found")
def test_functions_of_the_distance(tmp_path):
    """What pairs of a diagonal share, and sums of their gradients."""
    scores = [operands(function) for function, *_ in OF_DISTANCES.values()]
    library, (pairs, given, gradients) = compiled(tmp_path, scores), random_pairs()
    for n, (name, (_, *expected)) in enumerate(OF_DISTANCES.items()):
        run(library, n, scores[n], pairs, given, gradients, 0)
        assert list(RELATIVE) == expected, name


TABLE, INTS, BOOLS = np.arange(6.0).reshape(2, 3), np.array([5, 7], np.int32), np.array([True])
EMPTY, SCALAR = np.zeros((0, 3)), np.array(2.5)
EDGES = {
    "out of range": lambda s, b, h, q, k: TABLE[b, k],
    "of the head": lambda s, b, h, q, k: s + TABLE[h, b],
    "ints out of range": lambda s, b, h, q, k: s * 0 + INTS[k],
    "bools out of range": lambda s, b, h, q, k: s * BOOLS[k],
    "empty": lambda s, b, h, q, k: EMPTY[q, k],
    "no axes": lambda s, b, h, q, k: s * SCALAR,
    "neither": lambda s, b, h, q, k: s + (q - k - (q - k)) + TABLE[(k - q + q - k), 1],
    "division": lambda s, b, h, q, k: s * 0 + (k - 7) // (q - q) + (k - 7) % (h - h) + (k - 7) // -4 + (k - 7) % -4,
    "a constant": lambda s, b, h, q, k: 3.5,
}


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler was found")
def test_edges(tmp_path):
    """Indices out of range give NaN, INT32_MIN and False, and no gradient; division by zero gives 0."""
    scores = [operands(f) for f in EDGES.values()]
    library = compiled(tmp_path, scores)
    pairs = np.array([(b, h, q, k) for b in range(2) for h in range(3) for q in (0, 5) for k in range(9)], np.int32)
    b, h, q, k = pairs.T.astype(int)
    s, ones = np.linspace(-1, 1, len(pairs)), np.ones(len(pairs))
    padded = np.pad(TABLE, ((0, 0), (0, 9)), constant_values=np.nan)
    expected = {
        "out of range": padded[b, k],
        "of the head": s + np.where(h < 2, padded[np.minimum(h, 1), b], np.nan),
        "ints out of range": np.where(k < 2, INTS[np.minimum(k, 1)], -(2.0**31)),
        "bools out of range": s * (k == 0),
        "empty": np.full(len(pairs), np.nan),
        "no axes": s * 2.5,
        "neither": s + TABLE[0, 1],
        "division": (k - 7) // -4 + (k - 7) % -4,
        "a constant": np.full(len(pairs), 3.5),
    }
    for n, (name, score) in enumerate(zip(EDGES, scores, strict=True)):
        got, _, sums = run(library, n, score, pairs, s, ones, 0)
        np.testing.assert_allclose(got, expected[name], rtol=1e-12, atol=1e-12, err_msg=name)
        if name == "out of range":
            np.testing.assert_array_equal(sums[0], np.full((2, 3), 6.0))


def test_text_depends_on_no_value():
    """Captured numbers, elements, sizes and most strides are arguments."""

    def function(slope, table):
        return operands(lambda s, b, h, q, k: s + slope * table[h, k - q])

    def text(score):
        return source(score.program, [Array.of(*one) for one in score.types])

    one = text(function(0.3, np.zeros((4, 9))))
    assert one == text(function(0.7, np.ones((8, 30))))
    assert one != text(function(0.3, np.zeros((9, 4)).T)) and one != text(function(0.3, np.zeros((4, 9), np.float32)))
