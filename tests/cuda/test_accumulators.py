"""Exact accumulators of gradients, compiled by a C++ compiler, against sums of fractions."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from fractions import Fraction

import numpy as np
import pytest

from spattn.cuda.driver import compile

pytestmark = pytest.mark.family("sm80")

COMPILER = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
UNIT = """
#include <math.h>
#include <string.h>
#define __device__
using Word = unsigned long long;
static Word __double_as_longlong(double x) { Word y; memcpy(&y, &x, 8); return y; }
static double __longlong_as_double(Word x) { double y; memcpy(&y, &x, 8); return y; }
static unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
static int max(int a, int b) { return a > b ? a : b; }
static void atomicAdd(Word* at, Word x) { *at += x; }
static void atomicOr(Word* at, Word x) { *at |= x; }
#include "common/accumulator.cuh"
extern "C" double sum(const double* x, int count, Word* words) {
  using namespace spattn;
  for (int i = 0; i < count; ++i) add_exactly(words, x[i]);
  return accumulated(words);
}
extern "C" double sum_floats(const double* x, int count, Word* words) {
  using namespace spattn;
  for (int i = 0; i < count; ++i) add_exactly(words, float(x[i]));
  return accumulated(words);
}
"""


@pytest.fixture(scope="module")
def total(tmp_path_factory):
    """The sum of numbers, and the words that hold it."""
    if COMPILER is None:
        pytest.skip("no C++ compiler was found")
    folder = tmp_path_factory.mktemp("accumulator")
    file, library = folder / "sum.cpp", folder / "sum.so"
    file.write_text(UNIT)
    command = [COMPILER, "-std=c++17", "-O2", "-w", "-shared", "-fPIC", f"-I{compile.SOURCES}", "-o", library, file]
    subprocess.run([*map(str, command)], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.sum.restype = loaded.sum_floats.restype = ctypes.c_double

    def added(numbers, function=loaded.sum):
        numbers, words = np.asarray(numbers, np.float64), np.zeros(10, np.uint64)
        got = function(numbers.ctypes.data_as(ctypes.c_void_p), len(numbers), words.ctypes.data_as(ctypes.c_void_p))
        return got, words

    added.of_floats = lambda numbers: added(numbers, loaded.sum_floats)
    return added


@pytest.mark.parametrize("exponents", [(-3, 3), (-60, 60), (-107, 126), (-20, 126)], ids=str)
def test_sums_are_exact(total, exponents):
    """Of numbers with all their bits above 2^-160, whatever cancels."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        numbers = rng.uniform(-1, 1, 50) * 2.0 ** rng.integers(*exponents, 50)
        numbers = np.concatenate([numbers, -numbers[: rng.integers(50)]])
        exact = sum(map(Fraction, numbers))
        if exponents[0] < -106:
            numbers = numbers.astype(np.float32).astype(float)
            exact = sum(map(Fraction, numbers))
        got, words = total(numbers)
        assert abs(Fraction(got) - exact) <= abs(exact) * Fraction(2) ** -51
        again, shuffled = total(rng.permutation(numbers))
        assert again == got and np.array_equal(*(normalized(x) for x in (words, shuffled)))


def normalized(words):
    """The number that words hold, as one integer."""
    return [sum(int(x) << 32 * n for n, x in enumerate(words[:9].astype(np.int64)))]


def test_extremes(total):
    """Infinities, NaN, what is too large, and bits that are dropped."""
    assert total([])[0] == 0 and total([1.0, -1.0])[0] == 0
    assert total([math.inf, 1.0])[0] == math.inf and total([-math.inf, 1.0])[0] == -math.inf
    assert total([2.0**127])[0] == math.inf and total([-(2.0**1000)])[0] == -math.inf
    assert total([2.0**127 - 2.0**74, 1.0])[0] == 2.0**127 - 2.0**74
    for numbers in ([math.inf, -math.inf], [math.nan, 1.0], [math.inf, math.nan]):
        assert math.isnan(total(numbers)[0])
    assert total([2.0**-160])[0] == 2.0**-160 and total([2.0**-161, 5e-324])[0] == 0
    assert total([2.0**-150 + 2.0**-161])[0] == 2.0**-150 and total([-(2.0**-160)] * 3)[0] == -3 * 2.0**-160


def test_floats(total):
    """Adding a float leaves the same words as adding the same number as a double; denormals are kept."""
    rng = np.random.default_rng(1)
    numbers = np.float32(rng.normal(size=3000) * 2.0 ** rng.integers(-149, 125, 3000)).astype(float)
    numbers = np.concatenate([numbers, [0.0, -0.0, 2.0**-149, -(2.0**-130), 2.0**126]])
    (got, words), (wide, wanted) = total.of_floats(numbers), total(numbers)
    assert got == wide and np.array_equal(normalized(words), normalized(wanted))
    for special in (np.inf, -np.inf, np.nan, 2.0**127):
        (got, _), (wide, _) = total.of_floats([1.0, special]), total([1.0, special])
        assert np.array_equal(got, wide, equal_nan=True)
