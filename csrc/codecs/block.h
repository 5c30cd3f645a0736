// Codecs with one scale per block: fp8_e4m3, fp8_e5m2, int8, int4. One value at a time, the same bits on the host and on a device.
//
//   inv = fmax / absmax, scale = absmax / fmax      (int4: scale = absmax / 7 rounded up to bf16, inv = 1 / scale)
//   code = round(clamp(x * inv, -fmax, fmax))       decoded = clamp(code * scale, -FLT_MAX, FLT_MAX)
//
// The rounding of inv carries one maximum in eight past fmax, by less than 2^-22 of it: rounding to nearest brings it back, rounding
// up at random does not, so there the clamp has to come first. A block whose
// absmax is below 2^-80 is sent as zeros (inv would leave fp32's range); one that holds Inf or NaN has scale NaN and codes 0.
// Multiplications and additions must not be fused.
#pragma once

#include <cstdint>

#include "../common/host_device.h"

namespace gsync {

inline constexpr uint32_t kAbsmaxNonfinite = 0x7f800000u;  // absmax bits from here on: Inf or NaN
inline constexpr uint32_t kAbsmaxZero = 0x17800000u;  // absmax bits below: 2^-80, a zero block
inline constexpr uint32_t kNanBits = 0x7fc00000u;
inline constexpr float kFloatMax = 3.40282346638528859812e+38f;

/// What one block is encoded with. inv = 0 encodes everything as zero.
struct BlockScale {
  float scale;
  float inv;
};

GSYNC_HOST_DEVICE float clamp_magnitude(float value, float limit) {
  // NaN passes: both comparisons are false.
  value = value > limit ? limit : value;
  return value < -limit ? -limit : value;
}

/// Whether the largest code of a block exceeds fp32, or its scale is NaN. If not, decode_scaled is a product.
GSYNC_HOST_DEVICE bool needs_clamp(float fmax, float scale) { return (bits_of(fmax * scale) & 0x7f800000u) == 0x7f800000u; }

GSYNC_HOST_DEVICE float decode_scaled(float code, float scale) { return clamp_magnitude(code * scale, kFloatMax); }

/// Scale of a block from the bits of its largest magnitude, for the codecs with an fp32 scale.
GSYNC_HOST_DEVICE BlockScale block_scale(uint32_t absmax_bits, float fmax) {
  if (absmax_bits >= kAbsmaxNonfinite) return {float_of(kNanBits), 0.0f};
  if (absmax_bits < kAbsmaxZero) return {0.0f, 0.0f};
  const float absmax = float_of(absmax_bits);
  return {absmax / fmax, fmax / absmax};
}

// Each codec: kMax, its bits, and value of a code, code of a value by rounding to nearest even or by one random word. `y` is
// x * inv, never NaN; where inv is 0 the code is 0 without asking.

/// The random word as a number in [0, 1).
GSYNC_HOST_DEVICE float unit_of(uint32_t word) {
  return static_cast<float>(static_cast<int32_t>(word >> 8)) * 5.9604644775390625e-8f;
}

template <int kBitsOfCode>
struct Integer {
  static constexpr int kBits = kBitsOfCode;
  static constexpr float kMax = static_cast<float>((1 << (kBits - 1)) - 1);
  static constexpr uint32_t kMask = (1u << kBits) - 1u;
  static constexpr uint32_t kSign = 1u << (kBits - 1);

