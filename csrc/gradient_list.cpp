#include "gradient_list.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

namespace gsync {

bool lies_like(const at::Tensor& parameter, const at::Tensor& gradient) {
  if (gradient.is_conj() || gradient.is_neg()) return false;
  if (!parameter.is_non_overlapping_and_dense()) return gradient.is_contiguous();
  const auto sizes = parameter.sizes();
  const auto theirs = parameter.strides();
  const auto ours = gradient.strides();
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] > 1 && ours[i] != theirs[i]) return false;
  }
  return true;
}

at::Tensor empty_gradient(const at::Tensor& parameter) {
  const auto options = at::TensorOptions().dtype(parameter.scalar_type()).device(parameter.device());
  return parameter.is_non_overlapping_and_dense() ? at::empty_strided(parameter.sizes(), parameter.strides(), options)
                                                  : at::empty(parameter.sizes(), options);
}

}  // namespace gsync
