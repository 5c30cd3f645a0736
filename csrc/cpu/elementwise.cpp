// CPU kernels of the codecs without a scale: fp32, fp16, bf16.
//
// Every function below is inlined into one wrapper per instruction set, so the compiler vectorises the same source for each of
// them. What a level may not change:
//   bytes   rounding is integer arithmetic (codecs/elementwise.h); products and sums are not contracted (-ffp-contract=off)
//   sums    squares go to kLanes accumulators by element index, whatever the width of a vector
#include "../codecs/elementwise.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "../common/float_control.h"
#include "kernels.h"

#if defined(__x86_64__)
#define GSYNC_AVX2 __attribute__((target("avx2")))
#define GSYNC_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#endif

#define GSYNC_INLINE inline __attribute__((always_inline))

namespace gsync::cpu {
namespace {

constexpr int64_t kLanes = 16;   // accumulators of a sum of squares: two AVX-512 registers of fp64
constexpr int64_t kStep = 256;   // elements that go through a buffer in the first-level cache
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

// Asks for kStep elements of memory 1 KiB after those at `elements`, which are about to be worked on. The hardware's own prefetch
// stops at every page: with this, pack and unpack take 0.8 to 0.9 of the time. Past the end of a tensor it does nothing.
template <Access access, typename Element>
GSYNC_INLINE void prefetch(const Element* elements) {
  constexpr uintptr_t kCacheLine = 64;
  constexpr uintptr_t kAhead = 1024;
  for (uintptr_t line = 0; line < kStep * sizeof(Element); line += kCacheLine) {
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(elements) + kAhead + line),
                       static_cast<int>(access), 3);
  }
}

// ------------------------------------------------------------------------------------------------------------------- pack

template <Kind kind, Dtype dtype>
GSYNC_INLINE void pack_codes(const typename Gradient<dtype>::Type* __restrict gradient,
                             typename Codec<kind>::Code* __restrict codes, int64_t numel, float scale) {
  for (int64_t step = 0; step < numel; step += kStep) {
    prefetch<Access::kRead>(gradient + step);
    const int64_t end = std::min(step + kStep, numel);
    for (int64_t i = step; i < end; ++i) codes[i] = Codec<kind>::encode(Gradient<dtype>::load(gradient[i]) * scale);
  }
}

template <Kind kind, Dtype dtype>
GSYNC_INLINE void count_vanished(const typename Gradient<dtype>::Type* __restrict gradient,
                                 const typename Codec<kind>::Code* __restrict codes, int64_t numel, int64_t* counters) {
  constexpr auto kMagnitude = static_cast<typename Codec<kind>::Code>(~typename Codec<kind>::Code{0}) >> 1;
  int32_t nonzero = 0;
  int32_t vanished = 0;
  for (int64_t i = 0; i < numel; ++i) {
    const int32_t is_nonzero = Gradient<dtype>::is_zero(gradient[i]) ? 0 : 1;
    nonzero += is_nonzero;
    vanished += (codes[i] & kMagnitude) == 0 ? is_nonzero : 0;
  }
  __atomic_fetch_add(&counters[0], nonzero, __ATOMIC_RELAXED);
  __atomic_fetch_add(&counters[1], vanished, __ATOMIC_RELAXED);
}

template <Kind kind, Dtype dtype>
GSYNC_INLINE void pack_tile(const PackArgs& args, const Share& share, int64_t begin, int64_t numel, uint8_t* area) {
  using Code = typename Codec<kind>::Code;
  Code* codes = reinterpret_cast<Code*>(area) + begin;
  const auto* gradient = static_cast<const typename Gradient<dtype>::Type*>(args.gradients[share.segment]);
  if (gradient == nullptr) {
    std::memset(codes, 0, numel * sizeof(Code));
  } else {
    gradient += share.element + begin;
    pack_codes<kind, dtype>(gradient, codes, numel, args.scale);
    if (args.counters != nullptr) count_vanished<kind, dtype>(gradient, codes, numel, args.counters);
  }
  if (begin + numel == share.numel) zero_tail(area, share.numel * static_cast<int64_t>(sizeof(Code)));
}

