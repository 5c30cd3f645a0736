// What kernels of every family need: element types, how a thread block shares out a tile, flags and padding, and `unpack` of the
// codecs without a scale.
#pragma once

#include <cstdint>

#include "../codecs/elementwise.h"
#include "../common/plan.h"
#include "launch.cuh"
#include "reduce.cuh"
#include "vector.cuh"

namespace gsync::cuda {

inline constexpr int kThreads = kThreadsPerBlock;
inline constexpr int kElementsPerThread = kTileElements / kThreads;
// Four blocks of 256 threads per multiprocessor: at most 64 registers a thread.
inline constexpr int kBlocksPerMultiprocessor = 4;
// Segments of at most this many partials are summed by one lane, longer ones by a warp.
inline constexpr int64_t kPartialsPerLane = 32;

// ---- element types: bits in memory, and the float they stand for ---------------------------------------------------

struct Fp32 {
  using Bits = uint32_t;
  static __device__ __forceinline__ float decode(Bits bits) { return float_of(bits); }
  static __device__ __forceinline__ Bits encode(float value) { return encode_fp32(value); }
  static __device__ __forceinline__ bool is_zero(Bits bits) { return (bits & 0x7fffffffu) == 0; }
};

struct Fp16 {
  using Bits = uint16_t;
  static __device__ __forceinline__ float decode(Bits bits) { return decode_fp16(bits); }
  static __device__ __forceinline__ Bits encode(float value) { return encode_fp16(value); }
  static __device__ __forceinline__ bool is_zero(Bits bits) { return (bits & 0x7fffu) == 0; }
};

struct Bf16 {
  using Bits = uint16_t;
  static __device__ __forceinline__ float decode(Bits bits) { return decode_bf16(bits); }
  static __device__ __forceinline__ Bits encode(float value) { return encode_bf16(value); }
  static __device__ __forceinline__ bool is_zero(Bits bits) { return (bits & 0x7fffu) == 0; }
};

// A gradient only; it goes through fp32.
struct Fp64 {
  using Bits = uint64_t;
  static __device__ __forceinline__ float decode(Bits bits) { return static_cast<float>(double_of(bits)); }
  static __device__ __forceinline__ Bits encode(float value) {
    return value != value ? 0x7ff8000000000000ull : bits_of(static_cast<double>(value));
  }
  static __device__ __forceinline__ bool is_zero(Bits bits) { return (bits & 0x7fffffffffffffffull) == 0; }
};

template <class Function>
__device__ __forceinline__ void with_code(Kind kind, Function&& function) {
  if (kind == Kind::kFp32) {
    function(Fp32());
  } else if (kind == Kind::kFp16) {
    function(Fp16());
  } else {
    function(Bf16());
  }
}

template <class Function>
__device__ __forceinline__ void with_gradient(Dtype dtype, Function&& function) {
  if (dtype == Dtype::kFp32) {
    function(Fp32());
  } else if (dtype == Dtype::kFp16) {
    function(Fp16());
  } else if (dtype == Dtype::kBf16) {
    function(Bf16());
  } else {
    function(Fp64());
  }
}

// ---- a group: the elements that one thread moves between codes and gradient at a time -----------------------------------

template <class Code, class Gradient>
struct Group {
  using CodeVector = Vector<typename Code::Bits>;
  using GradientVector = Vector<typename Gradient::Bits>;
  static constexpr int kElements =
      CodeVector::kElements > GradientVector::kElements ? CodeVector::kElements : GradientVector::kElements;
  static constexpr int kCodeVectors = kElements / CodeVector::kElements;
  static constexpr int kGradientVectors = kElements / GradientVector::kElements;
  static constexpr int kPerThread = kElementsPerThread / kElements;
};

/// Where the codes of a share's elements from `first` on lie in a chunk.
template <class Bits>
__device__ __forceinline__ Bits* codes_at(uint8_t* chunk, const Share& share, int64_t first) {
  return reinterpret_cast<Bits*>(chunk + share.codes_offset) + first;
}

template <class Bits>
__device__ __forceinline__ const Bits* codes_at(const uint8_t* chunk, const Share& share, int64_t first) {
  return reinterpret_cast<const Bits*>(chunk + share.codes_offset) + first;
}

__device__ __forceinline__ uint32_t flag_one(uint8_t flag_kind) {
  if (flag_kind == static_cast<uint8_t>(Kind::kFp32)) return 0x3f800000u;
  if (flag_kind == static_cast<uint8_t>(Kind::kFp16)) return 0x3c00u;
  if (flag_kind == static_cast<uint8_t>(Kind::kBf16)) return 0x3f80u;
  return 1;
}

__device__ __forceinline__ bool is_flag_set(const uint8_t* flags, int64_t idx, int32_t flag_bytes) {
  if (flag_bytes == 4) return reinterpret_cast<const uint32_t*>(flags)[idx] != 0;
  if (flag_bytes == 2) return reinterpret_cast<const uint16_t*>(flags)[idx] != 0;
  return flags[idx] != 0;
}

/// Writes flags `first` .. `first + numel`, and zeros up to the next 16 bytes. `is_set(idx)` tells which are on.
template <class IsSet>
__device__ __forceinline__ void write_flags(uint8_t* chunk, const Share& share, int64_t first, int numel, IsSet&& is_set) {
  uint8_t* flags = chunk + share.codes_offset;
  const int per_vector = kVectorBytes / share.block_size;
  const int padded = (numel + per_vector - 1) / per_vector * per_vector;
  for (int i = threadIdx.x; i < padded; i += kThreads) {
    const uint32_t flag = i < numel && is_set(first + i) ? flag_one(share.flag_kind) : 0;
    if (share.block_size == 4) {
      reinterpret_cast<uint32_t*>(flags)[first + i] = flag;
    } else if (share.block_size == 2) {
      reinterpret_cast<uint16_t*>(flags)[first + i] = static_cast<uint16_t>(flag);
    } else {
      flags[first + i] = static_cast<uint8_t>(flag);
    }
  }
}

/// Zeros over `numel` elements and up to the next 16 bytes.
template <class Bits>
__device__ __forceinline__ void write_zeros(Bits* begin, int numel) {
  constexpr int kElements = Vector<Bits>::kElements;
  for (int i = threadIdx.x * kElements; i < numel; i += kThreads * kElements) store_vector(begin + i, Vector<Bits>());
}

__device__ __forceinline__ int numel_of_tile(const Share& share, int64_t first) {
  const int64_t rest = share.numel - first;
  return static_cast<int>(rest < kTileElements ? rest : kTileElements);
}

// ---- unpack ----------------------------------------------------------------------------------------------------------

/// Of the values of a tile that one thread wrote.
struct Measure {
  double sum_of_squares = 0;
  bool nonfinite = false;

