// Formula    lookup table of a dynamic mask: see Form in params.cuh.
// Grid       one CTA per table row and mask; for documents, one per kTokens tokens.
// Target     sm_90a (no special instructions; shares the structs of attention.cu).
// Test       tests/cuda/sm90/test_dynamic_masks.py      Bound  launch; the table of 65,536 tokens takes some KiB.

#include "sm90/dynamic_masks/params.cuh"

namespace spattn::sm90 {

constexpr int kTableThreads = 128;
constexpr int kTokens = 1024;

// A row of a mask's table.
struct Row {
  const Table& t;
  const int64_t first;  // index in `source` at which the row starts
  uint32_t* const target;

  __device__ __forceinline__ int64_t number(int n) const {
    const int64_t at = first + n * t.stride;
    return t.wide ? static_cast<const int64_t*>(t.source)[at] : static_cast<const int32_t*>(t.source)[at];
  }

  __device__ void set_bits() const {
    for (int w = threadIdx.x; w < t.words; w += kTableThreads) target[w] = 0;
    __syncthreads();
    for (int n = threadIdx.x; n < t.count; n += kTableThreads) {
      const int64_t bit = number(n);
      if (bit >= 0 && bit < t.limit) atomicOr(&target[bit / 32], 1u << (bit % 32));
    }
  }

  __device__ void set_ends() const {
    if (threadIdx.x > 0) return;
    const int64_t length = min(max(number(0), int64_t(0)), int64_t(t.limit));
    target[0] = t.left ? t.limit - length : 0;
    target[1] = t.left ? t.limit : length;
  }

  // Writes the document of each token of a block: the last one that starts at or before it; -1 before the first.
  __device__ void number_tokens(int block) const {
    for (int token = block * kTokens + threadIdx.x; token < min((block + 1) * kTokens, t.limit);
         token += kTableThreads) {
      int low = 0, high = t.count;  // documents [0, low) start at or before the token, those from `high` on after it
      while (low < high) {
        const int middle = (low + high) / 2;
        if (number(middle) <= token) low = middle + 1;
        else high = middle;
      }
      target[token] = low == t.count ? kNowhere : low - 1;
    }
  }
};

extern "C" __constant__ int launch_shape[3] = {kTableThreads, 0, sizeof(Table)};

extern "C" __global__ void __launch_bounds__(kTableThreads) hopper_select_table(const __grid_constant__ Table t) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *t.masks_taken = 0;
  const int blocks = t.form == kDocuments ? (t.limit + kTokens - 1) / kTokens : t.rows;  // per mask
  const int selection = blockIdx.x / blocks, row = blockIdx.x % blocks;
  const int own = t.form == kDocuments ? 0 : row;
  const Row here = {t, selection / t.heads * t.batch_stride + selection % t.heads * t.head_stride + own * t.row_stride,
                    t.target + selection * t.target_stride + int64_t(own) * t.words};
  if (t.form == kLengths) here.set_ends();
  else if (t.form == kDocuments) here.number_tokens(row);
  else here.set_bits();
}

}  // namespace spattn::sm90
