// Where each byte of a payload lies. The Python twin is gsync/layout.py, the prose docs/wire_format.md.
//
// A parameter of n blocks is owned by all ranks together: with r = (chunk - name_hash) mod num_chunks, chunk `chunk` holds its
// blocks floor(n*r/num_chunks) .. floor(n*(r+1)/num_chunks)-1. Chunk c of a bucket is the concatenation of those shares, padded
// to the largest chunk, so what happens to a parameter does not depend on which bucket it lies in.
//
// Chunks may form shards, num_shards of them, each a run of H = num_chunks/num_shards chunks. Then chunk g*H + h has the blocks of
// r = ((g - name_hash) mod num_shards)*H + ((h - floor(name_hash/num_shards)) mod H): what a shard holds of a parameter is consecutive.
// One shard is the rule above.
//
// A slice is a run of tiles of every chunk: of the t tiles that the shares of a chunk have, in segment order, slice s of S
// holds tiles floor(t*s/S) .. floor(t*(s+1)/S)-1. Each slice has a payload of its own.
//
// Bytes of one chunk of a slice, every area padded with zeros to 16 bytes:
//   flags   one per segment of the bucket: 1 where the rank used the parameter. One byte each, or, where all segments have the
//           same codec of fp32, fp16, bf16, one element of that type (1.0), so that an all_reduce can sum the chunk as an array
//   scales  of the shares that have any, each from a multiple of 4 bytes on: fp32, for int4 bf16
//   codes   share by share, each padded to 16 bytes; int4: two a byte, the first in the low half
//   padding to the largest chunk of the slice; a share of its own in every chunk, which may be empty
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "kernels.h"
#include "plan.h"

namespace gsync {

struct Segment {
  int64_t numel;
  Dtype dtype;
  Kind codec;
  uint64_t name_hash;
  int64_t block_size = 0;  // elements that share a scale; 0: the codec's own, and the only choice for codecs without a scale
};

/// Consecutive elements of one segment.
struct Run {
  int64_t element;
  int64_t numel;
};

struct Layout {
  std::vector<Share> shares;  // in chunk order; within a chunk: flags, codes in segment order, padding
  std::vector<Tile> tiles;  // in share order
  std::vector<int64_t> chunk_first_tile;  // [num_chunks + 1]
  std::vector<SegmentPartials> partials;  // [num_segments], of the whole bucket, the same for every slice
  int64_t num_segments = 0;
  int64_t num_chunks = 0;
  int64_t num_shards = 1;
  int64_t chunk_bytes = 0;
  int64_t num_partials = 0;  // of the whole bucket
  bool has_scales = false;  // whether a segment has a block codec
  int32_t flag_bytes = 1;  // bytes per flag
  std::vector<Segment> segments;

  int64_t payload_bytes() const { return num_chunks * chunk_bytes; }
  /// Tables for all chunks, in host memory owned by this layout.
  LayoutView view() const;
  /// Tables for the tiles of `count` chunks from `chunk` on, in host memory owned by this layout.
  LayoutView view_of_chunks(int64_t chunk, int64_t count) const;
  int64_t chunks_per_shard() const { return num_chunks / num_shards; }
};

/// FNV-1a, 64 bits, of the UTF-8 bytes of a parameter's name.
uint64_t hash64(std::string_view name);

/// The elements of a segment that chunk `chunk` of the whole bucket holds: what one rank reduces, and keeps a residual for.
Run share_of(const Segment& segment, int64_t chunk, int64_t num_chunks, int64_t num_shards = 1);
/// The elements of a segment that the chunks of shard `shard` of the whole bucket hold together.
Run shard_of(const Segment& segment, int64_t shard, int64_t num_shards);

/// The layout of one slice of a bucket.
/// Throws std::invalid_argument for num_chunks < 1, num_slices < 1, slice_idx outside [0, num_slices) a negative numel, a
/// block_size that is not a power of two from kMinBlock to kMaxBlock, or num_shards that does not divide num_chunks.
Layout build_layout(const std::vector<Segment>& segments, int64_t num_chunks, int64_t slice_idx = 0, int64_t num_slices = 1,
                    int64_t num_shards = 1);

/// The same slice with its elements as fp32: shares have the same numbers, elements and flags, but other places.
Layout uncompressed(const Layout& layout);

}  // namespace gsync