  __device__ __forceinline__ void add(float value) {
    nonfinite |= (gsync::bits_of(value) & 0x7f800000u) == 0x7f800000u;
    const double wide = value;
    sum_of_squares += wide * wide;
  }
};

template <class Code, class Gradient>
__device__ __forceinline__ void unpack_tile(const typename Code::Bits* codes, typename Gradient::Bits* gradient, int numel,
                                            bool failed, Measure& measure) {
  using G = Group<Code, Gradient>;
  const auto convert = [&](typename Code::Bits code) {
    return Gradient::encode(failed ? float_of(0x7fc00000u) : Code::decode(code));
  };
  const bool by_vector = gradient != nullptr && is_vector_aligned(gradient);
  const int groups = numel / G::kElements;

  typename G::CodeVector in[G::kPerThread][G::kCodeVectors];
#pragma unroll
  for (int i = 0; i < G::kPerThread; ++i) {
    const int group = threadIdx.x + i * kThreads;
    if (group >= groups) continue;
#pragma unroll
    for (int v = 0; v < G::kCodeVectors; ++v) in[i][v] = load_vector(codes + group * G::kElements + v * G::CodeVector::kElements);
  }
#pragma unroll
  for (int i = 0; i < G::kPerThread; ++i) {
    const int group = threadIdx.x + i * kThreads;
    if (group >= groups) continue;
#pragma unroll
    for (int v = 0; v < G::kGradientVectors; ++v) {
      typename G::GradientVector out;
#pragma unroll
      for (int j = 0; j < G::GradientVector::kElements; ++j) {
        const int element = v * G::GradientVector::kElements + j;
        out.element[j] = convert(element_of(in[i], element));
        measure.add(Gradient::decode(out.element[j]));
      }
      if (by_vector) store_vector(global_memory(gradient) + group * G::kElements + v * G::GradientVector::kElements, out);
    }
  }

  const int tail = groups * G::kElements + static_cast<int>(threadIdx.x);
  if (tail < numel) {
    const typename Gradient::Bits bits = convert(codes[tail]);
    measure.add(Gradient::decode(bits));
    if (gradient != nullptr) global_memory(gradient)[tail] = bits;
  }
  if (gradient == nullptr || by_vector) return;
#pragma unroll 4
  for (int i = threadIdx.x; i < groups * G::kElements; i += kThreads) global_memory(gradient)[i] = convert(codes[i]);
}

/// Adds up the partials of every segment: short ones by one lane each, in order; long ones by a warp, whose lane l takes partials
/// l, l + 32, ... before the lanes are added by tree. Both depend on the segment alone.
__device__ __forceinline__ void sum_partials(const double* partials, const SegmentPartials* segments, int64_t num_segments,
                                             double* sums) {
  const int lane = threadIdx.x % kWarpSize;
  for (int64_t base = threadIdx.x - lane; base < num_segments; base += kThreads) {
    const int64_t segment = base + lane;
    const SegmentPartials range = segment < num_segments ? segments[segment] : SegmentPartials{0, 0};
    const bool is_long = range.end - range.begin > kPartialsPerLane;
    if (segment < num_segments && !is_long) {
      double sum = 0;
      for (int64_t i = range.begin; i < range.end; ++i) sum += load_written_elsewhere(partials + i);
      sums[segment] = sum;
    }
    for (unsigned rest = __ballot_sync(kAllLanes, is_long); rest != 0; rest &= rest - 1) {
      const int owner = __ffs(static_cast<int>(rest)) - 1;
      const int64_t begin = __shfl_sync(kAllLanes, range.begin, owner);
      const int64_t end = __shfl_sync(kAllLanes, range.end, owner);
      double sum = 0;
#pragma unroll 4
      for (int64_t i = begin + lane; i < end; i += kWarpSize) sum += load_written_elsewhere(partials + i);
      sum = warp_sum(sum);
      if (lane == owner) sums[segment] = sum;
    }
  }
}

}  // namespace gsync::cuda
