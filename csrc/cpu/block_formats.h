// The codecs as the CPU kernels of block.cpp see them: what an element of the array of codes is, and where scales lie.
#pragma once

#include <type_traits>

#include "../codecs/block.h"
#include "formats.h"

namespace gsync::cpu {
namespace {

constexpr int64_t kMaxStep = kMaxBlock;

// ---------------------------------------------------------------------------------------------------------------- formats

// Code: what one element of the array of codes is; int4 has two in it.
template <Kind kind>
struct Format {
  using Code = typename Codec<kind>::Code;
  static constexpr bool kHasScale = false;
  static constexpr int64_t kUsualBlock = kElementwiseBlock;
  static GSYNC_INLINE Code encode(float x) { return Codec<kind>::encode(x); }
  static GSYNC_INLINE Code encode(float x, [[maybe_unused]] uint32_t word) {
    if constexpr (kind == Kind::kFp16) {
      return encode_fp16(x, word);
    } else if constexpr (kind == Kind::kBf16) {
      return encode_bf16(x, word);
    } else {
      return encode_fp32(x);
    }
  }
  static GSYNC_INLINE float decode(Code code) { return Codec<kind>::decode(code); }
};

template <class Rule, int64_t kBlock>
struct Scaled : Rule {
  using Code = uint8_t;
  static constexpr bool kHasScale = true;
  static constexpr int64_t kUsualBlock = kBlock;
};
template <>
struct Format<Kind::kFp8E4m3> : Scaled<Fp8E4m3, 256> {};
template <>
struct Format<Kind::kFp8E5m2> : Scaled<Fp8E5m2, 256> {};
template <>
struct Format<Kind::kInt8> : Scaled<Int8, 256> {};
template <>
struct Format<Kind::kInt4> : Scaled<Int4, 64> {};

template <Kind kind>
constexpr bool kIsInt4 = kind == Kind::kInt4;
template <Kind kind>
constexpr int64_t kScaleBytes = kIsInt4<kind> ? 2 : 4;

// Bytes of the codes of `numel` elements, numel even but for the last of a share.
template <Kind kind>
GSYNC_INLINE int64_t codes_bytes(int64_t numel) {
  return kIsInt4<kind> ? (numel + 1) / 2 : numel * static_cast<int64_t>(sizeof(typename Format<kind>::Code));
}

template <Kind kind>
GSYNC_INLINE float load_scale(const uint8_t* scales, int64_t block) {
  if constexpr (kIsInt4<kind>) {
    return decode_bf16(reinterpret_cast<const uint16_t*>(scales)[block]);
  } else {
    return reinterpret_cast<const float*>(scales)[block];
  }
}

template <Kind kind>
GSYNC_INLINE void store_scale(uint8_t* scales, int64_t block, float scale) {
  if constexpr (kIsInt4<kind>) {
    reinterpret_cast<uint16_t*>(scales)[block] = static_cast<uint16_t>(bits_of(scale) >> 16);
  } else {
    reinterpret_cast<float*>(scales)[block] = scale;
  }
}

// Two codes to a byte, the first in the low half. Past an odd end `codes` is 0.
GSYNC_INLINE void join_halves(const uint8_t* __restrict codes, uint8_t* __restrict bytes, int64_t numel) {
  for (int64_t i = 0; i < (numel + 1) / 2; ++i) {
    uint16_t pair;  // little-endian: the first code in its low byte
    std::memcpy(&pair, codes + 2 * i, sizeof(pair));
    bytes[i] = static_cast<uint8_t>(pair | (pair >> 4));
  }
}

GSYNC_INLINE void split_halves(const uint8_t* __restrict bytes, uint8_t* __restrict codes, int64_t numel) {
  for (int64_t i = 0; i < (numel + 1) / 2; ++i) {
    const auto pair = static_cast<uint16_t>((bytes[i] & 0x0fu) | ((bytes[i] & 0xf0u) << 4));
    std::memcpy(codes + 2 * i, &pair, sizeof(pair));
  }
}

// Calls `function(first, numel)` for each block of `numel` elements; with the constant where a block has the codec's usual size.
template <Kind kind, class Function>
GSYNC_INLINE void for_blocks(int64_t block_size, int64_t numel, const Function& function) {
  constexpr int64_t kUsual = Format<kind>::kUsualBlock;
  int64_t first = 0;
  if (block_size == kUsual) {
    for (; first + kUsual <= numel; first += kUsual) function(first, std::integral_constant<int64_t, kUsual>());
  }
  for (; first < numel; first += block_size) function(first, std::min(block_size, numel - first));
}

// Calls `function` with the kind as a constant.
template <class Function>
GSYNC_INLINE void with_kind(Kind kind, const Function& function) {
  switch (kind) {
    case Kind::kFp32: return function(std::integral_constant<Kind, Kind::kFp32>());
    case Kind::kFp16: return function(std::integral_constant<Kind, Kind::kFp16>());
    case Kind::kBf16: return function(std::integral_constant<Kind, Kind::kBf16>());
    case Kind::kFp8E4m3: return function(std::integral_constant<Kind, Kind::kFp8E4m3>());
    case Kind::kFp8E5m2: return function(std::integral_constant<Kind, Kind::kFp8E5m2>());
    case Kind::kInt8: return function(std::integral_constant<Kind, Kind::kInt8>());
    case Kind::kInt4: return function(std::integral_constant<Kind, Kind::kInt4>());
    default: return;
  }
}

template <class Function>
GSYNC_INLINE void with_dtype(Dtype dtype, const Function& function) {
  switch (dtype) {
    case Dtype::kFp32: return function(Gradient<Dtype::kFp32>());
    case Dtype::kFp16: return function(Gradient<Dtype::kFp16>());
    case Dtype::kBf16: return function(Gradient<Dtype::kBf16>());
    case Dtype::kFp64: return function(Gradient<Dtype::kFp64>());
  }
}

GSYNC_INLINE int64_t step_of(const Share& share) { return std::max<int64_t>(kStep, share.block_size); }

GSYNC_INLINE int64_t num_blocks(const Share& share, int64_t numel) { return (numel + share.block_size - 1) / share.block_size; }

GSYNC_INLINE bool is_finite(float value) { return (bits_of(value) & 0x7f800000u) != 0x7f800000u; }

}  // namespace
}  // namespace gsync::cpu
