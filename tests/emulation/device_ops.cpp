// Torch's operators on the device: those of the CPU on the same memory, run by the current stream. Operators that write into their
// arguments are only enqueued, as on a real device; others, and those whose result is to be resized, make the host wait for its shape,
// which counts as a wait.
#include "device_ops.h"

#include <ATen/EmptyTensor.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <algorithm>

#include "streams.h"

namespace emulation {
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// A tensor like `like`, where its parts are.
at::Tensor sparse_of(const at::Tensor& like, const at::Tensor& indices, const at::Tensor& values) {
  return at::_sparse_coo_tensor_unsafe(indices, values, like.sizes(), values.options().layout(at::kSparse), like.is_coalesced());
}

}  // namespace

at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kDeviceType) return tensor;
  if (tensor.is_sparse()) return sparse_of(tensor, on_cpu(tensor._indices()), on_cpu(tensor._values()));
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {}, options);
}

c10::IValue value_on_cpu(const c10::IValue& value) {
  if (value.isTensor()) return on_cpu(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(on_cpu(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& element : value.toOptionalTensorVector()) {
      list.push_back(element ? std::optional<at::Tensor>(on_cpu(*element)) : std::nullopt);
    }
    return list;
  }
  if (value.isDevice()) return c10::Device(c10::DeviceType::CPU);
  return value;
}

c10::IValue value_on_device(const c10::IValue& value, c10::Device device) {
  const auto move_dense = [device](const at::Tensor& tensor) {
    at::Tensor moved = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
    on_cpu(moved).copy_(tensor);
    return moved;
  };
  const auto move = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_sparse()) return move_dense(tensor);
    return sparse_of(tensor, move_dense(tensor._indices()), move_dense(tensor._values()));
  };
  if (value.isTensor()) return move(value.toTensor());
  if (!value.isTensorList()) return value;
  c10::List<at::Tensor> list;
  for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(move(tensor));
  return list;
}

std::optional<c10::Device> device_of(const torch::jit::Stack& values) {
  for (const c10::IValue& value : values) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().device().type() == kDeviceType) {
      return value.toTensor().device();
    }
    if (!value.isTensorList()) continue;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      if (tensor.defined() && tensor.device().type() == kDeviceType) return tensor.device();
    }
  }
  return std::nullopt;
}

std::optional<std::vector<size_t>> written_arguments(const c10::FunctionSchema& schema) {
  std::vector<size_t> found;
  for (const c10::Argument& result : schema.returns()) {
    const size_t before = found.size();
    for (size_t i = 0; i < schema.arguments().size() && found.size() == before; ++i) {
      const auto* given = schema.arguments()[i].alias_info();
      if (given != nullptr && result.alias_info() != nullptr && given->isWrite() && *given == *result.alias_info()) {
        found.push_back(i);
      }
    }
    if (found.size() == before) return std::nullopt;
  }
  return found;
}

void become(const at::Tensor& given, const at::Tensor& result) {
  if (given.is_sparse()) {
    auto* sparse = static_cast<at::SparseTensorImpl*>(given.unsafeGetTensorImpl());
    sparse->raw_resize_(result.sparse_dim(), result.dense_dim(), result.sizes());
    sparse->set_indices_and_values_unsafe(result._indices(), result._values());
    sparse->set_coalesced(result.is_coalesced());
    return;
  }
  given.unsafeGetTensorImpl()->set_storage_keep_dtype(result.storage());
  given.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides());
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::AutoGradMode no_grad(false);
  op.callBoxed(stack);
}

namespace {

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const torch::jit::Stack given = torch::jit::last(*stack, schema.arguments().size()).vec();
  torch::jit::drop(*stack, schema.arguments().size());
  const c10::Device device = device_of(given).value_or(c10::Device(kDeviceType, current_device()));
  const c10::Stream stream = current_stream(device.index());
  auto values = std::make_shared<torch::jit::Stack>();
  for (const c10::IValue& value : given) values->push_back(value_on_cpu(value));
  check_device();
  count(&Counters::operations);
  enqueue(stream, [op, values] { run_on_cpu(op, values.get()); });
  const auto written = written_arguments(schema);
  const auto is_empty = [&given](size_t i) { return given[i].isTensor() && given[i].toTensor().numel() == 0; };
  const bool may_grow = written && std::any_of(written->begin(), written->end(), is_empty);
  if (written) {
    for (const size_t i : *written) stack->push_back(given[i]);
    if (!may_grow) return;
  }
  synchronize(stream);
  const std::string error = take_error();
  TORCH_CHECK(error.empty(), error);
  const c10::DeviceGuard guard(device);
  for (size_t i = 0; may_grow && i < written->size(); ++i) {
    if (is_empty((*written)[i])) become(given[(*written)[i]].toTensor(), value_on_device((*values)[i], device).toTensor());
  }
  if (written) return;
  for (const c10::IValue& value : *values) stack->push_back(value_on_device(value, device));
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                 std::optional<at::Device> device, std::optional<bool> /*pin*/, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, allocator(), kKeys, dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout> /*layout*/, std::optional<at::Device> device, std::optional<bool> /*pin*/) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, allocator(), kKeys, dtype.value_or(at::kFloat));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const c10::Device device = to.device().type() == kDeviceType ? to.device() : from.device();
  const c10::Stream stream = current_stream(device.index());
  check_device();
  count(&Counters::operations);
  enqueue(stream, [from = on_cpu(from), to = on_cpu(to)]() mutable {
    const c10::AutoGradMode no_grad(false);
    to.copy_(from);
  });
  if (from.device().type() != to.device().type() && !non_blocking) synchronize(stream);
  return to;
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  synchronize(current_stream(tensor.device().index()));
  return on_cpu(tensor).item();
}

void record_stream_op(at::Tensor& tensor, c10::Stream stream) { record_stream(tensor.storage().data_ptr(), stream); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream_op);
}

}  // namespace
}  // namespace emulation
