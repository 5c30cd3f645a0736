// What a kernel has to know about a bucket: plain structures, the same on the host and on a device.
//
//   segment  one parameter's place in the bucket
//   share    consecutive elements of one segment that lie in one chunk
//   tile     kTileElements consecutive elements of a share: the work of one CUDA thread block, and the unit in which squares
//            are summed (so the sum does not depend on how a bucket is cut)
//
// A Layout (layout.h) builds these tables once for a bucket; afterwards only the gradients' addresses change.
#pragma once

#include <cstdint>

namespace gsync {

inline constexpr int64_t kTileElements = 4096;
inline constexpr int64_t kPayloadAlignment = 16;
// Elements that the codecs without a scale treat as one block. Ownership is counted in blocks.
inline constexpr int64_t kElementwiseBlock = 256;

// What the bytes of a share are. The first three are codecs without a scale, the next four have one scale per block; the last two
// fill the rest of a chunk.
enum class Kind : uint8_t {
  kFp32 = 0,
  kFp16 = 1,
  kBf16 = 2,
  kFp8E4m3 = 3,
  kFp8E5m2 = 4,
  kInt8 = 5,
  kInt4 = 6,
  kFlags = 14,
  kPadding = 15
};
constexpr bool is_elementwise(Kind codec) { return codec <= Kind::kBf16; }

// Block sizes are powers of two, so that a tile is whole blocks and a block's codes fill whole 16-byte words.
inline constexpr int64_t kMinBlock = 32;
inline constexpr int64_t kMaxBlock = kTileElements;

// Element type of a gradient.
enum class Dtype : uint8_t { kFp32 = 0, kFp16 = 1, kBf16 = 2, kFp64 = 3 };

struct Share {
  int64_t element;  // first element, counted from the start of its parameter
  int64_t numel;  // elements; kFlags: flags; kPadding: bytes
  int64_t codes_offset;  // bytes from the start of the chunk
  int64_t scales_offset;  // bytes from the start of the chunk, a multiple of 4; 0 for codecs without a scale
  int64_t first_partial;  // where the sums of squares of its tiles begin
  uint64_t name_hash;
  int32_t segment;  // index into the table of gradient addresses; kFlags, kPadding: -1
  int32_t chunk;
  int32_t block_size;  // elements per block; kFlags: bytes per flag
  Kind kind;
  Dtype dtype;  // of the gradient; kFlags: unused
  uint8_t flag_kind;  // kFlags: 255 for a byte, else the Kind whose 1.0 is written
  uint8_t scales_padding;  // zero bytes after its scales, up to those of the next share or the codes; its last tile writes them
};
static_assert(sizeof(Share) == 64, "the Triton kernels and the table upload count on 64 bytes");

// One tile of a share: elements [index * kTileElements, min(numel, (index + 1) * kTileElements)) of it.
struct Tile {
  int32_t share;
  int32_t index;
};

// Where the sums of one segment lie, in the order of its elements.
struct SegmentPartials {
  int64_t begin;
  int64_t end;
};

}  // namespace gsync
