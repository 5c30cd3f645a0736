#include "stream_backend.h"

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "device_ops.h"
#include "streams.h"

namespace emulation {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

std::vector<at::Tensor> on_host(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& tensor : tensors) result.push_back(on_cpu(tensor));
  return result;
}

// The end of a collective, a point in the backend's stream.
class StreamWork final : public c10d::Work {
 public:
  StreamWork(c10::DeviceIndex device, std::shared_ptr<Mark> done, bool blocks_host)
      : device_(device), done_(std::move(done)), blocks_host_(blocks_host) {}
  bool isCompleted() override { return has_passed(done_); }
  bool isSuccess() const override { return has_passed(done_); }
  void synchronize() override { block(done_, current_stream(device_)); }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    if (blocks_host_) {
      wait_on_host(done_);
    } else {
      synchronize();
    }
    return true;
  }

 private:
  c10::DeviceIndex device_;
  std::shared_ptr<Mark> done_;
  bool blocks_host_;
};

class StreamBackend final : public c10d::Backend {
 public:
  explicit StreamBackend(c10::intrusive_ptr<c10d::Backend> host)
      : c10d::Backend(host->getRank(), host->getSize()), host_(std::move(host)) {}

  const std::string getBackendName() const override { return "emulated"; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>(getBackendName(), std::chrono::seconds(20));  // as those of `host`
  }

  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    return on_stream(tensors.front(), [tensors = on_host(tensors), options](c10d::Backend& host) mutable {
      return host.broadcast(tensors, options);
    });
  }
  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    return on_stream(tensors.front(), [tensors = on_host(tensors), options](c10d::Backend& host) mutable {
      return host.allreduce(tensors, options);
    });
  }
  WorkPtr allgather(std::vector<std::vector<at::Tensor>>& out, std::vector<at::Tensor>& in,
                    const c10d::AllgatherOptions& options) override {
    std::vector<std::vector<at::Tensor>> host_out;
    for (const auto& tensors : out) host_out.push_back(on_host(tensors));
    return on_stream(in.front(), [out = std::move(host_out), in = on_host(in), options](c10d::Backend& host) mutable {
      return host.allgather(out, in, options);
    });
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    return on_stream(in, [out = on_cpu(out), in = on_cpu(in), options](c10d::Backend& host) mutable {
      return host._allgather_base(out, in, options);
    });
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits, std::vector<int64_t>& in_splits,
                        const c10d::AllToAllOptions& options) override {
    return on_stream(in, [=, out = on_cpu(out), in = on_cpu(in)](c10d::Backend& host) mutable {
      return host.alltoall_base(out, in, out_splits, in_splits, options);
    });
  }
  WorkPtr allreduce_sparse(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    const at::Tensor& gradient = tensors.front();
    synchronize(current_stream(gradient.device().index()));  // how many entries there will be is known to the host first
    std::vector<at::Tensor> host = on_host(tensors);
    const WorkPtr work =
        on_stream(gradient, [host, options](c10d::Backend& backend) mutable { return backend.allreduce(host, options); });
    synchronize(stream_of_device(gradient.device().index()));
    become(gradient, value_on_device(host.front(), gradient.device()).toTensor());
    return work;
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    const auto collective = [options](c10d::Backend& host) { return host.barrier(options); };
    return enqueue_on(current_device(), collective, /*blocks_host=*/true);
  }
  void abort() override { is_aborted_->store(true); }

 private:
  using OnHost = std::function<WorkPtr(c10d::Backend&)>;

  WorkPtr on_stream(const at::Tensor& tensor, OnHost collective) {
    return enqueue_on(tensor.device().index(), std::move(collective), /*blocks_host=*/false);
  }

  WorkPtr enqueue_on(c10::DeviceIndex device, OnHost collective, bool blocks_host) {
    const c10::Stream stream = stream_of_device(device);
    std::shared_ptr<Mark> given;
    record(given, current_stream(device));
    block(std::move(given), stream);
    count(&Counters::collectives);
    enqueue(stream, [host = host_, is_aborted = is_aborted_, collective = std::move(collective)] {
      try {
        if (!is_aborted->load()) collective(*host)->wait();
      } catch (const std::exception&) {  // as over NCCL, a collective that cannot end does not end by itself
        while (!is_aborted->load() && !is_shut_down()) std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
    });
    std::shared_ptr<Mark> done;
    record(done, stream);
    return c10::make_intrusive<StreamWork>(device, std::move(done), blocks_host);
  }

  c10::Stream stream_of_device(c10::DeviceIndex device) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = streams_.find(device);
    return found != streams_.end() ? found->second : streams_.emplace(device, new_stream(device)).first->second;
  }

  c10::intrusive_ptr<c10d::Backend> host_;
  std::shared_ptr<std::atomic<bool>> is_aborted_ = std::make_shared<std::atomic<bool>>(false);
  std::mutex mutex_;
  std::map<c10::DeviceIndex, c10::Stream> streams_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_stream_backend(c10::intrusive_ptr<c10d::Backend> host) {
  return c10::make_intrusive<StreamBackend>(std::move(host));
}

}  // namespace emulation
