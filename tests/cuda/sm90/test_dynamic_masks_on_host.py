"""What the kernels of selections decide for a tile, without a GPU: their code, compiled for the host, against dense
masks."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import numpy as np
import pytest

from spattn.cuda.driver import compile
from spattn.cuda.sm90.dynamic_masks import _FORMS

CXX = shutil.which("c++")
pytestmark = [pytest.mark.family("sm90"), pytest.mark.skipif(CXX is None, reason="no C++ compiler was found")]
NOWHERE = 2**31 - 1
# What the sources take from CUDA, in plain C++, and what they include that only a GPU has.
SHIM = """
#include <cmath>
#include <cstdint>
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __constant__
#define __grid_constant__
struct int4 { int x, y, z, w; };
struct float2 { float x, y; };
struct Index { unsigned x; };
static Index threadIdx, blockIdx, gridDim;
template <typename T> T max(T a, T b) { return a > b ? a : b; }
template <typename T> T min(T a, T b) { return a < b ? a : b; }
template <typename T> T __ldg(const T* p) { return *p; }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t by) {
  return uint32_t((uint64_t(high) << 32 | low) >> (by & 31));
}
inline unsigned long long __brevll(unsigned long long x) {
  unsigned long long found = 0;
  for (int i = 0; i < 64; ++i) found |= (x >> i & 1) << (63 - i);
  return found;
}
"""
TMA = "#pragma once\nnamespace spattn::sm90 { struct alignas(64) TensorMap { unsigned char opaque[128]; }; }\n"
ELEMENT = (
    "#pragma once\ntemplate <typename T> T infinity();\ntemplate <> inline float infinity<float>() { return 1e30f; }\n"
)
HARNESS = """
#include "shim.h"
#define SPATTN_MAPS 16
#define SPATTN_PROBLEMS 1
#include "sm90/dynamic_masks/masks.cu"
using namespace spattn::sm90;

// The kind of the tile of `rows` queries from q0 on and 64 keys from k0 on, and its bitmask.
extern "C" int look(const uint32_t* table, const int* given, uint32_t* mask) {
  const int form = given[0], words = given[1], q_len = given[4], kv_len = given[5], rows = given[7];
  View queries{}, keys{};
  queries.stride[2] = 1, queries.extent[0] = queries.extent[1] = queries.box[0] = queries.box[1] = 1;
  keys = queries;
  queries.extent[2] = q_len, queries.box[2] = rows, keys.extent[2] = kv_len, keys.box[2] = 64;
  Work work{};
  work.x = given[6], work.end = 1;
  const Entry entry = {given[8], 0, 0, 0};
  const int32_t none = 0;
  Select s{};
  s.work = &work, s.query_views = &queries, s.key_views = &keys, s.items = s.selections = &none;
  s.new_entries = const_cast<Entry*>(&entry), s.table = table;
  s.form = form, s.words = words, s.block_q = given[2], s.block_kv = given[3];
  s.q_len = q_len, s.q_offset = kv_len - q_len, s.warpgroups = rows > 64 ? 2 : 1;
  const Reach reach = reach_of(queries, work.x, 0, 0);
  const Reach places = {s.q_offset + reach.first, s.q_offset + reach.last};
  const TileKind kind = new_item(s, 0).allowed.kind_of(places, reach_of(keys, entry.x, 0, 0));
  for (threadIdx.x = 0; threadIdx.x < 32; ++threadIdx.x) write_mask(s, {0, 0, -1}, mask);
  return int(kind);
}
"""


@pytest.fixture(scope="module")
def look(tmp_path_factory):
    folder = tmp_path_factory.mktemp("host")
    for name, text in {
        "sm90/isa/tma.cuh": TMA,
        "common/element.cuh": ELEMENT,
        "shim.h": SHIM,
        "look.cpp": HARNESS,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    command = [CXX, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{folder}", f"-I{compile.SOURCES}"]
    done = subprocess.run([*command, folder / "look.cpp", "-o", folder / "look.so"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(folder / "look.so").look


def words_of(bits):
    padded = np.concatenate([bits, np.zeros(-len(bits) % 32, bool)])
    return np.packbits(padded, bitorder="little").view(np.uint32)


def draw(rng, form, q, k, block_q, block_kv):
    """The table of a random selection, the words of its rows, and which keys it allows to each query."""
    kv_len, there = len(k), q >= 0
    allowed, share = np.zeros((len(q), kv_len), bool), rng.choice([0.02, 0.3, 0.97])
    if form == "blocks":
        cells = rng.random((-(-kv_len // block_q), -(-kv_len // block_kv))) < share
        allowed[there] = cells[q[there] // block_q][:, k // block_kv]
        return np.concatenate([words_of(row) for row in cells]), -(-cells.shape[1] // 32), allowed
    if form == "lengths":
        length = rng.integers(0, kv_len + 1)
        first, stop = (kv_len - length, kv_len) if rng.random() < 0.5 else (0, length)
        allowed[:] = (k >= first) & (k < stop)
        return np.array([first, stop], np.uint32), 2, allowed
    if form == "documents":
        starts = np.sort(rng.integers(0, kv_len + 1, 5))
        number = np.searchsorted(starts, k, "right")
        number = np.where(number == len(starts), NOWHERE, number - 1).astype(np.int32)
        own = number[q[there]][:, None]
        allowed[there] = (own == number) & (own >= 0) & (own != NOWHERE)
        return number.view(np.uint32), kv_len, allowed
    columns, diagonals = rng.random(kv_len) < share, rng.random(kv_len) < rng.choice([0.02, 0.3, 0.97])
    apart = q[there][:, None] - k
    allowed[there] = (columns | diagonals[np.maximum(apart, 0)]) & (apart >= 0)
    return np.concatenate([words_of(columns), words_of(diagonals)]), -(-kv_len // 32), allowed


@pytest.mark.parametrize("form", _FORMS)
def test_tiles(look, form):
    """Bitmasks are exact; an empty tile holds no pair, a full one no other. Of lines a tile may be kept in vain."""
    rng = np.random.default_rng(0)
    row, column = np.divmod(np.arange(128 * 64), 64)
    thread = row // 64 * 128 + row % 64 // 16 * 32 + row % 8 * 4 + column % 8 // 2
    bit = column // 8 * 4 + row % 16 // 8 * 2 + column % 2
    for _ in range(400):
        q_len, kv_len = rng.integers(1, 700, 2)
        rows, block_q, block_kv = rng.choice([49, 64, 128]), *rng.choice([1, 5, 37, 64, 128, 300], 2)
        q, k = np.arange(q_len) + kv_len - q_len, np.arange(kv_len)
        table, words, allowed = draw(rng, form, q, k, block_q, block_kv)
        q0, k0 = rows * rng.integers(0, -(-q_len // rows)), 64 * rng.integers(0, -(-kv_len // 64))
        given = np.array([_FORMS.index(form), words, block_q, block_kv, q_len, kv_len, q0, rows, k0], np.int32)
        mask = np.zeros(256, np.uint32)
        kind = look(*(x.ctypes.data_as(ctypes.c_void_p) for x in (np.ascontiguousarray(table), given, mask)))
        tile = allowed[q0 : q0 + rows, k0 : k0 + 64]
        expected = np.zeros((128, 64), bool)
        expected[: tile.shape[0], : tile.shape[1]] = tile
        np.testing.assert_array_equal((mask[thread] >> bit & 1).reshape(128, 64), expected)
        assert kind != 2 or tile.all()
        assert (kind == 0) <= (not tile.any())
        assert form == "lines" or (kind == 0) == (not tile.any())
