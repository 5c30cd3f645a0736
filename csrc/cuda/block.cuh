// How one tile is encoded, whatever the codec: scales, codes, residuals, sums of errors. What it is for: block.cu.
#pragma once

#include <cstdint>

#include "../codecs/block.h"
#include "../common/kernels.h"
#include "../common/philox.h"
#include "elementwise.cuh"

namespace gsync::cuda::block {

// Three blocks of 256 threads per multiprocessor: at most 80 registers a thread, and 48 KiB of gradients on their way.
inline constexpr int kBlocks = 3;
inline constexpr int kPerWarp = kWarpSize * kElementsPerThread;
inline constexpr int kWarps = kThreads / kWarpSize;

// ---- formats: what a code is -------------------------------------------------------------------------------------------

/// A codec without a scale, as one of its element types says.
template <class Type>
struct Plain {
  static constexpr bool kHasScale = false;
  static constexpr int kBits = 8 * static_cast<int>(sizeof(typename Type::Bits));
  static __device__ __forceinline__ uint32_t encode(float value) { return Type::encode(value); }
  static __device__ __forceinline__ uint32_t encode(float value, uint32_t word);
  static __device__ __forceinline__ float decode(uint32_t code) { return Type::decode(static_cast<typename Type::Bits>(code)); }
};
template <>
__device__ __forceinline__ uint32_t Plain<Fp32>::encode(float value, uint32_t) {
  return encode_fp32(value);
}
template <>
__device__ __forceinline__ uint32_t Plain<Fp16>::encode(float value, uint32_t word) {
  return encode_fp16(value, word);
}
template <>
__device__ __forceinline__ uint32_t Plain<Bf16>::encode(float value, uint32_t word) {
  return encode_bf16(value, word);
}

template <class Rule, bool kBf16Scale>
struct Scaled : Rule {
  static constexpr bool kHasScale = true;
  static constexpr int kScaleBytes = kBf16Scale ? 2 : 4;
  static __device__ __forceinline__ float load_scale(const uint8_t* scales, int64_t block) {
    if constexpr (kBf16Scale) return decode_bf16(reinterpret_cast<const uint16_t*>(scales)[block]);
    return reinterpret_cast<const float*>(scales)[block];
  }
  static __device__ __forceinline__ void store_scale(uint8_t* scales, int64_t block, float scale) {
    if constexpr (kBf16Scale) {
      reinterpret_cast<uint16_t*>(scales)[block] = static_cast<uint16_t>(gsync::bits_of(scale) >> 16);
    } else {
      reinterpret_cast<float*>(scales)[block] = scale;
    }
  }
};

__device__ __forceinline__ bool is_plain(Kind kind) { return kind <= Kind::kBf16; }

template <class Function>
__device__ __forceinline__ void with_format(Kind kind, Function&& function) {
  switch (kind) {
    case Kind::kFp32: return function(Plain<Fp32>());
    case Kind::kFp16: return function(Plain<Fp16>());
    case Kind::kBf16: return function(Plain<Bf16>());
    case Kind::kFp8E4m3: return function(Scaled<Fp8E4m3, false>());
    case Kind::kFp8E5m2: return function(Scaled<Fp8E5m2, false>());
    case Kind::kInt8: return function(Scaled<Int8, false>());
    default: return function(Scaled<Int4, true>());
  }
}

// ---- places ------------------------------------------------------------------------------------------------------------

/// The elements of a tile that one thread has, as groups of consecutive ones.
template <int kGroupSize>
struct Places {
  static constexpr int kGroup = kGroupSize;
  static constexpr int kGroups = kElementsPerThread / kGroup;
  static_assert(kGroup % 4 == 0 && kGroups >= 1);

