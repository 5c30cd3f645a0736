// Kernels with a mistake, to show that the emulation reports it; and each without.
#include <cuda_runtime.h>

#include <cstdint>
#include <string_view>

#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vector.cuh"

namespace emulation {
namespace {

using gsync::cuda::kThreadsPerBlock;
using gsync::cuda::kVectorBytes;

struct Params {
  const uint8_t* in;
  uint8_t* out;
  int num_bytes;
};

__device__ int thread_of_grid() { return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); }

/// Copies 16 bytes a thread; with the mistake from where `in` may be anywhere.
template <bool kMistake>
__global__ void aligned_kernel(const __grid_constant__ Params params) {
  const int first = thread_of_grid() * kVectorBytes;
  if (first + kVectorBytes > params.num_bytes) return;
  if (kMistake || gsync::cuda::is_vector_aligned(params.in)) {
    gsync::cuda::store_vector(params.out + first, gsync::cuda::load_vector(params.in + first));
  } else {
    for (int i = first; i < first + kVectorBytes; ++i) params.out[i] = params.in[i];
  }
}

/// Copies one byte a thread; with the mistake a byte after the last.
template <bool kMistake>
__global__ void bounded_kernel(const __grid_constant__ Params params) {
  const int i = thread_of_grid();
  if (kMistake ? i > params.num_bytes : i >= params.num_bytes) return;
  const uint8_t value = params.in[i];
  if (i < params.num_bytes) params.out[i] = value;
}

/// Copies one byte a thread; with the mistake not the last.
template <bool kMistake>
__global__ void written_kernel(const __grid_constant__ Params params) {
  const int i = thread_of_grid();
  if (i < params.num_bytes - (kMistake ? 1 : 0)) params.out[i] = params.in[i];
}

/// Turns the bytes of each block around.
template <bool kMistake>
__global__ void ordered_kernel(const __grid_constant__ Params params) {
  __shared__ uint8_t bytes[kThreadsPerBlock];
  const int i = thread_of_grid();
  bytes[threadIdx.x] = params.in[i];
  if (!kMistake) __syncthreads();
  params.out[i] = bytes[kThreadsPerBlock - 1 - threadIdx.x];
}

/// As above, behind a barrier that, with the mistake, the last thread does not reach.
template <bool kMistake>
__global__ void met_kernel(const __grid_constant__ Params params) {
  __shared__ uint8_t bytes[kThreadsPerBlock];
  const int i = thread_of_grid();
  bytes[threadIdx.x] = params.in[i];
  if (kMistake && i == params.num_bytes - 1) return;
  __syncthreads();
  params.out[i] = bytes[kThreadsPerBlock - 1 - threadIdx.x];
}

/// Writes the sum of a warp's bytes; with the mistake half of the lanes are at another operation.
template <bool kMistake>
__global__ void same_kernel(const __grid_constant__ Params params) {
  const int i = thread_of_grid();
  int sum = params.in[i];
  if (kMistake && threadIdx.x % 2 == 0) {
    sum = __shfl_sync(gsync::cuda::kAllLanes, sum, 0);
  } else {
    sum = gsync::cuda::warp_sum(sum);
  }
  params.out[i] = static_cast<uint8_t>(sum);
}

template <bool kMistake>
void (*kernel_named(std::string_view name))(Params) {
  if (name == "aligned") return aligned_kernel<kMistake>;
  if (name == "bounded") return bounded_kernel<kMistake>;
  if (name == "written") return written_kernel<kMistake>;
  if (name == "ordered") return ordered_kernel<kMistake>;
  if (name == "met") return met_kernel<kMistake>;
  if (name == "same") return same_kernel<kMistake>;
  return nullptr;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int emulated_fault(const char* name, bool mistake, const uint8_t* in,
                                                                     uint8_t* out, int num_bytes) {
  const Params params{in, out, num_bytes};
  const auto kernel = mistake ? kernel_named<true>(name) : kernel_named<false>(name);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  return gsync::cuda::launch(kernel, (num_bytes + kThreadsPerBlock - 1) / kThreadsPerBlock, kThreadsPerBlock, nullptr, params);
}

}  // namespace emulation
