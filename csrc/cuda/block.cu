// pack, reduce and unpack for any layout: codecs with one scale per block beside those without, residuals, stochastic rounding.
//
// One launch does a whole bucket; thread block i does tile i, whose 4096 elements its threads keep in registers, 16 each. So the
// largest magnitude of a block of elements and its codes come from one read:
//
//   1. look up tile and share
//   2. values     pack: gradient * scale; reduce: sum over ranks * scale, from codes or, for a shard, from fp32; both + residual
//   3. scales     integer maximum within a lane, across the lanes that share a block, for blocks above 512 across warps
//   4. codes, and what they lost
//   5. sums of errors over the thread block, where somebody wants them
//
// A warp has 512 consecutive elements, in rounds of 32 groups: neighbouring lanes have neighbouring groups, so that all accesses
// are coalesced. A group is what fills 16 bytes on the wider side: 4 elements of an fp32 gradient, 8 of an fp16 or bf16 one, and in
// `reduce` up to 16 codes. Arithmetic per value is that of codecs/block.h; compiled with --fmad=false.

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "block.cuh"
#include "families.h"
#include "launch.cuh"

namespace gsync::cuda::block {
namespace {

// ---- pack ------------------------------------------------------------------------------------------------------------

/// Values of a tile: gradient * scale, zero past the end. Returns a mask of this thread's elements that are not zero.
template <class Gradient, int kGroup>
__device__ __forceinline__ uint32_t load_values(const Work& work, const void* address, float scale, Values<kGroup>& x) {
  using P = Places<kGroup>;
  using Bits = typename Gradient::Bits;
  using V = Vector<Bits>;
  constexpr int kVectors = kGroup / V::kElements;
  const Bits* gradient = global_memory(static_cast<const Bits*>(address)) + work.share.element + work.first;
  uint32_t nonzero = 0;
  if (work.numel == kTileElements && is_vector_aligned(gradient)) {
    V in[P::kGroups][kVectors];
#pragma unroll
    for (int i = 0; i < P::kGroups; ++i) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) in[i][v] = load_vector(gradient + P::element(i) + v * V::kElements);
    }
#pragma unroll
    for (int i = 0; i < P::kGroups; ++i) {
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        const Bits bits = element_of(in[i], j);
        nonzero |= static_cast<uint32_t>(!Gradient::is_zero(bits)) << (i * kGroup + j);
        x[i][j] = Gradient::decode(bits) * scale;
      }
    }
    return nonzero;
  }
#pragma unroll
  for (int i = 0; i < P::kGroups; ++i) {
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      const int element = P::element(i) + j;
      x[i][j] = 0.0f;
      if (element < work.numel) {
        const Bits bits = gradient[element];
        nonzero |= static_cast<uint32_t>(!Gradient::is_zero(bits)) << (i * kGroup + j);
        x[i][j] = Gradient::decode(bits) * scale;
      }
    }
  }
  return nonzero;
}

template <int kCapacity>
struct PackParams {
  AddressTable<kCapacity> addresses;
  const Share* shares;
  const Tile* tiles;
  int64_t chunk_bytes;
  uint8_t* payload;
  unsigned long long* counters;
  EncodeParams encode;
  float scale;
};

template <int kGroup>
__device__ __forceinline__ void pack_tile(const Work& work, const void* address, float scale, Options& options,
                                          unsigned long long* counters) {
  Values<kGroup> x;
  uint32_t nonzero = 0;
  with_gradient(work.share.dtype, [&](auto gradient) {
    using Gradient = decltype(gradient);
    if constexpr ((sizeof(typename Gradient::Bits) == 2) == (kGroup == 8)) {
      nonzero = load_values<Gradient, kGroup>(work, address, scale, x);
    }
  });
  if (options.residual != nullptr) add_residual<kGroup>(work, options.residual, x);
  with_format(work.share.kind, [&](auto format) { encode_tile<decltype(format), kGroup>(work, x, nonzero, options); });
  add_error_sums(options);
  if (!options.counts) return;
  const int counted = block_sum<kThreads>(__popc(nonzero));
  const int vanished = block_sum<kThreads>(options.zero_codes);
  if (threadIdx.x == 0 && counted != 0) {
    atomicAdd(counters, static_cast<unsigned long long>(counted));
    if (vanished != 0) atomicAdd(counters + 1, static_cast<unsigned long long>(vanished));
  }
}

