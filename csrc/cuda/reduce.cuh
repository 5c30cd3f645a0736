// Sums over a thread block in one fixed order, and the ticket that finds the last block of a launch.
#pragma once

#include <cstdint>

namespace gsync::cuda {

inline constexpr int kWarpSize = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

/// The sum over the lanes of a warp, in every lane. Each lane adds the same pairs, so the order is one tree.
template <class Value>
__device__ __forceinline__ Value warp_sum(Value value) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
  return value;
}

/// The sum over a block of kThreads threads, valid in thread 0: warps by tree, then in their order. All threads must call it.
template <int kThreads, class Value>
__device__ __forceinline__ Value block_sum(Value value) {
  constexpr int kWarps = kThreads / kWarpSize;
  __shared__ Value sums[kWarps];
  value = warp_sum(value);
  if (threadIdx.x % kWarpSize == 0) sums[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  Value total = sums[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) total += sums[warp];
  __syncthreads();  // `sums` may be written again
  return total;
}

/// True in all threads of the block that comes last. What thread 0 of every block wrote before is then visible to all of its threads
/// through `load_written_elsewhere`. Leaves the ticket zero.
__device__ __forceinline__ bool is_last_block(uint32_t* ticket) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(ticket, 1u) == gridDim.x - 1;
    if (last) *ticket = 0;
    __threadfence();
  }
  __syncthreads();
  return last;
}

/// A value that another block wrote: from L2, since this block's L1 may hold an older line.
__device__ __forceinline__ double load_written_elsewhere(const double* address) { return __ldcg(address); }

}  // namespace gsync::cuda
