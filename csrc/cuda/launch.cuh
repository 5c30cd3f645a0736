// The one place that launches kernels, and the tables of addresses that kernels take by value.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <limits>
#include <type_traits>

#include "launch.h"

namespace gsync::cuda {

/// Launches `kernel` on `stream` and returns its error, which is cleared from the runtime's state.
template <class... Parameters>
cudaError_t launch(void (*kernel)(Parameters...), int64_t grid, int block, cudaStream_t stream,
                   const std::type_identity_t<Parameters>&... arguments) {
  if (grid > std::numeric_limits<int32_t>::max()) return cudaErrorInvalidConfiguration;
  const void* addresses[] = {&arguments...};
  const cudaError_t error = cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(grid)),
                                             dim3(static_cast<unsigned>(block)), const_cast<void**>(addresses), 0, stream);
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

/// A table of addresses inside the parameters of a kernel. Copying parameters costs time too, so there are three sizes of it.
template <int kCapacity>
struct AddressTable {
  const void* value[kCapacity];

  __device__ __forceinline__ const void* operator[](int64_t idx) const { return value[idx]; }

  void fill(const void* const* host, int64_t count, const Workspace&) {
    for (int64_t i = 0; i < count; ++i) value[i] = host[i];
  }
};

/// The table in device memory, for more addresses than parameters hold.
template <>
struct AddressTable<0> {
  const void* const* value;

  __device__ __forceinline__ const void* operator[](int64_t idx) const { return value[idx]; }

  void fill(const void* const*, int64_t, const Workspace& workspace) { value = workspace.addresses; }
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

}  // namespace gsync::cuda
