// gsync_emulation: the device for tests, in Python.
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/comm.hpp>

#include "fake_nccl.h"
#include "kernel_table.h"
#include "stream_backend.h"
#include "streams.h"

namespace py = pybind11;

namespace emulation {
namespace {

// A low limit, so that few parameters are enough to need a table in the device's memory.
constexpr int64_t kMaxAddressesByValue = 8;

const gsync::KernelTable* cpu_kernels = nullptr;

// Host tables, copied when the kernel is launched; or the table in device memory, read when it runs.
template <typename Pointer>
class Addresses {
 public:
  Addresses(Pointer const* host, int64_t count, const gsync::Workspace& workspace, int64_t num_before, bool by_value) {
    if (by_value) {
      values_.assign(host, host + count);
    } else {
      device_ = static_cast<Pointer const*>(static_cast<const void*>(workspace.addresses)) + num_before;
    }
  }
  Pointer const* get() const { return device_ != nullptr ? device_ : values_.data(); }

 private:
  std::vector<Pointer> values_;
  Pointer const* device_ = nullptr;
};

void launch(c10::Stream stream, std::function<void()> kernel) {
  check_device();
  TORCH_CHECK(!launch_fault().strikes(), "a planted launch failure");
  count(&Counters::launches);
  enqueue(stream, std::move(kernel));
}

int64_t num_residuals(const gsync::EncodeOptions& encode, const gsync::LayoutView& layout) {
  return encode.residuals == nullptr ? 0 : layout.num_segments;
}

template <typename Args, typename Pointer>
void launch_encoding(Args args, Pointer const* Args::* table, int64_t num, const gsync::Workspace& workspace, c10::Stream stream,
                     void (*kernel)(const Args&, const gsync::Workspace&, c10::Stream)) {
  const int64_t residuals = num_residuals(args.encode, args.layout);
  const bool by_value = num + residuals <= kMaxAddressesByValue;
  const Addresses<Pointer> addresses(args.*table, num, workspace, 0, by_value);
  const Addresses<float*> of_residuals(args.encode.residuals, residuals, workspace, num, by_value);
  launch(stream, [=]() mutable {
    args.*table = addresses.get();
    if (residuals > 0) args.encode.residuals = of_residuals.get();
    kernel(args, {}, stream);
  });
}

const gsync::KernelTable kKernels{
    kMaxAddressesByValue,
    [](const gsync::PackArgs& args, const gsync::Workspace& workspace, c10::Stream stream) {
      launch_encoding(args, &gsync::PackArgs::gradients, args.layout.num_segments, workspace, stream, cpu_kernels->pack);
    },
    [](const gsync::ReduceArgs& args, const gsync::Workspace& workspace, c10::Stream stream) {
      launch_encoding(args, &gsync::ReduceArgs::payloads, args.num_payloads, workspace, stream, cpu_kernels->reduce);
    },
    [](const gsync::UnpackArgs& given, const gsync::Workspace& workspace, c10::Stream stream) {
      const int64_t num = given.layout.num_segments;
      const Addresses<void*> addresses(given.gradients, num, workspace, 0, num <= kMaxAddressesByValue);
      launch(stream, [=, args = given]() mutable {
        args.gradients = addresses.get();
        cpu_kernels->unpack(args, {}, stream);
      });
    },
};

py::dict counters_as_dict() {
  const Counters now = take_counters();
  py::dict result;
  result["launches"] = now.launches;
  result["operations"] = now.operations;
  result["collectives"] = now.collectives;
  result["event_waits"] = now.event_waits;
  result["event_records"] = now.event_records;
  result["host_waits"] = now.host_waits;
  result["allocations"] = now.allocations;
  return result;
}

c10d::GradBucket make_bucket(size_t index, bool is_last, at::Tensor buffer, std::vector<at::Tensor> parameters) {
  return c10d::GradBucket(index, is_last ? index + 1 : index + 2, std::move(buffer), {}, {}, {}, std::move(parameters),
                          std::nullopt);
}

}  // namespace
}  // namespace emulation

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace emulation;
  using no_gil = py::call_guard<py::gil_scoped_release>;
  module.def("kernel_table", [](const py::capsule& of_cpu) {
    cpu_kernels = of_cpu.get_pointer<const gsync::KernelTable>();
    return py::capsule(&kKernels, gsync::kKernelTableName);
  });
  module.def("grad_bucket", &make_bucket);
  module.def("take_counters", &counters_as_dict);
  module.def("take_error", [] {
    const std::string error = take_error();
    return error.empty() && take_written_after_free() ? std::string("memory was written after it had been given back") : error;
  });
  module.def("current_stream", [](int device) { return current_stream(static_cast<c10::DeviceIndex>(device)).id(); });
  module.def("new_stream", [](int device) { return new_stream(static_cast<c10::DeviceIndex>(device)).id(); });
  module.def("set_stream", [](int device, int64_t id) {
    const c10::Device on(kDeviceType, static_cast<c10::DeviceIndex>(device));
    return exchange_stream(c10::Stream(c10::Stream::UNSAFE, on, id)).id();
  });
  module.def("set_delay", &set_delay);
  module.def("hold", &hold);
  module.def("newest_stream", [](int device) { return newest_stream(static_cast<c10::DeviceIndex>(device)); });
  module.def("settle", &settle, py::arg("max_ms") = 500, no_gil());
  module.def("synchronize", [](int device) { synchronize(current_stream(static_cast<c10::DeviceIndex>(device))); }, no_gil());
  module.def("leave_out", &leave_out);
  module.def("take_sites", &take_sites);
  module.def("fail_allocation", [](int64_t after) { allocation_fault().arm(after); });
  module.def("fail_launch", [](int64_t after) { launch_fault().arm(after); });
  module.def("lose", &lose);
  module.def("plant_nccl_fault", &plant_nccl_fault);
  module.def("stream_backend", &make_stream_backend);
  module.def("live_communicators", &live_communicators);
  module.def("shut_down", &shut_down, no_gil());
}
