// Formula    dV = P' dO, dK = scale dS' Q (dK/dV kernel: rows are keys), or dQ = scale dS K (dQ kernel: rows are
//            queries), with P = exp(scale Q K' - lse) on the plan's pairs and dS = P o (dO V' - delta).
// Grid       one CTA per head and 32 rows of a work item.
// Target     compute capability 8.0 and later; fused multiply-adds, no tensor cores.
// Types      any; accumulation, statistics and workspace in float32, float64 for float64.
// Threads    256: eight per row, each with four columns of a 32 x 32 tile and every eighth feature of the sums.
// Test       tests/cuda/sm80/test_mma_backward.py
// Source     Dao et al., FlashAttention (arXiv:2205.14135), appendix B; sub-tiles: schedule/subtiles.py.

#include "common/element.cuh"
#include "sm80/backward/captured.cuh"
#include "sm80/scores.cuh"

namespace spattn::sm80_backward {

constexpr bool kByKeys = SPATTN_BY_KEYS;
constexpr int kSide = 32, kLanes = 8, kThreads = kSide * kLanes, kOwn = kSide / kLanes;
constexpr int kDim = SPATTN_HEAD_DIM, kDimV = SPATTN_HEAD_DIM_V;  // multiples of 32

extern "C" __constant__ int launch_shape[3] = {kThreads, 0, sizeof(Params)};

struct Shared {
  Sum a[kSide][kSide + 1], b[kSide][kSide + 1];
  Sum weight[kSide][kSide + 1], gradient[kSide][kSide + 1];
  Sum lse[kSide], delta[kSide];   // of the queries, which are rows or columns
  int row[kSide], column[kSide];  // positions, -1 for padding
};

// One head of an operand.
struct Head {
  const Element* data;
  long long row, feature;

  __device__ Head(const Array& array, int batch, int head)
      : data(sm80::head_of<const Element>(array, batch, head)), row(array.row), feature(array.column) {}
};

struct Block {
  const Params& p;
  Shared& shared;
  const int thread = threadIdx.x, own = thread / kLanes, lane = thread % kLanes;

  // Loads features [first, first + 32) of the operand's rows at these positions; zeros beyond.
  __device__ __forceinline__ void load(Sum (&tile)[kSide][kSide + 1], const Head& head, const int (&position)[kSide],
                                       int first, int features) {
    for (int cell = thread; cell < kSide * kSide; cell += kThreads) {
      const int row = cell / kSide, d = first + cell % kSide, at = position[row];
      tile[row][cell % kSide] =
          at >= 0 && d < features ? Sum(widen(head.data[at * head.row + d * head.feature])) : Sum(0);
    }
  }

  // Computes x[j] = product of row `own` and column lane + 8 j; sums 32 features at a time to limit rounding errors.
  __device__ __forceinline__ void multiply(Sum (&x)[kOwn], const Head& rows, const Head& columns, int features) {
    for (int j = 0; j < kOwn; ++j) x[j] = 0;
    for (int first = 0; first < features; first += kSide) {
      __syncthreads();
      load(shared.a, rows, shared.row, first, features);
      load(shared.b, columns, shared.column, first, features);
      __syncthreads();
      Sum chunk[kOwn] = {};
      for (int d = 0; d < kSide; ++d) {
        for (int j = 0; j < kOwn; ++j) chunk[j] = fma(shared.a[own][d], shared.b[lane + kLanes * j][d], chunk[j]);
      }
      for (int j = 0; j < kOwn; ++j) x[j] += chunk[j];
    }
  }

  // Adds weights times columns to `sums`. Skips masked pairs, since their columns may be non-finite.
  template <int kCount>
  __device__ __forceinline__ void accumulate(Sum (&sums)[kCount], const Sum (&weights)[kSide][kSide + 1],
                                             const Head& columns, int features) {
#pragma unroll
    for (int chunk = 0; chunk < kCount / kOwn; ++chunk) {
      if (chunk * kSide >= features) break;
      __syncthreads();
      load(shared.b, columns, shared.column, chunk * kSide, features);
      __syncthreads();
      for (int c = 0; c < kSide; ++c) {
        const Sum w = weights[own][c];
        if (w == Sum(0)) continue;
        for (int j = 0; j < kOwn; ++j)
          sums[chunk * kOwn + j] = fma(w, shared.b[c][lane + kLanes * j], sums[chunk * kOwn + j]);
      }
    }
  }