  /// First element of group i.
  static __device__ __forceinline__ int element(int i) {
    return threadIdx.x / kWarpSize * kPerWarp + (i * kWarpSize + threadIdx.x % kWarpSize) * kGroup;
  }
};

template <int kGroup>
using Values = float[kElementsPerThread / kGroup][kGroup];

/// Moves kNumBytes, a power of two from 2 to 64, between memory and registers. `address` is a multiple of it, or of 16.
template <int kNumBytes>
__device__ __forceinline__ void load_bytes(const uint8_t* address, uint32_t* words) {
  if constexpr (kNumBytes == 2) {
    words[0] = *reinterpret_cast<const uint16_t*>(address);
  } else if constexpr (kNumBytes == 4) {
    words[0] = *reinterpret_cast<const uint32_t*>(address);
  } else if constexpr (kNumBytes == 8) {
    const uint2 both = *reinterpret_cast<const uint2*>(address);
    words[0] = both.x;
    words[1] = both.y;
  } else {
#pragma unroll
    for (int i = 0; i < kNumBytes / 16; ++i) {
      const uint4 four = reinterpret_cast<const uint4*>(address)[i];
      words[4 * i] = four.x;
      words[4 * i + 1] = four.y;
      words[4 * i + 2] = four.z;
      words[4 * i + 3] = four.w;
    }
  }
}

template <int kNumBytes>
__device__ __forceinline__ void store_bytes(uint8_t* address, const uint32_t* words) {
  if constexpr (kNumBytes == 2) {
    *reinterpret_cast<uint16_t*>(address) = static_cast<uint16_t>(words[0]);
  } else if constexpr (kNumBytes == 4) {
    *reinterpret_cast<uint32_t*>(address) = words[0];
  } else if constexpr (kNumBytes == 8) {
    *reinterpret_cast<uint2*>(address) = make_uint2(words[0], words[1]);
  } else {
#pragma unroll
    for (int i = 0; i < kNumBytes / 16; ++i) {
      reinterpret_cast<uint4*>(address)[i] = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
    }
  }
}

/// Codes of one group as words.
template <class Format, int kGroup>
struct Codes {
  static constexpr int kBytes = kGroup * Format::kBits / 8;
  static constexpr int kWords = kBytes < 4 ? 1 : kBytes / 4;
  static constexpr int kPerWord = 32 / Format::kBits;
  // Elements of codes that fill 16 bytes: the codes of a share are padded to a multiple of it.
  static constexpr int kPadding = 128 / Format::kBits;
  uint32_t word[kWords];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = 0;
  }
  __device__ __forceinline__ void set(int j, uint32_t code) { word[j / kPerWord] |= code << (j % kPerWord * Format::kBits); }
  __device__ __forceinline__ uint32_t get(int j) const {
    const uint32_t shifted = word[j / kPerWord] >> (j % kPerWord * Format::kBits);
    if constexpr (Format::kBits == 32) return shifted;
    return shifted & ((1u << (Format::kBits % 32)) - 1u);
  }
  __device__ __forceinline__ void load(const uint8_t* codes, int64_t element) {
    load_bytes<kBytes>(codes + element * Format::kBits / 8, word);
  }
  __device__ __forceinline__ void store(uint8_t* codes, int64_t element, int numel_in_tile, int element_in_tile) const {
    const int padded = (numel_in_tile + kPadding - 1) / kPadding * kPadding;
    uint8_t* address = codes + element * Format::kBits / 8;
    if (element_in_tile + kGroup <= padded) {
      store_bytes<kBytes>(address, word);
    } else if constexpr (kBytes > 16) {
#pragma unroll
      for (int i = 0; i < kBytes / 16; ++i) {
        if (element_in_tile + (i + 1) * kPadding <= padded) store_bytes<16>(address + 16 * i, word + 4 * i);
      }
    }
  }
};

/// One tile, and what its threads need to know of it.
struct Work {
  Share share;
  int64_t first;  // element of the share
  int numel;
  uint8_t* chunk;

