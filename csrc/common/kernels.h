// The three operations as a backend implements them. Torch does not appear here: pointers, sizes, a stream.
//
//   pack    gradients of one rank  ->  its payload, num_chunks chunks
//   reduce  the payloads of all ranks for one chunk  ->  one chunk, summed in fp32 in rank order and encoded again; or those of a
//           host's ranks for one shard, not compressed yet  ->  that shard, encoded for the first time
//   unpack  a payload  ->  gradients, with the sum of squares and the non-finite flag of what was written
#pragma once

#include <cstdint>

#include "plan.h"

namespace gsync {

/// Tables of one layout, in memory the backend can read.
struct LayoutView {
  const Share* shares;
  const Tile* tiles;
  int64_t num_tiles;
  int64_t num_segments;
  int64_t chunk_bytes;
  bool has_scales;  // whether a segment has a block codec
  int32_t flag_bytes;  // bytes per flag; the flags are the first bytes of a chunk
};

/// How values are encoded, beyond the codec. The defaults: to nearest even, nothing carried over, nothing measured.
struct EncodeOptions {
  // [num_segments] on the host, or null. residuals[s][element of the parameter] is added before encoding and replaced by what
  // encoding lost; unchanged where the code is Inf or NaN, and where no rank used the parameter. An entry may be null.
  float* const* residuals = nullptr;
  // Round up with the probability that makes the mean exact, by the random word of `random_key` (philox.h), name and element.
  bool stochastic = false;
  uint64_t random_key = 0;
  // [num_tiles, kErrorSums] or null: each tile adds its own (ErrorSum), so that sums over many steps need no reset between.
  double* error_sums = nullptr;

  bool any() const { return residuals != nullptr || stochastic || error_sums != nullptr; }
};

/// Columns of EncodeOptions::error_sums, over the elements whose code is finite.
enum ErrorSum : int { kResidualSquares = 0, kInputSquares = 1, kNonzero = 2, kVanished = 3 };
inline constexpr int64_t kErrorSums = 4;

struct PackArgs {
  LayoutView layout;
  const void* const* gradients;  // [num_segments] on the host; null: the rank did not use the parameter (packs as zeros, flag 0)
  uint8_t* payload;  // [num_chunks * chunk_bytes]; every byte is written
  float scale;  // multiplies each gradient in fp32 before the cast
  // [2] int64 or null: adds the elements that are not zero, and those of them that became zero (fp16 range check).
  int64_t* counters;
  EncodeOptions encode = {};
};

struct ReduceArgs {
  LayoutView layout;  // tiles: those of one chunk, or of one shard, only
  const uint8_t* const* payloads;  // [num_payloads] on the host: that chunk, or shard, as each rank sent it
  int64_t num_payloads;
  uint8_t* out;  // [chunk_bytes], or one chunk after the other
  float scale;  // multiplies the sum
  // Residuals of the reducer: of each parameter only the elements of this chunk (share_of) are touched, so memory for those will
  // do, entered as the address that element 0 would have. The same for a shard.
  EncodeOptions encode = {};
  // A shard: the shares of uncompressed(layout), which tell where the payloads have their fp32 elements; null: one chunk, the
  // payloads like `out`.
  const Share* sent_shares = nullptr;
  int64_t sent_chunk_bytes = 0;
  int64_t first_chunk = 0;

  bool is_shard() const { return sent_shares != nullptr; }
};

struct UnpackArgs {
  LayoutView layout;
  const uint8_t* payload;  // [num_chunks * chunk_bytes]
  void* const* gradients;  // [num_segments] on the host; null: decode for the sums only
  double* partials;  // one sum of squares per tile, at Share::first_partial + Tile::index
  int32_t* found_nonfinite;  // set to 1 when any value written is Inf or NaN; never cleared
  const SegmentPartials* segments;  // null: leave the partials unsummed (all slices of a bucket but its last)
  double* sum_of_squares;  // [num_segments], written when segments is given
  // Word in memory that host and device share, or null. Not zero: the exchange failed, NaN is written instead.
  const int32_t* failed;
};

/// What a launch on a device needs beside its arguments. The tables in LayoutView are device memory, like payloads and gradients.
struct Workspace {
  /// Device copy of the table of addresses: of gradients, in `reduce` of payloads; then of residuals, where there are any. Used when
  /// it is longer than what goes with a launch by value, and then required. It must stay as it is until the launch has finished.
  const void* const* addresses = nullptr;
  /// unpack with `segments`: one word of device memory, zeroed once; every launch leaves it zero. Not to be shared by launches
  /// that may run at the same time.
  uint32_t* ticket = nullptr;
};

}  // namespace gsync