template <Kind kind>
GSYNC_INLINE void pack_tile(const PackArgs& args, const Share& share, int64_t begin, int64_t numel, uint8_t* area) {
  switch (share.dtype) {
    case Dtype::kFp32: return pack_tile<kind, Dtype::kFp32>(args, share, begin, numel, area);
    case Dtype::kFp16: return pack_tile<kind, Dtype::kFp16>(args, share, begin, numel, area);
    case Dtype::kBf16: return pack_tile<kind, Dtype::kBf16>(args, share, begin, numel, area);
    case Dtype::kFp64: return pack_tile<kind, Dtype::kFp64>(args, share, begin, numel, area);
  }
}

GSYNC_INLINE void pack_flags(const PackArgs& args, const Share& share, int64_t begin, int64_t numel, uint8_t* area) {
  const int64_t one = flag_kind_code(share.flag_kind);  // little-endian: its first block_size bytes are the flag
  for (int64_t i = begin; i < begin + numel; ++i) {
    const int64_t flag = args.gradients[i] == nullptr ? 0 : one;
    std::memcpy(area + i * share.block_size, &flag, share.block_size);
  }
  if (begin + numel == share.numel) zero_tail(area, share.numel * share.block_size);
}

GSYNC_INLINE void pack_tiles(const PackArgs& args, int64_t first, int64_t last) {
  for (int64_t t = first; t < last; ++t) {
    const Tile& tile = args.layout.tiles[t];
    const Share& share = args.layout.shares[tile.share];
    const int64_t begin = tile_begin(tile);
    const int64_t numel = tile_numel(share, begin);
    uint8_t* area = args.payload + share.chunk * args.layout.chunk_bytes + share.codes_offset;
    switch (share.kind) {
      case Kind::kFp32: pack_tile<Kind::kFp32>(args, share, begin, numel, area); break;
      case Kind::kFp16: pack_tile<Kind::kFp16>(args, share, begin, numel, area); break;
      case Kind::kBf16: pack_tile<Kind::kBf16>(args, share, begin, numel, area); break;
      case Kind::kFlags: pack_flags(args, share, begin, numel, area); break;
      case Kind::kPadding: std::memset(area + begin, 0, numel); break;
    }
  }
}

// ----------------------------------------------------------------------------------------------------------------- reduce

template <Kind kind>
GSYNC_INLINE void reduce_tile(const ReduceArgs& args, const Share& share, int64_t begin, int64_t numel) {
  using Code = typename Codec<kind>::Code;
  float sums[kStep];
  for (int64_t step = 0; step < numel; step += kStep) {
    const int64_t n = std::min(kStep, numel - step);
    for (int64_t p = 0; p < args.num_payloads; ++p) {
      const Code* __restrict codes = reinterpret_cast<const Code*>(args.payloads[p] + share.codes_offset) + begin + step;
      prefetch<Access::kRead>(codes);
      if (p == 0) {
        for (int64_t i = 0; i < n; ++i) sums[i] = Codec<kind>::decode(codes[i]);
      } else {
        for (int64_t i = 0; i < n; ++i) sums[i] += Codec<kind>::decode(codes[i]);
      }
    }
    Code* __restrict out = reinterpret_cast<Code*>(args.out + share.codes_offset) + begin + step;
    for (int64_t i = 0; i < n; ++i) out[i] = Codec<kind>::encode(sums[i] * args.scale);
  }
  if (begin + numel == share.numel) {
    zero_tail(args.out + share.codes_offset, share.numel * static_cast<int64_t>(sizeof(Code)));
  }
}

GSYNC_INLINE void reduce_flags(const ReduceArgs& args, const Share& share, int64_t begin, int64_t numel) {
  const int64_t one = flag_kind_code(share.flag_kind);
  uint8_t* area = args.out + share.codes_offset;
  for (int64_t i = begin; i < begin + numel; ++i) {
    int64_t flag = 0;
    for (int64_t p = 0; p < args.num_payloads; ++p) {
      int64_t sent = 0;
      std::memcpy(&sent, args.payloads[p] + share.codes_offset + i * share.block_size, share.block_size);
      if (sent != 0) flag = one;
    }
    std::memcpy(area + i * share.block_size, &flag, share.block_size);
  }
  if (begin + numel == share.numel) zero_tail(area, share.numel * share.block_size);
}

