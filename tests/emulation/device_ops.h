// Tensors of the device, seen from the host.
#pragma once

#include <ATen/core/Tensor.h>

namespace emulation {

/// The same memory as a tensor of the CPU, which keeps it alive. Tensors of other devices come back as they are.
at::Tensor on_cpu(const at::Tensor& tensor);

}  // namespace emulation
