// The kernel families behind launch.h.
#pragma once

#include "launch.h"

namespace gsync::cuda {

/// Layouts of codecs without a scale, with EncodeOptions at their defaults.
namespace elementwise {
cudaError_t pack(const PackArgs& args, const Workspace& workspace, cudaStream_t stream);
cudaError_t reduce(const ReduceArgs& args, const Workspace& workspace, cudaStream_t stream);
cudaError_t unpack(const UnpackArgs& args, const Workspace& workspace, cudaStream_t stream);
}  // namespace elementwise

/// Any layout and any options: one launch does the segments of all codecs.
namespace block {
cudaError_t pack(const PackArgs& args, const Workspace& workspace, cudaStream_t stream);
cudaError_t reduce(const ReduceArgs& args, const Workspace& workspace, cudaStream_t stream);
cudaError_t unpack(const UnpackArgs& args, const Workspace& workspace, cudaStream_t stream);
}  // namespace block

}  // namespace gsync::cuda