  // Loads lse and delta of the queries at these positions.
  __device__ __forceinline__ void load_statistics(const int (&position)[kSide], int batch, int head) {
    if (thread >= kSide) return;
    const long long first = (static_cast<long long>(batch) * p.heads_q + head) * p.q_len;
    const Sum* statistics = static_cast<const Sum*>(p.statistics);
    const int at = max(position[thread], 0);
    shared.lse[thread] = statistics[2 * (first + at)], shared.delta[thread] = statistics[2 * (first + at) + 1];
  }

  // Computes P after dropout, and dS, of the tile of `row` and `column`; `bits` are the allowed columns of row `own`.
  __device__ __forceinline__ void weigh(unsigned bits, const Head& q, const Head& k, const Head& v, const Head& dout,
                                        const sm80::HeadScore<Sum>& score) {
    Sum s[kOwn], d[kOwn];
    multiply(s, kByKeys ? k : q, kByKeys ? q : k, p.head_dim);
    multiply(d, kByKeys ? v : dout, kByKeys ? dout : v, p.head_dim_v);
    for (int j = 0; j < kOwn; ++j) {
      const int c = lane + kLanes * j, query = kByKeys ? c : own;
      const bool allowed = bits >> c & 1 && shared.row[own] >= 0 && shared.column[c] >= 0;
      const int query_at = kByKeys ? shared.column[c] : shared.row[own];
      const int key_at = kByKeys ? shared.row[own] : shared.column[c];
      const Sum x = score(s[j], query_at, key_at);
      // Base e: a base-2 exponent would be rounded twice.
      const Sum weight = exp(fma(x, kScored ? Sum(1) : Sum(p.scale), -shared.lse[query]));
      const Sum kept = score.kept(query_at, key_at), difference = score.difference(d[j], kept, shared.delta[query]);
      shared.weight[own][c] = allowed ? weight * kept : Sum(0);
      shared.gradient[own][c] = allowed ? score.gradient(weight, difference, s[j], query_at, key_at) : Sum(0);
    }
  }

#if SPATTN_TABLES
  using Collected = Collector<kSide, kSide, kThreads>;

  // Collects the contributions of a tile to gradients of captured arrays.
  __device__ __forceinline__ void collect(Collected& collected, unsigned bits, const Head& q, const Head& k,
                                          const Head& v, const Head& dout, const sm80::HeadScore<Sum>& score) {
    Sum s[kOwn], d[kOwn];
    multiply(s, q, k, p.head_dim);
    multiply(d, dout, v, p.head_dim_v);
    const int query = shared.row[own];
    for (int j = 0; j < kOwn; ++j) {
      const int c = lane + kLanes * j, key = shared.column[c];
      const bool allowed = bits >> c & 1 && query >= 0 && key >= 0;
      const Sum weight = allowed ? exp(score(s[j], query, key) - shared.lse[own]) : Sum(0);
      const Sum difference = score.difference(d[j], score.kept(query, key), shared.delta[own]);
      d[j] = weight == Sum(0) ? Sum(0) : weight * difference;
    }
    Score::Uses::for_each([&](auto use) {
      for (int j = 0; j < kOwn; ++j) {
        const int c = lane + kLanes * j;
        shared.weight[own][c] = score.contribution(use, s[j], query, shared.column[c], d[j]);
      }
      __syncthreads();
      collected.collect(use, shared.weight, shared.row, shared.column, score);
      __syncthreads();
    });
  }
#endif

