#include "host_backend.h"

#include "device_ops.h"
#include "streams.h"

namespace emulation {
namespace {

std::vector<at::Tensor> on_host(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.device().type() == kDeviceType) synchronize(current_stream(tensor.device().index()));
    result.push_back(on_cpu(tensor));
  }
  return result;
}

class HostBackend final : public c10d::Backend {
 public:
  explicit HostBackend(c10::intrusive_ptr<c10d::Backend> host)
      : c10d::Backend(host->getRank(), host->getSize()), host_(std::move(host)) {}

  const std::string getBackendName() const override { return "emulated"; }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    std::vector<at::Tensor> host = on_host(tensors);
    return ended(host_->broadcast(host, options));
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    std::vector<at::Tensor> host = on_host(tensors);
    return ended(host_->allreduce(host, options));
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& out, std::vector<at::Tensor>& in,
                                           const c10d::AllgatherOptions& options) override {
    std::vector<std::vector<at::Tensor>> host_out;
    for (const auto& tensors : out) host_out.push_back(on_host(tensors));
    std::vector<at::Tensor> host_in = on_host(in);
    return ended(host_->allgather(host_out, host_in, options));
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override { return host_->barrier(options); }

 private:
  static c10::intrusive_ptr<c10d::Work> ended(c10::intrusive_ptr<c10d::Work> work) {
    work->wait();
    return work;
  }

  c10::intrusive_ptr<c10d::Backend> host_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_host_backend(c10::intrusive_ptr<c10d::Backend> host) {
  return c10::make_intrusive<HostBackend>(std::move(host));
}

}  // namespace emulation
