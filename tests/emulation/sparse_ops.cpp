// Torch's operators on sparse tensors of the device: those of the CPU, and the host waits for each, as it does on a real device for
// most of them, to learn how many entries there are.
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/values_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <optional>

#include "device_ops.h"
#include "streams.h"

namespace emulation {
namespace {

void sparse_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const torch::jit::Stack given = torch::jit::last(*stack, schema.arguments().size()).vec();
  torch::jit::drop(*stack, schema.arguments().size());
  const c10::Device device = device_of(given).value_or(c10::Device(kDeviceType, current_device()));
  const c10::DeviceGuard guard(device);
  synchronize(current_stream(device.index()));
  count(&Counters::operations);
  torch::jit::Stack values;
  for (const c10::IValue& value : given) values.push_back(value_on_cpu(value));
  run_on_cpu(op, &values);
  const auto written = written_arguments(schema);
  for (size_t i = 0; i < values.size(); ++i) {
    if (!written) {
      stack->push_back(value_on_device(values[i], device));
      continue;
    }
    const c10::IValue& argument = given[(*written)[i]];
    if (argument.isTensor() && argument.toTensor().is_sparse()) {
      become(argument.toTensor(), value_on_device(values[i], device).toTensor());
    }
    stack->push_back(argument);
  }
}
TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&sparse_fallback>()); }

// Torch's sparse tensor takes the current device for its own before it looks at its parts.
at::Tensor make_sparse(int64_t sparse_dim, int64_t dense_dim, c10::SymIntArrayRef size, const at::Tensor& indices,
                       const at::Tensor& values, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                       std::optional<at::Device> device, std::optional<bool> pin, std::optional<bool> is_coalesced) {
  const c10::DeviceGuard guard(values.device());
  return at::native::new_with_dims_and_tensor_sparse_symint(sparse_dim, dense_dim, size, indices, values, dtype, layout, device,
                                                            pin, is_coalesced);
}

at::Tensor sparse_copy_from(const at::Tensor& from, const at::Tensor& to, bool /*non_blocking*/) {
  const c10::DeviceGuard guard(to.device());
  synchronize(current_stream(to.device().index()));
  become(to, value_on_device(on_cpu(from), to.device()).toTensor());
  return to;
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("_copy_from", &sparse_copy_from);
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", &make_sparse);
  m.impl("_indices", &at::native::_indices_sparse);
  m.impl("_values", &at::native::_values_sparse);
  m.impl("indices", &at::native::indices_sparse);
  m.impl("values", &at::native::values_sparse);
  m.impl("_nnz", &at::native::_nnz_sparse);
  m.impl("is_coalesced", &at::native::is_coalesced_sparse);
  m.impl("_coalesced_", &at::native::_coalesced_sparse_);
  m.impl("sparse_dim", &at::native::sparse_dim_sparse);
  m.impl("dense_dim", &at::native::dense_dim_sparse);
}

}  // namespace
}  // namespace emulation
