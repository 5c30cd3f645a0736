// Codecs without a scale: fp32, fp16, bf16. One value at a time, the same bits on the host and on a device.
//
// Rounding is to nearest, ties to even, done in integers: compilers and instruction sets disagree on NaN, on subnormal numbers
// and on vectorised conversions, integers do not. With a random word (common/philox.h) rounding is stochastic. Each format has one NaN: fp32 7FC00000, fp16 7E00, bf16 7FC0.
#pragma once

#include <cstdint>

#include "../common/host_device.h"

namespace gsync {

GSYNC_HOST_DEVICE uint32_t encode_fp32(float value) {
  const uint32_t bits = bits_of(value);
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits;
}

GSYNC_HOST_DEVICE uint16_t encode_bf16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

/// By the random word: up with the probability of the bits that are dropped.
GSYNC_HOST_DEVICE uint16_t encode_bf16(float value, uint32_t word) {
  const uint32_t bits = bits_of(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t rounded = (bits + (magnitude < 0x7f800000u ? word >> 16 : 0u)) >> 16;
  return static_cast<uint16_t>(magnitude > 0x7f800000u ? 0x7fc0u : rounded);
}

GSYNC_HOST_DEVICE float decode_bf16(uint16_t code) { return float_of(static_cast<uint32_t>(code) << 16); }

GSYNC_HOST_DEVICE uint16_t encode_fp16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t sign = (bits >> 16) & 0x8000u;
  // Normal results: move the exponent's bias from 127 to 15 and round away 13 bits.
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal results: adding 0.5 puts the last bit of fp16's grid (2^-24) on the last bit of the sum, so the addition rounds.
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t code = magnitude < 0x38800000u ? subnormal : normal;
  code = magnitude >= 0x477ff000u ? 0x7c00u : code;  // from 65520 on, the nearest is Inf
  return static_cast<uint16_t>(magnitude > 0x7f800000u ? 0x7e00u : (sign | code));
}

GSYNC_HOST_DEVICE uint16_t encode_fp16(float value, uint32_t word) {
  const uint32_t bits = bits_of(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t normal = ((magnitude - 0x38000000u) >> 13) + ((word >> 19) < (magnitude & 0x1fffu) ? 1u : 0u);
  // Subnormal results, in steps of 2^-24. Both products are exact.
  const float steps = (magnitude < 0x38800000u ? float_of(magnitude) : 0.0f) * 16777216.0f;
  const int32_t below = static_cast<int32_t>(steps);
  const float fraction = steps - static_cast<float>(below);
  const uint32_t subnormal = static_cast<uint32_t>(below) +
                             (static_cast<float>(static_cast<int32_t>(word >> 8)) * 5.9604644775390625e-8f < fraction ? 1u : 0u);
  uint32_t code = magnitude < 0x38800000u ? subnormal : normal;
  code = magnitude >= 0x47800000u ? 0x7c00u : code;
  return static_cast<uint16_t>(magnitude > 0x7f800000u ? 0x7e00u : (sign | code));
}

GSYNC_HOST_DEVICE float decode_fp16(uint16_t code) {
  const uint32_t magnitude = code & 0x7fffu;
  const uint32_t sign = static_cast<uint32_t>(code & 0x8000u) << 16;
  const uint32_t normal = (magnitude << 13) + 0x38000000u;
  const uint32_t special = (magnitude << 13) + 0x70000000u;
  // Subnormal: magnitude * 2^-24. Both factors are exact.
  const uint32_t subnormal = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 5.9604644775390625e-8f);
  uint32_t bits = magnitude < 0x0400u ? subnormal : normal;
  bits = magnitude >= 0x7c00u ? special : bits;
  return float_of(sign | bits);
}

}  // namespace gsync
