// Tensor Memory Accelerator (TMA). One PTX instruction per function.
//
// A tensor map is 128 opaque bytes encoded on the host (cuTensorMapEncodeTiled). All maps here have five dimensions:
// (head_dim, axis 2, axis 1, axis 0, batch·head) of an affine view, with the box (64, box 2, box 1, box 0, 1) and the
// 128-byte swizzle: 16-byte chunk c of 128-byte row r is stored at chunk c ^ (r % 8). Loads fill cells outside the view
// with zeros; stores skip them. PTX ISA, "cp.async.bulk.tensor".
#pragma once

#include <cstdint>

namespace spattn::sm90 {

struct alignas(64) TensorMap {
  uint8_t opaque[128];
};

__device__ __forceinline__ void tma_load(uint32_t destination, const TensorMap* map, uint32_t barrier, int c0, int c1,
                                         int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(destination),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

__device__ __forceinline__ void tma_store(const TensorMap* map, uint32_t source, int c0, int c1, int c2, int c3,
                                          int c4) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(
                   reinterpret_cast<uint64_t>(map)),
               "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}

// bulk_store() copies contiguous bytes to global memory; bulk_add() adds float32 values to those in global memory.
__device__ __forceinline__ void bulk_store(void* target, uint32_t source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(source), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_add(float* target, uint32_t source, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(target), "r"(source),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until this thread's stores have read shared memory.
__device__ __forceinline__ void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Waits until this thread's stores are complete.
__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace spattn::sm90
