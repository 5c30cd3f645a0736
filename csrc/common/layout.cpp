#include "layout.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace gsync {
namespace {

constexpr uint8_t kByteFlags = 255;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t align(int64_t bytes) { return ceil_div(bytes, kPayloadAlignment) * kPayloadAlignment; }

int64_t codes_bytes(Kind codec, int64_t numel) {
  switch (codec) {
    case Kind::kFp32: return 4 * numel;
    case Kind::kFp16:
    case Kind::kBf16: return 2 * numel;
    case Kind::kInt4: return ceil_div(numel, 2);
    default: return numel;
  }
}

int64_t block_size_of(const Segment& segment) {
  if (is_elementwise(segment.codec)) return kElementwiseBlock;
  if (segment.block_size != 0) return segment.block_size;
  return segment.codec == Kind::kInt4 ? 64 : 256;
}

// Without padding.
int64_t scales_bytes(const Share& share) {
  if (is_elementwise(share.kind)) return 0;
  return ceil_div(share.numel, share.block_size) * (share.kind == Kind::kInt4 ? 2 : 4);
}

// Part r of the `num_chunks` parts of a segment.
Run part_of(const Segment& segment, int64_t r, int64_t num_chunks) {
  const int64_t block_size = block_size_of(segment);
  const int64_t num_blocks = ceil_div(segment.numel, block_size);
  const int64_t begin = num_blocks * r / num_chunks * block_size;
  const int64_t end = num_blocks * (r + 1) / num_chunks * block_size;
  return {begin, std::max<int64_t>(std::min(end, segment.numel) - begin, 0)};
}

// (idx - shift) mod count
int64_t rotated(int64_t idx, uint64_t shift, int64_t count) {
  const auto n = static_cast<uint64_t>(count);
  return static_cast<int64_t>((static_cast<uint64_t>(idx) + n - shift % n) % n);
}

int64_t part_idx(const Segment& segment, int64_t chunk, int64_t num_chunks, int64_t num_shards) {
  const int64_t per_shard = num_chunks / num_shards;
  return rotated(chunk / per_shard, segment.name_hash, num_shards) * per_shard +
         rotated(chunk % per_shard, segment.name_hash / static_cast<uint64_t>(num_shards), per_shard);
}

uint8_t common_flag_kind(const std::vector<Segment>& segments) {
  for (const Segment& segment : segments) {
    if (segment.codec != segments.front().codec) return kByteFlags;
  }
  if (segments.empty() || !is_elementwise(segments.front().codec)) return kByteFlags;
  return static_cast<uint8_t>(segments.front().codec);
}

void check(const std::vector<Segment>& segments, int64_t num_chunks, int64_t slice_idx, int64_t num_slices, int64_t num_shards) {
  if (num_chunks < 1) {
    throw std::invalid_argument("layout: num_chunks is " + std::to_string(num_chunks) + ", expected at least 1");
  }
  if (num_shards < 1 || num_chunks % num_shards != 0) {
    throw std::invalid_argument("layout: num_shards is " + std::to_string(num_shards) + ", expected a divisor of num_chunks, " +
                                std::to_string(num_chunks));
  }
  if (num_slices < 1) {
    throw std::invalid_argument("layout: num_slices is " + std::to_string(num_slices) + ", expected at least 1");
  }
  if (slice_idx < 0 || slice_idx >= num_slices) {
    throw std::invalid_argument("layout: slice_idx is " + std::to_string(slice_idx) + ", expected 0 to " +
                                std::to_string(num_slices - 1));
  }
  for (size_t i = 0; i < segments.size(); ++i) {
    if (segments[i].numel < 0) {
      throw std::invalid_argument("layout: numels[" + std::to_string(i) + "] is " + std::to_string(segments[i].numel) +
                                  ", expected 0 or more");
    }
    if (segments[i].codec > Kind::kInt4) {
      throw std::invalid_argument("layout: codecs[" + std::to_string(i) + "] is " +
                                  std::to_string(static_cast<int>(segments[i].codec)) +
                                  ", expected 0 (fp32), 1 (fp16), 2 (bf16), 3 (fp8_e4m3), 4 (fp8_e5m2), 5 (int8) or 6 (int4)");
    }
    const int64_t block_size = segments[i].block_size;
    if (block_size != 0 && is_elementwise(segments[i].codec)) {
      throw std::invalid_argument("layout: block_sizes[" + std::to_string(i) + "] is " + std::to_string(block_size) +
                                  ", expected 0 with a codec that has no scale");
    }
    if (block_size != 0 && (block_size < kMinBlock || block_size > kMaxBlock || (block_size & (block_size - 1)) != 0)) {
      throw std::invalid_argument("layout: block_sizes[" + std::to_string(i) + "] is " + std::to_string(block_size) +
                                  ", expected 0 or a power of two from " + std::to_string(kMinBlock) + " to " +
                                  std::to_string(kMaxBlock));
    }
    if (segments[i].dtype > Dtype::kFp64) {
      throw std::invalid_argument("layout: dtypes[" + std::to_string(i) + "] is " +
                                  std::to_string(static_cast<int>(segments[i].dtype)) +
                                  ", expected 0 (fp32), 1 (fp16), 2 (bf16) or 3 (fp64)");
    }
  }
}

// Gives every share its place in its chunk, pads the chunks to the largest, and lists the tiles. Shares are in chunk order, each
// chunk's last one its padding.
void place(Layout& layout) {
  layout.chunk_bytes = 0;
  const auto begin = layout.shares.begin();
  for (auto first = begin; first != layout.shares.end();) {
    const auto padding =
        std::find_if(first, layout.shares.end(), [](const Share& share) { return share.kind == Kind::kPadding; });
    int64_t offset = align(layout.num_segments * layout.flag_bytes);
    Share* last_with_scales = nullptr;
    for (auto share = first + 1; share != padding; ++share) {
      const int64_t bytes = scales_bytes(*share);
      if (bytes == 0) continue;
      share->scales_offset = offset;
      share->scales_padding = static_cast<uint8_t>((4 - bytes % 4) % 4);
      offset += bytes + share->scales_padding;
      last_with_scales = &*share;
    }
    if (last_with_scales != nullptr) {
      last_with_scales->scales_padding += static_cast<uint8_t>(align(offset) - offset);
      offset = align(offset);
    }
    for (auto share = first + 1; share != padding; ++share) {
      share->codes_offset = offset;
      offset += align(codes_bytes(share->kind, share->numel));
    }
    padding->codes_offset = offset;
    layout.chunk_bytes = std::max(layout.chunk_bytes, offset);
    first = padding + 1;
  }

  layout.tiles.clear();
  layout.chunk_first_tile.assign(1, 0);
  for (auto share = begin; share != layout.shares.end(); ++share) {
    const bool is_padding = share->kind == Kind::kPadding;
    if (is_padding) share->numel = layout.chunk_bytes - share->codes_offset;
    for (int64_t t = 0; t < ceil_div(share->numel, kTileElements); ++t) {
      layout.tiles.push_back({static_cast<int32_t>(share - begin), static_cast<int32_t>(t)});
    }
    if (is_padding) layout.chunk_first_tile.push_back(static_cast<int64_t>(layout.tiles.size()));
  }
  layout.chunk_first_tile.resize(layout.num_chunks + 1, 0);  // without segments there are no shares
}

}  // namespace

