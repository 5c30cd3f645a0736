// Tensors of the device, seen from the host, and what operators on them have in common.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <vector>

namespace emulation {

/// The same memory as a tensor of the CPU, which keeps it alive. Tensors of other devices come back as they are.
at::Tensor on_cpu(const at::Tensor& tensor);

/// Of arguments and results: tensors, lists of them, devices. Results are copied.
c10::IValue value_on_cpu(const c10::IValue& value);
c10::IValue value_on_device(const c10::IValue& value, c10::Device device);
/// Of the first tensor on the device.
std::optional<c10::Device> device_of(const torch::jit::Stack& values);
/// For each result the argument that it is, or nothing if one is new.
std::optional<std::vector<size_t>> written_arguments(const c10::FunctionSchema& schema);
/// Gives a tensor that an operator was to write into the memory, and the shape, of its result: it was empty, or is sparse.
void become(const at::Tensor& given, const at::Tensor& result);
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace emulation
