// The kernel families behind kernels.h. Tiles [first, last) must all be ones that the family computes.
#pragma once

#include "kernels.h"

namespace gsync::cpu {

/// Codecs without a scale, flags and padding; EncodeOptions at their defaults.
namespace elementwise {
void pack(const PackArgs& args, int64_t first, int64_t last, Level level);
void reduce(const ReduceArgs& args, int64_t first, int64_t last, Level level);
void unpack(const UnpackArgs& args, int64_t first, int64_t last, Level level);
}  // namespace elementwise

/// Codecs with one scale per block; codecs without a scale under EncodeOptions, and where `reduce` encodes a shard.
namespace block {
void pack(const PackArgs& args, int64_t first, int64_t last, Level level);
void reduce(const ReduceArgs& args, int64_t first, int64_t last, Level level);
void unpack(const UnpackArgs& args, int64_t first, int64_t last, Level level);
}  // namespace block

}  // namespace gsync::cpu
