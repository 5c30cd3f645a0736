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

#include "../codecs/elementwise.h"
#include "launch.cuh"
#include "reduce.cuh"
#include "vector.cuh"

namespace gsync::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kElementsPerThread = kTileElements / kThreads;
// Four blocks of 256 threads per multiprocessor: at most 64 registers a thread.
constexpr int kBlocksPerMultiprocessor = 4;
// Segments of at most this many partials are summed by one lane, longer ones by a warp.
constexpr int64_t kPartialsPerLane = 32;

// ---- element types: bits in memory, and the float they stand for ---------------------------------------------------

struct Fp32 {
  using Bits = uint32_t;
  static __device__ __forceinline__ float decode(Bits bits) { return float_of(bits); }
  static __device__ __forceinline__ Bits encode(float value) { return encode_fp32(value); }
  static __device__ __forceinline__ bool is_zero(Bits bits) { return (bits & 0x7fffffffu) == 0; }
};

struct Fp16 {
  using Bits = uint16_t;
  static __device__ __forceinline__ float decode(Bits bits) { return decode_fp16(bits); }
  static __device__ __forceinline__ Bits encode(float value) { return encode_fp16(value); }
  static __device__ __forceinline__ bool is_zero(Bits bits) { return (bits & 0x7fffu) == 0; }
};

struct Bf16 {
  using Bits = uint16_t;
  static __device__ __forceinline__ float decode(Bits bits) { return decode_bf16(bits); }
  static __device__ __forceinline__ Bits encode(float value) { return encode_bf16(value); }
  static __device__ __forceinline__ bool is_zero(Bits bits) { return (bits & 0x7fffu) == 0; }
};

// A gradient only; it goes through fp32.
struct Fp64 {
  using Bits = uint64_t;
  static __device__ __forceinline__ float decode(Bits bits) { return static_cast<float>(double_of(bits)); }
  static __device__ __forceinline__ Bits encode(float value) {
    return value != value ? 0x7ff8000000000000ull : bits_of(static_cast<double>(value));
  }
  static __device__ __forceinline__ bool is_zero(Bits bits) { return (bits & 0x7fffffffffffffffull) == 0; }
};

template <class Function>
__device__ __forceinline__ void with_code(Kind kind, Function&& function) {
  if (kind == Kind::kFp32) {
    function(Fp32());
  } else if (kind == Kind::kFp16) {
    function(Fp16());
  } else {
    function(Bf16());
  }
}

template <class Function>
__device__ __forceinline__ void with_gradient(Dtype dtype, Function&& function) {
  if (dtype == Dtype::kFp32) {
    function(Fp32());
  } else if (dtype == Dtype::kFp16) {
    function(Fp16());
  } else if (dtype == Dtype::kBf16) {
    function(Bf16());
  } else {
    function(Fp64());
  }
}

// ---- a group: the elements that one thread moves between codes and gradient at a time -----------------------------------

template <class Code, class Gradient>
struct Group {
  using CodeVector = Vector<typename Code::Bits>;
  using GradientVector = Vector<typename Gradient::Bits>;
  static constexpr int kElements =
      CodeVector::kElements > GradientVector::kElements ? CodeVector::kElements : GradientVector::kElements;
  static constexpr int kCodeVectors = kElements / CodeVector::kElements;
  static constexpr int kGradientVectors = kElements / GradientVector::kElements;
  static constexpr int kPerThread = kElementsPerThread / kElements;
};

/// Where the codes of a share's elements from `first` on lie in a chunk.
template <class Bits>
__device__ __forceinline__ Bits* codes_at(uint8_t* chunk, const Share& share, int64_t first) {
  return reinterpret_cast<Bits*>(chunk + share.codes_offset) + first;
}

template <class Bits>
__device__ __forceinline__ const Bits* codes_at(const uint8_t* chunk, const Share& share, int64_t first) {
  return reinterpret_cast<const Bits*>(chunk + share.codes_offset) + first;
}