  __device__ __forceinline__ uint8_t* codes() const { return chunk + share.codes_offset; }
  __device__ __forceinline__ uint8_t* scales() const { return chunk + share.scales_offset; }
  __device__ __forceinline__ int block_shift() const { return __ffs(share.block_size) - 1; }
  __device__ __forceinline__ bool is_last() const { return first + numel == share.numel; }
};

// ---- 3. scales ---------------------------------------------------------------------------------------------------------

/// Scale and inverse of the block that each group of this thread lies in. All threads of the block must call it, and only once: what
/// the warps tell each other is not protected from a second call.
template <class Format, int kGroup>
__device__ __forceinline__ void find_scales(const Values<kGroup>& x, int block_size,
                                            BlockScale (&scales)[kElementsPerThread / kGroup]) {
  constexpr int kGroups = kElementsPerThread / kGroup;
  __shared__ uint32_t of_warps[kWarps];
  uint32_t absmax[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    absmax[i] = 0;
#pragma unroll
    for (int j = 0; j < kGroup; ++j) absmax[i] = max(absmax[i], gsync::bits_of(x[i][j]) & 0x7fffffffu);
  }
  // Groups of a thread that lie in one block are 32 groups apart.
#pragma unroll
  for (int span = 1; span < kGroups; span *= 2) {
    if (block_size < 2 * span * kWarpSize * kGroup) continue;
#pragma unroll
    for (int i = 0; i < kGroups; i += 2 * span) {
      const uint32_t both = max(absmax[i], absmax[i + span]);
#pragma unroll
      for (int k = 0; k < 2 * span; ++k) absmax[i + k] = both;
    }
  }
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    if (distance * kGroup >= block_size) continue;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) absmax[i] = max(absmax[i], __shfl_xor_sync(kAllLanes, absmax[i], distance));
  }
  if (block_size > kPerWarp) {
    const int warp = threadIdx.x / kWarpSize;
    if (threadIdx.x % kWarpSize == 0) of_warps[warp] = absmax[0];
    __syncthreads();
    const int warps = block_size / kPerWarp;
    uint32_t largest = 0;
    for (int i = warp / warps * warps; i < warp / warps * warps + warps; ++i) largest = max(largest, of_warps[i]);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) absmax[i] = largest;
  }
  // The divisions: lane l does those of group l mod kGroups, whose block its neighbours share.
  const int lane = threadIdx.x % kWarpSize;
  // Chosen by the bits of the lane: a chain of comparisons became an array in local memory on sm_100.
#pragma unroll
  for (int span = 1; span < kGroups; span *= 2) {
#pragma unroll
    for (int i = 0; i < kGroups; i += 2 * span) absmax[i] = (lane & span) != 0 ? absmax[i + span] : absmax[i];
  }
  const BlockScale scale = Format::scale_of(absmax[0]);
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const int source = lane / kGroups * kGroups + i;
    scales[i].scale = __shfl_sync(kAllLanes, scale.scale, source);
    scales[i].inv = __shfl_sync(kAllLanes, scale.inv, source);
  }
}

// ---- 4. codes ----------------------------------------------------------------------------------------------------------

/// What EncodeOptions says, as a kernel sees it.
struct Options {
  float* residual;  // of the tile's first element, or null
  double* sums;  // of the tile, or null
  uint64_t random_key;
  bool stochastic;
  bool counts;  // elements that vanished

  // What this thread found.
  double residual_squares = 0;
  double input_squares = 0;
  int nonzero = 0;
  int vanished = 0;
  int zero_codes = 0;  // among elements that the caller marked
};

__device__ __forceinline__ bool is_finite(float value) { return (gsync::bits_of(value) & 0x7f800000u) != 0x7f800000u; }