uint64_t hash64(std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : name) {
    hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  }
  return hash;
}

LayoutView Layout::view() const {
  return {shares.data(), tiles.data(), static_cast<int64_t>(tiles.size()), num_segments, chunk_bytes, has_scales, flag_bytes};
}

LayoutView Layout::view_of_chunks(int64_t chunk, int64_t count) const {
  const int64_t first = chunk_first_tile.at(chunk);
  return {shares.data(), tiles.data() + first, chunk_first_tile.at(chunk + count) - first, num_segments, chunk_bytes, has_scales,
          flag_bytes};
}

Run share_of(const Segment& segment, int64_t chunk, int64_t num_chunks, int64_t num_shards) {
  return part_of(segment, part_idx(segment, chunk, num_chunks, num_shards), num_chunks);
}

Run shard_of(const Segment& segment, int64_t shard, int64_t num_shards) {
  // As many blocks as its chunks have, in one run: part `shard` of as many parts as there are shards.
  return part_of(segment, rotated(shard, segment.name_hash, num_shards), num_shards);
}

Layout uncompressed(const Layout& layout) {
  Layout result = layout;
  result.has_scales = false;
  for (Share& share : result.shares) {
    if (share.segment < 0) continue;
    share.kind = Kind::kFp32;
    share.scales_offset = 0;
    share.scales_padding = 0;
  }
  place(result);
  return result;
}

