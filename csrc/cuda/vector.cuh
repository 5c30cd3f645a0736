// 16-byte accesses, and raw bits seen as values.
#pragma once

#include <cstdint>
#include <cstring>

namespace gsync::cuda {

inline constexpr int kVectorBytes = 16;

/// Sixteen bytes that one thread moves in one access, as elements of `Bits`.
template <class Bits>
struct alignas(kVectorBytes) Vector {
  static constexpr int kElements = kVectorBytes / static_cast<int>(sizeof(Bits));
  Bits element[kElements];
};

/// Element `idx` of several vectors in a row.
template <class Bits, int kVectors>
__device__ __forceinline__ Bits element_of(const Vector<Bits> (&vectors)[kVectors], int idx) {
  return vectors[idx / Vector<Bits>::kElements].element[idx % Vector<Bits>::kElements];
}

__device__ __forceinline__ bool is_vector_aligned(const void* address) {
  return (reinterpret_cast<uintptr_t>(address) & (kVectorBytes - 1)) == 0;
}

/// The same address. The compiler learns that it lies in global memory, which it cannot see where addresses come out of a table.
template <class Type>
__device__ __forceinline__ Type* global_memory(Type* address) {
#ifdef __CUDA_ARCH__
  __builtin_assume(__isGlobal(address));
#endif
  return address;
}

/// The vector at `address`, which must be 16-byte aligned.
template <class Bits>
__device__ __forceinline__ Vector<Bits> load_vector(const Bits* address) {
  const uint4 words = *reinterpret_cast<const uint4*>(address);
  Vector<Bits> vector;
  memcpy(&vector, &words, sizeof(words));
  return vector;
}

template <class Bits>
__device__ __forceinline__ void store_vector(Bits* address, const Vector<Bits>& vector) {
  uint4 words;
  memcpy(&words, &vector, sizeof(words));
  *reinterpret_cast<uint4*>(address) = words;
}

__device__ __forceinline__ double double_of(uint64_t bits) {
  double value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

__device__ __forceinline__ uint64_t bits_of(double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

}  // namespace gsync::cuda
