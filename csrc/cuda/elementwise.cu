// pack, reduce and unpack for the codecs without a scale: fp32, fp16, bf16.
//
// One launch does a whole bucket: thread block i does tile i, at most kTileElements consecutive elements of one share, and looks up in
// the tables which parameter, codec and gradient dtype that is. A thread handles groups of consecutive elements, as many as fill
// 16 bytes on the narrower side, so both sides move in 16-byte accesses:
//
//   1. look up tile and share                                             (2 dependent loads, the same for all threads)
//   2. load all groups of this thread, 16 elements, before using any      (keeps 2 to 8 accesses in flight)
//   3. convert and store them
//   4. the elements after the last whole group, one per thread            (with the zeros that pad the codes to 16 bytes)
//   5. sums over the block, and in `unpack` the last block to finish adds up the partials
//
// Payloads are 16-byte aligned at every share. A gradient that is not (a view into something) takes a path of one element per thread and
// access, neighbouring threads on neighbouring elements. Which thread squares which element is the same on both paths.
// Arithmetic per value is that of codecs/elementwise.h; compiled with --fmad=false.

#include <cuda_runtime.h>

#include <cstdint>

#include "elementwise.cuh"
#include "families.h"
#include "launch.cuh"

namespace gsync::cuda::elementwise {
namespace {

// ---- pack ------------------------------------------------------------------------------------------------------------

/// Elements that are not zero, and those of them whose code is; counted when somebody asks.
struct ZeroCounts {
  bool wanted;
  int nonzero = 0;
  int vanished = 0;

