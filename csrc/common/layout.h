// Where each byte of a payload lies. The Python twin is gsync/layout.py, the prose docs/wire_format.md.
//
// A parameter of n blocks is owned by all ranks together: with r = (chunk - name_hash) mod num_chunks, chunk `chunk` holds its
// blocks floor(n*r/num_chunks) .. floor(n*(r+1)/num_chunks)-1. Chunk c of a bucket is the concatenation of those shares, padded
// to the largest chunk, so what happens to a parameter does not depend on which bucket it lies in.
//
// A slice is a run of tiles of every chunk: of the t tiles that the shares of a chunk have, in segment order, slice s of S
// holds tiles floor(t*s/S) .. floor(t*(s+1)/S)-1. Each slice has a payload of its own.
//
// Bytes of one chunk of a slice, every area padded with zeros to 16 bytes:
//   flags   one per segment of the bucket: 1 where the rank used the parameter. One byte each, or, where all segments have the
//           same codec of fp32, fp16, bf16, one element of that type (1.0), so that an all_reduce can sum the chunk as an array
//   scales  share by share (block codecs)
//   codes   share by share, each padded to 16 bytes
//   padding to the largest chunk of the slice
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
};

struct Layout {
  std::vector<Share> shares;               // in chunk order; within a chunk: flags, codes in segment order, padding
  std::vector<Tile> tiles;                 // in share order
  std::vector<int64_t> chunk_first_tile;   // [num_chunks + 1]
  std::vector<SegmentPartials> partials;   // [num_segments], of the whole bucket, the same for every slice
  int64_t num_segments = 0;
  int64_t num_chunks = 0;
  int64_t chunk_bytes = 0;
  int64_t num_partials = 0;                // of the whole bucket

  int64_t payload_bytes() const { return num_chunks * chunk_bytes; }
  /// Tables for all chunks, in host memory owned by this layout.
  LayoutView view() const;
  /// Tables for the tiles of one chunk, in host memory owned by this layout.
  LayoutView view_of_chunk(int64_t chunk) const;
};

/// FNV-1a, 64 bits, of the UTF-8 bytes of a parameter's name.
uint64_t hash64(std::string_view name);

/// The layout of one slice of a bucket.
/// Throws std::invalid_argument for num_chunks < 1, num_slices < 1, slice_idx outside [0, num_slices) or a negative numel.
Layout build_layout(const std::vector<Segment>& segments, int64_t num_chunks, int64_t slice_idx = 0, int64_t num_slices = 1);

}  // namespace gsync
