#include "transport_c10d.h"

#include <numeric>
#include <thread>
#include <utility>
#include <vector>

namespace gsync {
namespace {

// A collective of Gloo: its future tells when it has ended, without a thread that blocks in wait().
class HostCollective final : public Collective {
 public:
  HostCollective(c10::intrusive_ptr<c10d::Work> work, std::shared_ptr<std::function<void()>> wake)
      : work_(std::move(work)), future_(work_->getFuture()) {
    future_->addCallback([wake = std::move(wake)](c10::ivalue::Future& /*future*/) {
      if (wake && *wake) (*wake)();
    });
  }
  bool done() const override { return future_->completed(); }
  void finish() override { future_->waitAndThrow(); }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// A collective of a host library that has to be waited for in the thread that issued it.
class BlockingCollective final : public Collective {
 public:
  explicit BlockingCollective(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}
  bool done() const override { return work_->isCompleted(); }
  void finish() override { work_->wait(); }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
};

// A collective on a device. synchronize() makes the current stream wait; wait() would block the host where the library is told so.
class DeviceCollective final : public Collective {
 public:
  explicit DeviceCollective(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}
  bool done() const override { return true; }
  void finish() override { work_->synchronize(); }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
};

// Of messages between peers; the lane's number is added. Gloo keeps those of collectives apart by itself.
constexpr int kTag = 0x67730000;

template <typename Options>
Options with_timeout(std::chrono::milliseconds timeout) {
  Options options;
  options.timeout = timeout;
  return options;
}

std::vector<int> or_own(std::vector<int> known_as, int size) {
  if (known_as.empty()) {
    known_as.resize(static_cast<size_t>(size));
    std::iota(known_as.begin(), known_as.end(), 0);
  }
  TORCH_CHECK_VALUE(known_as.size() == static_cast<size_t>(size), "C10dTransport: known_as has ", known_as.size(),
                    " entries, expected ", size);
  return known_as;
}

}  // namespace

C10dTransport::C10dTransport(c10::intrusive_ptr<c10d::Backend> main, c10::intrusive_ptr<c10d::Backend> gather, int rank, int size,
                             std::chrono::milliseconds timeout, bool owned, std::vector<int> known_as)
    : peers_{{rank, size, kTag, timeout, or_own(known_as, size)}, {rank, size, kTag + 1, timeout, or_own(known_as, size)}},
      name_(main->getBackendName()),
      num_lanes_(main == gather ? 1 : 2),
      size_(size),
      timeout_(timeout),
      owned_(owned) {
  for (const auto& backend : {main, gather}) {
    TORCH_CHECK_VALUE(backend->getRank() == rank && backend->getSize() == size,
                      "C10dTransport: expected a group where this process is rank ", rank, " of ", size,
                      ", got one where it is rank ", backend->getRank(), " of ", backend->getSize());
  }
  lanes_[0] = std::move(main);
  lanes_[1] = std::move(gather);
}

C10dTransport::~C10dTransport() { abort(); }

void C10dTransport::set_wake(std::function<void()> wake) {
  std::lock_guard<std::mutex> lock(mutex_);
  wake_ = std::make_shared<std::function<void()>>(std::move(wake));
}

c10::intrusive_ptr<c10d::Backend> C10dTransport::lane(int idx) {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(lanes_[idx], "the process group was aborted");
  return lanes_[idx];
}

std::shared_ptr<Collective> C10dTransport::under_way(c10::intrusive_ptr<c10d::Work> work, const at::Tensor& tensor) {
  if (!tensor.is_cpu()) return std::make_shared<DeviceCollective>(std::move(work));
  if (!any_thread()) return std::make_shared<BlockingCollective>(std::move(work));
  return std::make_shared<HostCollective>(std::move(work), wake());
}

// Gloo ends its record of a collective in a thread of its own after it has told of the result, by when a profiler may have been
// stopped and its memory given back. Flow's own range stands for the collective.
at::RecordFunctionGuard C10dTransport::hide_from_profilers() const {
  return at::RecordFunctionGuard(at::isRecordFunctionEnabled() && !any_thread());
}

std::shared_ptr<std::function<void()>> C10dTransport::wake() {
  std::lock_guard<std::mutex> lock(mutex_);
  return wake_;
}

std::shared_ptr<Collective> C10dTransport::all_reduce(const at::Tensor& payload) {
  const at::RecordFunctionGuard unseen = hide_from_profilers();
  std::vector<at::Tensor> tensors{payload};
  return under_way(lane(0)->allreduce(tensors, with_timeout<c10d::AllreduceOptions>(timeout_)), payload);
}

std::shared_ptr<Collective> C10dTransport::all_to_all(const at::Tensor& out, const at::Tensor& in) {
  if (any_thread() && out.is_cpu()) return peers_[0].exchange(*lane(0), out.chunk(size_), in.chunk(size_), wake());
  at::Tensor output = out;
  at::Tensor input = in;
  std::vector<int64_t> equal_splits;
  return under_way(
      lane(0)->alltoall_base(output, input, equal_splits, equal_splits, with_timeout<c10d::AllToAllOptions>(timeout_)), out);
}

std::shared_ptr<Collective> C10dTransport::all_gather(const at::Tensor& out, const at::Tensor& in) {
  if (any_thread() && out.is_cpu()) {
    return peers_[1].exchange(*lane(1), out.chunk(size_), std::vector<at::Tensor>(size_, in), wake());
  }
  at::Tensor output = out;
  at::Tensor input = in;
  return under_way(lane(1)->_allgather_base(output, input, with_timeout<c10d::AllgatherOptions>(timeout_)), out);
}

std::shared_ptr<Collective> C10dTransport::all_reduce_sparse(const at::Tensor& gradient) {
  const at::RecordFunctionGuard unseen = hide_from_profilers();
  std::vector<at::Tensor> tensors{gradient};
  const auto options = with_timeout<c10d::AllreduceOptions>(timeout_);
  // Only Gloo's all_reduce takes a sparse tensor; NCCL's process group has an entry of its own.
  if (gradient.is_cpu()) return under_way(lane(0)->allreduce(tensors, options), gradient);
  return under_way(lane(0)->allreduce_sparse(tensors, options), gradient);
}

void C10dTransport::abort() noexcept {
  c10::intrusive_ptr<c10d::Backend> lanes[2];
  {
    std::lock_guard<std::mutex> lock(mutex_);
    std::swap(lanes[0], lanes_[0]);
    std::swap(lanes[1], lanes_[1]);
  }
  if (!lanes[0]) return;
  for (PeerLane& peers : peers_) peers.abort();
  if (owned_ && !any_thread()) {
    for (auto& backend : lanes) {
      try {
        backend->abort();
      } catch (...) {  // a library that cannot abort: letting go is all there is
      }
    }
    return;
  }
  // Gloo cannot abort, but closes its connections when the group is destroyed, which the other ranks notice at once. The
  // destructor waits for collectives of Gloo's own under way, at most the time-out, so it runs in a thread of its own. That
  // thread owns all it touches, so the process may end while it waits.
  try {
    std::thread([main = std::move(lanes[0]), gather = std::move(lanes[1])]() mutable {
      main.reset();
      gather.reset();
    }).detach();
  } catch (...) {  // no thread to be had: destroy here
  }
}

}  // namespace gsync