  template <class Code, class Gradient>
  __device__ __forceinline__ void add(typename Code::Bits code, typename Gradient::Bits gradient) {
    const bool counts = !Gradient::is_zero(gradient);
    nonzero += counts;
    vanished += counts && Code::is_zero(code);
  }
};

template <class Code, class Gradient>
__device__ __forceinline__ void pack_tile(const typename Gradient::Bits* gradient, typename Code::Bits* codes, int numel,
                                          float scale, ZeroCounts& counts) {
  using G = Group<Code, Gradient>;
  const auto encode = [&](typename Gradient::Bits bits) { return Code::encode(Gradient::decode(bits) * scale); };
  const int groups = is_vector_aligned(gradient) ? numel / G::kElements : 0;

  typename G::GradientVector in[G::kPerThread][G::kGradientVectors];
#pragma unroll
  for (int i = 0; i < G::kPerThread; ++i) {
    const int group = threadIdx.x + i * kThreads;
    if (group >= groups) continue;
#pragma unroll
    for (int v = 0; v < G::kGradientVectors; ++v) {
      in[i][v] = load_vector(gradient + group * G::kElements + v * G::GradientVector::kElements);
    }
  }
#pragma unroll
  for (int i = 0; i < G::kPerThread; ++i) {
    const int group = threadIdx.x + i * kThreads;
    if (group >= groups) continue;
#pragma unroll
    for (int v = 0; v < G::kCodeVectors; ++v) {
      typename G::CodeVector out;
#pragma unroll
      for (int j = 0; j < G::CodeVector::kElements; ++j) {
        const int element = v * G::CodeVector::kElements + j;
        out.element[j] = encode(element_of(in[i], element));
      }
      if (counts.wanted) {
#pragma unroll
        for (int j = 0; j < G::CodeVector::kElements; ++j) {
          const int element = v * G::CodeVector::kElements + j;
          counts.add<Code, Gradient>(out.element[j], element_of(in[i], element));
        }
      }
      store_vector(codes + group * G::kElements + v * G::CodeVector::kElements, out);
    }
  }

  // All of a gradient that is not aligned, else what does not fill a group; and zeros up to 16 bytes.
  constexpr int kPad = G::CodeVector::kElements;
  const int padded = (numel + kPad - 1) / kPad * kPad;
#pragma unroll 4
  for (int i = groups * G::kElements + threadIdx.x; i < padded; i += kThreads) {
    typename Code::Bits code = 0;
    if (i < numel) {
      const typename Gradient::Bits bits = gradient[i];
      code = encode(bits);
      if (counts.wanted) counts.add<Code, Gradient>(code, bits);
    }
    codes[i] = code;
  }
}

template <int kCapacity>
struct PackParams {
  AddressTable<kCapacity> gradients;
  const Share* shares;
  const Tile* tiles;
  int64_t chunk_bytes;
  uint8_t* payload;
  unsigned long long* counters;
  float scale;
};

template <int kCapacity>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    pack_kernel(const __grid_constant__ PackParams<kCapacity> params) {
  const Tile tile = params.tiles[blockIdx.x];
  const Share share = params.shares[tile.share];
  const int64_t first = tile.index * kTileElements;
  const int numel = numel_of_tile(share, first);
  uint8_t* chunk = params.payload + share.chunk * params.chunk_bytes;

  if (share.kind == Kind::kFlags) {
    write_flags(chunk, share, first, numel, [&](int64_t segment) { return params.gradients[segment] != nullptr; });
    return;
  }
  if (share.kind == Kind::kPadding) {
    write_zeros(codes_at<uint8_t>(chunk, share, first), numel);
    return;
  }

  const void* address = params.gradients[share.segment];
  ZeroCounts counts{params.counters != nullptr};
  with_code(share.kind, [&](auto code) {
    using Code = decltype(code);
    auto* codes = codes_at<typename Code::Bits>(chunk, share, first);
    if (address == nullptr) {
      write_zeros(codes, numel);
      return;
    }
    with_gradient(share.dtype, [&](auto gradient) {
      using Gradient = decltype(gradient);
      const auto* values = global_memory(static_cast<const typename Gradient::Bits*>(address)) + share.element + first;
      pack_tile<Code, Gradient>(values, codes, numel, params.scale, counts);
    });
  });

  if (!counts.wanted) return;
  const int nonzero = block_sum<kThreads>(counts.nonzero);
  const int vanished = block_sum<kThreads>(counts.vanished);
  if (threadIdx.x == 0 && nonzero != 0) {
    atomicAdd(params.counters, static_cast<unsigned long long>(nonzero));
    if (vanished != 0) atomicAdd(params.counters + 1, static_cast<unsigned long long>(vanished));
  }
}

// ---- reduce ----------------------------------------------------------------------------------------------------------

template <int kCapacity>
struct ReduceParams {
  AddressTable<kCapacity> payloads;
  const Share* shares;
  const Tile* tiles;
  int64_t num_payloads;
  uint8_t* out;
  float scale;
};

template <class Code, int kCapacity>
__device__ __forceinline__ void reduce_tile(const ReduceParams<kCapacity>& params, const Share& share, int64_t first, int numel) {
  using Bits = typename Code::Bits;
  constexpr int kElements = Vector<Bits>::kElements;
  constexpr int kPerThread = kElementsPerThread / kElements;
  Bits* out = codes_at<Bits>(params.out, share, first);

  float sums[kPerThread][kElements];
#pragma unroll 1
  for (int64_t rank = 0; rank < params.num_payloads; ++rank) {
    const Bits* codes = codes_at<Bits>(global_memory(static_cast<const uint8_t*>(params.payloads[rank])), share, first);
    Vector<Bits> in[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int element = (threadIdx.x + i * kThreads) * kElements;
      if (element < numel) in[i] = load_vector(codes + element);
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        const float value = Code::decode(in[i].element[j]);
        sums[i][j] = rank == 0 ? value : sums[i][j] + value;
      }
    }
  }

#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int element = (threadIdx.x + i * kThreads) * kElements;
    if (element >= numel) continue;
    Vector<Bits> codes;
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      codes.element[j] = element + j < numel ? Code::encode(sums[i][j] * params.scale) : Bits(0);
    }
    store_vector(out + element, codes);
  }
}