/// What encoding four elements lost: to the residual and the sums. `element` is the first one's place in the tile, `first` that in
/// the codes; bit j of `marked` is element j.
template <class Format, class CodesOfGroup>
__device__ __forceinline__ void take_lost(const Work& work, const float* x, const CodesOfGroup& codes, int first, int element,
                                          float scale, uint32_t marked, bool by_vector, Options& options) {
  float lost[4];
  bool finite[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float decoded = Format::decode(codes.get(first + j));
    if constexpr (Format::kHasScale) decoded = decode_scaled(decoded, scale);
    lost[j] = x[j] - decoded;
    finite[j] = is_finite(decoded);
    if (options.sums != nullptr && finite[j] && element + j < work.numel) {
      const double error = lost[j];
      const double value = x[j];
      options.residual_squares += error * error;
      options.input_squares += value * value;
      options.nonzero += x[j] != 0.0f;
      options.vanished += x[j] != 0.0f && decoded == 0.0f;
    }
    options.zero_codes += (marked >> j & 1u) != 0 && decoded == 0.0f;
  }
  if (options.residual == nullptr) return;
  float* residual = options.residual + element;
  // What is not finite keeps its residual.
  if (by_vector && element + 4 <= work.numel && finite[0] && finite[1] && finite[2] && finite[3]) {
    *reinterpret_cast<float4*>(residual) = make_float4(lost[0], lost[1], lost[2], lost[3]);
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (element + j < work.numel && finite[j]) residual[j] = lost[j];
    }
  }
}

/// Writes codes and scales of a tile, and what encoding lost. x is zero past the end. Bit j of `marked` is element j of the thread.
template <class Format, int kGroup>
__device__ __forceinline__ void encode_tile(const Work& work, const Values<kGroup>& x, uint32_t marked, Options& options) {
  using P = Places<kGroup>;
  BlockScale scales[P::kGroups];
  if constexpr (Format::kHasScale) find_scales<Format, kGroup>(x, work.share.block_size, scales);

  const bool wants_lost = options.residual != nullptr || options.sums != nullptr || options.counts;
  const bool by_vector = is_vector_aligned(options.residual);
#pragma unroll
  for (int i = 0; i < P::kGroups; ++i) {
    const int element = P::element(i);
    float inv = 1.0f;
    float scale = 1.0f;
    if constexpr (Format::kHasScale) {
      inv = scales[i].inv;
      scale = scales[i].scale;
      if (element % work.share.block_size == 0 && element < work.numel) {
        Format::store_scale(work.scales(), (work.first + element) >> work.block_shift(), scale);
      }
    }
    Codes<Format, kGroup> codes;
    codes.clear();
    // Four at a time: as many as one round of random words, and as a vector of residuals.
#pragma unroll
    for (int q = 0; q < kGroup; q += 4) {
      PhiloxWords words{};
      if (options.stochastic) {
        const uint64_t quad = static_cast<uint64_t>(work.share.element + work.first + element + q) / 4;
        words = philox(options.random_key, work.share.name_hash, quad);
      }
#pragma unroll
      for (int j = q; j < q + 4; ++j) {
        uint32_t code = 0;
        if (inv != 0.0f) {
          const float y = Format::kHasScale ? x[i][j] * inv : x[i][j];
          code = options.stochastic ? Format::encode(y, words.word[j - q]) : Format::encode(y);
        }
        codes.set(j, code);
      }
      if (wants_lost) {
        take_lost<Format>(work, x[i] + q, codes, q, element + q, scale, marked >> (i * kGroup + q), by_vector, options);
      }
    }
    codes.store(work.codes(), work.first + element, work.numel, element);
  }
}

/// What zeros encode to, in place of a tile.
template <class Format>
__device__ __forceinline__ void write_zero_tile(const Work& work) {
  Codes<Format, 16> zeros;
  zeros.clear();
  const int element = Places<16>::element(0);
  zeros.store(work.codes(), work.first + element, work.numel, element);
  if constexpr (Format::kHasScale) {
    const int num_blocks = (work.numel + work.share.block_size - 1) >> work.block_shift();
    if (threadIdx.x < num_blocks) Format::store_scale(work.scales(), (work.first >> work.block_shift()) + threadIdx.x, 0.0f);
  }
}

