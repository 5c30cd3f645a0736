// Which family launches. The kernels of the codecs without a scale are the leaner ones.
#include "launch.h"

#include "families.h"

namespace gsync::cuda {

cudaError_t pack(const PackArgs& args, const Workspace& workspace, cudaStream_t stream) {
  const bool general = args.layout.has_scales || args.encode.any();
  return general ? block::pack(args, workspace, stream) : elementwise::pack(args, workspace, stream);
}

cudaError_t reduce(const ReduceArgs& args, const Workspace& workspace, cudaStream_t stream) {
  const bool general = args.layout.has_scales || args.encode.any() || args.is_shard();
  return general ? block::reduce(args, workspace, stream) : elementwise::reduce(args, workspace, stream);
}

cudaError_t unpack(const UnpackArgs& args, const Workspace& workspace, cudaStream_t stream) {
  return args.layout.has_scales ? block::unpack(args, workspace, stream) : elementwise::unpack(args, workspace, stream);
}

}  // namespace gsync::cuda