__device__ __forceinline__ uint32_t flag_one(uint8_t flag_kind) {
  if (flag_kind == static_cast<uint8_t>(Kind::kFp32)) return 0x3f800000u;
  if (flag_kind == static_cast<uint8_t>(Kind::kFp16)) return 0x3c00u;
  if (flag_kind == static_cast<uint8_t>(Kind::kBf16)) return 0x3f80u;
  return 1;
}

__device__ __forceinline__ bool is_flag_set(const uint8_t* flags, int64_t idx, int32_t flag_bytes) {
  if (flag_bytes == 4) return reinterpret_cast<const uint32_t*>(flags)[idx] != 0;
  if (flag_bytes == 2) return reinterpret_cast<const uint16_t*>(flags)[idx] != 0;
  return flags[idx] != 0;
}

/// Writes flags `first` .. `first + numel`, and zeros up to the next 16 bytes. `is_set(idx)` tells which are on.
template <class IsSet>
__device__ __forceinline__ void write_flags(uint8_t* chunk, const Share& share, int64_t first, int numel, IsSet&& is_set) {
  uint8_t* flags = chunk + share.codes_offset;
  const int per_vector = kVectorBytes / share.block_size;
  const int padded = (numel + per_vector - 1) / per_vector * per_vector;
  for (int i = threadIdx.x; i < padded; i += kThreads) {
    const uint32_t flag = i < numel && is_set(first + i) ? flag_one(share.flag_kind) : 0;
    if (share.block_size == 4) {
      reinterpret_cast<uint32_t*>(flags)[first + i] = flag;
    } else if (share.block_size == 2) {
      reinterpret_cast<uint16_t*>(flags)[first + i] = static_cast<uint16_t>(flag);
    } else {
      flags[first + i] = static_cast<uint8_t>(flag);
    }
  }
}

/// Zeros over `numel` elements and up to the next 16 bytes.
template <class Bits>
__device__ __forceinline__ void write_zeros(Bits* begin, int numel) {
  constexpr int kElements = Vector<Bits>::kElements;
  for (int i = threadIdx.x * kElements; i < numel; i += kThreads * kElements) store_vector(begin + i, Vector<Bits>());
}

__device__ __forceinline__ int numel_of_tile(const Share& share, int64_t first) {
  const int64_t rest = share.numel - first;
  return static_cast<int>(rest < kTileElements ? rest : kTileElements);
}

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

/// Of the values of a tile that one thread wrote.
struct Measure {
  double sum_of_squares = 0;
  bool nonfinite = false;

  __device__ __forceinline__ void add(float value) {
    nonfinite |= (gsync::bits_of(value) & 0x7f800000u) == 0x7f800000u;
    const double wide = value;
    sum_of_squares += wide * wide;
  }
};

template <class Code, class Gradient>
__device__ __forceinline__ void unpack_tile(const typename Code::Bits* codes, typename Gradient::Bits* gradient, int numel,
                                            bool failed, Measure& measure) {
  using G = Group<Code, Gradient>;
  const auto convert = [&](typename Code::Bits code) {
    return Gradient::encode(failed ? float_of(0x7fc00000u) : Code::decode(code));
  };
  const bool by_vector = gradient != nullptr && is_vector_aligned(gradient);
  const int groups = numel / G::kElements;

  typename G::CodeVector in[G::kPerThread][G::kCodeVectors];
#pragma unroll
  for (int i = 0; i < G::kPerThread; ++i) {
    const int group = threadIdx.x + i * kThreads;
    if (group >= groups) continue;
#pragma unroll
    for (int v = 0; v < G::kCodeVectors; ++v) in[i][v] = load_vector(codes + group * G::kElements + v * G::CodeVector::kElements);
  }
#pragma unroll
  for (int i = 0; i < G::kPerThread; ++i) {
    const int group = threadIdx.x + i * kThreads;
    if (group >= groups) continue;
#pragma unroll
    for (int v = 0; v < G::kGradientVectors; ++v) {
      typename G::GradientVector out;
#pragma unroll
      for (int j = 0; j < G::GradientVector::kElements; ++j) {
        const int element = v * G::GradientVector::kElements + j;
        out.element[j] = convert(element_of(in[i], element));
        measure.add(Gradient::decode(out.element[j]));
      }
      if (by_vector) store_vector(global_memory(gradient) + group * G::kElements + v * G::GradientVector::kElements, out);
    }
  }

  const int tail = groups * G::kElements + static_cast<int>(threadIdx.x);
  if (tail < numel) {
    const typename Gradient::Bits bits = convert(codes[tail]);
    measure.add(Gradient::decode(bits));
    if (gradient != nullptr) global_memory(gradient)[tail] = bits;
  }
  if (gradient == nullptr || by_vector) return;
#pragma unroll 4
  for (int i = threadIdx.x; i < groups * G::kElements; i += kThreads) global_memory(gradient)[i] = convert(codes[i]);
}