template <int kCapacity>
__global__ void __launch_bounds__(kThreads, kBlocks) block_pack_kernel(const __grid_constant__ PackParams<kCapacity> params) {
  const Work work = work_of(params.shares, params.tiles, params.payload, params.chunk_bytes);
  if (write_other(work, [&](int64_t segment) { return params.addresses[segment] != nullptr; })) return;

  const void* address = params.addresses[work.share.segment];
  with_format(work.share.kind, [&](auto format) {
    if (address == nullptr) write_zero_tile<decltype(format)>(work);
    finish_share<decltype(format)>(work);
  });
  if (address == nullptr) return;
  Options options = params.encode.options_of(params.addresses, work, params.counters != nullptr && is_plain(work.share.kind));
  if (work.share.dtype == Dtype::kFp16 || work.share.dtype == Dtype::kBf16) {
    pack_tile<8>(work, address, params.scale, options, params.counters);
  } else {
    pack_tile<4>(work, address, params.scale, options, params.counters);
  }
}

// ---- reduce ----------------------------------------------------------------------------------------------------------

template <int kCapacity>
struct ReduceParams {
  AddressTable<kCapacity> addresses;
  const Share* shares;
  const Tile* tiles;
  int64_t num_payloads;
  uint8_t* out;
  EncodeParams encode;
  int32_t flag_bytes;
  float scale;
  // A shard: see ReduceArgs.
  const Share* sent_shares;
  int64_t sent_chunk_bytes;
  int64_t chunk_bytes;
  int64_t first_chunk;
};

/// The places of a tile in the payloads: bytes from their beginning.
struct Sent {
  int64_t codes;
  int64_t scales;
};