/// Zeros after the scales of a share, by its last tile.
template <class Format>
__device__ __forceinline__ void finish_share(const Work& work) {
  if constexpr (Format::kHasScale) {
    if (!work.is_last() || threadIdx.x >= work.share.scales_padding) return;
    const int64_t num_blocks = (work.share.numel + work.share.block_size - 1) >> work.block_shift();
    work.scales()[num_blocks * Format::kScaleBytes + threadIdx.x] = 0;
  }
}

template <int kGroup>
__device__ __forceinline__ void add_residual(const Work& work, const float* residuals, Values<kGroup>& x) {
  using P = Places<kGroup>;
  const bool by_vector = is_vector_aligned(residuals);
#pragma unroll
  for (int i = 0; i < P::kGroups; ++i) {
    const int element = P::element(i);
    if (by_vector && element + kGroup <= work.numel) {
#pragma unroll
      for (int j = 0; j < kGroup; j += 4) {
        const float4 four = *reinterpret_cast<const float4*>(residuals + element + j);
        x[i][j] += four.x;
        x[i][j + 1] += four.y;
        x[i][j + 2] += four.z;
        x[i][j + 3] += four.w;
      }
    } else {
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        if (element + j < work.numel) x[i][j] += residuals[element + j];
      }
    }
  }
}

/// Adds a tile's sums of errors. All threads must call it.
__device__ __forceinline__ void add_error_sums(const Options& options) {
  if (options.sums == nullptr) return;
  const double residual_squares = block_sum<kThreads>(options.residual_squares);
  const double input_squares = block_sum<kThreads>(options.input_squares);
  const int nonzero = block_sum<kThreads>(options.nonzero);
  const int vanished = block_sum<kThreads>(options.vanished);
  if (threadIdx.x != 0) return;
  options.sums[kResidualSquares] += residual_squares;
  options.sums[kInputSquares] += input_squares;
  options.sums[kNonzero] += nonzero;
  options.sums[kVanished] += vanished;
}

/// The part of a launch's parameters that describes how to encode.
struct EncodeParams {
  int64_t first_residual;  // entry of the table of addresses, or -1
  double* error_sums;
  uint64_t random_key;
  bool stochastic;

  template <class Table>
  __device__ __forceinline__ Options options_of(const Table& addresses, const Work& work, bool counts) const {
    float* residual = nullptr;
    if (first_residual >= 0) {
      residual = static_cast<float*>(const_cast<void*>(addresses[first_residual + work.share.segment]));
      if (residual != nullptr) residual = global_memory(residual) + work.share.element + work.first;
    }
    double* sums = error_sums == nullptr ? nullptr : error_sums + int64_t{blockIdx.x} * kErrorSums;
    return Options{residual, sums, random_key, stochastic, counts};
  }
};

inline EncodeParams encode_params(const EncodeOptions& encode, int64_t first_residual) {
  return {encode.residuals == nullptr ? -1 : first_residual, encode.error_sums, encode.random_key, encode.stochastic};
}

/// Looks up the tile of this thread block; true if it is flags or padding, which `is_set` and this function then write.
template <class IsSet>
__device__ __forceinline__ bool write_other(const Work& work, IsSet&& is_set) {
  if (work.share.kind == Kind::kFlags) {
    write_flags(work.chunk, work.share, work.first, work.numel, is_set);
    return true;
  }
  if (work.share.kind == Kind::kPadding) {
    write_zeros(codes_at<uint8_t>(work.chunk, work.share, work.first), work.numel);
    return true;
  }
  return false;
}

__device__ __forceinline__ Work work_of(const Share* shares, const Tile* tiles, uint8_t* payload, int64_t chunk_bytes) {
  const Tile tile = tiles[blockIdx.x];
  Work work;
  work.share = shares[tile.share];
  work.first = tile.index * kTileElements;
  work.numel = numel_of_tile(work.share, work.first);
  work.chunk = payload + work.share.chunk * chunk_bytes;
  return work;
}

}  // namespace gsync::cuda::block
