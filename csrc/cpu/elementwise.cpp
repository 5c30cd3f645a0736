// CPU kernels of the codecs without a scale: fp32, fp16, bf16.
//
// Every function below is inlined into one wrapper per instruction set, so the compiler vectorises the same source for each of
// them. What a level may not change:
//   bytes   rounding is integer arithmetic (codecs/elementwise.h); products and sums are not contracted (-ffp-contract=off)
//   sums    squares go to kLanes accumulators by element index, whatever the width of a vector
#include <cmath>

#include "../common/float_control.h"
#include "families.h"
#include "formats.h"

namespace gsync::cpu {
namespace {

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
      default: break;  // never asked for
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
  uint8_t* area = out_chunk(args, share) + share.codes_offset;
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
      case Kind::kPadding: std::memset(out_chunk(args, share) + share.codes_offset + begin, 0, numel); break;
      default: break;  // never asked for
    }
  }
}

// ----------------------------------------------------------------------------------------------------------------- unpack

// Returns the tile's sum of squares, which is Inf or NaN exactly if a value is: fp64 holds the square of any fp32 number.
template <Kind kind, Dtype dtype>
GSYNC_INLINE double unpack_tile(const UnpackArgs& args, const Share& share, int64_t begin, int64_t numel, bool streams,
                                bool failed) {
  using Code = typename Codec<kind>::Code;
  using Element = typename Gradient<dtype>::Type;
  const uint8_t* area = args.payload + share.chunk * args.layout.chunk_bytes + share.codes_offset;
  auto* gradient = static_cast<Element*>(args.gradients[share.segment]);
  if (gradient != nullptr) gradient += share.element + begin;
  streams = streams && gradient != nullptr;
  double lanes[kLanes] = {};
  float values[kStep];
  Element buffered[kStep];
  for (int64_t step = 0; step < numel; step += kStep) {
    const int64_t n = std::min(kStep, numel - step);
    const Code* __restrict codes = reinterpret_cast<const Code*>(area) + begin + step;
    Element* __restrict elements = gradient == nullptr || streams ? buffered : gradient + step;
    prefetch<Access::kRead>(codes);
    if (!streams) prefetch<Access::kWrite>(elements);
    if (failed) {
      for (int64_t i = 0; i < n; ++i) values[i] = Gradient<dtype>::store(float_of(0x7fc00000u), &elements[i]);
    } else {
      for (int64_t i = 0; i < n; ++i) values[i] = Gradient<dtype>::store(Codec<kind>::decode(codes[i]), &elements[i]);
    }
    if (streams) stream(gradient + step, elements, n);
    const int64_t padded = (n + kLanes - 1) / kLanes * kLanes;
    for (int64_t i = n; i < padded; ++i) values[i] = 0.0f;
    add_squares(values, padded, lanes);
  }
  return add_lanes(lanes);
}

template <Kind kind>
GSYNC_INLINE double unpack_tile(const UnpackArgs& args, const Share& share, int64_t begin, int64_t numel, bool streams,
                                bool failed) {
  switch (share.dtype) {
    case Dtype::kFp32: return unpack_tile<kind, Dtype::kFp32>(args, share, begin, numel, streams, failed);
    case Dtype::kFp16: return unpack_tile<kind, Dtype::kFp16>(args, share, begin, numel, streams, failed);
    case Dtype::kBf16: return unpack_tile<kind, Dtype::kBf16>(args, share, begin, numel, streams, failed);
    case Dtype::kFp64: return unpack_tile<kind, Dtype::kFp64>(args, share, begin, numel, streams, failed);
  }
  return 0.0;
}

GSYNC_INLINE void unpack_tiles(const UnpackArgs& args, int64_t first, int64_t last) {
  const bool streams = writes_past_caches(args.layout);
  bool found_nonfinite = false;
  for (int64_t t = first; t < last; ++t) {
    const Tile& tile = args.layout.tiles[t];
    const Share& share = args.layout.shares[tile.share];
    const int64_t begin = tile_begin(tile);
    const int64_t numel = tile_numel(share, begin);
    const bool failed = args.failed != nullptr && __atomic_load_n(args.failed, __ATOMIC_RELAXED) != 0;
    double partial = 0.0;
    switch (share.kind) {
      case Kind::kFp32: partial = unpack_tile<Kind::kFp32>(args, share, begin, numel, streams, failed); break;
      case Kind::kFp16: partial = unpack_tile<Kind::kFp16>(args, share, begin, numel, streams, failed); break;
      case Kind::kBf16: partial = unpack_tile<Kind::kBf16>(args, share, begin, numel, streams, failed); break;
      default: continue;
    }
    args.partials[share.first_partial + tile.index] = partial;
    found_nonfinite |= !std::isfinite(partial);
  }
  if (streams) end_stream();
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

namespace elementwise {

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

}  // namespace elementwise
}  // namespace gsync::cpu
