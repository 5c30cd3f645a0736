// The CUDA backend of the operations, seen from outside: plain structures in, a launch on a stream, an error code out.
//
// Every function here is one kernel launch whatever the number of segments, or none when there is nothing to do. Nothing is
// allocated, nothing waits for the device. Torch does not appear, so the .cu files compile in seconds.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../common/kernels.h"

namespace gsync::cuda {

/// Addresses (of gradients, or of payloads in `reduce`) that travel in the parameters of a launch: 32,000 bytes of them. A longer
/// table has to be in device memory.
inline constexpr int64_t kMaxAddressesByValue = 4000;

using gsync::Workspace;

/// Writes the payload of the gradients in `args` (formulas in gsync/reference.py).
///
/// Returns cudaErrorInvalidValue when the workspace lacks what the arguments need, else what the launch returned.
/// Cost: reads every gradient once, writes every payload byte once.
cudaError_t pack(const PackArgs& args, const Workspace& workspace, cudaStream_t stream);

/// Writes one chunk: the sum of that chunk of all payloads, in rank order, times `scale`.
///
/// Cost: reads every code of every payload once, writes `chunk_bytes`.
cudaError_t reduce(const ReduceArgs& args, const Workspace& workspace, cudaStream_t stream);

/// Writes the gradients of a payload, the sum of their squares and whether one is Inf or NaN.
///
/// The sum of a segment depends on its own partials and their order only, and a partial on the values of its tile only: neither
/// alignment, nor neighbours, nor the number of slices changes a bit of it.
/// Cost: reads every code once (from L2 a second time where a gradient is not 16-byte aligned), writes every gradient once.
cudaError_t unpack(const UnpackArgs& args, const Workspace& workspace, cudaStream_t stream);

}  // namespace gsync::cuda
