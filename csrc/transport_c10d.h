// Transport over c10d process groups: Gloo and others on the host, NCCL and others on a device. Over Gloo, all_to_all and
// all_gather are made of sends and receives (peer_lane.h).
#pragma once

#include <ATen/record_function.h>

#include <chrono>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "peer_lane.h"
#include "transport.h"

namespace gsync {

class C10dTransport final : public Transport {
 public:
  /// Args:
  ///   main, gather: lanes 0 and 1; may be the same
  ///   rank, size: in the group
  ///   timeout: of every collective
  ///   owned: nobody else uses these groups; they are aborted on failure, otherwise only let go
  ///   known_as: of each rank of these groups, the number that errors give it; empty: its own
  C10dTransport(c10::intrusive_ptr<c10d::Backend> main, c10::intrusive_ptr<c10d::Backend> gather, int rank, int size,
                std::chrono::milliseconds timeout, bool owned, std::vector<int> known_as = {});
  ~C10dTransport() override;

  std::string name() const override { return name_; }
  int num_lanes() const override { return num_lanes_; }
  bool any_thread() const override { return name_ == "gloo"; }
  void set_wake(std::function<void()> wake) override;

  std::shared_ptr<Collective> all_reduce(const at::Tensor& payload) override;
  std::shared_ptr<Collective> all_to_all(const at::Tensor& out, const at::Tensor& in) override;
  std::shared_ptr<Collective> all_gather(const at::Tensor& out, const at::Tensor& in) override;
  std::shared_ptr<Collective> all_reduce_sparse(const at::Tensor& gradient) override;

  std::string async_error() override { return {}; }
  void abort() noexcept override;

 private:
  c10::intrusive_ptr<c10d::Backend> lane(int idx);
  std::shared_ptr<Collective> under_way(c10::intrusive_ptr<c10d::Work> work, const at::Tensor& tensor);
  std::shared_ptr<std::function<void()>> wake();
  at::RecordFunctionGuard hide_from_profilers() const;

  std::mutex mutex_;  // guards lanes_ and wake_
  c10::intrusive_ptr<c10d::Backend> lanes_[2];
  PeerLane peers_[2];  // Gloo on the host: what moves chunks over the lanes
  std::shared_ptr<std::function<void()>> wake_;
  std::string name_;
  int num_lanes_;
  int size_;
  std::chrono::milliseconds timeout_;
  bool owned_;
};

}  // namespace gsync