/// SentFormat: of the payloads; Format: of the result.
template <class SentFormat, class Format, int kGroup, int kCapacity>
__device__ __forceinline__ void reduce_tile(const ReduceParams<kCapacity>& params, const Work& work, const Sent& sent,
                                            Options& options) {
  using P = Places<kGroup>;
  using C = Codes<SentFormat, kGroup>;
  Values<kGroup> x;
#pragma unroll
  for (int i = 0; i < P::kGroups; ++i) {
#pragma unroll
    for (int j = 0; j < kGroup; ++j) x[i][j] = -0.0f;  // the one number that adding to changes nothing, zeros included
  }
#pragma unroll 2
  for (int64_t rank = 0; rank < params.num_payloads; ++rank) {
    const uint8_t* chunk = global_memory(static_cast<const uint8_t*>(params.addresses[rank]));
    C codes[P::kGroups];
    float scales[P::kGroups];
#pragma unroll
    for (int i = 0; i < P::kGroups; ++i) {
      const int element = P::element(i);
      codes[i].clear();
      scales[i] = 0.0f;
      if (element >= work.numel) continue;
      // A group of more than 16 bytes does not exist; one that begins inside ends within the padding.
      codes[i].load(chunk + sent.codes, work.first + element);
      if constexpr (SentFormat::kHasScale) {
        scales[i] = SentFormat::load_scale(chunk + sent.scales, (work.first + element) >> work.block_shift());
      }
    }
#pragma unroll
    for (int i = 0; i < P::kGroups; ++i) {
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        float value = SentFormat::decode(codes[i].get(j));
        if constexpr (SentFormat::kHasScale) value = decode_scaled(value, scales[i]);
        x[i][j] += value;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < P::kGroups; ++i) {
#pragma unroll
    for (int j = 0; j < kGroup; ++j) x[i][j] = P::element(i) + j < work.numel ? x[i][j] * params.scale : 0.0f;
  }
  if (options.residual != nullptr) add_residual<kGroup>(work, options.residual, x);
  encode_tile<Format, kGroup>(work, x, 0, options);
}

/// kIsShard: the payloads hold a shard in fp32.
template <int kCapacity, bool kIsShard>
__device__ __forceinline__ void reduce_work(const ReduceParams<kCapacity>& params, const Work& work, const Sent& sent) {
  // The flags are the first bytes of a chunk.
  const auto is_used = [&](int64_t segment) {
    bool used = false;
    for (int64_t rank = 0; rank < params.num_payloads; ++rank) {
      used |= is_flag_set(static_cast<const uint8_t*>(params.addresses[rank]), segment, params.flag_bytes);
    }
    return used;
  };
  if (write_other(work, is_used)) return;

  Options options = params.encode.options_of(params.addresses, work, false);
  // A parameter that no rank used stays zero, and the reducer keeps its residual.
  const bool is_there = options.residual == nullptr || is_used(work.share.segment);
  with_format(work.share.kind, [&](auto format) {
    using Format = decltype(format);
    using SentFormat = std::conditional_t<kIsShard, Plain<Fp32>, Format>;
    // As many codes as fill 16 bytes on the wider side, or all that a thread has.
    constexpr int kGroup = SentFormat::kBits <= 8 ? 16 : 128 / SentFormat::kBits;
    if (is_there) {
      reduce_tile<SentFormat, Format, kGroup>(params, work, sent, options);
    } else {
      write_zero_tile<Format>(work);
    }
    finish_share<Format>(work);
  });
  if (is_there) add_error_sums(options);
}

template <int kCapacity>
__global__ void __launch_bounds__(kThreads, kBlocks) block_reduce_kernel(const __grid_constant__ ReduceParams<kCapacity> params) {
  const Work work = work_of(params.shares, params.tiles, params.out, 0);
  reduce_work<kCapacity, false>(params, work, {work.share.codes_offset, work.share.scales_offset});
}

/// Of a shard: sums what the ranks of a host packed as fp32 and encodes it for the first time.
template <int kCapacity>
__global__ void __launch_bounds__(kThreads, kBlocks) shard_reduce_kernel(const __grid_constant__ ReduceParams<kCapacity> params) {
  const Tile tile = params.tiles[blockIdx.x];
  const int64_t chunk = params.shares[tile.share].chunk - params.first_chunk;
  const Work work =
      work_of(params.shares, params.tiles, params.out - params.first_chunk * params.chunk_bytes, params.chunk_bytes);
  reduce_work<kCapacity, true>(params, work, {chunk * params.sent_chunk_bytes + params.sent_shares[tile.share].codes_offset, 0});
}

// ---- unpack ----------------------------------------------------------------------------------------------------------

template <class Format, class Gradient>
__device__ __forceinline__ void unpack_scaled(const Work& work, void* address, bool failed, Measure& measure) {
  using Bits = typename Gradient::Bits;
  using V = Vector<Bits>;
  constexpr int kGroup = sizeof(Bits) == 2 ? 8 : 4;
  constexpr int kVectors = kGroup / V::kElements;
  using P = Places<kGroup>;
  Bits* gradient = address == nullptr ? nullptr : global_memory(static_cast<Bits*>(address)) + work.share.element + work.first;
  const bool by_vector = is_vector_aligned(gradient);

  Codes<Format, kGroup> codes[P::kGroups];
  float scales[P::kGroups];
#pragma unroll
  for (int i = 0; i < P::kGroups; ++i) {
    const int element = P::element(i);
    if (element >= work.numel) continue;
    codes[i].load(work.codes(), work.first + element);
    scales[i] = Format::load_scale(work.scales(), (work.first + element) >> work.block_shift());
  }
#pragma unroll
  for (int i = 0; i < P::kGroups; ++i) {
    const int element = P::element(i);
    if (element >= work.numel) continue;
    V out[kVectors];
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      const float value = failed ? float_of(kNanBits) : decode_scaled(Format::decode(codes[i].get(j)), scales[i]);
      const Bits bits = Gradient::encode(value);
      out[j / V::kElements].element[j % V::kElements] = bits;
      if (element + j < work.numel) measure.add(Gradient::decode(bits));
    }
    if (gradient == nullptr) continue;
    if (by_vector && element + kGroup <= work.numel) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) store_vector(gradient + element + v * V::kElements, out[v]);
    } else {
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        if (element + j < work.numel) gradient[element + j] = element_of(out, j);
      }
    }
  }
}