  __device__ __forceinline__ void write(const Sum (&sums)[kDim / kLanes], const Sum (&values)[kDimV / kLanes],
                                        const Task& task, const Work& work, int row) {
    const int position = shared.row[own], head = kByKeys ? task.head_kv : task.head_q;
    if (position < 0) return;
    const long long place = static_cast<long long>(task.batch) * (kByKeys ? p.heads_kv : p.heads_q) + head;
    const long long slot =
        place * p.pass.partial_rows + static_cast<long long>(work.slot) * p.pass.subtiles * p.pass.subtile_rows + row;
    const auto store = [&](const Array& target, void* partial, int d, int features, Sum value) {
      if (d >= features) return;
      if (work.slot >= 0) static_cast<Sum*>(partial)[slot * features + d] = value;
      else narrow(value, token<Element>(target, task.batch, head, position)[d * target.column]);
    };
    for (int i = 0; i < kDim / kLanes; ++i) {
      store(p.scores, p.partial_scores, lane + kLanes * i, p.head_dim, sums[i] * Sum(p.scale));
    }
    if (!kByKeys) return;
    for (int i = 0; i < kDimV / kLanes; ++i) {
      store(p.values, p.partial_values, lane + kLanes * i, p.head_dim_v, values[i]);
    }
  }

  __device__ void run() {
    const Pass& pass = p.pass;
    const int parts = (pass.subtile_rows + kSide - 1) / kSide;
    const int part = blockIdx.x % parts, subtile = blockIdx.x / parts % pass.subtiles;
    const Task task = pass.tasks[blockIdx.x / parts / pass.subtiles];
    const Work work = pass.work[task.item];
    const int tile = work.tile + subtile / pass.row_parts,
              first_row = subtile % pass.row_parts * pass.subtile_rows + part * kSide;
    const int rows = min(kSide, pass.subtile_rows - part * kSide);
    if (thread < kSide) {
      shared.row[thread] = thread < rows ? sm80::position_of(pass.views[work.view], tile, first_row + thread) : -1;
    }
    __syncthreads();
    const Head k(p.k, task.batch, task.head_kv), v(p.v, task.batch, task.head_kv);
    Sum scores[kDim / kLanes] = {}, values[kDimV / kLanes] = {};
#if SPATTN_TABLES
    Collected collected{p.captured};
#endif
    for (int n = 0; n < work.heads * (work.end - work.begin); ++n) {
      const int length = work.end - work.begin, e = work.begin + n % length;
      const int number = pass.masks[e * pass.subtiles + subtile];
      if (number == kEmpty) continue;
      const Entry entry = pass.entries[e];
      const int head = task.head_q + entry.head + n / length;
      const Head q(p.q, task.batch, head), dout(p.dout, task.batch, head);
      for (int first = 0; first < pass.subtile_columns; first += kSide) {
        const int row = min(part * kSide + own, pass.subtile_rows - 1);
        const unsigned bits =
            number == kFull ? ~0u
                            : unsigned(pass.bits[static_cast<long long>(number) * pass.subtile_rows + row] >> first);
        __syncthreads();
        if (thread < kSide) {
          const bool inside = first + thread < pass.subtile_columns;
          const int cell = entry.part * pass.subtile_columns + first + thread;
          const View& view = pass.views[work.columns + entry.view];
          shared.column[thread] = inside ? sm80::position_of(view, entry.tile, cell) : -1;
        }
        __syncwarp();
        load_statistics(kByKeys ? shared.column : shared.row, task.batch, head);
#if SPATTN_TABLES
        collect(collected, bits, q, k, v, dout, sm80::HeadScore<Sum>(p.score, task.batch, head));
#else
        weigh(bits, q, k, v, dout, sm80::HeadScore<Sum>(p.score, task.batch, head));
        accumulate(scores, shared.gradient, kByKeys ? q : k, p.head_dim);
        if constexpr (kByKeys) accumulate(values, shared.weight, dout, p.head_dim_v);
#endif
      }
    }
#if SPATTN_TABLES
    collected.finish(sm80::HeadScore<Sum>(p.score, task.batch, task.head_q));
#else
    write(scores, values, task, work, subtile * pass.subtile_rows + part * kSide + own);
#endif
  }
};

extern "C" __global__ void __launch_bounds__(kThreads) backward(const __grid_constant__ Params params) {
  if (is_skipped(params)) return;
  __shared__ Shared shared;
  Block block{params, shared};
  block.run();
}

}  // namespace spattn::sm80_backward
