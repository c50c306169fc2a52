"""Numbers of diagonals that the producer of the forward publishes, run on the CPU by an emulator of CUDA threads."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from spattn.cuda.driver import compile
from spattn.score.source import Array, source

from ..score_trees import operands
from ..test_score_source import packed

HERE, COMPILER = Path(__file__).parents[1], shutil.which("g++")
INCLUDE = next((path for path in (Path("/usr/local/cuda/include"),) if path.is_dir()), None)
pytestmark = [
    pytest.mark.family("sm90"),
    pytest.mark.skipif(COMPILER is None or INCLUDE is None, reason="no C++ compiler and CUDA headers were found"),
]

HEAD, ROWS, TILES = 2, 128, 2
PARAMS = np.dtype(
    [("args", "u8"), ("found", "u8"), ("first", "i4", TILES), ("step", "i4"), ("head", "i4"), ("extent", "i4", 2)]
)
UNIT = """
namespace spattn::sm90 {
struct Params {
  const ScoreArgs* args;
  double* found;  // (tiles, first row of a thread, column of its quad, nine groups of columns, two columns)
  int first[kTiles], step, head;
  mutable int extent, unused;
};
constexpr int launch_shape[3] = {32, 0, 0};

void publish(const Params& p) {
  using Published = Diagonals<kTiles, kRows>;
  static Published shared;
  const auto head = Score::open<float>(*p.args, 0, 0, p.head);
  Published::Lane lane;
  lane.extent = Extent::diagonal;
  for (int t = 0; t < kTiles; ++t) Published::compute(lane, t, p.first[t], p.step, head);
  Published::compare(lane);
  shared.write(lane);
  __syncwarp();
  if (threadIdx.x) return;
  p.extent = int(shared.extent);
  double* found = p.found;
  for (int t = 0; t < kTiles; ++t) {
    for (int row = 0; row < kRows - 8; ++row) {
      for (int quad = 0; quad < 4; ++quad) {
        const bool one = shared.extent == Extent::iteration;
        const auto* numbers = shared.at(one ? 0 : quad * 2 - row + kRows - 1);
        for (int m = -1; m < 8; ++m) {
          const auto pair = numbers[one ? 0 : t * Published::kPlaces + 4 * m];
          *found++ = pair.first, *found++ = one ? pair.first : pair.second;
        }
      }
    }
  }
}
}  // namespace spattn::sm90
using spattn::sm90::launch_shape;
RUN(spattn::sm90::publish, spattn::sm90::Params)
"""
TABLE = np.random.default_rng(0).normal(size=(3, 101))
SLOPES = np.array([0.5, 0.25, 0.125])
# (function, its number for a distance key - query in head HEAD)
FUNCTIONS = {
    "slopes": (lambda s, b, h, q, k: s - SLOPES[h] * abs(q - k), lambda d: SLOPES[HEAD] * abs(d)),
    "clipped": (
        lambda s, b, h, q, k: s + TABLE[h, np.minimum(np.maximum(k - q, -50), 50) + 50],
        lambda d: TABLE[HEAD, np.clip(d, -50, 50) + 50],
    ),
    "a choice": (lambda s, b, h, q, k: np.where(k - q > 9, s * 2, s), lambda d: d > 9),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers(tmp_path, name):
    function, number = FUNCTIONS[name]
    score = operands(function, wanted=False)
    text = source(score.program, [Array.of(*one) for one in score.types])
    assert "kDiagonal = true" in text
    sizes = f"namespace spattn::sm90 {{ constexpr int kTiles = {TILES}, kRows = {ROWS}; }}\n"
    file, library = tmp_path / "numbers.cpp", tmp_path / "numbers.so"
    file.write_text(f'#include "{HERE}/emulated.h"\n{text}#include "sm90/forward/diagonals.cuh"\n{sizes}{UNIT}')
    flags = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{compile.SOURCES}", f"-I{INCLUDE}"]
    command = [COMPILER, *flags, "-DSPATTN_DTYPE=bfloat16", "-DSPATTN_MAPS=16", "-DSPATTN_PROBLEMS=1"]
    subprocess.run([*map(str, command), "-o", str(library), str(file)], check=True)
    loaded, args = ctypes.CDLL(str(library)), packed(score)
    rows, quads, groups, column = np.ogrid[: ROWS - 8, :4, -1:8, :2]
    seen = set()
    for first, step in (((0, 64), 1), ((-300, 64), 1), ((100, 164), 1), ((40, -90), 4), ((1000, 5000), 1)):
        found = np.full((TILES, ROWS - 8, 4, 9, 2), np.nan)
        params = np.zeros(1, PARAMS)
        params["args"], params["found"], params["head"] = args.ctypes.data, found.ctypes.data, HEAD
        params["first"], params["step"] = first, step
        loaded.run(1, ctypes.c_void_p(params.ctypes.data))
        distance = 8 * groups + 2 * quads + column - rows
        expected = np.stack([number(x + step * distance) for x in first]).astype(float)
        inside = (8 * groups + 2 * quads >= -8 + 0 * rows) & (distance <= 63) & (distance >= 1 - ROWS)
        np.testing.assert_allclose(np.where(inside, found, 0), np.where(inside, expected, 0), rtol=1e-6, atol=1e-6)
        seen.add(int(params["extent"][0, 0]))
        assert (params["extent"][0, 0] == 2) == (np.ptp(expected[:, inside]) == 0)
    assert seen == ({1} if name == "slopes" else {1, 2})
