// What tests/emulated_kernels.py calls: csrc/cuda/launch.h over emulated grids.
#include <cuda_runtime_api.h>

#include <set>
#include <string>

#include "cuda/launch.h"
#include "grid.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace emulation {
namespace {

std::string error_text;
std::set<const void*> kernels;

}  // namespace

void keep_error(const std::string& error) { error_text = error; }
void keep_kernel(const void* kernel) { kernels.insert(kernel); }

EXPORT void emulated_schedule(int order, uint64_t seed, int pattern) {
  set_schedule({static_cast<Order>(order), seed, static_cast<uint8_t>(pattern)});
}

/// Text of the last launch that failed.
EXPORT const char* emulated_error() { return error_text.c_str(); }

/// How many different kernels have been launched since the last call.
EXPORT int emulated_take_num_kernels() {
  const auto count = static_cast<int>(kernels.size());
  kernels.clear();
  return count;
}

/// Bytes of the structures that the caller fills.
EXPORT void emulated_sizes(int64_t* sizes) {
  sizes[0] = sizeof(gsync::PackArgs);
  sizes[1] = sizeof(gsync::ReduceArgs);
  sizes[2] = sizeof(gsync::UnpackArgs);
  sizes[3] = sizeof(gsync::Workspace);
}

EXPORT int emulated_pack(const gsync::PackArgs* args, const gsync::Workspace* workspace) {
  return gsync::cuda::pack(*args, *workspace, nullptr);
}

EXPORT int emulated_reduce(const gsync::ReduceArgs* args, const gsync::Workspace* workspace) {
  return gsync::cuda::reduce(*args, *workspace, nullptr);
}

EXPORT int emulated_unpack(const gsync::UnpackArgs* args, const gsync::Workspace* workspace) {
  return gsync::cuda::unpack(*args, *workspace, nullptr);
}

}  // namespace emulation

// The runtime's, for csrc/cuda/launch.cuh.
cudaError_t cudaGetLastError() { return cudaSuccess; }
