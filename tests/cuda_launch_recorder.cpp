// Stands in for the CUDA runtime in tests/test_cuda_static.py: records launches instead of making them, so that they can be
// counted without a GPU. Linked with the object files of csrc/cuda/launch.cpp, elementwise.cu and block.cu.
//
// Usage: recorder NUM_SEGMENTS HAS_DEVICE_TABLE HAS_SCALES. Prints one line per operation: name, error, then kernel, grid and block of each
// launch.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "cuda/launch.h"

namespace {

std::map<const void*, std::string>& kernel_names() {
  static std::map<const void*, std::string> names;
  return names;
}

std::string launches;

}  // namespace

extern "C" {

cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void**, size_t, cudaStream_t) {
  launches += " " + kernel_names()[kernel] + " " + std::to_string(grid.x) + " " + std::to_string(block.x);
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, dim3*, dim3*, int*) {
  kernel_names()[host] = name;
}
char __cudaInitModule(void**) { return 1; }
// What nvcc's own stubs refer to, never called here.
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) { std::abort(); }
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { std::abort(); }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { std::abort(); }
cudaError_t __cudaGetKernel(void*, const void*) { std::abort(); }
cudaError_t __cudaLaunchKernel(void*, dim3, dim3, void**, size_t, void*) { std::abort(); }
}

int main(int, char** argv) {
  const int64_t num_segments = std::atoll(argv[1]);
  const bool has_table = argv[2][0] == '1';
  std::vector<const void*> addresses(num_segments, argv);
  uint32_t ticket = 0;
  const gsync::cuda::Workspace workspace{has_table ? addresses.data() : nullptr, &ticket};
  gsync::LayoutView layout{};
  layout.num_segments = num_segments;
  layout.has_scales = argv[3][0] == '1';
  layout.num_tiles = num_segments == 0 ? 0 : num_segments + 1;

  const auto report = [](const char* operation, cudaError_t error) {
    std::printf("%s %d%s\n", operation, static_cast<int>(error), launches.c_str());
    launches.clear();
  };
  gsync::PackArgs pack{};
  pack.layout = layout;
  pack.gradients = addresses.data();
  report("pack", gsync::cuda::pack(pack, workspace, nullptr));

  gsync::ReduceArgs reduce{};
  reduce.layout = layout;
  reduce.payloads = reinterpret_cast<const uint8_t* const*>(addresses.data());
  reduce.num_payloads = num_segments;
  report("reduce", gsync::cuda::reduce(reduce, workspace, nullptr));

  gsync::UnpackArgs unpack{};
  unpack.layout = layout;
  unpack.gradients = const_cast<void* const*>(addresses.data());
  const gsync::SegmentPartials segments{};
  unpack.segments = &segments;
  report("unpack", gsync::cuda::unpack(unpack, workspace, nullptr));
  return 0;
}