/// Adds up the partials of every segment: short ones by one lane each, in order; long ones by a warp, whose lane l takes partials
/// l, l + 32, ... before the lanes are added by tree. Both depend on the segment alone.
__device__ __forceinline__ void sum_partials(const double* partials, const SegmentPartials* segments, int64_t num_segments,
                                             double* sums) {
  const int lane = threadIdx.x % kWarpSize;
  for (int64_t base = threadIdx.x - lane; base < num_segments; base += kThreads) {
    const int64_t segment = base + lane;
    const SegmentPartials range = segment < num_segments ? segments[segment] : SegmentPartials{0, 0};
    const bool is_long = range.end - range.begin > kPartialsPerLane;
    if (segment < num_segments && !is_long) {
      double sum = 0;
      for (int64_t i = range.begin; i < range.end; ++i) sum += load_written_elsewhere(partials + i);
      sums[segment] = sum;
    }
    for (unsigned rest = __ballot_sync(kAllLanes, is_long); rest != 0; rest &= rest - 1) {
      const int owner = __ffs(static_cast<int>(rest)) - 1;
      const int64_t begin = __shfl_sync(kAllLanes, range.begin, owner);
      const int64_t end = __shfl_sync(kAllLanes, range.end, owner);
      double sum = 0;
#pragma unroll 4
      for (int64_t i = begin + lane; i < end; i += kWarpSize) sum += load_written_elsewhere(partials + i);
      sum = warp_sum(sum);
      if (lane == owner) sums[segment] = sum;
    }
  }
}

template <int kCapacity>
struct UnpackParams {
  AddressTable<kCapacity> gradients;
  const Share* shares;
  const Tile* tiles;
  int64_t num_tiles;
  int64_t num_segments;
  int64_t chunk_bytes;
  const uint8_t* payload;
  double* partials;
  int32_t* found_nonfinite;
  const SegmentPartials* segments;
  double* sum_of_squares;
  const int32_t* failed;
  uint32_t* ticket;
};

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
  const LayoutView& layout = args.layout;
  const bool sums = args.segments != nullptr && layout.num_segments > 0;
  if (layout.num_tiles == 0 && !sums) return cudaSuccess;
  if (sums && workspace.ticket == nullptr) return cudaErrorInvalidValue;
  return with_table_for(layout.num_segments, workspace, [&](auto capacity) {
    UnpackParams<capacity> params;
    params.gradients.fill(args.gradients, layout.num_segments, workspace);
    params.shares = layout.shares;
    params.tiles = layout.tiles;
    params.num_tiles = layout.num_tiles;
    params.num_segments = layout.num_segments;
    params.chunk_bytes = layout.chunk_bytes;
    params.payload = args.payload;
    params.partials = args.partials;
    params.found_nonfinite = args.found_nonfinite;
    params.segments = sums ? args.segments : nullptr;
    params.sum_of_squares = args.sum_of_squares;
    params.failed = args.failed;
    params.ticket = workspace.ticket;
    // A slice without tiles still has to add up the partials of the others.
    return launch(unpack_kernel<capacity>, layout.num_tiles > 0 ? layout.num_tiles : 1, kThreads, stream, params);
  });
}

}  // namespace gsync::cuda
