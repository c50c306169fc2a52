"""Sums of dS along diagonals, for gradients of captured arrays, run on the CPU by an emulator of CUDA threads."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from spattn.arrays.namespace import numpy_dtype
from spattn.cuda.driver import compile
from spattn.score.source import Array, source

from ..score_trees import operands
from ..test_score_source import packed, wanted

HERE, COMPILER = Path(__file__).parents[1], shutil.which("g++")
INCLUDE = next((path for path in (Path("/usr/local/cuda/include"),) if path.is_dir()), None)
pytestmark = [
    pytest.mark.family("sm90"),
    pytest.mark.skipif(COMPILER is None or INCLUDE is None, reason="no C++ compiler and CUDA headers were found"),
]

HEADS, WORDS = 3, 10
TILE = np.dtype([("key", "i4"), ("query", "i4"), ("step", "i4"), ("head", "i4"), ("gradients", "u2", (64, 64))])
PARAMS = np.dtype([(name, "u8") for name in ("args", "tiles", "words", "first")] + [("count", "i8"), ("shared", "u8")])
UNIT = """
namespace spattn::sm90_backward {
struct Tile {
  int key, query, step, head;
  uint16_t gradients[64][64];
};
struct Params {
  const ScoreArgs* args;
  const Tile* tiles;
  unsigned long long* words;
  const int64_t* first;
  int64_t count;
  unsigned char* shared;  // dS of a tile, as matrices of 128-byte rows, swizzled
};
constexpr int launch_shape[3] = {128, 0, 0};

// What consumer.cuh does with the tiles of an item.
void sums(const Params& p) {
  const int thread = threadIdx.x;
  const Accumulators to = {p.words, p.first};
  TableSums<Score::Uses> sums;
  Score::Head<float> head;
  for (int n = 0; n < p.count; ++n) {
    const Tile& tile = p.tiles[n];
    if (n == 0 || tile.head != p.tiles[n - 1].head) {
      head = Score::open<float>(*p.args, 0, 0, tile.head);
    }
    __syncthreads();
    for (int cell = thread; cell < 64 * 64; cell += 128) {
      const int row = cell / 64, column = cell % 64;
      *reinterpret_cast<uint16_t*>(p.shared + row * 128 + (2 * column ^ row % 8 * 16)) = tile.gradients[row][column];
    }
    __syncthreads();
    sums.add_tile(to, p.shared, thread, {tile.key, tile.query, tile.step}, head);
  }
  sums.flush_all(to, thread);
}
}  // namespace spattn::sm90_backward
using spattn::sm90_backward::launch_shape;
RUN(spattn::sm90_backward::sums, spattn::sm90_backward::Params)
extern "C" double held(const unsigned long long* words) { return spattn::accumulated(words); }
"""

RNG = np.random.default_rng(2)
TABLE, SLOPES, WIDE = RNG.normal(size=(HEADS, 33)).astype("f"), RNG.normal(size=HEADS), RNG.normal(size=(HEADS, 3000))


def clipped(q, k):
    return np.minimum(np.maximum(k - q, -16), 16) + 16


# (function, and for each captured array the indices and the derivative of the function before the score)
FUNCTIONS = {
    "clipped": (lambda s, b, h, q, k: s + TABLE[h, clipped(q, k)], [lambda h, q, k: ((h, clipped(q, k)), 1)]),
    "distances": (lambda s, b, h, q, k: s + WIDE[h, 1500 + k - q], [lambda h, q, k: ((h, 1500 + k - q), 1)]),
    "capped": (
        lambda s, b, h, q, k: 5 * np.tanh((s + WIDE[h, abs(q - k)]) / 5),
        [lambda h, q, k: ((h, abs(q - k)), 1)],
    ),
    "slopes": (lambda s, b, h, q, k: s - SLOPES[h] * abs(q - k), [lambda h, q, k: ((h,), -abs(q - k))]),
    "two arrays": (
        lambda s, b, h, q, k: s + SLOPES[h] * (k - q) + TABLE[0, abs(q - k) // 8 % 33],
        [lambda h, q, k: ((h,), k - q), lambda h, q, k: ((0 * h, abs(q - k) // 8 % 33), 1)],
    ),
    "outside": (lambda s, b, h, q, k: s + TABLE[h, 40 + k - q], [lambda h, q, k: ((h, 40 + k - q), 1)]),
}


def tiles(case):
    """(key, query, head) of the tiles of an item, and the distance of tokens."""
    if case == "consecutive":
        return [(64, query, 0) for query in range(0, 64 * 7, 64)], 1
    if case == "strided":
        return [(5, query, 1) for query in range(5, 5 + 4 * 64 * 3, 4 * 64)], 4
    if case == "heads and gaps":
        return [(0, query, head) for head in range(HEADS) for query in (0, 64, 192, 256, 640, 704)], 1
    return [(1024, query, 0) for query in (960, 0, 64, 1024, 1088, 1400)], 1


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums(tmp_path, name, dtype):
    function, uses = FUNCTIONS[name]
    score = operands(function)
    text = source(score.program, [Array.of(*one) for one in score.types], wanted(score))
    assert "kSummed = true" in text and "kSummed = false" not in text
    file, library = tmp_path / "sums.cpp", tmp_path / "sums.so"
    file.write_text(f'#include "{HERE}/emulated.h"\n{text}#include "sm90/backward/table_sums.cuh"\n{UNIT}')
    flags = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{compile.SOURCES}", f"-I{INCLUDE}"]
    command = [COMPILER, *flags, f"-DSPATTN_DTYPE={dtype}", "-o", library, file]
    subprocess.run([*map(str, command)], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.held.restype = ctypes.c_double
    for case in ("consecutive", "strided", "heads and gaps", "far and near"):
        check(loaded, score, uses, *tiles(case), dtype)


def check(loaded, score, uses, places, step, dtype):
    given, exact = np.zeros(len(places), TILE), [np.zeros(one.shape) for one in score.types]
    size, row, column = [np.zeros(one.shape) for one in score.types], *np.ogrid[:64, :64]
    for n, (key, query, head) in enumerate(places):
        numbers = RNG.normal(size=(64, 64)) * (RNG.random((64, 64)) < 0.8)
        if n % 5 == 4:
            numbers[:, 40:] = 0  # padding
        numbers = numbers.astype(numpy_dtype(dtype))
        given[n] = key, query, step, head, numbers.view(np.uint16)
        numbers = numbers.astype(np.float64)
        for number, use in enumerate(uses):
            index, slope = use(head + 0 * row, query + step * column, key + step * row)
            index = np.broadcast_arrays(*index, numbers)[:-1]
            inside = np.all([(-n <= x) & (x < n) for x, n in zip(index, exact[number].shape, strict=True)], axis=0)
            at = tuple(x[inside] for x in index)
            np.add.at(exact[number], at, (numbers * slope)[inside])
            np.add.at(size[number], at, abs(numbers * slope)[inside])
    first = np.cumsum([0, *(one.size for one in exact)])[:-1].astype(np.int64)
    words, shared, args = (
        np.zeros((sum(one.size for one in exact), WORDS), np.uint64),
        np.zeros(8192, "u1"),
        packed(score),
    )
    params = np.zeros(1, PARAMS)
    params["args"], params["tiles"], params["count"] = args.ctypes.data, given.ctypes.data, len(given)
    params["words"], params["first"], params["shared"] = words.ctypes.data, first.ctypes.data, shared.ctypes.data
    assert loaded.params_bytes() == PARAMS.itemsize
    loaded.run(1, ctypes.c_void_p(params.ctypes.data))
    found = np.array([loaded.held(ctypes.c_void_p(one.ctypes.data)) for one in words])
    for number, one in enumerate(exact):
        got = found[first[number] : first[number] + one.size].reshape(one.shape)
        np.testing.assert_allclose(got, one, rtol=0, atol=2.0**-20 * size[number].max(), err_msg=str(number))
        assert size[number].max() > 0