  /// In two's complement. Below 2^22 the addition of 1.5 * 2^23 leaves no fraction, and the integer in the low bits of the sum.
  GSYNC_HOST_DEVICE static uint32_t encode(float y) { return bits_of(y + 12582912.0f) & kMask; }
  GSYNC_HOST_DEVICE static uint32_t encode(float y, uint32_t word) {
    y = clamp_magnitude(y, kMax);
    const int32_t truncated = static_cast<int32_t>(y);
    const int32_t below = truncated - (static_cast<float>(truncated) > y ? 1 : 0);
    const float fraction = y - static_cast<float>(below);
    return static_cast<uint32_t>(below + (unit_of(word) < fraction ? 1 : 0)) & kMask;
  }
  GSYNC_HOST_DEVICE static float decode(uint32_t code) {
    return static_cast<float>(static_cast<int32_t>(code ^ kSign) - static_cast<int32_t>(kSign));
  }
  GSYNC_HOST_DEVICE static BlockScale scale_of(uint32_t absmax_bits);
};

using Int8 = Integer<8>;
using Int4 = Integer<4>;

template <>
GSYNC_HOST_DEVICE BlockScale Int8::scale_of(uint32_t absmax_bits) {
  return block_scale(absmax_bits, kMax);
}

template <>
GSYNC_HOST_DEVICE BlockScale Int4::scale_of(uint32_t absmax_bits) {
  if (absmax_bits >= kAbsmaxNonfinite) return {float_of(kNanBits), 0.0f};
  if (absmax_bits < kAbsmaxZero) return {0.0f, 0.0f};
  // Up to bf16, so that absmax * inv stays at or below 7 but for one rounding.
  const float scale = float_of((bits_of(float_of(absmax_bits) / kMax) + 0xffffu) & 0xffff0000u);
  return {scale, 1.0f / scale};
}

/// A minifloat of 8 bits with kMantissa mantissa bits; kMaxBits: its largest number, as fp32.
template <int kMantissa, int kBias, uint32_t kMaxBits>
struct Minifloat {
  static constexpr int kBits = 8;
  static constexpr int kDropped = 23 - kMantissa;
  static constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << 23;
  static constexpr uint32_t kMinNormal = static_cast<uint32_t>(128 - kBias) << 23;  // bits of 2^(1 - kBias)
  // 2^(24 - kBias - kMantissa): a float whose last bit is the format's subnormal step.
  static constexpr uint32_t kMagic = static_cast<uint32_t>(127 + 24 - kBias - kMantissa) << 23;
  static constexpr uint32_t kStep = static_cast<uint32_t>(127 + 1 - kBias - kMantissa) << 23;
  static constexpr uint32_t kInverseStep = static_cast<uint32_t>(127 - 1 + kBias + kMantissa) << 23;

  GSYNC_HOST_DEVICE static uint32_t encode(float y) {
    const uint32_t bits = bits_of(y);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude - kRebias + ((1u << (kDropped - 1)) - 1u) + ((magnitude >> kDropped) & 1u)) >> kDropped;
    const uint32_t subnormal = bits_of(float_of(magnitude) + float_of(kMagic)) - kMagic;
    return ((bits >> 24) & 0x80u) | (magnitude < kMinNormal ? subnormal : normal);
  }
  GSYNC_HOST_DEVICE static uint32_t encode(float y, uint32_t word) {
    const uint32_t bits = bits_of(y);
    uint32_t magnitude = bits & 0x7fffffffu;
    magnitude = magnitude > kMaxBits ? kMaxBits : magnitude;
    const uint32_t dropped = magnitude & ((1u << kDropped) - 1u);
    const uint32_t normal = ((magnitude - kRebias) >> kDropped) + ((word >> (32 - kDropped)) < dropped ? 1u : 0u);
    const float steps = float_of(magnitude) * float_of(kInverseStep);
    const uint32_t below = static_cast<uint32_t>(static_cast<int32_t>(magnitude < kMinNormal ? steps : 0.0f));
    const float fraction = steps - static_cast<float>(static_cast<int32_t>(below));
    const uint32_t subnormal = below + (unit_of(word) < fraction ? 1u : 0u);
    return ((bits >> 24) & 0x80u) | (magnitude < kMinNormal ? subnormal : normal);
  }
  GSYNC_HOST_DEVICE static float decode(uint32_t code) {
    const uint32_t magnitude = code & 0x7fu;
    const uint32_t normal = (magnitude << kDropped) + kRebias;
    const uint32_t subnormal = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * float_of(kStep));
    return float_of(((code & 0x80u) << 24) | (magnitude < (1u << kMantissa) ? subnormal : normal));
  }
};

struct Fp8E4m3 : Minifloat<3, 7, 0x43e00000u> {
  static constexpr float kMax = 448.0f;
  GSYNC_HOST_DEVICE static BlockScale scale_of(uint32_t absmax_bits) { return block_scale(absmax_bits, kMax); }
};
struct Fp8E5m2 : Minifloat<2, 15, 0x47600000u> {
  static constexpr float kMax = 57344.0f;
  GSYNC_HOST_DEVICE static BlockScale scale_of(uint32_t absmax_bits) { return block_scale(absmax_bits, kMax); }
};

}  // namespace gsync
