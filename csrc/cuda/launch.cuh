// The one place that launches kernels, and the tables of addresses that kernels take by value.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <limits>
#include <type_traits>

#include "launch.h"

namespace gsync::cuda {

inline constexpr int kThreadsPerBlock = 256;

/// Launches `kernel` on `stream` and returns its error, which is cleared from the runtime's state.
template <class... Parameters>
cudaError_t launch(void (*kernel)(Parameters...), int64_t grid, int block, cudaStream_t stream,
                   const std::type_identity_t<Parameters>&... arguments) {
  if (grid > std::numeric_limits<int32_t>::max()) return cudaErrorInvalidConfiguration;
  const void* addresses[] = {&arguments...};
  const cudaError_t error = cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(grid)), dim3(static_cast<unsigned>(block)),
                                             const_cast<void**>(addresses), 0, stream);
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

/// A table of addresses inside the parameters of a kernel. Copying parameters costs time too, so there are three sizes of it.
template <int kCapacity>
struct AddressTable {
  const void* value[kCapacity];

  __device__ __forceinline__ const void* operator[](int64_t idx) const { return value[idx]; }

  /// Enters `count` addresses from entry `first` on.
  void fill(const void* const* host, int64_t count, const Workspace&, int64_t first = 0) {
    for (int64_t i = 0; i < count; ++i) value[first + i] = host[i];
  }
};

/// The table in device memory, for more addresses than parameters hold.
template <>
struct AddressTable<0> {
  const void* const* value;

  __device__ __forceinline__ const void* operator[](int64_t idx) const { return value[idx]; }

  void fill(const void* const*, int64_t, const Workspace& workspace, int64_t = 0) { value = workspace.addresses; }
};

/// Calls `function` with the smallest table, as std::integral_constant, that holds `count` addresses.
template <class Function>
cudaError_t with_table_for(int64_t count, const Workspace& workspace, Function&& function) {
  constexpr int kSmall = 128;
  if (count <= kSmall) return function(std::integral_constant<int, kSmall>());
  if (count <= kMaxAddressesByValue) return function(std::integral_constant<int, kMaxAddressesByValue>());
  if (workspace.addresses == nullptr) return cudaErrorInvalidValue;
  return function(std::integral_constant<int, 0>());
}

// ---- unpack: the same parameters and launch for every family -----------------------------------------------------------

template <int kCapacity>
struct UnpackParams {
  AddressTable<kCapacity> gradients;
  const Share* shares;
  const Tile* tiles;
  int64_t num_tiles;
  int64_t num_segments;
  int64_t chunk_bytes;
  const uint8_t* payload;
  double* partials;
  int32_t* found_nonfinite;
  const SegmentPartials* segments;
  double* sum_of_squares;
  const int32_t* failed;
  uint32_t* ticket;
};

/// Launches the kernel that `kernel_for(capacity)` returns.
template <class KernelFor>
cudaError_t launch_unpack(const UnpackArgs& args, const Workspace& workspace, cudaStream_t stream, KernelFor&& kernel_for) {
  const LayoutView& layout = args.layout;
  const bool sums = args.segments != nullptr && layout.num_segments > 0;
  if (layout.num_tiles == 0 && !sums) return cudaSuccess;
  if (sums && workspace.ticket == nullptr) return cudaErrorInvalidValue;
  return with_table_for(layout.num_segments, workspace, [&](auto capacity) {
    UnpackParams<capacity> params;
    params.gradients.fill(args.gradients, layout.num_segments, workspace);
    params.shares = layout.shares;
    params.tiles = layout.tiles;
    params.num_tiles = layout.num_tiles;
    params.num_segments = layout.num_segments;
    params.chunk_bytes = layout.chunk_bytes;
    params.payload = args.payload;
    params.partials = args.partials;
    params.found_nonfinite = args.found_nonfinite;
    params.segments = sums ? args.segments : nullptr;
    params.sum_of_squares = args.sum_of_squares;
    params.failed = args.failed;
    params.ticket = workspace.ticket;
    // A slice without tiles still has to add up the partials of the others.
    return launch(kernel_for(capacity), layout.num_tiles > 0 ? layout.num_tiles : 1, kThreadsPerBlock, stream, params);
  });
}

}  // namespace gsync::cuda
