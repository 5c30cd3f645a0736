// Which family computes which tile, and on what instruction sets.
#include "kernels.h"

#include "../common/float_control.h"
#include "families.h"

namespace gsync::cpu {
namespace {

using Family = bool;  // true: block

Family family_of(const LayoutView& layout, int64_t tile, bool with_options) {
  const Kind kind = layout.shares[layout.tiles[tile].share].kind;
  return is_elementwise(kind) ? with_options : kind <= Kind::kInt4;
}

// Calls `function(family, first, last)` for every run of tiles of one family.
template <class Function>
void for_families(const LayoutView& layout, int64_t first, int64_t last, bool with_options, const Function& function) {
  if (!layout.has_scales && !with_options) return function(false, first, last);
  while (first < last) {
    const Family family = family_of(layout, first, with_options);
    int64_t end = first + 1;
    while (end < last && family_of(layout, end, with_options) == family) ++end;
    function(family, first, end);
    first = end;
  }
}

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
  for_families(args.layout, first, last, args.encode.any(), [&](Family is_block, int64_t begin, int64_t end) {
    return is_block ? block::pack(args, begin, end, level) : elementwise::pack(args, begin, end, level);
  });
}

void reduce(const ReduceArgs& args, int64_t first, int64_t last, Level level) {
  for_families(args.layout, first, last, args.encode.any() || args.is_shard(), [&](Family is_block, int64_t begin, int64_t end) {
    return is_block ? block::reduce(args, begin, end, level) : elementwise::reduce(args, begin, end, level);
  });
}

void unpack(const UnpackArgs& args, int64_t first, int64_t last, Level level) {
  for_families(args.layout, first, last, false, [&](Family is_block, int64_t begin, int64_t end) {
    return is_block ? block::unpack(args, begin, end, level) : elementwise::unpack(args, begin, end, level);
  });
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
