// What all CPU kernels share: formats, places of tiles, prefetching, sums of squares. Each family's .cpp inlines all of it into one
// wrapper per instruction set.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "../codecs/elementwise.h"
#include "../common/kernels.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#define GSYNC_AVX2 __attribute__((target("avx2")))
#define GSYNC_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#endif

#define GSYNC_INLINE inline __attribute__((always_inline))

namespace gsync::cpu {
namespace {

constexpr int64_t kLanes = 16;  // accumulators of a sum of squares: two AVX-512 registers of fp64
constexpr int64_t kStep = 256;  // elements that go through a buffer in the first-level cache
static_assert(kTileElements % kStep == 0 && kStep % kLanes == 0);

// ---------------------------------------------------------------------------------------------------------------- formats

template <Kind kind>
struct Codec;
template <>
struct Codec<Kind::kFp32> {
  using Code = uint32_t;
  static constexpr Code kOne = 0x3f800000u;
  static GSYNC_INLINE Code encode(float x) { return encode_fp32(x); }
  static GSYNC_INLINE float decode(Code code) { return float_of(code); }
};
template <>
struct Codec<Kind::kFp16> {
  using Code = uint16_t;
  static constexpr Code kOne = 0x3c00u;
  static GSYNC_INLINE Code encode(float x) { return encode_fp16(x); }
  static GSYNC_INLINE float decode(Code code) { return decode_fp16(code); }
};
template <>
struct Codec<Kind::kBf16> {
  using Code = uint16_t;
  static constexpr Code kOne = 0x3f80u;
  static GSYNC_INLINE Code encode(float x) { return encode_bf16(x); }
  static GSYNC_INLINE float decode(Code code) { return decode_bf16(code); }
};

// A gradient's element. `store` writes y rounded to the format and returns what it wrote.
template <Dtype dtype>
struct Gradient;
template <>
struct Gradient<Dtype::kFp32> {
  using Type = uint32_t;
  static GSYNC_INLINE float load(Type bits) { return float_of(bits); }
  static GSYNC_INLINE bool is_zero(Type bits) { return (bits & 0x7fffffffu) == 0; }
  static GSYNC_INLINE float store(float y, Type* element) {
    *element = encode_fp32(y);
    return y;
  }
};
template <>
struct Gradient<Dtype::kFp16> {
  using Type = uint16_t;
  static GSYNC_INLINE float load(Type bits) { return decode_fp16(bits); }
  static GSYNC_INLINE bool is_zero(Type bits) { return (bits & 0x7fffu) == 0; }
  static GSYNC_INLINE float store(float y, Type* element) {
    *element = encode_fp16(y);
    return decode_fp16(*element);
  }
};
template <>
struct Gradient<Dtype::kBf16> {
  using Type = uint16_t;
  static GSYNC_INLINE float load(Type bits) { return decode_bf16(bits); }
  static GSYNC_INLINE bool is_zero(Type bits) { return (bits & 0x7fffu) == 0; }
  static GSYNC_INLINE float store(float y, Type* element) {
    *element = encode_bf16(y);
    return decode_bf16(*element);
  }
};
template <>
struct Gradient<Dtype::kFp64> {
  using Type = double;
  static GSYNC_INLINE float load(Type g) { return static_cast<float>(g); }
  static GSYNC_INLINE bool is_zero(Type g) { return g == 0.0; }
  static GSYNC_INLINE float store(float y, Type* element) {
    *element = y != y ? std::numeric_limits<double>::quiet_NaN() : static_cast<double>(y);
    return y;
  }
};

GSYNC_INLINE int64_t tile_begin(const Tile& tile) { return static_cast<int64_t>(tile.index) * kTileElements; }

/// Where the chunk that a share lies in is to be written.
GSYNC_INLINE uint8_t* out_chunk(const ReduceArgs& args, const Share& share) {
  return args.is_shard() ? args.out + (share.chunk - args.first_chunk) * args.layout.chunk_bytes : args.out;
}

GSYNC_INLINE int64_t tile_numel(const Share& share, int64_t begin) { return std::min(kTileElements, share.numel - begin); }

// Zeros from the end of a share's last code to the next area.
GSYNC_INLINE void zero_tail(uint8_t* area, int64_t end_bytes) {
  const int64_t rest = (kPayloadAlignment - end_bytes % kPayloadAlignment) % kPayloadAlignment;
  for (int64_t i = 0; i < rest; ++i) area[end_bytes + i] = 0;
}

GSYNC_INLINE int64_t flag_kind_code(uint8_t flag_kind) {
  switch (flag_kind) {
    case static_cast<uint8_t>(Kind::kFp32): return Codec<Kind::kFp32>::kOne;
    case static_cast<uint8_t>(Kind::kFp16): return Codec<Kind::kFp16>::kOne;
    case static_cast<uint8_t>(Kind::kBf16): return Codec<Kind::kBf16>::kOne;
    default: return 1;
  }
}

enum class Access : int { kRead = 0, kWrite = 1 };

// Asks for up to kStep elements of memory 1 KiB after those at `elements`, which are about to be worked on. The hardware's own prefetch
// stops at every page: with this, pack takes 0.85 of the time. Past the end of a tensor it does nothing.
template <Access access, typename Element>
GSYNC_INLINE void prefetch(const Element* elements) {
  constexpr uintptr_t kCacheLine = 64;
  constexpr uintptr_t kAhead = 1024;
  for (uintptr_t line = 0; line < kStep * sizeof(Element); line += kCacheLine) {
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(elements) + kAhead + line),
                       static_cast<int>(access), 3);
  }
}

// Whether an operation writes so much that its gradients are out of the caches anyway by the time somebody reads them.
GSYNC_INLINE bool writes_past_caches(const LayoutView& layout) {
  constexpr int64_t kTiles = (int64_t{4} << 20) / (kTileElements * static_cast<int64_t>(sizeof(float)));
  return layout.num_tiles >= kTiles;
}

// Copies numel elements from the first-level cache to memory, past the caches: a line that is written whole need not be read first,
// which is a third of what unpack moves. To be followed by end_stream() once, before another thread reads them.
template <typename Element>
GSYNC_INLINE void stream(Element* __restrict to, const Element* __restrict from, int64_t numel) {
#if defined(__x86_64__)
  constexpr int64_t kVector = 16 / sizeof(Element);
  const auto misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) % 16 / sizeof(Element));
  int64_t i = misaligned == 0 ? 0 : std::min(numel, kVector - misaligned);
  std::memcpy(to, from, i * sizeof(Element));
  for (; i + kVector <= numel; i += kVector) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
  }
  std::memcpy(to + i, from + i, (numel - i) * sizeof(Element));
#else
  std::memcpy(to, from, numel * sizeof(Element));
#endif
}

GSYNC_INLINE void end_stream() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Adds squares of numel values, numel a multiple of kLanes, to the accumulators.
GSYNC_INLINE void add_squares(const float* __restrict values, int64_t numel, double* __restrict lanes) {
  for (int64_t i = 0; i < numel; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const double value = values[i + lane];
      lanes[lane] += value * value;
    }
  }
}

GSYNC_INLINE double add_lanes(double* lanes) {
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

}  // namespace
}  // namespace gsync::cpu
