// CPU kernels of the codecs with one scale per block, and of every codec under EncodeOptions.
//
// A tile goes through buffers in the first-level cache, kStep elements at a time or one block if that is larger:
//
//   1. values   pack: gradient * scale; reduce: sum over ranks * scale; both + residual
//   2. scales   of each block, from the integer maximum of its magnitudes
//   3. codes    and, where there is a residual, what they lost
//
// One loop over a whole block, its length a constant where it is the codec's usual one, so that the compiler vectorises each
// without a remainder. See elementwise.cpp for what an instruction set may not change.
#include <cmath>

#include "../common/float_control.h"
#include "../common/philox.h"
#include "block_formats.h"
#include "families.h"

namespace gsync::cpu {
namespace {

// ----------------------------------------------------------------------------------------------------------------- decode

// Values of elements first .. first + numel - 1 of the share, written to x or added to it.
template <Kind kind, bool kAdd>
GSYNC_INLINE void decode_step(const uint8_t* chunk, const Share& share, int64_t first, int64_t numel, float* __restrict x) {
  using F = Format<kind>;
  using Code = typename F::Code;
  const uint8_t* bytes = chunk + share.codes_offset + codes_bytes<kind>(first);
  const uint8_t* scales = chunk + share.scales_offset;
  prefetch<Access::kRead>(bytes);
  Code halves[kIsInt4<kind> ? kMaxStep + 1 : 1];
  if constexpr (kIsInt4<kind>) split_halves(bytes, halves, numel);
  const Code* __restrict codes = kIsInt4<kind> ? halves : reinterpret_cast<const Code*>(bytes);
  int64_t block = F::kHasScale ? first / share.block_size : 0;
  for_blocks<kind>(share.block_size, numel, [&](int64_t begin, auto count) __attribute__((always_inline)) {
    float scale = 1.0f;
    if constexpr (F::kHasScale) {
      scale = load_scale<kind>(scales, block++);
      if (needs_clamp(F::kMax, scale)) {
        for (int64_t i = 0, n = count; i < n; ++i) {
          const float value = decode_scaled(F::decode(codes[begin + i]), scale);
          x[begin + i] = kAdd ? x[begin + i] + value : value;
        }
        return;
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      float value = F::decode(codes[begin + i]);
      if constexpr (F::kHasScale) value *= scale;
      x[begin + i] = kAdd ? x[begin + i] + value : value;
    }
  });
}

// ----------------------------------------------------------------------------------------------------------------- encode

GSYNC_INLINE uint32_t absmax_bits(const float* x, int64_t numel) {
  uint32_t absmax = 0;
  for (int64_t i = 0; i < numel; ++i) {
    const uint32_t magnitude = bits_of(x[i]) & 0x7fffffffu;
    absmax = magnitude > absmax ? magnitude : absmax;
  }
  return absmax;
}

// Codes of one block with a usable scale, or of a run of elements without one. `lost` becomes x - decoded; it stays where the code
// is not finite.
template <Kind kind, bool kStochastic, bool kLost, class Numel>
GSYNC_INLINE void encode_values(const float* __restrict x, Numel numel, BlockScale scale, const uint32_t* __restrict words,
                                typename Format<kind>::Code* __restrict codes, float* __restrict lost) {
  using F = Format<kind>;
  for (int64_t i = 0; i < numel; ++i) {
    float y = x[i];
    if constexpr (F::kHasScale) y *= scale.inv;
    const auto code = kStochastic ? F::encode(y, words[i]) : F::encode(y);
    codes[i] = static_cast<typename F::Code>(code);
  }
  if constexpr (!kLost) return;
  if constexpr (F::kHasScale) {
    if (needs_clamp(F::kMax, scale.scale)) {
      for (int64_t i = 0, n = numel; i < n; ++i) lost[i] = x[i] - decode_scaled(F::decode(codes[i]), scale.scale);
      return;
    }
  }
  for (int64_t i = 0; i < numel; ++i) {
    if constexpr (F::kHasScale) {
      lost[i] = x[i] - F::decode(codes[i]) * scale.scale;
    } else {
      const float decoded = F::decode(codes[i]);
      const float error = x[i] - decoded;
      lost[i] = is_finite(decoded) ? error : lost[i];
    }
  }
}

// Encodes x[0, numel), elements first .. of the share: whole blocks, but for the share's last. lost, words: null if not wanted.
template <Kind kind>
GSYNC_INLINE void encode_step(const Share& share, uint8_t* chunk, int64_t first, int64_t numel, const float* x,
                              const uint32_t* words, float* lost) {
  using F = Format<kind>;
  using Code = typename F::Code;
  uint8_t* bytes = chunk + share.codes_offset + codes_bytes<kind>(first);
  uint8_t* scales = chunk + share.scales_offset;
  Code halves[kIsInt4<kind> ? kMaxStep + 1 : 1];
  Code* codes = kIsInt4<kind> ? halves : reinterpret_cast<Code*>(bytes);
  float unused[kMaxStep];
  int64_t block = F::kHasScale ? first / share.block_size : 0;
  for_blocks<kind>(share.block_size, numel, [&](int64_t begin, auto count) __attribute__((always_inline)) {
    constexpr bool kIsUsual = !std::is_same_v<decltype(count), int64_t>;
    BlockScale scale{0.0f, 0.0f};
    if constexpr (F::kHasScale) {
      scale = F::scale_of(absmax_bits(x + begin, count));
      store_scale<kind>(scales, block++, scale.scale);
      if (scale.inv == 0.0f) {
        std::memset(codes + begin, 0, count * sizeof(Code));
        // Scale NaN: nothing that could be carried over.
        if (scale.scale == 0.0f && lost != nullptr) std::memcpy(lost + begin, x + begin, count * sizeof(float));
        return;
      }
    }
    if (words != nullptr) {
      const int64_t n = count;
      encode_values<kind, true, true>(x + begin, n, scale, words + begin, codes + begin,
                                      (lost == nullptr ? unused : lost) + begin);
      return;
    }
    if constexpr (kIsUsual && F::kHasScale) {
      if (lost == nullptr) {
        encode_values<kind, false, false>(x + begin, count, scale, words, codes + begin, lost);
      } else {
        encode_values<kind, false, true>(x + begin, count, scale, words, codes + begin, lost + begin);
      }
    } else {
      const int64_t n = count;
      encode_values<kind, false, true>(x + begin, n, scale, words, codes + begin, (lost == nullptr ? unused : lost) + begin);
    }
  });
  if constexpr (kIsInt4<kind>) {
    halves[numel] = 0;
    join_halves(halves, bytes, numel);
  }
}

// Zeros after the share's codes and scales, by its last tile.
template <Kind kind>
GSYNC_INLINE void finish_share(const Share& share, uint8_t* chunk) {
  zero_tail(chunk + share.codes_offset, codes_bytes<kind>(share.numel));
  if constexpr (Format<kind>::kHasScale) {
    uint8_t* end = chunk + share.scales_offset + num_blocks(share, share.numel) * kScaleBytes<kind>;
    for (int64_t i = 0; i < share.scales_padding; ++i) end[i] = 0;
  }
}

// What zeros encode to.
template <Kind kind>
GSYNC_INLINE void write_zeros(const Share& share, int64_t begin, int64_t numel, uint8_t* chunk) {
  std::memset(chunk + share.codes_offset + codes_bytes<kind>(begin), 0, codes_bytes<kind>(numel));
  if constexpr (Format<kind>::kHasScale) {
    std::memset(chunk + share.scales_offset + begin / share.block_size * kScaleBytes<kind>, 0,
                num_blocks(share, numel) * kScaleBytes<kind>);
  }
}

GSYNC_INLINE void fill_words(uint64_t key, uint64_t name_hash, int64_t element, int64_t numel, uint32_t* words) {
  for (int64_t i = 0; i < numel; i += 4) {
    const PhiloxWords quad = philox(key, name_hash, static_cast<uint64_t>(element + i) / 4);
    for (int64_t j = 0; j < 4; ++j) words[i + j] = quad.word[j];
  }
}

// ---------------------------------------------------------------------------------------------------------------- measure

struct ErrorLanes {
  double residual_squares[kLanes] = {};
  double input_squares[kLanes] = {};
  int64_t nonzero = 0;
  int64_t vanished = 0;
};

// What encoding x to `decoded` did to it. Both are overwritten.
GSYNC_INLINE void measure(float* __restrict x, float* __restrict decoded, int64_t numel, ErrorLanes& lanes) {
  uint32_t nonzero = 0;
  uint32_t vanished = 0;
  // In integers, without a branch: the compiler does not vectorise it otherwise.
  for (int64_t i = 0; i < numel; ++i) {
    const uint32_t input = bits_of(x[i]);
    const uint32_t output = bits_of(decoded[i]);
    const uint32_t error = bits_of(x[i] - decoded[i]);
    const uint32_t finite = (output & 0x7f800000u) != 0x7f800000u ? 1u : 0u;
    const uint32_t counts = ((input & 0x7fffffffu) != 0 ? 1u : 0u) & finite;
    nonzero += counts;
    vanished += ((output & 0x7fffffffu) == 0 ? 1u : 0u) & counts;
    decoded[i] = float_of(error & (0u - finite));
    x[i] = float_of(input & (0u - finite));
  }
  lanes.nonzero += nonzero;
  lanes.vanished += vanished;
  const int64_t padded = (numel + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = numel; i < padded; ++i) x[i] = decoded[i] = 0.0f;
  add_squares(decoded, padded, lanes.residual_squares);
  add_squares(x, padded, lanes.input_squares);
}

GSYNC_INLINE void add_error_sums(ErrorLanes& lanes, double* sums) {
  sums[kResidualSquares] += add_lanes(lanes.residual_squares);
  sums[kInputSquares] += add_lanes(lanes.input_squares);
  sums[kNonzero] += static_cast<double>(lanes.nonzero);
  sums[kVanished] += static_cast<double>(lanes.vanished);
}

// --------------------------------------------------------------------------------------------------------- pack and reduce

// Both end in the same encoding and differ in where the values come from.
struct Source {
  const PackArgs* pack;  // or null
  const ReduceArgs* reduce;  // or null
};

GSYNC_INLINE void pack_values(const PackArgs& args, const Share& share, int64_t first, int64_t numel, float* __restrict x) {
  with_dtype(share.dtype, [&](auto gradient) __attribute__((always_inline)) {
    using G = decltype(gradient);
    const auto* g = static_cast<const typename G::Type*>(args.gradients[share.segment]) + share.element + first;
    const float scale = args.scale;
    prefetch<Access::kRead>(g);
    for (int64_t i = 0; i < numel; ++i) x[i] = G::load(g[i]) * scale;
  });
}

// The elements of a gradient that are not zero, and those of them that were decoded as zero.
GSYNC_INLINE void count_vanished(const PackArgs& args, const Share& share, int64_t first, int64_t numel,
                                 const float* __restrict decoded) {
  int32_t nonzero = 0;
  int32_t vanished = 0;
  with_dtype(share.dtype, [&](auto gradient) __attribute__((always_inline)) {
    using G = decltype(gradient);
    const auto* g = static_cast<const typename G::Type*>(args.gradients[share.segment]) + share.element + first;
    for (int64_t i = 0; i < numel; ++i) {
      const int32_t is_nonzero = G::is_zero(g[i]) ? 0 : 1;
      nonzero += is_nonzero;
      vanished += decoded[i] == 0.0f ? is_nonzero : 0;
    }
  });
  __atomic_fetch_add(&args.counters[0], nonzero, __ATOMIC_RELAXED);
  __atomic_fetch_add(&args.counters[1], vanished, __ATOMIC_RELAXED);
}

// sent: the share as the payloads have it, `offset` bytes after their beginning.
GSYNC_INLINE void reduce_values(const ReduceArgs& args, const Share& sent, int64_t offset, int64_t first, int64_t numel,
                                float* __restrict x) {
  with_kind(sent.kind, [&](auto kind) __attribute__((always_inline)) {
    for (int64_t i = 0; i < numel; ++i) x[i] = -0.0f;  // the one number that adding to changes nothing, zeros included
    for (int64_t p = 0; p < args.num_payloads; ++p)
      decode_step<kind.value, true>(args.payloads[p] + offset, sent, first, numel, x);
  });
  const float scale = args.scale;
  for (int64_t i = 0; i < numel; ++i) x[i] *= scale;
}

// Whether a rank used the parameter.
GSYNC_INLINE bool is_used(const ReduceArgs& args, const Share& share) {
  const int64_t flag_bytes = args.layout.flag_bytes;
  for (int64_t p = 0; p < args.num_payloads; ++p) {
    int64_t flag = 0;
    std::memcpy(&flag, args.payloads[p] + share.segment * flag_bytes, flag_bytes);
    if (flag != 0) return true;
  }
  return false;
}

GSYNC_INLINE void encode_tile(const Source& source, const EncodeOptions& options, int32_t share_idx, const Share& share,
                              int64_t begin, int64_t numel, uint8_t* chunk, double* sums) {
  float* residual = options.residuals == nullptr ? nullptr : options.residuals[share.segment];
  if (residual != nullptr) residual += share.element;
  const bool is_there = source.pack != nullptr ? source.pack->gradients[share.segment] != nullptr
                                               : residual == nullptr || is_used(*source.reduce, share);
  const bool is_last = begin + numel == share.numel;
  if (!is_there) {
    with_kind(share.kind, [&](auto kind) __attribute__((always_inline)) {
      write_zeros<kind.value>(share, begin, numel, chunk);
      if (is_last) finish_share<kind.value>(share, chunk);
    });
    return;
  }
  const bool counts = source.pack != nullptr && source.pack->counters != nullptr && is_elementwise(share.kind);
  ErrorLanes lanes;
  float x[kMaxStep];
  float decoded[kMaxStep];
  uint32_t words[kMaxStep];
  for (int64_t first = begin; first < begin + numel; first += step_of(share)) {
    const int64_t n = std::min(step_of(share), begin + numel - first);
    // 1. Values.
    if (source.pack != nullptr) {
      pack_values(*source.pack, share, first, n, x);
    } else {
      const ReduceArgs& args = *source.reduce;
      const bool is_shard = args.is_shard();
      reduce_values(args, is_shard ? args.sent_shares[share_idx] : share,
                    is_shard ? (share.chunk - args.first_chunk) * args.sent_chunk_bytes : 0, first, n, x);
    }
    if (residual != nullptr) {
      const float* r = residual + first;
      prefetch<Access::kWrite>(r);
      for (int64_t i = 0; i < n; ++i) x[i] += r[i];
    }
    if (options.stochastic) fill_words(options.random_key, share.name_hash, share.element + first, n, words);
    // 2. and 3. Scales and codes.
    with_kind(share.kind, [&](auto kind) __attribute__((always_inline)) {
      encode_step<kind.value>(share, chunk, first, n, x, options.stochastic ? words : nullptr,
                              residual == nullptr ? nullptr : residual + first);
      if (sums != nullptr || counts) decode_step<kind.value, false>(chunk, share, first, n, decoded);
      if (is_last && first + n == share.numel) finish_share<kind.value>(share, chunk);
    });
    if (counts) count_vanished(*source.pack, share, first, n, decoded);
    if (sums != nullptr) measure(x, decoded, n, lanes);
  }
  if (sums != nullptr) add_error_sums(lanes, sums);
}

GSYNC_INLINE void encode_tiles(const Source& source, int64_t first, int64_t last) {
  const LayoutView& layout = source.pack != nullptr ? source.pack->layout : source.reduce->layout;
  const EncodeOptions& options = source.pack != nullptr ? source.pack->encode : source.reduce->encode;
  for (int64_t t = first; t < last; ++t) {
    const Tile& tile = layout.tiles[t];
    const Share& share = layout.shares[tile.share];
    const int64_t begin = tile_begin(tile);
    uint8_t* chunk =
        source.pack != nullptr ? source.pack->payload + share.chunk * layout.chunk_bytes : out_chunk(*source.reduce, share);
    double* sums = options.error_sums == nullptr ? nullptr : options.error_sums + t * kErrorSums;
    encode_tile(source, options, tile.share, share, begin, tile_numel(share, begin), chunk, sums);
  }
}

// ----------------------------------------------------------------------------------------------------------------- unpack

GSYNC_INLINE double unpack_tile(const UnpackArgs& args, const Share& share, int64_t begin, int64_t numel, bool streams,
                                bool failed) {
  const uint8_t* chunk = args.payload + share.chunk * args.layout.chunk_bytes;
  void* gradient = args.gradients[share.segment];
  streams = streams && gradient != nullptr;
  double lanes[kLanes] = {};
  float values[kMaxStep];
  for (int64_t first = begin; first < begin + numel; first += step_of(share)) {
    const int64_t n = std::min(step_of(share), begin + numel - first);
    with_kind(share.kind, [&](auto kind) __attribute__((always_inline)) {
      if constexpr (Format<kind.value>::kHasScale) decode_step<kind.value, false>(chunk, share, first, n, values);
    });
    if (failed) {
      for (int64_t i = 0; i < n; ++i) values[i] = float_of(kNanBits);
    }
    with_dtype(share.dtype, [&](auto format) __attribute__((always_inline)) {
      using G = decltype(format);
      typename G::Type buffered[kMaxStep];
      auto* place = gradient == nullptr ? buffered : static_cast<typename G::Type*>(gradient) + share.element + first;
      auto* __restrict elements = streams ? buffered : place;
      if (!streams) prefetch<Access::kWrite>(elements);
      for (int64_t i = 0; i < n; ++i) values[i] = G::store(values[i], &elements[i]);
      if (streams) stream(place, elements, n);
    });
    const int64_t padded = (n + kLanes - 1) / kLanes * kLanes;
    for (int64_t i = n; i < padded; ++i) values[i] = 0.0f;
    add_squares(values, padded, lanes);
  }
  return add_lanes(lanes);
}

GSYNC_INLINE void unpack_tiles(const UnpackArgs& args, int64_t first, int64_t last) {
  const bool streams = writes_past_caches(args.layout);
  bool found_nonfinite = false;
  for (int64_t t = first; t < last; ++t) {
    const Tile& tile = args.layout.tiles[t];
    const Share& share = args.layout.shares[tile.share];
    const int64_t begin = tile_begin(tile);
    const bool failed = args.failed != nullptr && __atomic_load_n(args.failed, __ATOMIC_RELAXED) != 0;
    const double partial = unpack_tile(args, share, begin, tile_numel(share, begin), streams, failed);
    args.partials[share.first_partial + tile.index] = partial;
    found_nonfinite |= !std::isfinite(partial);
  }
  if (streams) end_stream();
  if (found_nonfinite) __atomic_store_n(args.found_nonfinite, 1, __ATOMIC_RELAXED);
}

// ------------------------------------------------------------------------------------------------------------------ levels

void pack_baseline(const PackArgs& args, int64_t first, int64_t last) { encode_tiles({&args, nullptr}, first, last); }
void reduce_baseline(const ReduceArgs& args, int64_t first, int64_t last) { encode_tiles({nullptr, &args}, first, last); }
void unpack_baseline(const UnpackArgs& args, int64_t first, int64_t last) { unpack_tiles(args, first, last); }

#if defined(__x86_64__)
GSYNC_AVX2 void pack_avx2(const PackArgs& args, int64_t first, int64_t last) { encode_tiles({&args, nullptr}, first, last); }
GSYNC_AVX2 void reduce_avx2(const ReduceArgs& args, int64_t first, int64_t last) { encode_tiles({nullptr, &args}, first, last); }
GSYNC_AVX2 void unpack_avx2(const UnpackArgs& args, int64_t first, int64_t last) { unpack_tiles(args, first, last); }
GSYNC_AVX512 void pack_avx512(const PackArgs& args, int64_t first, int64_t last) { encode_tiles({&args, nullptr}, first, last); }
GSYNC_AVX512 void reduce_avx512(const ReduceArgs& args, int64_t first, int64_t last) {
  encode_tiles({nullptr, &args}, first, last);
}
GSYNC_AVX512 void unpack_avx512(const UnpackArgs& args, int64_t first, int64_t last) { unpack_tiles(args, first, last); }
#endif

}  // namespace

namespace block {

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

}  // namespace block
}  // namespace gsync::cpu