template <int kCapacity>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    block_unpack_kernel(const __grid_constant__ UnpackParams<kCapacity> params) {
  // Host memory, a microsecond away: asked for first, needed last.
  const bool failed = params.failed != nullptr && *static_cast<const volatile int32_t*>(params.failed) != 0;

  if (blockIdx.x < params.num_tiles) {
    const Work work = work_of(params.shares, params.tiles, const_cast<uint8_t*>(params.payload), params.chunk_bytes);
    const Kind kind = work.share.kind;
    if (kind != Kind::kFlags && kind != Kind::kPadding) {
      void* address = const_cast<void*>(params.gradients[work.share.segment]);
      Measure measure;
      with_gradient(work.share.dtype, [&](auto gradient) {
        using Gradient = decltype(gradient);
        using Bits = typename Gradient::Bits;
        if (is_plain(kind)) {
          with_code(kind, [&](auto code) {
            using Code = decltype(code);
            auto* values = static_cast<Bits*>(address);
            if (values != nullptr) values += work.share.element + work.first;
            const auto* codes = codes_at<typename Code::Bits>(const_cast<const uint8_t*>(work.chunk), work.share, work.first);
            unpack_tile<Code, Gradient>(codes, values, work.numel, failed, measure);
          });
        } else if (kind == Kind::kFp8E4m3) {
          unpack_scaled<Scaled<Fp8E4m3, false>, Gradient>(work, address, failed, measure);
        } else if (kind == Kind::kFp8E5m2) {
          unpack_scaled<Scaled<Fp8E5m2, false>, Gradient>(work, address, failed, measure);
        } else if (kind == Kind::kInt8) {
          unpack_scaled<Scaled<Int8, false>, Gradient>(work, address, failed, measure);
        } else {
          unpack_scaled<Scaled<Int4, true>, Gradient>(work, address, failed, measure);
        }
      });

      const bool nonfinite = __syncthreads_or(measure.nonfinite);
      const double sum = block_sum<kThreads>(measure.sum_of_squares);
      if (threadIdx.x == 0) {
        params.partials[work.share.first_partial + work.first / kTileElements] = sum;
        if (nonfinite) *params.found_nonfinite = 1;  // every block that writes it writes the same
      }
    }
  }

  if (params.segments != nullptr && is_last_block(params.ticket)) {
    sum_partials(params.partials, params.segments, params.num_segments, params.sum_of_squares);
  }
}

}  // namespace

// ---- launchers -------------------------------------------------------------------------------------------------------

static const void* const* residuals_of(const EncodeOptions& encode) {
  return reinterpret_cast<const void* const*>(encode.residuals);
}

cudaError_t pack(const PackArgs& args, const Workspace& workspace, cudaStream_t stream) {
  const LayoutView& layout = args.layout;
  if (layout.num_tiles == 0) return cudaSuccess;
  const bool with_residuals = args.encode.residuals != nullptr;
  return with_table_for(layout.num_segments * (with_residuals ? 2 : 1), workspace, [&](auto capacity) {
    PackParams<capacity> params;
    params.addresses.fill(args.gradients, layout.num_segments, workspace);
    if (with_residuals) params.addresses.fill(residuals_of(args.encode), layout.num_segments, workspace, layout.num_segments);
    params.shares = layout.shares;
    params.tiles = layout.tiles;
    params.chunk_bytes = layout.chunk_bytes;
    params.payload = args.payload;
    params.counters = reinterpret_cast<unsigned long long*>(args.counters);
    params.encode = encode_params(args.encode, layout.num_segments);
    params.scale = args.scale;
    return launch(block_pack_kernel<capacity>, layout.num_tiles, kThreads, stream, params);
  });
}

cudaError_t reduce(const ReduceArgs& args, const Workspace& workspace, cudaStream_t stream) {
  const LayoutView& layout = args.layout;
  if (layout.num_tiles == 0) return cudaSuccess;
  if (args.num_payloads < 1) return cudaErrorInvalidValue;
  const int64_t num_residuals = args.encode.residuals != nullptr ? layout.num_segments : 0;
  return with_table_for(args.num_payloads + num_residuals, workspace, [&](auto capacity) {
    ReduceParams<capacity> params;
    params.addresses.fill(reinterpret_cast<const void* const*>(args.payloads), args.num_payloads, workspace);
    params.addresses.fill(residuals_of(args.encode), num_residuals, workspace, args.num_payloads);
    params.shares = layout.shares;
    params.tiles = layout.tiles;
    params.num_payloads = args.num_payloads;
    params.out = args.out;
    params.encode = encode_params(args.encode, args.num_payloads);
    params.flag_bytes = layout.flag_bytes;
    params.scale = args.scale;
    params.sent_shares = args.sent_shares;
    params.sent_chunk_bytes = args.sent_chunk_bytes;
    params.chunk_bytes = layout.chunk_bytes;
    params.first_chunk = args.first_chunk;
    const auto kernel = args.is_shard() ? shard_reduce_kernel<capacity> : block_reduce_kernel<capacity>;
    return launch(kernel, layout.num_tiles, kThreads, stream, params);
  });
}

cudaError_t unpack(const UnpackArgs& args, const Workspace& workspace, cudaStream_t stream) {
  return launch_unpack(args, workspace, stream, [](auto capacity) { return block_unpack_kernel<capacity>; });
}

}  // namespace gsync::cuda::block
