// The CPU backend: pack, reduce and unpack over a range of tiles, on the calling thread.
//
// One binary serves every processor: the kernels are compiled for several instruction sets and the level is an argument, so
// that a test can compare all levels that the machine has. Bytes and sums of squares do not depend on it.
#pragma once

#include <cstdint>
#include <vector>

#include "../common/kernels.h"

namespace gsync::cpu {

enum class Level : uint8_t { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

/// The levels this processor can run, lowest first.
std::vector<Level> available_levels();
/// The highest of them.
Level best_level();

/// Tiles [first, last) of args.layout. Calls for disjoint ranges may run at the same time.
void pack(const PackArgs& args, int64_t first, int64_t last, Level level = best_level());
void reduce(const ReduceArgs& args, int64_t first, int64_t last, Level level = best_level());
/// Writes gradients, partials and found_nonfinite; does not read args.segments.
void unpack(const UnpackArgs& args, int64_t first, int64_t last, Level level = best_level());
/// Adds up the partials of every segment, in the order of its elements.
void sum_partials(const UnpackArgs& args);

}  // namespace gsync::cpu
