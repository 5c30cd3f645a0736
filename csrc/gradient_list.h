// The gradients of a bucket where autograd left them: what GradReducer hands to the engine instead of DDP's flat buffer.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace gsync {

/// Made by the reducer, and read by it again when the bucket's future is done. Between the two it is the engine's.
struct GradientList {
  /// Whether a rank used each segment of a part, as the payload of its first slice says; device only, in host memory, valid when
  /// the bucket is done.
  struct Flags {
    std::vector<int64_t> parameter_idx;  // of each segment, in the bucket
    at::Tensor bytes;  // [num_segments * bytes per flag]
  };

  // One for each parameter, dense in the parameter's order of elements (lies_like). Undefined: this rank did not use it.
  std::vector<at::Tensor> sources;
  // Where the mean goes: the sources, and for parameters that only other ranks used memory of its own. On the host that is made
  // when the flags are there; on a device it is there from the start, for every parameter, so that nothing waits.
  std::vector<at::Tensor> targets;
  bool is_complete = true;  // whether this rank used every parameter; otherwise the flags are read
  std::vector<Flags> flags;
};

/// Whether the elements of `gradient` lie in memory as those of the payload do: in the parameter's own memory order if that is
/// non-overlapping and dense, else in logical order. Nothing is left to be resolved (conjugation, negation).
bool lies_like(const at::Tensor& parameter, const at::Tensor& gradient);

/// Memory for a gradient of `parameter` that lies like it. Not filled.
at::Tensor empty_gradient(const at::Tensor& parameter);

}  // namespace gsync
