// Transport over a NCCL communicator of our own, apart from the one that torch uses.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "nccl_api.h"
#include "transport.h"

namespace gsync {

class NcclTransport final : public Transport {
 public:
  /// Collective: every rank makes one, with the same store. Waits for the others, at most `timeout`.
  /// Args:
  ///   store: of this transport alone (a PrefixStore); carries the unique id
  ///   min_ctas, max_ctas: limits of thread blocks per collective; nccl::kUndefined leaves them to NCCL
  ///   library: name or path of the NCCL library
  NcclTransport(c10::intrusive_ptr<c10d::Store> store, int rank, int size, c10::Device device, std::chrono::milliseconds timeout,
                int min_ctas, int max_ctas, const std::string& library);
  ~NcclTransport() override;
  NcclTransport(const NcclTransport&) = delete;
  NcclTransport& operator=(const NcclTransport&) = delete;

  /// A transport over the ranks that call with the same `color`, `size` of them, in the order of `key`. Collective over all ranks.
  std::shared_ptr<NcclTransport> split(int color, int key, int size);

  std::string name() const override { return "nccl"; }
  int num_lanes() const override { return 1; }  // one stream keeps the order anyway
  bool any_thread() const override { return true; }
  void set_wake(std::function<void()> /*wake*/) override {}

  std::shared_ptr<Collective> all_reduce(const at::Tensor& payload) override;
  std::shared_ptr<Collective> all_to_all(const at::Tensor& out, const at::Tensor& in) override;
  std::shared_ptr<Collective> all_gather(const at::Tensor& out, const at::Tensor& in) override;
  std::shared_ptr<Collective> all_reduce_sparse(const at::Tensor& gradient) override;

  std::string async_error() override;
  void abort() noexcept override;

 private:
  NcclTransport(std::shared_ptr<const nccl::Api> api, int size, c10::Device device, std::chrono::milliseconds timeout,
                const nccl::Config& config)
      : api_(std::move(api)), size_(size), device_(device), timeout_(timeout), config_(config) {}
  /// Throws unless `result` is, or becomes within the time-out, a success. Holds mutex_.
  void check(nccl::Result result, const char* what);
  /// Returns when the current stream has come this far; throws after the time-out, or when the communicator has an error.
  void wait_for_stream(const char* what);
  nccl::Stream current_stream() const;

  std::shared_ptr<const nccl::Api> api_;
  int size_;
  c10::Device device_;
  std::chrono::milliseconds timeout_;
  nccl::Config config_;
  std::mutex mutex_;  // NCCL wants one call at a time on a communicator
  nccl::Comm comm_ = nullptr;
  std::atomic<bool> aborted_{false};
};

}  // namespace gsync
