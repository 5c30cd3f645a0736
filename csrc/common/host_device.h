// Functions that run on the host and on a device, and the bits of a float on both.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define GSYNC_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define GSYNC_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace gsync {

GSYNC_HOST_DEVICE uint32_t bits_of(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

GSYNC_HOST_DEVICE float float_of(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

}  // namespace gsync