GSYNC_INLINE void reduce_tiles(const ReduceArgs& args, int64_t first, int64_t last) {
  for (int64_t t = first; t < last; ++t) {
    const Tile& tile = args.layout.tiles[t];
    const Share& share = args.layout.shares[tile.share];
    const int64_t begin = tile_begin(tile);
    const int64_t numel = tile_numel(share, begin);
    switch (share.kind) {
      case Kind::kFp32: reduce_tile<Kind::kFp32>(args, share, begin, numel); break;
      case Kind::kFp16: reduce_tile<Kind::kFp16>(args, share, begin, numel); break;
      case Kind::kBf16: reduce_tile<Kind::kBf16>(args, share, begin, numel); break;
      case Kind::kFlags: reduce_flags(args, share, begin, numel); break;
      case Kind::kPadding: std::memset(args.out + share.codes_offset + begin, 0, numel); break;
    }
  }
}

// ----------------------------------------------------------------------------------------------------------------- unpack

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

// Returns the tile's sum of squares, which is Inf or NaN exactly if a value is: fp64 holds the square of any fp32 number.
template <Kind kind, Dtype dtype>
GSYNC_INLINE double unpack_tile(const UnpackArgs& args, const Share& share, int64_t begin, int64_t numel, bool failed) {
  using Code = typename Codec<kind>::Code;
  using Element = typename Gradient<dtype>::Type;
  const uint8_t* area = args.payload + share.chunk * args.layout.chunk_bytes + share.codes_offset;
  auto* gradient = static_cast<Element*>(args.gradients[share.segment]);
  if (gradient != nullptr) gradient += share.element + begin;
  double lanes[kLanes] = {};
  float values[kStep];
  Element unused[kStep];
  for (int64_t step = 0; step < numel; step += kStep) {
    const int64_t n = std::min(kStep, numel - step);
    const Code* __restrict codes = reinterpret_cast<const Code*>(area) + begin + step;
    Element* __restrict elements = gradient == nullptr ? unused : gradient + step;
    prefetch<Access::kRead>(codes);
    prefetch<Access::kWrite>(elements);
    if (failed) {
      for (int64_t i = 0; i < n; ++i) values[i] = Gradient<dtype>::store(float_of(0x7fc00000u), &elements[i]);
    } else {
      for (int64_t i = 0; i < n; ++i) values[i] = Gradient<dtype>::store(Codec<kind>::decode(codes[i]), &elements[i]);
    }
    const int64_t padded = (n + kLanes - 1) / kLanes * kLanes;
    for (int64_t i = n; i < padded; ++i) values[i] = 0.0f;
    add_squares(values, padded, lanes);
  }
  return add_lanes(lanes);
}

template <Kind kind>
GSYNC_INLINE double unpack_tile(const UnpackArgs& args, const Share& share, int64_t begin, int64_t numel, bool failed) {
  switch (share.dtype) {
    case Dtype::kFp32: return unpack_tile<kind, Dtype::kFp32>(args, share, begin, numel, failed);
    case Dtype::kFp16: return unpack_tile<kind, Dtype::kFp16>(args, share, begin, numel, failed);
    case Dtype::kBf16: return unpack_tile<kind, Dtype::kBf16>(args, share, begin, numel, failed);
    case Dtype::kFp64: return unpack_tile<kind, Dtype::kFp64>(args, share, begin, numel, failed);
  }
  return 0.0;
}

