// Three transports as one, for ranks that share hosts: over all ranks, over those of this host, and over those of equal local rank
// on all hosts.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "transport.h"

namespace gsync {

/// Where a rank stands among H hosts of G ranks each. It owns chunk local_rank * num_hosts + host.
struct HostPlace {
  int local_rank = 0;
  int ranks_per_host = 1;
  int host = 0;
  int num_hosts = 1;
};

class HierarchicalTransport final : public Transport {
 public:
  /// Args:
  ///   all: over all ranks: sparse gradients, what has another exchange, and what is said about errors
  ///   inner: over the ranks of this host, by local rank
  ///   outer: over the ranks of this local rank, by host
  HierarchicalTransport(std::shared_ptr<Transport> all, std::shared_ptr<Transport> inner, std::shared_ptr<Transport> outer,
                        HostPlace place)
      : all_(std::move(all)), inner_(std::move(inner)), outer_(std::move(outer)), place_(place) {
    TORCH_CHECK_VALUE(all_ && inner_ && outer_, "HierarchicalTransport: expected three transports");
    TORCH_CHECK_VALUE(
        place.local_rank >= 0 && place.local_rank < place.ranks_per_host && place.host >= 0 && place.host < place.num_hosts,
        "HierarchicalTransport: expected local_rank below ranks_per_host and host below num_hosts, got ", place.local_rank,
        " of ", place.ranks_per_host, " and ", place.host, " of ", place.num_hosts);
  }

  const std::shared_ptr<Transport>& all() const { return all_; }
  const std::shared_ptr<Transport>& inner() const { return inner_; }
  const std::shared_ptr<Transport>& outer() const { return outer_; }
  const HostPlace& place() const { return place_; }

  std::string name() const override { return all_->name(); }
  int num_lanes() const override { return std::min(inner_->num_lanes(), outer_->num_lanes()); }
  bool any_thread() const override { return all_->any_thread() && inner_->any_thread() && outer_->any_thread(); }
  void set_wake(std::function<void()> wake) override {
    for (const auto* transport : {&all_, &inner_, &outer_}) (*transport)->set_wake(wake);
  }

  std::shared_ptr<Collective> all_reduce(const at::Tensor& payload) override { return all_->all_reduce(payload); }
  std::shared_ptr<Collective> all_to_all(const at::Tensor& out, const at::Tensor& in) override {
    return all_->all_to_all(out, in);
  }
  std::shared_ptr<Collective> all_gather(const at::Tensor& out, const at::Tensor& in) override {
    return all_->all_gather(out, in);
  }
  std::shared_ptr<Collective> all_reduce_sparse(const at::Tensor& gradient) override { return all_->all_reduce_sparse(gradient); }

  std::string async_error() override {
    for (const auto* transport : {&all_, &inner_, &outer_}) {
      std::string error = (*transport)->async_error();
      if (!error.empty()) return error;
    }
    return {};
  }
  void abort() noexcept override {
    for (const auto* transport : {&inner_, &outer_, &all_}) (*transport)->abort();
  }

 private:
  std::shared_ptr<Transport> all_;
  std::shared_ptr<Transport> inner_;
  std::shared_ptr<Transport> outer_;
  HostPlace place_;
};

}  // namespace gsync
