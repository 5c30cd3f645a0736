// What a .cu file expects of nvcc, for the host's compiler; included before its first line. Types (uint4, dim3, cudaError_t) are
// those of CUDA's headers. A device function that is not here does not compile.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "grid.h"

// One thread of the host runs all blocks, one after the other, so its copy is the block's. All of them lie together (grid.cpp).
#undef __shared__
#define __shared__ static thread_local
#undef __launch_bounds__
#define __launch_bounds__(...)

using std::max;
using std::min;

inline void __syncthreads(int line = __builtin_LINE()) { emulation::wait_for_block("__syncthreads", line, false); }

inline int __syncthreads_or(int predicate, int line = __builtin_LINE()) {
  return emulation::wait_for_block("__syncthreads_or", line, predicate != 0);
}

namespace emulation {

template <class Value>
Value value_of_lane(const char* operation, int line, unsigned mask, Value value, int source) {
  static_assert(sizeof(Value) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(value));
  std::memcpy(&value, wait_for_warp(operation, line, mask, bits) + source % kWarpSize, sizeof(value));
  return value;
}

/// Keeps the error of a launch, as text.
void keep_error(const std::string& error);
/// Keeps which kernels have been launched.
void keep_kernel(const void* kernel);

}  // namespace emulation

template <class Value>
Value __shfl_sync(unsigned mask, Value value, int source, int line = __builtin_LINE()) {
  return emulation::value_of_lane("__shfl_sync", line, mask, value, source);
}

template <class Value>
Value __shfl_xor_sync(unsigned mask, Value value, int lanes, int line = __builtin_LINE()) {
  return emulation::value_of_lane("__shfl_xor_sync", line, mask, value, static_cast<int>(threadIdx.x) ^ lanes);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  const uint64_t* lanes = emulation::wait_for_warp("__ballot_sync", line, mask, predicate != 0);
  unsigned ballot = 0;
  for (int lane = 0; lane < emulation::kWarpSize; ++lane) ballot |= static_cast<unsigned>(lanes[lane]) << lane;
  return ballot;
}

template <class Value>
Value atomicAdd(Value* address, Value value) {
  return std::exchange(*address, *address + value);
}

template <class Value>
Value __ldcg(const Value* address) {
  return *address;
}

inline void __threadfence() {}
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

/// Launches a kernel whose type is known: chosen before the runtime's functions of this name.
template <class... Parameters>
cudaError_t cudaLaunchKernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, void** arguments, size_t, cudaStream_t) {
  const auto thread = [&]<size_t... kIdx>(std::index_sequence<kIdx...>) {
    kernel(*static_cast<const Parameters*>(arguments[kIdx])...);
  };
  emulation::keep_kernel(reinterpret_cast<const void*>(kernel));
  const std::string error = emulation::run_grid(grid, block, [&] { thread(std::index_sequence_for<Parameters...>()); });
  if (error.empty()) return cudaSuccess;
  emulation::keep_error(error);
  return cudaErrorLaunchFailure;
}