GSYNC_INLINE void unpack_tiles(const UnpackArgs& args, int64_t first, int64_t last) {
  bool found_nonfinite = false;
  for (int64_t t = first; t < last; ++t) {
    const Tile& tile = args.layout.tiles[t];
    const Share& share = args.layout.shares[tile.share];
    const int64_t begin = tile_begin(tile);
    const int64_t numel = tile_numel(share, begin);
    const bool failed = args.failed != nullptr && __atomic_load_n(args.failed, __ATOMIC_RELAXED) != 0;
    double partial = 0.0;
    switch (share.kind) {
      case Kind::kFp32: partial = unpack_tile<Kind::kFp32>(args, share, begin, numel, failed); break;
      case Kind::kFp16: partial = unpack_tile<Kind::kFp16>(args, share, begin, numel, failed); break;
      case Kind::kBf16: partial = unpack_tile<Kind::kBf16>(args, share, begin, numel, failed); break;
      case Kind::kFlags:
      case Kind::kPadding: continue;
    }
    args.partials[share.first_partial + tile.index] = partial;
    found_nonfinite |= !std::isfinite(partial);
  }
  if (found_nonfinite) __atomic_store_n(args.found_nonfinite, 1, __ATOMIC_RELAXED);
}

// ------------------------------------------------------------------------------------------------------------------ levels

void pack_baseline(const PackArgs& args, int64_t first, int64_t last) { pack_tiles(args, first, last); }
void reduce_baseline(const ReduceArgs& args, int64_t first, int64_t last) { reduce_tiles(args, first, last); }
void unpack_baseline(const UnpackArgs& args, int64_t first, int64_t last) { unpack_tiles(args, first, last); }

#if defined(__x86_64__)
GSYNC_AVX2 void pack_avx2(const PackArgs& args, int64_t first, int64_t last) { pack_tiles(args, first, last); }
GSYNC_AVX2 void reduce_avx2(const ReduceArgs& args, int64_t first, int64_t last) { reduce_tiles(args, first, last); }
GSYNC_AVX2 void unpack_avx2(const UnpackArgs& args, int64_t first, int64_t last) { unpack_tiles(args, first, last); }
GSYNC_AVX512 void pack_avx512(const PackArgs& args, int64_t first, int64_t last) { pack_tiles(args, first, last); }
GSYNC_AVX512 void reduce_avx512(const ReduceArgs& args, int64_t first, int64_t last) { reduce_tiles(args, first, last); }
GSYNC_AVX512 void unpack_avx512(const UnpackArgs& args, int64_t first, int64_t last) { unpack_tiles(args, first, last); }
#endif

}  // namespace

std::vector<Level> available_levels() {
  std::vector<Level> levels = {Level::kBaseline};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2")) levels.push_back(Level::kAvx2);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    levels.push_back(Level::kAvx512);
  }
#endif
  return levels;
}

Level best_level() {
  static const Level level = available_levels().back();
  return level;
}

void pack(const PackArgs& args, int64_t first, int64_t last, Level level) {
  const FloatControl control;
  switch (level) {
#if defined(__x86_64__)
    case Level::kAvx512: return pack_avx512(args, first, last);
    case Level::kAvx2: return pack_avx2(args, first, last);
#endif
    default: return pack_baseline(args, first, last);
  }
}

void reduce(const ReduceArgs& args, int64_t first, int64_t last, Level level) {
  const FloatControl control;
  switch (level) {
#if defined(__x86_64__)
    case Level::kAvx512: return reduce_avx512(args, first, last);
    case Level::kAvx2: return reduce_avx2(args, first, last);
#endif
    default: return reduce_baseline(args, first, last);
  }
}

void unpack(const UnpackArgs& args, int64_t first, int64_t last, Level level) {
  const FloatControl control;
  switch (level) {
#if defined(__x86_64__)
    case Level::kAvx512: return unpack_avx512(args, first, last);
    case Level::kAvx2: return unpack_avx2(args, first, last);
#endif
    default: return unpack_baseline(args, first, last);
  }
}

void sum_partials(const UnpackArgs& args) {
  const FloatControl control;
  for (int64_t s = 0; s < args.layout.num_segments; ++s) {
    double sum = 0.0;
    for (int64_t p = args.segments[s].begin; p < args.segments[s].end; ++p) sum += args.partials[p];
    args.sum_of_squares[s] = sum;
  }
}

}  // namespace gsync::cpu