Layout build_layout(const std::vector<Segment>& segments, int64_t num_chunks, int64_t slice_idx, int64_t num_slices,
                    int64_t num_shards) {
  check(segments, num_chunks, slice_idx, num_slices, num_shards);
  const int64_t num_segments = static_cast<int64_t>(segments.size());
  Layout layout;
  layout.num_segments = num_segments;
  layout.num_chunks = num_chunks;
  layout.num_shards = num_shards;
  layout.segments = segments;
  for (const Segment& segment : segments) layout.has_scales |= !is_elementwise(segment.codec);

  // 1. Partial sums, in the order of the elements of the whole bucket.
  std::vector<int64_t> first_partial(num_segments * num_chunks);
  for (int64_t s = 0; s < num_segments; ++s) {
    const int64_t begin = layout.num_partials;
    for (int64_t r = 0; r < num_chunks; ++r) {
      first_partial[s * num_chunks + r] = layout.num_partials;
      layout.num_partials += ceil_div(part_of(segments[s], r, num_chunks).numel, kTileElements);
    }
    layout.partials.push_back({begin, layout.num_partials});
  }

  // 2. The shares of every chunk that fall into this slice: flags, codes, padding.
  const uint8_t flag_kind = common_flag_kind(segments);
  const int64_t flag_bytes = flag_kind == kByteFlags ? 1 : codes_bytes(static_cast<Kind>(flag_kind), 1);
  layout.flag_bytes = static_cast<int32_t>(flag_bytes);
  for (int64_t chunk = 0; chunk < num_chunks && num_segments > 0; ++chunk) {
    Share flags{};
    flags.numel = num_segments;
    flags.segment = -1;
    flags.chunk = static_cast<int32_t>(chunk);
    flags.block_size = static_cast<int32_t>(flag_bytes);
    flags.kind = Kind::kFlags;
    flags.flag_kind = flag_kind;
    layout.shares.push_back(flags);

    int64_t chunk_tiles = 0;
    for (const Segment& segment : segments) {
      chunk_tiles += ceil_div(share_of(segment, chunk, num_chunks, num_shards).numel, kTileElements);
    }
    const int64_t slice_begin = chunk_tiles * slice_idx / num_slices;
    const int64_t slice_end = chunk_tiles * (slice_idx + 1) / num_slices;
    int64_t tile = 0;  // of the chunk, before it is cut into slices
    for (int64_t s = 0; s < num_segments; ++s) {
      const Segment& segment = segments[s];
      const int64_t r = part_idx(segment, chunk, num_chunks, num_shards);
      const Run part = part_of(segment, r, num_chunks);
      const int64_t num_tiles = ceil_div(part.numel, kTileElements);
      const int64_t first = std::clamp<int64_t>(slice_begin - tile, 0, num_tiles);
      const int64_t last = std::clamp<int64_t>(slice_end - tile, 0, num_tiles);
      tile += num_tiles;
      if (first == last) continue;
      Share share{};
      share.element = part.element + first * kTileElements;
      share.numel = std::min(part.numel, last * kTileElements) - first * kTileElements;
      share.first_partial = first_partial[s * num_chunks + r] + first;
      share.name_hash = segment.name_hash;
      share.segment = static_cast<int32_t>(s);
      share.chunk = static_cast<int32_t>(chunk);
      share.block_size = static_cast<int32_t>(block_size_of(segment));
      share.kind = segment.codec;
      share.dtype = segment.dtype;
      layout.shares.push_back(share);
    }

    Share padding{};
    padding.segment = -1;
    padding.chunk = static_cast<int32_t>(chunk);
    padding.block_size = 1;
    padding.kind = Kind::kPadding;
    layout.shares.push_back(padding);
  }
  place(layout);
  return layout;
}

}  // namespace gsync