template <int kCapacity>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    reduce_kernel(const __grid_constant__ ReduceParams<kCapacity> params) {
  const Tile tile = params.tiles[blockIdx.x];
  const Share share = params.shares[tile.share];
  const int64_t first = tile.index * kTileElements;
  const int numel = numel_of_tile(share, first);

  if (share.kind == Kind::kFlags) {
    write_flags(params.out, share, first, numel, [&](int64_t segment) {
      bool used = false;
      for (int64_t rank = 0; rank < params.num_payloads; ++rank) {
        const uint8_t* flags = static_cast<const uint8_t*>(params.payloads[rank]) + share.codes_offset;
        used |= is_flag_set(flags, segment, share.block_size);
      }
      return used;
    });
  } else if (share.kind == Kind::kPadding) {
    write_zeros(codes_at<uint8_t>(params.out, share, first), numel);
  } else {
    with_code(share.kind, [&](auto code) { reduce_tile<decltype(code)>(params, share, first, numel); });
  }
}

// ---- unpack ----------------------------------------------------------------------------------------------------------

template <int kCapacity>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    unpack_kernel(const __grid_constant__ UnpackParams<kCapacity> params) {
  // Host memory, a microsecond away: asked for first, needed last.
  const bool failed = params.failed != nullptr && *static_cast<const volatile int32_t*>(params.failed) != 0;

  if (blockIdx.x < params.num_tiles) {
    const Tile tile = params.tiles[blockIdx.x];
    const Share share = params.shares[tile.share];
    if (share.kind != Kind::kFlags && share.kind != Kind::kPadding) {
      const int64_t first = tile.index * kTileElements;
      const int numel = numel_of_tile(share, first);
      const uint8_t* chunk = params.payload + share.chunk * params.chunk_bytes;
      void* address = const_cast<void*>(params.gradients[share.segment]);

      Measure measure;
      with_code(share.kind, [&](auto code) {
        using Code = decltype(code);
        const auto* codes = codes_at<typename Code::Bits>(chunk, share, first);
        with_gradient(share.dtype, [&](auto gradient) {
          using Gradient = decltype(gradient);
          auto* values = static_cast<typename Gradient::Bits*>(address);
          if (values != nullptr) values += share.element + first;
          unpack_tile<Code, Gradient>(codes, values, numel, failed, measure);
        });
      });

      const bool nonfinite = __syncthreads_or(measure.nonfinite);
      const double sum = block_sum<kThreads>(measure.sum_of_squares);
      if (threadIdx.x == 0) {
        params.partials[share.first_partial + tile.index] = sum;
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

cudaError_t pack(const PackArgs& args, const Workspace& workspace, cudaStream_t stream) {
  const LayoutView& layout = args.layout;
  if (layout.num_tiles == 0) return cudaSuccess;
  return with_table_for(layout.num_segments, workspace, [&](auto capacity) {
    PackParams<capacity> params;
    params.gradients.fill(args.gradients, layout.num_segments, workspace);
    params.shares = layout.shares;
    params.tiles = layout.tiles;
    params.chunk_bytes = layout.chunk_bytes;
    params.payload = args.payload;
    params.counters = reinterpret_cast<unsigned long long*>(args.counters);
    params.scale = args.scale;
    return launch(pack_kernel<capacity>, layout.num_tiles, kThreads, stream, params);
  });
}

cudaError_t reduce(const ReduceArgs& args, const Workspace& workspace, cudaStream_t stream) {
  const LayoutView& layout = args.layout;
  if (layout.num_tiles == 0) return cudaSuccess;
  if (args.num_payloads < 1) return cudaErrorInvalidValue;
  return with_table_for(args.num_payloads, workspace, [&](auto capacity) {
    ReduceParams<capacity> params;
    params.payloads.fill(reinterpret_cast<const void* const*>(args.payloads), args.num_payloads, workspace);
    params.shares = layout.shares;
    params.tiles = layout.tiles;
    params.num_payloads = args.num_payloads;
    params.out = args.out;
    params.scale = args.scale;
    return launch(reduce_kernel<capacity>, layout.num_tiles, kThreads, stream, params);
  });
}

cudaError_t unpack(const UnpackArgs& args, const Workspace& workspace, cudaStream_t stream) {
  return launch_unpack(args, workspace, stream, [](auto capacity) { return unpack_kernel<capacity>; });
}

}  // namespace gsync::cuda::elementwise
